//! What a rank's program does with parameter servers: which ranges they hold, and when each is pushed and pulled.

use std::sync::Arc;

use polyreme_graph::memory::state_len;
use polyreme_graph::{Axis, Body, Collective, DType, Instr, Program, Region, ServedRange};

use crate::buckets::cuts;
use crate::plan::{Plan, Training};
use crate::schedule::Lowering;

/// The parts of a bucket: nearly equal ones for the servers, which the first ranks host, and nothing for other ranks.
pub(crate) fn server_cuts(len: usize, plan: &Plan) -> Arc<[usize]> {
    let servers = plan.servers.map_or(1, |plan| plan.servers);
    let others = plan.ranks().saturating_sub(servers);
    cuts(len, servers).iter().copied().chain(std::iter::repeat_n(len, others)).collect()
}

/// The program after which a rank that only serves has the mean of the workers' states; theirs stay as they are. The body says where they are
/// stored.
pub fn states_of_workers(plan: &Plan, body: &Arc<Body>) -> Program {
    let mut program = Program::empty(vec![body.clone()]);
    let own = Region::States(0..state_len(&body.graph));
    let mean = program.buffer("states of workers", DType::F32, state_len(&body.graph));
    let serves = plan.only_serves();
    program.instrs.push(match serves {
        true => Instr::Zero(mean.clone()),
        false => Instr::Copy { from: own.clone(), into: mean.clone() },
    });
    program.exchange_now(Collective::AllReduce, Axis::Data, mean.clone());
    if serves {
        program.instrs.push(Instr::Divide { of: mean.clone(), by: plan.workers() });
        program.instrs.push(Instr::Copy { from: mean, into: own });
    }
    program
}

impl Lowering {
    /// Lists the ranges of all servers, bucket by bucket.
    pub(crate) fn list_served(&mut self) {
        let Some(plan) = self.served else { return };
        let mut numbers = vec![0; plan.servers];
        for (bucket, cuts) in self.buckets[0].iter().zip(&self.cuts) {
            for (server, number) in numbers.iter_mut().enumerate() {
                let params = bucket.part(cuts, server);
                if !params.is_empty() {
                    let pushed = vec![Region::Grads(params.clone())];
                    self.program.served.push(ServedRange { server, number: *number, params, pushed });
                    *number += 1;
                }
            }
        }
    }

    /// Pushes the parts of bucket `k`.
    pub(crate) fn push_bucket(&mut self, k: usize) {
        let bucket = &self.buckets[0][k].range;
        let is_of =
            |served: &ServedRange| bucket.start <= served.params.start && served.params.end <= bucket.end;
        let served = self.program.served.iter().enumerate();
        self.program.instrs.extend(served.filter(|(_, served)| is_of(served)).map(|(n, _)| Instr::Push(n)));
    }

    /// What comes behind the gradients: clipping and pushes if they had to wait, then the weights of all ranges.
    pub(crate) fn serve_updates(&mut self, training: &Training) {
        if self.only_serves {
            return;
        }
        let n = self.program.served.len();
        if let Some(max_norm) = training.max_norm() {
            let squares = self.program.buffer("squares", DType::F64, 1);
            self.push(Instr::Zero(squares.clone()));
            let of = Region::Grads(0..self.grad_len());
            self.push(Instr::Squares { of, into: squares.clone(), block: None });
            self.push(Instr::Clip { squares, max_norm });
        }
        if self.pushes_last {
            self.program.instrs.extend((0..n).map(Instr::Push));
        }
        // Answers are taken only when nothing is left to push: two that only post would wait for each other.
        self.program.instrs.extend((0..n).map(Instr::Pull));
        self.program.instrs.extend((0..n).map(Instr::Await));
    }
}
