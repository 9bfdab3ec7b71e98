//! Links between threads, and peers that break the protocol.

mod sealed;

use std::io::{Read, Write};
use std::thread;

use super::*;
use crate::frame::{HEADER_BYTES, Terms, segment_bytes};
use crate::moves::Move;
use crate::socket::Stream;

const TERMS: Terms = Terms { reducer: 0, algorithm: 0, root: 0, cuts: 0, turn: 0 };
const TAG: Tag = Tag { step: 5, op: FrameOp::AllReduce, dtype: 0, count: 100_000, terms: TERMS };

/// Connections between ranks of this process, encrypted where `sealed` says so of a pair.
fn connections_where(ranks: usize, sealed: impl Fn(usize, usize) -> bool) -> Vec<Vec<Option<Connection>>> {
    let rows = loopback::streams(ranks).unwrap();
    let mut rows: Vec<Vec<Option<Connection>>> =
        rows.into_iter().map(|row| row.into_iter().map(|s| s.map(Connection::from)).collect()).collect();
    for one in 0..ranks {
        for other in (one + 1..ranks).filter(|&other| sealed(one, other)) {
            let (ours, theirs) = crate::seal::pair().unwrap();
            rows[one][other].as_mut().unwrap().seals = Some(Box::new(ours));
            rows[other][one].as_mut().unwrap().seals = Some(Box::new(theirs));
        }
    }
    rows
}

fn connections(ranks: usize, sealed: bool) -> Vec<Vec<Option<Connection>>> {
    connections_where(ranks, |_, _| sealed)
}

/// As [`loopback::links`], encrypted or not.
fn group(ranks: usize, sealed: bool) -> Vec<Links> {
    let hosts = vec!["localhost".to_string(); ranks];
    let rows = connections(ranks, sealed).into_iter().enumerate();
    rows.map(|(rank, row)| Links::over(rank, hosts.clone(), row, 0, Alarm::default()).unwrap()).collect()
}

fn add(into: &mut [u8], arrived: &[u8], _: bool) {
    into.iter_mut().zip(arrived).for_each(|(a, b)| *a = a.wrapping_add(*b));
}

/// Two ranks send each other everything and add it up: the bytes that are sent are also those that are reduced, and they
/// are more than the sockets hold.
#[test]
fn sending_and_reducing_the_same_bytes_does_not_lock_up() {
    for (bytes, sealed) in [0, 1, 1000, 300_001, 16 << 20].into_iter().flat_map(|n| [(n, false), (n, true)]) {
        let ranks: Vec<_> = group(2, sealed)
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

/// The report of a rank that waits for `want` bytes from a peer that writes `raw` and then closes or stays silent. It
/// is the same for receiving and for reducing.
fn hears(raw: &[u8], want: usize, closes: bool) -> Report {
    let received = hears_as(Move::recv(1, 0..want), raw, closes);
    let combined = hears_as(Move::reduce(1, 0..want, true), raw, closes);
    assert_eq!(std::mem::discriminant(&received.cause), std::mem::discriminant(&combined.cause));
    received
}

fn hears_as(this: Move, raw: &[u8], closes: bool) -> Report {
    let want = this.bytes.len();
    let mut rows = loopback::streams(2).unwrap();
    let mut stranger = rows[1][0].take().unwrap();
    let hosts = vec!["a".to_string(), "b".to_string()];
    let mut links = Links::over(0, hosts, rows.remove(0), 9, Alarm::default()).unwrap();
    let (stall, grace) = (Duration::from_millis(50), Duration::from_millis(1));
    links.set_bounds(WaitBounds { stall, grace, ..WaitBounds::default() });
    stranger.write_all(raw).unwrap();
    let held = Some(stranger).filter(|_| !closes);
    let moves = Moves::new(vec![this]);
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
    let bye = Tag { op: FrameOp::Farewell, ..TAG };
    let bye = Header { payload_crc: crc32c::crc32c(&text), ..Header::of(&bye, 9, 0, text.len()) };
    let lent = |payload: &[u8]| frame(Header { lent: true, ..good }, payload);
    let mut changed = payload;
    changed[999] ^= 1;
    let rows: [(Vec<u8>, bool, &str); 16] = [
        (vec![], true, "rank 1 on b is gone (at step 5, in all-reduce)"),
        (frame(good, &payload[..10]), true, "is gone"),
        (frame(good, &payload[..10]), false, "nothing has moved"),
        (vec![0; 2000], false, "not a frame of this version"),
        (bent, false, "checksum of a header is wrong"),
        (flipped, false, "checksum of segment 0 is wrong"),
        (frame(Header { length: (1 << 24) - 1, ..good }, &[]), false, "16777215, expected 1000"),
        (frame(Header { length: 0, ..good }, &[]), false, "0, expected 1000"),
        (frame(Header { op: FrameOp::Broadcast as u8, ..good }, &payload), false, "it is in broadcast"),
        (frame(Header { count: 1, ..good }, &payload), false, "of 1 elements"),
        (frame(Header { sequence: 1, ..good }, &payload), false, "segment 1, expected 0"),
        (frame(bye, &text), true, "rank 4 on d is gone (at step 5, in x)"),
        (frame(Header { length: 1 << 23, ..bye }, &text), false, "a farewell is too long"),
        // What was lent may change when the lender fails; then it has said why. Otherwise it is damage like any other.
        (lent(&changed), false, "checksum of segment 0 is wrong"),
        (lent(&changed), true, "checksum of segment 0 is wrong"),
        ([lent(&changed), frame(bye, &text)].concat(), true, "rank 4 on d is gone"),
    ];
    for (raw, closes, says) in rows {
        let report = hears(&raw, 1000, closes).to_string();
        assert!(report.contains(says), "{report:?} should say {says:?}");
    }
    let report = hears(&frame(bye, &text), 3, false);
    assert_eq!(report, said, "a farewell longer than what was expected");
}

/// A rank, and the other ends of its connections to the others.
fn among_strangers(ranks: usize) -> (Links, Vec<Stream>) {
    let mut rows = loopback::streams(ranks).unwrap();
    let strangers = (1..ranks).map(|r| rows[r][0].take().unwrap()).collect();
    let hosts = (0..ranks).map(|r| format!("host {r}")).collect();
    (Links::over(0, hosts, rows.remove(0), 9, Alarm::default()).unwrap(), strangers)
}

/// Reads the next frame.
fn next_frame(from: &mut Stream) -> (Header, Vec<u8>) {
    let mut header = [0; HEADER_BYTES];
    from.read_exact(&mut header).unwrap();
    let header = Header::decode(&header).unwrap();
    let mut payload = vec![0; header.length as usize];
    from.read_exact(&mut payload).unwrap();
    (header, payload)
}

fn numbers(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i * i % 253) as u8).collect()
}

