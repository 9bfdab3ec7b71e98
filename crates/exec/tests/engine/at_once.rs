//! Updates made while gradients are computed, against the same updates at the end.

use polyreme_collective::Comm;
use polyreme_exec::{Engine, ExecError, Kept, Options};
use polyreme_graph::{Instr, Program};
use polyreme_kernels::Isa;
use polyreme_kernels::optim::{Moments, Optimizer};
use polyreme_parallel::{DataPlan, data_parallel};

use crate::nets::{self, Net};
use crate::ranks::{base, feed, step_graph};

const MOMENTS: Moments = Moments { weight_decay: 0.01, ..Moments::DEFAULT };

const OPTIMIZERS: [Optimizer; 6] = [
    Optimizer::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 },
    Optimizer::Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.0 },
    Optimizer::Sgd { momentum: 0.9, nesterov: true, weight_decay: 0.1 },
    Optimizer::Adam(MOMENTS),
    Optimizer::AdamW(MOMENTS),
    Optimizer::Lamb(MOMENTS),
];

fn n_at_once(program: &Program) -> usize {
    program.instrs.iter().filter(|i| matches!(i, Instr::Apply { .. })).count()
}

/// Losses, parameters and moments of three steps, by name: parameters lie elsewhere if gradients come in another order.
fn train(net: &Net, program: Program, options: Options) -> Vec<(String, Vec<u32>)> {
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
    let mut engine = Engine::new(program, options).unwrap();
    let mut seen = Vec::new();
    for step in 0..3 {
        net.feed(&mut engine, step);
        engine.step(1e-2).unwrap();
        seen.push((format!("loss {step}"), bits(engine.output("loss").unwrap())));
    }
    for slot in engine.param_slots() {
        seen.push((slot.name.clone(), bits(engine.param(&slot.name).unwrap())));
        for moment in [Kept::Moment1, Kept::Moment2] {
            if let Some(part) = engine.kept(moment).get(slot.range.clone()) {
                seen.push((format!("{moment:?} of {}", slot.name), bits(part)));
            }
        }
    }
    seen.sort();
    seen
}

#[test]
fn the_bits_are_those_of_updates_at_the_end() {
    for net in nets::all() {
        for optimizer in OPTIMIZERS {
            let program = Program::train_at_once(&net.step, optimizer);
            let lamb = matches!(optimizer, Optimizer::Lamb(_));
            assert_eq!(n_at_once(&program) == 0, lamb, "{}: {optimizer:?}", net.name);
            compare(&net, &program, optimizer, Options::threads(3));
        }
    }
    let net = &nets::all()[1];
    let program = Program::train_at_once(&net.step, OPTIMIZERS[1]);
    for isa in Isa::available() {
        compare(net, &program, OPTIMIZERS[1], Options { isa, ..Options::threads(1) });
    }
}

fn compare(net: &Net, program: &Program, optimizer: Optimizer, options: Options) {
    let want = train(net, Program::train(&net.step, optimizer, None), options);
    let got = train(net, program.clone(), options);
    for (want, got) in want.iter().zip(&got) {
        assert!(want == got, "{}, {optimizer:?}, {options:?}: {} differs", net.name, want.0);
    }
    assert_eq!(want.len(), got.len());
}

#[test]
fn gradients_that_are_kept_nowhere_take_no_memory() {
    for net in nets::all() {
        let sgd = OPTIMIZERS[1];
        let program = Program::train_at_once(&net.step, sgd);
        let applied = |i: &Instr| match *i {
            Instr::Apply { param, .. } => program.graph.shape(program.graph.params[param].value).numel(),
            _ => 0,
        };
        let less: usize = program.instrs.iter().map(applied).sum();
        let [at_end, at_once] = [Program::train(&net.step, sgd, None), program.clone()].map(|program| {
            (Engine::footprint(&program, 2), Engine::new(program, Options::threads(2)).unwrap().held())
        });
        assert!(less > 0, "{}", net.name);
        // Gradients begin on cache lines.
        assert!(at_once.0.grads + 4 * less <= at_end.0.grads, "{}", net.name);
        assert_eq!(at_once.1.grads, at_once.0.grads, "{}", net.name);
    }
}

