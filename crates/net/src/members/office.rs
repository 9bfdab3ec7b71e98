//! The coordinator's sockets: takes connections of members, hands what they say to the [`Coordinator`], and does what it decides.
//!
//! It has no thread: the process that runs it calls [`Office::turn`] again and again. What the coordinator cannot do by itself, such as
//! killing a process of its host, it gives back as an [`OfficeOrder`].

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::PollFd;

use super::coordinator::{Coordinator, Rules};
use super::decision::{Decision, MemberAction, MemberEvent, Reason};
use super::message::{JobMark, MESSAGE_BYTES_MAX, MemberId, MemoryUse, OwnShare, ToCoordinator, ToMember};
use super::store::GenerationRecord;
use super::tenure::Tenure;
use crate::connection::Proven;
use crate::control::channel::{Channel, Ended};
use crate::peers::PeerProcess;
use crate::ready;
use crate::rendezvous::Tell;
use crate::rendezvous::gate::Gate;
use crate::rendezvous::hello::{Hello, Purpose};
use crate::seal::Encrypt;
use crate::secret::Secret;
use crate::socket::Listener;
use crate::system::System;

/// How long somebody who has proved the secret may take to say what it wants.
const FIRST_WORD: Duration = Duration::from_secs(5);

/// What an office needs.
pub struct OfficeOptions {
    /// Where members connect.
    pub listener: Listener,
    /// The job's secret.
    pub secret: Secret,
    /// The job's name: members of another one are refused.
    pub job: String,
    /// What the coordinator goes by.
    pub rules: Rules,
    /// The number of the first member. A coordinator that may be a successor takes one that its predecessor has not come to.
    pub first: MemberId,
    /// What the first ranks are to know of an earlier run; empty for a new one.
    pub note: Vec<u8>,
    /// Whether connections are encrypted; the same for all members.
    pub encrypt: Encrypt,
    /// Equal for members that can share memory with each other, if this process could with them.
    pub host_key: String,
    /// Whether its children run on this host, so that their end is reported and they can be killed. Of those at the far ends of ssh only
    /// the connection can be ended.
    pub children_here: bool,
    /// The member whose process this is, if it is one.
    pub runs_on: Option<MemberId>,
    /// The member whose process had the coordinator before, and has ended.
    pub ended: Option<MemberId>,
    /// Whether a member takes its place when it is lost. Otherwise members wait for it to be started again.
    pub succession: bool,
    /// Its post in a store, if one says who coordinates.
    pub tenure: Option<Tenure>,
    /// Receives lines about connections that are turned away.
    pub tell: Tell,
    /// Time and sockets.
    pub system: Arc<dyn System>,
}

/// What the caller has to do, or may tell.
#[derive(Clone, PartialEq, Debug)]
pub enum OfficeOrder {
    /// Kill one of its children; the others wait until its end was reported.
    Kill {
        /// Which.
        child: u64,
    },
    /// Something was decided.
    Decided(Decision),
    /// Somebody asks how things stand: answer with [`Office::answer`].
    Asked {
        /// Whom to answer.
        asker: u64,
    },
}

/// One member, for a table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemberRow {
    /// Its number.
    pub id: MemberId,
    /// Its rank in the last generation.
    pub rank: Option<usize>,
    /// Its host.
    pub host: String,
    /// Its process.
    pub pid: u32,
    /// Steps that it has done.
    pub step: u64,
    /// What it had to do in the last of them.
    pub own: OwnShare,
}

struct Guest {
    channel: Channel<ToMember, ToCoordinator>,
    /// Until it has said what it wants.
    until: Option<Instant>,
    member: Option<Known>,
    gone: bool,
}

struct Known {
    host: String,
    pid: u32,
    child: Option<u64>,
    own: OwnShare,
    hold: Hold,
}

