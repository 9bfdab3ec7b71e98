//! Engines as ranks of one job: joining a group, and what all ranks do together between steps.
//!
//! Ranks that share memory work on one copy of the weights. That is sound because all of them run the same program:
//! parameters are written inside [`Engine::step_with`], by one rank each, between two exchanges that every rank enters
//! with `&mut` of its engine; so no rank holds a slice of them then. Outside of it they are written inside
//! only inside [`Engine::exclusively`].

use polyreme_collective::{Comm, Cuts};
use polyreme_dtype::{Element, bf16};
use polyreme_graph::{Axis, Program, Role, Weights};
use polyreme_kernels::floats::{Floats, FloatsMut};

use crate::arena::{floats, make_room};
use crate::comms::Comms;
use crate::engine::{Engine, Options, param_and_grad_bytes};
use crate::error::ExecError;
use crate::state::{LearntState, Lengths, SharedBlocks, State};
use crate::timeline::Timeline;
use crate::weights::{Kept, KeptArenas};

/// The communicators of this rank.
pub(crate) struct Group {
    pub(crate) comms: Comms,
    /// Whether weights may be written now.
    open: bool,
}

impl Engine {
    /// Reserves all memory for one rank of a job; all ranks call it at the same time. Weights and states are those of
    /// the first rank along the data axis.
    pub fn join(program: Program, options: Options, comms: impl Into<Comms>) -> Result<Engine, ExecError> {
        let mut comms = comms.into();
        let role = program.role.clone().expect("a program that was lowered for ranks");
        let comm = comms.along(Axis::Data);
        assert!(
            role.ranks == 1 || (role.rank, role.ranks) == (comm.rank(), comm.size()),
            "the program of this rank"
        );
        let blocks = match role.ranks {
            1 => SharedBlocks::default(),
            _ => {
                let (params, grads) = param_and_grad_bytes(&program, options.threads, options.isa);
                let shared = role.shares_weights();
                let params = shared.then(|| comm.shared_block(params, "parameters")).transpose()?;
                SharedBlocks { params, grads: Some(comm.block(grads, "gradients")?) }
            }
        };
        // Otherwise the other ranks would wait for this one.
        let reserved = Engine::reserve(program, options, blocks);
        let mut engine = reserved.inspect_err(|error| comms.job().fail(&error.to_string()))?;
        engine.group = Some(Group { comms, open: false });
        if engine.options.inherits {
            return Ok(engine);
        }
        engine.exclusively(|engine| {
            engine.initialise();
            Ok::<(), ExecError>(())
        })?;
        engine.start_average();
        Ok(engine)
    }

    /// Gives an engine a communicator, for the exchanges of a program that was not lowered for ranks. Weights stay as they are.
    pub fn attach(&mut self, comms: impl Into<Comms>) {
        self.group = Some(Group { comms: comms.into(), open: false });
    }

    /// The communicator of all ranks.
    pub fn comm(&mut self) -> &mut Comm {
        self.group.as_mut().expect("an engine that joined").comms.job()
    }

    /// This rank's groups: of all ranks, along the axes of the mesh, and of its replica.
    pub fn comms(&mut self) -> &mut Comms {
        &mut self.group.as_mut().expect("an engine that joined").comms
    }

    /// Whether this is one of the ranks that [`Engine::exclusively`] lets write. Together they have the whole model once.
    pub fn is_writer(&self) -> bool {
        self.first().role.as_ref().is_none_or(|role| role.rank == 0 || role.shards_weights())
    }

    /// The group of a writer: all of them. `None` for an engine that did not join.
    pub fn writers(&mut self) -> Option<&mut Comm> {
        let sharded = self.first().role.as_ref().is_some_and(Role::shards_weights);
        self.group.as_mut().map(|group| group.comms.writers(sharded))
    }

    /// The arenas of this rank, beside the group of [`Engine::writers`].
    pub fn kept_and_writers(&mut self) -> (KeptArenas<'_>, &mut Comm) {
        let sharded = self.first().role.as_ref().is_some_and(Role::shards_weights);
        let group = self.group.as_mut().expect("an engine that joined");
        (KeptArenas { state: &self.memory.state, isa: self.options.isa }, group.comms.writers(sharded))
    }

    /// Drops the engine and returns its communicator.
    pub fn leave(mut self) -> Comm {
        self.group.take().expect("an engine that joined").comms.into_job()
    }

