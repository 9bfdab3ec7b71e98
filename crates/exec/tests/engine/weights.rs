//! The learnt state, seen from outside: microbatches against the whole batch, a copied engine against the first, and the
//! search for what is not finite.

use polyreme_exec::{Engine, ExecError, Kept, NonFinite, Options};
use polyreme_graph::{Builder, DType, Graph, Init, Instr, Moments, Optimizer, Program, differentiate};

use crate::random::TestRandom;

const SGD: Optimizer = Optimizer::Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.0 };
const ADAM: Optimizer = Optimizer::Adam(Moments::DEFAULT);
const LAMB: Optimizer = Optimizer::Lamb(Moments::DEFAULT);
const BATCH: usize = 12;

/// A net with dropout, on `batch` rows.
fn step(batch: usize) -> Graph {
    let mut b = Builder::new();
    let x = b.input("x", [batch, 9], DType::F32).unwrap();
    let t = b.input("t", [batch, 3], DType::F32).unwrap();
    let hidden = b.layer("first", |b| {
        let w = b.param("w", [9, 33], Init::Uniform { bound: 1.0 }).unwrap();
        let h = b.matmul(x, w, false, false).unwrap();
        let h = b.activation("exp", h).unwrap();
        b.dropout(h, 0.5).unwrap()
    });
    let y = b.layer("second", |b| {
        let w = b.param("w", [33, 3], Init::Uniform { bound: 0.1 }).unwrap();
        b.matmul(hidden, w, false, false).unwrap()
    });
    let loss = b.mse(y, t).unwrap();
    let forward = b.finish(&[("loss", loss)]);
    differentiate(&forward, loss).unwrap()
}

fn fill(engine: &mut Engine, first: usize, rows: usize) {
    let mut random = TestRandom::new(5);
    let whole: Vec<f32> = (0..BATCH * 9).map(|_| random.uniform(-1.0, 1.0)).collect();
    engine.input_f32("x").unwrap().copy_from_slice(&whole[first * 9..(first + rows) * 9]);
    engine.input_f32("t").unwrap().fill(0.25);
}

fn train(batch: usize) -> Engine {
    Engine::new(Program::train(&step(batch), SGD, None), Options::threads(2)).unwrap()
}

#[test]
fn pieces_of_a_batch_give_the_gradients_of_the_whole() {
    let gradients = |first: usize, rows: usize| {
        let mut program = Program::gradients(&step(rows));
        program.microbatches[0].first_sample = first;
        let mut engine = Engine::new(program, Options::threads(2)).unwrap();
        fill(&mut engine, first, rows);
        engine.run().unwrap();
        engine
    };
    let whole = gradients(0, BATCH);
    for rows in [1, 3, 4, 6] {
        let mut sum = vec![0.0; whole.grads().len()];
        for first in (0..BATCH).step_by(rows) {
            let piece = gradients(first, rows);
            let weight = rows as f32 / BATCH as f32;
            sum.iter_mut().zip(piece.grads()).for_each(|(s, g)| *s += weight * g);
        }
        for (k, (a, b)) in sum.iter().zip(whole.grads()).enumerate() {
            assert!((a - b).abs() <= 1e-5 * b.abs().max(1.0), "{rows} rows, gradient {k}: {a} and {b}");
        }
    }
}

#[test]
fn an_engine_with_the_same_arenas_goes_on_with_the_same_bits() {
    let mut first = train(BATCH);
    fill(&mut first, 0, BATCH);
    for _ in 0..3 {
        first.step(0.01).unwrap();
    }
    let mut second = train(BATCH);
    fill(&mut second, 0, BATCH);
    for what in [Kept::Params, Kept::States, Kept::Moment1, Kept::Moment2] {
        second.kept_mut(what).copy_from_slice(first.kept(what));
    }
    second.set_steps_done(first.steps_done());
    for engine in [&mut first, &mut second] {
        engine.step(0.01).unwrap();
    }
    assert_eq!(first.kept(Kept::Params), second.kept(Kept::Params));
}