/// What the coordinator's host can do about a member's process.
enum Hold {
    /// Nothing: it is elsewhere, or ranks share no memory anyway.
    Nothing,
    /// It was opened by its number. The member's next message shows that the number was its own.
    Opened(Option<PeerProcess>),
    /// It is watched, and can be killed: by this one, or by the caller if it is its child.
    Sure(Option<PeerProcess>),
}

/// The coordinator and its connections.
pub struct Office {
    system: Arc<dyn System>,
    gate: Gate,
    job: String,
    /// The digest of the job that all members have, once there is one.
    digest: Option<u64>,
    patience: Duration,
    runs_on: Option<MemberId>,
    succession: bool,
    tenure: Option<Tenure>,
    /// What members are told when the store has the record of their generation.
    held_back: VecDeque<(MemberId, ToMember)>,
    /// Children to be killed as soon as it is sure that no other process has the post, under which they may have gone on.
    to_kill: Vec<u64>,
    coordinator: Coordinator,
    guests: BTreeMap<MemberId, Guest>,
    /// Children whose connections are closed and whose end was not reported yet.
    closed_children: BTreeMap<u64, MemberId>,
    /// Processes of this host that are no children, the same.
    closed_processes: BTreeMap<MemberId, PeerProcess>,
    /// Those of them that are to be killed as soon as that is sure.
    doomed: Vec<MemberId>,
    host_key: String,
    children_here: bool,
    memory: MemoryUse,
    next: MemberId,
    orders: Vec<OfficeOrder>,
}

impl Office {
    /// Opens at a listener.
    pub fn open(options: OfficeOptions) -> io::Result<Office> {
        let OfficeOptions {
            listener,
            secret,
            job,
            rules,
            first,
            note,
            encrypt,
            host_key,
            children_here,
            runs_on,
            ended,
            succession,
            tenure,
            tell,
            system,
        } = options;
        let hello = member_hello(encrypt);
        let gate = Gate::new(listener, secret, hello, rules.max, tell)?;
        let (mut coordinator, patience, memory) = (Coordinator::new(rules), rules.patience, rules.memory);
        coordinator.keep_note(note);
        coordinator.succeeds(ended);
        if let Some(record) = tenure.as_ref().and_then(Tenure::record) {
            coordinator.goes_on(system.now(), record);
        }
        let (guests, closed_children) = (BTreeMap::new(), BTreeMap::new());
        let (digest, next, orders) = (None, first, Vec::new());
        Ok(Office {
            system,
            gate,
            job,
            digest,
            patience,
            runs_on,
            succession,
            tenure,
            held_back: VecDeque::new(),
            to_kill: Vec::new(),
            coordinator,
            guests,
            closed_children,
            closed_processes: BTreeMap::new(),
            doomed: Vec::new(),
            host_key,
            children_here,
            memory,
            next,
            orders,
        })
    }

    /// Where members connect.
    pub fn addr(&self) -> io::Result<SocketAddr> {
        self.gate.addr()
    }

    /// The decisions so far.
    pub fn coordinator(&self) -> &Coordinator {
        &self.coordinator
    }