    /// Ends the engine and keeps what it has learnt. Whatever its exchanges were doing has ended then.
    pub fn into_learnt(self) -> LearntState {
        let Engine { group, memory, .. } = self;
        drop(group);
        LearntState(memory.state)
    }

    /// Goes on with what another engine has learnt, of the same model; `false` if the two keep different things, and then nothing has changed. Gradients
    /// stay this engine's own: they may be visible to its group.
    #[must_use]
    pub fn adopt(&mut self, learnt: LearntState) -> bool {
        let alike = |l: Lengths| (l.params, l.states, l.moments, l.moments_dtype, l.average);
        let shares = self.first().role.as_ref().is_some_and(Role::shares_weights);
        if alike(self.memory.state.lengths) != alike(learnt.0.lengths) || shares {
            return false;
        }
        let State { params, states, moments, average, step, lent, .. } = learnt.0;
        let state = &mut self.memory.state;
        (state.params, state.states, state.moments, state.average) = (params, states, moments, average);
        (state.step, state.lent) = (step, lent);
        true
    }

    /// Collective: parameters, states, moments and the count of steps become those of rank `root`. `keeps_states`: this rank keeps
    /// its own running statistics.
    pub fn receive_learnt(&mut self, root: usize, keeps_states: bool) -> Result<(), ExecError> {
        let group = self.group.as_mut().expect("an engine that joined");
        let comm = group.comms.along(Axis::Data);
        let state = &mut self.memory.state;
        if let Err(error) = state.complete(&*self.pool) {
            // The others would wait for this rank.
            comm.fail(&error.to_string());
            return Err(error);
        }
        for what in [Kept::Params, Kept::Moment1, Kept::Moment2] {
            match state.stored_mut(what) {
                FloatsMut::F32(numbers) => comm.broadcast(numbers, root)?,
                FloatsMut::Bf16(numbers) => comm.broadcast(numbers, root)?,
                FloatsMut::F16(_) => unreachable!("moments are stored in f32 or bf16"),
            }
        }
        self.receive_states(root, keeps_states)
    }

    /// Collective: states and the count of steps become those of rank `root`. `keeps_states`: this rank keeps its own running
    /// statistics.
    pub fn receive_states(&mut self, root: usize, keeps_states: bool) -> Result<(), ExecError> {
        let group = self.group.as_mut().expect("an engine that joined");
        let comm = group.comms.along(Axis::Data);
        let state = &mut self.memory.state;
        if let Err(error) = state.complete_states(&*self.pool) {
            comm.fail(&error.to_string());
            return Err(error);
        }
        let own = keeps_states.then(|| state.kept(Kept::States).to_vec());
        comm.broadcast(state.kept_mut(Kept::States), root)?;
        if let Some(own) = own {
            state.kept_mut(Kept::States).copy_from_slice(&own);
        }
        let mut step = [state.step as i64];
        comm.broadcast(&mut step, root)?;
        state.step = step[0] as u64;
        Ok(())
    }

    /// The role of this rank among all ranks.
    pub fn role(&self) -> &Role {
        self.first().role.as_ref().expect("an engine that joined")
    }

