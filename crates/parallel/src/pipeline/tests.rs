//! What every timetable guarantees, over stages 1..=8 and microbatches 1..=32; and what each schedule promises about memory
//! and bubbles. Costs are small whole numbers, so all times are exact.

use std::collections::{BTreeMap, BTreeSet};

use super::interleaved::group_max;
use super::picture::picture_across;
use super::*;

/// Every schedule, interleaved ones with 2, 3 and 4 chunks.
fn kinds() -> Vec<PipelineKind> {
    let more = [3, 4].map(|chunks| PipelineKind::Interleaved { chunks });
    PipelineKind::ALL.into_iter().chain(more).collect()
}

/// Calls `check` with every timetable of a kind; only 2BW refuses some numbers of microbatches.
fn each(kind: PipelineKind, mut check: impl FnMut(&Timetable)) {
    for stages in 1..=8 {
        for microbatches in 1..=32 {
            match timetable(kind, stages, microbatches) {
                Ok(timetable) => check(&timetable),
                Err(e) => assert!(kind == PipelineKind::TwoBw && microbatches + 1 < stages, "{kind}: {e}"),
            }
        }
    }
}

/// A name for messages of failed tests.
fn of(kind: PipelineKind, timetable: &Timetable) -> String {
    format!("{kind:?}, {} stages, {} microbatches", timetable.stages, timetable.microbatches)
}

/// The idle time of each stage when all chunks cost the same: it is the same for all stages.
fn bubble(timetable: &Timetable, (forward, input, weight): (f64, f64, f64)) -> f64 {
    let costs = Costs::even(timetable.place.len(), forward, input, weight);
    let idle = simulate(timetable, &costs).unwrap().idle;
    assert!(idle.iter().all(|time| *time == idle[0]), "{idle:?}");
    idle[0]
}

/// Costs of forward, input gradients and weight gradients.
const COSTS: [(f64, f64, f64); 6] =
    [(1., 1., 1.), (2., 2., 1.), (3., 4., 2.), (1., 2., 1.), (2., 3., 3.), (4., 3., 5.)];

#[test]
fn every_pass_of_every_microbatch_runs_once_on_the_stage_that_has_the_chunk() {
    for kind in kinds() {
        each(kind, |timetable| {
            let name = of(kind, timetable);
            let (stages, n_chunks) = (timetable.stages, timetable.place.len());
            assert_eq!(timetable.chunks_per_stage, kind.chunks_per_stage(), "{name}");
            assert_eq!((timetable.by_stage.len(), n_chunks), (stages, stages * timetable.chunks_per_stage));
            let split = matches!(kind, PipelineKind::ZbH1 | PipelineKind::ZbV);
            assert_eq!(timetable.splits_backward(), split, "{name}");
            let passes: &[StagePass] = match split {
                true => &[StagePass::Forward, StagePass::InputGrad, StagePass::WeightGrad],
                false => &[StagePass::Forward, StagePass::Backward],
            };
            let mut seen = BTreeSet::new();
            for (stage, actions) in timetable.by_stage.iter().enumerate() {
                for action in actions {
                    assert_eq!(timetable.place[action.chunk], stage, "{name}: {action}");
                    assert!(passes.contains(&action.pass) && action.microbatch < timetable.microbatches);
                    assert!(seen.insert(*action), "{name}: {action} is there twice");
                }
            }
            assert_eq!(seen.len(), passes.len() * n_chunks * timetable.microbatches, "{name}");
        });
    }
}

#[test]
fn chunks_are_placed_round_the_stages_or_as_a_v() {
    let place = |kind| timetable(kind, 3, 5).unwrap().place;
    assert_eq!(place(PipelineKind::OneFOneB), [0, 1, 2]);
    assert_eq!(place(PipelineKind::Interleaved { chunks: 3 }), [0, 1, 2, 0, 1, 2, 0, 1, 2]);
    assert_eq!(place(PipelineKind::ZbV), [0, 1, 2, 2, 1, 0]);
}

#[test]
fn gradients_of_a_chunk_are_summed_in_the_order_of_microbatches() {
    for kind in kinds() {
        each(kind, |timetable| {
            let mut next: BTreeMap<(usize, StagePass), usize> = BTreeMap::new();
            for action in timetable.by_stage.iter().flatten() {
                let next = next.entry((action.chunk, action.pass)).or_default();
                assert_eq!(action.microbatch, *next, "{}: {action}", of(kind, timetable));
                *next += 1;
            }
        });
    }
}

