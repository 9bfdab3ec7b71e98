//! The thread of the control plane: it moves messages between sockets and the watch, and carries out the watch's
//! decisions.

use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::channel::{Channel, Ended};
use super::watch::{Action, Watch};
use super::{Command, ControlShared, FLUSH_TIME};
use crate::alarm::Alarm;
use crate::patience::Patience;
use crate::pulse::{Effort, Position};
use crate::ready;
use crate::report::{Cause, Report};

/// How often the thread checks whether another thread raised the alarm.
const LOOK_MS: u64 = 200;
/// How many messages of one connection are read per turn, so that none starves the others.
const MESSAGES_A_TURN: usize = 64;

/// Everything that the thread owns.
pub(super) struct Plane {
    rank: usize,
    host: String,
    watch: Watch,
    channels: Vec<Option<Channel>>,
    shared: Arc<ControlShared>,
    queued: Receiver<Command>,
    started: Instant,
    /// Whether this process uses the CPU, and how often it was seen to.
    effort: Effort,
    efforts: u64,
    sharing: Option<Sender<Vec<Vec<u8>>>>,
    flushing: Vec<(Instant, Sender<()>)>,
    leaving: Option<Sender<()>>,
}

impl Plane {
    pub(super) fn new(
        rank: usize,
        hosts: Vec<String>,
        channels: Vec<Option<Channel>>,
        shared: Arc<ControlShared>,
        queued: Receiver<Command>,
        patience: Patience,
    ) -> Plane {
        let host = hosts[rank].clone();
        let watch = Watch::new(rank, hosts, patience);
        let started = shared.system.now();
        let effort = Effort::new(started, shared.system.processor_time());
        let flushing = Vec::new();
        Plane {
            rank,
            host,
            watch,
            channels,
            shared,
            queued,
            started,
            effort,
            efforts: 0,
            sharing: None,
            flushing,
            leaving: None,
        }
    }

    /// Runs until this rank leaves.
    pub(super) fn run(mut self) {
        let _guard =
            ControlGuard { alarm: self.shared.alarm.clone(), rank: self.rank, host: self.host.clone() };
        self.shared.alarm.set_judged(true);
        while self.turn() {
            let now_ms = self.now_ms();
            let due_ms = self.watch.due_ms().clamp(now_ms + 1, now_ms + LOOK_MS);
            let until = self.started + Duration::from_millis(due_ms);
            let mut fds = vec![ready::interest(self.shared.wake.as_fd(), false)];
            let channels = self.channels.iter().flatten();
            fds.extend(channels.map(|channel| ready::interest(channel.as_fd(), channel.sending())));
            if let Err(e) = self.shared.system.wait(&mut fds, until) {
                let why = format!("its control plane cannot wait for sockets: {e}");
                self.shared.alarm.raise(self.own(Cause::Failed { why }));
                return;
            }
        }
        self.close();
        let _ = self.leaving.take().map(|done| done.send(()));
    }

