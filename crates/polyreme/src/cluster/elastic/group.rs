//! From a generation that a rank is told to form to a group that can talk. Joining can be cancelled: another rank may be lost meanwhile.

use std::net::{IpAddr, TcpListener};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use polyreme_collective::Comm;
use polyreme_collective::links::peers;
use polyreme_net::members::Formation;
use polyreme_net::{Encrypt, First, JoinOptions, Patience, Secret, Tell, join as meet};

use super::super::Transport;
use super::super::join::{ALL_RANKS, JoinFailure, JoinedRank, over_memory, over_sockets};
use crate::output;

/// How long ranks may take to connect before the generation is given up. They are all running already.
const CONNECT: Duration = Duration::from_secs(20);
/// How often a cancel is looked for.
const GLANCE: Duration = Duration::from_millis(5);

/// What a rank needs to join groups.
pub struct GroupOptions {
    /// The job's secret.
    pub secret: Secret,
    /// The job.
    pub job: String,
    /// The address that others reach this host at.
    pub local: IpAddr,
    /// How long ranks wait for each other.
    pub patience: Patience,
    /// Whether connections are encrypted.
    pub encrypt: Encrypt,
}

/// Joins the ranks of a generation; `listener` is for rank 0. Ends with the reason if that fails or is cancelled.
pub fn form_group(
    form: &Formation,
    listener: TcpListener,
    options: &GroupOptions,
    cancelled: &dyn Fn() -> bool,
) -> Result<JoinedRank, String> {
    let (rank, size) = (form.rank, form.held.len());
    if size == 1 {
        return Ok(JoinedRank { comm: Comm::alone(), control: None, transport: Transport::Local });
    }
    let memory = form.memory;
    let join = JoinOptions {
        bind: Some(options.local),
        listener: (rank == 0).then(|| listener.into()),
        job: format!("{} elastic", options.job),
        generation: form.generation,
        timeout: CONNECT,
        patience: options.patience,
        first: match memory {
            true => First::NoPairs,
            false => First::Some(Arc::new(|members, rank| {
                peers(rank, members.len()).into_iter().map(|peer| (ALL_RANKS, peer)).collect()
            })),
        },
        encrypt: options.encrypt,
        tell: Tell::to(|line| output::err().line(&format!("warning: {line}"))),
        ..JoinOptions::new(rank, size, form.master.clone(), options.secret.clone())
    };
    let (tell, told) = channel();
    let connect = move || {
        let joined = meet(join).map_err(JoinFailure::Join)?;
        if memory { over_memory(joined) } else { over_sockets(joined) }
    };
    // A thread of its own, which is left behind if the generation is cancelled: it ends by itself.
    let body = move || drop(tell.send(connect()));
    std::thread::Builder::new().name("joining".into()).spawn(body).map_err(|e| e.to_string())?;
    loop {
        match told.recv_timeout(GLANCE) {
            Ok(joined) => return joined.map_err(|e| e.to_string()),
            Err(RecvTimeoutError::Timeout) if cancelled() => return Err("it was cancelled".into()),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err("joining ended without a result".into()),
        }
    }
}
