//! Reproducible steps: gradients of logical shards, added up in a fixed tree, so that any number of ranks gets the same
//! bits.
//!
//! A rank runs its shards one by one and adds up whole subtrees as they become complete (`tree` in `parallel`). At the
//! end of the step it sends each rank the parts that this one owns, all ranks know who has which subtrees, and the
//! owner adds them up along the tree. States (running statistics) of every shard start from those of the step's
//! beginning; the new ones are the weighted mean, added up in the same tree, by every rank for itself.
//!
//! Per step a rank sends each of its at most `2·log2(shards)` sums once, whole. If a rank dies, the exchange ends with
//! a report and nothing is updated.

use std::ops::Range;
use std::time::Instant;

use polyreme_collective::{Comm, Cuts, Reduce};
use polyreme_graph::{MemoryPlan, Role};
use polyreme_kernels::Cx;
use polyreme_parallel::buckets::{PART_ALIGN, cuts};
use polyreme_parallel::tree::{Node, additions, is_subtree, run_of, whole_subtrees};

use crate::arena::{floats, make_room};
use crate::engine::Engine;
use crate::error::ExecError;
use crate::step::{Totals, add};
use crate::weights::Kept;

/// What they are called if there is no memory for them.
const SUMS: &str = "sums of logical shards";

/// What a rank holds of the sums of one step.
pub(crate) struct ShardSums {
    shards: usize,
    ranks: usize,
    rank: usize,
    /// Elements of the gradients and of the states behind them.
    grad_len: usize,
    state_len: usize,
    /// Which shards each rank has.
    runs: Vec<Range<usize>>,
    /// Which gradients each rank adds up.
    cuts: Cuts,
    /// Subtrees that are complete, from left to right, and their sums.
    stack: Vec<(Node, Vec<f32>)>,
    free: Vec<Vec<f32>>,
    /// By shard: the weighted loss and the weight.
    losses: Vec<f64>,
    send: Vec<f32>,
    recv: Vec<f32>,
}

impl ShardSums {
    pub(crate) fn new(shards: usize, role: &Role, plan: &MemoryPlan) -> ShardSums {
        ShardSums {
            shards,
            ranks: role.ranks,
            rank: role.rank,
            grad_len: plan.param_len,
            state_len: plan.state_len,
            runs: (0..role.ranks).map(|rank| run_of(shards, role.ranks, rank)).collect(),
            cuts: cuts(plan.param_len, role.ranks),
            stack: Vec::new(),
            free: Vec::new(),
            losses: Vec::new(),
            send: Vec::new(),
            recv: Vec::new(),
        }
    }

    /// What these sums take of a rank, in floats: the most of all ranks, so that all plan alike.
    pub(crate) fn floats(shards: usize, ranks: usize, plan: &MemoryPlan) -> usize {
        let of = |rank| floats_of(shards, ranks, rank, plan.param_len, plan.state_len);
        (0..ranks).map(of).max().unwrap_or(0)
    }

    pub(crate) fn begin(&mut self) {
        self.free.extend(self.stack.drain(..).map(|(_, sums)| sums));
        self.losses.clear();
        self.losses.resize(2 * self.shards, 0.0);
    }

    /// A leaf of the tree, to fill.
    fn leaf(&mut self) -> Result<Vec<f32>, ExecError> {
        self.free.pop().map_or_else(|| floats(self.grad_len + self.state_len, SUMS), Ok)
    }

    /// Takes the sum of a shard, and adds up what has become whole.
    fn push(&mut self, cx: &Cx, shard: usize, sums: Vec<f32>) {
        self.stack.push((shard..shard + 1, sums));
        while let [.., (a, _), (b, _)] = &self.stack[..] {
            let Some(both) = joined(self.shards, a, b) else { break };
            let (_, right) = self.stack.pop().expect("there are two");
            let (node, left) = self.stack.last_mut().expect("there were two");
            add(cx, left, &right);
            *node = both;
            self.free.push(right);
        }
    }

    /// Exchanges the sums: afterwards this rank's part of `grads`, and all of `states`, are those of all shards.
    fn exchange(
        &mut self,
        cx: &Cx,
        comm: &mut Comm,
        grads: &mut [f32],
        states: &mut [f32],
    ) -> Result<(), ExecError> {
        let nodes_of = |rank: usize| whole_subtrees(self.shards, &self.runs[rank]);
        let nodes: Vec<Vec<Node>> = (0..self.ranks).map(nodes_of).collect();
        let part = |rank: usize| self.cuts[rank]..self.cuts[rank + 1];
        let sizes = |len: &dyn Fn(usize) -> usize| -> Cuts {
            let mut at = 0;
            let mut cuts = vec![0];
            for rank in 0..self.ranks {
                at += len(rank);
                cuts.push(at);
            }
            cuts.into()
        };
        let mine = self.stack.len();
        let send_cuts = sizes(&|r| mine * (part(r).len() + self.state_len));
        let own = part(self.rank);
        let row = own.len() + self.state_len;
        let recv_cuts = sizes(&|r| nodes[r].len() * row);
        self.send.clear();
        make_room(&mut self.send, send_cuts[self.ranks], SUMS)?;
        for rank in 0..self.ranks {
            for (_, sums) in &self.stack {
                self.send.extend_from_slice(&sums[part(rank)]);
                self.send.extend_from_slice(&sums[self.grad_len..]);
            }
        }
        make_room(&mut self.recv, recv_cuts[self.ranks], SUMS)?;
        self.recv.resize(recv_cuts[self.ranks], 0.0);
        comm.all_to_all(&self.send, &send_cuts, &mut self.recv, &recv_cuts)?;
        let all: Vec<Node> = nodes.into_iter().flatten().collect();
        for step in additions(self.shards, &all) {
            let (left, right) = self.recv.split_at_mut(step.from * row);
            add(cx, &mut left[step.into * row..][..row], &right[..row]);
        }
        let (sum, state_sum) = self.recv[..row].split_at(own.len());
        grads[own].copy_from_slice(sum);
        states.copy_from_slice(state_sum);
        Ok(())
    }