#[test]
fn messages_of_a_channel_are_received_in_the_order_in_which_they_are_sent() {
    for kind in kinds() {
        each(kind, |timetable| {
            let mut sent: BTreeMap<Channel, Vec<usize>> = BTreeMap::new();
            let mut received = sent.clone();
            for (stage, actions) in timetable.by_stage.iter().enumerate() {
                for action in actions {
                    if let Some(Message { channel, microbatch }) = timetable.sends(action) {
                        assert!(channel.source == stage && channel.target != stage);
                        sent.entry(channel).or_default().push(microbatch);
                    }
                    if let Some(Message { channel, microbatch }) = timetable.receives(action) {
                        assert!(channel.target == stage && channel.source != stage);
                        received.entry(channel).or_default().push(microbatch);
                    }
                }
            }
            assert_eq!(sent, received, "{}", of(kind, timetable));
            // Two channels for each border between chunks of different stages.
            let borders = timetable.place.windows(2).filter(|pair| pair[0] != pair[1]).count();
            assert_eq!(sent.len(), 2 * borders, "{}", of(kind, timetable));
        });
    }
}

#[test]
fn no_schedule_deadlocks_whatever_passes_and_messages_cost() {
    // Costs from a linear congruential generator: the same in every run.
    let mut seed = 14u64;
    let mut random = || {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (1 + (seed >> 33) % 9) as f64
    };
    for kind in kinds() {
        each(kind, |timetable| {
            let mut some = || timetable.place.iter().map(|_| random()).collect::<Vec<f64>>();
            let (forward, input, weight) = (some(), some(), some());
            let costs = Costs { forward, input, weight, latency: random() };
            let simulation =
                simulate(timetable, &costs).unwrap_or_else(|e| panic!("{}: {e}", of(kind, timetable)));
            check_times(timetable, &costs, &simulation);
        });
        for (stages, microbatches) in [(13, 40), (16, 23), (16, 70), (24, 25)] {
            let timetable = timetable(kind, stages, microbatches).unwrap();
            let costs = Costs { latency: 3.0, ..Costs::even(timetable.place.len(), 2.0, 3.0, 1.0) };
            check_times(&timetable, &costs, &simulate(&timetable, &costs).unwrap());
        }
    }
}

/// Checks start times against the rules themselves, without the simulator's bookkeeping.
fn check_times(timetable: &Timetable, costs: &Costs, simulation: &SimulatedStep) {
    let mut starts = BTreeMap::new();
    for (actions, times) in timetable.by_stage.iter().zip(&simulation.starts) {
        assert_eq!(actions.len(), times.len());
        starts.extend(actions.iter().copied().zip(times.iter().copied()));
    }
    let end = |pass, chunk, microbatch| {
        let action = Action { pass, chunk, microbatch };
        starts[&action] + costs.of(&action)
    };
    let mut last: f64 = 0.0;
    for (stage, actions) in timetable.by_stage.iter().enumerate() {
        let mut free: f64 = 0.0;
        for action in actions {
            let Action { pass, chunk, microbatch } = *action;
            let from = |other: usize| {
                end(pass, other, microbatch)
                    + if timetable.place[other] == stage { 0.0 } else { costs.latency }
            };
            let ready = match pass {
                StagePass::Forward if chunk == 0 => 0.0,
                StagePass::Forward => from(chunk - 1),
                StagePass::Backward | StagePass::InputGrad if chunk + 1 == timetable.place.len() => {
                    end(StagePass::Forward, chunk, microbatch)
                }
                StagePass::Backward | StagePass::InputGrad => {
                    from(chunk + 1).max(end(StagePass::Forward, chunk, microbatch))
                }
                StagePass::WeightGrad => end(StagePass::InputGrad, chunk, microbatch),
            };
            assert_eq!(starts[action], free.max(ready), "{action}");
            free = end(pass, chunk, microbatch);
        }
        last = last.max(free);
    }
    assert_eq!(simulation.makespan, last);
}