/// A large message is lent, at any alignment, and the run waits for the peer's receipt.
#[test]
fn what_is_lent_waits_for_its_receipt() {
    for (start, receipt) in [(0, true), (1, true), (4097, true), (64, false)] {
        let (mut links, mut strangers) = among_strangers(2);
        let data = numbers(3 << 20);
        let moves = Moves::new(vec![Move::send_from(1, start..data.len())]).lending(false);
        let mut peer = strangers.remove(0);
        let reader = thread::spawn(move || {
            let mut heard = Vec::new();
            let mut n_frames = 0;
            while heard.len() < (3 << 20) - start {
                let (header, payload) = next_frame(&mut peer);
                assert!(header.lent && header.payload_crc == crc32c::crc32c(&payload));
                heard.extend(payload);
                n_frames += 1;
            }
            if receipt {
                let tag = Tag { op: FrameOp::Receipt, ..TAG };
                peer.write_all(&Header::of(&tag, 9, 0, 0).encode()).unwrap();
            }
            assert!(n_frames > 1);
            heard
        });
        let done = links.run(&TAG, &moves, &data, &mut [], &mut add);
        assert!(reader.join().unwrap() == data[start..], "from {start}");
        match receipt {
            true => assert_eq!(done, Ok(())),
            false => assert_eq!(done.unwrap_err().cause, Cause::Gone),
        }
    }
}

/// Memory is overwritten as soon as a run has ended, and no peer sees it, however late it reads.
#[test]
fn a_run_ends_when_its_memory_is_free() {
    let bytes = 3 << 20;
    let ranks: Vec<_> = loopback::links(2)
        .unwrap()
        .into_iter()
        .enumerate()
        .map(|(rank, mut links)| {
            thread::spawn(move || {
                let there = Moves::new(vec![Move::send(1, 0..bytes)]).lending(false);
                let here = Moves::new(vec![Move::recv(0, 0..bytes)]);
                let mut data = vec![0; bytes];
                for round in 1..=20 {
                    if rank == 0 {
                        data.fill(round);
                        links.run(&TAG, &there, &[], &mut data, &mut add).unwrap();
                    } else {
                        links.run(&TAG, &here, &[], &mut data, &mut add).unwrap();
                        assert!(data.iter().all(|x| *x == round), "round {round}");
                    }
                }
            })
        })
        .collect();
    ranks.into_iter().for_each(|rank| rank.join().unwrap());
}

