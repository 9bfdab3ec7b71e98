//! A run whose weights are at parameter servers: the servers on the first ranks, and workers that take blocks of samples as they
//! come to them.
//!
//! In lockstep (`sync = "ps"`) the loop is that of every run, and only the program differs. Otherwise a step is a block that one worker does
//! alone, with the samples that the step has in any run: which worker does which block is decided by leases, so a fast one does more. All
//! blocks of a **segment** are done before the ranks meet. Then every rank pulls what the servers have, and all that follows a step (evaluation,
//! checkpoints, records) is as ever: the servers have applied the blocks `0..n`, each once, in some order. A segment ends where something of
//! that is due, and after a second in any case, so that there are records and requests to stop are heard.
//!
//! A rank with a server is a worker too, or only serves. One that only serves takes part in all that ranks do together, and has no samples: in
//! lockstep a part of nothing, otherwise no block. Its own copy of the weights follows when ranks meet, and in lockstep before a
//! checkpoint, which rank 0 writes.
//!
//! Which samples counted is known as in every run: each block's tally travels with its result, and the ledger adds them up.
//!
//! A rank that is lost ends the run, as any does; it resumes from the last checkpoint. In an elastic run the others go on: a segment
//! is done when every rank has pulled all that the servers have, weights and optimizer state, and knows that the others have too. Until
//! then each keeps what it had at the last meeting (`Undo`), and goes back to it when a rank is lost, with its server or without: the
//! blocks of the segment are leased again, by servers that begin with what was kept. So a block counts once, however far its pushes came.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use polyreme_collective::Reduce;
use polyreme_collective::servers::{
    Discipline, HostOptions, LeaseAnswer, ServerClient, ServerCounts, ServerHost, ServerMail, Staleness,
};
use polyreme_data::{Loader, Span, Tally};
use polyreme_exec::{RateOf, ServedRanges};
use polyreme_graph::{DType, Program};

use super::step::{CHANGE, SAVE, wishes_of};
use super::train::{Run, Wishes};
use crate::error::TrainError;
use crate::event::{Event, Observer};
use crate::job::SyncKind;
use crate::learner::StepResult;
use crate::talk;

/// For how long a segment hands out blocks at least; ranks hear of requests to stop at once.
const SEGMENT: Duration = Duration::from_secs(1);
/// The same where ranks may be lost, and the segment with them.
const ELASTIC_SEGMENT: Duration = Duration::from_millis(250);
/// And at most.
const SEGMENT_MAX: Duration = Duration::from_secs(30);
/// A segment takes as long as so many blocks of a worker, or so many meetings: at its end workers wait for half a block on the average.
const BLOCKS_A_SEGMENT: u32 = 10;

/// How often a rank that only serves looks whether it is to stop.
const LOOK: Duration = Duration::from_millis(50);

/// What travels of a block: its loss, its gradients' norm, how long its worker waited, and the tally of its samples.
const NUMBERS: usize = 3 + Tally::NUMBERS;

/// A rank's part in the servers of a run.
pub(super) struct Servers {
    /// The server of this rank, and its numbers.
    host: Option<(ServerHost, Arc<Mutex<ServedRanges>>)>,
    /// Segments that have begun.
    segment: u64,
    /// For how long the next one hands out blocks.
    longest: Duration,
    /// Spans of the block that is to be loaded next.
    pub(super) spans: Arc<Mutex<VecDeque<Span>>>,
    /// When a session with the servers lasts as long as the run.
    lockstep: bool,
}

/// What servers came to.
pub(super) struct ServersEnd {
    /// Of all of them.
    pub(super) staleness: Staleness,
    /// What the one of this rank sent.
    pub(super) own_bytes: u64,
}

/// What a rank takes for servers, by its program: the ranges of its server, with their optimizer state, `n_sums` sums of gradients and letters with
/// weights; letters with its own gradients; and where ranks may be lost, what it goes back to.
pub(super) fn served_bytes(program: &Program, rank: usize, n_sums: usize, elastic: bool) -> usize {
    let len = |own: bool| {
        let of = program.served.iter().filter(move |range| range.server == rank || !own);
        of.map(|range| range.params.len())
    };
    let (held, all, longest): (usize, usize, usize) =
        (len(true).sum(), len(false).sum(), len(true).max().unwrap_or(0));
    let arenas = 1 + program.optimizer.map_or(0, |optimizer| optimizer.n_states());
    let kept = if elastic { arenas * all } else { 0 };
    let pushed = program.served.iter().flat_map(|range| &range.pushed);
    let pushed: usize = pushed.map(|of| program.len_of(of)).sum();
    DType::F32.bytes() * ((arenas + 1) * held + n_sums * longest + pushed + kept)
}

