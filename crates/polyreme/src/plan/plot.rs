//! Bars as an image: times beside each other.

use std::fmt::Write;

const WIDTH: f64 = 900.0;
const LEFT: f64 = 260.0;
const BAR: f64 = 22.0;
const GAP: f64 = 12.0;
const TOP: f64 = 46.0;

/// An image (SVG) of labelled bars. Each has the length of its value; `None` is a bar that there is not.
pub fn bars(title: &str, unit: &str, rows: &[(String, Option<f64>)]) -> String {
    let most = rows.iter().filter_map(|(_, value)| *value).fold(f64::MIN_POSITIVE, f64::max);
    let height = TOP + rows.len() as f64 * (BAR + GAP) + GAP;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"14\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>\n<text x=\"16\" y=\"28\" font-size=\"17\">{}</text>\n",
        escaped(title)
    );
    for (i, (label, value)) in rows.iter().enumerate() {
        let y = TOP + i as f64 * (BAR + GAP);
        let length = value.unwrap_or(0.0) / most * (WIDTH - LEFT - 120.0);
        let words = value.map_or("not possible".to_string(), |v| format!("{v:.1} {unit}"));
        let (middle, label) = (y + BAR * 0.72, escaped(label));
        let _ = write!(
            svg,
            "<text x=\"{:.1}\" y=\"{middle:.1}\" text-anchor=\"end\">{label}</text>\n\
             <rect x=\"{LEFT}\" y=\"{y:.1}\" width=\"{length:.1}\" height=\"{BAR}\" fill=\"#3b6ea5\"/>\n\
             <text x=\"{:.1}\" y=\"{middle:.1}\">{words}</text>\n",
            LEFT - 10.0,
            LEFT + length + 8.0
        );
    }
    svg + "</svg>\n"
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_have_lengths_and_labels() {
        let svg = bars(
            "a < b",
            "ms",
            &[("one".into(), Some(10.0)), ("two".into(), Some(5.0)), ("three".into(), None)],
        );
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n") && svg.contains("a &lt; b"));
        assert!(
            svg.contains("width=\"520.0\"")
                && svg.contains("width=\"260.0\"")
                && svg.contains("not possible")
        );
    }
}
