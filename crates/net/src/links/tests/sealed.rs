//! Encrypted links: no plain text on the wire, and changing a byte on it ends the run with a report.

use super::*;
use crate::frame::MAGIC;
use crate::seal;

/// The bytes of a head on an encrypted link.
const HEAD_BYTES: usize = HEADER_BYTES + seal::SEAL_BYTES;

/// Known bytes, which are easy to find.
fn known(bytes: usize) -> Vec<u8> {
    b"a plain gradient".iter().copied().cycle().take(bytes).collect()
}

fn shows(wire: &[u8]) -> bool {
    wire.windows(16).any(|bytes| bytes == b"a plain gradient")
}

/// The report of rank 1 when rank 0 sends it known bytes through a proxy that changes them; and what went over the
/// wire.
fn through(
    sealed: bool,
    bytes: usize,
    meddle: impl FnOnce(&mut Vec<u8>) + Send + 'static,
) -> (Result<(), Report>, Vec<u8>) {
    let mut rows = connections(2, sealed);
    let (near, far) = loopback::streams(2)
        .map(|mut rows| (rows[0][1].take().unwrap(), rows[1][0].take().unwrap()))
        .unwrap();
    // Rank 0 talks to `tap` instead of rank 1, and rank 1 hears what `far` is given.
    let tap = std::mem::replace(&mut rows[1][0].as_mut().unwrap().stream, far);
    let meddler = thread::spawn(move || {
        let mut wire = Vec::new();
        (&tap).read_to_end(&mut wire).unwrap();
        let seen = wire.clone();
        meddle(&mut wire);
        (&near).write_all(&wire).unwrap();
        near.shutdown_write().unwrap();
        seen
    });
    let mut ranks = rows.into_iter().enumerate().map(|(rank, row)| {
        let hosts = ["a", "b"].map(String::from).to_vec();
        let mut links = Links::over(rank, hosts, row, 9, Alarm::default()).unwrap();
        links.set_bounds(WaitBounds { grace: Duration::from_millis(1), ..WaitBounds::default() });
        links
    });
    let (mut one, mut two) = (ranks.next().unwrap(), ranks.next().unwrap());
    one.run(&TAG, &Moves::new(vec![Move::send_from(1, 0..bytes)]), &known(bytes), &mut [], &mut add).unwrap();
    drop(one);
    let mut data = vec![0; bytes];
    let done = two.run(&TAG, &Moves::new(vec![Move::recv(0, 0..bytes)]), &[], &mut data, &mut add);
    if done.is_ok() {
        assert!(data == known(bytes));
    }
    (done, meddler.join().unwrap())
}

#[test]
fn nothing_plain_is_on_the_wire_of_an_encrypted_link() {
    let bytes = 300_000;
    let headers = |wire: &[u8]| wire.windows(4).any(|bytes| bytes == MAGIC.to_le_bytes());
    let (done, wire) = through(false, bytes, |_| {});
    assert!(done.is_ok() && shows(&wire), "the search finds what is plain");
    assert!(headers(&wire), "and headers");
    let (done, wire) = through(true, bytes, |_| {});
    assert!(done.is_ok() && !shows(&wire) && !headers(&wire));
    let segments = bytes.div_ceil(segment_bytes(bytes));
    assert_eq!(wire.len(), bytes + segments * HEAD_BYTES, "one head per segment, and nothing else");
}

