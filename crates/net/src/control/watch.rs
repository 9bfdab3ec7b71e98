//! Who is still there: decisions of the control plane as a function of what came and when. No sockets, no clock.
//!
//! The plane is a star. Rank 0 hears everybody and tells everybody; the others hear and tell rank 0 only. So there is
//! one order of events, rank 0's, and when one rank is lost all ranks get the one report that rank 0 made:
//!
//! - a connection that closes without a goodbye, or is silent for 4 s, is a lost rank: rank 0 reports it to all;
//! - if it is rank 0's, nobody is left to tell anybody, and every rank makes the same report for itself;
//! - a rank that fails, or that finds another one at fault on a data connection, says so itself, and rank 0 passes it
//!   on as it is. A data connection that merely closes is no such finding: whoever sees it waits for this plane's report.
//!
//! After its first report a watch changes nothing any more.

use super::channel::Ended;
use super::message::{Message, Place};
use crate::report::{Cause, Report};

/// Between two signs of life.
pub(crate) const BEAT_MS: u64 = 500;
/// A rank that is silent for so long is lost. With a beat and the way of the report it stays below five seconds.
pub(crate) const SILENT_MS: u64 = 4000;

/// What to do about it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Action {
    /// Send to that rank.
    Send(usize, Message),
    /// Raise this process's alarm.
    Raise(Report),
    /// An exchange is complete.
    Shared(Vec<Vec<u8>>),
}

/// A rank with a connection to this one.
#[derive(Clone, Debug)]
struct Peer {
    state: State,
    heard_ms: u64,
    place: Place,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Here,
    /// It said goodbye.
    Departed,
    /// It is lost to the job. Its connection may still be there, and then it gets the report too.
    Lost,
    /// Lost, with its connection.
    Closed,
}

/// The watch of one rank.
pub(crate) struct Watch {
    rank: usize,
    hosts: Vec<String>,
    peers: Vec<Option<Peer>>,
    place: Place,
    report: Option<Report>,
    woke_ms: u64,
    beat_ms: u64,
    leaving: bool,
    share_seq: u64,
    /// On rank 0, the parts of the exchange that goes on.
    parts: Vec<Option<Vec<u8>>>,
    share_since_ms: Option<u64>,
    share_ms_max: u64,
}

impl Watch {
    /// The watch of a rank; the others' hosts by rank.
    pub(crate) fn new(rank: usize, hosts: Vec<String>, share_ms_max: u64) -> Watch {
        let size = hosts.len();
        let place = Place { step: 0, op: "start".into() };
        let peer = |other: usize| {
            let connected = other != rank && (rank == 0 || other == 0);
            connected.then(|| Peer { state: State::Here, heard_ms: 0, place: place.clone() })
        };
        Watch {
            rank,
            peers: (0..size).map(peer).collect(),
            hosts,
            report: None,
            woke_ms: 0,
            beat_ms: 0,
            leaving: false,
            share_seq: 0,
            parts: vec![None; size],
            share_since_ms: None,
            share_ms_max,
            place,
        }
    }

    /// Begins a turn, at that place of this rank. If this process itself slept (stopped, or its machine suspended), the
    /// time that it did not listen is nobody's silence.
    pub(crate) fn wake(&mut self, now_ms: u64, place: Place) {
        self.place = place;
        let slept_ms = now_ms.saturating_sub(self.woke_ms);
        if slept_ms > 2 * BEAT_MS {
            for peer in self.peers.iter_mut().flatten() {
                peer.heard_ms += slept_ms - BEAT_MS;
            }
        }
        self.woke_ms = now_ms;
    }

