//! What is lent to a reader does not change while steps go on, and the memory for copies stays within bounds.

use polyreme_exec::{Engine, ExecError, Kept, Loan, Options};
use polyreme_graph::{Builder, DType, Graph, Init, Instr, Moments, Optimizer, Program, differentiate};

const ADAM: Optimizer = Optimizer::Adam(Moments::DEFAULT);
const KEPT: [Kept; 4] = [Kept::Params, Kept::Moment1, Kept::Moment2, Kept::Average];

/// Two layers of over three million weights each, and one of a few.
fn graph() -> Graph {
    let mut b = Builder::new();
    let mut x = b.input("x", [2, 2000], DType::F32).unwrap();
    let t = b.input("t", [2, 3], DType::F32).unwrap();
    for (name, dims) in [("first", [2000, 1701]), ("second", [1701, 1801]), ("last", [1801, 3])] {
        x = b.layer(name, |b| {
            let w = b.param("w", dims, Init::Uniform { bound: 0.05 }).unwrap();
            b.matmul(x, w, false, false).unwrap()
        });
    }
    let loss = b.mse(x, t).unwrap();
    let forward = b.finish(&[("loss", loss)]);
    differentiate(&forward, loss).unwrap()
}

/// With updates after all gradients, and with updates while they are computed; with moments of bf16, and of f32.
fn engines() -> [Engine; 4] {
    let late = Program::train(&graph(), ADAM, None);
    let at_once = Program::train_at_once(&graph(), ADAM);
    let half = |program: &Program| Program { moments: DType::Bf16, ..program.clone() };
    [half(&late), half(&at_once), late, at_once].map(|mut program| {
        program.instrs.push(Instr::Follow { decay: 0.9 });
        let mut engine = Engine::new(program, Options::threads(2)).unwrap();
        engine.input_f32("x").unwrap().fill(0.5);
        engine.input_f32("t").unwrap().fill(0.25);
        engine.step(0.01).unwrap();
        engine
    })
}

fn all(engine: &Engine) -> Vec<Vec<f32>> {
    KEPT.map(|what| engine.kept_wide(what)).into()
}

/// Reads everything, in the order of the tensors or in reverse, in parts of an odd length.
fn read(loan: &Loan, engine_slots: &[std::ops::Range<usize>], backwards: bool) -> Vec<Vec<f32>> {
    let mut read: Vec<Vec<f32>> = KEPT.iter().map(|what| vec![0.0; loan.len(*what)]).collect();
    let mut parts: Vec<std::ops::Range<usize>> = Vec::new();
    for slot in engine_slots {
        parts.extend(slot.clone().step_by(700_001).map(|start| start..slot.end.min(start + 700_001)));
    }
    if backwards {
        parts.reverse();
    }
    for part in parts {
        for (what, into) in KEPT.iter().zip(&mut read) {
            let mut at = part.start;
            loan.read(*what, part.clone(), &mut |x| {
                into[at..at + x.len()].copy_from_slice(x);
                at += x.len();
            });
            assert_eq!(at, part.end);
        }
    }
    read
}

#[test]
fn a_reader_gets_what_was_learnt_when_it_was_lent() {
    for mut engine in engines() {
        let slots: Vec<_> = engine.param_slots().into_iter().map(|slot| slot.range).collect();
        for backwards in [false, true] {
            let want = all(&engine);
            let loan = engine.lend().unwrap();
            let got = std::thread::scope(|scope| {
                let reader = scope.spawn(|| {
                    let got = read(&loan, &slots, backwards);
                    // Not before: until then the engine may wait for the rest.
                    drop(loan);
                    got
                });
                (0..3).for_each(|_| engine.step(0.01).unwrap());
                reader.join().unwrap()
            });
            assert!(want == got, "backwards {backwards}");
            assert!(want != all(&engine), "steps went on");
        }
    }
}

/// A reader that gives up, as after a disk error, does not block training.
#[test]
fn steps_go_on_when_a_reader_gives_up() {
    for mut engine in engines() {
        let loan = engine.lend().unwrap();
        let before = engine.param("last.w").unwrap().to_vec();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                loan.read(Kept::Moment1, 0..10, &mut |_| ());
                drop(loan);
            });
            (0..3).for_each(|_| engine.step(0.01).unwrap());
        });
        assert!(before != engine.param("last.w").unwrap());
    }
}

/// The reading order is the order of updates, and covers all parameters.
#[test]
fn the_order_of_updates_has_all_parameters() {
    for mut engine in engines() {
        let slots = engine.param_slots();
        let loan = engine.lend().unwrap();
        for slot in &slots {
            let covered = loan.order().iter().any(|r| r.start <= slot.range.start && slot.range.end <= r.end);
            assert!(covered, "{}", slot.name);
        }
    }
}

/// A rank that enters computes nothing with what is learnt before the update of a step: it may come until then, in any order.
#[test]
fn what_comes_in_parts_before_an_update_is_as_if_it_had_been_there() {
    let [mut half, _, mut late, _] = engines();
    for (engine, number) in [(&mut half, 0), (&mut late, 2)] {
        let [mut enters, mut undisturbed] = [(); 2].map(|()| engines().into_iter().nth(number).unwrap());
        // Gradients do not depend on them, and updates do.
        for what in [Kept::Moment1, Kept::Moment2] {
            enters.put_kept(what, 0, &vec![0.0; enters.kept_wide(what).len()]);
        }
        let parts = engine.learnt_parts();
        let loan = engine.lend_parts(&parts);
        let mut incoming = enters.incoming()().unwrap();
        enters.expect(Box::new(move || {
            for (number, part) in parts.iter().enumerate().rev() {
                let bytes = loan.read_part(part);
                assert!(!incoming.put(number, &bytes[1..]), "another length");
                assert!(incoming.put(number, &bytes));
                assert!(!incoming.put(number, &bytes), "a second time");
            }
            assert!(incoming.is_whole() && !incoming.put(parts.len(), &[]));
            Ok(incoming.into_learnt())
        }));
        assert!(!enters.has_learnt());
        enters.step(0.01).unwrap();
        undisturbed.step(0.01).unwrap();
        assert!(enters.has_learnt() && all(&enters) == all(&undisturbed));
        // The loan has ended.
        engine.step(0.01).unwrap();
        assert!(all(engine) == all(&undisturbed));
    }
}

/// Whoever asks then knows that this rank has nothing.
#[test]
fn what_does_not_come_stays_missing() {
    let [_, _, mut engine, _] = engines();
    engine.expect(Box::new(|| Err(ExecError::Layout)));
    for _ in 0..2 {
        assert_eq!(engine.step(0.01), Err(ExecError::Layout));
        assert!(!engine.has_learnt());
    }
}
