//! What a rank's program does with parameter servers: which ranges they hold, and when each is pushed and pulled.

use std::sync::Arc;

use polyreme_graph::{DType, Instr, Region, ServedRange};

use crate::buckets::cuts;
use crate::plan::{Plan, Training};
use crate::schedule::Lowering;

/// The parts of a bucket: nearly equal ones for the servers, which the first ranks host, and nothing for other ranks.
pub(crate) fn server_cuts(len: usize, plan: &Plan) -> Arc<[usize]> {
    let servers = plan.servers.map_or(1, |plan| plan.servers);
    let others = plan.ranks().saturating_sub(servers);
    cuts(len, servers).iter().copied().chain(std::iter::repeat_n(len, others)).collect()
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
                    self.program.served.push(ServedRange { server, number: *number, params });
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
        let n = self.program.served.len();
        if let Some(max_norm) = training.max_norm() {
            let squares = self.program.buffer("squares", DType::F64, 1);
            self.push(Instr::Zero(squares.clone()));
            let of = Region::Grads(0..self.grad_len());
            self.push(Instr::Squares { of, into: squares.clone(), block: None });
            self.push(Instr::Clip { squares, max_norm });
            self.program.instrs.extend((0..n).map(Instr::Push));
        }
        // Answers are taken only when nothing is left to push: two that only post would wait for each other.
        self.program.instrs.extend((0..n).map(Instr::Pull));
        self.program.instrs.extend((0..n).map(Instr::Await));
    }
}