    /// A message came.
    pub(crate) fn message(&mut self, now_ms: u64, from: usize, message: Message, out: &mut Vec<Action>) {
        let Some(peer) = &mut self.peers[from] else { return };
        peer.heard_ms = now_ms;
        match message {
            Message::Beat(place) => peer.place = place,
            Message::Report(report) => self.adopt(report, Some(from), out),
            Message::Goodbye => {
                let answered = peer.state == State::Departed;
                peer.state = State::Departed;
                if self.rank == 0 && !answered {
                    out.push(Action::Send(from, Message::Goodbye));
                }
            }
            Message::Share { seq, blob } if self.rank == 0 => self.part(now_ms, from, seq, blob, out),
            Message::Shared { seq, blobs } if from == 0 && seq == self.share_seq => {
                if blobs.len() != self.hosts.len() {
                    return self.lose(from, Cause::Disagrees { what: "parts of too few ranks".into() }, out);
                }
                self.share_seq += 1;
                self.share_since_ms = None;
                out.push(Action::Shared(blobs));
            }
            other => {
                let what = format!("it sent {} while the job ran", name(&other));
                self.lose(from, Cause::Disagrees { what }, out);
            }
        }
    }

    /// A connection ended.
    pub(crate) fn closed(&mut self, from: usize, ended: Ended, out: &mut Vec<Action>) {
        let Some(peer) = &mut self.peers[from] else { return };
        if peer.state != State::Here {
            return;
        }
        if self.leaving && from == 0 {
            // Rank 0 ends too, and this rank needs nothing of it any more.
            peer.state = State::Departed;
            return;
        }
        let cause = match ended {
            Ended::Closed => {
                peer.state = State::Closed;
                Cause::Gone
            }
            // It still hears, and should know what it is blamed for.
            Ended::Malformed { what } => Cause::Damaged { what },
        };
        self.lose(from, cause, out);
    }

    /// Time went by. Call it after all messages that have come.
    pub(crate) fn tick(&mut self, now_ms: u64, out: &mut Vec<Action>) {
        if now_ms >= self.beat_ms {
            self.beat_ms = now_ms + BEAT_MS;
            for rank in self.here() {
                out.push(Action::Send(rank, Message::Beat(self.place.clone())));
            }
        }
        for rank in self.here() {
            let heard_ms = self.peers[rank].as_ref().map_or(now_ms, |peer| peer.heard_ms);
            if now_ms.saturating_sub(heard_ms) >= SILENT_MS {
                // The limit and not the time: every rank that counts for itself must come to the same report.
                self.lose(rank, Cause::Silent { ms: SILENT_MS }, out);
            }
        }
        if let Some(since_ms) = self.share_since_ms {
            self.judge_share(now_ms.saturating_sub(since_ms), out);
        }
    }

    /// When the next tick is due.
    pub(crate) fn due_ms(&self) -> u64 {
        self.beat_ms
    }

    /// This rank's part of the next exchange, and where it gave it. That may be later than where this turn began; and if
    /// the others were told the place before, the rank would be reported there should it be lost.
    pub(crate) fn share(&mut self, now_ms: u64, place: Place, blob: Vec<u8>, out: &mut Vec<Action>) {
        self.place = place;
        let seq = self.share_seq;
        if self.rank == 0 {
            return self.part(now_ms, 0, seq, blob, out);
        }
        self.share_since_ms = Some(now_ms);
        // With an exchange all learn where the others are, and need not wait for a beat.
        out.push(Action::Send(0, Message::Beat(self.place.clone())));
        out.push(Action::Send(0, Message::Share { seq, blob }));
    }

    /// The job cannot go on: the first report is kept, raised here, and sent on.
    pub(crate) fn adopt(&mut self, report: Report, from: Option<usize>, out: &mut Vec<Action>) {
        if self.report.is_some() {
            return;
        }
        self.report = Some(report.clone());
        out.push(Action::Raise(report.clone()));
        for (rank, peer) in self.peers.iter().enumerate() {
            let reached = matches!(peer, Some(Peer { state: State::Here | State::Lost, .. }));
            if reached && Some(rank) != from {
                out.push(Action::Send(rank, Message::Report(report.clone())));
            }
        }
    }

    /// The report, if there is one.
    pub(crate) fn report(&self) -> Option<&Report> {
        self.report.as_ref()
    }

    /// This rank's regular end begins. Rank 0 stays until the others have ended.
    pub(crate) fn leave(&mut self, out: &mut Vec<Action>) {
        self.leaving = true;
        if self.rank != 0 && self.here() == [0] {
            out.push(Action::Send(0, Message::Goodbye));
        }
    }

