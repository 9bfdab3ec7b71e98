//! Axes: from numbers to places on the page, with ticks at round numbers.

use super::wording::{short, trimmed};

/// How a number becomes a place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Scale {
    /// In proportion.
    Linear,
    /// In proportion to the logarithm.
    Log,
}

/// How numbers are written beside an axis, and in what hovers over a curve.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Unit {
    /// As it is.
    Plain,
    /// As a percentage.
    Percent,
    /// With a letter for the thousands.
    Short,
}

impl Unit {
    /// The number with enough digits that neighbours `gap` apart differ.
    pub(super) fn text(self, x: f64, gap: f64) -> String {
        let (x, gap) = if self == Unit::Percent { (x * 100.0, gap * 100.0) } else { (x, gap) };
        let digits = ((x.abs() / gap).log10().floor() + 2.0).clamp(1.0, 9.0);
        match self {
            // 0 / gap has no logarithm.
            _ if x == 0.0 && self != Unit::Percent => "0".into(),
            Unit::Plain => trimmed(x, digits as usize),
            Unit::Percent => trimmed(x, digits as usize) + "%",
            Unit::Short => short(x),
        }
    }
}

/// A range of numbers laid on a range of places.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Axis {
    scale: Scale,
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    /// The numbers `low..=high`, which are finite, and positive for a logarithm, on the places `from..=to`. A range of
    /// one number gets some room around it.
    pub(super) fn new(scale: Scale, low: f64, high: f64, from: f64, to: f64) -> Axis {
        let (mut low, mut high) = (low, high.max(low));
        // Less than the digits of a label can tell apart is one number.
        if high - low <= 1e-9 * high.abs().max(low.abs()) {
            let room = if high == 0.0 { 1.0 } else { high.abs() * 0.1 };
            (low, high) = (low - room, high + room);
        }
        Axis { scale, low, high, from, to }
    }

    /// Where a number lies; outside of the range it lies outside of the places.
    pub(super) fn place(&self, x: f64) -> f64 {
        let share = match self.scale {
            Scale::Linear => (x - self.low) / (self.high - self.low),
            Scale::Log => (x / self.low).ln() / (self.high / self.low).ln(),
        };
        self.from + share * (self.to - self.from)
    }

    /// The numbers at both ends.
    pub(super) fn ends(&self) -> [f64; 2] {
        [self.low, self.high]
    }

    /// About `n` round numbers in the range, and how far apart they are.
    pub(super) fn ticks(&self, n: usize) -> (Vec<f64>, f64) {
        let decades = (self.high / self.low).log10();
        if self.scale == Scale::Log && decades >= 1.0 {
            // 1, 2 and 5 of each decade while they are few, else every so many decades.
            let every = (decades / n as f64).ceil().max(1.0) as i32;
            let steps: &[f64] = if decades <= 2.5 { &[1.0, 2.0, 5.0] } else { &[1.0] };
            let first = self.low.log10().floor() as i32;
            let powers = (first..=self.high.log10().ceil() as i32).step_by(every as usize);
            let all =
                powers.flat_map(|power| steps.iter().map(move |step| step * 10f64.powf(f64::from(power))));
            let slack = 1.0 + 1e-9;
            let ticks = all.filter(|&x| x * slack >= self.low && x <= self.high * slack).collect();
            return (ticks, 0.0);
        }
        let gap = round_gap((self.high - self.low) / n as f64);
        let (first, last) = ((self.low / gap - 1e-6).ceil(), (self.high / gap + 1e-6).floor());
        // A sum of gaps would drift; a product does not.
        let ticks =
            (0..=(last - first).clamp(0.0, 50.0) as usize).map(|i| (first + i as f64) * gap).collect();
        (ticks, gap)
    }
}

/// The next 1, 2 or 5 times a power of ten.
fn round_gap(gap: f64) -> f64 {
    // `powf`, because `powi` makes its negative powers from positive ones, which run over first.
    let power = 10f64.powf(gap.log10().floor());
    let step = [1.0, 2.0, 5.0].into_iter().find(|step| step * power >= gap * 0.999).unwrap_or(10.0);
    step * power
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(scale: Scale, unit: Unit, low: f64, high: f64, want: &[&str]) {
        let (ticks, gap) = Axis::new(scale, low, high, 0.0, 1.0).ticks(5);
        let texts: Vec<String> =
            ticks.iter().map(|&x| unit.text(x, if gap > 0.0 { gap } else { x })).collect();
        assert_eq!(texts, want, "{low} to {high}");
    }

    #[test]
    fn ticks_are_round() {
        use Scale::{Linear, Log};
        check(Linear, Unit::Plain, 0.0, 1.0, &["0", "0.2", "0.4", "0.6", "0.8", "1"]);
        check(Linear, Unit::Plain, 0.13, 2.31, &["0.5", "1", "1.5", "2"]);
        check(Linear, Unit::Plain, -1.0, 1.0, &["-1", "-0.5", "0", "0.5", "1"]);
        check(Linear, Unit::Percent, 0.93, 0.975, &["93%", "94%", "95%", "96%", "97%"]);
        check(
            Linear,
            Unit::Percent,
            0.991,
            0.9935,
            &["99.1%", "99.15%", "99.2%", "99.25%", "99.3%", "99.35%"],
        );
        check(Linear, Unit::Short, 0.0, 4690.0, &["0", "1k", "2k", "3k", "4k"]);
        check(Linear, Unit::Plain, 0.0, 3e-5, &["0", "1e-5", "2e-5", "3e-5"]);
        check(Linear, Unit::Plain, 2.0, 2.0, &["1.8", "1.9", "2", "2.1", "2.2"]);
        check(Linear, Unit::Plain, 0.0, 0.0, &["-1", "-0.5", "0", "0.5", "1"]);
        check(Log, Unit::Plain, 0.09, 2.4, &["0.1", "0.2", "0.5", "1", "2"]);
        check(Log, Unit::Plain, 1e-4, 1e4, &["0.0001", "0.01", "1", "100", "10000"]);
        check(Log, Unit::Plain, 1.9, 2.4, &["1.9", "2", "2.1", "2.2", "2.3", "2.4"]);
    }

    #[test]
    fn places_follow_the_scale() {
        let linear = Axis::new(Scale::Linear, 0.0, 10.0, 100.0, 0.0);
        let log = Axis::new(Scale::Log, 0.01, 100.0, 0.0, 40.0);
        for (axis, x, want) in
            [(linear, 2.5, 75.0), (linear, 20.0, -100.0), (log, 1.0, 20.0), (log, 10.0, 30.0)]
        {
            assert!((axis.place(x) - want).abs() < 1e-9, "{x}: {}", axis.place(x));
        }
        // However odd the range: finite places and not too many ticks.
        for (low, high) in
            [(1e-300, 1e300), (-1e300, 1e300), (1e-320, 1e-310), (1e16, 1e16 + 2.0), (5.0, 1.0)]
        {
            let axis = Axis::new(Scale::Linear, low, high, 0.0, 1.0);
            let (ticks, _) = axis.ticks(5);
            assert!(ticks.len() <= 12, "{low:e} to {high:e}: {ticks:?}");
            assert!(ticks.iter().all(|&x| axis.place(x).is_finite()), "{low:e} to {high:e}: {ticks:?}");
        }
    }
}
