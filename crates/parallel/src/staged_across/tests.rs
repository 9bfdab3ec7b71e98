//! The programs of all stages of runs without a flush, read side by side: none waits for ever, and nothing touches what is on its
//! way.

use std::collections::BTreeMap;
use std::sync::Arc;

use polyreme_graph::{Body, Builder, Exchange, Graph, Init, Moments, Optimizer, Program, differentiate};

use super::*;
use crate::mesh::Mesh;
use crate::passes::compile;
use crate::pipeline::PipelineKind;
use crate::schedule::schedule;

const LAYERS: usize = 8;

/// Products, of which the first, a middle and the last have the same weights if they are tied.
fn step(tied: bool) -> Graph {
    let mut b = Builder::new();
    let mut h = b.input("x", [2, 6], DType::F32).unwrap();
    let shared = b.param("shared", [6, 6], Init::Const(1.0)).unwrap();
    for k in 0..LAYERS {
        let w = match tied && [0, LAYERS / 2, LAYERS - 1].contains(&k) || k == 0 {
            true => shared,
            false => b.param(&format!("w{k}"), [6, 6], Init::Const(1.0)).unwrap(),
        };
        h = b.linear(h, w, None).unwrap();
    }
    let loss = b.mean(h, &[0, 1]).unwrap();
    differentiate(&b.finish(&[("loss", loss)]), loss).unwrap()
}

/// A stage that reads its program.
struct StageReader<'a> {
    program: &'a Program,
    next: usize,
    /// By exchange that is under way: its number among those of its kind.
    started: BTreeMap<usize, usize>,
}

/// How often each kind of exchange was started: of messages, `(from, to, tag)` on either side.
#[derive(Default)]
struct Counts {
    sent: BTreeMap<(usize, usize, u16), usize>,
    posted: BTreeMap<(usize, usize, u16), usize>,
    met: BTreeMap<usize, usize>,
}

impl StageReader<'_> {
    fn exchange(&self, number: usize) -> &Exchange {
        &self.program.exchanges[number]
    }

    /// Reads on as far as the others let it; whether it got on at all.
    fn read(&mut self, stage: usize, stages: usize, counts: &mut Counts) -> bool {
        let began = self.next;
        while let Some(instr) = self.program.instrs.get(self.next) {
            match instr {
                Instr::Start(number) => {
                    let count = match (self.exchange(*number).axis, &self.exchange(*number).op) {
                        (Axis::Stage, &Collective::Send { to, tag }) => counts.sent.entry((stage, to, tag)),
                        (Axis::Stage, &Collective::Receive { from, tag }) => {
                            counts.posted.entry((from, stage, tag))
                        }
                        (Axis::Stage, _) => {
                            *counts.met.entry(stage).or_default() += 1;
                            self.started.insert(*number, counts.met[&stage]);
                            self.next += 1;
                            continue;
                        }
                        // Ranks along other axes have the same program.
                        _ => {
                            self.started.insert(*number, 0);
                            self.next += 1;
                            continue;
                        }
                    };
                    let count = count.or_default();
                    *count += 1;
                    self.started.insert(*number, *count);
                }
                Instr::Wait(number) => {
                    let nth = self.started[number];
                    let of = |counts: &BTreeMap<_, usize>, key| counts.get(&key).copied().unwrap_or(0);
                    let exchange = self.exchange(*number);
                    let there = match (exchange.axis, &exchange.op) {
                        // Whoever sends may have to wait until it is received.
                        (Axis::Stage, &Collective::Send { to, tag }) => {
                            of(&counts.posted, (stage, to, tag)) >= nth
                        }
                        (Axis::Stage, &Collective::Receive { from, tag }) => {
                            of(&counts.sent, (from, stage, tag)) >= nth
                        }
                        (Axis::Stage, _) => {
                            (0..stages).all(|s| counts.met.get(&s).copied().unwrap_or(0) >= nth)
                        }
                        _ => true,
                    };
                    if !there {
                        return self.next > began;
                    }
                    self.started.remove(number);
                }
                other => self.untouched(other),
            }
            self.next += 1;
        }
        self.next > began
    }

    /// No instruction writes what is being sent, or uses what is arriving or being added up.
    fn untouched(&self, instr: &Instr) {
        let (reads, writes): (Vec<&Region>, Vec<&Region>) = match instr {
            Instr::Copy { from, into } => (vec![from], vec![into]),
            Instr::Add { from, into } => (vec![from, into], vec![into]),
            Instr::Begin(of) | Instr::Zero(of) => (vec![], vec![of]),
            Instr::Count { into, tally, .. } => (vec![into, tally], vec![into, tally]),
            Instr::Squares { of, into, .. } => (vec![of, into], vec![into]),
            Instr::Judge(of) => (vec![of], vec![]),
            Instr::Clip { squares, .. } => (vec![squares], vec![]),
            Instr::Update { grads, .. } => (vec![grads], vec![]),
            _ => return,
        };
        for number in self.started.keys() {
            let exchange = self.exchange(*number);
            let sends = matches!(exchange.op, Collective::Send { .. });
            let used = writes.iter().chain(reads.iter().filter(|_| !sends));
            for region in used {
                assert!(!overlap(region, &exchange.of), "{instr:?} during {exchange:?}");
            }
        }
    }
}

