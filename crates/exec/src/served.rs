//! The ranges of a parameter server: their parameters and optimizer state, and the updates.
//!
//! A server starts with what the engine beside it has, and works on a copy: the engine's own weights are those that its rank computes with, which may
//! be older. When nothing is under way, [`ServedRanges::give_back`] copies the optimizer state into the engine, from which
//! checkpoints are taken; the weights every rank has pulled. Where ranks may be lost, each pulls the optimizer state too
//! ([`Engine::pull_all`]), so that it outlives its server.

use std::ops::Range;
use std::sync::Arc;

use polyreme_collective::servers::{PushedGradient, RangeStore, ServerClient};
use polyreme_graph::{Learning, Optimizer, Role, learnt_alike};
use polyreme_kernels::optim::StepHyper;
use polyreme_kernels::{Cx, Isa};
use polyreme_parallel::tree::SumsOfRanks;

use crate::engine::{Engine, Loaded};
use crate::error::ExecError;
use crate::weights::Kept;

/// The learning rate of an update, by its number from 0.
pub type RateOf = Arc<dyn Fn(u64) -> f32 + Send + Sync>;

/// What one server holds.
pub struct ServedRanges {
    isa: Isa,
    optimizer: Optimizer,
    rate: RateOf,
    /// Reproducible: what becomes of the sums over logical shards that workers push.
    sums: Option<SumsOfRanks>,
    ranges: Vec<OwnRange>,
    params: Vec<f32>,
    /// As many as the optimizer has.
    moments: Vec<Vec<f32>>,
    /// The sum of the gradients of an update; reproducible: all sums that were pushed, of which the first becomes that.
    gradient: Vec<f32>,
}

/// One range: where it lies among the server's numbers, and runs of it that are learnt alike, counted from its start.
struct OwnRange {
    at: Range<usize>,
    alike: Vec<(Range<usize>, Learning)>,
    /// Where its moments lie among those of the engine beside it.
    moments_at: usize,
}

impl ServedRanges {
    /// What the server beside this engine holds, as the engine has it. Of a small model that may be nothing. In a reproducible run workers push
    /// `sums`.
    pub fn of(engine: &Engine, rate: RateOf, sums: Option<SumsOfRanks>) -> Result<ServedRanges, ExecError> {
        let program = engine.first();
        let optimizer = program.optimizer.ok_or(ExecError::NoOptimizer)?;
        let own = engine.role().rank;
        let (mut ranges, mut params) = (Vec::new(), Vec::new());
        let states = MOMENTS.into_iter().take(optimizer.n_states());
        let kept: Vec<&[f32]> = states.map(|what| engine.kept(what)).collect();
        let mut moments = vec![Vec::new(); kept.len()];
        let weights = engine.kept(Kept::Params);
        for served in program.served.iter().filter(|served| served.server == own) {
            let Range { start, end } = served.params;
            let alike = learnt_alike(program.graph(), &served.params)
                .into_iter()
                .map(|(run, learning)| (run.start - start..run.end - start, learning));
            let moments_at = moments_at(engine.role(), start);
            let at = params.len()..params.len() + end - start;
            ranges.push(OwnRange { at, alike: alike.collect(), moments_at });
            params.extend_from_slice(&weights[start..end]);
            for (own, kept) in moments.iter_mut().zip(&kept) {
                own.extend_from_slice(&kept[moments_at..moments_at + end - start]);
            }
        }
        let isa = engine.options.isa;
        Ok(ServedRanges { isa, optimizer, rate, sums, ranges, params, moments, gradient: Vec::new() })
    }

    /// How many ranges there are.
    pub fn n_ranges(&self) -> usize {
        self.ranges.len()
    }

    /// Copies the optimizer state into the engine beside it.
    pub fn give_back(&self, engine: &mut Engine) {
        for (what, moments) in MOMENTS.into_iter().zip(&self.moments) {
            for range in &self.ranges {
                engine.put_kept(what, range.moments_at, &moments[range.at.clone()]);
            }
        }
    }
}

/// The states of an optimizer, in their order.
const MOMENTS: [Kept; 2] = [Kept::Moment1, Kept::Moment2];

/// Where the moments of the parameter at `start` lie among those that a rank keeps.
fn moments_at(role: &Role, start: usize) -> usize {
    let before = role.own().iter().map(|own| own.end.min(start).saturating_sub(own.start));
    before.sum()
}

/// Adds up what workers pushed of a range of `len` parameters along the tree of logical shards, into the first `len` numbers of `sum`.
fn add_along(tree: &SumsOfRanks, pushed: &[PushedGradient], len: usize, sum: &mut Vec<f32>) {
    sum.resize(tree.counts.iter().sum::<usize>() * len, 0.0);
    let mut at = 0;
    for gradient in pushed {
        let n = tree.counts[gradient.worker()] * len;
        gradient.copy_to(&mut sum[at..at + n]);
        at += n;
    }
    for add in &tree.adds {
        let (left, right) = sum.split_at_mut(add.from * len);
        let into = &mut left[add.into * len..][..len];
        into.iter_mut().zip(&right[..len]).for_each(|(into, from)| *into += from);
    }
}

impl RangeStore for ServedRanges {
    fn len_of(&self, range: usize) -> usize {
        self.ranges[range].at.len()
    }

    fn sums_of(&self, worker: usize) -> usize {
        self.sums.as_ref().map_or(1, |sums| sums.counts.get(worker).copied().unwrap_or(0))
    }

