//! What a classifier takes for what: a heat map of the confusion matrix, the worst mistakes, and a table of classes.

use std::fmt::Write;

use crate::metrics::Confusion;
use crate::record::escape::html;
use crate::record::wording::thousands;

/// The most classes of a heat map; more would be finer than a page shows.
const HEAT_MAX: usize = 64;
/// The most classes whose counts stand in the cells.
const NUMBERS_MAX: usize = 20;
/// How many mistakes are listed.
const PAIRS: usize = 12;
/// The most rows of the table of classes.
const ROWS_MAX: usize = 200;
/// The longest that a class's name is drawn in the map.
const NAME_MAX: usize = 14;

/// All of it as HTML.
pub(super) fn render(confusion: &Confusion, names: &[String]) -> String {
    let name = |class: usize| names.get(class).cloned().unwrap_or_else(|| class.to_string());
    let mut out = String::new();
    if (2..=HEAT_MAX).contains(&confusion.classes()) {
        out += &heat(confusion, &name);
    }
    out += &pairs(confusion, &name);
    out + &table(confusion, &name)
}

fn heat(confusion: &Confusion, name: &dyn Fn(usize) -> String) -> String {
    let n = confusion.classes();
    let cut = |class: usize| -> String {
        let name = name(class);
        let long = name.chars().count() > NAME_MAX;
        if long { name.chars().take(NAME_MAX - 1).chain(['…']).collect() } else { name }
    };
    let longest = (0..n).map(|class| cut(class).chars().count()).max().unwrap_or(0) as f64;
    let cell = (460.0 / n as f64).min(46.0);
    // Names of every so many classes, so that lines of text do not touch.
    let every = (13.0 / cell).ceil().max(1.0);
    let slanted = longest * 7.0 > cell * every;
    // Letters are about 6.6 units wide; the page's row has 510 units.
    let (left, top) = (longest * 6.6 + 30.0, 24.0 + if slanted { longest * 4.9 + 8.0 } else { 8.0 });
    let tail = if slanted { longest * 4.9 } else { 0.0 };
    let (width, height) = (left + n as f64 * cell + tail.max(8.0), top + n as f64 * cell + 8.0);
    let mut out = format!(
        "<section class=\"card\"><header><h2>Confusion</h2></header>\n\
         <svg class=\"heat\" viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\" aria-label=\"confusion matrix\">\n\
         <text class=\"x name\" x=\"{:.1}\" y=\"12\">predicted</text>\
         <text class=\"x name\" transform=\"translate(12 {:.1}) rotate(-90)\">truth</text>\n",
        left + n as f64 * cell / 2.0,
        top + n as f64 * cell / 2.0
    );
    for class in (0..n).step_by(every as usize) {
        let (text, at) = (html(&cut(class)), (class as f64 + 0.5) * cell);
        let turn = if slanted { " rotate(-45)" } else { "" };
        let anchor = if slanted { "slant" } else { "x" };
        let _ = writeln!(
            out,
            "<text class=\"y\" x=\"{:.1}\" y=\"{:.1}\">{text}</text>\
             <text class=\"{anchor}\" transform=\"translate({:.1} {:.1}){turn}\">{text}</text>",
            left - 6.0,
            top + at + 4.0,
            left + at,
            top - 6.0
        );
    }
    for truth in 0..n {
        let support = confusion.support(truth);
        for (predicted, &count) in confusion.row(truth).iter().enumerate().filter(|(_, count)| **count > 0) {
            let share = count as f64 / support as f64;
            let (x, y) = (left + predicted as f64 * cell, top + truth as f64 * cell);
            let class = if truth == predicted { "right" } else { "wrong" };
            // The root, because most mistakes are a few percent and should still be seen.
            let _ = write!(
                out,
                "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{w:.1}\" height=\"{w:.1}\" \
                 fill-opacity=\"{:.2}\"><title>{} taken for {}: {} ({:.1}%)</title></rect>",
                share.sqrt().max(0.06),
                html(&name(truth)),
                html(&name(predicted)),
                thousands(count),
                share * 100.0,
                w = cell - 1.0
            );
            if n <= NUMBERS_MAX && cell >= 20.0 {
                let strong = if share > 0.4 { " strong" } else { "" };
                let size = (cell / 3.4).min(1.55 * cell / count.to_string().len() as f64).min(13.0);
                let (x, y) = (x + cell / 2.0 - 0.5, y + cell / 2.0 + size * 0.35);
                let _ = write!(
                    out,
                    "<text class=\"count{strong}\" x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size:.1}\">{count}</text>"
                );
            }
            out.push('\n');
        }
    }
    out + "</svg></section>\n"
}

fn pairs(confusion: &Confusion, name: &dyn Fn(usize) -> String) -> String {
    let pairs = confusion.worst_pairs(PAIRS);
    if pairs.is_empty() {
        return String::new();
    }
    let rows: String = pairs
        .iter()
        .map(|pair| {
            format!(
                "<tr><td>{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{:.1}%</td></tr>\n",
                html(&name(pair.truth)),
                html(&name(pair.predicted)),
                thousands(pair.count),
                pair.share * 100.0
            )
        })
        .collect();
    format!(
        "<section class=\"card\"><header><h2>Most confused</h2></header>\n<table><thead><tr><th>truth</th>\
         <th>predicted</th><th class=\"n\">times</th><th class=\"n\">of the class</th></tr></thead>\n<tbody>\n{rows}\
         </tbody></table></section>\n"
    )
}

fn table(confusion: &Confusion, name: &dyn Fn(usize) -> String) -> String {
    let n = confusion.classes();
    let share = |x: Option<f64>| x.map_or("–".into(), |x| format!("{:.1}%", x * 100.0));
    let rows: String = (0..n.min(ROWS_MAX))
        .map(|class| {
            format!(
                "<tr><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td></tr>\n",
                html(&name(class)),
                thousands(confusion.support(class)),
                share(confusion.precision(class)),
                share(confusion.recall(class))
            )
        })
        .collect();
    let more =
        if n > ROWS_MAX { format!("<p class=\"note\">and {} more</p>", n - ROWS_MAX) } else { String::new() };
    let open = if n <= NUMBERS_MAX { " open" } else { "" };
    format!(
        "<section class=\"card\"><details{open}><summary><h2>Classes</h2></summary>\n<table><thead><tr><th>class</th>\
         <th class=\"n\">samples</th><th class=\"n\">precision</th><th class=\"n\">recall</th></tr></thead>\n<tbody>\n\
         {rows}</tbody></table>{more}</details></section>\n"
    )
}
