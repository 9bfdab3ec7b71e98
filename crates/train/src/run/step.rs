//! One rank's part of every step: its samples, its microbatches, and how its part changes with its speed.

use std::thread;
use std::time::{Duration, Instant};

use polyreme_data::{Dataset, Loader, LoaderOptions, Order, Span, counted_of, time_of};
use polyreme_parallel::Norms;

use super::prepared::Prepared;
use super::train::{Run, Wishes};
use crate::balance::slow::SlowRanks;
use crate::balance::{BLOCKS, Balancer, Look, Timings, is_due};
use crate::error::TrainError;
use crate::event::{Event, Observer};
use crate::job::{Balance, Source};
use crate::learner::{MicrobatchData, RankStep, StepResult};
use crate::mixup;
use crate::pace::{Pace, RankShare, StepKind};
use crate::talk;

/// What rank 0 adds to the sum of wishes if it is time for a checkpoint: more than there are ranks who wish to stop.
pub(super) const SAVE: u64 = 1 << 32;
/// The same if it is time to look at the ranks' speeds.
const LOOK: u64 = SAVE << 1;
/// The same if the ranks of an elastic run are to change after this step.
pub(super) const CHANGE: u64 = LOOK << 1;

impl Run {
    /// Reads this rank's samples from the next step on, and no others.
    pub(super) fn loader(&self, steps: u64) -> Result<Loader, TrainError> {
        let (pace, first) = (self.prepared.pace, self.learner.steps_done());
        let (order, part) = (self.prepared.order(0), self.part.clone());
        let set = self.prepared.fills_by_step().then(|| self.prepared.sets.train.clone());
        // Ranks that have entered get samples after the first step; until then there may be none to be found.
        let until = if self.entered { first + 1 } else { steps };
        let plan =
            (first..until).flat_map(move |step| spans_of_step(step, pace, order, &part, set.as_deref()));
        let data = &self.prepared.job.data;
        let cheap = !matches!(data.source, Source::Images { .. } | Source::Tar { .. });
        let threads = data.threads.unwrap_or(if cheap { 1 } else { self.prepared.threads });
        let options = LoaderOptions {
            batch_max: self.part.lengths()[0],
            threads,
            prefetch: data.prefetch,
            seed: self.prepared.job.train.seed,
        };
        let (set, transform) = (self.prepared.sets.train.clone(), self.prepared.transform()?);
        let Some(servers) = self.servers.as_ref().filter(|_| self.is_free()) else {
            return Ok(Loader::start(set, transform, plan, options));
        };
        // Which block comes next is known when it is leased: it is loaded when it is asked for.
        let spans = servers.spans.clone();
        let next = move || spans.lock().unwrap_or_else(std::sync::PoisonError::into_inner).pop_front();
        let options = LoaderOptions { threads: 0, ..options };
        Ok(Loader::start(set, transform, std::iter::from_fn(next), options))
    }

    /// This rank's samples of a step.
    pub(super) fn spans_of(&self, step: u64) -> Vec<Span> {
        let set = self.prepared.fills_by_step().then(|| self.prepared.sets.train.clone());
        spans_of_step(step, self.prepared.pace, self.prepared.order(0), &self.part, set.as_deref())
    }

