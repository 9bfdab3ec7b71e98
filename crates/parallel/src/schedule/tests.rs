//! Programs of small steps as text, and what every rank's program has in common.

use polyreme_graph::builder::BatchNorm;
use polyreme_graph::{BlockCodec, Builder, Graph, Init, Moments, Optimizer, differentiate};

use super::*;
use crate::mesh::Mesh;
use crate::passes::compile;
use crate::plan::Updates;

/// Four products without a bias.
fn step() -> Graph {
    let mut b = Builder::new();
    let mut h = b.input("x", [4, 48], DType::F32).unwrap();
    for name in ["a", "b", "c", "d"] {
        let w = b.param(name, [48, 48], Init::Uniform { bound: 0.5 }).unwrap();
        h = b.linear(h, w, None).unwrap();
    }
    let loss = b.mean(h, &[0, 1]).unwrap();
    differentiate(&b.finish(&[("loss", loss)]), loss).unwrap()
}

const ADAM: Training = Training {
    optimizer: Optimizer::Adam(Moments::DEFAULT),
    moments: DType::F32,
    clip: None,
    ema: None,
    scaled: false,
};

fn plan() -> Plan {
    Plan { mesh: Mesh::data(2), rank: 1, keeps: Keeps::OwnGradients, bucket_bytes: 1, ..Plan::alone() }
}

fn lower(plan: &Plan, training: &Training) -> Program {
    let body = compile(&step(), plan, training, None).unwrap();
    schedule(plan, training, &[Arc::new(body)], &plan.whole_step())
}

/// Compares with the reviewed program; a difference prints all of it.
#[track_caller]
fn check(program: &Program, want: &str) {
    let got = program.to_string();
    assert_eq!(got, want, "\n--- got ---\n{got}");
}

/// What travels coded is said where it is exchanged, with its residual; one buffer is enough for all codes. Alone there is nothing
/// to send.
#[test]
fn a_program_says_what_travels_coded() {
    let coded = Plan { keeps: Keeps::All, wire: Some(WireCodec::Blocks(BlockCodec::Int8)), ..plan() };
    let program = lower(&coded, &ADAM);
    let said = program.to_string();
    let of = |range: &str| format!("all-reduce f32 grads {range} over data as int8 with residual {range}");
    assert!(said.contains(&of("0..2304")) && said.contains(&of("6912..9216")), "{said}");
    assert_eq!(program.exchanges.iter().filter(|e| e.coding.is_some()).count(), 4, "{said}");
    assert!(program.keeps_residual() && program.buffers.iter().filter(|b| b.name == CODES).count() == 1);
    let plain = lower(&Plan { wire: None, ..coded.clone() }, &ADAM);
    let bytes = |p: &Program| -> usize {
        p.exchanges.iter().map(|exchange| p.wire_bytes(exchange, p.len_of(&exchange.of))).sum()
    };
    let totals = plain.exchanges.iter().filter(|e| e.dtype == DType::F64);
    let totals: usize = totals.map(|e| plain.wire_bytes(e, plain.len_of(&e.of))).sum();
    assert_eq!(bytes(&plain) - totals, 4 * 9216);
    assert_eq!(bytes(&program) - totals, 9216 + 4 * 36);
    let alone = lower(&Plan { mesh: Mesh::data(1), rank: 0, ..coded }, &ADAM);
    assert!(!alone.keeps_residual());
}

