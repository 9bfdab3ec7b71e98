//! A chart: curves over steps as SVG, with axes, a legend, and the numbers for the page's hover script.

use std::fmt::Write;

use super::curve::Curve;
use crate::record::axis::{Axis, Scale, Unit};
use crate::record::escape::{html, script};

/// Room beside the plot for labels, in the SVG's units.
const LEFT: f64 = 58.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 36.0;

/// One chart of the page.
pub(super) struct Chart<'a> {
    /// The title, and in small letters the chart's mark on the page.
    pub(super) title: &'a str,
    pub(super) curves: Vec<Curve>,
    pub(super) unit: Unit,
    /// Whether the axis begins at 0.
    pub(super) from_zero: bool,
    /// Whether curves of many points are drawn faint, with their running mean over them.
    pub(super) smooth: bool,
    /// Whether there is a switch to a logarithmic axis.
    pub(super) log: bool,
    /// The first and the last step: the same for all charts of a page, so that they can be compared.
    pub(super) steps: (f64, f64),
    /// How much of the page it takes.
    pub(super) size: Size,
}

/// How large a chart is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Size {
    /// As wide as the page.
    Large,
    /// As wide as the page, and low.
    Low,
    /// As wide as the page, above another chart.
    Strip,
    /// Half as wide.
    Half,
}

impl Size {
    /// Width and height, in the SVG's units.
    fn units(self) -> (f64, f64) {
        match self {
            Size::Large => (1040.0, 340.0),
            Size::Low => (1040.0, 200.0),
            Size::Strip => (1040.0, 110.0),
            Size::Half => (510.0, 250.0),
        }
    }
}

/// A curve as it is drawn: its colour's number, and whether it stands in the background.
struct Drawn {
    curve: Curve,
    colour: usize,
    faint: bool,
}