    /// This rank's part of the steps up to the next flush, which are one step unless the schedule has none between steps. Returns what
    /// they came to, and what all ranks wish.
    pub(super) fn steps(
        &mut self,
        loader: &mut Loader,
        first: u64,
        steps: u64,
        observer: &dyn Observer,
    ) -> Result<(Vec<StepResult>, Wishes), TrainError> {
        let (pace, train) = (self.prepared.pace, &self.prepared.job.train);
        let until_end = usize::try_from(steps - first).unwrap_or(usize::MAX);
        let n_steps = self.prepared.cut.flushes.run_from(pace, first).min(until_end);
        let (rank, saved, waited_last) = (self.rank, self.saved, self.waited_last.as_secs_f64());
        let limit = self.prepared.job.output.every_minutes;
        let look = rank == 0 && self.pulse.as_ref().is_some_and(Pulse::is_due);
        let extra = || {
            // Rank 0 finds that too much would be lost.
            let minutes = saved.elapsed().as_secs_f64() / 60.0;
            let save = rank == 0 && limit.is_some_and(|limit| minutes >= limit);
            let change = rank == 0 && observer.change_requested();
            let wishes = [(observer.stop_requested(), 1), (save, SAVE), (look, LOOK), (change, CHANGE)];
            let wishes: u64 = wishes.iter().filter(|(wished, _)| *wished).map(|(_, worth)| worth).sum();
            [wishes as f64, waited_last]
        };
        let mix = |step: u64| match train.mixup > 0.0 {
            true => mixup::share(train.mixup, train.seed, step),
            false => 1.0,
        };
        let (slowness, computes) = (&self.prepared.slowness, self.busy_last.saturating_sub(self.slept_last));
        let (mut slept, mut reached) = (Duration::ZERO, None);
        let (began, waited_before) = (Instant::now(), loader.waited());
        let microbatches = self.part.microbatches(first);
        let order = self.prepared.order(pace.epoch(first));
        let time = self
            .prepared
            .fills_by_step()
            .then(|| time_of(self.prepared.sets.train.as_ref(), order, pace.start(first), pace.len(first)));
        let rounds = self.part.rounds(first);
        let part = RankStep {
            labels: &|k| {
                let step = first + k as u64;
                let order = self.prepared.order(pace.epoch(step));
                counted_of(self.prepared.sets.train.as_ref(), order, pace.start(step), pace.len(step))
            },
            kind: StepKind { microbatches, rounds, steps: n_steps, time: time.flatten() },
            lr: &|k| self.prepared.lr(first + k as u64) as f32,
            loss_scale: self.progress.loss_scale.map_or(1.0, |s| s.scale),
            extra: &extra,
        };
        // A block of a segment is given back with the segment.
        let alone = !self.is_free();
        if let Some(undo) = self.undo.as_mut().filter(|_| alone) {
            undo.keep(&self.learner);
        }
        let results = self.learner.step(part, &mut |k, _, take| {
            if slowness.is_any() && reached.replace(k) != Some(k) {
                let pause = slowness.pause(rank, first + k as u64, computes);
                thread::sleep(pause);
                slept += pause;
            }
            let loaded = loader.next().expect("the plan has a batch for each microbatch")?;
            let mix = mix(first + k as u64);
            let (x, labels) = (loaded.x.values(), loaded.labels.values());
            take(MicrobatchData { x, labels, mix, samples: loaded.tally })
        })?;
        let last = results.last().expect("at least one step");
        let idle = last.waited + (loader.waited() - waited_before);
        // Of several steps without a flush between them, each took as long as the others.
        let busy = began.elapsed().saturating_sub(idle);
        (self.busy_last, self.slept_last) = (busy / results.len() as u32, slept / results.len() as u32);
        if let Some(pulse) = &mut self.pulse
            && pace.len(first) == pace.batch
        {
            let units = match self.prepared.cut.shards {
                Some(_) => microbatches.len(),
                None => self.part.samples(first),
            };
            pulse.timings.note(units, busy.as_secs_f64());
        }
        // One that only serves has nothing to wait for.
        self.waited_last = if self.only_serves() { Duration::ZERO } else { last.waited };
        let wishes = wishes_of(last.extra[0]);
        if let Some(pulse) = &mut self.pulse {
            pulse.n_steps += results.len() as u64;
        }
        Ok((results, wishes))
    }