/// Matrices travel as factors, which are kept one after the other, whatever the buckets are.
#[test]
fn a_program_says_what_travels_as_factors() {
    let plan = Plan { keeps: Keeps::All, wire: Some(WireCodec::LowRank { rank: 3 }), ..plan() };
    for bucket_bytes in [1, 4 * 2 * 2304, usize::MAX] {
        let program = lower(&Plan { bucket_bytes, ..plan.clone() }, &ADAM);
        let said = program.to_string();
        assert!(said.contains("over data as factors of rank 3 with residual 0.."), "{said}");
        assert!(said.contains("..576") && program.factors_len() == 4 * 3 * 48, "{said}");
        let sums = program.exchanges.iter().filter(|e| e.coding.is_some());
        let bytes: usize = sums.map(|e| program.wire_bytes(e, program.len_of(&e.of))).sum();
        assert_eq!(bytes, 4 * 4 * 3 * (48 + 48));
    }
    let before = lower(&plan.without_wire(), &ADAM);
    assert!(!before.keeps_residual() && before.factors_len() == 0);
}

/// With servers nothing is summed and nothing is updated here: each bucket is pushed to all servers, and behind the last push everything is pulled.
#[test]
fn a_program_says_what_is_pushed_and_pulled() {
    let (servers, serving, lockstep) = (2, 0, false);
    let mesh = Mesh::data(3);
    let free =
        Plan { mesh, servers: Some(ServerPlan { servers, serving, lockstep }), keeps: Keeps::All, ..plan() };
    let program = lower(&free, &ADAM);
    let said = program.to_string();
    assert!(program.exchanges.is_empty() && !said.contains("update params"), "{said}");
    let words = ["judge", "push", "pull", "await"];
    let word = |line: &str| words.iter().copied().find(|word| line.trim_start().starts_with(word));
    let order: Vec<&str> = said.lines().filter_map(word).collect();
    let want = [vec!["judge"], vec!["push"; 8], vec!["pull"; 8], vec!["await"; 8]].concat();
    assert_eq!(order, want, "{said}");
    assert!(said.contains("push grads 0..1024 to server 0\n"), "{said}");
    assert!(said.contains("await params 1024..2304\n"), "{said}");
    // A rank without a server keeps no moments.
    let role = program.role.clone().unwrap();
    assert_eq!(role.parts.iter().map(|p| p.iter().map(Range::len).sum::<usize>()).sum::<usize>(), 9216);
    assert!(role.parts[2].iter().all(Range::is_empty));
    // In lockstep the totals are summed as ever; clipping waits for all gradients.
    let together = Plan { servers: Some(ServerPlan { servers, serving, lockstep: true }), ..free.clone() };
    let program = lower(&together, &ADAM);
    assert_eq!(program.exchanges.len(), 1, "{program}");
    // The first of two that serve, in lockstep: it hears of losses, and computes nothing.
    let servers = Some(ServerPlan { servers, serving: 2, lockstep: true });
    let serves = Plan { servers, keeps: Keeps::All, ..plan() };
    let serves = Plan { mesh, rank: 0, ..serves };
    let body = compile(&step(), &serves, &ADAM, None).unwrap();
    let program = schedule(&serves, &ADAM, &[Arc::new(body)], &StepShape::rounds(&[], 1));
    assert_eq!((program.exchanges.len(), program.served.len()), (1, 8), "{program}");
    let hears = |i: &Instr| matches!(i, Instr::Begin(_) | Instr::Start(_) | Instr::Wait(_) | Instr::Judge(_));
    assert!(program.instrs.iter().all(hears), "{program}");
    let said = lower(&free, &Training { clip: Some(1.0), ..ADAM }).to_string();
    assert!(said.find("clip").unwrap() < said.find("push grads").unwrap(), "{said}");
}