    /// Collective: the first rank along the data axis runs `write`, which may set weights and states; the others along it then
    /// get them. Where each has its own shard of the weights, all run it, and get the states of the first.
    pub fn exclusively<E: From<ExecError> + std::fmt::Display>(
        &mut self,
        write: impl FnOnce(&mut Engine) -> Result<(), E>,
    ) -> Result<(), E> {
        // From here on no rank reads the weights.
        self.comm().barrier().map_err(ExecError::from)?;
        if self.role().rank == 0 || self.role().shards_weights() {
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

    /// Collective: gathers the states of all ranks on rank 0, in rank order; `None` if all ranks have the same states,
    /// and on other ranks. Nothing changes.
    pub fn gather_states(&mut self) -> Result<Option<Vec<f32>>, ExecError> {
        let (rank, ranks, len) = (self.role().rank, self.role().ranks, self.memory.state.lengths.states);
        if ranks == 1 || len == 0 || self.role().shards.is_some() {
            return Ok(None);
        }
        let all = self.gather_of_each(Kept::States)?;
        let mine = self.memory.state.kept(Kept::States);
        let same = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
        let differ = rank == 0 && !all.chunks_exact(len).all(|states| same(states, mine));
        Ok(differ.then_some(all))
    }

    /// Collective: gathers an arena of f32 that each rank has for itself on rank 0, in rank order; empty on other ranks.
    pub fn gather_of_each(&mut self, what: Kept) -> Result<Vec<f32>, ExecError> {
        let (rank, ranks, len) = (self.role().rank, self.role().ranks, self.memory.state.kept(what).len());
        let mut all = floats(if rank == 0 { ranks * len } else { 0 }, "what each rank has for itself")?;
        let group = self.group.as_mut().expect("an engine that joined");
        group.comms.along(Axis::Data).gather(
            self.memory.state.kept(what),
            (rank == 0).then_some(&mut all[..]),
            &even_cuts(ranks, len),
            0,
        )?;
        Ok(all)
    }

    /// Collective, the reverse: scatters such an arena from rank 0, to each rank its own.
    pub fn scatter_to_each(&mut self, what: Kept, from: Option<&[f32]>) -> Result<(), ExecError> {
        let cuts = even_cuts(self.role().ranks, self.memory.state.kept(what).len());
        let group = self.group.as_mut().expect("an engine that joined");
        Ok(group.comms.along(Axis::Data).scatter(self.memory.state.kept_mut(what), from, &cuts, 0)?)
    }

    /// Collective: gathers an arena that each rank has for itself on rank 0 as f32, whatever it is stored in, in rank order; empty on
    /// other ranks.
    pub fn gather_wide_of_each(&mut self, what: Kept) -> Result<Vec<f32>, ExecError> {
        let mine = self.kept_wide(what);
        let (rank, ranks) = (self.role().rank, self.role().ranks);
        let mut all =
            floats(if rank == 0 { ranks * mine.len() } else { 0 }, "what each rank has for itself")?;
        let into = (rank == 0).then_some(&mut all[..]);
        let group = self.group.as_mut().expect("an engine that joined");
        group.comms.along(Axis::Data).gather(&mine, into, &even_cuts(ranks, mine.len()), 0)?;
        Ok(all)
    }

    /// Collective, the reverse: each rank rounds its own to what is stored.
    pub fn scatter_wide_to_each(&mut self, what: Kept, from: Option<&[f32]>) -> Result<(), ExecError> {
        let mut mine = self.kept_wide(what);
        let cuts = even_cuts(self.role().ranks, mine.len());
        let group = self.group.as_mut().expect("an engine that joined");
        group.comms.along(Axis::Data).scatter(&mut mine, from, &cuts, 0)?;
        self.put_kept(what, 0, &mine);
        Ok(())
    }

    /// Collective: an arena of f32 becomes that of the first rank along the data axis.
    pub fn broadcast_kept(&mut self, what: Kept) -> Result<(), ExecError> {
        let group = self.group.as_mut().expect("an engine that joined");
        Ok(group.comms.along(Axis::Data).broadcast(self.memory.state.kept_mut(what), 0)?)
    }

    /// Collective: gathers the moments of all parameters on rank 0, laid out as [`Engine::moment_slots`] says.
    pub fn gather_moments(&mut self, which: Kept, into: Option<&mut [f32]>) -> Result<(), ExecError> {
        if !self.has_moments(which) {
            return Ok(());
        }
        let role = self.role().clone();
        let comm = self.group.as_mut().expect("an engine that joined").comms.along(Axis::Data);
        match self.memory.state.stored(which) {
            Floats::F32(mine) => gather(comm, &role, mine, into, |x| x),
            Floats::Bf16(mine) => gather(comm, &role, mine, into, bf16::to_f32),
            Floats::F16(_) => unreachable!("moments are stored in f32 or bf16"),
        }
    }

    /// Collective, the reverse: scatters moments from rank 0, to each rank its shard.
    pub fn scatter_moments(&mut self, which: Kept, from: Option<&[f32]>) -> Result<(), ExecError> {
        if !self.has_moments(which) {
            return Ok(());
        }
        let role = self.role().clone();
        let comm = self.group.as_mut().expect("an engine that joined").comms.along(Axis::Data);
        match self.memory.state.stored_mut(which) {
            FloatsMut::F32(mine) => scatter(comm, &role, mine, from, |x| x),
            FloatsMut::Bf16(mine) => scatter(comm, &role, mine, from, bf16::from_f32),
            FloatsMut::F16(_) => unreachable!("moments are stored in f32 or bf16"),
        }
    }

    /// Whether the optimizer has this moment; this rank's shard of it may be empty.
    fn has_moments(&self, which: Kept) -> bool {
        let n = self.memory.state.lengths.n_moments;
        match which {
            Kept::Moment1 => n > 0,
            Kept::Moment2 => n > 1,
            Kept::Params | Kept::States | Kept::Average | Kept::Residual | Kept::Factors | Kept::Velocity => {
                false
            }
        }
    }

    /// So many of this rank's threads compute from now on; results are the same bits.
    pub fn set_active_threads(&self, threads: usize) {
        self.pool.set_active(threads);
    }

    /// Records where the time goes from now on.
    pub fn set_timeline(&mut self, timeline: Option<Timeline>) {
        self.timeline = timeline;
    }

    /// The recorded timeline.
    pub fn timeline(&self) -> Option<&Timeline> {
        self.timeline.as_ref()
    }

    /// Whether weights may be written: they are this engine's own, or it is this rank's turn.
    pub(crate) fn may_write_weights(&self) -> bool {
        let shared = self.first().role.as_ref().is_some_and(Role::shares_weights);
        !shared || self.group.as_ref().is_none_or(|g| g.open)
    }

    fn set_open(&mut self, open: bool) {
        if let Some(group) = &mut self.group {
            group.open = open;
        }
    }

    /// Broadcasts weights that all have and states from rank 0.
    fn spread(&mut self) -> Result<(), ExecError> {
        let (weights, ranks) = (self.role().weights, self.role().ranks);
        let group = self.group.as_mut().expect("an engine that joined");
        if ranks == 1 {
            return Ok(group.comms.job().barrier()?);
        }
        if weights == Weights::Own {
            group.comms.along(Axis::Data).broadcast(self.memory.state.kept_mut(Kept::Params), 0)?;
        }
        group.comms.along(Axis::Data).broadcast(self.memory.state.kept_mut(Kept::States), 0)?;
        let mut step = [self.memory.state.step as i64];
        group.comms.along(Axis::Data).broadcast(&mut step, 0)?;
        self.memory.state.step = step[0] as u64;
        Ok(group.comms.job().barrier()?)
    }
}

/// Gathers the shards of all ranks on rank 0 and widens them.
fn gather<T: Element + Default>(
    comm: &mut Comm,
    role: &Role,
    mine: &[T],
    into: Option<&mut [f32]>,
    widen: impl Fn(T) -> f32,
) -> Result<(), ExecError> {
    let copy = |to: &mut [f32], from: &[T]| to.iter_mut().zip(from).for_each(|(to, x)| *to = widen(*x));
    if !role.sharded() {
        if let (0, Some(into)) = (role.rank, into) {
            copy(&mut into[..mine.len()], mine);
        }
        return Ok(());
    }
    let cuts = packed_cuts(role);
    let len = if role.rank == 0 { cuts[role.ranks] } else { 0 };
    let mut packed: Vec<T> = Vec::new();
    make_room(&mut packed, len, "moments of all ranks")?;
    packed.resize(len, T::default());
    comm.gather(mine, (role.rank == 0).then_some(&mut packed[..]), &cuts, 0)?;
    if let (0, Some(into)) = (role.rank, into) {
        let mut at = 0;
        for range in role.parts.iter().flatten() {
            copy(&mut into[range.clone()], &packed[at..at + range.len()]);
            at += range.len();
        }
    }
    Ok(())
}

/// The reverse: rounds what rank 0 has, and gives each rank its shard.
fn scatter<T: Element>(
    comm: &mut Comm,
    role: &Role,
    mine: &mut [T],
    from: Option<&[f32]>,
    round: impl Fn(f32) -> T,
) -> Result<(), ExecError> {
    if !role.sharded() {
        if let (0, Some(from)) = (role.rank, from) {
            mine.iter_mut().zip(from).for_each(|(to, x)| *to = round(*x));
        }
        return Ok(comm.broadcast(mine, 0)?);
    }
    let packed: Option<Vec<T>> = match (role.rank, from) {
        (0, Some(from)) => {
            let parts = role.parts.iter().flatten();
            Some(parts.flat_map(|r| from[r.clone()].iter().map(|x| round(*x))).collect())
        }
        _ => None,
    };
    Ok(comm.scatter(mine, packed.as_deref(), &packed_cuts(role), 0)?)
}

/// Equal parts of `len` elements, one for each rank.
pub(crate) fn even_cuts(ranks: usize, len: usize) -> Cuts {
    (0..=ranks).map(|rank| rank * len).collect()
}

/// Where the moments of each rank lie when they are concatenated.
fn packed_cuts(role: &Role) -> Cuts {
    let lens = role.parts.iter().map(|parts| parts.iter().map(|r| r.len()).sum::<usize>());
    std::iter::once(0)
        .chain(lens.scan(0, |at, len| {
            *at += len;
            Some(*at)
        }))
        .collect()
}
