//! Engines as ranks of one job: joining, and what all ranks do together between steps.
//!
//! Ranks that share memory work on one copy of the weights. That is sound because all of them run the same program:
//! parameters are written inside [`Engine::finish`], by one rank each, between two exchanges that every rank enters
//! with `&mut` of its engine; so nobody holds a slice of them then. Outside of it they are written inside
//! [`Engine::exclusively`] only.

use std::time::{Duration, Instant};

use polyreme_collective::{Comm, Cuts, Reduce, Ticket};
use polyreme_graph::graph::Stored;
use polyreme_graph::{Graph, Place, Program, Role};

use crate::arena::floats;
use crate::engine::{Engine, Options, Parked, grad_starts, lay_out};
use crate::error::ExecError;
use crate::kernel_types::check_kernels;
use crate::memory::Workspace;
use crate::shards::ShardSums;
use crate::timeline::Timeline;
use crate::weights::Kept;

/// Numbers of a step that are added up over all ranks: the weighted loss, the weight, and the caller's.
pub(crate) const N_TOTALS: usize = 4;

/// This rank's end of the group, and where it stands in a step.
pub(crate) struct Group {
    pub(crate) comm: Comm,
    /// By exchange of the program.
    pub(crate) tickets: Vec<Option<(Ticket, Instant)>>,
    /// On the heap: an exchange holds its address.
    pub(crate) totals: Box<[f64; N_TOTALS]>,
    /// Pieces of this step whose gradients lie in the sums.
    pub(crate) pieces: usize,
    /// Time spent waiting for others in this step.
    pub(crate) waited: Duration,
    /// Whether the piece that is summed has no samples of this rank.
    pub(crate) empty: bool,
    /// Whether this rank's own samples gave a loss that is not finite.
    pub(crate) not_finite_here: bool,
    pub(crate) shards: Option<ShardSums>,
    /// Whether weights may be written now.
    pub(crate) open: bool,
}

impl Group {
    /// Adds up a small value over the ranks, in the middle of a pass.
    pub(crate) fn sum_over_axis(&mut self, value: &mut [f32]) -> Result<(), ExecError> {
        let began = Instant::now();
        self.comm.all_reduce(value, Reduce::Sum)?;
        self.waited += began.elapsed();
        Ok(())
    }
}

impl Engine {
    /// Reserves everything for one rank of a job; all ranks call it at the same time. Weights and states are those of
    /// rank 0.
    pub fn join(program: Program, options: Options, mut comm: Comm) -> Result<Engine, ExecError> {
        let role = program.role.clone().expect("a program that was lowered for ranks");
        assert_eq!((role.rank, role.ranks), (comm.rank(), comm.size()), "the program of this rank");
        let (_, plan) = lay_out(&program, options.threads);
        let blocks = match role.ranks {
            1 => None,
            _ => {
                let params = role
                    .shared_weights
                    .then(|| comm.shared_block(plan.param_len * 4, "parameters"))
                    .transpose()?;
                Some((params, comm.block(plan.grad_len * 4, "gradients")?))
            }
        };
        // The others would wait for this rank.
        let reserved = Engine::reserve(program, options, blocks);
        let mut engine = reserved.inspect_err(|error| comm.fail(&error.to_string()))?;
        engine.attach(comm);
        engine.set_constants();
        engine.exclusively(|engine| {
            engine.initialise();
            Ok::<(), ExecError>(())
        })?;
        Ok(engine)
    }

    /// Gives an engine its end of a group, for the sums over ranks that its graph names. Weights stay as they are.
    pub fn attach(&mut self, comm: Comm) {
        let role = self.program.role.as_ref();
        let shards = role.and_then(|r| r.shards.map(|n| ShardSums::new(n, r, &self.memory.plan)));
        self.group = Some(Group {
            comm,
            tickets: Vec::new(),
            totals: Box::new([0.0; N_TOTALS]),
            pieces: 0,
            waited: Duration::ZERO,
            empty: false,
            not_finite_here: false,
            shards,
            open: false,
        });
    }

    /// This rank's end of its group.
    pub fn comm(&mut self) -> &mut Comm {
        &mut self.group.as_mut().expect("an engine that joined").comm
    }

    /// Gives the engine up, and its end of the group back.
    pub fn leave(mut self) -> Comm {
        self.group.take().expect("an engine that joined").comm
    }

    /// How this rank stands to the others.
    pub fn role(&self) -> &Role {
        self.program.role.as_ref().expect("an engine that joined")
    }

