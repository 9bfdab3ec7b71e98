//! Ranks that die with the servers beside them: the others form a new generation, as in elastic runs. Between two meetings each rank keeps what it
//! had at the last one, and goes back to it; the furthest state counts, and what was not in it is done again. Real servers and leases
//! begin from it.

use super::*;

/// What a rank goes back to.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct KeptBlocks {
    /// Blocks that are in it.
    pub(super) blocks: u64,
    /// What is in its weights.
    contents: BTreeMap<(usize, usize), u64>,
    /// The blocks whose samples it has counted.
    ledger: BTreeSet<u64>,
}

/// A bug of the ranks' side, which the harness must find.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RankBug {
    /// Goes on with the weights of a segment that was not finished.
    KeepsUnfinished,
    /// Takes what it pulled for what all agreed on, before it knows that the others have it too.
    EndsAlone,
    /// Lets the first rank's state count, and not the furthest.
    FirstCounts,
    /// Does not lease the blocks again that were under way.
    SkipsBlocks,
}

impl RankBug {
    pub(super) const ALL: [RankBug; 4] =
        [RankBug::KeepsUnfinished, RankBug::EndsAlone, RankBug::FirstCounts, RankBug::SkipsBlocks];
}

impl ModelWorker {
    pub(super) fn new(kept: KeptBlocks) -> ModelWorker {
        ModelWorker {
            stand: Stand::Asks,
            session: 1,
            clock: 0,
            base: None,
            number: 0,
            last: None,
            missing: BTreeSet::new(),
            working: kept.contents.clone(),
            mine: Vec::new(),
            watches: false,
            kept,
        }
    }
}

impl ServersWorld {
    /// All ranges.
    pub(super) fn places(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        (0..self.servers.len()).flat_map(|server| (0..RANGES).map(move |range| (server, range)))
    }

    /// Whether a server is still there.
    pub(super) fn lives(&self, server: usize) -> bool {
        !self.elastic || self.workers[self.hosts[server]].stand != Stand::Dead
    }

    /// A worker has all weights of the segment that is over.
    pub(super) fn pulled(&mut self, worker: usize) -> Result<(), String> {
        let of = &mut self.workers[worker];
        let Stand::Pulls(end) = of.stand else { return Ok(()) };
        of.stand = Stand::Meets;
        if self.bugs.rank == Some(RankBug::EndsAlone) {
            let ledger = of.kept.ledger.iter().chain(&of.mine).copied().collect();
            of.kept = KeptBlocks { blocks: end, contents: of.working.clone(), ledger };
        }
        match of.working.values().all(|content| *content == content_below(end)) {
            true => Ok(()),
            false => Err(format!("worker {worker} pulled other weights than those of {end} blocks")),
        }
    }

    /// A worker learns that all have what it has.
    pub(super) fn met(&mut self, worker: usize) {
        if self.workers[worker].stand != Stand::Met {
            return;
        }
        let (end, segment) = (self.ended, self.workers[worker].kept.blocks);
        // What the sum over the ranks tells: the blocks of each.
        let all = self.workers.iter().flat_map(|w| w.mine.iter().copied());
        let ledger = all.filter(|block| (segment..end).contains(block)).collect::<BTreeSet<_>>();
        let of = &mut self.workers[worker];
        let ledger = of.kept.ledger.union(&ledger).copied().collect();
        of.kept = KeptBlocks { blocks: end, contents: of.working.clone(), ledger };
        (of.stand, of.number, of.last) = (Stand::Asks, of.number + 1, None);
        self.act(worker);
    }

    /// Those that are left go on from the furthest state.
    pub(super) fn regroup(&mut self) -> Result<(), String> {
        let alive: Vec<usize> =
            (0..self.workers.len()).filter(|w| self.workers[*w].stand != Stand::Dead).collect();
        let furthest = alive.iter().map(|w| self.workers[*w].kept.blocks).max().unwrap_or(0);
        let counts = |w: &usize| {
            self.bugs.rank == Some(RankBug::FirstCounts) || self.workers[*w].kept.blocks == furthest
        };
        let source = alive.iter().copied().find(counts).ok_or("nobody is left")?;
        let mut kept = self.workers[source].kept.clone();
        if self.bugs.rank == Some(RankBug::KeepsUnfinished) {
            kept.contents = self.workers[source].working.clone();
        }
        if kept.blocks < furthest {
            return Err(format!("{furthest} blocks were told, and the run goes on from {}", kept.blocks));
        }
        if !kept.ledger.iter().copied().eq(0..kept.blocks) {
            return Err(format!("{} blocks are counted of {}", kept.ledger.len(), kept.blocks));
        }
        self.lost = false;
        self.workers.iter_mut().for_each(|w| w.mine.clear());
        // A new group: nothing that was on its way arrives.
        self.happenings.retain(|_, what| matches!(what, Happening::Strike | Happening::Regroup));
        self.queue.retain(|Reverse((_, n))| self.happenings.contains_key(n));
        let n_servers = self.hosts.len().min(alive.len());
        self.hosts = alive[..n_servers].to_vec();
        let server = || {
            let discipline =
                self.staleness.map_or(Discipline::Free, |staleness| Discipline::Bounded { staleness });
            ParamServer::new(discipline, RANGES, kept.blocks).with_bug(self.bugs.server)
        };
        self.servers = (0..n_servers).map(|_| server()).collect();
        self.heard = (0..n_servers).map(|_| BTreeMap::new()).collect();
        let begun = self.applied.keys().map(|(_, _, block)| block + 1).max().unwrap_or(0);
        let first = match self.bugs.rank {
            Some(RankBug::SkipsBlocks) => begun.max(kept.blocks),
            Some(_) | None => kept.blocks,
        };
        self.leases = Leases::new(first).with_bug(self.bugs.lease);
        (self.segment, self.ended, self.clock) = (1, kept.blocks, 0);
        let known = kept.contents.clone();
        let content = |at: (usize, usize)| known.get(&at).or(known.get(&(0, at.1))).copied().unwrap_or(0);
        self.contents = self.places().map(|at| (at, content(at))).collect();
        kept.contents = self.contents.clone();
        let blocks = 0..kept.blocks;
        let applied = self.places().flat_map(|(s, r)| blocks.clone().map(move |b| ((s, r, b), 1)));
        self.applied = applied.collect();
        self.open();
        alive.iter().for_each(|worker| self.workers[*worker] = ModelWorker::new(kept.clone()));
        self.seat(&alive);
        for worker in alive {
            self.act(worker);
            self.at(RETRY_US, Happening::Retry(worker));
        }
        if self.workers.len() < 12 && self.random.below(2) == 0 {
            self.enter();
            self.workers.last_mut().expect("it entered").kept = kept;
            self.act(self.workers.len() - 1);
        }
        Ok(())
    }
}