    /// Waits until something happens, at most until then, and sees to it. Returns what the caller has to do.
    pub fn turn(&mut self, until: Instant) -> io::Result<Vec<OfficeOrder>> {
        let due = [self.gate.due(), self.coordinator.due()].into_iter().flatten();
        let until = due.chain([until]).min().unwrap_or(until);
        let mut fds: Vec<PollFd> = Vec::new();
        self.gate.interests(&mut fds);
        fds.extend(self.tenure.as_ref().map(|tenure| ready::interest(tenure.as_fd(), false)));
        fds.extend(
            self.processes().filter_map(|(_, process)| process.end()).map(|end| ready::interest(end, false)),
        );
        let guests = self.guests.values();
        fds.extend(guests.map(|guest| ready::interest(guest.channel.as_fd(), guest.channel.sending())));
        self.system.wait(&mut fds, until)?;
        drop(fds);
        self.tell_held_back()?;
        let now = self.system.now();
        for Proven { connection, hello, .. } in self.gate.turn(now) {
            if hello.purpose != Purpose::Member {
                continue;
            }
            let Ok(channel) = Channel::new(connection, MESSAGE_BYTES_MAX) else { continue };
            let guest = Guest { channel, until: Some(now + FIRST_WORD), member: None, gone: false };
            self.guests.insert(self.next, guest);
            self.next += 1;
        }
        self.listen(now);
        self.look();
        let decisions = self.coordinator.tick(now);
        self.act(decisions);
        self.guests.retain(|_, guest| !guest.gone);
        if self.tenure.as_ref().is_none_or(|tenure| tenure.is_sure(self.system.now())) {
            self.orders.extend(self.to_kill.drain(..).map(|child| OfficeOrder::Kill { child }));
            for id in self.doomed.drain(..) {
                if let Some(process) = self.closed_processes.get(&id) {
                    process.kill();
                }
            }
        }
        Ok(std::mem::take(&mut self.orders))
    }

    /// A child of the caller has ended.
    pub fn exited(&mut self, child: u64) {
        self.about(child, MemberEvent::Exited);
    }

    /// The caller is about to kill a child to see what happens.
    pub fn struck(&mut self, child: u64) {
        self.about(child, MemberEvent::Struck);
    }

    /// All members hear that the run is over, for this reason.
    pub fn end(&mut self, why: Option<String>) {
        let message = ToMember::End { why };
        self.guests.values_mut().for_each(|guest| guest.channel.send(&message));
    }

    /// Answers somebody who asked.
    pub fn answer(&mut self, asker: u64, text: String) {
        if let Some(guest) = self.guests.get_mut(&asker) {
            guest.channel.send(&ToMember::Status(text));
        }
    }

    /// All members.
    pub fn rows(&self) -> Vec<MemberRow> {
        let (_, ranks) = self.coordinator.generation();
        let row = |(id, guest): (&MemberId, &Guest)| {
            let Known { host, pid, own, .. } = guest.member.as_ref()?;
            let rank = ranks.iter().position(|rank| rank == id);
            let step = self.coordinator.step_of(*id)?;
            Some(MemberRow { id: *id, rank, host: host.clone(), pid: *pid, step, own: *own })
        };
        self.guests.iter().filter_map(row).collect()
    }

    /// The caller's children that are ranks of the last generation, in order of rank.
    pub fn child_ranks(&self) -> Vec<u64> {
        let (_, ranks) = self.coordinator.generation();
        let child = |id: &MemberId| self.guests.get(id)?.member.as_ref()?.child;
        ranks.iter().filter_map(child).collect()
    }

    fn about(&mut self, child: u64, event: MemberEvent) {
        let now = self.system.now();
        // Also of a member whose connection has closed already: the coordinator waits for its end.
        let of_child = |guest: &Guest| guest.member.as_ref().is_some_and(|known| known.child == Some(child));
        let found = self.guests.iter().find(|(_, guest)| of_child(guest)).map(|(id, _)| *id);
        let id = found.or_else(|| self.closed_children.remove(&child));
        if let Some(id) = id {
            let decisions = self.coordinator.step(now, id, event);
            self.act(decisions);
        }
    }

    /// Processes of this host that are no children: those of members, and those that were.
    fn processes(&self) -> impl Iterator<Item = (MemberId, &PeerProcess)> {
        let members = self.guests.iter().filter_map(|(id, guest)| match &guest.member.as_ref()?.hold {
            Hold::Sure(Some(process)) => Some((*id, process)),
            Hold::Sure(None) | Hold::Opened(_) | Hold::Nothing => None,
        });
        members.chain(self.closed_processes.iter().map(|(id, process)| (*id, process)))
    }

