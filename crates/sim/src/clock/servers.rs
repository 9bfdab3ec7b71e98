//! Parameter servers: when gradients reach them, how long they are busy, and when weights come back.
//!
//! A server is a thread beside one of the first ranks. It takes one letter after the other, in the order in which they arrive: a gradient
//! is kept until those of all ranks are there, or applied at once; a rank that asks for weights is told when they are as new as it needs. While a server
//! works it takes a core of its host.
//!
//! # Letters
//! A letter between hosts goes over the sender's link and the receiver's, which have room for each way, and is there when both have carried it and what
//! came before it: the `n` gradients of all ranks meet on the link of a server's host. Over sockets of one host each rank has such a way of its own. To the server beside it, and between threads of one
//! process, a rank hands over memory.
//!
//! Asking for a range is a letter of no length, behind the gradients. Blocks of samples are leased for nothing here, and nobody meets.

use std::collections::VecDeque;

use polyreme_graph::Axis;

use super::{Clock, ClockError, MarkOf, RankDoing, TickOf};
use crate::cluster::{BetweenSpec, InsideBy};
use crate::score::ServedPart;

/// In which order gradients take effect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ServerOrder {
    /// Those of all ranks together.
    Lockstep,
    /// As they come; with a bound, no rank is further ahead of the slowest than this.
    Free { staleness: Option<usize> },
}

/// A letter to a server.
#[derive(Clone, Copy, Debug)]
pub(super) struct ServerLetter {
    from: usize,
    /// The range, by its number in the program.
    range: usize,
    is_push: bool,
}

/// What a server thread is busy with, and what waits for it.
#[derive(Default)]
pub(super) struct ServerState {
    letters: VecDeque<ServerLetter>,
    is_busy: bool,
}

/// A range at its server.
#[derive(Default)]
pub(super) struct RangeState {
    /// By rank: how many of its gradients have come.
    pushed: Vec<usize>,
    /// How many updates there were, and of which one the weights were written as they travel.
    version: usize,
    written: Option<usize>,
    /// Ranks that wait for weights, each with how many of its own gradients must be in them.
    waiting: Vec<(usize, usize)>,
}

impl RangeState {
    /// Of a range that so many ranks have weights of, before any gradient.
    pub(super) fn new(ranks: usize) -> RangeState {
        RangeState { pushed: vec![0; ranks], ..RangeState::default() }
    }
}

