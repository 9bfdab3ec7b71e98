//! Where the coordinator of an elastic run is, and how the first one takes its post in a store.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use polyreme_net::members::store::{Begins, MemberStore, Post, Taken, take_post};
use polyreme_net::members::{CoordinatorPlace, Tenure};
use polyreme_train::job::StoreAddress;

use super::etcd::Etcd;
use crate::output;

/// How often a post is tried to be taken.
const PAUSE: Duration = Duration::from_millis(200);
/// How much longer than a post holds without being renewed it is waited for.
const MARGIN: Duration = Duration::from_secs(5);

/// The store at an address.
pub fn store(address: &StoreAddress, patience: Duration) -> Arc<dyn MemberStore> {
    Arc::new(Etcd::new(address, patience))
}

/// Where a command's argument says that the coordinator is: `HOST:PORT`, or a store.
pub fn place(text: &str, patience: Duration) -> Result<CoordinatorPlace, String> {
    match StoreAddress::is_meant(text) {
        true => {
            let address: StoreAddress = text.parse().map_err(|why| format!("{text} {why}"))?;
            Ok(CoordinatorPlace::InStore(store(&address, patience)))
        }
        false => Ok(CoordinatorPlace::At(text.into())),
    }
}

/// Takes the post of a coordinator that listens there and is not one of its ranks. One that was lost is waited for until its post has
/// lapsed.
pub fn take(
    address: &StoreAddress,
    patience: Duration,
    listener: &TcpListener,
    begins: Begins,
) -> Result<Tenure, String> {
    let store = store(address, patience);
    let until = Instant::now() + store.lapses_after() + MARGIN;
    let mut told = false;
    loop {
        let why = match take_post(&*store, listener, None, begins) {
            Ok(Ok((term, _))) => {
                let at = listener.local_addr().map_err(|e| e.to_string())?.to_string();
                return Tenure::hold(store, Post { at, member: None }, term).map_err(|e| e.to_string());
            }
            Ok(Err(Taken::Lives(post))) => {
                return Err(format!(
                    "a run of {address} is coordinated at {} already; join it with `polyreme join {address} JOB.toml`, or \
                     choose another prefix for another run",
                    post.at
                ));
            }
            Ok(Err(Taken::NotLapsed(post))) => format!("the coordinator at {} may be alive still", post.at),
            Ok(Err(Taken::Lost)) => "another process was faster".into(),
            Err(error) => error.to_string(),
        };
        if Instant::now() + PAUSE > until {
            return Err(format!("{address} cannot be taken: {why}"));
        }
        if !std::mem::replace(&mut told, true) {
            output::err().line(&format!("waiting: {why}"));
        }
        std::thread::sleep(PAUSE);
    }
}