    /// The same model for another batch size, over the same weights, gradients, moments and states; a forward pass
    /// too, such as an evaluation's. Returns its number; that of the first program is 0.
    pub fn add_batch(&mut self, mut program: Program) -> Result<usize, ExecError> {
        check_kernels(&program.graph)?;
        let (prepared, mut plan) = lay_out(&program, self.options.threads);
        let here = &self.memory.plan;
        let no_gradients = program.role.is_none();
        if no_gradients {
            // Without gradients there is no order of readiness: parameters lie where the first program has them.
            let known = &self.program.graph.params;
            let shape = |g: &Graph, s: &Stored| (s.name.clone(), g.shape(s.value).numel());
            let params = program.graph.params.iter().map(|s| shape(&program.graph, s));
            if !params.eq(known.iter().map(|s| shape(&self.program.graph, s))) {
                return Err(ExecError::Layout);
            }
            for (stored, &at) in program.graph.params.iter().zip(&here.param_offsets) {
                plan.places[stored.value.idx()] = Place::Param(at);
            }
            plan.param_offsets.clone_from(&here.param_offsets);
            plan.param_len = here.param_len;
            // How ranks stand to each other, and what they keep, does not change with the program in place.
            program.role.clone_from(&self.program.role);
            program.buffers.clone_from(&self.program.buffers);
            program.optimizer = self.program.optimizer;
            plan.grad_len = here.grad_len;
        }
        let same = (&plan.param_offsets, plan.param_len, plan.grad_len, plan.state_len)
            == (&here.param_offsets, here.param_len, here.grad_len, here.state_len);
        let same = same && (no_gradients || grad_starts(&program.graph, &plan) == self.grad_starts);
        // Where buckets begin decides whose moments lie where, and what is summed together.
        let parts = |p: &Program| p.role.as_ref().map(|r| r.parts.clone());
        if !same || parts(&program) != parts(&self.program) || program.buffers != self.program.buffers {
            return Err(ExecError::Layout);
        }
        self.parked.push(Some(Parked { program, prepared, workspace: Workspace::new(plan)? }));
        let (number, before) = (self.parked.len() - 1, self.selected);
        self.select(number);
        self.set_constants();
        self.select(before);
        Ok(number)
    }

    /// Gives back the memory of a batch size that is not needed any more. The first one stays.
    pub fn remove_batch(&mut self, number: usize) {
        assert!(number != 0, "the first program says where everything lies");
        if number == self.selected {
            self.select(0);
        }
        self.parked[number] = None;
    }

    /// Inputs, outputs and runs are from now on those of this batch size.
    pub fn select(&mut self, number: usize) {
        if number == self.selected {
            return;
        }
        let mut parked = self.parked[number].take().expect("a number that `add_batch` gave");
        std::mem::swap(&mut self.program, &mut parked.program);
        std::mem::swap(&mut self.prepared, &mut parked.prepared);
        self.memory.swap(&mut parked.workspace);
        self.parked[self.selected] = Some(parked);
        self.selected = number;
    }

    /// All ranks at the same time: rank 0 runs `write`, which may set weights and states; then all have them.
    pub fn exclusively<E: From<ExecError> + std::fmt::Display>(
        &mut self,
        write: impl FnOnce(&mut Engine) -> Result<(), E>,
    ) -> Result<(), E> {
        // Nobody reads the weights any more.
        self.comm().barrier().map_err(ExecError::from)?;
        if self.role().rank == 0 {
            self.set_open(true);
            let written = write(self);
            self.set_open(false);
            if let Err(error) = &written {
                let why = error.to_string();
                self.comm().fail(&why);
            }
            written?;
        }
        Ok(self.spread()?)
    }

    /// All ranks at the same time: running statistics become their mean over the ranks.
    pub fn average_states(&mut self) -> Result<(), ExecError> {
        let ranks = self.role().ranks;
        // Shards have averaged theirs in every step.
        if ranks == 1 || self.memory.plan.state_len == 0 || self.role().shards.is_some() {
            return Ok(());
        }
        let group = self.group.as_mut().expect("an engine that joined");
        let states = self.memory.kept_mut(Kept::States);
        group.comm.all_reduce(states, Reduce::Sum)?;
        states.iter_mut().for_each(|s| *s /= ranks as f32);
        Ok(())
    }

    /// All ranks at the same time: rank 0 gets the states of all, one after the other; `None` where all have the same,
    /// and on other ranks. Nothing changes.
    pub fn gather_states(&mut self) -> Result<Option<Vec<f32>>, ExecError> {
        let (rank, ranks, len) = (self.role().rank, self.role().ranks, self.memory.plan.state_len);
        if ranks == 1 || len == 0 || self.role().shards.is_some() {
            return Ok(None);
        }
        let mut all = vec![0.0f32; if rank == 0 { ranks * len } else { 0 }];
        let group = self.group.as_mut().expect("an engine that joined");
        let mine = self.memory.kept(Kept::States);
        group.comm.gather(mine, (rank == 0).then_some(&mut all[..]), &even_cuts(ranks, len), 0)?;
        let same = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
        let differ = rank == 0 && !all.chunks_exact(len).all(|states| same(states, mine));
        Ok(differ.then_some(all))
    }