fn overlap(a: &Region, b: &Region) -> bool {
    match (a, b) {
        (Region::Buffer(i, a), Region::Buffer(j, b)) => i == j && a.start < b.end && b.start < a.end,
        _ => false,
    }
}

/// All stages come to the end of their programs.
fn check(programs: &[Program], what: &str) {
    let stages = programs.len();
    let mut readers: Vec<StageReader> =
        programs.iter().map(|program| StageReader { program, next: 0, started: BTreeMap::new() }).collect();
    let mut counts = Counts::default();
    while readers.iter().any(|r| r.next < r.program.instrs.len()) {
        let moved: Vec<bool> =
            readers.iter_mut().enumerate().map(|(s, r)| r.read(s, stages, &mut counts)).collect();
        assert!(moved.contains(&true), "{what}: stages wait for each other");
    }
    assert!(readers.iter().all(|r| r.started.is_empty()), "{what}: all exchanges are waited for");
    assert_eq!(counts.sent, counts.posted, "{what}");
}

/// The plans and bodies of all stages of one copy of the model.
fn stages_of(graph: &Graph, mesh: Mesh, training: &Training) -> Vec<(Plan, Arc<Body>)> {
    let plan = Plan { mesh, pipeline: PipelineKind::TwoBw, microbatches: 8, ..Plan::alone() };
    let first = |rank: &usize| mesh.place(*rank, Axis::Data) == 0;
    let of_rank = |rank: usize| {
        let plan = Plan { rank, ..plan.clone() };
        let body = compile(graph, &plan, training, None).unwrap();
        (plan, Arc::new(body))
    };
    (0..mesh.ranks()).filter(first).map(of_rank).collect()
}

/// The program of each stage for a number of steps.
fn programs(
    stages: &[(Plan, Arc<Body>)],
    microbatches: usize,
    steps: usize,
    training: &Training,
) -> Vec<Program> {
    let program = |(plan, body): &(Plan, Arc<Body>)| {
        let plan = Plan { microbatches, run_steps: steps, ..plan.clone() };
        schedule(&plan, training, std::slice::from_ref(body), &plan.whole_step())
    };
    stages.iter().map(program).collect()
}

fn training(clip: Option<f64>) -> Training {
    let optimizer = Optimizer::Adam(Moments::DEFAULT);
    Training { optimizer, moments: DType::F32, clip, ema: None, scaled: false }
}

#[test]
fn stages_never_wait_in_a_circle() {
    for (tied, data) in [(false, 1), (false, 2), (true, 1), (true, 2)] {
        let graph = step(tied);
        for stages in 2..=6 {
            for training in [None, Some(1.0)].map(training) {
                let mesh = Mesh { stage: stages, ..Mesh::data(data) };
                let of_stages = stages_of(&graph, mesh, &training);
                assert_eq!(of_stages.len(), stages);
                for microbatches in stages - 1..=stages + 4 {
                    for steps in 2..=4 {
                        let what = format!(
                            "{stages} stages, {microbatches} microbatches, {steps} steps, data {data}, tied {tied}"
                        );
                        check(&programs(&of_stages, microbatches, steps, &training), &what);
                    }
                }
            }
        }
    }
}

/// The check above fails where it should.
#[test]
fn a_message_that_is_missing_or_used_too_early_is_noticed() {
    let training = training(Some(1.0));
    let stages = stages_of(&step(true), Mesh { stage: 3, ..Mesh::data(1) }, &training);
    let whole = programs(&stages, 4, 3, &training);
    let fails = |programs: Vec<Program>| std::panic::catch_unwind(|| check(&programs, "spoilt")).is_err();
    let kept = |number: usize| matches!(whole[1].exchanges[number].of, Region::Buffer(..));
    let exchanges = (0..whole[1].exchanges.len()).filter(|n| kept(*n)).collect::<Vec<_>>();
    // Squares, tied gradients and losses of two steps at least.
    assert!(exchanges.len() > 12, "{exchanges:?}");
    for number in exchanges {
        let mut missing = whole.clone();
        let of = |instr: &Instr| matches!(instr, Instr::Start(n) | Instr::Wait(n) if *n == number);
        missing[1].instrs.retain(|instr| !of(instr));
        assert!(fails(missing), "exchange {number} is missing");
        let mut late = whole.clone();
        late[1].instrs.retain(|instr| *instr != Instr::Wait(number));
        late[1].instrs.push(Instr::Wait(number));
        let receives = matches!(whole[1].exchanges[number].op, Collective::Receive { .. });
        assert!(!receives || fails(late), "what exchange {number} brings is used before it is there");
    }
}