    /// One turn: read all connections, serve callers, judge. Returns whether there is a next one.
    fn turn(&mut self) -> bool {
        let now_ms = self.now_ms();
        let mut out = Vec::new();
        if self.effort.worked(self.now(), self.shared.system.processor_time()) == Some(true) {
            self.efforts += 1;
        }
        self.watch.wake(now_ms, self.place());
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.shared.wake, &mut count);
        for from in 0..self.channels.len() {
            self.hear(from, now_ms, &mut out);
        }
        let goes_on = self.obey(now_ms, &mut out);
        if self.watch.report().is_none()
            && let Some(report) = self.shared.alarm.raised()
        {
            // Another thread of this process noticed first: the other ranks learn it from here.
            self.watch.adopt(report, None, &mut out);
        } else if let Some(suspicion) = self.shared.alarm.suspicion() {
            self.watch.suspect(suspicion, &mut out);
        }
        self.watch.tick(now_ms, &mut out);
        self.act(out);
        self.flush();
        goes_on && !self.depart()
    }

    fn hear(&mut self, from: usize, now_ms: u64, out: &mut Vec<Action>) {
        for _ in 0..MESSAGES_A_TURN {
            let Some(channel) = &mut self.channels[from] else { return };
            match channel.receive() {
                Ok(Some(message)) => self.watch.message(now_ms, from, message, out),
                Ok(None) => return,
                Err(ended) => {
                    let closed = ended == Ended::Closed;
                    self.watch.closed(from, ended, out);
                    if closed {
                        self.channels[from] = None;
                    }
                }
            }
        }
    }

    /// Serves the callers' requests. Returns whether the thread goes on.
    fn obey(&mut self, now_ms: u64, out: &mut Vec<Action>) -> bool {
        loop {
            match self.queued.try_recv() {
                Ok(Command::Share { blob, answer }) => {
                    self.sharing = Some(answer);
                    self.watch.share(now_ms, self.place(), blob, out);
                }
                Ok(Command::Flush { done }) => self.flushing.push((self.now() + FLUSH_TIME, done)),
                Ok(Command::Goodbye { done }) => {
                    self.leaving = Some(done);
                    self.watch.leave(out);
                }
                Ok(Command::Stop) | Err(TryRecvError::Disconnected) => return false,
                Err(TryRecvError::Empty) => return true,
            }
        }
    }

    fn act(&mut self, out: Vec<Action>) {
        for action in out {
            match action {
                Action::Send(to, message) => {
                    if let Some(channel) = &mut self.channels[to] {
                        channel.send(&message);
                    }
                }
                Action::Raise(report) => drop(self.shared.alarm.raise(report)),
                Action::Say(waiting) => {
                    let voice = self.shared.voice.lock().unwrap_or_else(PoisonError::into_inner).clone();
                    let _ = voice.map(|voice| voice(&waiting));
                }
                Action::Shared(blobs) => {
                    // The caller may have stopped waiting.
                    let _ = self.sharing.take().map(|answer| answer.send(blobs));
                }
            }
        }
    }

    fn flush(&mut self) {
        let mut all = true;
        for channel in self.channels.iter_mut().flatten() {
            all &= channel.flush();
        }
        let now = self.now();
        for (_, done) in self.flushing.extract_if(.., |(until, _)| all || *until <= now) {
            let _ = done.send(());
        }
    }

    /// Whether this rank said goodbye and may go. Rank 0 stays for as long as the others live. They stay until it
    /// answers: sending to a process that has ended causes a reset, which may overtake a goodbye that is still under
    /// way.
    fn depart(&self) -> bool {
        self.leaving.is_some() && self.watch.left()
    }

    /// Sends the last messages and then reads on, within a time limit, until the others have closed too. Closing a
    /// connection with unread data resets it, and a reset discards what the other side has not received yet: it would
    /// not learn why this rank ended. Lost ranks are not waited for.
    fn close(&mut self) {
        let system = self.shared.system.clone();
        let until = system.now() + FLUSH_TIME;
        loop {
            let mut fds = Vec::new();
            for (rank, channel) in self.channels.iter_mut().enumerate() {
                let Some(channel) = channel else { continue };
                if channel.close() && !self.watch.lost(rank) {
                    fds.push(ready::interest((*channel).as_fd(), channel.sending()));
                }
            }
            if fds.is_empty() || system.now() >= until || system.wait(&mut fds, until).is_err() {
                return;
            }
        }
    }

    fn now_ms(&self) -> u64 {
        self.now().saturating_duration_since(self.started).as_millis() as u64
    }

    fn place(&self) -> Position {
        Position { effort: self.efforts, ..self.shared.pulse.place() }
    }

    fn now(&self) -> Instant {
        self.shared.system.now()
    }

    fn own(&self, cause: Cause) -> Report {
        let place = self.place();
        let (step, op) = (place.step, place.doing.name().to_owned());
        Report { rank: self.rank, host: self.host.clone(), step, op, cause }
    }
}