#[test]
fn gradients_cannot_be_asked_for() {
    let net = &nets::all()[1];
    let mut engine =
        Engine::new(Program::train_at_once(&net.step, OPTIMIZERS[1]), Options::threads(1)).unwrap();
    net.feed(&mut engine, 0);
    let before = engine.kept(Kept::Params).to_vec();
    assert_eq!(engine.run(), Err(ExecError::AtOnce));
    assert_eq!(engine.grad(&net.step.params[0].name), Err(ExecError::AtOnce));
    assert_eq!(engine.kept(Kept::Params), before);
    let program = lone(4, true);
    let mut engine = Engine::join(program, Options::threads(1), Comm::local(1).remove(0)).unwrap();
    engine.begin_step();
    assert_eq!(engine.accumulate(0.5), Err(ExecError::AtOnce));
    assert_eq!(engine.finish_empty(0.1, [0.0; 2]), Err(ExecError::AtOnce));
}

fn lone(n: usize, at_once: bool) -> Program {
    let plan = DataPlan { at_once, ..DataPlan::alone() };
    data_parallel(&step_graph(n, true), base().optimizer, None, &plan)
}

#[test]
fn a_lone_rank_of_a_group_updates_at_once() {
    assert!(n_at_once(&lone(4, true)) > 0);
    let [want, got] = [false, true].map(|at_once| {
        let comm = Comm::local(1).remove(0);
        let mut engine = Engine::join(lone(4, at_once), Options::threads(2), comm).unwrap();
        let short = engine.add_batch(lone(3, at_once)).unwrap();
        let mut losses = Vec::new();
        for step in 0..4 {
            engine.select(if step % 2 == 0 { 0 } else { short });
            engine.begin_step();
            feed(&mut engine, step, 0..4 - step % 2);
            losses.push(engine.finish(0.75, 0.1, [0.0; 2]).unwrap().loss);
        }
        let slots = engine.param_slots();
        let mut params: Vec<_> =
            slots.into_iter().map(|s| (s.name.clone(), engine.param(&s.name).unwrap().to_vec())).collect();
        params.sort_by(|a, b| a.0.cmp(&b.0));
        (losses, params)
    });
    assert_eq!(want, got);
    let comm = Comm::local(1).remove(0);
    let mut engine = Engine::join(lone(4, true), Options::threads(1), comm).unwrap();
    assert_eq!(engine.add_batch(lone(3, false)), Err(ExecError::Layout));
}

#[test]
fn a_loss_that_is_not_finite_updates_nothing() {
    let mut engine = Engine::join(lone(4, true), Options::threads(2), Comm::local(1).remove(0)).unwrap();
    for bad in [false, true] {
        engine.begin_step();
        feed(&mut engine, 0, 0..4);
        let before = [Kept::Params, Kept::Moment1, Kept::States].map(|k| engine.kept(k).to_vec());
        if bad {
            engine.input_f32("x").unwrap()[3] = f32::NAN;
        }
        let outcome = engine.finish(1.0, 0.1, [0.0; 2]);
        let after = [Kept::Params, Kept::Moment1, Kept::States].map(|k| engine.kept(k).to_vec());
        if bad {
            assert!(matches!(outcome, Err(ExecError::NotFinite { here: true, .. })), "{outcome:?}");
            assert_eq!(before, after);
            let place = engine.find_non_finite().unwrap().unwrap().to_string();
            assert!(place.contains("element 3"), "{place}");
        } else {
            outcome.unwrap();
            assert!(before.iter().zip(&after).all(|(a, b)| a != b));
        }
    }
}