/// A step with a scaled loss says where it may skip updates, and what it puts back then; its buffer is planned as all are.
#[test]
fn a_program_says_what_a_skipped_step_puts_back() {
    let mut b = Builder::new();
    let x = b.input("x", [4, 48], DType::F32).unwrap();
    let [gamma, beta] = ["gamma", "beta"].map(|name| b.param(name, [48], Init::Const(1.0)).unwrap());
    let [running_mean, running_var] =
        ["mean", "var"].map(|name| b.state(name, [48], Init::Const(1.0)).unwrap());
    let norm = BatchNorm { gamma, beta, running_mean, running_var, eps: 1e-5, momentum: 0.1 };
    let y = b.batch_norm(x, norm, true).unwrap();
    let loss = b.mean(y, &[0, 1]).unwrap();
    let step = differentiate(&b.finish(&[("loss", loss)]), loss).unwrap();
    for shards in [None, Some(2)] {
        let plan = Plan { shards, ..Plan::alone() };
        let lower = |training: &Training| {
            let body = compile(&step, &plan, training, None).unwrap();
            schedule(&plan, training, &[Arc::new(body)], &plan.whole_step())
        };
        let said = lower(&ADAM).to_string();
        assert!(!said.contains("skip"), "{said}");
        let scaled = lower(&Training { scaled: true, ..ADAM });
        assert!(scaled.buffers.iter().any(|b| b.name == "states before" && b.len == 96));
        let said = scaled.to_string();
        let (kept, back) =
            (said.find(" = states 0..96").unwrap(), said.find("if updates were skipped").unwrap());
        let judged = said.find(", or skip updates").unwrap();
        assert!(kept < judged && judged < back && back > said.rfind("update params").unwrap(), "{said}");
    }
}

/// Only what is not f32 is named, also where a parameter is updated while its gradient is computed.
#[test]
fn a_program_says_what_the_moments_are_stored_in() {
    let half = Training { moments: DType::Bf16, ..ADAM };
    for updates in [Updates::AtEnd, Updates::AtOnce] {
        let plan = Plan { updates, ..Plan::alone() };
        let said = lower(&plan, &half).to_string();
        let of_updates: Vec<&str> = said.lines().filter(|line| line.contains("update ")).collect();
        assert!(!of_updates.is_empty(), "{said}");
        assert!(of_updates.iter().all(|line| line.contains(", moments in bf16")), "{said}");
        assert!(!lower(&plan, &ADAM).to_string().contains("moments"));
        // Without momentum there are none.
        let optimizer = Optimizer::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 };
        assert!(!lower(&plan, &Training { optimizer, ..half }).to_string().contains("moments"));
    }
}

#[test]
fn buckets_take_turns_over_a_network() {
    check(&lower(&plan(), &ADAM), include_str!("../../snapshots/own_gradients.txt"));
}

#[test]
fn buckets_take_turns_where_weights_are_shared() {
    let plan = Plan { weights: Weights::Shared, ..plan() };
    let clipped = Training { clip: Some(1.0), ..ADAM };
    check(&lower(&plan, &clipped), include_str!("../../snapshots/own_gradients_shared.txt"));
}

#[test]
fn two_microbatches_are_added_up_before_they_are_sent() {
    let plan = Plan { keeps: Keeps::OwnMoments, microbatches: 2, bucket_bytes: 1 << 20, ..plan() };
    check(&lower(&plan, &ADAM), include_str!("../../snapshots/accumulated.txt"));
}

#[test]
fn a_reproducible_program_lists_its_tree() {
    let plan = Plan { keeps: Keeps::OwnMoments, shards: Some(5), ..plan() };
    let clipped = Training { clip: Some(1.0), ..ADAM };
    check(&lower(&plan, &clipped), include_str!("../../snapshots/reproducible.txt"));
}

/// A rank that has begun to update needs no other one: whoever is lost then, its state is that of a whole number of steps.
#[test]
fn an_elastic_program_exchanges_nothing_after_its_first_update() {
    for (shards, clip) in [(None, None), (None, Some(1.0)), (Some(5), None), (Some(5), Some(1.0))] {
        for elastic in [true, false] {
            let plan = Plan { keeps: Keeps::All, shards, elastic, ..plan() };
            let program = lower(&plan, &Training { clip, ..ADAM });
            let updates = |i: &Instr| matches!(i, Instr::Update { .. });
            let first = program.instrs.iter().position(updates).expect("an update");
            let exchanges = |i: &Instr| matches!(i, Instr::Start(_) | Instr::Wait(_));
            let late = program.instrs[first..].iter().any(exchanges);
            // The others wait for one bucket after the other, or gather what each has updated.
            assert_eq!(
                late,
                !elastic && (clip.is_none() || shards.is_some()),
                "{shards:?} {clip:?} {elastic}"
            );
            let role = program.role.as_ref().expect("a rank's program");
            let own: usize = role.own().iter().map(|range| range.len()).sum();
            assert_eq!(own == 4 * 48 * 48, elastic || shards.is_none(), "{shards:?} {elastic}");
        }
    }
}