    fn apply(&mut self, range: usize, version: u64, gradients: &[PushedGradient]) {
        let ServedRanges { isa, optimizer, rate, sums, ranges, params, moments, gradient } = self;
        let OwnRange { at, alike, .. } = &ranges[range];
        let Some((first, others)) = gradients.split_first() else { return };
        let weight: f64 = match sums {
            None => {
                gradient.resize(at.len(), 0.0);
                first.copy_to(gradient);
                others.iter().for_each(|other| other.add_to(gradient));
                gradients.iter().map(PushedGradient::weight).sum()
            }
            Some(sums) => {
                add_along(sums, gradients, at.len(), gradient);
                // All say what the whole step weighs.
                first.weight()
            }
        };
        let (lr, cx) = (rate(version - 1), Cx { isa: *isa, ..Cx::serial() });
        let grad_scale = (1.0 / weight) as f32 * first.scale() as f32;
        for (run, learning) in alike {
            let lr = (f64::from(lr) * learning.lr_scale) as f32;
            let rule = learning.weight_decay.map_or(*optimizer, |decay| optimizer.with_weight_decay(decay));
            let hyper = StepHyper { lr, step: version, grad_scale, decay_scale: 1.0 };
            let here = at.start + run.start..at.start + run.end;
            let mut states = moments.iter_mut().map(|state| &mut state[here.clone()]);
            let [m, v] = [states.next().unwrap_or_default(), states.next().unwrap_or_default()];
            rule.step(&cx, hyper, &mut params[here.clone()], &gradient[run.clone()], m, v, &[]);
        }
    }

    fn weights(&self, range: usize) -> &[f32] {
        &self.params[self.ranges[range].at.clone()]
    }

    fn state(&self, range: usize, which: usize) -> Option<&[f32]> {
        Some(&self.moments.get(which)?[self.ranges[range].at.clone()])
    }
}

impl Engine {
    /// Gives the engine its end of the servers, for the pushes and pulls of its programs.
    pub fn set_servers(&mut self, client: ServerClient) {
        self.servers = Some(client);
    }

    /// Its end of the servers.
    pub fn servers(&mut self) -> Option<&mut ServerClient> {
        self.servers.as_mut()
    }

    /// Takes its end of the servers away.
    pub fn take_servers(&mut self) -> Option<ServerClient> {
        self.servers.take()
    }

    /// Takes over the weights that the servers have now.
    pub fn pull_now(&mut self) -> Result<(), ExecError> {
        let served = self.first().served.clone();
        let Some(client) = &mut self.servers else { return Ok(()) };
        for range in &served {
            client.pull_now((range.server, range.number))?;
        }
        for range in &served {
            let into = &mut self.memory.state.kept_mut(Kept::Params)[range.params.clone()];
            client.receive((range.server, range.number), into)?;
        }
        Ok(())
    }

    /// The same, with the optimizer state. Only where this rank keeps that of all parameters.
    pub fn pull_all(&mut self) -> Result<(), ExecError> {
        self.pull_now()?;
        let served = self.first().served.clone();
        let n_states = self.first().optimizer.map_or(0, |optimizer| optimizer.n_states());
        let at: Vec<usize> = served.iter().map(|range| moments_at(self.role(), range.params.start)).collect();
        let Some(client) = &mut self.servers else { return Ok(()) };
        for (which, what) in MOMENTS.into_iter().take(n_states).enumerate() {
            for range in &served {
                client.pull_state((range.server, range.number), which)?;
            }
            let into = self.memory.state.kept_mut(what);
            for (range, at) in served.iter().zip(&at) {
                let into = &mut into[*at..*at + range.params.len()];
                client.receive_state((range.server, range.number), which, into)?;
            }
        }
        Ok(())
    }

    /// Pushes the gradients of a range, or sums of them, unless this rank's own loss is not finite: then the step ends before anything is applied.
    pub(crate) fn push_range(&mut self, loaded: &Loaded, number: usize) -> Result<(), ExecError> {
        let weights = self.pushed_weight(&loaded.program);
        let range = &loaded.program.served[number];
        if self.progress.has_non_finite() {
            return Ok(());
        }
        let client = self.servers.as_mut().ok_or(ExecError::NoServers)?;
        let len = range.pushed.iter().map(|of| loaded.program.len_of(of)).sum();
        let mut letter = client.gradient((range.server, range.number), weights, len);
        for of in &range.pushed {
            letter.extend(self.memory.region::<f32>(loaded, &self.bodies, of));
        }
        Ok(letter.push()?)
    }

    /// Asks for a range.
    pub(crate) fn pull_range(&mut self, loaded: &Loaded, number: usize) -> Result<(), ExecError> {
        let range = &loaded.program.served[number];
        let client = self.servers.as_mut().ok_or(ExecError::NoServers)?;
        Ok(client.pull((range.server, range.number))?)
    }

    /// Waits for a range, and takes it over.
    pub(crate) fn await_range(&mut self, loaded: &Loaded, number: usize) -> Result<(), ExecError> {
        let range = &loaded.program.served[number];
        let client = self.servers.as_mut().ok_or(ExecError::NoServers)?;
        let into = &mut self.memory.state.kept_mut(Kept::Params)[range.params.clone()];
        Ok(client.receive((range.server, range.number), into)?)
    }
}
