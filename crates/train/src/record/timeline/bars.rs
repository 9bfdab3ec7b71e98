//! How bars look: a name and a colour for each kind.

use super::lettering::INK;
use super::step::{Bar, BarKind};

impl BarKind {
    /// All of them, in the order of the legend.
    pub(super) const ALL: [BarKind; 7] = [
        BarKind::Forward,
        BarKind::InputGrad,
        BarKind::WeightGrad,
        BarKind::Update,
        BarKind::Exchange,
        BarKind::Other,
        BarKind::Waiting,
    ];

    /// Its name in the legend.
    pub(super) fn name(self) -> &'static str {
        match self {
            BarKind::Forward => "forward",
            BarKind::InputGrad => "input gradients",
            BarKind::WeightGrad => "weight gradients",
            BarKind::Update => "update",
            BarKind::Exchange => "exchange",
            BarKind::Other => "load, add, copy",
            BarKind::Waiting => "waiting",
        }
    }

    /// The colour as red, green and blue, and whether dark letters are legible on it. They differ in lightness too.
    fn colour(self) -> ([u8; 3], bool) {
        match self {
            BarKind::Forward => ([0x3f, 0x7c, 0xdf], false),
            BarKind::InputGrad => ([0x12, 0x93, 0x66], false),
            BarKind::WeightGrad => ([0xf2, 0xb4, 0x31], true),
            BarKind::Update => ([0xa3, 0x46, 0xc7], false),
            BarKind::Exchange => ([0xe0, 0x5a, 0x2b], false),
            BarKind::Other => ([0x8a, 0x94, 0xa6], false),
            BarKind::Waiting => ([0xc9, 0xcf, 0xd9], true),
        }
    }

    /// What fills a bar, and the colour of letters in it. Later chunks of a rank are lighter.
    pub(super) fn fill(self, (chunk, chunks): (usize, usize)) -> (String, &'static str) {
        let (rgb, dark) = self.colour();
        if self == BarKind::Waiting {
            return ("url(#waiting)".into(), INK);
        }
        let share = if chunks > 1 { 0.62 * chunk as f64 / (chunks - 1) as f64 } else { 0.0 };
        let [r, g, b] = rgb.map(|c| (f64::from(c) + (255.0 - f64::from(c)) * share).round() as u8);
        (format!("#{r:02x}{g:02x}{b:02x}"), if dark || share > 0.3 { INK } else { "#ffffff" })
    }
}

impl Bar {
    /// Whether it is a part of a pass over a microbatch.
    pub(super) fn is_pass(&self) -> bool {
        match self.kind {
            BarKind::Forward | BarKind::InputGrad | BarKind::WeightGrad => true,
            BarKind::Update | BarKind::Exchange | BarKind::Other | BarKind::Waiting => false,
        }
    }
}
