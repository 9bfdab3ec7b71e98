//! The text of a progress line, and of the line of an evaluation. Pure: the caller knows the terminal and its width, and
//! prints.

use super::wording::{clock, figure, short, thousands, trimmed};

/// The most columns of the bar.
const BAR_MAX: usize = 40;
/// A shorter bar says less than the percentage beside it.
const BAR_MIN: usize = 6;

/// Where a run is.
#[derive(Clone, PartialEq, Debug)]
pub struct Progress<'a> {
    /// Steps done.
    pub step: u64,
    /// Steps of the whole run.
    pub steps: u64,
    /// The epoch that is under way, counted from 1.
    pub epoch: u64,
    /// Epochs of the whole run.
    pub epochs: u64,
    /// The training loss; `None` as long as all steps were skipped.
    pub loss: Option<f64>,
    /// The learning rate.
    pub lr: f64,
    /// Samples a second.
    pub samples_per_s: f64,
    /// Seconds since the start.
    pub elapsed: f64,
    /// Seconds until the end, as [`ProgressPace`] guesses them.
    pub left: Option<f64>,
    /// The share of the time that ranks wait for each other, if there are several.
    pub waiting_for_ranks: Option<f64>,
    /// The metrics of the last evaluation, the most important first.
    pub metrics: &'a [(String, f64)],
    /// Columns of the terminal.
    pub width: usize,
}

impl Progress<'_> {
    /// The line for a terminal: at most `width` columns. Parts are dropped where there is no room, the least important
    /// first: metrics from the last, rate, time passed, epoch, waiting, bar, speed, time left, loss; the percentage stays.
    pub fn line(&self) -> String {
        // Parts in the order of the line, each with its importance; the greatest number goes first.
        let mut parts: Vec<(usize, String)> = vec![
            (6, format!("epoch {}/{}", self.epoch, self.epochs)),
            (0, format!("{:>3}%", (self.share() * 100.0) as u64)),
            (1, format!("loss {}", self.loss())),
        ];
        for (i, (name, value)) in self.metrics.iter().enumerate() {
            parts.push((9 + i, format!("{name} {}", figure(*value, 4))));
        }
        parts.push((8, format!("lr {}", trimmed(self.lr, 3))));
        parts.push((3, format!("{}/s", short(self.samples_per_s))));
        if let Some(waiting) = self.waiting_for_ranks {
            parts.push((5, format!("wait {:.0}%", waiting * 100.0)));
        }
        parts.push((7, clock(self.elapsed)));
        if let Some(left) = self.left {
            parts.push((2, format!("{} left", clock(left))));
        }
        let mut room = self.room(&parts);
        // The bar goes before the speed does, and after the epoch.
        while let (None, Some(least)) = (room, parts.iter().map(|part| part.0).filter(|&rank| rank > 0).max())
        {
            parts.retain(|part| part.0 != least);
            room = self.room(&parts);
        }
        let mut line: Vec<String> = parts.iter().map(|part| part.1.clone()).collect();
        let room = room.unwrap_or(0);
        if room > BAR_MIN + 1 {
            let place = parts.iter().position(|part| part.0 == 0).unwrap_or(0);
            line.insert(place, bar(self.share(), (room - 2).min(BAR_MAX)));
        }
        // A width below that of the percentage.
        line.join("  ").chars().take(self.width).collect()
    }

    fn loss(&self) -> String {
        self.loss.map_or_else(|| "-".into(), |loss| figure(loss, 4))
    }

    /// The line for a log: everything, and nothing that moves.
    pub fn plain(&self) -> String {
        let mut line = format!(
            "step {}/{}  epoch {}/{}  loss {}  lr {}  {} samples/s",
            thousands(self.step),
            thousands(self.steps),
            self.epoch,
            self.epochs,
            self.loss(),
            trimmed(self.lr, 3),
            short(self.samples_per_s),
        );
        if let Some(waiting) = self.waiting_for_ranks {
            line += &format!("  waiting for ranks {:.0}%", waiting * 100.0);
        }
        for (name, value) in self.metrics {
            line += &format!("  {name} {}", figure(*value, 4));
        }
        line += &format!("  {} passed", clock(self.elapsed));
        if let Some(left) = self.left {
            line += &format!("  {} left", clock(left));
        }
        line
    }

    fn share(&self) -> f64 {
        (self.step as f64 / self.steps.max(1) as f64).min(1.0)
    }

    /// Columns that are left beside these parts; `None` if they do not fit. Parts of middling importance want room for a
    /// bar too.
    fn room(&self, parts: &[(usize, String)]) -> Option<usize> {
        let used = parts.iter().map(|part| part.1.chars().count() + 2).sum::<usize>() - 2;
        let bar = if parts.iter().any(|part| part.0 >= 6) { BAR_MIN + 2 } else { 0 };
        self.width.checked_sub(used).filter(|&room| room >= bar)
    }
}

