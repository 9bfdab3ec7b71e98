//! Posts and records in a store: who may write, what happens while it cannot be reached, and that ranks are told of a generation only when it
//! is recorded. The store is one in memory that can be made unreachable; etcd is tested through the binary.

use std::io;
use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::super::message::{JobMark, MemoryUse, Ready};
use super::super::store::{
    Begins, CoordinatorPlace, GenerationRecord, MemberStore, Post, Revision, Taken, Term, take_post,
};
use super::super::tenure::Tenure;
use super::super::{Apart, EnterOptions, Membership, Office, OfficeOptions, Rules, Wish};
use crate::rendezvous::Tell;
use crate::seal::Encrypt;
use crate::secret::Secret;
use crate::system::Os;

const LIMIT: Duration = Duration::from_secs(30);

#[derive(Default)]
struct StoredKeys {
    post: Option<(Post, Revision)>,
    record: Option<GenerationRecord>,
    last: Revision,
    /// Every record that was written.
    history: Vec<u64>,
}

#[derive(Default)]
struct InMemory {
    kept: Mutex<StoredKeys>,
    unreachable: AtomicBool,
}

impl InMemory {
    fn reach(&self) -> io::Result<std::sync::MutexGuard<'_, StoredKeys>> {
        match self.unreachable.load(Ordering::Acquire) {
            true => Err(io::Error::other("unreachable")),
            false => Ok(self.kept.lock().unwrap()),
        }
    }

    fn holds(kept: &StoredKeys, term: &Term) -> bool {
        kept.post.as_ref().is_some_and(|(_, revision)| *revision == term.revision)
    }
}

impl MemberStore for InMemory {
    fn look(&self) -> io::Result<Option<(Post, Revision)>> {
        Ok(self.reach()?.post.clone())
    }

    fn claim(&self, post: &Post, over: Revision, begins: Begins) -> io::Result<Option<Term>> {
        let mut kept = self.reach()?;
        if kept.post.as_ref().map_or(0, |(_, revision)| *revision) != over {
            return Ok(None);
        }
        if begins == Begins::New {
            kept.record = None;
        }
        kept.last += 1;
        let revision = kept.last;
        kept.post = Some((post.clone(), revision));
        Ok(Some(Term { revision, lease: 0, record: kept.record.clone() }))
    }

    fn renew(&self, term: &Term) -> io::Result<bool> {
        Ok(InMemory::holds(&*self.reach()?, term))
    }

    fn commit(&self, term: &Term, record: &GenerationRecord) -> io::Result<bool> {
        let mut kept = self.reach()?;
        let holds = InMemory::holds(&kept, term);
        if holds {
            kept.history.push(record.generation);
            kept.record = Some(record.clone());
        }
        Ok(holds)
    }

    fn resign(&self, term: &Term, over: bool) -> io::Result<()> {
        let mut kept = self.reach()?;
        if InMemory::holds(&kept, term) {
            kept.post = None;
            kept.record = kept.record.take().filter(|_| !over);
        }
        Ok(())
    }

    fn lapses_after(&self) -> Duration {
        Duration::from_millis(200)
    }
}

fn record(generation: u64) -> GenerationRecord {
    GenerationRecord { generation, ranks: vec![1, 2] }
}

fn until(what: &str, done: impl Fn() -> bool) {
    let since = Instant::now();
    while !done() {
        assert!(since.elapsed() < LIMIT, "{what}");
        std::thread::yield_now();
    }
}

/// A coordinator with its post.
fn tenure(store: &Arc<InMemory>, listener: &TcpListener, begins: Begins) -> Result<Tenure, Taken> {
    let (term, _) = take_post(&**store, listener, None, begins).unwrap()?;
    let post = Post { at: listener.local_addr().unwrap().to_string(), member: None };
    Ok(Tenure::hold(store.clone(), post, term).unwrap())
}