#[test]
fn stages_hold_what_the_schedule_promises() {
    for kind in kinds() {
        each(kind, |timetable| {
            let (p, m) = (timetable.stages, timetable.microbatches);
            for stage in 0..p {
                let held = timetable.held(stage);
                let name = format!("{}, stage {stage}: {held:?}", of(kind, timetable));
                match kind {
                    PipelineKind::Gpipe => assert_eq!(held.activations, m, "{name}"),
                    PipelineKind::OneFOneB | PipelineKind::TwoBw => {
                        assert_eq!(held.activations, m.min(p - stage), "{name}");
                    }
                    PipelineKind::Interleaved { chunks } => {
                        let ahead = (chunks - 1) * group_max(p, m) + 2 * (p - 1 - stage);
                        assert_eq!(held.activations, (chunks * m).min(ahead + 1), "{name}");
                    }
                    // The stage of 1F1B that holds most holds as much.
                    PipelineKind::ZbH1 => assert_eq!(held.activations, m.min(p), "{name}"),
                    PipelineKind::ZbV => {
                        assert!(held.activations <= 2 * m.min(p), "{name}");
                        assert!(held.microbatches <= m.min(2 * p - 1 - stage), "{name}");
                    }
                }
                if timetable.chunks_per_stage == 1 {
                    assert_eq!(held.microbatches, held.activations, "{name}");
                }
            }
        });
    }
    // Groups are as small as they can be: for many microbatches, of as many as there are stages.
    assert_eq!([1, 3, 4, 7, 8, 9, 11, 12, 30].map(|m| group_max(4, m)), [1, 3, 4, 7, 4, 5, 6, 4, 5]);
}

#[test]
fn bubbles_are_as_in_the_formulas() {
    for (forward, input, weight) in COSTS {
        let costs = (forward, input, weight);
        let whole = forward + input + weight;
        for kind in kinds() {
            each(kind, |timetable| {
                let (p, m) = (timetable.stages as f64, timetable.microbatches as f64);
                let got = bubble(timetable, costs);
                let name = format!("{} at {costs:?}", of(kind, timetable));
                match kind {
                    PipelineKind::Gpipe | PipelineKind::OneFOneB | PipelineKind::TwoBw => {
                        assert_eq!(got, (p - 1.0) * whole, "{name}");
                    }
                    PipelineKind::Interleaved { chunks } => {
                        let too_few = (chunks as f64 - 1.0) * (p - m).max(0.0) * whole;
                        assert_eq!(got, (p - 1.0) * whole + too_few, "{name}");
                    }
                    PipelineKind::ZbH1 if m >= p => {
                        let per_stage = (forward + input - weight).max(forward).max(input);
                        assert_eq!(got, (p - 1.0) * per_stage, "{name}");
                    }
                    PipelineKind::ZbH1 => assert!(got <= (p - 1.0) * whole, "{name}: {got}"),
                    PipelineKind::ZbV => assert!(got <= 2.0 * (p - 1.0) * whole, "{name}: {got}"),
                }
            });
        }
    }
}

#[test]
fn zero_bubble_schedules_with_equal_costs() {
    let unit = (1.0, 1.0, 1.0);
    each(PipelineKind::ZbH1, |timetable| {
        let (p, m) = (timetable.stages, timetable.microbatches);
        let want = if m >= p { p - 1 } else { 2 * p - 1 - m };
        assert_eq!(bubble(timetable, unit), want as f64, "{p} stages, {m} microbatches");
    });
    each(PipelineKind::ZbV, |timetable| {
        let (p, m) = (timetable.stages, timetable.microbatches);
        let want = if m >= p { p - 1 } else { (3 * p - 1 - 2 * m).max((4 * p - 1).saturating_sub(4 * m)) };
        assert_eq!(bubble(timetable, unit), want as f64, "{p} stages, {m} microbatches");
    });
    for stages in 2..=8 {
        for microbatches in stages..=32 {
            let bubble = |kind| bubble(&timetable(kind, stages, microbatches).unwrap(), unit);
            let one = bubble(PipelineKind::OneFOneB);
            assert_eq!(3.0 * bubble(PipelineKind::ZbH1), one);
            // A chunk of ZB-V is half a stage, so its unit of time is half as long.
            assert_eq!(6.0 * (bubble(PipelineKind::ZbV) / 2.0), one);
        }
    }
}

