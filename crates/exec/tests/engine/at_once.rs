//! Updates made while gradients are computed, against the same updates at the end.

use std::sync::Arc;

use polyreme_collective::Comm;
use polyreme_exec::{Engine, ExecError, Inputs, Kept, Options, StepArgs, Totals};
use polyreme_graph::{DType, Program};
use polyreme_kernels::Isa;
use polyreme_kernels::optim::{Adafactor, Moments, Optimizer};
use polyreme_parallel::{Plan, StepShape, Training, Updates, compile, schedule};

use crate::nets::{self, Net};
use crate::ranks::{base, feed, step_graph};

const MOMENTS: Moments = Moments { weight_decay: 0.01, ..Moments::DEFAULT };

const OPTIMIZERS: [Optimizer; 8] = [
    Optimizer::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 },
    Optimizer::Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.0 },
    Optimizer::Sgd { momentum: 0.9, nesterov: true, weight_decay: 0.1 },
    Optimizer::Adam(MOMENTS),
    Optimizer::AdamW(MOMENTS),
    Optimizer::Lamb(MOMENTS),
    Optimizer::Lion { beta1: 0.9, beta2: 0.99, weight_decay: 0.1 },
    Optimizer::Adafactor(Adafactor::DEFAULT),
];

fn n_at_once(program: &Program) -> usize {
    program.blocks.iter().filter(|b| b.update.is_some()).count()
}

/// Losses, parameters and moments of three steps, by name: their layout differs if gradients come in another order.
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
    }
    for moment in [Kept::Moment1, Kept::Moment2] {
        for slot in engine.moment_slots(moment) {
            seen.push((format!("{moment:?} of {}", slot.name), bits(&engine.kept_wide(moment)[slot.range])));
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
            let whole = matches!(optimizer, Optimizer::Lamb(_) | Optimizer::Adafactor(_));
            assert_eq!(n_at_once(&program) == 0, whole, "{}: {optimizer:?}", net.name);
            compare(&net, &program, optimizer, Options::threads(3));
            if !whole {
                let half = Program { moments: DType::Bf16, ..program };
                compare(&net, &half, optimizer, Options::threads(3));
            }
        }
    }
    let net = &nets::all()[1];
    let program = Program::train_at_once(&net.step, OPTIMIZERS[1]);
    for isa in Isa::available() {
        for moments in [DType::F32, DType::Bf16] {
            let program = Program { moments, ..program.clone() };
            compare(net, &program, OPTIMIZERS[1], Options { isa, ..Options::threads(1) });
        }
    }
}

fn compare(net: &Net, program: &Program, optimizer: Optimizer, options: Options) {
    let late = Program { moments: program.moments, ..Program::train(&net.step, optimizer, None) };
    let want = train(net, late, options.clone());
    let got = train(net, program.clone(), options.clone());
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
        let numel = |p: usize| program.graph().shape(program.graph().params[p].value).numel();
        let less: usize = program.blocks.iter().filter_map(|b| b.update).map(numel).sum();
        let [at_end, at_once] = [Program::train(&net.step, sgd, None), program.clone()].map(|program| {
            (
                Engine::footprint(&program, 2, polyreme_exec::Isa::detect()),
                Engine::new(program, Options::threads(2)).unwrap().held(),
            )
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
    assert_eq!(engine.run(), Err(ExecError::Updates));
    assert_eq!(engine.grad(&net.step.params[0].name), Err(ExecError::AtOnce));
    assert_eq!(engine.kept(Kept::Params), before);
}

fn lone(sizes: &[usize], updates: Updates) -> Vec<Program> {
    let plan = Plan { updates, ..Plan::alone() };
    let training =
        Training { optimizer: base().optimizer, moments: DType::F32, clip: None, ema: None, scaled: false };
    let program = |n: &usize| {
        let body = compile(&step_graph(*n, true), &plan, &training, None).unwrap();
        schedule(&plan, &training, &[Arc::new(body)], &StepShape::one())
    };
    sizes.iter().map(program).collect()
}

/// A step of samples `0..n`.
fn step(engine: &mut Engine, seed: usize, n: usize, lr: f32, bad: bool) -> Result<Totals, ExecError> {
    let mut load = |_: usize, inputs: &mut Inputs| -> Result<f64, ExecError> {
        feed(inputs, seed, 0..n);
        if bad {
            inputs.f32("x")?[3] = f32::NAN;
        }
        Ok(0.75)
    };
    engine.step_with(&mut load, StepArgs { lr, ..StepArgs::default() })
}

#[test]
fn a_lone_rank_of_a_group_updates_at_once() {
    assert!(n_at_once(&lone(&[4], Updates::AtOnce)[0]) > 0);
    let [want, got] = [Updates::AtEnd, Updates::AtOnce].map(|updates| {
        let comm = Comm::local(1).remove(0);
        let [whole, short] = &lone(&[4, 3], updates)[..] else { unreachable!("two sizes") };
        let mut engine = Engine::join(whole.clone(), Options::threads(2), comm).unwrap();
        let short = engine.add(short.clone()).unwrap();
        let mut losses = Vec::new();
        for k in 0..4 {
            engine.select(if k % 2 == 0 { 0 } else { short });
            losses.push(step(&mut engine, k, 4 - k % 2, 0.1, false).unwrap().loss);
        }
        let slots = engine.param_slots();
        let mut params: Vec<_> =
            slots.into_iter().map(|s| (s.name.clone(), engine.param(&s.name).unwrap().to_vec())).collect();
        params.sort_by(|a, b| a.0.cmp(&b.0));
        (losses, params)
    });
    assert_eq!(want, got);
    let comm = Comm::local(1).remove(0);
    let mut engine = Engine::join(lone(&[4], Updates::AtOnce).remove(0), Options::threads(1), comm).unwrap();
    assert_eq!(engine.add(lone(&[3], Updates::AtEnd).remove(0)), Err(ExecError::Layout));
}

#[test]
fn a_loss_that_is_not_finite_updates_nothing() {
    let program = lone(&[4], Updates::AtOnce).remove(0);
    let mut engine = Engine::join(program, Options::threads(2), Comm::local(1).remove(0)).unwrap();
    for bad in [false, true] {
        let before = [Kept::Params, Kept::Moment1, Kept::States].map(|k| engine.kept(k).to_vec());
        let outcome = step(&mut engine, 0, 4, 0.1, bad);
        let after = [Kept::Params, Kept::Moment1, Kept::States].map(|k| engine.kept(k).to_vec());
        if bad {
            let Err(ExecError::NotFinite { here: true, place: Some(place), .. }) = outcome else {
                panic!("{outcome:?}")
            };
            assert_eq!(before, after);
            assert!(place.to_string().contains("element 3"), "{place}");
        } else {
            outcome.unwrap();
            assert!(before.iter().zip(&after).all(|(a, b)| a != b));
        }
    }
}