    /// Looks which processes of this host have ended.
    fn look(&mut self) {
        let ended: Vec<MemberId> =
            self.processes().filter(|(_, process)| process.ended()).map(|(id, _)| id).collect();
        for id in ended {
            self.closed_processes.remove(&id);
            if let Some(known) = self.guests.get_mut(&id).and_then(|guest| guest.member.as_mut()) {
                known.hold = Hold::Nothing;
            }
            let decisions = self.coordinator.step(self.system.now(), id, MemberEvent::Exited);
            self.act(decisions);
        }
    }

    /// A connection has closed: its process is waited for, if this host can see its end.
    fn keep_process(&mut self, id: MemberId) {
        let Some(known) = self.guests.get_mut(&id).and_then(|guest| guest.member.as_mut()) else { return };
        if let Hold::Sure(Some(process)) = std::mem::replace(&mut known.hold, Hold::Nothing) {
            self.closed_processes.insert(id, process);
        }
    }

    /// What this host can do about a process that says where it is; `None` if it cannot be a member, because ranks have to share memory
    /// with it. A child is the caller's to watch and to kill.
    fn hold_on(&self, host_key: &str, pid: u32, child: Option<u64>) -> Option<Hold> {
        if self.memory == MemoryUse::Never || host_key != self.host_key {
            return (self.memory != MemoryUse::Always).then_some(Hold::Nothing);
        }
        if child.is_some() && self.children_here {
            return Some(Hold::Opened(None));
        }
        match PeerProcess::in_hand(pid) {
            Some(process) => Some(Hold::Opened(Some(process))),
            None => (self.memory != MemoryUse::Always).then_some(Hold::Nothing),
        }
    }

    /// A member has said something after it was welcomed, so the number of its process is its own.
    fn is_sure(&mut self, now: Instant, id: MemberId) {
        let Some(known) = self.guests.get_mut(&id).and_then(|guest| guest.member.as_mut()) else { return };
        if let Hold::Opened(process) = &mut known.hold {
            known.hold = Hold::Sure(process.take());
            let decisions = self.coordinator.step(now, id, MemberEvent::Here);
            self.act(decisions);
        }
    }

    /// Tells members what waited for the record of their generation. Fails if another process has the post.
    fn tell_held_back(&mut self) -> io::Result<()> {
        let Some(tenure) = &self.tenure else { return Ok(()) };
        tenure.check()?;
        if !tenure.waits() {
            for (id, message) in std::mem::take(&mut self.held_back) {
                self.say(id, &message);
            }
        }
        Ok(())
    }

    /// Reads what members say.
    fn listen(&mut self, now: Instant) {
        let ids: Vec<MemberId> = self.guests.keys().copied().collect();
        for mut id in ids {
            while let Some(guest) = self.guests.get_mut(&id).filter(|guest| !guest.gone) {
                guest.channel.flush();
                match guest.channel.receive() {
                    Ok(Some(ToCoordinator::Return { host, host_key, pid, job, id: was, returned })) => {
                        if self.is_other_job(id, &job) || self.guests[&id].member.is_some() {
                            continue;
                        }
                        let Some(hold) = self.hold_on(&host_key, pid, None) else {
                            self.refuse_elsewhere(id);
                            continue;
                        };
                        // It is known by its number from here on; an older connection of it is dead.
                        let mut guest = self.guests.remove(&id).expect("a guest that spoke");
                        (guest.until, guest.member) =
                            (None, Some(Known { host, pid, child: None, own: OwnShare::default(), hold }));
                        self.guests.insert(was, guest);
                        id = was;
                        self.welcome(id);
                        let decisions = self.coordinator.step(now, id, MemberEvent::Returned(returned));
                        self.act(decisions);
                        self.tell_if_all_train(false);
                    }
                    Ok(Some(message)) => self.hear(now, id, message),
                    Ok(None) => {
                        guest.gone |= guest.until.is_some_and(|until| until <= now);
                        break;
                    }
                    Err(Ended::Closed | Ended::Malformed { .. }) => {
                        guest.gone = true;
                        let child = guest.member.as_ref().and_then(|known| known.child);
                        if let Some(child) = child {
                            self.closed_children.insert(child, id);
                        }
                        self.keep_process(id);
                        let decisions = self.coordinator.step(now, id, MemberEvent::Closed);
                        self.act(decisions);
                    }
                }
            }
        }
    }