#[test]
fn one_f_one_b_holds_less_than_gpipe_and_zb_h1_no_more_than_the_first_stage_of_1f1b() {
    for stages in 1..=8 {
        for microbatches in stages + 1..=32 {
            let held = |kind| -> Vec<usize> {
                let timetable = timetable(kind, stages, microbatches).unwrap();
                (0..stages).map(|stage| timetable.held(stage).activations).collect()
            };
            let (gpipe, one, zb) =
                (held(PipelineKind::Gpipe), held(PipelineKind::OneFOneB), held(PipelineKind::ZbH1));
            assert!(one.iter().zip(&gpipe).all(|(one, gpipe)| one < gpipe), "{one:?} {gpipe:?}");
            assert_eq!(zb.iter().max(), one.iter().max());
            // Two chunks are one stage's worth.
            let v = held(PipelineKind::ZbV);
            assert!(v.iter().all(|activations| *activations <= 2 * one[0]), "{v:?}");
        }
    }
}

#[test]
fn a_run_of_2bw_has_the_bubble_of_one_flush() {
    for stages in 1..=8 {
        for microbatches in (stages - 1).max(1)..=12 {
            let lists = across_steps(stages, microbatches).unwrap();
            assert_eq!(lists.run(1), timetable(PipelineKind::OneFOneB, stages, microbatches).unwrap());
            // Steps follow each other as the microbatches of one long step would.
            let long = timetable(PipelineKind::OneFOneB, stages, 5 * microbatches).unwrap();
            assert_eq!(lists.run(5), long);
            assert_eq!(bubble(&long, (2.0, 3.0, 1.0)), 6.0 * (stages as f64 - 1.0));
        }
    }
}

#[test]
fn two_versions_of_the_weights_are_enough_for_2bw() {
    for stages in 1..=8 {
        for microbatches in (stages - 1).max(1)..=12 {
            let lists = across_steps(stages, microbatches).unwrap();
            for stage in 0..stages {
                // By (step, microbatch): the version that its forward used; and versions by their number of updates.
                let mut used: BTreeMap<(usize, usize), usize> = BTreeMap::new();
                let (mut older, mut newer) = (0, 0);
                for action in &lists.warm_up[stage] {
                    assert_eq!(action.pass, StagePass::Forward);
                    used.insert((0, action.microbatch), older);
                }
                let this = |action: &Action| StepAction { action: *action, next_step: false };
                let drain: Vec<StepAction> = lists.drain[stage].iter().map(this).collect();
                let steps = 4;
                for step in 0..steps {
                    let list = if step + 1 < steps { &lists.steady[stage] } else { &drain };
                    for StepAction { action, next_step } in list {
                        let of = (step + usize::from(*next_step), action.microbatch);
                        let version = if *next_step { newer } else { older };
                        match action.pass {
                            StagePass::Forward => assert_eq!(used.insert(of, version), None),
                            _ => assert_eq!(used.get(&of), Some(&version), "a backward as its forward"),
                        }
                    }
                    (older, newer) = (newer, newer + 1);
                }
                // The same on every stage: the weights of the step before the last.
                assert_eq!(used.len(), steps * microbatches);
                for ((step, _), version) in used {
                    assert_eq!(version, step.saturating_sub(1), "{stages} stages, step {step}");
                }
            }
        }
    }
}

#[test]
fn a_simulation_by_hand() {
    // Two stages, two microbatches, stage 1 slower; a message takes 10.
    let timetable = timetable(PipelineKind::OneFOneB, 2, 2).unwrap();
    let costs =
        Costs { forward: vec![1.0, 2.0], input: vec![2.0, 3.0], weight: vec![1.0, 1.0], latency: 10.0 };
    let got = simulate(&timetable, &costs).unwrap();
    // Stage 0: F0 at 0, F1 at 1, B0 when the gradient is there (11 + 2 + 4 + 10), B1 (17 + 2 + 4 + 10).
    assert_eq!(got.starts, [vec![0.0, 1.0, 27.0, 33.0], vec![11.0, 13.0, 17.0, 19.0]]);
    assert_eq!((got.makespan, got.idle), (36.0, vec![28.0, 24.0]));
    let held = |n| HeldMost { activations: n, microbatches: n };
    assert_eq!(got.held, [held(2), held(1)]);
    // GPipe waits for messages once on the way down and once on the way up.
    for stages in 1..=8 {
        let gpipe = super::timetable(PipelineKind::Gpipe, stages, 9).unwrap();
        let costs = Costs { latency: 5.0, ..Costs::even(stages, 1.0, 1.0, 1.0) };
        assert_eq!(simulate(&gpipe, &costs).unwrap().idle[0], (stages as f64 - 1.0) * (3.0 + 2.0 * 5.0));
    }
}