impl Run {
    /// Starts the servers with what the ranks have now, if there are to be any. Collective.
    pub(super) fn start_servers(&mut self) -> Result<(), TrainError> {
        let Some(plan) = self.prepared.learner.plan.servers else { return Ok(()) };
        let mail = ServerMail::new(self.learner.comm())?;
        let prepared = self.prepared.clone();
        let rate: RateOf = Arc::new(move |step| prepared.lr(step) as f32);
        let parallel = &self.prepared.job.parallel;
        let discipline = match parallel.sync {
            SyncKind::PsBounded => Discipline::Bounded { staleness: parallel.staleness as u64 },
            SyncKind::PsAsync => Discipline::Free,
            SyncKind::Ps | SyncKind::AllReduce | SyncKind::Local => {
                Discipline::Lockstep { workers: self.prepared.ranks() - plan.serving }
            }
        };
        let mut host = None;
        if self.rank < plan.servers {
            let sums = self.prepared.sums_of_ranks();
            let store = ServedRanges::of(self.learner.engine(), rate, sums)?;
            let leases = self.rank == 0 && !plan.lockstep;
            let (n_ranges, done) = (store.n_ranges(), self.learner.steps_done());
            let store = Arc::new(Mutex::new(store));
            let options = HostOptions { discipline, n_ranges, done, leases };
            let thread = ServerHost::start(mail.clone(), store.clone(), options);
            host = Some((thread.map_err(|source| TrainError::Thread { rank: self.rank, source })?, store));
        }
        let mut client = ServerClient::new(mail, plan.servers);
        if plan.lockstep && !self.only_serves() {
            client.join()?;
        }
        self.learner.engine_mut().set_servers(client);
        let (segment, spans, longest) = (0, Arc::default(), self.shortest_segment());
        self.servers = Some(Servers { host, segment, longest, spans, lockstep: plan.lockstep });
        Ok(())
    }

    /// Takes the optimizer state of the server of this rank over, for a checkpoint, and what else a rank needs for it that only serves. Nothing
    /// is under way. Collective.
    pub(super) fn settle_servers(&mut self) -> Result<(), TrainError> {
        let Some(servers) = &self.servers else { return Ok(()) };
        let (lockstep, only_serves) = (servers.lockstep, self.only_serves());
        let some_serve = self.prepared.learner.plan.servers.is_some_and(|plan| plan.serving > 0);
        if some_serve {
            // Workers that come here have the weights of the step, so servers have applied it.
            self.learner.comm().barrier()?;
            if lockstep && only_serves && self.rank == 0 {
                self.client().join()?;
                self.learner.engine_mut().pull_now()?;
                self.client().leave()?;
            }
        }
        if let Some((_, store)) = self.servers.as_ref().and_then(|servers| servers.host.as_ref()) {
            let store = store.lock().unwrap_or_else(PoisonError::into_inner);
            store.give_back(self.learner.engine_mut());
        }
        if some_serve {
            self.learner.tell_states()?;
            // Nobody goes on before a server has been asked.
            self.learner.comm().barrier()?;
        }
        Ok(())
    }

    /// Whether this rank has a server and no samples.
    pub(super) fn only_serves(&self) -> bool {
        self.prepared.learner.plan.servers.is_some_and(|plan| self.rank < plan.serving)
    }

    /// Ends the servers. Collective.
    pub(super) fn end_servers(&mut self) -> Result<Option<ServersEnd>, TrainError> {
        let Some(servers) = self.servers.take() else { return Ok(None) };
        let host = servers.host.map(|(host, _)| host);
        let Staleness { sum, count, max } = host.as_ref().map_or(Staleness::default(), ServerHost::staleness);
        let own_bytes = host.as_ref().map_or(0, ServerHost::sent_bytes);
        // Nobody posts any more.
        self.learner.comm().barrier()?;
        drop(host);
        self.learner.comm().barrier()?;
        if let Some(client) = self.learner.engine_mut().take_servers() {
            client.into_mail().close()?;
        }
        let mut sums = [sum as i64, count as i64];
        let mut most = [max as i64];
        self.learner.comm().all_reduce(&mut sums, Reduce::Sum)?;
        self.learner.comm().all_reduce(&mut most, Reduce::Max)?;
        let staleness = Staleness { sum: sums[0] as u64, count: sums[1] as u64, max: most[0] as u64 };
        Ok(Some(ServersEnd { staleness, own_bytes }))
    }

