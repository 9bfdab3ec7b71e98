//! A store outside of the run that says who coordinates: what is asked of it.
//!
//! It holds two values for a run. The **post**: where the coordinator listens. It can be taken by one process at a time, and lapses when
//! whoever has it does not renew it. The **record**: the last generation and its ranks. Only who holds the post can write it, in the
//! same transaction that looks whether it still does. So two coordinators never form one generation, whatever each of them believes: the
//! second one's record is refused, and no rank is told of a generation whose record was.
//!
//! The calls wait for the store, within a bound of its own.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use super::message::MemberId;

/// How long a coordinator may take to accept a connection of a process that wants its place.
const ANSWERS: Duration = Duration::from_millis(500);

/// Which version of a value: 0 for none.
pub type Revision = u64;

/// Where the coordinator is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Post {
    /// Where it listens: `host:port`.
    pub at: String,
    /// The member whose process it is in, if it is one's.
    pub member: Option<MemberId>,
}

/// The last generation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GenerationRecord {
    /// Its number.
    pub generation: u64,
    /// Its members, by rank.
    pub ranks: Vec<MemberId>,
}

/// What holds the post.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Term {
    /// The post as it was taken: another revision is another's.
    pub revision: Revision,
    /// What is renewed.
    pub lease: i64,
    /// The last generation when it was taken.
    pub record: Option<GenerationRecord>,
}

/// Whether a run that the store knows goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Begins {
    /// A new run: what is recorded is of an earlier one, and is deleted.
    New,
    /// The one that is recorded, if one is.
    GoesOn,
}

/// A store. An error says that it could not be asked, or that its answer did not come: it may have done it.
pub trait MemberStore: Send + Sync {
    /// The post, if somebody has it.
    fn look(&self) -> io::Result<Option<(Post, Revision)>>;

    /// Takes the post, if its revision is still `over`; nothing if it is not.
    fn claim(&self, post: &Post, over: Revision, begins: Begins) -> io::Result<Option<Term>>;

    /// Keeps the post; whether it is still held.
    fn renew(&self, term: &Term) -> io::Result<bool>;

    /// Writes the record; whether the post is still held, without which nothing is written.
    fn commit(&self, term: &Term, record: &GenerationRecord) -> io::Result<bool>;

    /// Gives the post up; with `over`, deletes the record too.
    fn resign(&self, term: &Term, over: bool) -> io::Result<()>;

    /// How long the post is held without being renewed.
    fn lapses_after(&self) -> Duration;
}

/// Where members find the coordinator.
#[derive(Clone)]
pub enum CoordinatorPlace {
    /// There, always: `host:port`.
    At(String),
    /// Where the store says.
    InStore(Arc<dyn MemberStore>),
}

impl CoordinatorPlace {
    /// Its addresses now.
    pub(super) fn addresses(&self) -> io::Result<Vec<SocketAddr>> {
        match self {
            CoordinatorPlace::At(at) => Ok(at.to_socket_addrs()?.collect()),
            CoordinatorPlace::InStore(store) => match store.look()? {
                Some((post, _)) => Ok(post.at.to_socket_addrs()?.collect()),
                None => Err(io::Error::other("the store names none")),
            },
        }
    }

    /// In words, for errors.
    pub(super) fn name(&self) -> String {
        match self {
            CoordinatorPlace::At(at) => at.clone(),
            CoordinatorPlace::InStore(_) => "the address in `parallel.elastic.store`".into(),
        }
    }
}

/// Why a post cannot be taken now.
#[derive(Debug)]
pub enum Taken {
    /// Its coordinator answers.
    Lives(Post),
    /// It does not answer and may be alive behind a cut network: its post has not lapsed yet.
    NotLapsed(Post),
    /// Another process was faster.
    Lost,
}

/// Takes the post for whoever listens at `listener`, if nobody has it or the system at its address says that nothing listens there
/// any more. `Ok` with the term, and who had it.
pub fn take_post(
    store: &dyn MemberStore,
    listener: &TcpListener,
    member: Option<MemberId>,
    begins: Begins,
) -> io::Result<Result<(Term, Option<Post>), Taken>> {
    let (before, over) = match store.look()? {
        None => (None, 0),
        Some((post, revision)) => {
            match answers(&post.at) {
                Some(true) => return Ok(Err(Taken::Lives(post))),
                None => return Ok(Err(Taken::NotLapsed(post))),
                Some(false) => {}
            }
            (Some(post), revision)
        }
    };
    let post = Post { at: listener.local_addr()?.to_string(), member };
    let term = store.claim(&post, over, begins)?;
    Ok(term.map(|term| (term, before)).ok_or(Taken::Lost))
}

/// Whether something listens there, if that is known.
fn answers(at: &str) -> Option<bool> {
    let addrs: Vec<SocketAddr> = at.to_socket_addrs().ok()?.collect();
    let mut refused = None;
    for addr in addrs {
        match TcpStream::connect_timeout(&addr, ANSWERS) {
            Ok(_) => return Some(true),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => refused = Some(false),
            Err(_) => return None,
        }
    }
    refused
}