    fn hear(&mut self, now: Instant, id: MemberId, message: ToCoordinator) {
        let guest = &self.guests[&id];
        let is_member = guest.member.is_some();
        if is_member {
            self.is_sure(now, id);
        }
        let Some(guest) = self.guests.get_mut(&id) else { return };
        let event = match message {
            ToCoordinator::Ask => {
                guest.until = None;
                return self.orders.push(OfficeOrder::Asked { asker: id });
            }
            ToCoordinator::Enter { host, host_key, pid, job, child, was } if !is_member => {
                if self.is_other_job(id, &job) {
                    return;
                }
                let Some(hold) = self.hold_on(&host_key, pid, child) else {
                    return self.refuse_elsewhere(id);
                };
                let guest = self.guests.get_mut(&id).expect("a guest that spoke");
                (guest.until, guest.member) =
                    (None, Some(Known { host, pid, child, own: OwnShare::default(), hold }));
                self.welcome(id);
                MemberEvent::Entered { watched: child.is_some() && self.children_here, was }
            }
            ToCoordinator::Ready(ready) if is_member => MemberEvent::Ready(ready),
            ToCoordinator::Running { generation } if is_member => MemberEvent::Running { generation },
            ToCoordinator::Note(note) if is_member => return self.coordinator.keep_note(note),
            ToCoordinator::Beat { step, own } if is_member => {
                if let Some(known) = &mut guest.member {
                    known.own = own;
                }
                guest.channel.send(&ToMember::Alive);
                MemberEvent::Beat { step }
            }
            ToCoordinator::Leaves if is_member => MemberEvent::Leaves,
            ToCoordinator::Done { generation } if is_member => MemberEvent::Done { generation },
            ToCoordinator::Enter { .. }
            | ToCoordinator::Return { .. }
            | ToCoordinator::Ready(_)
            | ToCoordinator::Running { .. }
            | ToCoordinator::Note(_)
            | ToCoordinator::Beat { .. }
            | ToCoordinator::Leaves
            | ToCoordinator::Done { .. } => {
                guest.gone = true;
                return;
            }
        };
        let trained = self.coordinator.trains();
        let decisions = self.coordinator.step(now, id, event);
        self.act(decisions);
        self.tell_if_all_train(trained);
    }

    /// Refuses a process of another job. Members of one run compare what they train once more when they form a generation; but there
    /// a difference ends the run, and a process that joins must not be able to do that.
    fn is_other_job(&mut self, id: MemberId, job: &JobMark) -> bool {
        let alone = !self.guests.values().any(|guest| guest.member.is_some() && !guest.gone);
        let known = self.digest.filter(|_| !alone);
        let why = if job.name != self.job {
            format!(
                "this run trains {:?}, and the job file that was given is of {:?}; give it the run's own",
                self.job, job.name
            )
        } else if known.is_some_and(|digest| digest != job.digest) {
            format!(
                "its job {:?} or its data are not those of the run's ranks; give it the run's job file, every `--set` that the \
                 run was started with, and the same data",
                self.job
            )
        } else {
            self.digest = Some(job.digest);
            return false;
        };
        self.say(id, &ToMember::Refused { why });
        true
    }

    /// Refuses a process that cannot share memory with the others.
    fn refuse_elsewhere(&mut self, id: MemberId) {
        let why = "the ranks of this run share memory (`parallel.transport = \"shm\"`), and this process cannot: it is on another host, in \
                   another container, or of another user; start the run with transport = \"auto\" or \"tcp\"";
        self.say(id, &ToMember::Refused { why: why.into() });
    }