#[test]
fn timetables_that_cannot_be_run_are_found() {
    let good = timetable(PipelineKind::OneFOneB, 2, 3).unwrap();
    let costs = Costs::even(2, 1.0, 1.0, 1.0);
    // The first stage wants the gradient of microbatch 0 before it has sent that microbatch.
    let mut bad = good.clone();
    bad.by_stage[0].rotate_left(2);
    let action = Action { pass: StagePass::Backward, chunk: 0, microbatch: 0 };
    assert_eq!(bad.by_stage[0][0], action);
    assert_eq!(simulate(&bad, &costs), Err(Stuck::Deadlock { stage: 0, action }));
    // The first stage sends microbatch 1 first, the second one expects microbatch 0.
    let mut bad = good;
    bad.by_stage[0].swap(0, 1);
    let action = Action { pass: StagePass::Forward, chunk: 1, microbatch: 0 };
    assert_eq!(simulate(&bad, &costs), Err(Stuck::OutOfOrder { stage: 1, action, sent: 1 }));
}

#[test]
fn names_are_those_of_job_files() {
    let names = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "2bw"];
    assert_eq!(PipelineKind::ALL.map(|kind| kind.to_string()), names);
    for kind in PipelineKind::ALL {
        assert_eq!(kind.name().parse(), Ok(kind));
    }
    let unknown = "1b1f".parse::<PipelineKind>().unwrap_err();
    assert!(unknown.contains("\"1b1f\"") && names.iter().all(|name| unknown.contains(name)), "{unknown}");
}

#[test]
fn what_cannot_be_says_what_to_change() {
    let interleaved = |chunks| PipelineKind::Interleaved { chunks };
    for (kind, stages, microbatches, says) in [
        (PipelineKind::Gpipe, 0, 4, "set `parallel.stage` to 1 or more"),
        (PipelineKind::ZbV, 4, 0, "set `parallel.microbatches` to 1 or more"),
        (interleaved(0), 4, 8, "not 0; for one chunk per stage set `parallel.schedule = \"1f1b\"`"),
        (interleaved(1), 4, 8, "2 or more chunks per stage, not 1"),
        (PipelineKind::TwoBw, 8, 6, "with 8 stages needs 7 or more microbatches in a step, not 6"),
    ] {
        let e = timetable(kind, stages, microbatches).unwrap_err();
        assert!(e.contains(says), "{kind}: {e}");
    }
    assert!(across_steps(8, 6).is_err() && across_steps(8, 7).is_ok());
}

#[test]
fn pictures_are_those_of_the_documents() {
    let document = include_str!("../../../../docs/algorithms.md");
    for kind in PipelineKind::ALL {
        let got = match kind {
            PipelineKind::TwoBw => picture_across(&across_steps(4, 8).unwrap(), 2).unwrap(),
            _ => picture(&timetable(kind, 4, 8).unwrap()).unwrap(),
        };
        let block = format!("### {kind}\n```\n{got}```\n");
        assert!(document.contains(&block), "docs/algorithms.md should have\n{block}");
    }
    // Wider cells for more than ten microbatches, and the number of the chunk where there are more than two.
    let wide = picture(&timetable(PipelineKind::Gpipe, 1, 11).unwrap()).unwrap();
    assert!(
        wide.starts_with("0 F0 F1 ")
            && wide.ends_with("F10B0 ---B1 ---B2 ---B3 ---B4 ---B5 ---B6 ---B7 ---B8 ---B9 ---B10---\n"),
        "{wide}"
    );
    let three = picture(&timetable(PipelineKind::Interleaved { chunks: 3 }, 1, 1).unwrap()).unwrap();
    assert_eq!(three, "0 0F01F02F02B0---1B0---0B0---\n");
}