/// What an evaluation came to.
#[derive(Clone, PartialEq, Debug)]
pub struct Evaluation<'a> {
    /// Steps done.
    pub step: u64,
    /// Epochs begun.
    pub epoch: u64,
    /// The training loss, if it is known.
    pub loss: Option<f64>,
    /// Names and values.
    pub metrics: &'a [(String, f64)],
    /// Whether it is the best so far.
    pub best: bool,
}

impl Evaluation<'_> {
    /// One line, of at most `width` columns. Parts are dropped where there is no room, the least important first: the step, further
    /// metrics from the last, the loss of the evaluation, that of training; the epoch and the first metric stay
    /// longest. Without a width nothing is dropped.
    pub fn line(&self, width: Option<usize>) -> String {
        let is_test = self.metrics.iter().any(|(name, _)| name.starts_with("test"));
        let mut parts: Vec<(usize, String)> = match is_test {
            true => vec![(0, format!("model of step {}", self.step))],
            false => {
                vec![(0, format!("epoch {:>3}", self.epoch)), (usize::MAX, format!("step {:>6}", self.step))]
            }
        };
        if let (Some(loss), false) = (self.loss, is_test) {
            parts.push((2, format!("loss {loss:.4}")));
        }
        let mut importance = [1].into_iter().chain(4..);
        for (name, value) in self.metrics {
            let importance = if name.ends_with("_loss") { Some(3) } else { importance.next() };
            parts.push((importance.unwrap_or(usize::MAX), format!("{name} {value:.4}")));
        }
        if self.best {
            parts.push((0, "*".into()));
        }
        let width = width.unwrap_or(usize::MAX);
        let columns = |parts: &[(usize, String)]| {
            parts.iter().map(|part| part.1.chars().count() + 2).sum::<usize>().saturating_sub(2)
        };
        while let (true, Some(least)) =
            (columns(&parts) > width, parts.iter().map(|part| part.0).filter(|&rank| rank > 0).max())
        {
            parts.retain(|part| part.0 != least);
        }
        let parts: Vec<String> = parts.into_iter().map(|part| part.1).collect();
        // A width below that of the epoch.
        parts.join("  ").chars().take(width).collect()
    }
}

fn bar(share: f64, columns: usize) -> String {
    let halves = (share * 2.0 * columns as f64) as usize;
    let (full, half) = (halves / 2, halves % 2);
    "━".repeat(full) + if half == 1 { "╸" } else { "" } + &"─".repeat(columns - full - half)
}

/// Speed and time left, smoothed: recent steps count most, and a single slow one does not throw the guess.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct ProgressPace {
    last: Option<(u64, f64)>,
    /// Seconds a step, weighted; and the sum of the weights, which grows to 1.
    seconds_per_step: f64,
    weight: f64,
}

/// What happened this long ago counts by 1/e.
const MEMORY_SECONDS: f64 = 15.0;

impl ProgressPace {
    /// Takes the number of steps done by `elapsed` seconds. Steps must not be counted backwards; time that stands
    /// still says nothing.
    pub fn observe(&mut self, step: u64, elapsed: f64) {
        if let Some((before, then)) = self.last {
            let (steps, seconds) = (step.saturating_sub(before), elapsed - then);
            // Steps of a glance that was too short wait for the next.
            if steps == 0 || seconds.is_nan() || seconds <= 0.0 {
                return;
            }
            let keep = (-seconds / MEMORY_SECONDS).exp();
            self.seconds_per_step = keep * self.seconds_per_step + (1.0 - keep) * seconds / steps as f64;
            self.weight = keep * self.weight + (1.0 - keep);
        }
        self.last = Some((step, elapsed));
    }

    /// Forgets where it was, and keeps its speed: after an evaluation or a checkpoint, whose time is not a step's.
    pub fn pause(&mut self) {
        self.last = None;
    }

    /// Steps a second; `None` before two glances.
    pub fn steps_per_s(&self) -> Option<f64> {
        (self.weight > 0.0).then(|| self.weight / self.seconds_per_step)
    }

