//! A notice that several ranks post while others read it: all read one report, and a complete one.

use std::sync::Arc;

use polyreme_net::{Block, Cause, Notice, Report};
use polyreme_sync::model::{SOUND, check};
use polyreme_sync::thread;

use super::{UNORDERED, found};

fn report(rank: usize) -> Report {
    let why = ["disk", "luck"][rank].into();
    Report { rank, host: "h".into(), step: rank as u64, op: "x".into(), cause: Cause::Failed { why } }
}

fn first_one_stays() {
    let block = Arc::new(Block::of_this_process(size_of::<Notice>()).unwrap());
    let puts_up = |rank: usize| {
        let block = block.clone();
        thread::spawn(move || {
            let notice = block.at::<Notice>(0);
            let first = notice.put_up(&report(rank));
            (first, notice.read().unwrap())
        })
    };
    let ranks = [puts_up(0), puts_up(1)];
    let notice = block.at::<Notice>(0);
    let early = notice.is_up().then(|| notice.read().unwrap());
    let ends = ranks.map(|rank| rank.join().unwrap());
    let first = ends.iter().position(|(first, _)| *first).unwrap();
    assert!(ends.iter().filter(|(first, _)| *first).count() == 1, "one of them is the first");
    for read in ends.into_iter().map(|(_, read)| read).chain(early) {
        assert_eq!(read, report(first), "all read the first report, whole");
    }
}

#[test]
fn a_notice_is_read_whole_while_it_is_put_up() {
    check(1_000, SOUND, first_one_stays);
}

/// A notice is marked as written before it is.
#[test]
fn a_notice_that_is_up_before_it_is_written_is_found() {
    let said = found(UNORDERED, first_one_stays);
    assert!(said.contains("all read the first report, whole"), "{said}");
}
