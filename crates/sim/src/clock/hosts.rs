//! How fast ranks compute beside each other.
//!
//! Ranks that compute on one host at the same time slow each other down ([`Sharing`]): how fast they are changes whenever one of
//! them begins or ends. So what is left of a stretch is kept up to date, and of each host only the next end is in the queue.
//! Without contention this is an expression of sums and maxima, in which nothing that gets slower makes anything earlier.

use super::{Clock, ClockError, MarkOf, RankDoing, TickOf};
use crate::score::Meeting;

impl Clock<'_> {
    /// A rank begins to compute.
    pub(super) fn compute(&mut self, rank: usize, what: MarkOf, alone_us: f64, crowded_us: f64) {
        let place = &self.scene.ranks[rank];
        self.catch_up(place.host);
        let state = &mut self.ranks[rank];
        state.doing = RankDoing::Computing { what, since: self.now };
        state.left_us = alone_us * self.scene.cluster.hosts[place.host].slowness;
        state.crowd = crowded_us / alone_us;
        let host = &mut self.hosts[place.host];
        host.busy.push(rank);
        host.threads += place.threads;
    }

    pub(super) fn end_computing(&mut self, rank: usize) -> Result<(), ClockError> {
        let place = &self.scene.ranks[rank];
        self.catch_up(place.host);
        let host = &mut self.hosts[place.host];
        let at = host.busy.iter().position(|r| *r == rank).expect("a rank that computes is busy");
        host.busy.remove(at);
        host.threads -= place.threads;
        let doing = std::mem::replace(&mut self.ranks[rank].doing, RankDoing::Nothing);
        if let RankDoing::Computing { what, since } = doing {
            self.seen.computed[rank] += self.now - since;
            self.mark(rank, what, since);
            if let MarkOf::Copy(exchange) = what
                && let Meeting::Send { bytes, .. } = self.scene.scores[place.score].meetings[exchange].1
            {
                self.send(place.channels[exchange].expect("every message has a channel"), bytes);
            }
        }
        self.go(rank)
    }

    /// Brings what is left of a host's stretches up to date, before something changes there.
    pub(super) fn catch_up(&mut self, host: usize) {
        let clock = &mut self.hosts[host];
        let passed = self.now - clock.since;
        if passed > 0.0 {
            for &rank in &clock.busy {
                let state = &mut self.ranks[rank];
                state.left_us = (state.left_us - passed * state.rate).max(0.0);
            }
        }
        clock.since = self.now;
        if !clock.is_stale {
            clock.is_stale = true;
            self.stale.push(host);
        }
    }

    /// Finds the next end of a stretch on each host where something changed.
    pub(super) fn retime(&mut self) {
        while let Some(host) = self.stale.pop() {
            let sharing = Sharing {
                cores: self.scene.cluster.hosts[host].cores as f64,
                load: self.hosts[host].threads + self.hosts[host].background,
                contention: self.scene.contention,
            };
            let clock = &mut self.hosts[host];
            clock.is_stale = false;
            clock.version += 1;
            let (mut least, mut next) = (f64::INFINITY, None);
            for &rank in &clock.busy {
                let state = &mut self.ranks[rank];
                state.rate = sharing.rate(self.scene.ranks[rank].threads, state.crowd);
                let us = state.left_us / state.rate;
                if us < least {
                    (least, next) = (us, Some(rank));
                }
            }
            if let Some(rank) = next {
                clock.next = rank;
                let version = clock.version;
                self.enter(self.now + least, TickOf::Host { host, version });
            }
        }
    }
}

/// How ranks of a host share it.
///
/// A rank alone goes at its own speed. The more of the other cores are busy, the nearer it comes to the speed that was measured
/// with all of them busy: caches, memory and the clock rate are shared. With more threads than cores, they take turns.
struct Sharing {
    cores: f64,
    /// Threads that compute, and cores that exchanges take.
    load: f64,
    contention: bool,
}

impl Sharing {
    fn rate(&self, threads: f64, crowd: f64) -> f64 {
        if !self.contention {
            return 1.0;
        }
        let others = (self.load - threads).max(0.0);
        let crowding = (others / (self.cores - threads).max(1.0)).min(1.0);
        let turns = (self.load / self.cores).max(1.0);
        1.0 / ((1.0 + crowding * (crowd - 1.0)) * turns)
    }
}
