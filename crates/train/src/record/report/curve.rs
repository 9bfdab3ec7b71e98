//! Curves: a metric's points, smoothed, and thinned so that a page of any run stays small.

use super::super::history::Column;

/// Points of a curve on the page.
pub(super) const POINTS_MAX: usize = 2000;

/// A named line of points, finite all of them, in the order of steps.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Curve {
    pub(super) name: String,
    pub(super) points: Vec<(f64, f64)>,
    /// How many values were not finite and are left out.
    pub(super) left_out: usize,
}

impl Curve {
    /// The finite values of a column.
    pub(super) fn new(name: &str, column: &Column) -> Curve {
        let all = column.steps.iter().zip(&column.values).map(|(&step, &value)| (step as f64, value));
        // Values beyond f32 are a run that has gone wrong, and their differences may not be finite.
        let points: Vec<_> = all.filter(|(_, value)| value.abs() < f64::from(f32::MAX)).collect();
        let left_out = column.values.len() - points.len();
        Curve { name: name.into(), points, left_out }
    }

    /// The same as stairs: each value holds until the next, and the last to the end.
    pub(super) fn stairs(self, end: f64) -> Curve {
        let mut points: Vec<(f64, f64)> = Vec::with_capacity(2 * self.points.len() + 1);
        for (step, value) in self.points {
            if let Some(&(_, before)) = points.last() {
                points.push((step, before));
            }
            points.push((step, value));
        }
        points.extend(points.last().map(|&(_, value)| (end, value)));
        Curve { points, ..self }
    }

    /// The same as a running mean, weighted so that the last fiftieth of a run counts most; unbiased at its start.
    /// `None` for so few points that one sees them all.
    pub(super) fn smoothed(&self) -> Option<Curve> {
        let n = self.points.len();
        if n < 50 {
            return None;
        }
        let keep = 1.0 - 50.0 / (n as f64).max(250.0);
        let (mut sum, mut weight) = (0.0, 0.0);
        let points = self.points.iter().map(|&(x, y)| {
            sum = keep * sum + (1.0 - keep) * y;
            weight = keep * weight + (1.0 - keep);
            (x, sum / weight)
        });
        Some(Curve { name: self.name.clone(), points: points.collect(), left_out: 0 })
    }

    /// At most [`POINTS_MAX`] of the points: the least and the greatest of each stretch, so that no spike is lost, and
    /// both ends.
    pub(super) fn thinned(self) -> Curve {
        let n = self.points.len();
        if n <= POINTS_MAX {
            return self;
        }
        let stretches = POINTS_MAX / 2 - 1;
        let mut points = Vec::with_capacity(POINTS_MAX);
        points.push(self.points[0]);
        for i in 0..stretches {
            let stretch = &self.points[1 + i * (n - 2) / stretches..1 + (i + 1) * (n - 2) / stretches];
            let place = |better: fn(&f64, &f64) -> bool| {
                (1..stretch.len())
                    .fold(0, |best, j| if better(&stretch[j].1, &stretch[best].1) { j } else { best })
            };
            let (least, greatest) = (place(f64::lt), place(f64::gt));
            points.push(stretch[least.min(greatest)]);
            if least != greatest {
                points.push(stretch[least.max(greatest)]);
            }
        }
        points.push(self.points[n - 1]);
        Curve { points, ..self }
    }

    /// The range of the values, without the outermost hundredth of them on either side: a spike must not flatten the
    /// rest. `None` if there are none.
    pub(super) fn usual_range(&self) -> Option<(f64, f64)> {
        let mut values: Vec<f64> = self.points.iter().map(|point| point.1).collect();
        values.sort_by(f64::total_cmp);
        let aside = values.len() / 100;
        Some((*values.get(aside)?, *values.get(values.len() - 1 - aside)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(values: impl Iterator<Item = f64>) -> Curve {
        let values: Vec<f64> = values.collect();
        Curve::new("c", &Column { steps: (0..values.len() as u64).collect(), values })
    }

    #[test]
    fn thinning_keeps_ends_and_spikes() {
        for n in [0, 1, 2, 1999, 2000, 2001, 3001, 100_000] {
            let spike = n / 3;
            let all = curve((0..n).map(|i| if i == spike { 99.0 } else { (i % 7) as f64 }));
            let thin = all.clone().thinned();
            assert!(thin.points.len() <= POINTS_MAX && (n <= POINTS_MAX) == (thin == all), "{n}");
            assert_eq!((thin.points.first(), thin.points.last()), (all.points.first(), all.points.last()));
            assert!(n == 0 || thin.points.iter().any(|point| point.1 == 99.0), "{n}");
            assert!(thin.points.is_sorted_by(|a, b| a.0 < b.0), "{n}");
        }
    }

    #[test]
    fn stairs_hold_each_value_until_the_next() {
        let stairs = Curve::new("c", &Column { steps: vec![0, 5], values: vec![4.0, 3.0] }).stairs(9.0);
        assert_eq!(stairs.points, [(0.0, 4.0), (5.0, 4.0), (5.0, 3.0), (9.0, 3.0)]);
        assert_eq!(curve([].into_iter()).stairs(9.0).points, []);
    }

    #[test]
    fn smoothing_is_a_mean() {
        assert_eq!(curve((0..49).map(f64::from)).smoothed(), None);
        let level = curve((0..400).map(|_| 3.0)).smoothed().unwrap();
        assert!(level.points.iter().all(|point| (point.1 - 3.0).abs() < 1e-9));
        let noisy = curve((0..5000).map(|i| f64::from(i % 2))).smoothed().unwrap();
        assert!(noisy.points[500..].iter().all(|point| (point.1 - 0.5).abs() < 0.01));
    }

    #[test]
    fn what_is_not_finite_is_left_out() {
        let some = curve([1.0, f64::NAN, f64::INFINITY, 2.0, 1e300].into_iter());
        assert_eq!((some.points.as_slice(), some.left_out), (&[(0.0, 1.0), (3.0, 2.0)][..], 3));
        assert_eq!(some.usual_range(), Some((1.0, 2.0)));
        assert_eq!(curve([f64::NAN].into_iter()).usual_range(), None);
        let spiky = curve((0..1000).map(|i| if i == 500 { 1e6 } else { f64::from(i % 5) }));
        assert_eq!(spiky.usual_range(), Some((0.0, 4.0)));
    }
}