    /// The sum of the squares of all gradients, by fixed blocks in their order.
    pub(crate) fn squares(
        &mut self,
        cx: &Cx,
        grads: &[f32],
        role: &Role,
        comm: &mut Comm,
    ) -> Result<f64, ExecError> {
        let mut sums = vec![0.0f64; grads.len().div_ceil(PART_ALIGN)];
        let mine = if role.sharded { self.cuts[self.rank]..self.cuts[self.rank + 1] } else { 0..grads.len() };
        let first = mine.start / PART_ALIGN;
        let blocks = mine.len().div_ceil(PART_ALIGN);
        let grads = &grads[mine];
        cx.for_each_chunk(&mut sums[first..first + blocks], 64, |task, sums| {
            for (k, sum) in sums.iter_mut().enumerate() {
                let at = (task * 64 + k) * PART_ALIGN;
                let block = &grads[at..(at + PART_ALIGN).min(grads.len())];
                *sum = block.iter().map(|&g| f64::from(g) * f64::from(g)).sum();
            }
        });
        if role.sharded {
            // Everybody else has zeros there: adding them changes nothing.
            comm.all_reduce(&mut sums, Reduce::Sum)?;
        }
        Ok(sums.iter().sum())
    }
}

/// The subtree that two neighbours make, if they are its halves.
fn joined(shards: usize, a: &Node, b: &Node) -> Option<Node> {
    let both = a.start..b.end;
    (is_subtree(shards, &both) && polyreme_parallel::tree::cut(&both) == b.start).then_some(both)
}

/// Floats that [`ShardSums`] of a rank reserve: subtrees, as many as there are at a time, what is sent, and what comes.
fn floats_of(shards: usize, ranks: usize, rank: usize, grad_len: usize, state_len: usize) -> usize {
    let (mut stack, mut most): (Vec<Node>, usize) = (Vec::new(), 0);
    for shard in run_of(shards, ranks, rank) {
        stack.push(shard..shard + 1);
        most = most.max(stack.len());
        while let [.., a, b] = &stack[..] {
            let Some(both) = joined(shards, a, b) else { break };
            stack.truncate(stack.len() - 2);
            stack.push(both);
        }
    }
    let nodes = |rank| whole_subtrees(shards, &run_of(shards, ranks, rank)).len();
    let cuts = cuts(grad_len, ranks);
    let row = cuts[rank + 1] - cuts[rank] + state_len;
    most * (grad_len + state_len)
        + stack.len() * (grad_len + ranks * state_len)
        + (0..ranks).map(nodes).sum::<usize>() * row
}

impl Engine {
    /// Runs logical shard `shard` of a reproducible step; a rank's shards come in their order. `weight` as in
    /// [`Engine::accumulate`]; `None` if the shard has no samples.
    pub fn shard(&mut self, shard: usize, weight: Option<f64>) -> Result<(), ExecError> {
        let mut leaf = self.shard_sums().leaf()?;
        match weight {
            None => leaf.fill(0.0),
            Some(weight) => {
                self.set_weight(weight)?;
                self.run_nodes()?;
                let loss = self.count_loss(weight)?;
                self.shard_sums().losses[2 * shard..][..2].copy_from_slice(&[weight * loss, weight]);
                let (grads, states) = leaf.split_at_mut(self.memory.all_grads().len());
                grads.copy_from_slice(self.memory.all_grads());
                self.new_states_into(states, weight as f32);
            }
        }
        let Engine { group, options, pool, .. } = self;
        let cx = Cx { isa: options.isa, par: &*pool };
        let shards = group.as_mut().and_then(|g| g.shards.as_mut()).expect("a reproducible program");
        shards.push(&cx, shard, leaf);
        Ok(())
    }

    /// Says which logical shards each rank has from the next step on: runs that follow each other, some of them empty
    /// perhaps. All ranks say the same. The sums have the same bits whoever has which.
    ///
    /// # Panics
    /// If the runs are not those of all ranks, or not all shards.
    pub fn set_shard_runs(&mut self, runs: Vec<Range<usize>>) {
        let sums = self.shard_sums();
        let ends = runs.iter().try_fold(0, |at, run| (run.start == at && at <= run.end).then_some(run.end));
        assert_eq!((runs.len(), ends), (sums.ranks, Some(sums.shards)), "every shard belongs to one rank");
        sums.runs = runs;
    }

