//! The scale of the loss in f16.
//!
//! Most gradients are smaller than the smallest f16, so the loss is multiplied by a large number before it is differentiated,
//! and updates divide by it again. How large it may be is found by trying: it grows while all goes well, and where a gradient
//! becomes infinite the step is skipped and the scale halved. A skipped step uses up its samples and its number.

use serde::{Deserialize, Serialize};

/// The scale at the start, unless the job says otherwise.
pub const FIRST: f32 = 65536.0;
/// Steps without an overflow after which the scale is doubled.
const GOOD_STEPS: u64 = 2000;
/// Beyond this, f32 itself might overflow.
const LARGEST: f32 = 16_777_216.0;
/// So many skipped steps in a row with a scale of 1 are no bad luck.
const LOST: u64 = 20;

/// The scale of the loss, and how it came about. The same on all ranks.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct LossScale {
    /// What the loss is multiplied by.
    pub scale: f32,
    /// Steps since the scale last changed.
    pub good_steps: u64,
    /// Steps of the run that were skipped.
    pub steps_skipped: u64,
    /// Of those, the ones with a scale of 1 since the last step that was not skipped.
    pub skipped_at_1: u64,
}

impl LossScale {
    /// The first step has this scale.
    pub fn new(scale: f32) -> LossScale {
        LossScale { scale, good_steps: 0, steps_skipped: 0, skipped_at_1: 0 }
    }

    /// Takes note of a step, and chooses the scale of the next.
    pub fn note(&mut self, skipped: bool) {
        if skipped {
            self.skipped_at_1 += u64::from(self.scale <= 1.0);
            self.scale = (self.scale / 2.0).max(1.0);
            self.good_steps = 0;
            self.steps_skipped += 1;
            return;
        }
        (self.good_steps, self.skipped_at_1) = (self.good_steps + 1, 0);
        if self.good_steps == GOOD_STEPS {
            self.scale = (self.scale * 2.0).min(LARGEST);
            self.good_steps = 0;
        }
    }

    /// Whether no smaller scale will help.
    pub fn is_lost(&self) -> bool {
        self.skipped_at_1 >= LOST
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_grows_while_all_goes_well_and_halves_where_it_does_not() {
        let mut scale = LossScale::new(FIRST);
        scale.note(true);
        scale.note(true);
        assert_eq!((scale.scale, scale.steps_skipped, scale.skipped_at_1), (16384.0, 2, 0));
        for _ in 0..GOOD_STEPS - 1 {
            scale.note(false);
        }
        assert_eq!((scale.scale, scale.good_steps), (16384.0, GOOD_STEPS - 1));
        scale.note(false);
        assert_eq!((scale.scale, scale.good_steps, scale.steps_skipped), (32768.0, 0, 2));
    }

    #[test]
    fn it_is_never_below_1_or_without_end() {
        let mut scale = LossScale::new(1e30);
        // A hundred halvings, then 1.
        for n in 1..100 + LOST {
            scale.note(true);
            assert!(scale.scale >= 1.0 && !scale.is_lost(), "{n}");
        }
        scale.note(true);
        assert!(scale.is_lost());
        scale.note(false);
        assert!(!scale.is_lost());
        let mut scale = LossScale::new(LARGEST);
        for _ in 0..GOOD_STEPS {
            scale.note(false);
        }
        assert_eq!(scale.scale, LARGEST);
    }
}
