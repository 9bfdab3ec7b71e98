//! The picture: SVG with everything as attributes, so that browsers, slides and converters show the same.
//!
//! It is 1280 units wide and as high as it must be. Text that would not fit is cut off or left out.

use std::fmt::Write;

use super::caption::{heading, left_out, title};
use super::lettering::{Lettering, SOFT, duration, fitted, text, unit, width};
use super::step::{Bar, BarKind, RankRow, StepTimeline};
use crate::record::axis::{Axis, Scale, Unit};
use crate::record::escape::html;

const WIDTH: f64 = 1280.0;
const MARGIN: f64 = 28.0;
/// Between rows' names or figures and bars.
const GAP: f64 = 14.0;
/// A column of figures behind the rows.
const FIGURES: f64 = 74.0;

const FONT: &str = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif";
const LINE: &str = "#e4e7ec";
const BLANK: &str = "#f6f7f9";

/// Rows share so much height, within limits.
const ROWS_HEIGHT: f64 = 400.0;
const ROW_HEIGHT: (f64, f64) = (11.0, 44.0);

/// Bars nearer to each other than this are one if they are alike, and narrower ones are not drawn.
const HAIR: f64 = 0.3;

/// The smallest and the largest size of numbers inside bars.
const NUMBER: (f64, f64) = (8.0, 13.0);

/// Draws one step, or several above each other on the same scale.
pub fn svg(steps: &[StepTimeline]) -> String {
    let page = Page::new(steps);
    let mut out = String::new();
    let mut y = MARGIN + 16.0;
    text(
        &mut out,
        &Lettering { bold: true, ..Lettering::new(MARGIN, y, 22.0) },
        &fitted(&title(steps), 22.0, WIDTH - 2.0 * MARGIN),
    );
    y = legend(&mut out, steps, y + 30.0) + 6.0;
    for step in steps {
        y = page.step(&mut out, step, y);
    }
    let height = (y + MARGIN - 8.0).ceil();
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"{FONT}\" role=\"img\" aria-label=\"{label}\">\n\
         <defs><pattern id=\"waiting\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">\
         <rect width=\"6\" height=\"6\" fill=\"#eef0f4\"/><rect width=\"1.8\" height=\"6\" fill=\"#c9cfd9\"/></pattern></defs>\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n{out}</svg>\n",
        label = html(&title(steps)),
    )
}

/// What all steps have in common: places and scale.
struct Page {
    /// Where bars begin and end.
    left: f64,
    right: f64,
    /// The longest step.
    us: f64,
    /// Whether there is a column for exchanges.
    exchanges: bool,
    /// The size of numbers in bars; where that does not fit, they are smaller.
    number: f64,
}

impl Page {
    fn new(steps: &[StepTimeline]) -> Page {
        let rows = || steps.iter().flat_map(|step| &step.rows);
        let name = |row: &RankRow| width(&row.name[0], 13.0).max(width(&row.name[1], 10.0));
        let names = rows().map(name).fold(48.0, f64::max).min(240.0);
        let exchanges = rows().any(|row| row.exchange >= 0.005);
        let figures = FIGURES * if exchanges { 2.0 } else { 1.0 };
        let us = steps.iter().map(|step| step.took_us).fold(f64::MIN_POSITIVE, f64::max);
        let (left, right) = (MARGIN + names + GAP, WIDTH - MARGIN - figures);
        let mut page = Page { left, right, us, exchanges, number: NUMBER.1 };
        // One size for nearly all, not the largest one for each.
        let sizes = rows().flat_map(|row| page.runs(&row.bars)).filter_map(|run| page.number_size(&run));
        let mut sizes: Vec<f64> = sizes.filter(|size| *size >= NUMBER.0).collect();
        sizes.sort_by(f64::total_cmp);
        page.number = sizes.get(sizes.len() / 8).map_or(NUMBER.1, |size| size.min(NUMBER.1));
        page
    }

    /// The size of the number that fits into the widest bar of a pass.
    fn number_size(&self, run: &[Bar]) -> Option<f64> {
        let widest = self.widest(run).filter(|bar| bar.is_pass())?;
        let digits = widest.microbatch?.to_string().len() as f64;
        Some((self.wide(widest) - 2.0) / (0.62 * digits))
    }

    fn wide(&self, bar: &Bar) -> f64 {
        self.at(bar.end_us) - self.at(bar.start_us)
    }