/// The same with moments of bf16, which are widened and put back as a checkpoint does it.
#[test]
fn moments_of_bf16_are_put_back_exactly_and_others_are_rounded() {
    let program = || Program { moments: DType::Bf16, ..Program::train(&step(BATCH), ADAM, None) };
    let [mut first, mut second] = [0, 1].map(|_| Engine::new(program(), Options::threads(2)).unwrap());
    fill(&mut first, 0, BATCH);
    fill(&mut second, 0, BATCH);
    (0..3).for_each(|_| first.step(0.01).unwrap());
    for what in [Kept::Params, Kept::States, Kept::Moment1, Kept::Moment2] {
        let numbers = first.kept_wide(what);
        let (start, end) = numbers.split_at(numbers.len() / 3);
        second.put_kept(what, start.len(), end);
        second.put_kept(what, 0, start);
        assert_eq!(second.kept_wide(what), numbers);
    }
    second.set_steps_done(first.steps_done());
    for engine in [&mut first, &mut second] {
        engine.step(0.01).unwrap();
    }
    for what in [Kept::Params, Kept::Moment1, Kept::Moment2] {
        assert_eq!(first.kept_wide(what), second.kept_wide(what), "{what:?}");
    }
    assert_eq!((first.kept_dtype(Kept::Moment2), first.kept_dtype(Kept::Params)), (DType::Bf16, DType::F32));
    // A tie, to even, and one that is nearer to the next.
    first.put_kept(Kept::Moment1, 1, &[f32::from_bits(0x3f80_8000), f32::from_bits(0x3f80_8001)]);
    assert_eq!(first.kept_wide(Kept::Moment1)[1..3], [1.0, f32::from_bits(0x3f81_0000)]);
    let whole = Program { moments: DType::Bf16, ..Program::train(&step(BATCH), LAMB, None) };
    let refused = Engine::new(whole, Options::threads(1)).err().unwrap();
    assert_eq!(refused, ExecError::Moments { dtype: DType::Bf16 });
}

#[test]
fn slots_name_every_parameter() {
    let engine = train(BATCH);
    for slot in engine.param_slots() {
        assert_eq!(slot.dims.iter().product::<usize>(), slot.range.len());
        assert_eq!(&engine.kept(Kept::Params)[slot.range], engine.param(&slot.name).unwrap());
    }
}

#[test]
fn an_average_follows_the_parameters() {
    let mut program = Program::train(&step(BATCH), SGD, None);
    program.instrs.push(Instr::Follow { decay: 0.3 });
    assert!(program.to_string().contains("average += (1 - 0.3) · (params - average)"));
    let mut engine = Engine::new(program, Options::threads(2)).unwrap();
    let mut want: Vec<f64> = engine.kept(Kept::Params).iter().map(|p| f64::from(*p)).collect();
    for step in 1..=5 {
        fill(&mut engine, 0, BATCH);
        engine.step(1e-3).unwrap();
        // The first steps follow more quickly.
        let decay = f64::min(0.3, f64::from(1 + step) / f64::from(10 + step));
        for ((want, got), p) in want.iter_mut().zip(engine.kept(Kept::Average)).zip(engine.kept(Kept::Params))
        {
            *want += (1.0 - decay) * (f64::from(*p) - *want);
            assert!((f64::from(*got) - *want).abs() < 1e-5 * (1.0 + want.abs()), "step {step}");
        }
    }
    let (params, average) = (engine.kept(Kept::Params).to_vec(), engine.kept(Kept::Average).to_vec());
    assert_ne!(params, average);
    engine.swap_average();
    assert_eq!((engine.kept(Kept::Params), engine.kept(Kept::Average)), (&average[..], &params[..]));
}

#[test]
fn the_first_that_is_not_finite_is_named() {
    let mut engine = train(BATCH);
    fill(&mut engine, 0, BATCH);
    assert_eq!(engine.find_non_finite().unwrap(), None);

    engine.input_f32("x").unwrap()[7] = f32::NAN;
    assert_eq!(engine.find_non_finite().unwrap(), Some(NonFinite::Input { name: "x".into(), idx: 7 }));

    fill(&mut engine, 0, BATCH);
    engine.param_mut("second.w").unwrap()[2] = f32::INFINITY;
    assert_eq!(engine.find_non_finite().unwrap(), Some(NonFinite::Param { name: "second.w".into() }));

    engine.param_mut("second.w").unwrap()[2] = 0.0;
    // exp of more than 88 is infinite.
    engine.input_f32("x").unwrap().fill(1e4);
    let Some(NonFinite::Node { layer, backward, .. }) = engine.find_non_finite().unwrap() else {
        panic!("nothing was found")
    };
    assert_eq!((layer.as_str(), backward), ("first", false));
}