    /// Ends a reproducible step: adds up over all ranks and updates.
    pub fn finish_shards(&mut self, lr: f32, extra: [f64; 2]) -> Result<Totals, ExecError> {
        let began = Instant::now();
        let role = self.role().clone();
        let group = self.group.as_mut().expect("an engine that joined");
        let shards = group.shards.as_mut().expect("a reproducible program");
        let mut losses = std::mem::take(&mut shards.losses);
        losses.extend(extra);
        // Everybody else has zeros for this rank's shards: the sums are exact.
        group.comm.all_reduce(&mut losses, Reduce::Sum)?;
        let (by_shard, extra) = losses.split_at(2 * shards.shards);
        let sum = |k: usize| by_shard.iter().skip(k).step_by(2).sum::<f64>();
        *group.totals = [sum(0), sum(1), extra[0], extra[1]];
        shards.losses = losses;
        let weight = group.totals[1];
        self.look_at_totals()?;
        let group = self.group.as_mut().expect("an engine that joined");
        let shards = group.shards.as_mut().expect("a reproducible program");
        let cx = Cx { isa: self.options.isa, par: &self.pool };
        let (grads, states) = self.memory.grads_and_states();
        shards.exchange(&cx, &mut group.comm, grads, states)?;
        states.iter_mut().for_each(|s| *s = (f64::from(*s) / weight) as f32);
        if !role.sharded && role.ranks > 1 {
            group.comm.all_gather(grads, &shards.cuts)?;
        }
        group.waited += began.elapsed();
        group.tickets.clear();
        group.tickets.resize(self.program.exchanges.len(), None);
        let instrs = &self.program.instrs;
        let rest = instrs
            .iter()
            .rposition(|i| matches!(i, polyreme_graph::Instr::Keep { .. } | polyreme_graph::Instr::Wait(0)));
        for i in rest.map_or(0, |i| i + 1)..self.program.instrs.len() {
            self.after_backward(i, lr)?;
        }
        Ok(self.end_step())
    }

    fn shard_sums(&mut self) -> &mut ShardSums {
        self.group.as_mut().and_then(|g| g.shards.as_mut()).expect("a reproducible program")
    }

    /// The states as the last run would leave them, times `weight`, laid out as their arena.
    fn new_states_into(&mut self, into: &mut [f32], weight: f32) {
        into.copy_from_slice(self.memory.kept(Kept::States));
        for &(state, value) in &self.program.graph.updates {
            let polyreme_graph::Place::State(at) =
                self.memory.plan.places[self.program.graph.states[state].value.idx()]
            else {
                unreachable!("states lie in their own arena")
            };
            let new = self.memory.read::<f32>(&self.program.graph, value);
            into[at..at + new.len()].copy_from_slice(new);
        }
        into.iter_mut().for_each(|s| *s *= weight);
    }
}

#[cfg(test)]
mod tests {
    use polyreme_kernels::{Isa, Serial};

    use super::*;

    #[test]
    fn what_sums_take_is_known_before() {
        let (grad_len, state_len) = (1000, 10);
        for (shards, ranks) in [(1, 1), (2, 1), (8, 1), (16, 1), (5, 2), (16, 3), (2, 3)] {
            let rank = |mut comm: Comm| {
                let rank = comm.rank();
                let mut sums = ShardSums {
                    shards,
                    ranks,
                    rank,
                    grad_len,
                    state_len,
                    runs: (0..ranks).map(|rank| run_of(shards, ranks, rank)).collect(),
                    cuts: cuts(grad_len, ranks),
                    stack: Vec::new(),
                    free: Vec::new(),
                    losses: Vec::new(),
                    send: Vec::new(),
                    recv: Vec::new(),
                };
                let cx = Cx { isa: Isa::SCALAR, par: &Serial };
                let (mut grads, mut states) = (vec![0.0; grad_len], vec![0.0; state_len]);
                // What is reserved in the first step serves for the others.
                for _ in 0..3 {
                    sums.begin();
                    for shard in run_of(shards, ranks, rank) {
                        let leaf = sums.leaf().unwrap();
                        sums.push(&cx, shard, leaf);
                    }
                    sums.exchange(&cx, &mut comm, &mut grads, &mut states).unwrap();
                }
                let trees = sums.stack.iter().map(|(_, sums)| sums).chain(&sums.free);
                let took: usize = trees.chain([&sums.send, &sums.recv]).map(Vec::capacity).sum();
                let known = floats_of(shards, ranks, rank, grad_len, state_len);
                assert_eq!(took, known, "rank {rank} of {ranks}, {shards} shards");
            };
            std::thread::scope(|s| {
                let ranks: Vec<_> =
                    Comm::local(ranks).into_iter().map(|comm| s.spawn(|| rank(comm))).collect();
                ranks.into_iter().for_each(|rank| rank.join().unwrap());
            });
        }
    }
}
