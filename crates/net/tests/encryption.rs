//! Ranks with encrypted connections, ranks with another setting, and proxies that change what is sent.

#![allow(clippy::unwrap_used, reason = "a test says by it what must hold")]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use polyreme_net::{Cause, Encrypt, JoinError, JoinOptions, Joined, Secret, Tell, join};

/// Upper bound of a wait; nothing here takes that long.
const LIMIT: Duration = Duration::from_secs(60);

fn listener() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    (listener, addr)
}

/// Rank 0 and rank 1, each with what it wants; rank 1 goes to `reached` to find rank 0.
fn two(
    listener: TcpListener,
    reached: &str,
    secret: &Secret,
    wants: [Encrypt; 2],
) -> [Result<Joined, JoinError>; 2] {
    let mut listener = Some(listener);
    let threads = [0, 1].map(|rank| {
        let mut options = JoinOptions::new(rank, 2, reached, secret.clone());
        options.encrypt = wants[rank];
        options.timeout = LIMIT;
        options.listener = listener.take().map(Into::into);
        thread::spawn(move || join(options))
    });
    threads.map(|thread| thread.join().unwrap())
}

#[test]
fn on_one_host_only_who_asks_for_it_is_encrypted() {
    let secret = Secret::random().unwrap();
    for (want, encrypted) in [(Encrypt::Auto, false), (Encrypt::Never, false), (Encrypt::Always, true)] {
        let (listener, addr) = listener();
        let ranks = two(listener, &addr, &secret, [want; 2]).map(Result::unwrap);
        for me in &ranks {
            let streams = me.streams().unwrap();
            let connection = streams[1 - me.rank].as_ref().unwrap();
            assert_eq!(connection.is_encrypted(), encrypted, "{want} at rank {}", me.rank);
        }
        let threads = ranks.map(|me| {
            thread::spawn(move || {
                assert_eq!(me.control.share(&[me.rank as u8]).unwrap(), [[0], [1]]);
                me.control.goodbye().unwrap();
            })
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}

/// Both learn at once what the other one wants; neither waits for a rank that will not come.
#[test]
fn ranks_that_want_different_encryption_are_told_so() {
    let secret = Secret::random().unwrap();
    let (listener, addr) = listener();
    let begun = Instant::now();
    for said in two(listener, &addr, &secret, [Encrypt::Auto, Encrypt::Never]) {
        let said = said.unwrap_err().to_string();
        let expected =
            "rank 1 has parallel.encrypt = false and rank 0 has \"auto\": give every rank the same";
        assert!(said.contains(expected), "{said}");
    }
    assert!(begun.elapsed() < LIMIT / 2);
}

/// Carries bytes from one socket to another, and changes one of them once `armed`.
fn carry(mut from: TcpStream, mut to: TcpStream, armed: Arc<AtomicBool>) {
    let mut buffer = [0; 4096];
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        if armed.swap(false, Ordering::SeqCst) {
            buffer[n / 2] ^= 0x20;
        }
        if to.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    // The other direction may go on.
    let _ = to.shutdown(Shutdown::Write);
}

/// A proxy is between rank 1 and rank 0, and flips one bit of what rank 1 says once both run.
#[test]
fn a_changed_byte_on_the_control_connection_ends_the_run_with_a_report() {
    let secret = Secret::random().unwrap();
    let ((listener, addr), (proxy, reached)) = (listener(), listener());
    let armed = Arc::new(AtomicBool::new(false));
    let up = armed.clone();
    thread::spawn(move || {
        let (near, _) = proxy.accept().unwrap();
        let far = TcpStream::connect(addr).unwrap();
        let back = (far.try_clone().unwrap(), near.try_clone().unwrap());
        thread::spawn(move || carry(back.0, back.1, Arc::default()));
        carry(near, far, up);
    });
    let ranks = two(listener, &reached, &secret, [Encrypt::Always; 2]).map(Result::unwrap);
    armed.store(true, Ordering::SeqCst);
    let begun = Instant::now();
    let reports = ranks.each_ref().map(|me| {
        loop {
            if let Some(report) = me.control.alarm().raised() {
                return report;
            }
            assert!(begun.elapsed() < LIMIT, "rank {} did not notice", me.rank);
            thread::yield_now();
        }
    });
    assert_eq!(reports[0], reports[1]);
    assert!(reports[0].rank == 1 && matches!(reports[0].cause, Cause::Damaged { .. }), "{}", reports[0]);
    assert!(reports[0].to_string().contains("failed authentication"), "{}", reports[0]);
}

/// Lines that a rank says to its user.
fn told() -> (Tell, Receiver<String>) {
    let (send, lines) = channel();
    let send = Mutex::new(send);
    (Tell::to(move |line| drop(send.lock().unwrap().send(line.to_string()))), lines)
}

/// While rank 0 waits it reports a rank with another secret; the right one may come later.
#[test]
fn rank_0_says_at_once_that_somebody_with_another_secret_knocked() {
    let secret = Secret::random().unwrap();
    let (listener, addr) = listener();
    let (tell, lines) = told();
    let mut options = JoinOptions::new(0, 2, &addr, secret.clone());
    (options.listener, options.tell, options.timeout) = (Some(listener.into()), tell, LIMIT);
    let zero = thread::spawn(move || join(options).unwrap().control.goodbye());
    let knock = join(JoinOptions::new(1, 2, &addr, Secret::random().unwrap()));
    assert!(matches!(knock, Err(JoinError::WrongSecret { rank: 1, .. })), "{knock:?}");
    let line = lines.recv_timeout(LIMIT).unwrap();
    assert!(line.contains("turned away 127.0.0.1:") && line.contains("as rank 1: wrong secret"), "{line}");
    join(JoinOptions::new(1, 2, &addr, secret)).unwrap().control.goodbye().unwrap();
    zero.join().unwrap().unwrap();
    assert!(lines.try_recv().is_err(), "one knock, one line");
}