impl Clock<'_> {
    fn served(&self, range: usize) -> ServedPart {
        self.scene.scores[self.scene.ranks[0].score].served[range]
    }

    fn server_host(&self, server: usize) -> usize {
        self.scene.ranks[server].host
    }

    /// A rank posts a gradient, or asks for weights.
    pub(super) fn post_to_server(&mut self, rank: usize, range: usize, is_push: bool) {
        let ServedPart { server, bytes, .. } = self.served(range);
        let arrival = self.letter(rank, server, if is_push { bytes } else { 0.0 });
        self.enter(arrival, TickOf::Letter(server, ServerLetter { from: rank, range, is_push }));
    }

    /// Puts a letter on its way; gives when it is there.
    fn letter(&mut self, from: usize, to: usize, bytes: f64) -> f64 {
        let cluster = self.scene.cluster;
        let [host, other] = [from, to].map(|rank| self.scene.ranks[rank].host);
        let here = host == other;
        if from == to || (here && cluster.inside.by == InsideBy::Threads) {
            self.seen.memory_bytes[host] += bytes;
            return self.now + cluster.inside.meet_us;
        }
        // Processes of one host have sockets for their letters, whatever else they share.
        let (link, lines): (&BetweenSpec, [usize; 2]) = match here {
            true => (&cluster.inside.sockets, [from, to].map(|rank| cluster.hosts.len() + rank)),
            false => (&cluster.between, [host, other]),
        };
        let transfer = bytes / link.bytes_per_us;
        let ways = &mut self.server_lines;
        ways[lines[0]].0 = ways[lines[0]].0.max(self.now) + transfer;
        ways[lines[1]].1 = ways[lines[1]].1.max(self.now) + transfer;
        // Letters to several servers travel at the same time: each is there when both ends have carried as much.
        let end = ways[lines[0]].0.max(ways[lines[1]].1);
        let start = end - transfer;
        match here {
            true => self.seen.memory_bytes[host] += 2.0 * bytes,
            false => self.seen.link_bytes[host][Axis::Data as usize] += bytes,
        }
        if link.core_share > 0.0 && transfer > 0.0 {
            for host in [host, other] {
                self.enter(start, TickOf::Background { host, share: link.core_share });
                self.enter(end, TickOf::Background { host, share: -link.core_share });
            }
        }
        end + link.latency_us + link.message_us
    }

    /// A core of a host, or a part of it, is taken or given back.
    pub(super) fn background(&mut self, host: usize, share: f64) {
        self.catch_up(host);
        self.hosts[host].background += share;
    }

    /// A letter has arrived at its server.
    pub(super) fn letter_came(&mut self, server: usize, letter: ServerLetter) {
        self.servers[server].letters.push_back(letter);
        if !self.servers[server].is_busy {
            self.serve_next(server);
        }
    }

    /// A server is done with a letter.
    pub(super) fn served_letter(&mut self, server: usize) {
        self.background(self.server_host(server), -1.0);
        self.servers[server].is_busy = false;
        self.finish_letter(server);
        if !self.servers[server].is_busy && !self.servers[server].letters.is_empty() {
            self.serve_next(server);
        }
    }

    /// Begins the first letter: finds how long it takes.
    fn serve_next(&mut self, server: usize) {
        let Some(&letter) = self.servers[server].letters.front() else { return };
        let us = self.work_of(letter);
        self.servers[server].is_busy = true;
        let host = self.server_host(server);
        self.background(host, 1.0);
        // With more to do than there are cores, all take turns.
        let spec = &self.scene.cluster.hosts[host];
        let load = self.hosts[host].threads + self.hosts[host].background;
        let turns = if self.scene.contention { (load / spec.cores as f64).max(1.0) } else { 1.0 };
        self.enter(self.now + us * spec.slowness * turns, TickOf::Served(server));
    }

    /// What a letter has the server compute.
    fn work_of(&self, letter: ServerLetter) -> f64 {
        let part = self.served(letter.range);
        let state = &self.ranges[letter.range];
        let n = self.scene.ranks.len();
        if !letter.is_push {
            let answers = self.may_have(letter.range, letter.from, self.needs(letter));
            return if answers && state.written != Some(state.version) { part.copy_us } else { 0.0 };
        }
        match self.scene.order {
            ServerOrder::Lockstep => {
                let mut counts = state.pushed.clone();
                counts[letter.from] += 1;
                match counts.iter().all(|count| *count > state.version) {
                    true => {
                        let answers = if state.waiting.is_empty() { 0.0 } else { part.copy_us };
                        part.copy_us + (n - 1) as f64 * part.add_us + part.update_us + answers
                    }
                    false => 0.0,
                }
            }
            ServerOrder::Free { .. } => part.copy_us + part.update_us,
        }
    }

    /// How many gradients of its own a rank that asks now must find in the weights.
    fn needs(&self, letter: ServerLetter) -> usize {
        self.ranks[letter.from].run + 1
    }

    /// Whether weights may be given to a rank that must find so many of its own gradients in them.
    fn may_have(&self, range: usize, rank: usize, own: usize) -> bool {
        let state = &self.ranges[range];
        match self.scene.order {
            ServerOrder::Lockstep => state.version >= own,
            ServerOrder::Free { staleness } => {
                let least = || {
                    let ranks = self.ranks.iter().zip(&state.pushed);
                    // A rank that is done holds nobody back.
                    ranks.filter(|(rank, _)| rank.run < self.scene.runs).map(|(_, n)| *n).min().unwrap_or(own)
                };
                state.pushed[rank] >= own && staleness.is_none_or(|most| least() + most >= own)
            }
        }
    }

    /// What a letter that is done leads to: an update, and answers.
    fn finish_letter(&mut self, server: usize) {
        let Some(letter) = self.servers[server].letters.pop_front() else { return };
        let needs = self.needs(letter);
        let state = &mut self.ranges[letter.range];
        match (letter.is_push, self.scene.order) {
            (true, ServerOrder::Lockstep) => {
                state.pushed[letter.from] += 1;
                let all = state.pushed.iter().all(|count| *count > state.version);
                state.version += usize::from(all);
            }
            (true, ServerOrder::Free { .. }) => {
                state.pushed[letter.from] += 1;
                state.version += 1;
            }
            (false, _) => state.waiting.push((letter.from, needs)),
        }
        self.answer(letter.range);
    }

    fn answer(&mut self, range: usize) {
        let waiting = std::mem::take(&mut self.ranges[range].waiting);
        let (ready, rest): (Vec<_>, Vec<_>) =
            waiting.into_iter().partition(|(rank, own)| self.may_have(range, *rank, *own));
        self.ranges[range].waiting = rest;
        if ready.is_empty() {
            return;
        }
        self.ranges[range].written = Some(self.ranges[range].version);
        let ServedPart { server, bytes, .. } = self.served(range);
        for (rank, _) in ready {
            let arrival = self.letter(server, rank, bytes);
            self.enter(arrival, TickOf::Weights { rank, range });
        }
    }

    /// Weights have come to a rank.
    pub(super) fn weights_came(&mut self, rank: usize, range: usize) -> Result<(), ClockError> {
        self.ranks[rank].came[range] = true;
        match self.ranks[rank].doing {
            RankDoing::Served { range: wanted, .. } if wanted == range => {
                self.took_weights(rank);
                self.go(rank)
            }
            _ => Ok(()),
        }
    }

    /// A rank that is done with all its runs holds nobody back any more.
    pub(super) fn left_servers(&mut self) {
        if matches!(self.scene.order, ServerOrder::Free { staleness: Some(_) }) {
            (0..self.ranges.len()).for_each(|range| self.answer(range));
        }
    }

    /// A rank wants the weights of a range; whether they are there. If not, it waits.
    pub(super) fn want_weights(&mut self, rank: usize, range: usize, instr: usize) -> bool {
        self.ranks[rank].doing = RankDoing::Served { range, instr, since: self.now };
        if self.ranks[rank].came[range] {
            self.took_weights(rank);
            return true;
        }
        false
    }

    fn took_weights(&mut self, rank: usize) {
        let doing = std::mem::replace(&mut self.ranks[rank].doing, RankDoing::Nothing);
        let RankDoing::Served { range, instr, since } = doing else { return };
        self.ranks[rank].came[range] = false;
        self.seen.waited[rank][Axis::Data as usize] += self.now - since;
        self.mark(rank, MarkOf::Served(instr), since);
    }
}
