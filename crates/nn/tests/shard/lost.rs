//! A rank that fails between two steps: the others' next step ends with a report, and has changed nothing.

use std::sync::Arc;

use polyreme_collective::Comm;
use polyreme_exec::{Engine, ExecError, Filled, Kept, Options, StepArgs};
use polyreme_parallel::{compile, schedule};

use crate::run::ShardCase;
use crate::{ADAMW, gpt};

#[test]
fn a_step_without_a_peer_fails_and_changes_nothing() {
    let case = &ShardCase { optimizer: ADAMW, ..gpt(0.0) };
    let rank = |comm: Comm| {
        let (rank, plan) = (comm.rank(), case.plan(comm.rank()));
        let body = compile(&case.step_graph(6), &plan, &case.training(), None).unwrap();
        let program = schedule(&plan, &case.training(), &[Arc::new(body)], &plan.whole_step());
        let mut engine = Engine::join(program, Options::threads(1), comm).unwrap();
        let args = StepArgs { lr: 0.1, ..StepArgs::default() };
        let step = |engine: &mut Engine| {
            engine.step_with::<ExecError>(&mut Filled { weight: 0.5 }, args).map(|_| ())
        };
        let start = engine.kept(Kept::Params).to_vec();
        step(&mut engine).unwrap();
        let after = engine.kept(Kept::Params).to_vec();
        assert_ne!(after, start);
        if rank == 1 {
            return engine.comm().fail("the power is cut");
        }
        let failed = step(&mut engine).unwrap_err().to_string();
        assert!(failed.contains("the power is cut"), "{failed}");
        assert_eq!(engine.kept(Kept::Params), after);
    };
    std::thread::scope(|s| Comm::local(2).into_iter().for_each(|comm| drop(s.spawn(move || rank(comm)))));
}