    /// Seconds until `steps` are done, if `step` are.
    pub fn left(&self, step: u64, steps: u64) -> Option<f64> {
        Some(steps.saturating_sub(step) as f64 / self.steps_per_s()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress(metrics: &[(String, f64)], width: usize) -> Progress<'_> {
        Progress {
            step: 430,
            steps: 1000,
            epoch: 5,
            epochs: 10,
            loss: Some(0.41234),
            lr: 3e-4,
            samples_per_s: 12_345.0,
            elapsed: 83.0,
            left: Some(110.0),
            waiting_for_ranks: None,
            metrics,
            width,
        }
    }

    #[test]
    fn the_least_important_goes_first() {
        let metrics = [("val_loss".to_string(), 0.3987), ("val_accuracy".to_string(), 0.8765)];
        for (width, want) in [
            (2, " 4"),
            (20, " 43%  loss 0.4123"),
            (40, " 43%  loss 0.4123  12.3k/s  1:50 left"),
            (60, "epoch 5/10  ━━━╸─────   43%  loss 0.4123  12.3k/s  1:50 left"),
            (80, "epoch 5/10  ━━━━━───────   43%  loss 0.4123  lr 0.0003  12.3k/s  1:23  1:50 left"),
            (
                200,
                "epoch 5/10  ━━━━━━━━━━━━━━━━━───────────────────────   43%  loss 0.4123  val_loss 0.3987  \
                 val_accuracy 0.8765  lr 0.0003  12.3k/s  1:23  1:50 left",
            ),
        ] {
            assert_eq!(progress(&metrics, width).line(), want, "{width}");
        }
        let plain = "step 430/1,000  epoch 5/10  loss 0.4123  lr 0.0003  12.3k samples/s  val_loss 0.3987  \
                     val_accuracy 0.8765  1:23 passed  1:50 left";
        assert_eq!(progress(&metrics, 20).plain(), plain);
        let ranks = Progress { waiting_for_ranks: Some(0.042), ..progress(&[], 50) };
        assert_eq!(ranks.line(), " 43%  loss 0.4123  12.3k/s  wait 4%  1:50 left");
        assert!(
            ranks.plain().contains("12.3k samples/s  waiting for ranks 4%  1:23 passed"),
            "{}",
            ranks.plain()
        );
    }

    #[test]
    fn an_evaluation_keeps_its_metric_longest() {
        let named = |list: &[(&str, f64)]| list.iter().map(|(n, v)| (n.to_string(), *v)).collect::<Vec<_>>();
        let metrics = named(&[("val_loss", 0.3260), ("val_accuracy", 0.98), ("val_top5", 0.999)]);
        let epoch = Evaluation { step: 30, epoch: 2, loss: Some(0.6788), metrics: &metrics, best: true };
        let whole =
            "epoch   2  step     30  loss 0.6788  val_loss 0.3260  val_accuracy 0.9800  val_top5 0.9990  *";
        for (width, want) in [
            (None, whole),
            (Some(200), whole),
            (Some(80), "epoch   2  loss 0.6788  val_loss 0.3260  val_accuracy 0.9800  val_top5 0.9990  *"),
            (Some(79), "epoch   2  loss 0.6788  val_loss 0.3260  val_accuracy 0.9800  *"),
            (Some(60), "epoch   2  loss 0.6788  val_accuracy 0.9800  *"),
            (Some(40), "epoch   2  val_accuracy 0.9800  *"),
            (Some(20), "epoch   2  *"),
            (Some(5), "epoch"),
        ] {
            assert_eq!(epoch.line(width), want, "{width:?}");
        }
        let metrics = named(&[("test_loss", 0.3498), ("test_accuracy", 0.97)]);
        let test = Evaluation { metrics: &metrics, best: false, ..epoch };
        assert_eq!(test.line(Some(40)), "model of step 30  test_accuracy 0.9700");
        assert_eq!(test.line(None), "model of step 30  test_loss 0.3498  test_accuracy 0.9700");
        let none = Evaluation { metrics: &[], loss: None, ..test };
        for width in 0..90 {
            for line in [&epoch, &test, &none].map(|e| e.line(Some(width))) {
                assert!(line.chars().count() <= width, "{width}: {line}");
            }
        }
    }

    #[test]
    fn every_width_fits() {
        let metrics = [("val_loss".to_string(), f64::NAN), ("val_top5".to_string(), 1e-30)];
        for width in 0..250 {
            for (step, steps) in [(0, 0), (0, 1), (1, 1), (7, 3), (u64::MAX, u64::MAX), (1, u64::MAX)] {
                let left = (step % 2 == 0).then_some(1e9);
                let loss = [Some(f64::NEG_INFINITY), Some(1e-9), None][width % 3];
                let line = Progress { step, steps, left, loss, ..progress(&metrics, width) }.line();
                let columns = line.chars().count();
                assert!(columns <= width && (width < 40 || columns >= 20), "{width}: {line}");
            }
        }
    }

    #[test]
    fn the_pace_follows_recent_steps() {
        let mut pace = ProgressPace::default();
        assert_eq!((pace.steps_per_s(), pace.left(0, 10)), (None, None));
        pace.observe(0, 0.0);
        assert_eq!(pace.steps_per_s(), None);
        pace.observe(0, 1.0);
        pace.observe(5, 0.0);
        assert_eq!(pace.steps_per_s(), None);
        for i in 1..=100u64 {
            pace.observe(i * 10, i as f64);
        }
        let near = |got: Option<f64>, want: f64| (got.unwrap() - want).abs() < 0.05 * want;
        assert!(near(pace.steps_per_s(), 10.0) && near(pace.left(900, 1000), 10.0), "{pace:?}");
        // A long evaluation does not count, and a slower machine does after a while.
        pace.pause();
        pace.observe(1000, 1000.0);
        for i in 1..=60u64 {
            pace.observe(1000 + i * 5, 1000.0 + i as f64);
        }
        assert!(near(pace.steps_per_s(), 5.0), "{pace:?}");
        assert_eq!(pace.left(20, 10), Some(0.0));
    }
}