    fn welcome(&mut self, id: MemberId) {
        let (patience_ms, runs_on) = (self.patience.as_millis() as u64, self.runs_on);
        let (succession, memory) = (self.succession, self.memory);
        self.say(id, &ToMember::Welcome { id, patience_ms, runs_on, succession, memory });
    }

    /// Tells what changes have cost, if all ranks train and did not before.
    fn tell_if_all_train(&mut self, trained: bool) {
        if !trained && self.coordinator.trains() {
            let (_, ranks) = self.coordinator.generation();
            let tally = ToMember::Tally(self.coordinator.tally.summary());
            ranks.iter().for_each(|id| self.say(*id, &tally));
            let (action, why) = (MemberAction::Trains, Reason::AllRun);
            self.orders.push(OfficeOrder::Decided(Decision { action, why }));
        }
    }

    fn act(&mut self, decisions: Vec<Decision>) {
        for decision in decisions {
            match &decision.action {
                MemberAction::Form { members, forms } => {
                    if let (Some(tenure), Some(form)) = (&self.tenure, forms.first()) {
                        let (generation, ranks) = (form.generation, members.clone());
                        tenure.commit(GenerationRecord { generation, ranks });
                    }
                    for (id, form) in members.iter().zip(forms) {
                        self.direct(*id, ToMember::Form(Box::new(form.clone())));
                    }
                }
                MemberAction::Cancel { generation, members } => {
                    let message = ToMember::Cancel { generation: *generation, why: decision.why.to_string() };
                    members.iter().for_each(|id| self.direct(*id, message.clone()));
                }
                MemberAction::Change { generation, members } => {
                    let message = ToMember::Change { generation: *generation };
                    members.iter().for_each(|id| self.direct(*id, message.clone()));
                }
                MemberAction::Remove { member } => {
                    if let Some(guest) = self.guests.get_mut(member) {
                        guest.gone = true;
                        let child = guest.member.as_ref().and_then(|known| known.child);
                        if let Some(child) = child {
                            self.closed_children.insert(child, *member);
                            self.to_kill.push(child);
                        }
                    }
                    self.keep_process(*member);
                    self.doomed.push(*member);
                }
                MemberAction::Dismiss { member } => {
                    self.direct(*member, ToMember::Refused { why: decision.why.to_string() });
                    if let Some(guest) = self.guests.get_mut(member) {
                        (guest.member, guest.until) = (None, Some(self.system.now() + FIRST_WORD));
                    }
                }
                MemberAction::Release { member } => self.direct(*member, ToMember::End { why: None }),
                MemberAction::End { finished } => {
                    if let Some(tenure) = &mut self.tenure {
                        tenure.is_over();
                    }
                    let why = (!finished).then(|| decision.why.to_string());
                    self.end(why);
                }
                MemberAction::Wait | MemberAction::Trains => {}
            }
            self.orders.push(OfficeOrder::Decided(decision));
        }
    }

    /// Tells a member what to do, in the order of decisions: not before the record of an earlier one is written.
    fn direct(&mut self, id: MemberId, message: ToMember) {
        match self.tenure.as_ref().is_some_and(Tenure::waits) || !self.held_back.is_empty() {
            true => self.held_back.push_back((id, message)),
            false => self.say(id, &message),
        }
    }

    fn say(&mut self, id: MemberId, message: &ToMember) {
        if let Some(guest) = self.guests.get_mut(&id) {
            guest.channel.send(message);
        }
    }
}

/// The hello of both sides: ranks and sizes mean nothing here.
pub(super) fn member_hello(encrypt: Encrypt) -> Hello {
    let (purpose, job, generation, rank, size, peer, group) = (Purpose::Member, 0, 0, 0, 0, 0, 0);
    Hello { purpose, job, generation, rank, size, peer, group, encrypt, here: false, key: [0; 32] }
}
