//! The decisions of the control plane: pure functions of messages and time, without sockets or a clock.
//!
//! The plane is a star: rank 0 talks with all ranks, the others only with rank 0. So there is
//! one order of events, rank 0's, and when one rank is lost all ranks get the one report that rank 0 made:
//!
//! - a connection that closes without a goodbye, or is silent for longer than patience lasts, is a lost rank: rank 0
//!   reports it to all;
//! - if rank 0 itself is lost, every rank makes the same report on its own;
//! - a rank that fails reports itself, and rank 0 forwards the report unchanged;
//! - a rank that finds another one at fault on a data connection suspects it. Rank 0 makes the first suspicion the
//!   report and sends it to all, also to the rank that suspected: both ends of a broken connection would blame each
//!   other;
//! - a rank that is alive is waited for. Only when no rank has made progress for the whole stall timeout does rank 0
//!   end the job, and it names the rank that is furthest behind.
//!
//! After its first report a watch changes nothing.

use super::channel::Ended;
use super::message::Message;
use crate::patience::Patience;
use crate::pulse::{Position, furthest_behind};
use crate::report::{Cause, Report};
#[cfg(test)]
use crate::simulation::{Bug, makes};

/// After this long a wait of rank 0 is announced, again after twice as long, and so on.
const LONG_WAIT_MS: u64 = 10_000;

/// A decision, for the plane to carry out.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Action {
    /// Send to that rank.
    Send(usize, Message),
    /// Raise this process's alarm.
    Raise(Report),
    /// An exchange is complete.
    Shared(Vec<Vec<u8>>),
    /// Rank 0 has been waiting for a long time.
    Say(Waiting),
}

/// Which rank a long wait is for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Waiting {
    /// How long rank 0 has been waiting.
    pub ms: u64,
    /// The rank that is furthest behind.
    pub rank: usize,
    /// Its host.
    pub host: String,
    /// Where it is.
    pub place: Position,
}

/// A rank with a connection to this one.
#[derive(Clone, Debug)]
struct WatchedPeer {
    state: PeerState,
    heard_ms: u64,
    place: Position,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum PeerState {
    Here,
    /// It said goodbye.
    Departed,
    /// It is lost to the job. If its connection still works, it gets the report too.
    Lost,
    /// Lost, with its connection.
    Closed,
}

/// The watch of one rank.
pub(crate) struct Watch {
    rank: usize,
    hosts: Vec<String>,
    peers: Vec<Option<WatchedPeer>>,
    place: Position,
    report: Option<Report>,
    patience: Patience,
    woke_ms: u64,
    beat_ms: u64,
    /// When a rank last made progress; on other ranks than 0, since when this one has been at its position.
    moved_ms: u64,
    here_ms: u64,
    /// How long the wait must be for the next announcement.
    word_ms: u64,
    leaving: bool,
    /// Whether rank 0 was told what this rank suspects.
    suspected: bool,
    share_seq: u64,
    /// On rank 0, the parts of the current exchange.
    parts: Vec<Option<Vec<u8>>>,
    /// Whether this rank waits for an exchange.
    sharing: bool,
}

impl Watch {
    /// The watch of a rank; the others' hosts by rank.
    pub(crate) fn new(rank: usize, hosts: Vec<String>, patience: Patience) -> Watch {
        let size = hosts.len();
        let place = Position::START;
        let peer = |other: usize| {
            let connected = other != rank && (rank == 0 || other == 0);
            connected.then_some(WatchedPeer { state: PeerState::Here, heard_ms: 0, place })
        };
        Watch {
            rank,
            peers: (0..size).map(peer).collect(),
            hosts,
            report: None,
            patience,
            woke_ms: 0,
            beat_ms: 0,
            moved_ms: 0,
            here_ms: 0,
            word_ms: LONG_WAIT_MS,
            leaving: false,
            suspected: false,
            share_seq: 0,
            parts: vec![None; size],
            sharing: false,
            place,
        }
    }