    /// Looks at the ranks' speeds; whether samples are shared out in another way from now on. Collective.
    pub(super) fn rebalance(&mut self, done: u64, observer: &mut dyn Observer) -> Result<bool, TrainError> {
        let Some(pulse) = self.pulse.as_mut() else { return Ok(false) };
        (pulse.n_steps, pulse.looked) = (0, Instant::now());
        let mut mine = [0.0; BLOCKS + 1];
        mine[..BLOCKS].copy_from_slice(&pulse.timings.take());
        mine[BLOCKS] = std::mem::take(&mut pulse.cost_s);
        let all = talk::gather_all(self.learner.comm(), &mine)?;
        let look: Look = all.chunks_exact(BLOCKS + 1).map(|m| std::array::from_fn(|b| m[b])).collect();
        let cost_s = all.iter().skip(BLOCKS).step_by(BLOCKS + 1).copied().fold(0.0, f64::max);
        let (pace, cut) = (self.prepared.pace, &self.prepared.cut);
        let lines = pulse.slow.look(&look, &cut.units(pace.batch).0);
        let mut say = |why: &str| {
            if self.rank == 0 {
                observer.event(Event::Balanced { step: done, why });
            }
        };
        lines.iter().for_each(|line| say(line));
        let elastic = self.prepared.job.parallel.elastic.as_ref().filter(|elastic| look.len() > elastic.min);
        let bound = elastic.and_then(|elastic| elastic.leave_out);
        if let Some(rank) = bound.and_then(|bound| pulse.slow.slower_than(bound)) {
            say(&format!("{} is too slow, and leaves", pulse.slow.name(rank)));
            if rank == self.rank {
                observer.event(Event::TooSlow);
            }
        }
        if !pulse.balances {
            return Ok(false);
        }
        // Rank 0 decides for all: another machine might round in another way.
        let mut weights = cut.weights.clone();
        let mut why = None;
        if let Some(balancer) = &mut pulse.balancer {
            let steps = pace.total_steps(self.prepared.job.train.length);
            let meets = self.prepared.learner.plan.norms == Norms::Synchronised;
            let allowed = |counts: &[usize]| !meets || cut.by(weights_of(counts)).all_meet(pace);
            if let Some(shift) = balancer.look(look, steps.saturating_sub(done), cost_s, &allowed) {
                weights = weights_of(balancer.counts());
                why = shift.said;
            }
        }
        self.learner.comm().broadcast(&mut weights, 0)?;
        if weights == self.prepared.cut.weights {
            return Ok(false);
        }
        self.share_out(weights, done, why, observer)
    }

    /// Shares samples out equally from now on: ranks that have entered get theirs. Collective.
    pub(super) fn share_equally(&mut self, done: u64, observer: &mut dyn Observer) -> Result<(), TrainError> {
        let weights = vec![1.0; self.prepared.cut.ranks()];
        if self.share_out(weights, done, None, observer)? {
            self.pulse = Pulse::new(&self.prepared, self.rank);
        }
        Ok(())
    }

    /// Shares samples out by these weights from now on; whether all ranks can. Collective.
    fn share_out(
        &mut self,
        weights: Vec<f64>,
        done: u64,
        why: Option<String>,
        observer: &mut dyn Observer,
    ) -> Result<bool, TrainError> {
        let began = Instant::now();
        let cut = self.prepared.cut.by(weights);
        let part = RankShare::new(self.prepared.pace, &cut, self.prepared.data_rank(self.rank));
        let ready = self.learner.prepare(&part, cut.shard_runs());
        // A longer part may take more memory than there is: then all stay as they are.
        let able = talk::gather_all(self.learner.comm(), &[f64::from(u8::from(ready.is_ok()))])?;
        if able.contains(&0.0) {
            self.pulse = None;
            let runs = self.prepared.cut.shard_runs();
            self.learner.prepare(&self.part, runs)?;
            self.learner.keep_only(&self.part);
            let why =
                ready.err().map_or_else(|| "another rank has no memory for it".into(), |e| e.to_string());
            observer.event(Event::Warning(&format!("samples are shared out as before from now on: {why}")));
            return Ok(false);
        }
        (self.prepared.cut, self.part) = (cut, part);
        self.learner.keep_only(&self.part);
        if let Some(pulse) = &mut self.pulse {
            pulse.cost_s = began.elapsed().as_secs_f64();
        }
        if let Some(why) = &why {
            observer.event(Event::Balanced { step: done, why });
        }
        Ok(true)
    }
}