/// A rank without samples makes the same exchanges as the others, in the same order, and computes nothing.
#[test]
fn a_rank_without_samples_takes_part_in_every_exchange() {
    for keeps in [Keeps::All, Keeps::OwnMoments, Keeps::OwnGradients] {
        let plan = Plan { keeps, ..plan() };
        let body = Arc::new(compile(&step(), &plan, &ADAM, None).unwrap());
        let microbatch = Microbatch { body: 0, first_sample: 0 };
        let started = |program: &Program| -> Vec<String> {
            let start = |i: &Instr| match i {
                Instr::Start(i) => Some(program.describe(&program.exchanges[*i])),
                _ => None,
            };
            program.instrs.iter().filter_map(start).collect()
        };
        for rounds in [1, 3] {
            let full = StepShape::rounds(&vec![microbatch; rounds], rounds);
            let full = schedule(&plan, &ADAM, std::slice::from_ref(&body), &full);
            for n in 0..rounds {
                let shape = StepShape::rounds(&vec![microbatch; n], rounds);
                let fewer = schedule(&plan, &ADAM, std::slice::from_ref(&body), &shape);
                assert_eq!(started(&fewer), started(&full), "{keeps:?}, {n} of {rounds}");
                let loads = fewer.instrs.iter().filter(|i| matches!(i, Instr::Load { .. })).count();
                assert_eq!(loads, n);
            }
        }
    }
}

#[test]
fn one_rank_updates_at_once_when_it_knows_that_the_loss_is_finite() {
    let plan = Plan { updates: Updates::AtOnce, ..Plan::alone() };
    let program = lower(&plan, &ADAM);
    let updates = |program: &Program, i: &Instr| match i {
        Instr::Run { block, .. } => program.blocks[*block].update.is_some(),
        _ => false,
    };
    let judged = program.instrs.iter().position(|i| matches!(i, Instr::Judge(_)));
    let first = program.instrs.iter().position(|i| updates(&program, i));
    assert!(judged.is_some() && judged < first, "{program}");
    // Gradients that other ranks wait for, or that are clipped, are applied at the end.
    let later = |training: Training, plan: &Plan| {
        let program = lower(plan, &training);
        assert!(!program.instrs.iter().any(|i| updates(&program, i)), "{program}");
    };
    later(Training { clip: Some(1.0), ..ADAM }, &plan);
    later(ADAM, &Plan { mesh: Mesh::data(2), ..plan.clone() });
    later(ADAM, &Plan { microbatches: 2, ..plan.clone() });
    later(ADAM, &Plan { shards: Some(4), ..plan });
}

#[test]
fn one_rank_has_nothing_to_shard() {
    let plan = Plan { keeps: Keeps::OwnGradients, ..Plan::alone() };
    let program = lower(&plan, &ADAM);
    assert_eq!(program.grad_buffers, None);
    assert_eq!(program.to_string(), lower(&Plan::alone(), &ADAM).to_string());
}

#[test]
#[should_panic(expected = "this optimizer needs the gradients of whole tensors")]
fn an_optimizer_of_whole_tensors_is_refused() {
    lower(
        &plan(),
        &Training {
            optimizer: Optimizer::Lamb(Moments::DEFAULT),
            moments: DType::F32,
            clip: None,
            ema: None,
            scaled: false,
        },
    );
}