    /// Whether workers take blocks as they come to them.
    pub(super) fn is_free(&self) -> bool {
        self.servers.as_ref().is_some_and(|servers| !servers.lockstep)
    }

    /// The blocks of a segment, of which this rank does some. Returns what all of them came to. Collective.
    pub(super) fn segment(
        &mut self,
        loader: &mut Loader,
        first: u64,
        steps: u64,
        observer: &mut dyn Observer,
    ) -> Result<(Vec<StepResult>, Wishes), TrainError> {
        let until = self.segment_end(first, steps);
        if let Some(undo) = &mut self.undo {
            undo.keep_segment(&self.learner);
        }
        let servers = self.servers.as_mut().expect("a run with servers");
        servers.segment += 1;
        let (segment, longest, began) = (servers.segment, servers.longest, Instant::now());
        let client = self.client();
        if client.is_beside_leases() {
            client.open(segment, first..until, longest)?;
        }
        let (mine, end) = match self.only_serves() {
            true => (Vec::new(), self.watch(segment, observer)?),
            false => self.take_blocks(loader, segment, steps, observer)?,
        };
        let learning = began.elapsed();
        // A new session begins at the clock of the slowest, and so it is answered at once.
        self.client().leave()?;
        self.client().join()?;
        match self.undo {
            Some(_) => self.learner.engine_mut().pull_all()?,
            None => self.learner.engine_mut().pull_now()?,
        }
        self.client().leave()?;
        self.learner.engine_mut().set_steps_done(end);
        // Each rank has done other steps than the others; what they do together from here on is of the same one.
        self.learner.engine_mut().comms().set_step(end);
        if self.undo.is_some() {
            // One that only served may have samples when ranks were lost.
            self.learner.tell_states()?;
        }
        let met = self.meet(first..end, &mine, observer)?;
        // All have told what they did, and had pulled everything before.
        if let Some(undo) = &mut self.undo {
            undo.end_segment();
        }
        let n_blocks = (end - first).max(1) as u32;
        let block = learning * self.prepared.learner.plan.workers() as u32 / n_blocks;
        let meeting = began.elapsed() - learning;
        let longest = BLOCKS_A_SEGMENT * block.max(meeting);
        let shortest = self.shortest_segment();
        let servers = self.servers.as_mut().expect("a run with servers");
        servers.longest = longest.clamp(shortest, SEGMENT_MAX);
        Ok(met)
    }

    /// The blocks of a segment that this rank comes to, and the first that is not of it.
    fn take_blocks(
        &mut self,
        loader: &mut Loader,
        segment: u64,
        steps: u64,
        observer: &dyn Observer,
    ) -> Result<(Vec<(u64, StepResult)>, u64), TrainError> {
        let mut mine = Vec::new();
        let to_end = self.wishes_end(observer);
        self.client().ask(segment, None, to_end)?;
        loop {
            match self.client().answer()? {
                LeaseAnswer::Block(block) => {
                    self.client().join()?;
                    self.learner.engine_mut().set_steps_done(block);
                    self.queue_block(block);
                    let (results, _) = self.steps(loader, block, steps, observer)?;
                    mine.extend(results.into_iter().map(|result| (block, result)));
                    let to_end = self.wishes_end(observer);
                    self.client().ask(segment, Some(block), to_end)?;
                }
                LeaseAnswer::Rest => self.client().leave()?,
                LeaseAnswer::Over { end } => return Ok((mine, end)),
            }
        }
    }

    /// A segment of a rank that only serves; gives the first block that is not of it.
    fn watch(&mut self, segment: u64, observer: &dyn Observer) -> Result<u64, TrainError> {
        let mut told = self.wishes_end(observer);
        self.client().watch(segment, told)?;
        loop {
            match self.client().answer_until(Instant::now() + LOOK)? {
                Some(LeaseAnswer::Over { end }) => return Ok(end),
                Some(LeaseAnswer::Rest | LeaseAnswer::Block(_)) => {}
                None if !told && self.wishes_end(observer) => {
                    told = true;
                    self.client().watch(segment, true)?;
                }
                None => {}
            }
        }
    }

