//! Mailboxes between ranks that joined over real sockets of the loopback interface.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::{Class, ClassBounds, Label, Limits, Mailbox, Payload, PostError, groups};
use super::{label, text};
use crate::report::Cause;
use crate::{Encrypt, First, JoinOptions, Joined, Report, Secret, join};

/// A rank that joined, and its mailbox.
type MailMember = (Joined, Mailbox);

/// Runs ranks as threads; each may have its own limits.
fn ranks<T: Send>(
    size: usize,
    encrypt: Encrypt,
    limits: impl Fn(usize) -> Limits + Sync,
    act: impl Fn(MailMember) -> T + Sync,
) -> Vec<T> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let master = listener.local_addr().unwrap().to_string();
    let mut listener = Some(listener);
    let (limits, act) = (&limits, &act);
    std::thread::scope(|s| {
        let start = |rank| {
            let secret = Secret::from_text(&"5e".repeat(32)).unwrap();
            let mut options = JoinOptions::new(rank, size, &master, secret);
            options.listener = listener.take_if(|_| rank == 0).map(Into::into);
            // Some pairs are connected before they talk, the others when they do.
            options.first = First::Some(Arc::new(|members, me| {
                let peers = (0..members.len()).filter(|&peer| peer.abs_diff(me) == 1);
                peers.flat_map(|peer| groups(0).map(|group| (group, peer))).collect()
            }));
            (options.encrypt, options.generation) = (encrypt, 4);
            s.spawn(move || {
                let joined = join(options).unwrap();
                let mailbox = joined.mailbox(0, &(0..size).collect::<Vec<_>>(), limits(rank)).unwrap();
                act((joined, mailbox))
            })
        };
        let threads: Vec<_> = (0..size).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn leave((joined, mailbox): &MailMember) {
    mailbox.close().unwrap();
    joined.control.goodbye().unwrap();
}

fn bytes(n: u64, class: Class) -> usize {
    match class {
        Class::Urgent => n as usize % 900,
        Class::Data => [0, 1, 70_000, 262_144, 3_000_000][n as usize % 5],
    }
}

#[test]
fn letters_of_every_length_come_in_order_plain_and_sealed() {
    const LETTERS: u64 = 20;
    for (size, encrypt) in [(1, Encrypt::Auto), (3, Encrypt::Auto), (3, Encrypt::Always)] {
        let all = ranks(
            size,
            encrypt,
            |_| Limits::default(),
            |member| {
                let mailbox = &member.1;
                let me = mailbox.rank();
                std::thread::scope(|s| {
                    s.spawn(|| {
                        let mut next = vec![[0; 2]; size];
                        for _ in 0..LETTERS * 2 * size as u64 {
                            let letter = mailbox.take().unwrap().unwrap();
                            let n = &mut next[letter.from][letter.class as usize];
                            let expected = text(letter.from, me, letter.class, *n, bytes(*n, letter.class));
                            assert!(letter.label == label(9, *n) && letter[..] == expected[..]);
                            assert!(*n % 2 == 0 || letter.into_bytes() == expected);
                            *n += 1;
                        }
                    });
                    for n in 0..LETTERS {
                        for (to, class) in (0..size).flat_map(|to| Class::ALL.map(|class| (to, class))) {
                            let text = text(me, to, class, n, bytes(n, class));
                            mailbox.post(to, class, label(9, n), text).unwrap();
                        }
                    }
                });
                leave(&member);
            },
        );
        assert_eq!(all.len(), size);
    }
}

/// Data are not taken, so posts of data wait. Urgent letters still come through, and none is lost.
#[test]
fn data_that_nobody_takes_hold_up_their_sender_and_nothing_urgent() {
    const BYTES: usize = 1 << 20;
    let small =
        ClassBounds { letter_bytes_max: BYTES, inbox_bytes_max: 3 * BYTES, outbox_bytes_max: 3 * BYTES };
    let limits = Limits { data: small, ..Limits::default() };
    let counts = ranks(
        2,
        Encrypt::Auto,
        |_| limits,
        |member| {
            let mailbox = &member.1;
            let soon = || Instant::now() + Duration::from_millis(300);
            let mut n = 0;
            if mailbox.rank() == 0 {
                let payload = Payload::from(Arc::new(vec![7; BYTES]));
                while mailbox.post_until(1, Class::Data, label(1, n), payload.clone(), soon()).is_ok() {
                    n += 1;
                    assert!(mailbox.held_bytes(Class::Data).1 <= small.outbox_bytes_max);
                }
                assert!(mailbox.held_bytes(Class::Data).1 > BYTES, "the outbox is full");
                mailbox.post(1, Class::Urgent, label(2, n), vec![]).unwrap();
            } else {
                let far = Instant::now() + Duration::from_secs(60);
                let urgent = mailbox.take_of(&[Class::Urgent], far).unwrap().unwrap();
                let held = mailbox.held_bytes(Class::Data).0;
                assert!(held > BYTES && held <= small.inbox_bytes_max, "{held} bytes have come");
                while n < urgent.label.ticket {
                    let letter = mailbox.take().unwrap().unwrap();
                    assert!((letter.label, letter.len()) == (label(1, n), BYTES));
                    n += 1;
                }
            }
            leave(&member);
            n
        },
    );
    assert_eq!(counts[0], counts[1]);
}

#[test]
fn a_rank_that_is_lost_ends_all_waits_with_one_report() {
    let reports = ranks(
        3,
        Encrypt::Auto,
        |_| Limits::default(),
        |(joined, mailbox)| {
            if mailbox.rank() == 2 {
                for to in 0..2 {
                    mailbox.post(to, Class::Data, Label::default(), vec![1]).unwrap();
                }
                // Not before both have heard of it: a letter that is under way is lost with its sender.
                joined.control.share(b"heard").unwrap();
                return None;
            }
            assert_eq!(mailbox.take().unwrap().unwrap().from, 2);
            joined.control.share(b"heard").unwrap();
            let report = mailbox.take().unwrap_err();
            let posted = mailbox.post(2, Class::Data, Label::default(), vec![1]);
            assert_eq!(posted, Err(PostError::Lost(report.clone())));
            assert_eq!(mailbox.close(), Err(report.clone()));
            // Rank 0 would take the others with it.
            let _ = joined.control.fail("it has seen enough");
            Some(report)
        },
    );
    let said: Vec<&Report> = reports.iter().flatten().collect();
    assert!(said.len() == 2 && said[0] == said[1], "{said:?}");
    assert_eq!((said[0].rank, &said[0].cause), (2, &Cause::Gone));
}

/// A length is refused before memory is reserved for it, and all ranks name the sender.
#[test]
fn a_letter_that_is_too_long_for_its_receiver_is_reported() {
    let limits = |rank| {
        let letter_bytes_max = if rank == 0 { 2000 } else { 1000 };
        let bounds = ClassBounds { letter_bytes_max, inbox_bytes_max: 5000, outbox_bytes_max: 5000 };
        Limits { urgent: bounds, data: bounds }
    };
    let reports = ranks(2, Encrypt::Always, limits, |(joined, mailbox)| {
        if mailbox.rank() == 0 {
            mailbox.post(1, Class::Urgent, Label::default(), vec![0; 1500]).unwrap();
        }
        let report = mailbox.take().unwrap_err();
        let _ = joined.control.fail("it has seen enough");
        report
    });
    let what = "it sent a letter of 1500 bytes; at most 1000 are allowed".to_string();
    assert!(reports.iter().all(|r| r.rank == 0 && r.cause == Cause::Disagrees { what: what.clone() }));
}

/// From peers that it talked with, and from those that connect later.
#[test]
fn a_rank_that_has_closed_takes_no_letters() {
    ranks(
        3,
        Encrypt::Auto,
        |_| Limits::default(),
        |member| {
            let (joined, mailbox) = &member;
            let post = || mailbox.post(2, Class::Data, Label::default(), vec![5]);
            match mailbox.rank() {
                1 => post().unwrap(),
                2 => {
                    assert_eq!(mailbox.take().unwrap().unwrap()[..], [5]);
                    mailbox.close().unwrap();
                    assert!(mailbox.take().unwrap().is_none());
                }
                // It comes later.
                _ => {}
            }
            joined.control.share(b"closed").unwrap();
            if mailbox.rank() != 2 {
                // A rank learns it with the first letter at the latest.
                let refused = std::iter::repeat_with(post).find_map(Result::err);
                assert_eq!(refused, Some(PostError::Closed { rank: 2 }));
            }
            joined.control.share(b"refused").unwrap();
            leave(&member);
        },
    );
}