    /// The other way round: each rank gets its own of the states that rank 0 has of all.
    pub fn scatter_states(&mut self, from: Option<&[f32]>) -> Result<(), ExecError> {
        let cuts = even_cuts(self.role().ranks, self.memory.plan.state_len);
        let group = self.group.as_mut().expect("an engine that joined");
        Ok(group.comm.scatter(self.memory.kept_mut(Kept::States), from, &cuts, 0)?)
    }

    /// All ranks at the same time: rank 0 gets the moments of all parameters, laid out as the parameters are.
    pub fn gather_moments(&mut self, which: Kept, into: Option<&mut [f32]>) -> Result<(), ExecError> {
        // A forward pass that was selected on some ranks has no optimizer; all ranks look at the same program.
        self.select(0);
        if !self.has_moments(which) {
            return Ok(());
        }
        let role = self.role().clone();
        let group = self.group.as_mut().expect("an engine that joined");
        let mine = self.memory.kept(which);
        if !role.sharded {
            if let (0, Some(into)) = (role.rank, into) {
                into[..mine.len()].copy_from_slice(mine);
            }
            return Ok(());
        }
        let cuts = packed_cuts(&role);
        let mut packed = floats(if role.rank == 0 { cuts[role.ranks] } else { 0 }, "moments of all ranks")?;
        group.comm.gather(mine, (role.rank == 0).then_some(&mut packed[..]), &cuts, 0)?;
        if let (0, Some(into)) = (role.rank, into) {
            let mut at = 0;
            for range in role.parts.iter().flatten() {
                into[range.clone()].copy_from_slice(&packed[at..at + range.len()]);
                at += range.len();
            }
        }
        Ok(())
    }

    /// The other way round: each rank gets its part of the moments that rank 0 has.
    pub fn scatter_moments(&mut self, which: Kept, from: Option<&[f32]>) -> Result<(), ExecError> {
        // A forward pass that was selected on some ranks has no optimizer; all ranks look at the same program.
        self.select(0);
        if !self.has_moments(which) {
            return Ok(());
        }
        let role = self.role().clone();
        let group = self.group.as_mut().expect("an engine that joined");
        let mine = self.memory.kept_mut(which);
        if !role.sharded {
            if let (0, Some(from)) = (role.rank, from) {
                mine.copy_from_slice(&from[..mine.len()]);
            }
            return Ok(group.comm.broadcast(mine, 0)?);
        }
        let cuts = packed_cuts(&role);
        let packed: Option<Vec<f32>> = match (role.rank, from) {
            (0, Some(from)) => {
                Some(role.parts.iter().flatten().flat_map(|r| from[r.clone()].iter().copied()).collect())
            }
            _ => None,
        };
        Ok(group.comm.scatter(mine, packed.as_deref(), &cuts, 0)?)
    }

    /// Whether the optimizer has these numbers; this rank's part of them may be empty.
    fn has_moments(&self, which: Kept) -> bool {
        let n = self.program.optimizer.map_or(0, |o| o.state_per_param());
        match which {
            Kept::Moment1 => n > 0,
            Kept::Moment2 => n > 1,
            Kept::Params | Kept::States => false,
        }
    }

    /// Records where the time goes from now on.
    pub fn set_timeline(&mut self, timeline: Option<Timeline>) {
        self.timeline = timeline;
    }

    /// What was recorded.
    pub fn timeline(&self) -> Option<&Timeline> {
        self.timeline.as_ref()
    }

    /// Whether weights may be written: they are this engine's own, or it is this rank's turn.
    pub(crate) fn may_write_weights(&self) -> bool {
        let shared = self.program.role.as_ref().is_some_and(|r| r.shared_weights);
        !shared || self.group.as_ref().is_none_or(|g| g.open)
    }

    fn set_open(&mut self, open: bool) {
        if let Some(group) = &mut self.group {
            group.open = open;
        }
    }

    /// Weights and states of rank 0 to all.
    fn spread(&mut self) -> Result<(), ExecError> {
        let (shared, ranks) = (self.role().shared_weights, self.role().ranks);
        if ranks == 1 {
            return Ok(());
        }
        let group = self.group.as_mut().expect("an engine that joined");
        if !shared {
            group.comm.broadcast(self.memory.kept_mut(Kept::Params), 0)?;
        }
        group.comm.broadcast(self.memory.kept_mut(Kept::States), 0)?;
        let mut step = [self.step as i64];
        group.comm.broadcast(&mut step, 0)?;
        self.step = step[0] as u64;
        Ok(group.comm.barrier()?)
    }
}

/// Parts of the same length, one of each rank.
fn even_cuts(ranks: usize, len: usize) -> Cuts {
    (0..=ranks).map(|rank| rank * len).collect()
}

/// Where the moments of each rank lie when they are put one after the other.
fn packed_cuts(role: &Role) -> Cuts {
    let lens = role.parts.iter().map(|parts| parts.iter().map(|r| r.len()).sum::<usize>());
    std::iter::once(0)
        .chain(lens.scan(0, |at, len| {
            *at += len;
            Some(*at)
        }))
        .collect()
}