    /// Whether this rank wishes the segment to end soon.
    fn wishes_end(&self, observer: &dyn Observer) -> bool {
        observer.stop_requested() || (self.rank == 0 && observer.change_requested())
    }

    /// For how long a segment hands out blocks at least.
    fn shortest_segment(&self) -> Duration {
        if self.undo.is_some() { ELASTIC_SEGMENT } else { SEGMENT }
    }

    /// Tells the observer of rank 0 how the servers get on, if there are any. Collective.
    pub(super) fn tell_servers(&mut self, observer: &mut dyn Observer) -> Result<(), TrainError> {
        let Some(servers) = &self.servers else { return Ok(()) };
        let mine = servers.host.as_ref().map_or_else(ServerCounts::default, |(host, _)| host.counts());
        let all = talk::gather_all(self.learner.comm(), &mine.to_numbers())?;
        let n = self.prepared.learner.plan.servers.map_or(0, |plan| plan.servers);
        let all = all.chunks_exact(ServerCounts::NUMBERS).take(n);
        let counts: Vec<ServerCounts> = all.map(ServerCounts::of_numbers).collect();
        if self.rank == 0 {
            observer.event(Event::Servers(&counts));
        }
        Ok(())
    }

    fn client(&mut self) -> &mut ServerClient {
        self.learner.engine_mut().servers().expect("a run with servers")
    }

    /// Where the next segment ends at the latest: where something is due, and with the run.
    fn segment_end(&self, first: u64, steps: u64) -> u64 {
        let (job, pace) = (&self.prepared.job, self.prepared.pace);
        let due = job.saves_every(pace).chain([job.evaluates_every(pace)]);
        due.map(|every| (first / every + 1).saturating_mul(every)).fold(steps, u64::min)
    }

    /// Lets the loader load a block next.
    fn queue_block(&mut self, block: u64) {
        let spans = self.spans_of(block);
        if let Some(servers) = &self.servers {
            servers.spans.lock().unwrap_or_else(PoisonError::into_inner).extend(spans);
        }
    }

    /// All ranks learn what the blocks of a segment came to, and what all wish. Collective.
    fn meet(
        &mut self,
        blocks: std::ops::Range<u64>,
        mine: &[(u64, StepResult)],
        observer: &mut dyn Observer,
    ) -> Result<(Vec<StepResult>, Wishes), TrainError> {
        let n = (blocks.end - blocks.start) as usize;
        // Everybody else has zeros there, and adding them changes nothing.
        let mut numbers = vec![0.0; n * NUMBERS + 1];
        for (block, result) in mine {
            let to = &mut numbers[(block - blocks.start) as usize * NUMBERS..][..NUMBERS];
            to[..3].copy_from_slice(&[
                result.loss,
                result.grad_norm.unwrap_or(0.0),
                result.waited.as_secs_f64(),
            ]);
            to[3..].copy_from_slice(&result.samples.to_numbers());
        }
        let minutes = self.saved.elapsed().as_secs_f64() / 60.0;
        let save =
            self.rank == 0 && self.prepared.job.output.every_minutes.is_some_and(|limit| minutes >= limit);
        let change = self.rank == 0 && observer.change_requested();
        let wishes = [(observer.stop_requested(), 1), (save, SAVE), (change, CHANGE)];
        let wished: u64 = wishes.iter().filter(|(wished, _)| *wished).map(|(_, worth)| worth).sum();
        numbers[n * NUMBERS] = wished as f64;
        self.learner.comm().all_reduce(&mut numbers, Reduce::Sum)?;
        self.tell_servers(observer)?;
        let clips = self.prepared.job.train.clip.is_some();
        let result = |of: &[f64]| StepResult {
            loss: of[0],
            grad_norm: clips.then_some(of[1]),
            extra: [0.0, of[2]],
            samples: Tally::of_numbers(&of[3..]),
            waited: Duration::from_secs_f64(of[2].max(0.0)),
            skipped: false,
        };
        let results = numbers[..n * NUMBERS].chunks_exact(NUMBERS).map(result).collect();
        Ok((results, wishes_of(numbers[n * NUMBERS])))
    }
}
