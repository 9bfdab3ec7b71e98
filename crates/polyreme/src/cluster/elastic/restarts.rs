//! When ranks that were lost are started again, at the far ends of ssh: after a pause that doubles with each loss in a row, so that a host that is
//! down is tried as long as the run lasts, and not every moment.
//!
//! Pure: time is given.

use std::time::{Duration, Instant};

/// The first pause.
const FIRST: Duration = Duration::from_secs(1);
/// The longest one.
const LONGEST: Duration = Duration::from_secs(60);
/// Whoever ran for so long was lost by accident: the pause is the first one again.
const STEADY: Duration = Duration::from_secs(60);

/// Slots, each with a process in it or none.
pub(super) struct Restarts(Vec<LaunchSlot>);

#[derive(Clone)]
struct LaunchSlot {
    /// When the process that is in it, or was, began.
    began: Instant,
    pause: Duration,
    due: Option<Instant>,
}

impl Restarts {
    /// All slots are started now.
    pub(super) fn new(slots: usize, now: Instant) -> Restarts {
        Restarts(vec![LaunchSlot { began: now, pause: FIRST, due: None }; slots])
    }

    /// The process of a slot was lost; how long its successor waits.
    pub(super) fn lost(&mut self, slot: usize, now: Instant) -> Duration {
        let slot = &mut self.0[slot];
        if now.saturating_duration_since(slot.began) >= STEADY {
            slot.pause = FIRST;
        }
        let pause = slot.pause;
        slot.due = Some(now + pause);
        slot.pause = (2 * pause).min(LONGEST);
        pause
    }

    /// Slots that are to be started now, and count as started.
    pub(super) fn due(&mut self, now: Instant) -> Vec<usize> {
        let mut due = Vec::new();
        for (number, slot) in self.0.iter_mut().enumerate() {
            if slot.due.take_if(|at| *at <= now).is_some() {
                slot.began = now;
                due.push(number);
            }
        }
        due
    }

    /// Whether any slot waits to be started.
    pub(super) fn any(&self) -> bool {
        self.0.iter().any(|slot| slot.due.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_while_losses_come_in_a_row() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut restarts = Restarts::new(2, start);
        assert!(!restarts.any() && restarts.due(at(1000)).is_empty());
        let mut now = 0;
        for pause in [1, 2, 4, 8, 16, 32, 60, 60] {
            assert_eq!(restarts.lost(1, at(now)), Duration::from_secs(pause));
            assert!(restarts.any() && restarts.due(at(now + pause) - Duration::from_millis(1)).is_empty());
            now += pause;
            assert_eq!(restarts.due(at(now)), [1], "after {pause} s");
            assert!(!restarts.any());
        }
        // The other slot is not its neighbour's keeper.
        assert_eq!(restarts.lost(0, at(30)), FIRST);
        // It ran for a while.
        assert_eq!(restarts.lost(1, at(now + 60)), FIRST);
        assert_eq!(restarts.due(at(now + 61)), [0, 1]);
    }
}
