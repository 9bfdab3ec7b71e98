//! What losses cost a run: the share of its time that counts in the end.
//!
//! Hosts are lost at random, one every `every_s` seconds of training in the mean, whichever it is. What follows is of two kinds:
//!
//! - An elastic run notices, forms a group of the others, does the step again, and trains with fewer hosts until the lost one is
//!   replaced.
//! - Any other run ends, is started again, and goes on from its last checkpoint: what it did since then is lost. If a run saves every
//!   `T` seconds and a loss comes after `M` in the mean, of `M` seconds only `T / (exp(T / M) - 1)` count.

/// How losses come, and what follows them whatever is done.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Losses {
    /// Seconds of training between two losses, in the mean, of all hosts together.
    pub every_s: f64,
    /// Seconds until one is noticed.
    pub notice_s: f64,
    /// Seconds until a lost host is replaced.
    pub replaced_s: f64,
    /// How many hosts there are.
    pub hosts: usize,
}

/// Seconds that forming another group takes with few ranks, and more of them for each: measured on one machine with 4 and with 64.
const FORMING_S: f64 = 0.04;
const FORMING_EACH_S: f64 = 0.015;

impl Losses {
    /// The share of time that counts in an elastic run with such steps.
    pub fn elastic(&self, step_s: f64, ranks: usize) -> f64 {
        // What it keeps is each step.
        self.restarted(step_s, FORMING_S + FORMING_EACH_S * ranks as f64)
    }

    /// The share of time that counts in a run that is started again, which takes `restart_s`, and saves every `saves_s`.
    pub fn restarted(&self, saves_s: f64, restart_s: f64) -> f64 {
        let kept = match saves_s > 0.0 {
            true => saves_s / (saves_s / self.every_s).exp_m1(),
            false => self.every_s,
        };
        // Seconds of all hosts that are missing while one is. The only one is waited for.
        let fewer_s = self.replaced_s / self.hosts.max(1) as f64;
        kept / (self.every_s + self.notice_s + restart_s + fewer_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A number from 0 to 1.
    fn drawn(state: &mut u64) -> f64 {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((*state >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// Many losses one after the other: steps that count, against those that would have been done.
    fn played(losses: &Losses, step_s: f64, pause_s: f64, saves_every: Option<u64>) -> f64 {
        let (mut seconds, mut counted, mut state) = (0.0, 0.0, 7);
        for _ in 0..20_000 {
            let until = -losses.every_s * drawn(&mut state).ln();
            let steps = (until / step_s).floor();
            let kept = saves_every.map_or(steps, |every| steps - steps % every as f64);
            counted += kept * step_s;
            // While a host is missing the others do less: as if all did nothing for a part of the time.
            seconds += until + losses.notice_s + pause_s + losses.replaced_s / losses.hosts as f64;
        }
        counted / seconds
    }

    #[test]
    fn formulas_are_what_many_losses_come_to() {
        for (every_s, step_s, hosts) in [(60.0, 1.0, 4), (600.0, 0.1, 8), (20.0, 4.0, 2), (3600.0, 10.0, 64)]
        {
            let losses = Losses { every_s, notice_s: 3.0, replaced_s: 30.0, hosts };
            let forming = FORMING_S + FORMING_EACH_S * hosts as f64;
            let (said, came) = (losses.elastic(step_s, hosts), played(&losses, step_s, forming, None));
            assert!((said - came).abs() < 0.015, "elastic: {said} and {came}");
            for saves_every in [5u64, 100] {
                let said = losses.restarted(saves_every as f64 * step_s, 30.0);
                let came = played(&losses, step_s, 30.0, Some(saves_every));
                assert!((said - came).abs() < 0.015, "every {saves_every} steps: {said} and {came}");
            }
        }
    }

    #[test]
    fn rare_losses_cost_nothing_and_frequent_ones_everything() {
        let losses = |every_s| Losses { every_s, notice_s: 10.0, replaced_s: 60.0, hosts: 4 };
        assert!(losses(1e9).elastic(1.0, 8) > 0.999_999 && losses(1e9).restarted(600.0, 60.0) > 0.999_99);
        assert!(losses(1.0).elastic(1.0, 8) < 0.05 && losses(1.0).restarted(600.0, 60.0) < 1e-9);
        let of = |every_s| losses(every_s).elastic(1.0, 8);
        assert!(of(100.0) < of(200.0) && of(200.0) < of(400.0));
    }
}
