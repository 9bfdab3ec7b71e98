//! Mailboxes of a group: letters between any two of its ranks, in any order, whatever carries the group's collectives.
//!
//! [`Comm::mailbox`] is the one way to get a [`Mailbox`], and it hides which of three ways is taken:
//!
//! - ranks that are threads of one process have a queue each. The first one makes all of them and leaves them for the others;
//! - ranks that joined by a rendezvous of `net` ([`Comm::set_joined`]) have TCP connections under the job's secret and its
//!   control plane, also if memory carries their collectives;
//! - all others, which are those of MPI, have such a rendezvous only from their first mailbox on. They agree on it by
//!   an operation of the group: rank 0 listens, draws a secret from the system's random source and broadcasts both, and all
//!   join. That takes one broadcast of `INVITATION_BYTES` and a connection of each rank to rank 0. No other process
//!   knows the secret, so none can join.
//!
//! # When a rank dies
//! The control plane of the rendezvous sees it, and ends all waits at mailboxes with the same report. Under MPI that control plane
//! is beside MPI's launcher, which mostly ends the whole job first. A rank that cannot listen, or does not reach rank 0, fails its
//! group, so no rank waits for it.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

pub use polyreme_net::mailbox::{Class, Label, Letter, Limits, Mailbox};
use polyreme_net::mailbox::{MAILBOXES_MAX, among};
use polyreme_net::{Alarm, Encrypt, First, JoinOptions, Joined, Patience, Report, Secret, join};

use crate::comm::Comm;
use crate::element::Reduce;

/// Room for rank 0's address and the secret, as text.
const INVITATION_BYTES: usize = 160;

/// What reports call the making of a mailbox.
const OP: &str = "mailbox";

/// How ranks reach each other over TCP whose collectives MPI carries.
#[derive(Clone)]
pub struct TcpOptions {
    /// The address that a rank listens on; none for the one that reaches rank 0, which itself must have one. An error says
    /// what to do.
    pub bind: Arc<Bind>,
    /// Whether connections are encrypted; the same on all ranks.
    pub encrypt: Encrypt,
    /// How long ranks wait for each other; rank 0's is that of all.
    pub patience: Patience,
    /// Says who shares a host with whom, instead of what the kernel says.
    pub host_key: Option<String>,
}

/// The address that a rank listens on.
pub type Bind = dyn Fn(usize) -> Result<Option<IpAddr>, String> + Send + Sync;

impl Default for TcpOptions {
    /// For ranks of one host.
    fn default() -> TcpOptions {
        let bind = Arc::new(|_| Ok(Some(Ipv4Addr::LOCALHOST.into())));
        TcpOptions { bind, encrypt: Encrypt::Auto, patience: Patience::default(), host_key: None }
    }
}

impl fmt::Debug for TcpOptions {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "TcpOptions {{ encrypt: {}, patience: {:?}, .. }}", self.encrypt, self.patience)
    }
}

/// What a group knows of mailboxes; all groups of a rank have the same rendezvous and count mailboxes together.
#[derive(Clone, Default)]
pub(crate) struct Office {
    /// Whether this group was split from another one.
    split: bool,
    options: TcpOptions,
    rendezvous: Arc<OnceLock<Rendezvous>>,
    /// How many mailboxes were made.
    made: Arc<AtomicU64>,
}

/// Where the ranks of the job have met.
enum Rendezvous {
    /// Before the group was made. Who made it says goodbye to its control plane.
    Given(Arc<Joined>),
    /// For the group's first mailbox.
    Made(Arc<Joined>),
}

impl Office {
    /// That of a group which is split from this one.
    pub(crate) fn of_split(&self) -> Office {
        Office { split: true, ..self.clone() }
    }

    fn joined(&self) -> Option<Arc<Joined>> {
        match self.rendezvous.get()? {
            Rendezvous::Given(joined) | Rendezvous::Made(joined) => Some(joined.clone()),
        }
    }
}