    /// Begins a turn, with this rank at `place`. If this process itself was stopped, or its machine suspended, the time
    /// in which it did not listen does not count as silence of others.
    pub(crate) fn wake(&mut self, now_ms: u64, place: Position) {
        let slept_ms = now_ms.saturating_sub(self.woke_ms);
        #[cfg(test)]
        let slept_ms = if makes(Bug::JudgesAcrossPauses) { 0 } else { slept_ms };
        let beat_ms = self.beat();
        if slept_ms > 2 * beat_ms {
            for peer in self.peers.iter_mut().flatten() {
                peer.heard_ms += slept_ms - beat_ms;
            }
            self.moved_ms += slept_ms - beat_ms;
        }
        self.woke_ms = now_ms;
        self.arrive(now_ms, place);
    }

    /// A message came.
    pub(crate) fn message(&mut self, now_ms: u64, from: usize, message: Message, out: &mut Vec<Action>) {
        let Some(peer) = &mut self.peers[from] else { return };
        peer.heard_ms = now_ms;
        match message {
            Message::Beat(place) => {
                if place != peer.place {
                    self.moved_ms = now_ms;
                }
                peer.place = place;
            }
            Message::Report(report) => self.adopt(report, Some(from), out),
            Message::Goodbye => {
                let answered = peer.state == PeerState::Departed;
                peer.state = PeerState::Departed;
                if self.rank == 0 && !answered {
                    out.push(Action::Send(from, Message::Goodbye));
                }
            }
            Message::Share { seq, blob } if self.rank == 0 => {
                self.moved_ms = now_ms;
                self.part(from, seq, blob, out);
            }
            Message::Shared { seq, blobs } if from == 0 && seq == self.share_seq => {
                if blobs.len() != self.hosts.len() {
                    return self.lose(
                        from,
                        Cause::Disagrees { what: "parts of an exchange from too few ranks".into() },
                        out,
                    );
                }
                self.share_seq += 1;
                self.sharing = false;
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
        if peer.state != PeerState::Here {
            return;
        }
        if self.leaving && from == 0 {
            // Rank 0 ends too, and this rank needs nothing more from it.
            peer.state = PeerState::Departed;
            return;
        }
        let cause = match ended {
            Ended::Closed => {
                peer.state = PeerState::Closed;
                Cause::Gone
            }
            // It can still receive, and should learn what it is blamed for.
            Ended::Malformed { what } => Cause::Damaged { what },
        };
        self.lose(from, cause, out);
    }

    /// Time has passed. To be called after all messages that have come.
    pub(crate) fn tick(&mut self, now_ms: u64, out: &mut Vec<Action>) {
        if now_ms >= self.beat_ms {
            self.beat_ms = now_ms + self.beat();
            for rank in self.here() {
                #[cfg(test)]
                if makes(Bug::ForgetsBeats) {
                    continue;
                }
                out.push(Action::Send(rank, Message::Beat(self.place)));
            }
        }
        for rank in self.here() {
            let heard_ms = self.peers[rank].as_ref().map_or(now_ms, |peer| peer.heard_ms);
            let ms = self.patience.silence.as_millis() as u64;
            if now_ms.saturating_sub(heard_ms) >= ms {
                // The timeout and not the measured time: every rank that counts on its own must come to the same
                // report.
                self.lose(rank, Cause::Silent { ms }, out);
            }
        }
        self.judge_share(out);
        if self.rank == 0 && !self.here().is_empty() {
            self.judge_stall(now_ms, out);
            self.say_who_is_late(now_ms, out);
        }
    }

    /// When the next tick is due.
    pub(crate) fn due_ms(&self) -> u64 {
        self.beat_ms
    }

    /// This rank's part of the next exchange, and its position. That may be later than the one at which this turn
    /// began; the others must get it, or the rank would be reported at the old one should it be lost.
    pub(crate) fn share(&mut self, now_ms: u64, place: Position, blob: Vec<u8>, out: &mut Vec<Action>) {
        self.arrive(now_ms, place);
        let seq = self.share_seq;
        self.sharing = true;
        if self.rank == 0 {
            return self.part(0, seq, blob, out);
        }
        // An exchange tells all ranks where the others are, without waiting for a heartbeat.
        out.push(Action::Send(0, Message::Beat(self.place)));
        out.push(Action::Send(0, Message::Share { seq, blob }));
    }

    /// This rank found another one at fault. Others may have found something else, so rank 0 decides, and tells all.
    pub(crate) fn suspect(&mut self, suspicion: Report, out: &mut Vec<Action>) {
        if self.report.is_some() || self.suspected {
            return;
        }
        self.suspected = true;
        #[cfg(test)]
        if makes(Bug::JudgesAlone) {
            return self.adopt(suspicion, None, out);
        }
        if self.rank != 0 && self.here() == [0] {
            out.push(Action::Send(0, Message::Report(suspicion)));
        } else {
            self.adopt(suspicion, None, out);
        }
    }

    /// The job cannot go on: the first report is kept, raised here, and sent on.
    pub(crate) fn adopt(&mut self, report: Report, from: Option<usize>, out: &mut Vec<Action>) {
        if self.report.is_some() {
            return;
        }
        self.report = Some(report.clone());
        out.push(Action::Raise(report.clone()));
        #[cfg(test)]
        if makes(Bug::KeepsReports) {
            return;
        }
        for (rank, peer) in self.peers.iter().enumerate() {
            let reached = matches!(peer, Some(WatchedPeer { state: PeerState::Here | PeerState::Lost, .. }));
            // On rank 0 also to the rank that said it: it may only have suspected it, and waits for the answer.
            if reached && (self.rank == 0 || Some(rank) != from) {
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
        #[cfg(test)]
        if makes(Bug::ForgetsGoodbye) {
            return;
        }
        if self.rank != 0 && self.here() == [0] {
            out.push(Action::Send(0, Message::Goodbye));
        }
    }

    /// Whether this rank may end: no other rank needs it any more.
    pub(crate) fn left(&self) -> bool {
        self.leaving && (self.report.is_some() || self.here().is_empty())
    }

    /// Whether that rank is lost to the job.
    pub(crate) fn lost(&self, rank: usize) -> bool {
        matches!(&self.peers[rank], Some(WatchedPeer { state: PeerState::Lost | PeerState::Closed, .. }))
    }

    fn here(&self) -> Vec<usize> {
        let here = |rank: &usize| matches!(&self.peers[*rank], Some(peer) if peer.state == PeerState::Here);
        (0..self.peers.len()).filter(here).collect()
    }

    fn lose(&mut self, rank: usize, cause: Cause, out: &mut Vec<Action>) {
        let mut place = self.place;
        if let Some(peer) = &mut self.peers[rank] {
            if peer.state == PeerState::Here {
                peer.state = PeerState::Lost;
            }
            // Its last position may be half a second old; rank 0, if it is ahead of that, waits for it now. When rank 0
            // is lost, all ranks take its last known position, so that all report the same.
            if self.rank != 0 || peer.place.step >= place.step {
                place = peer.place;
            }
        }
        let (step, op) = (place.step, place.doing.name().to_owned());
        self.adopt(Report { rank, host: self.hosts[rank].clone(), step, op, cause }, None, out);
    }

    /// On rank 0: a part of the current exchange.
    fn part(&mut self, from: usize, seq: u64, blob: Vec<u8>, out: &mut Vec<Action>) {
        if seq != self.share_seq || self.parts[from].is_some() {
            let what = format!("it is in exchange {seq} and the others are in exchange {}", self.share_seq);
            return self.lose(from, Cause::Disagrees { what }, out);
        }
        self.parts[from] = Some(blob);
        if self.parts.iter().all(Option::is_some) {
            let blobs: Vec<Vec<u8>> = self.parts.iter_mut().filter_map(Option::take).collect();
            self.share_seq += 1;
            self.sharing = false;
            for rank in self.here() {
                out.push(Action::Send(rank, Message::Beat(self.place)));
                out.push(Action::Send(rank, Message::Shared { seq, blobs: blobs.clone() }));
            }
            out.push(Action::Shared(blobs));
        }
    }

    /// An exchange cannot end once a rank has left without giving its part.
    fn judge_share(&mut self, out: &mut Vec<Action>) {
        if !self.sharing && self.parts.iter().all(Option::is_none) {
            return;
        }
        let seq = self.share_seq;
        let lacking: Vec<usize> = match self.rank {
            0 => (0..self.parts.len()).filter(|&rank| self.parts[rank].is_none()).collect(),
            _ => vec![0],
        };
        let departed =
            |rank: &&usize| matches!(&self.peers[**rank], Some(peer) if peer.state == PeerState::Departed);
        if let Some(&rank) = lacking.iter().find(departed) {
            let what = format!("it ended while others were in exchange {seq}");
            self.lose(rank, Cause::Disagrees { what }, out);
        }
    }

    /// On rank 0: the rank that is furthest behind, itself included.
    fn latest(&self) -> Option<(usize, Position)> {
        let here = |rank: usize| self.peers[rank].as_ref().filter(|peer| peer.state == PeerState::Here);
        let others = (1..self.peers.len()).filter_map(|rank| here(rank).map(|peer| (rank, &peer.place)));
        let rank = furthest_behind(others.chain(std::iter::once((0, &self.place))))?;
        Some((rank, here(rank).map_or(self.place, |peer| peer.place)))
    }

    fn judge_stall(&mut self, now_ms: u64, out: &mut Vec<Action>) {
        let ms = self.patience.stall.as_millis() as u64;
        if now_ms.saturating_sub(self.moved_ms) < ms || self.report.is_some() {
            return;
        }
        let Some((rank, place)) = self.latest() else { return };
        let (step, op) = (place.step, place.doing.name().to_owned());
        let report = Report { rank, host: self.hosts[rank].clone(), step, op, cause: Cause::Stalled { ms } };
        self.adopt(report, None, out);
    }

    /// Tells the user, who sees nothing happen, which rank is waited for.
    fn say_who_is_late(&mut self, now_ms: u64, out: &mut Vec<Action>) {
        let ms = now_ms.saturating_sub(self.here_ms);
        if !(self.sharing || self.place.doing.waits()) || ms < self.word_ms || self.report.is_some() {
            return;
        }
        self.word_ms *= 2;
        if let Some((rank, place)) = self.latest().filter(|(rank, _)| *rank != 0) {
            out.push(Action::Say(Waiting { ms, rank, host: self.hosts[rank].clone(), place }));
        }
    }

    /// This rank has reached a position.
    fn arrive(&mut self, now_ms: u64, place: Position) {
        if place != self.place {
            self.moved_ms = now_ms;
        }
        if (Position { effort: self.place.effort, ..place }) != self.place {
            (self.here_ms, self.word_ms) = (now_ms, LONG_WAIT_MS);
        }
        self.place = place;
    }

    /// The time between two heartbeats.
    fn beat(&self) -> u64 {
        self.patience.beat().as_millis() as u64
    }
}

impl Waiting {
    /// A line for the user.
    pub fn text(&self) -> String {
        let Waiting { ms, rank, host, place } = self;
        let host = if host.is_empty() { String::new() } else { format!(" on {host}") };
        format!(
            "waiting for rank {rank}{host} for {} s: it is at step {}, in {}",
            ms / 1000,
            place.step,
            place.doing.name()
        )
    }
}

fn name(message: &Message) -> &'static str {
    match message {
        Message::Welcome { .. } => "a welcome",
        Message::Refused { .. } => "a refusal",
        Message::Here(_) => "a heartbeat",
        Message::Table(_) => "a table of ranks",
        Message::Faults(_) => "faults of its connections",
        Message::Beat(_) => "a beat",
        Message::Share { .. } => "a part of an exchange",
        Message::Shared { .. } => "an exchange that no rank is in",
        Message::Report(_) => "a report",
        Message::Goodbye => "a goodbye",
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::pulse::Doing;

    const SILENT_MS: u64 = 4000;
    const PATIENCE: Patience =
        Patience { silence: Duration::from_millis(SILENT_MS), stall: Duration::from_secs(60) };

    fn watch(rank: usize, size: usize) -> Watch {
        Watch::new(rank, (0..size).map(|i| format!("h{i}")).collect(), PATIENCE)
    }

    fn place(step: u64) -> Position {
        Position { step, doing: Doing::AllReduce, ..Position::START }
    }

    fn report(rank: usize, step: u64, op: &str, cause: Cause) -> Report {
        Report { rank, host: format!("h{rank}"), step, op: op.into(), cause }
    }

    /// The report that is raised, and the ranks that it goes to.
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
        assert_eq!(raised(&out), (Some(report(2, 9, "all-reduce", Cause::Gone)), vec![1, 3]));
        // Consequences of the first loss are not reported as further ones.
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
        // Stopped from 1 s to 20 s, then three more seconds of silence, then four.
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
        let expected = report(0, 5, "all-reduce", Cause::Silent { ms: SILENT_MS });
        assert_eq!((lost(1, 0), lost(2, 333)), (Some(expected.clone()), Some(expected)));
    }

    #[test]
    fn a_rank_at_fault_gets_the_report_about_it_too() {
        let damaged = report(2, 3, "all-reduce", Cause::Damaged { what: "a checksum".into() });
        let mut out = Vec::new();
        let mut hub = watch(0, 4);
        hub.message(100, 1, Message::Report(damaged.clone()), &mut out);
        assert_eq!(raised(&out), (Some(damaged), vec![1, 2, 3]));
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
            let report = report.expect("a rank is to blame");
            assert_eq!(report.rank, rank);
            assert!(report.to_string().contains(said), "{report}");
        };
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
    /// Rank 0 in an exchange, rank 1 in its own work, both with heartbeats; `at` says what each second brings.
    fn play(seconds: u64, mut at: impl FnMut(u64) -> (Position, Position)) -> Vec<Action> {
        let mut hub = watch(0, 2);
        let mut out = Vec::new();
        for now_ms in (0..=seconds * 1000).step_by(500) {
            let (mine, theirs) = at(now_ms / 1000);
            hub.wake(now_ms, mine);
            hub.message(now_ms, 1, Message::Beat(theirs), &mut out);
            hub.tick(now_ms, &mut out);
        }
        out
    }

    #[test]
    fn a_rank_that_lives_and_gets_on_is_waited_for() {
        let mine = place(7);
        let own = Position { step: 7, doing: Doing::OwnWork, ..Position::START };
        // Ten minutes of a checkpoint: its process works.
        let busy = play(601, |s| (mine, Position { effort: s / 30, ..own }));
        assert_eq!(raised(&busy).0, None);
        // A minute without progress on any rank.
        let stuck = play(61, |_| (mine, own));
        let want = report(1, 7, "its own work", Cause::Stalled { ms: 60_000 });
        assert_eq!(raised(&stuck), (Some(want), vec![1]));
        // It made progress half-way.
        let once = play(61, |s| (mine, Position { count: s / 31, ..own }));
        assert_eq!(raised(&once).0, None);
    }

    #[test]
    fn a_long_wait_says_for_whom_and_what_that_rank_does() {
        let mine = place(7);
        let own = Position { step: 7, doing: Doing::Preparing, ..Position::START };
        let out = play(45, |s| (mine, Position { effort: s, ..own }));
        let said: Vec<String> =
            out.iter().filter_map(|a| if let Action::Say(w) = a { Some(w.text()) } else { None }).collect();
        let word = |s: u64| format!("waiting for rank 1 on h1 for {s} s: it is at step 7, in preparing data");
        assert_eq!(said, [10, 20, 40].map(word));
        // A rank that makes progress every nine seconds is not announced.
        let out = play(45, |s| (Position { count: s / 9, ..mine }, own));
        assert!(!out.iter().any(|a| matches!(a, Action::Say(_))));
    }
}
