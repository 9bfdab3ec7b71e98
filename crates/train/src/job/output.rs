//! `[output]`: what a run writes.

use polyreme_dtype::DType;

use super::cursor::Cursor;
use super::declare::{keys, section};
use super::key::Key;
use super::section::Section;
use super::shape::Bounds;
use super::spec::OutputSpec;
use super::train::{COUNT_MAX, METRICS};
use super::types::{flag, maybe, one_of, path, whole, within};

section! { OutputSpec => Section::new("output", "a section", |_| OutputSpec::default(), keys()).check(check) }

fn keys() -> Vec<Key<OutputSpec>> {
    // 0 is for a job that is to have no checkpoints at the ends of epochs.
    let or_none = whole(0..=COUNT_MAX).map(|n: u64| Some(n).filter(|&n| n > 0), |n| Some(n.unwrap_or(0)));
    let metric = METRICS.map(|(name, words)| (name, Some(name.to_string()), words));
    let best = one_of(metric.into_iter().chain([("none", None, "")]));
    let dtype = one_of([("f32", DType::F32, ""), ("bf16", DType::Bf16, "")]);
    keys! { OutputSpec;
        /// the run's folder
        path: maybe(path()) => |s| Some(&mut s.path);
            or "`runs/NAME` in the working folder, with a number appended if that is taken";
        /// steps from one checkpoint to the next
        every_steps: maybe(whole(1..=COUNT_MAX)) => |s| Some(&mut s.every_steps);
        /// epochs from one checkpoint to the next; 0 for none
        every_epochs: or_none => |s| Some(&mut s.every_epochs); or "1, if there is no other `every_`";
        /// minutes from one checkpoint to the next
        every_minutes: maybe(within(Bounds::POSITIVE)) => |s| Some(&mut s.every_minutes);
        /// how many of the latest checkpoints are kept
        keep: whole(1..=1 << 20) => |s| Some(&mut s.keep);
        /// the metric whose best checkpoint is kept too, and becomes the model; `"none"`: the last step is the model
        best: best => |s| Some(&mut s.best); or "`\"val_accuracy\"` for classes, else `\"val_loss\"`";
        /// whether TensorBoard files are written
        tensorboard: flag() => |s| Some(&mut s.tensorboard);
        /// whether the factors of `model.lora` are merged into the weights in `model.safetensors`, which is then a whole model; without it the
        /// file has what was learnt alone
        merge: flag() => |s| Some(&mut s.merge);
        /// element type of the parameters in `model.safetensors`; the test set is evaluated with the rounded ones. The weights of checkpoints are always f32, so that a run resumes exactly
        dtype: dtype => |s| Some(&mut s.dtype);
    }
}

/// Checkpoints after each epoch are for jobs that ask for no others.
fn check(spec: &mut OutputSpec, c: &Cursor) {
    if !c.has("every_epochs") && (c.has("every_steps") || c.has("every_minutes")) {
        spec.every_epochs = None;
    }
}