/// A panic of the thread is a bug, and must not leave a caller waiting.
struct ControlGuard {
    alarm: Alarm,
    rank: usize,
    host: String,
}

impl Drop for ControlGuard {
    fn drop(&mut self) {
        self.alarm.set_judged(false);
        if std::thread::panicking() {
            let cause = Cause::Failed { why: "its control plane stopped because of a bug".into() };
            let op = "control".to_owned();
            self.alarm.raise(Report { rank: self.rank, host: self.host.clone(), step: 0, op, cause });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::sync::Mutex;
    use std::sync::mpsc::channel as queue;

    use rustix::event::{EventfdFlags, eventfd};

    use super::super::message::Message;
    use super::*;
    use crate::loopback;
    use crate::pulse::{Doing, Pulse};
    use crate::socket::Stream;
    use crate::system::Os;

    /// Rank 1 of two, before its thread runs; its callers' end, and the stream to it.
    fn rank_1() -> (Plane, Arc<ControlShared>, Sender<Command>, Stream) {
        let mut rows = loopback::streams(2).unwrap();
        let (theirs, ours) = (rows[0][1].take().unwrap(), rows[1][0].take().unwrap());
        let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap();
        let (alarm, pulse, voice) = (Alarm::default(), Pulse::default(), Mutex::new(None));
        let shared = Arc::new(ControlShared { alarm, system: Arc::new(Os), pulse, voice, wake });
        let (commands, queued) = queue();
        let channels = vec![Some(Channel::new(ours, 1 << 16).unwrap()), None];
        let hosts = vec!["a".into(), "b".into()];
        let plane = Plane::new(1, hosts, channels, shared.clone(), queued, Patience::default());
        (plane, shared, commands, theirs)
    }

    /// The thread may be in the middle of a turn when a caller updates its position and shares: the others get the new
    /// position, not the one at which the turn began.
    #[test]
    fn an_exchange_tells_the_place_of_its_caller() {
        let (mut plane, shared, commands, _theirs) = rank_1();
        plane.watch.wake(0, shared.pulse.place());
        shared.pulse.at(41, Doing::AllGather);
        let (answer, _answered) = queue();
        commands.send(Command::Share { blob: vec![7], answer }).unwrap();
        let mut out = Vec::new();
        assert!(plane.obey(0, &mut out));
        assert_eq!(out[0], Action::Send(0, Message::Beat(shared.pulse.place())));
        assert!(matches!(out[1], Action::Send(0, Message::Share { seq: 0, .. })));
    }

    /// A rank that fails ends its connection in order even if more has come than it reads: a reset might overtake the
    /// report.
    #[test]
    fn the_report_of_a_rank_that_ends_comes_whole() {
        let (plane, shared, commands, mut theirs) = rank_1();
        let beat = Message::Beat(shared.pulse.place()).encode();
        let beat = [&(beat.len() as u32).to_le_bytes()[..], &beat].concat();
        // More than one read of a channel, and less than a socket holds.
        theirs.write_all(&beat.repeat((48 << 10) / beat.len())).unwrap();
        let cause = Cause::Failed { why: "disk full".into() };
        let report = Report { rank: 1, host: "b".into(), step: 3, op: "x".into(), cause };
        shared.alarm.raise(report.clone());
        commands.send(Command::Stop).unwrap();
        let thread = std::thread::spawn(move || plane.run());
        let mut heard = Vec::new();
        theirs.read_to_end(&mut heard).unwrap();
        let said = Message::Report(report).encode();
        assert!(heard.windows(said.len()).any(|bytes| bytes == said), "no report in {} bytes", heard.len());
        // Not reset: it would still take what comes.
        theirs.peer_addr().unwrap();
        drop(theirs);
        thread.join().unwrap();
    }
}
