//! Links between threads, and peers that do not play by the rules.

use std::io::Write;
use std::thread;

use super::*;
use crate::moves::Move;

const TAG: Tag = Tag { step: 5, op: Op::AllReduce, dtype: 0, count: 100_000 };

fn add(into: &mut [u8], arrived: &[u8], _: bool) {
    into.iter_mut().zip(arrived).for_each(|(a, b)| *a = a.wrapping_add(*b));
}

/// Two ranks send each other everything and add it up: the bytes that are sent are also those that are reduced, and they
/// are more than the sockets hold.
#[test]
fn sending_and_reducing_the_same_bytes_does_not_lock_up() {
    for bytes in [0, 1, 1000, 300_001, 16 << 20] {
        let ranks: Vec<_> = loopback::links(2)
            .unwrap()
            .into_iter()
            .enumerate()
            .map(|(rank, mut links)| {
                thread::spawn(move || {
                    let moves = Moves::new(vec![
                        Move::send(1 - rank, 0..bytes),
                        Move::reduce(1 - rank, 0..bytes, false),
                    ]);
                    let mut data = vec![rank as u8 + 1; bytes];
                    for _ in 0..3 {
                        links.run(&TAG, &moves, &[], &mut data, &mut add).unwrap();
                    }
                    assert!(data.iter().all(|&x| x == 12), "{bytes} bytes at rank {rank}");
                })
            })
            .collect();
        ranks.into_iter().for_each(|rank| rank.join().unwrap());
    }
}

/// What a rank says that waits for `want` bytes of a peer that writes `raw` and closes, or keeps quiet.
fn hears(raw: &[u8], want: usize, closes: bool) -> Report {
    let mut rows = loopback::streams(2).unwrap();
    let mut stranger = rows[1][0].take().unwrap();
    let hosts = vec!["a".to_string(), "b".to_string()];
    let mut links = Links::over(0, hosts, rows.remove(0), 9, Alarm::default()).unwrap();
    let (stall, grace) = (Duration::from_millis(50), Duration::from_millis(1));
    links.set_bounds(Bounds { stall, grace, ..Bounds::default() });
    stranger.write_all(raw).unwrap();
    let held = Some(stranger).filter(|_| !closes);
    let moves = Moves::new(vec![Move::recv(1, 0..want)]);
    let mut data = vec![0; want];
    let report = links.run(&TAG, &moves, &[], &mut data, &mut add).unwrap_err();
    assert_eq!(links.run(&TAG, &moves, &[], &mut data, &mut add), Err(report.clone()), "it stays");
    assert_eq!(links.alarm().raised(), Some(report.clone()));
    drop(held);
    report
}

#[test]
fn a_peer_that_breaks_the_rules_is_named() {
    let payload = [7; 1000];
    let good = Header { payload_crc: crc32c::crc32c(&payload), ..Header::of(&TAG, 9, 0, 1000) };
    let frame = |header: Header, payload: &[u8]| [&header.encode()[..], payload].concat();
    let mut flipped = frame(good, &payload);
    flipped[500] ^= 1;
    let mut bent = frame(good, &payload);
    bent[30] ^= 1;
    let said = Report { rank: 4, host: "d".into(), step: 5, op: "x".into(), cause: Cause::Gone };
    let text = farewell::encode(&said);
    let bye = Tag { op: Op::Farewell, ..TAG };
    let bye = Header { payload_crc: crc32c::crc32c(&text), ..Header::of(&bye, 9, 0, text.len()) };
    let rows: [(Vec<u8>, bool, &str); 13] = [
        (vec![], true, "rank 1 on b is gone (at step 5, in all-reduce)"),
        (frame(good, &payload[..10]), true, "is gone"),
        (frame(good, &payload[..10]), false, "has been silent"),
        (vec![0; 2000], false, "not a frame of this version"),
        (bent, false, "checksum of a header is wrong"),
        (flipped, false, "checksum of segment 0 is wrong"),
        (frame(Header { length: 1 << 60, ..good }, &[]), false, "1152921504606846976, expected 1000"),
        (frame(Header { length: 0, ..good }, &[]), false, "0, expected 1000"),
        (frame(Header { op: Op::Broadcast as u8, ..good }, &payload), false, "it is in broadcast"),
        (frame(Header { count: 1, ..good }, &payload), false, "of 1 elements"),
        (frame(Header { sequence: 1, ..good }, &payload), false, "segment 1, expected 0"),
        (frame(bye, &text), true, "rank 4 on d is gone (at step 5, in x)"),
        (frame(Header { length: 1 << 40, ..bye }, &text), false, "a farewell is too long"),
    ];
    for (raw, closes, says) in rows {
        let report = hears(&raw, 1000, closes).to_string();
        assert!(report.contains(says), "{report:?} should say {says:?}");
    }
    let report = hears(&frame(bye, &text), 3, false);
    assert_eq!(report, said, "a farewell longer than what was expected");
}

/// Rank 2 of three is gone; rank 1 waits for it and rank 0 waits for rank 1: both name rank 2.
#[test]
fn everybody_names_the_one_that_was_lost() {
    let mut ranks = loopback::links(3).unwrap();
    drop(ranks.pop());
    let ranks: Vec<_> = ranks
        .into_iter()
        .enumerate()
        .map(|(rank, mut links)| {
            thread::spawn(move || {
                // More than the sockets hold is on its way to rank 0, so the farewell comes in the middle of it.
                let all = 32 << 20;
                let mut data = vec![0; all + 4];
                let list = match rank {
                    0 => vec![Move::recv(1, 0..all)],
                    _ => vec![Move::recv(2, all..all + 4), Move::send(0, 0..all)],
                };
                links.run(&TAG, &Moves::new(list), &[], &mut data, &mut add).unwrap_err()
            })
        })
        .collect();
    let reports: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
    assert!(reports.iter().all(|r| r.rank == 2 && r.cause == Cause::Gone), "{reports:?}");
}

#[test]
fn a_rank_that_fails_says_why() {
    let mut ranks = loopback::links(2).unwrap();
    let mut failing = ranks.pop().unwrap();
    let cause = Cause::Failed { why: "no space left".into() };
    let report = Report { rank: 1, host: "localhost".into(), step: 5, op: "its own work".into(), cause };
    failing.fail(report.clone());
    let moves = Moves::new(vec![Move::send(1, 0..4), Move::recv(1, 0..4)]);
    let heard = ranks[0].run(&TAG, &moves, &[], &mut [0; 4], &mut add);
    assert_eq!(heard, Err(report.clone()));
    assert_eq!(failing.run(&TAG, &moves, &[], &mut [0; 4], &mut add), Err(report));
}

#[test]
fn the_alarm_ends_a_wait() {
    let mut ranks = loopback::links(2).unwrap();
    let alarm = ranks[0].alarm().clone();
    let report = Report { rank: 7, host: String::new(), step: 0, op: "x".into(), cause: Cause::Gone };
    let raised = report.clone();
    let raiser = thread::spawn(move || alarm.raise(raised));
    let moves = Moves::new(vec![Move::recv(1, 0..4)]);
    assert_eq!(ranks[0].run(&TAG, &moves, &[], &mut [0; 4], &mut add), Err(report));
    assert!(raiser.join().unwrap());
}
