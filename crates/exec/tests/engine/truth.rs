//! The program is the truth: the calls that ranks make of their group in a step are those that the program lists, in order,
//! with op, element type and range. Over a grid of models, plans and transports.

use polyreme_collective::{Called, Doing};
use polyreme_exec::{Engine, ExecError, Inputs, Options, StepArgs};
use polyreme_graph::{Collective, Instr, Keeps, Moments, Optimizer, Weights};
use polyreme_parallel::{Norms, Plan};

use crate::ranks::{BATCH, Case, Over, base, feed, on_ranks, program};

/// The collective calls that a program lists for its rank.
fn listed(engine: &Engine) -> Vec<Called> {
    let program = engine.program();
    let call = |instr: &Instr| {
        let (exchange, started) = match instr {
            Instr::Start(i) => (&program.exchanges[*i], true),
            Instr::Wait(i) => (&program.exchanges[*i], false),
            _ => return None,
        };
        // Exchanges that are done at their wait are called there.
        let (op, at_start) = match exchange.op {
            Collective::AllReduce => (Doing::AllReduce, true),
            Collective::ReduceScatter(_) => (Doing::ReduceScatter, true),
            Collective::AllGather(_) => (Doing::AllGather, true),
            Collective::Send { .. } => (Doing::Send, true),
            Collective::Receive { .. } => (Doing::Receive, true),
            Collective::AllToAll { .. } => (Doing::AllToAll, false),
            Collective::Meet => (Doing::Barrier, false),
        };
        let span = engine.span(&exchange.of);
        assert_eq!(span.dtype, exchange.dtype, "{program}");
        let of = (op != Doing::Barrier).then_some((span.dtype, span.count, span.ptr));
        (started == at_start).then_some(Called { op, of })
    };
    program.instrs.iter().filter_map(call).collect()
}

/// Runs two steps of each rank of a case; returns how many calls a step of rank 0 makes.
fn check(case: &Case) -> usize {
    let calls = on_ranks(case, |comm| {
        let (program, samples) = program(case, comm.rank());
        let mut engine = Engine::join(program, Options::threads(1), comm).unwrap();
        let listed = listed(&engine);
        engine.comm().record();
        for step in 0..2 {
            let mut load = |microbatch: usize, inputs: &mut Inputs| -> Result<f64, ExecError> {
                feed(inputs, step, samples[microbatch].clone());
                Ok(samples[microbatch].len() as f64 / BATCH as f64)
            };
            engine.step_with(&mut load, StepArgs { lr: 0.05, ..StepArgs::default() }).unwrap();
            let called = engine.comm().recorded();
            assert_eq!(called, listed, "{:?}, {} ranks\n{}", case.plan, case.ranks, engine.program());
        }
        engine.comm().barrier().unwrap();
        listed.len()
    });
    calls[0]
}

#[test]
fn what_ranks_do_together_is_what_the_program_lists() {
    let adam = Optimizer::AdamW(Moments::DEFAULT);
    let lamb = Optimizer::Lamb(Moments::DEFAULT);
    let mut most = 0;
    for over in [Over::Threads, Over::SharedMemory, Over::Sockets] {
        let weights = if over == Over::Sockets { Weights::Own } else { Weights::Shared };
        for keeps in [Keeps::All, Keeps::OwnMoments, Keeps::OwnGradients] {
            let weights = if keeps == Keeps::All { Weights::Own } else { weights };
            for norms in [Norms::Local, Norms::Synchronised] {
                for (optimizer, clip) in [(adam, None), (adam, Some(0.3)), (lamb, Some(0.3))] {
                    // Uneven shares; more microbatches than some ranks have samples; ranks without any.
                    for (ranks, microbatches) in [(1, 1), (1, 3), (2, 1), (3, 2), (5, 5), (26, 1)] {
                        if keeps == Keeps::OwnGradients && !optimizer.by_element() {
                            continue;
                        }
                        let plan = Plan { keeps, weights, norms, bucket_bytes: 4096, ..Plan::alone() };
                        let case =
                            Case { ranks, plan, optimizer, clip, microbatches, over, norm: true, ..base() };
                        most = most.max(check(&case));
                    }
                }
            }
        }
        for ranks in [1, 2, 3, 11] {
            for optimizer in [adam, lamb] {
                let plan = Plan { shards: Some(8), weights, ..Plan::alone() };
                check(&Case { ranks, plan, optimizer, clip: Some(0.3), over, norm: true, ..base() });
            }
        }
    }
    assert!(most > 10, "{most} calls in a step");
}

/// A call outside of instructions fails every test.
#[test]
#[cfg(debug_assertions)]
fn a_call_beside_the_program_fails_the_step() {
    let case = Case { ranks: 1, ..base() };
    let failed = on_ranks(&case, |comm| {
        let (mut program, _) = program(&case, 0);
        // Listed, and never started.
        let of = polyreme_graph::Region::Grads(0..1);
        program.exchange(Collective::AllReduce, polyreme_graph::Axis::Data, of);
        let mut engine = Engine::join(program, Options::threads(1), comm).unwrap();
        let mut load = |_: usize, inputs: &mut Inputs| -> Result<f64, ExecError> {
            feed(inputs, 0, 0..BATCH);
            Ok(1.0)
        };
        let step = || engine.step_with(&mut load, StepArgs::default());
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(step)).is_err()
    });
    assert_eq!(failed, [true]);
}