/// The samples of a step that a rank has, a span for each microbatch.
fn spans_of_step(
    step: u64,
    pace: Pace,
    order: Order,
    part: &RankShare,
    set: Option<&dyn Dataset>,
) -> Vec<Span> {
    let (order, start) = (order.of_epoch(pace.epoch(step)), pace.start(step));
    let time = set.and_then(|set| time_of(set, order, start, pace.len(step)));
    let microbatches = part.microbatches(step).iter().filter(|p| p.len > 0);
    microbatches.map(|p| Span { order, start: start + p.offset, len: p.len, time }).collect()
}

/// What the sum of all ranks' wishes says.
pub(super) fn wishes_of(sum: f64) -> Wishes {
    let wished = sum as u64;
    Wishes {
        stop: !wished.is_multiple_of(SAVE),
        save: wished & SAVE > 0,
        look: wished & LOOK > 0,
        change: wished & CHANGE > 0,
    }
}

fn weights_of(counts: &[usize]) -> Vec<f64> {
    counts.iter().map(|n| *n as f64).collect()
}

/// What a rank knows of its speed, if somebody is to know.
pub(super) struct Pulse {
    pub(super) timings: Timings,
    /// Steps since the last look, and when that was.
    n_steps: u64,
    looked: Instant,
    /// Seconds that the last change took, until the others have been told.
    cost_s: f64,
    /// Whether samples are shared out by it.
    balances: bool,
    /// Rank 0's, if they are.
    balancer: Option<Balancer>,
    /// Rank 0 tells what it finds.
    slow: SlowRanks,
}

impl Pulse {
    /// Of a rank of a prepared job; `None` if speeds are of no interest: ranks of one host share its cores, and wait for each other in
    /// other ways; those that take steps by themselves seldom wait.
    pub(super) fn new(prepared: &Prepared, rank: usize) -> Option<Pulse> {
        let (parallel, hosts) = (&prepared.job.parallel, &prepared.hosts);
        let apart = hosts.iter().any(|host| *host != hosts[0]);
        let balances = match parallel.balance {
            Balance::Auto => true,
            Balance::Hosts => apart,
            Balance::Equal | Balance::Given(_) => false,
        };
        let leaves_out = parallel.elastic.as_ref().is_some_and(|elastic| elastic.leave_out.is_some());
        let (plan, ranks) = (&prepared.learner.plan, prepared.ranks());
        let by_themselves = plan.local_steps().is_some() || plan.servers.is_some();
        if parallel.replica_ranks() > 1 || ranks == 1 || by_themselves || !(balances || apart || leaves_out) {
            return None;
        }
        let (counts, unit) = prepared.cut.units(prepared.pace.batch);
        let names = (0..prepared.ranks()).map(|rank| match hosts.get(rank) {
            Some(host) => format!("rank {rank} on {host}"),
            None => format!("rank {rank}"),
        });
        let slow = SlowRanks::new(names.collect());
        let balancer = (rank == 0 && balances).then(|| match parallel.balance {
            Balance::Hosts => Balancer::unasked(counts, unit),
            Balance::Auto | Balance::Equal | Balance::Given(_) => Balancer::new(counts, unit),
        });
        let (timings, looked) = (Timings::with_room(), Instant::now());
        Some(Pulse { timings, n_steps: 0, looked, cost_s: 0.0, balances, balancer, slow })
    }

    /// Whether the step that begins is the last one before a look.
    fn is_due(&self) -> bool {
        is_due(self.n_steps + 1, self.looked.elapsed().as_secs_f64())
    }
}
