//! Memory that is lent to a reader while another thread overwrites it: the reader gets what was lent, and both finish.

use std::sync::Arc;

use polyreme_exec::ledger::Ledger;
use polyreme_sync::model::{SOUND, check};
use polyreme_sync::{Mutex, thread};

use super::found;

/// An arena of numbers that both threads see.
type SharedArena = Arc<Mutex<Vec<f32>>>;

/// A part of it, in place.
fn lies(numbers: &SharedArena, part: std::ops::Range<usize>) -> &'static [f32] {
    // A scenario is short, so leaking these few numbers is fine.
    Box::leak(numbers.lock().unwrap()[part].into())
}

/// Two arenas of 5 numbers, room for a copy of two of them, and a reader that goes in reverse.
fn lend(settles: bool, reads: usize) {
    let arenas: [SharedArena; 2] = std::array::from_fn(|_| Arc::new(Mutex::new(vec![1.0; 5])));
    let tensors = || vec![0..3, 3..5];
    let ledger = Arc::new(Ledger::new([tensors(), tensors()].into_iter(), 0));
    let reader = {
        let (ledger, arenas) = (ledger.clone(), arenas.clone());
        thread::spawn(move || {
            let mut read = Vec::new();
            let parts = [(1, 3..5), (0, 3..5), (1, 0..3), (0, 0..3)];
            for (arena, part) in parts.into_iter().take(reads) {
                ledger
                    .read(arena, part, |part| lies(&arenas[arena], part), &mut |x| read.extend_from_slice(x));
            }
            ledger.close();
            read
        })
    };
    for (arena, part) in [(0, 0..2), (1, 0..2), (0, 2..5), (1, 2..5)] {
        if settles {
            ledger.settle(arena, 5, part.clone(), |part| lies(&arenas[arena], part));
        }
        arenas[arena].lock().unwrap()[part].fill(2.0);
    }
    let read = reader.join().unwrap();
    assert!(read.iter().all(|x| *x == 1.0), "what was lent is read: {read:?}");
    assert!(reads < 4 || read.len() == 10);
}

#[test]
fn a_reader_gets_what_was_lent() {
    check(2_000, SOUND, || lend(true, 4));
}

#[test]
fn a_reader_that_gives_up_holds_nobody() {
    check(1_000, SOUND, || lend(true, 1));
}

#[test]
fn numbers_that_are_overwritten_unasked_are_found() {
    let said = found(SOUND, || lend(false, 4));
    assert!(said.contains("what was lent is read"), "{said}");
}