impl Comm {
    /// A mailbox of this group, which counts its ranks as the group does. All ranks of the group call it at the same time with the same
    /// limits. Its reports name ranks as the whole job does. Close it before [`Comm::finish`].
    ///
    /// Ranks under MPI meet over TCP with the first mailbox of the group of all, so groups that were split from that one have
    /// theirs after it.
    pub fn mailbox(&mut self, limits: Limits) -> Result<Mailbox, Report> {
        let names = self.ways.names.clone();
        if let [_] = names[..] {
            let alone = among(&names, limits, Alarm::default());
            return Ok(alone.into_iter().next().expect("a group of one has a member"));
        }
        let number = self.next_mailbox()?;
        if let Some(lobby) = self.ways.lobby() {
            if self.rank() == 0 {
                lobby.mailboxes.leave((number, names[0]), among(&names, limits, lobby.alarm.clone()));
            }
            self.barrier()?;
            return Ok(lobby.mailboxes.take((number, names[0]), self.rank()));
        }
        let joined = self.met()?;
        let number = u8::try_from(number - 1).ok().filter(|number| *number < MAILBOXES_MAX);
        let number = number.ok_or_else(|| {
            self.failed(OP, &format!("no more mailboxes can be made: a job has {MAILBOXES_MAX} of them"))
        })?;
        joined.mailbox(number, &names, limits).map_err(|error| {
            self.failed(OP, &format!("a mailbox cannot be made: {error}; raise the limit of open files"))
        })
    }

    /// Says where the job's ranks have met. Groups of some of them, messages and mailboxes are connected there.
    pub fn set_joined(&mut self, joined: Joined) {
        let joined = Arc::new(joined);
        // Only the first rendezvous of a job counts, and there is no other.
        let _ = self.ways.office.rendezvous.set(Rendezvous::Given(joined.clone()));
        self.set_connect(Arc::new(move |group, ranks| joined.links(group, ranks)));
    }

    /// Says how ranks meet over TCP that have not done so before: those of MPI.
    pub fn set_tcp(&mut self, options: TcpOptions) {
        self.ways.office.options = options;
    }

    /// Leaves the rendezvous that this group made, if it did; the others do not miss this rank there any more.
    pub(crate) fn leave_rendezvous(&self) -> Result<(), Report> {
        match self.ways.office.rendezvous.get() {
            Some(Rendezvous::Made(joined)) if !self.ways.office.split => joined.control.goodbye(),
            Some(_) | None => Ok(()),
        }
    }

    /// A number that no rank of this group has a mailbox of.
    fn next_mailbox(&mut self) -> Result<u64, Report> {
        let made = self.ways.office.made.clone();
        let mut next = [made.load(Ordering::SeqCst) as i64 + 1];
        self.all_reduce(&mut next, Reduce::Max)?;
        // Ranks that are threads count together, and one of them may be in another group's next mailbox already.
        made.fetch_max(next[0] as u64, Ordering::SeqCst);
        Ok(next[0] as u64)
    }

    /// Where the ranks of the job have met, or meet now.
    fn met(&mut self) -> Result<Arc<Joined>, Report> {
        if let Some(joined) = self.ways.office.joined() {
            return Ok(joined);
        }
        if self.ways.office.split {
            let why = "the ranks have not met over TCP; make a mailbox of the group of all ranks first";
            return Err(self.failed(OP, why));
        }
        let invitation = self.invite()?;
        let joined = Arc::new(join(invitation).map_err(|error| self.failed(OP, &error.to_string()))?);
        // From now on its control plane knows how this rank gets on.
        self.tell(&joined.control);
        let _ = self.ways.office.rendezvous.set(Rendezvous::Made(joined.clone()));
        Ok(joined)
    }

    /// All ranks learn where rank 0 listens, and a new secret: what each needs to join.
    fn invite(&mut self) -> Result<JoinOptions, Report> {
        let (rank, size, options) = (self.rank(), self.size(), self.ways.office.options.clone());
        let bind = (options.bind)(rank).map_err(|why| self.failed(OP, &why))?;
        let mut told = [0u8; INVITATION_BYTES];
        let mut listener = None;
        if rank == 0 {
            let (listens, secret) = opened(bind).map_err(|why| self.failed(OP, &why))?;
            let text = format!("{} {}", listens.0, secret.to_hex());
            told[..text.len()].copy_from_slice(text.as_bytes());
            listener = Some(listens.1.into());
        }
        self.broadcast(&mut told, 0)?;
        let text = String::from_utf8_lossy(&told);
        let (master, secret) = text.trim_end_matches('\0').split_once(' ').unwrap_or_default();
        let secret = Secret::from_text(secret).map_err(|error| self.failed(OP, &error.to_string()))?;
        let TcpOptions { encrypt, patience, host_key, .. } = options;
        let told = JoinOptions::new(rank, size, master, secret);
        // Pairs are connected when they first talk.
        Ok(JoinOptions { bind, listener, encrypt, patience, host_key, first: First::NoPairs, ..told })
    }
}