/// What is passed on keeps its checksum, or has that of the reduced result.
#[test]
fn segments_are_passed_on_with_their_checksums() {
    let bytes = 300_001;
    for combined in [false, true] {
        let (mut links, mut strangers) = among_strangers(3);
        let (mut to, mut from) = (strangers.remove(1), strangers.remove(0));
        let data = numbers(bytes);
        let sent = data.clone();
        let writer = thread::spawn(move || {
            for (k, payload) in sent.chunks(segment_bytes(bytes)).enumerate() {
                let header = Header::of(&TAG, 9, k as u64, payload.len());
                let header = Header { payload_crc: crc32c::crc32c(payload), ..header };
                from.write_all(&[&header.encode()[..], payload].concat()).unwrap();
            }
            from
        });
        let comes = if combined { Move::reduce(1, 0..bytes, true) } else { Move::recv(1, 0..bytes) };
        let moves = Moves::new(vec![comes, Move::send(2, 0..bytes)]);
        let mut into = vec![1; bytes];
        links.run(&TAG, &moves, &[], &mut into, &mut add).unwrap();
        let mut heard = Vec::new();
        while heard.len() < bytes {
            let (header, payload) = next_frame(&mut to);
            assert_eq!(header.payload_crc, crc32c::crc32c(&payload));
            heard.extend(payload);
        }
        let want = data.iter().map(|x| if combined { x + 1 } else { *x });
        assert!(heard.into_iter().eq(want), "combined: {combined}");
        drop(writer.join().unwrap());
    }
}

/// Rank 0 passes on to rank 1 what it got from rank 2; on the way a bit is flipped in the last segment.
#[test]
fn damage_is_found_on_what_was_passed_on() {
    let bytes = 300_000;
    for lent in [false, true] {
        let bytes = if lent { bytes * 10 } else { bytes };
        let frame_bytes = HEADER_BYTES + segment_bytes(bytes);
        let mut rows = loopback::streams(3).unwrap();
        let mut tapped = loopback::streams(2).unwrap();
        // Ranks 0 and 1 talk through a proxy.
        let (near, far) = (rows[1][0].take().unwrap(), tapped[0][1].take().unwrap());
        let (near, far) = (Arc::new(near), Arc::new(far));
        rows[1][0] = tapped[1][0].take();
        let back = (far.clone(), near.clone());
        let between = thread::spawn(move || {
            let n_frames = bytes.div_ceil(segment_bytes(bytes));
            let mut raw = vec![0; bytes + n_frames * HEADER_BYTES];
            (&*near).read_exact(&mut raw).unwrap();
            raw[(n_frames - 1) * frame_bytes + HEADER_BYTES + 7] ^= 4;
            (&*far).write_all(&raw).unwrap();
        });
        let answers = thread::spawn(move || {
            let (from, to) = back;
            let _ = std::io::copy(&mut &*from, &mut &*to);
        });
        let lists = [
            vec![Move::recv(2, 0..bytes), Move::send(1, 0..bytes)],
            vec![Move::recv(0, 0..bytes)],
            vec![Move::send(0, 0..bytes)],
        ];
        let ranks: Vec<_> = lists
            .into_iter()
            .zip(rows)
            .enumerate()
            .map(|(rank, (list, row))| {
                thread::spawn(move || {
                    let hosts = ["a", "b", "c"].map(String::from).to_vec();
                    let mut links = Links::over(rank, hosts, row, 9, Alarm::default()).unwrap();
                    let mut data = if rank == 2 { numbers(bytes) } else { vec![0; bytes] };
                    links.run(&TAG, &Moves::new(list).lending(false), &[], &mut data, &mut add)
                })
            })
            .collect();
        let done: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        let damaged = done[1].clone().unwrap_err();
        assert!(damaged.rank == 0 && matches!(damaged.cause, Cause::Damaged { .. }), "{damaged}");
        // A lender waits for the receipt and gets the report instead.
        assert_eq!(done[0], if lent { Err(damaged) } else { Ok(()) });
        between.join().unwrap();
        answers.join().unwrap();
    }
}

/// Rank 2 of three is gone; rank 1 waits for it and rank 0 waits for rank 1: both name rank 2.
#[test]
fn everybody_names_the_one_that_was_lost() {
    [false, true].into_iter().for_each(name_the_lost_one);
}

fn name_the_lost_one(sealed: bool) {
    let mut ranks = group(3, sealed);
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
    [false, true].into_iter().for_each(say_why);
}

fn say_why(sealed: bool) {
    let mut ranks = group(2, sealed);
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