    /// Rank 0 has waited long enough for the others.
    pub(crate) fn leave_now(&mut self, out: &mut Vec<Action>) {
        if self.rank == 0 {
            out.extend(self.here().into_iter().map(|rank| Action::Send(rank, Message::Goodbye)));
        }
    }

    /// Whether this rank may end: nobody is left that needs it.
    pub(crate) fn left(&self) -> bool {
        self.leaving && (self.report.is_some() || self.here().is_empty())
    }

    /// Whether that rank is lost to the job.
    pub(crate) fn lost(&self, rank: usize) -> bool {
        matches!(&self.peers[rank], Some(Peer { state: State::Lost | State::Closed, .. }))
    }

    fn here(&self) -> Vec<usize> {
        let here = |rank: &usize| matches!(&self.peers[*rank], Some(peer) if peer.state == State::Here);
        (0..self.peers.len()).filter(here).collect()
    }

    fn lose(&mut self, rank: usize, cause: Cause, out: &mut Vec<Action>) {
        let mut place = self.place.clone();
        if let Some(peer) = &mut self.peers[rank] {
            if peer.state == State::Here {
                peer.state = State::Lost;
            }
            // Its last word may be half a second old; rank 0, if it is ahead of that, waits for it now. When rank 0 is
            // lost everybody takes its last word, so that all say the same.
            if self.rank != 0 || peer.place.step >= place.step {
                place = peer.place.clone();
            }
        }
        let Place { step, op } = place;
        self.adopt(Report { rank, host: self.hosts[rank].clone(), step, op, cause }, None, out);
    }

    /// On rank 0: a part of the exchange that goes on.
    fn part(&mut self, now_ms: u64, from: usize, seq: u64, blob: Vec<u8>, out: &mut Vec<Action>) {
        if seq != self.share_seq || self.parts[from].is_some() {
            let what = format!("it is in exchange {seq} and the others are in exchange {}", self.share_seq);
            return self.lose(from, Cause::Disagrees { what }, out);
        }
        self.parts[from] = Some(blob);
        self.share_since_ms.get_or_insert(now_ms);
        if self.parts.iter().all(Option::is_some) {
            let blobs: Vec<Vec<u8>> = self.parts.iter_mut().filter_map(Option::take).collect();
            self.share_seq += 1;
            self.share_since_ms = None;
            for rank in self.here() {
                out.push(Action::Send(rank, Message::Beat(self.place.clone())));
                out.push(Action::Send(rank, Message::Shared { seq, blobs: blobs.clone() }));
            }
            out.push(Action::Shared(blobs));
        }
    }

    /// An exchange that cannot end, or does not, is somebody's fault.
    fn judge_share(&mut self, waited_ms: u64, out: &mut Vec<Action>) {
        let seq = self.share_seq;
        let lacking: Vec<usize> = match self.rank {
            0 => (0..self.parts.len()).filter(|&rank| self.parts[rank].is_none()).collect(),
            _ => vec![0],
        };
        let departed =
            |rank: &&usize| matches!(&self.peers[**rank], Some(peer) if peer.state == State::Departed);
        if let Some(&rank) = lacking.iter().find(departed) {
            let what = format!("it ended while others were in exchange {seq}");
            return self.lose(rank, Cause::Disagrees { what }, out);
        }
        // The others leave it to rank 0 to say who is late, and give it time for that.
        let ms_max = self.share_ms_max + if self.rank == 0 { 0 } else { SILENT_MS };
        if let Some(&rank) = lacking.first().filter(|_| waited_ms >= ms_max) {
            let what = format!("it did not come to exchange {seq} within {} s", ms_max / 1000);
            self.lose(rank, Cause::Disagrees { what }, out);
        }
    }
}

