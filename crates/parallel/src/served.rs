//! What a rank's program does with parameter servers: which ranges they hold, and when each is pushed and pulled.

use std::sync::Arc;

use polyreme_graph::memory::state_len;
use polyreme_graph::{Axis, Body, Collective, DType, Instr, Program, Region, ServedRange};

use crate::buckets::{PART_ALIGN, cuts};
use crate::plan::{Plan, Training};
use crate::schedule::Lowering;

/// The parts of a bucket: those of the servers, which the first ranks host, and nothing for other ranks.
///
/// With servers beside all `n` workers and `k` more ranks that only serve, a worker's server has `(n - k) / D` of `M` bytes, and one of the others
/// `2·(n - 1) / D`, with `D = n² + kn - 2k`. Then every link carries as much, in each direction (Jiang et al., OSDI 2020): a worker sends its gradients
/// but for its own server's part, and its server sends that part to the other workers, together `2n(n - 1)M / D`; one that only serves sends its part to `n`
/// workers. Without such ranks that is what an all-reduce takes, `2(n - 1)M / n`.
pub(crate) fn server_cuts(len: usize, plan: &Plan) -> Arc<[usize]> {
    let (servers, serving) = plan.servers.map_or((1, 0), |plan| (plan.servers, plan.serving));
    let (ranks, workers) = (plan.ranks(), plan.workers());
    if serving == 0 || servers == serving {
        let others = ranks.saturating_sub(servers);
        return cuts(len, servers).iter().copied().chain(std::iter::repeat_n(len, others)).collect();
    }
    let share = |rank: usize| if rank < serving { 2 * (workers - 1) } else { workers - serving };
    let all: usize = (0..ranks).map(share).sum();
    // Rounded, not cut off: many buckets are cut alike.
    let blocks = len.div_ceil(PART_ALIGN);
    let end = |ranks: usize| (blocks * (0..ranks).map(share).sum::<usize>() * 2 + all) / (2 * all);
    (0..=ranks).map(|ranks| (end(ranks) * PART_ALIGN).min(len)).collect()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Mesh;
    use crate::plan::ServerPlan;

    /// What the busiest rank sends of `M = len` in a step, and how far the others are below it.
    #[test]
    fn links_carry_the_same_where_workers_and_servers_share_the_sums() {
        let len = 1 << 20;
        for n in 2..=8 {
            for k in 0..n {
                let plan = ServerPlan { servers: n + k, serving: k, lockstep: true };
                let plan = Plan { mesh: Mesh::data(n + k), servers: Some(plan), ..Plan::alone() };
                let cuts = server_cuts(len, &plan);
                assert_eq!((cuts[0], cuts[n + k], cuts.len()), (0, len, n + k + 1));
                let sent = |rank: usize| {
                    let part = cuts[rank + 1] - cuts[rank];
                    if rank < k { n * part } else { len - part + (n - 1) * part }
                };
                let want = (2 * n * (n - 1) * len) as f64 / (n * n + k * n - 2 * k) as f64;
                for rank in 0..n + k {
                    let sent = sent(rank) as f64;
                    assert!((sent / want - 1.0).abs() < 0.02, "n {n}, k {k}, rank {rank}: {sent} for {want}");
                }
            }
        }
    }
}
