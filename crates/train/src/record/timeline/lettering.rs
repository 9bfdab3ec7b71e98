//! Letters of a picture: where they stand, how wide they are, and durations in words. Widths are a rule of thumb, on the wide side,
//! because which font is used is only known where the picture is shown.

use std::fmt::Write;

use crate::record::escape::html;
use crate::record::wording::trimmed;

/// The colour of what is read first.
pub(super) const INK: &str = "#1c2430";
/// The colour of everything else.
pub(super) const SOFT: &str = "#667085";

/// A duration in three digits.
pub(super) fn duration(us: f64) -> String {
    let (by, name) = unit(us);
    format!("{} {name}", trimmed(us / by, 3))
}

/// The unit in which so many microseconds are legible.
pub(super) fn unit(us: f64) -> (f64, &'static str) {
    match us {
        us if us >= 2e6 => (1e6, "s"),
        us if us >= 999.5 => (1e3, "ms"),
        _ => (1.0, "µs"),
    }
}

/// Where and how a text is set.
pub(super) struct Lettering {
    pub(super) x: f64,
    pub(super) y: f64,
    pub(super) size: f64,
    pub(super) colour: &'static str,
    pub(super) anchor: &'static str,
    pub(super) bold: bool,
}

impl Lettering {
    /// Dark letters that begin at a place.
    pub(super) fn new(x: f64, y: f64, size: f64) -> Lettering {
        Lettering { x, y, size, colour: INK, anchor: "start", bold: false }
    }
}

pub(super) fn text(out: &mut String, at: &Lettering, words: &str) {
    if words.is_empty() {
        return;
    }
    let Lettering { x, y, size, colour, anchor, bold } = at;
    let weight = if *bold { " font-weight=\"600\"" } else { "" };
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size:.1}\" fill=\"{colour}\" text-anchor=\"{anchor}\"{weight}>{}</text>",
        html(words)
    );
}

/// How wide a text is, roughly.
pub(super) fn width(words: &str, size: f64) -> f64 {
    words.chars().map(letter).sum::<f64>() * size
}

/// How wide a letter is, over its size.
fn letter(c: char) -> f64 {
    match c {
        'i' | 'j' | 'l' | 't' | 'f' | 'r' | ' ' | '.' | ',' | ':' | '·' | '(' | ')' => 0.34,
        'm' | 'w' | 'M' | 'W' | '%' => 0.9,
        c if c.is_ascii_lowercase() || c.is_ascii_digit() => 0.57,
        c if c.is_ascii() => 0.72,
        // Letters of other scripts may be as wide as they are high.
        _ => 1.0,
    }
}

/// As much of a text as fits.
pub(super) fn fitted(words: &str, size: f64, room: f64) -> String {
    if width(words, size) <= room {
        return words.into();
    }
    let mut used = letter('…') * size;
    let fits = |c: &char| {
        used += letter(*c) * size;
        used <= room
    };
    words.chars().take_while(fits).chain(['…']).collect()
}