impl Chart<'_> {
    /// The chart as HTML; empty if there is nothing to draw.
    pub(super) fn render(&self) -> String {
        let drawn = self.drawn();
        if drawn.iter().all(|drawn| drawn.curve.points.is_empty()) {
            return String::new();
        }
        let mark = self.title.to_ascii_lowercase().replace(|c: char| !c.is_ascii_alphanumeric(), "-");
        let positive = drawn.iter().all(|drawn| drawn.curve.points.iter().all(|point| point.1 > 0.0));
        let scales: &[Scale] =
            if self.log && positive { &[Scale::Linear, Scale::Log] } else { &[Scale::Linear] };
        let mut out =
            format!("<section class=\"card chart{}\">\n", if self.size == Size::Half { "" } else { " wide" });
        if scales.len() > 1 {
            for (i, name) in ["linear", "log"].iter().enumerate() {
                let checked = if i == 0 { " checked" } else { "" };
                let _ = write!(
                    out,
                    "<input type=\"radio\" name=\"{mark}-scale\" id=\"{mark}-{name}\" class=\"pick-{name}\"{checked}>"
                );
            }
        }
        let _ = write!(out, "<header><h2>{}</h2>{}", html(self.title), self.legend(&drawn));
        if scales.len() > 1 {
            let _ = write!(
                out,
                "<span class=\"switch\"><label for=\"{mark}-linear\">linear</label><label for=\"{mark}-log\">log</label></span>"
            );
        }
        out += "</header>\n";
        for &scale in scales {
            out += &self.svg(&drawn, scale);
        }
        out += &self.notes();
        out += &self.data(&drawn);
        out + "</section>\n"
    }

    fn drawn(&self) -> Vec<Drawn> {
        let mut drawn = Vec::new();
        for (i, curve) in self.curves.iter().enumerate() {
            let colour = match curve.name.as_str() {
                "train" => 0,
                "val" => 1,
                "test" => 2,
                _ if self.curves.len() > 1 => 3 + i % 3,
                _ => 0,
            };
            let smoothed = if self.smooth { curve.smoothed() } else { None };
            drawn.push(Drawn { curve: curve.clone().thinned(), colour, faint: smoothed.is_some() });
            if let Some(smoothed) = smoothed {
                drawn.push(Drawn { curve: smoothed.thinned(), colour, faint: false });
            }
        }
        // The faint ones first, so that they lie beneath.
        drawn.sort_by_key(|drawn| !drawn.faint);
        drawn
    }

    fn legend(&self, drawn: &[Drawn]) -> String {
        let named = drawn.iter().filter(|drawn| !drawn.faint && !drawn.curve.points.is_empty());
        // A curve that is all there is of its metric, such as the rate, is named by the title.
        let parts = ["train", "val", "test"];
        if named.clone().count() < 2 && !named.clone().any(|drawn| parts.contains(&drawn.curve.name.as_str()))
        {
            return String::new();
        }
        let items = named
            .map(|drawn| format!("<span class=\"key c{}\">{}</span>", drawn.colour, html(&drawn.curve.name)));
        format!("<span class=\"legend\">{}</span>", items.collect::<String>())
    }

    /// The axes of the steps and of the values.
    fn axes(&self, drawn: &[Drawn], scale: Scale, width: f64, height: f64) -> (Axis, Axis) {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for (from, to) in drawn.iter().filter_map(|drawn| match drawn.faint {
            true => drawn.curve.usual_range(),
            false => range(&drawn.curve),
        }) {
            (low, high) = (low.min(from), high.max(to));
        }
        match scale {
            Scale::Log => (low, high) = (low / 1.05, high * 1.05),
            Scale::Linear => {
                let room = (high - low) * 0.04;
                let ceiling = if self.unit == Unit::Percent && high <= 1.0 { 1.0 } else { f64::INFINITY };
                low = if self.from_zero && low >= 0.0 { 0.0 } else { low - room };
                high = (high + room).min(ceiling);
            }
        }
        let x = Axis::new(Scale::Linear, self.steps.0, self.steps.1, LEFT, width - RIGHT);
        (x, Axis::new(scale, low, high, height - BOTTOM, TOP))
    }

    fn svg(&self, drawn: &[Drawn], scale: Scale) -> String {
        let (width, height) = self.size.units();
        let (x, y) = self.axes(drawn, scale, width, height);
        let (right, bottom) = (width - RIGHT, height - BOTTOM);
        let class = if scale == Scale::Log { "log" } else { "linear" };
        let label = html(self.title);
        let mut out = format!(
            "<svg class=\"{class}\" viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{label} over steps\" \
             data-left=\"{LEFT}\" data-right=\"{right}\" data-top=\"{TOP}\" data-bottom=\"{bottom}\">\n"
        );
        let n_ticks = match self.size {
            Size::Large => 6,
            Size::Low | Size::Half => 4,
            Size::Strip => 2,
        };
        let (ticks, gap) = y.ticks(n_ticks);
        for &tick in &ticks {
            let at = y.place(tick);
            let text = self.unit.text(tick, if gap > 0.0 { gap } else { tick });
            let _ = writeln!(
                out,
                "<path class=\"grid\" d=\"M{LEFT} {at:.1}H{right}\"/><text class=\"y\" x=\"{}\" y=\"{:.1}\">{text}</text>",
                LEFT - 8.0,
                at + 4.0
            );
        }
        let (ticks, gap) = x.ticks(if self.size == Size::Half { 5 } else { 10 });
        for &tick in ticks.iter().filter(|tick| tick.fract() == 0.0) {
            let (at, text) = (x.place(tick), Unit::Plain.text(tick, gap));
            let text = if tick >= 10_000.0 { Unit::Short.text(tick, gap) } else { text };
            let _ = writeln!(
                out,
                "<path class=\"tick\" d=\"M{at:.1} {bottom}v5\"/><text class=\"x\" x=\"{at:.1}\" y=\"{}\">{text}</text>",
                bottom + 18.0
            );
        }
        let middle = (LEFT + right) / 2.0;
        let _ = write!(
            out,
            "<path class=\"base\" d=\"M{LEFT} {bottom}H{right}\"/>\
             <text class=\"x name\" x=\"{middle}\" y=\"{}\">step</text>\n<g class=\"lines\">\n",
            height - 3.0
        );
        for drawn in drawn {
            out += &line(drawn, &x, &y, (TOP, bottom));
        }
        out + "</g><g class=\"hover\"></g></svg>\n"
    }

    /// What the picture does not show.
    fn notes(&self) -> String {
        let left_out = self.curves.iter().filter(|curve| curve.left_out > 0);
        let texts = left_out.map(|curve| format!("{} of {} not finite", curve.left_out, html(&curve.name)));
        let texts: Vec<String> = texts.collect();
        if texts.is_empty() { String::new() } else { format!("<p class=\"note\">{}</p>\n", texts.join("; ")) }
    }

    /// The numbers, for the script that shows them under the pointer.
    fn data(&self, drawn: &[Drawn]) -> String {
        let (x, _) = self.axes(drawn, Scale::Linear, 2.0 * (LEFT + RIGHT), 1.0);
        let series: Vec<_> = drawn
            .iter()
            .filter(|drawn| !drawn.faint)
            .map(|drawn| {
                let steps: Vec<u64> = drawn.curve.points.iter().map(|point| point.0 as u64).collect();
                let values: Vec<f64> = drawn.curve.points.iter().map(|point| significant(point.1)).collect();
                serde_json::json!({"name": drawn.curve.name, "colour": drawn.colour, "steps": steps, "values": values})
            })
            .collect();
        let unit = if self.unit == Unit::Percent { "percent" } else { "plain" };
        let data = serde_json::json!({"ends": x.ends(), "unit": unit, "series": series});
        format!("<script type=\"application/json\">{}</script>\n", script(&data.to_string()))
    }
}

/// All values of a curve.
fn range(curve: &Curve) -> Option<(f64, f64)> {
    let values = || curve.points.iter().map(|point| point.1);
    (!curve.points.is_empty())
        .then(|| (values().fold(f64::INFINITY, f64::min), values().fold(f64::NEG_INFINITY, f64::max)))
}

/// Rounded to what a person compares.
fn significant(x: f64) -> f64 {
    format!("{x:.4e}").parse().unwrap_or(x)
}

/// The path of a curve, and dots where points are few. Places are kept near the plot: what lies outside is cut off by
/// the frame, however far outside it is.
fn line(drawn: &Drawn, x: &Axis, y: &Axis, (top, bottom): (f64, f64)) -> String {
    let place = |&(step, value): &(f64, f64)| (x.place(step), y.place(value).clamp(top - 1.0, bottom + 1.0));
    let places: Vec<(f64, f64)> = drawn.curve.points.iter().map(place).collect();
    let class = format!("c{}{}", drawn.colour, if drawn.faint { " faint" } else { "" });
    let mut path = String::new();
    for (i, (x, y)) in places.iter().enumerate() {
        let _ = write!(path, "{}{x:.1} {y:.1}", if i == 0 { "M" } else { "L" });
    }
    let mut out = format!("<path class=\"{class}\" d=\"{path}\"/>\n");
    if !drawn.faint && places.len() <= 40 {
        for (x, y) in places {
            let _ = write!(out, "<circle class=\"{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.6\"/>");
        }
        out.push('\n');
    }
    out
}
