//! Interleaved 1F1B (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters"): several chunks
//! per stage, each a part of its work.
//!
//! Stage `s` of `p` has the chunks `s`, `s + p`, `s + 2p`, ...: a microbatch goes round the stages once for each chunk, and
//! what a stage waits for at the start and at the end is passes through chunks, `1 / chunks` of those through stages.
//!
//! Microbatches go in groups: a group's forwards through the first chunk, then through the second, and so on; backwards
//! likewise from the last chunk on. In a group of `p` or more, the first microbatch is back from the last stage when the
//! stage has sent the group's last one. Any number of microbatches will do: there are as many groups as have `p` or more,
//! and their sizes differ by one at most (a small last group would stall the stages, or deadlock them). With `g` the
//! largest size, a stage begins with `g` forwards for each chunk but the last, and two for each stage that follows.

use std::ops::Range;

use super::one_f_one_b::in_turn;
use super::timetable::Timetable;

/// The timetable of one step.
pub fn timetable(stages: usize, microbatches: usize, chunks: usize) -> Timetable {
    let groups = groups(stages, microbatches);
    let through = |order: &[usize]| -> Vec<(usize, usize)> {
        let of_group = |group: &Range<usize>| -> Vec<(usize, usize)> {
            order.iter().flat_map(|own| group.clone().map(|microbatch| (*own, microbatch))).collect()
        };
        groups.iter().flat_map(of_group).collect()
    };
    let down: Vec<usize> = (0..chunks).collect();
    let up: Vec<usize> = (0..chunks).rev().collect();
    let (forwards, backwards) = (through(&down), through(&up));

    let of_stage = |stage: usize| {
        let ahead = (chunks - 1) * group_max(stages, microbatches) + 2 * (stages - 1 - stage);
        in_turn(&forwards, &backwards, ahead, |own| own * stages + stage)
    };
    Timetable {
        stages,
        microbatches,
        chunks_per_stage: chunks,
        place: (0..stages * chunks).map(|chunk| chunk % stages).collect(),
        by_stage: (0..stages).map(of_stage).collect(),
    }
}

/// The size of the largest group. It decides how many activations a stage holds.
pub fn group_max(stages: usize, microbatches: usize) -> usize {
    microbatches.div_ceil(n_groups(stages, microbatches))
}

fn groups(stages: usize, microbatches: usize) -> Vec<Range<usize>> {
    let n = n_groups(stages, microbatches);
    (0..n).map(|k| microbatches * k / n..microbatches * (k + 1) / n).collect()
}

fn n_groups(stages: usize, microbatches: usize) -> usize {
    (microbatches / stages).max(1)
}