    fn widest<'a>(&self, run: &'a [Bar]) -> Option<&'a Bar> {
        run.iter().max_by(|a, b| self.wide(a).total_cmp(&self.wide(b)))
    }

    /// Where a time is.
    fn at(&self, us: f64) -> f64 {
        self.left + (us / self.us).clamp(0.0, 1.0) * (self.right - self.left)
    }

    /// A step from `y` downwards; gives where it ends.
    fn step(&self, out: &mut String, step: &StepTimeline, y: f64) -> f64 {
        let mut y = y + 26.0;
        let room = self.right - MARGIN;
        text(
            out,
            &Lettering { bold: true, ..Lettering::new(MARGIN, y, 14.0) },
            &fitted(&heading(step), 14.0, room),
        );
        let figures = [Some("idle"), self.exchanges.then_some("exchange")];
        for (k, name) in figures.into_iter().flatten().enumerate() {
            let at = self.right + FIGURES * (k + 1) as f64;
            text(out, &Lettering { colour: SOFT, anchor: "end", ..Lettering::new(at, y, 12.0) }, name);
        }
        y += 12.0;
        let (least, most) = ROW_HEIGHT;
        let each = (ROWS_HEIGHT / step.rows.len().max(1) as f64).clamp(least, most);
        let gap = (each * 0.16).max(1.5);
        let bottom = y + each * step.rows.len() as f64;
        let ticks = self.ticks();
        for row in &step.rows {
            let (w, h) = (self.at(step.took_us) - self.left, each - gap);
            let _ = writeln!(
                out,
                "<rect x=\"{:.1}\" y=\"{y:.1}\" width=\"{w:.1}\" height=\"{h:.1}\" fill=\"{BLANK}\"/>",
                self.left
            );
            for (at, _) in &ticks {
                let _ = write!(out, "<path d=\"M{at:.1} {y:.1}v{each:.1}\" stroke=\"{LINE}\"/>");
            }
            out.push('\n');
            self.row(out, row, y, h);
            y += each;
        }
        self.axis(out, &ticks, bottom);
        y = bottom + 36.0;
        if let Some((n, which)) = step.left_out {
            text(
                out,
                &Lettering { colour: SOFT, ..Lettering::new(MARGIN, y + 6.0, 12.0) },
                &left_out(step, n, which),
            );
            y += 20.0;
        }
        y
    }

    fn row(&self, out: &mut String, row: &RankRow, y: f64, h: f64) {
        let [name, rest] = &row.name;
        let (end, room) = (self.left - GAP, self.left - GAP - MARGIN);
        let size = (h * 0.5).clamp(8.5, 13.0);
        // Two lines if there is room for them.
        let middle = y + h / 2.0;
        let name_at = if rest.is_empty() || h < 25.0 { middle + size * 0.36 } else { middle - 1.5 };
        let right = |y, size| Lettering { anchor: "end", ..Lettering::new(end, y, size) };
        match rest.as_str() {
            rest if !rest.is_empty() && h < 25.0 => {
                text(out, &right(name_at, size), &fitted(&format!("{name} · {rest}"), size, room));
            }
            rest => {
                text(out, &right(name_at, size), &fitted(name, size, room));
                let small = Lettering { colour: SOFT, ..right(middle + 11.5, 10.0) };
                text(out, &small, &fitted(rest, 10.0, room));
            }
        }
        let shares = [Some(row.idle), self.exchanges.then_some(row.exchange)];
        for (k, share) in shares.into_iter().flatten().enumerate() {
            let at = Lettering::new(self.right + FIGURES * (k + 1) as f64, middle + size * 0.36, size);
            text(out, &Lettering { anchor: "end", ..at }, &format!("{:.0} %", 100.0 * share));
        }
        for run in self.runs(&row.bars) {
            self.run(out, &run, y, h);
        }
    }

    /// Bars that belong together: those of one pass, whatever interrupts it, and everything else by itself. Bars that touch are one.
    fn runs(&self, bars: &[Bar]) -> Vec<Vec<Bar>> {
        let mut runs: Vec<Vec<Bar>> = Vec::new();
        // The run that the last pass is in.
        let mut pass: Option<usize> = None;
        for bar in bars {
            let alike = |b: &Bar| (b.kind, b.microbatch, b.chunk) == (bar.kind, bar.microbatch, bar.chunk);
            let is_pass = bar.is_pass();
            let at = match pass.filter(|_| is_pass) {
                Some(at) if runs[at].last().is_some_and(&alike) => at,
                _ => {
                    runs.push(Vec::new());
                    runs.len() - 1
                }
            };
            if is_pass {
                pass = Some(at);
            }
            let run = &mut runs[at];
            match run.last_mut() {
                Some(last) if self.at(bar.start_us) - self.at(last.end_us) < HAIR => last.end_us = bar.end_us,
                _ => run.push(*bar),
            }
        }
        runs
    }

    fn run(&self, out: &mut String, run: &[Bar], y: f64, h: f64) {
        let Some(widest) = self.widest(run) else { return };
        let (fill, ink) = widest.kind.fill(widest.chunk);
        for bar in run.iter().filter(|bar| self.wide(bar) >= HAIR) {
            let (x, w) = (self.at(bar.start_us), self.wide(bar));
            // A hair of background between bars that follow each other.
            let shown = if w > 3.0 { w - 0.6 } else { w };
            let of = bar.microbatch.map_or(String::new(), |m| format!(" of microbatch {m}"));
            let (name, us) = (bar.kind.name(), duration(bar.end_us - bar.start_us));
            let _ = writeln!(
                out,
                "<rect x=\"{x:.2}\" y=\"{y:.1}\" width=\"{shown:.2}\" height=\"{h:.1}\" fill=\"{fill}\"><title>{name}{of}: {us}</title></rect>"
            );
        }
        let (Some(number), Some(fits)) = (widest.microbatch, self.number_size(run)) else { return };
        let size = fits.min(self.number).min(0.8 * h);
        if size >= NUMBER.0 {
            let x = (self.at(widest.start_us) + self.at(widest.end_us)) / 2.0;
            let at = Lettering {
                colour: ink,
                anchor: "middle",
                ..Lettering::new(x, y + h / 2.0 + size * 0.36, size)
            };
            text(out, &at, &number.to_string());
        }
    }

    /// Places and texts of the axis.
    fn ticks(&self) -> Vec<(f64, String)> {
        let (by, _) = unit(self.us);
        let axis = Axis::new(Scale::Linear, 0.0, self.us / by, self.left, self.right);
        let (ticks, gap) = axis.ticks(10);
        ticks.into_iter().map(|tick| (axis.place(tick), Unit::Plain.text(tick, gap))).collect()
    }

    fn axis(&self, out: &mut String, ticks: &[(f64, String)], y: f64) {
        let _ = writeln!(out, "<path d=\"M{:.1} {y:.1}H{:.1}\" stroke=\"#98a2b3\"/>", self.left, self.right);
        for (at, label) in ticks {
            let _ = write!(out, "<path d=\"M{at:.1} {y:.1}v5\" stroke=\"#98a2b3\"/>");
            text(
                out,
                &Lettering { colour: SOFT, anchor: "middle", ..Lettering::new(*at, y + 18.0, 12.0) },
                label,
            );
        }
        let (_, name) = unit(self.us);
        text(
            out,
            &Lettering { colour: SOFT, anchor: "end", ..Lettering::new(self.left - GAP, y + 18.0, 12.0) },
            name,
        );
    }
}

/// A key for each kind of bar that occurs, in as many lines as it takes; gives where it ends.
fn legend(out: &mut String, steps: &[StepTimeline], mut y: f64) -> f64 {
    let bars = || steps.iter().flat_map(|step| &step.rows).flat_map(|row| &row.bars);
    let mut keys: Vec<(String, &str)> = Vec::new();
    for kind in BarKind::ALL {
        if bars().any(|bar| bar.kind == kind) {
            keys.push((kind.fill((0, 1)).0, kind.name()));
        }
    }
    if bars().any(|bar| bar.chunk.1 > 1) {
        keys.push((BarKind::Forward.fill((1, 2)).0, "lighter: a later chunk of the stage"));
    }
    let mut x = MARGIN;
    for (fill, name) in keys {
        let wide = 20.0 + width(name, 12.0) + 22.0;
        if x + wide > WIDTH - MARGIN && x > MARGIN {
            (x, y) = (MARGIN, y + 20.0);
        }
        let _ = writeln!(
            out,
            "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"14\" height=\"12\" fill=\"{fill}\"/>",
            y - 10.0
        );
        text(out, &Lettering { colour: SOFT, ..Lettering::new(x + 20.0, y, 12.0) }, name);
        x += wide;
    }
    y
}