/// A listener with its address, and the secret of the ranks that may connect to it.
fn opened(bind: Option<IpAddr>) -> Result<((String, TcpListener), Secret), String> {
    let bind = bind.ok_or("rank 0 has no address to listen on; name one with --interface")?;
    let listening = TcpListener::bind((bind, 0)).and_then(|l| Ok((l.local_addr()?.to_string(), l)));
    let listening = listening
        .map_err(|error| format!("rank 0 cannot listen on {bind}: {error}; name another --interface"))?;
    let secret = Secret::random().map_err(|error| error.to_string())?;
    Ok((listening, secret))
}

#[cfg(test)]
mod tests {
    use polyreme_net::{JoinError, Links, loopback};

    use super::*;

    /// Ranks that only send each other bytes, as those of MPI: they have met nowhere.
    fn on_ranks<T: Send>(size: usize, act: impl Fn(Comm) -> T + Sync) -> Vec<T> {
        let act = &act;
        let rows = loopback::streams(size).unwrap().into_iter().enumerate();
        std::thread::scope(|scope| {
            let rank = |(rank, row)| {
                let hosts = vec!["localhost".to_string(); size];
                let links = Links::over(rank, hosts, row, 0, Alarm::default()).unwrap();
                scope.spawn(move || act(Comm::tcp(links).unwrap()))
            };
            let ranks: Vec<_> = rows.map(rank).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    /// Another process sees where rank 0 listens. It knows which ranks there are, and not the secret.
    #[test]
    fn who_does_not_know_the_secret_is_refused() {
        let secrets = on_ranks(3, |mut comm| {
            let invitation = comm.invite().unwrap();
            let secret = invitation.secret.to_hex();
            if comm.rank() == 1 {
                let wrong = Secret::random().unwrap();
                let stranger = JoinOptions::new(1, 3, invitation.master.clone(), wrong);
                let refused = join(stranger).map(drop);
                assert!(matches!(refused, Err(JoinError::WrongSecret { rank: 1, .. })), "{refused:?}");
            }
            // All the same the ranks themselves meet.
            let joined = join(invitation).unwrap();
            joined.control.goodbye().unwrap();
            comm.finish().unwrap();
            secret
        });
        assert!(secrets.iter().all(|secret| *secret == secrets[0]), "all have rank 0's");
        let again = on_ranks(2, |mut comm| comm.invite().unwrap().secret.to_hex());
        assert_ne!(again[0], secrets[0], "a secret is used once");
    }

    /// Rank 0 cannot listen: all ranks learn why, and none waits.
    #[test]
    fn an_address_of_another_host_ends_all_waits() {
        let said = on_ranks(3, |mut comm| {
            let bind = Arc::new(|_| Ok(Some([192, 0, 2, 7].into())));
            comm.set_tcp(TcpOptions { bind, ..TcpOptions::default() });
            comm.mailbox(Limits::default()).unwrap_err().to_string()
        });
        for what in said {
            assert!(what.contains("rank 0 cannot listen on 192.0.2.7"), "{what}");
            assert!(what.contains("name another --interface"), "{what}");
        }
    }

    /// Before all ranks have met, a group of some does not reach them as the job calls them.
    #[test]
    fn groups_that_were_split_have_mailboxes_after_that_of_all() {
        let said = on_ranks(2, |mut comm| {
            comm.ways.office = comm.ways.office.of_split();
            comm.mailbox(Limits::default()).unwrap_err().to_string()
        });
        for early in said {
            assert!(early.contains("make a mailbox of the group of all ranks first"), "{early}");
        }
    }
}