/// One bit anywhere, and frames that are left out, repeated or exchanged.
#[test]
fn a_changed_byte_ends_the_run_with_a_report() {
    let bytes = 2 * 64 * 1024 + 100;
    let frame = HEAD_BYTES + segment_bytes(bytes);
    type Meddle = dyn FnOnce(&mut Vec<u8>) + Send;
    let check = |name: &str, meddle: Box<Meddle>| {
        let report = through(true, bytes, meddle).0.unwrap_err();
        let said = report.to_string();
        assert!(report.rank == 0 && matches!(report.cause, Cause::Damaged { .. }), "{name}: {said}");
        assert!(
            said.contains("rank 0 on a sent damaged data") && said.contains("failed authentication"),
            "{said}"
        );
    };
    let last = 2 * frame + HEAD_BYTES + 99;
    let places = [0, 40, HEADER_BYTES, HEAD_BYTES - 1, HEAD_BYTES, 5000, frame - 1, frame, 2 * frame, last];
    for at in places {
        check(&format!("byte {at}"), Box::new(move |wire| wire[at] ^= 0x10));
    }
    check("the first left out", Box::new(move |wire| drop(wire.drain(..frame))));
    let twice = move |wire: &mut Vec<u8>| wire.splice(..0, wire[..frame].to_vec()).for_each(drop);
    check("the first twice", Box::new(twice));
    check("exchanged", Box::new(move |wire| wire[..2 * frame].rotate_left(frame)));
    let (done, _) = through(true, bytes, move |wire| wire.truncate(frame + 7));
    assert_eq!(done.unwrap_err().cause, Cause::Gone, "cut off");
}

/// Rank 0 is on another host than ranks 1 and 2, which talk in the clear: what is received or reduced over one kind of link
/// goes on over the other.
#[test]
fn encrypted_and_plain_links_pass_on_to_each_other() {
    let bytes = 700_001;
    let lists = |reduces: bool| {
        let comes = |from: usize| match reduces {
            true => Move::reduce(from, 0..bytes, true),
            false => Move::recv(from, 0..bytes),
        };
        [
            vec![Move::send(1, 0..bytes), comes(2)],
            vec![comes(0), Move::send(2, 0..bytes), Move::send(0, 0..9), Move::recv(0, 0..9)],
            vec![comes(1), Move::send(0, 0..bytes)],
        ]
    };
    for reduces in [false, true] {
        let rows = connections_where(3, |one, other| one == 0 || other == 0);
        let mut lists = lists(reduces);
        lists[0].extend([Move::send(1, 0..9), Move::recv(1, 0..9)]);
        let ranks: Vec<_> = rows
            .into_iter()
            .zip(lists)
            .enumerate()
            .map(|(rank, (row, list))| {
                thread::spawn(move || {
                    let hosts = ["a", "b", "b"].map(String::from).to_vec();
                    let mut links = Links::over(rank, hosts, row, 9, Alarm::default()).unwrap();
                    let mut data: Vec<u8> = numbers(bytes).iter().map(|x| x.wrapping_mul(3)).collect();
                    for _ in 0..3 {
                        links.run(&TAG, &Moves::new(list.clone()), &[], &mut data, &mut add).unwrap();
                    }
                    data
                })
            })
            .collect();
        let data: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        // The first nine bytes went back and forth once more.
        assert!(data[0][9..] != numbers(bytes)[9..] && (reduces || data[1][9..] == data[2][9..]));
        if reduces {
            let mut want =
                [(); 3].map(|()| numbers(bytes).iter().map(|x| x.wrapping_mul(3)).collect::<Vec<u8>>());
            for _ in 0..3 {
                for (from, to) in [(0, 1), (1, 2), (2, 0)] {
                    let from = want[from].clone();
                    add(&mut want[to][9..], &from[9..], true);
                }
            }
            assert!(data.iter().zip(&want).all(|(got, want)| got[9..] == want[9..]));
        }
    }
}

/// As on plain links, whose unread bytes can be examined: both send and neither receives.
#[test]
fn ranks_that_send_to_each_other_are_found_behind_seals_too() {
    let tag = Tag { op: FrameOp::Send, ..TAG };
    let ranks: Vec<_> = group(2, true)
        .into_iter()
        .enumerate()
        .map(|(rank, mut links)| {
            thread::spawn(move || {
                let moves = Moves::new(vec![Move::send(1 - rank, 0..64 << 20)]);
                let report = links.run(&tag, &moves, &[], &mut vec![0; 64 << 20], &mut add).unwrap_err();
                (links, report.to_string())
            })
        })
        .collect();
    // The rank that finds it first stays until the other has too: a closed connection would be another finding.
    let found: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
    for (_, said) in &found {
        assert!(said.contains("ranks 0, 1 send to each other and none of them receives"), "{said}");
    }
}