#[test]
fn a_coordinator_that_lost_its_post_records_no_generation() {
    let store = Arc::new(InMemory::default());
    let (first, second) =
        (TcpListener::bind("127.0.0.1:0").unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
    let old = tenure(&store, &first, Begins::New).unwrap();
    old.commit(record(1));
    until("it is recorded", || !old.waits());
    // As long as something listens at its address, nobody else gets the post.
    assert!(matches!(tenure(&store, &second, Begins::GoesOn), Err(Taken::Lives(_))));
    // Nothing listens there: its process is gone, as far as anybody can tell. It is not, and decides something.
    drop(first);
    let new = tenure(&store, &second, Begins::GoesOn).unwrap();
    assert_eq!(new.record(), Some(&record(1)));
    old.commit(record(2));
    until("it learns that its post is another's", || old.check().is_err());
    assert!(old.waits(), "its record is not written");
    new.commit(GenerationRecord { generation: 2, ranks: vec![2] });
    until("the other one's is", || !new.waits());
    assert_eq!(store.kept.lock().unwrap().history, [1, 2]);
    assert_eq!(store.kept.lock().unwrap().record.as_ref().unwrap().ranks, [2]);
    // What ends without its post takes nobody else's away.
    drop(old);
    assert!(new.check().is_ok() && store.look().unwrap().is_some());
    drop(new);
    assert!(store.look().unwrap().is_none() && store.kept.lock().unwrap().record.is_some());
}

#[test]
fn while_the_store_is_away_a_coordinator_stays_and_decides_nothing() {
    let store = Arc::new(InMemory::default());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut tenure = tenure(&store, &listener, Begins::New).unwrap();
    tenure.commit(record(1));
    until("it is recorded", || !tenure.waits());
    store.unreachable.store(true, Ordering::Release);
    tenure.commit(record(2));
    // Its post lapses meanwhile, and nobody else takes it.
    store.kept.lock().unwrap().post = None;
    assert!(tenure.waits() && tenure.check().is_ok());
    store.unreachable.store(false, Ordering::Release);
    until("it has its post again, and the record is written", || !tenure.waits());
    assert!(tenure.check().is_ok());
    assert_eq!(store.kept.lock().unwrap().history, [1, 2]);
    // The end of a run leaves nothing.
    tenure.is_over();
    drop(tenure);
    assert!(store.look().unwrap().is_none() && store.kept.lock().unwrap().record.is_none());
}

/// Real sockets: two members stand ready while the store is away. When they are told to form a generation, it is recorded.
#[test]
fn ranks_are_told_of_a_generation_when_it_is_recorded() {
    let store = Arc::new(InMemory::default());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let held = tenure(&store, &listener, Begins::New).unwrap();
    let secret = Secret::random().unwrap();
    let (patience, hold_off) = (Duration::from_secs(20), Duration::ZERO);
    let mut office = Office::open(OfficeOptions {
        listener: listener.into(),
        secret: secret.clone(),
        job: "job".into(),
        rules: Rules {
            min: 1,
            max: 4,
            start: 2,
            patience,
            hold_off,
            exclusive: true,
            memory: MemoryUse::Never,
        },
        first: 1,
        note: Vec::new(),
        encrypt: Encrypt::Auto,
        host_key: String::new(),
        children_here: true,
        runs_on: None,
        ended: None,
        succession: true,
        tenure: Some(held),
        tell: Tell::to(|line| eprintln!("{line}")),
        system: Arc::new(Os),
    })
    .unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (over, place) = (&over, CoordinatorPlace::InStore(store.clone()));
        scope.spawn(move || {
            while !over.load(Ordering::Acquire) {
                office.turn(Instant::now() + Duration::from_millis(5)).unwrap();
            }
        });
        let job = JobMark { name: "job".into(), digest: 7 };
        let (encrypt, host_key, succeed) = (Encrypt::Auto, String::new(), None);
        let enter = EnterOptions { coordinator: place, secret, job, child: None, encrypt, host_key, succeed };
        let members: Vec<Membership> = (0..2).map(|_| Membership::enter(&enter).unwrap()).collect();
        store.unreachable.store(true, Ordering::Release);
        let ready = Ready {
            generation: 0,
            held: None,
            redoes: false,
            listen: "127.0.0.1:9".into(),
            why: String::new(),
        };
        let told: Vec<_> = members
            .into_iter()
            .map(|member| {
                let (ready, store) = (ready.clone(), &store);
                scope.spawn(move || {
                    let apart = member.ready(ready, &|| Wish::Nothing).unwrap();
                    let Apart::Form(form) = apart else { panic!("{apart:?}") };
                    let kept = store.kept.lock().unwrap();
                    let recorded = kept.record.as_ref().expect("it is recorded");
                    assert_eq!((recorded.generation, &recorded.ranks), (form.generation, &form.ranks));
                })
            })
            .collect();
        store.unreachable.store(false, Ordering::Release);
        let panicked = told.into_iter().any(|thread| thread.join().is_err());
        over.store(true, Ordering::Release);
        assert!(!panicked);
    });
}