fn name(message: &Message) -> &'static str {
    match message {
        Message::Welcome { .. } => "a welcome",
        Message::Refused { .. } => "a refusal",
        Message::Here(_) => "where it is",
        Message::Table(_) => "a table of ranks",
        Message::Faults(_) => "faults of its connections",
        Message::Beat(_) => "a beat",
        Message::Share { .. } => "a part of an exchange",
        Message::Shared { .. } => "an exchange that nobody is in",
        Message::Report(_) => "a report",
        Message::Goodbye => "a goodbye",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watch(rank: usize, size: usize) -> Watch {
        Watch::new(rank, (0..size).map(|i| format!("h{i}")).collect(), 60_000)
    }

    fn place(step: u64) -> Place {
        Place { step, op: "all_reduce".into() }
    }

    fn report(rank: usize, step: u64, op: &str, cause: Cause) -> Report {
        Report { rank, host: format!("h{rank}"), step, op: op.into(), cause }
    }

    /// What is raised, and to whom the report goes.
    fn raised(out: &[Action]) -> (Option<Report>, Vec<usize>) {
        let mut report = None;
        let mut told = Vec::new();
        for action in out {
            match action {
                Action::Raise(raised) => assert!(report.replace(raised.clone()).is_none(), "raised twice"),
                Action::Send(to, Message::Report(sent)) => {
                    assert_eq!(report.as_ref(), Some(sent));
                    told.push(*to);
                }
                _ => {}
            }
        }
        (report, told)
    }

    #[test]
    fn rank_0_tells_all_others_who_is_lost() {
        let mut out = Vec::new();
        let mut hub = watch(0, 4);
        hub.message(100, 2, Message::Beat(place(9)), &mut out);
        hub.closed(2, Ended::Closed, &mut out);
        assert_eq!(raised(&out), (Some(report(2, 9, "all_reduce", Cause::Gone)), vec![1, 3]));
        // What follows from the first loss is no second one.
        out.clear();
        hub.closed(3, Ended::Closed, &mut out);
        hub.message(200, 1, Message::Report(report(1, 9, "x", Cause::Gone)), &mut out);
        assert_eq!(raised(&out), (None, vec![]));
    }

    #[test]
    fn silence_counts_from_the_last_word_and_not_while_this_process_slept() {
        // The moments at which rank 1 is heard, at which the watch looks, and whether it is lost then.
        let check = |heard: &[u64], looks: &[u64], lost: bool| {
            let mut hub = watch(0, 2);
            let mut out = Vec::new();
            for &now_ms in looks {
                hub.wake(now_ms, place(1));
                if heard.contains(&now_ms) {
                    hub.message(now_ms, 1, Message::Beat(place(1)), &mut out);
                }
                hub.tick(now_ms, &mut out);
            }
            let (report, _) = raised(&out);
            assert_eq!(report.is_some(), lost, "heard {heard:?}, looked {looks:?}");
        };
        let often = |end_ms: u64| (0..=end_ms).step_by(250).collect::<Vec<_>>();
        check(&[1000], &often(4750), false);
        check(&[1000], &often(5000), true);
        check(&[1000, 4750], &often(8500), false);
        // Stopped from 1 s to 20 s, and then three more seconds without a word, and then four.
        check(
            &[1000],
            &[often(1000), vec![20_000, 20_500, 21_000, 21_500, 22_000, 22_500, 23_000]].concat(),
            false,
        );
        let four: Vec<u64> = (20_000..=24_000).step_by(500).collect();
        check(&[1000], &[often(1000), four].concat(), true);
    }

    #[test]
    fn every_rank_reports_the_loss_of_rank_0_in_the_same_words() {
        let lost = |rank: usize, late_ms: u64| {
            let mut out = Vec::new();
            let mut spoke = watch(rank, 3);
            spoke.message(100, 0, Message::Beat(place(5)), &mut out);
            for now_ms in (100..SILENT_MS + 100).step_by(500) {
                spoke.wake(now_ms, place(rank as u64));
                spoke.tick(now_ms, &mut out);
            }
            spoke.tick(SILENT_MS + 100 + late_ms, &mut out);
            raised(&out).0
        };
        let expected = report(0, 5, "all_reduce", Cause::Silent { ms: SILENT_MS });
        assert_eq!((lost(1, 0), lost(2, 333)), (Some(expected.clone()), Some(expected)));
    }

    #[test]
    fn a_rank_at_fault_gets_the_report_about_it_too() {
        let damaged = report(2, 3, "all_reduce", Cause::Damaged { what: "a checksum".into() });
        let mut out = Vec::new();
        let mut hub = watch(0, 4);
        hub.message(100, 1, Message::Report(damaged.clone()), &mut out);
        assert_eq!(raised(&out), (Some(damaged), vec![2, 3]));
    }

    #[test]
    fn goodbyes_are_answered_and_nobody_is_missed() {
        let mut out = Vec::new();
        let mut hub = watch(0, 3);
        hub.leave(&mut out);
        for rank in [1, 2] {
            assert!(!hub.left());
            hub.message(100, rank, Message::Goodbye, &mut out);
            hub.closed(rank, Ended::Closed, &mut out);
        }
        hub.tick(10_000, &mut out);
        assert!(hub.left());
        let answers = [1, 2].map(|rank| Action::Send(rank, Message::Goodbye));
        assert_eq!(out, answers);
        let mut out = Vec::new();
        let mut spoke = watch(1, 3);
        spoke.leave(&mut out);
        assert_eq!(out, [Action::Send(0, Message::Goodbye)]);
        assert!(!spoke.left());
        spoke.message(100, 0, Message::Goodbye, &mut out);
        assert!(spoke.left());
    }

    #[test]
    fn exchanges_end_or_name_who_keeps_them_from_ending() {
        let part = |seq, byte| Message::Share { seq, blob: vec![byte] };
        let mut out = Vec::new();
        let mut hub = watch(0, 3);
        hub.message(1, 2, part(0, 2), &mut out);
        hub.share(2, place(1), vec![0], &mut out);
        assert_eq!(out, []);
        hub.message(3, 1, part(0, 1), &mut out);
        let blobs = vec![vec![0], vec![1], vec![2]];
        out.retain(|action| !matches!(action, Action::Send(_, Message::Beat(_))));
        let sent = |rank| Action::Send(rank, Message::Shared { seq: 0, blobs: blobs.clone() });
        assert_eq!(out, [sent(1), sent(2), Action::Shared(blobs.clone())]);

        let check = |play: &dyn Fn(&mut Watch, &mut Vec<Action>), rank: usize, said: &str| {
            let mut hub = watch(0, 3);
            let mut out = Vec::new();
            play(&mut hub, &mut out);
            let (report, _) = raised(&out);
            let report = report.expect("somebody is to blame");
            assert_eq!(report.rank, rank);
            assert!(report.to_string().contains(said), "{report}");
        };
        let late = |hub: &mut Watch, out: &mut Vec<Action>| {
            hub.share(0, place(1), vec![], out);
            hub.message(0, 1, part(0, 1), out);
            for now_ms in (0..=60_000).step_by(500) {
                hub.wake(now_ms, place(1));
                hub.message(now_ms, 1, Message::Beat(place(1)), out);
                hub.message(now_ms, 2, Message::Beat(place(1)), out);
                hub.tick(now_ms, out);
            }
        };
        check(&late, 2, "did not come to exchange 0 within 60 s");
        let ended = |hub: &mut Watch, out: &mut Vec<Action>| {
            hub.message(0, 2, Message::Goodbye, out);
            hub.share(0, place(1), vec![], out);
            hub.tick(1, out);
        };
        check(&ended, 2, "ended while others were in exchange 0");
        let twice = |hub: &mut Watch, out: &mut Vec<Action>| {
            hub.message(0, 2, part(0, 1), out);
            hub.message(0, 2, part(0, 1), out);
        };
        check(&twice, 2, "disagrees");
        let ahead = |hub: &mut Watch, out: &mut Vec<Action>| hub.message(0, 1, part(4, 1), out);
        check(&ahead, 1, "it is in exchange 4 and the others are in exchange 0");
        let join = |hub: &mut Watch, out: &mut Vec<Action>| hub.message(0, 1, Message::Table(vec![]), out);
        check(&join, 1, "it sent a table of ranks while the job ran");
    }
}
