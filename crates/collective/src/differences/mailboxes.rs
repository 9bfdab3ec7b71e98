//! Mailboxes of the group of all ranks and of groups of some: letters from any rank, in any order, and what becomes of waits when
//! a rank dies.

use polyreme_net::mailbox::{Class, Label, Letter, Limits, Mailbox};

use crate::comm::Comm;

/// Letters of one class from one rank to another, and their lengths: nothing, something, more than a socket holds. All those of a class
/// have room in an inbox, because no rank takes while it posts; so urgent ones are short.
const LETTERS: u64 = 6;
const BYTES: [[usize; 3]; 2] = [[0, 3, 700], [0, 700, 1 << 19]];

/// Kinds of letters.
const NEWS: u16 = 1;
const QUESTION: u16 = 2;
const ANSWER: u16 = 3;

/// Everybody writes to everybody in the group of all, and in one of two groups of some ranks beside it.
pub(super) fn run(mut comm: Comm) -> Result<(), String> {
    let all = comm.mailbox(Limits::default()).map_err(said)?;
    exchange(&all, comm.size())?;
    let mut group = comm.split(&halves(comm.size())).map_err(said)?;
    let some = group.mailbox(Limits::default()).map_err(said)?;
    if (some.rank(), all.rank()) != (group.rank(), comm.rank()) {
        return Err(format!("{some:?} of rank {} in {:?}", group.rank(), all));
    }
    exchange(&some, group.size())?;
    serve(&all, comm.size())?;
    // A second mailbox of the same ranks has letters of its own.
    let second = comm.mailbox(Limits::default()).map_err(said)?;
    exchange(&second, comm.size())?;
    for mailbox in [&some, &second, &all] {
        mailbox.close().map_err(said)?;
    }
    group.finish().map_err(said)?;
    comm.finish().map_err(said)
}

/// A rank dies while the others of its group wait for its letters, and the rest for those of anybody: all name it. `die` ends it
/// without a word.
pub(super) fn lose_one(comm: &mut Comm, lost: usize, die: impl FnOnce()) -> Result<(), String> {
    let rank = comm.rank();
    let all = comm.mailbox(Limits::default()).map_err(said)?;
    let groups = halves(comm.size());
    let mut group = comm.split(&groups).map_err(said)?;
    let some = group.mailbox(Limits::default()).map_err(said)?;
    serve(&some, group.size())?;
    let together = groups.iter().any(|ranks| ranks.contains(&rank) && ranks.contains(&lost));
    if rank == lost {
        // No rank is in an operation of the group any more, which would end with its own report.
        for _ in 1..comm.size() {
            take(&all)?;
        }
        die();
        return Ok(());
    }
    all.post(lost, Class::Urgent, Label::default(), vec![]).map_err(|error| error.to_string())?;
    let found = if together { some.take() } else { all.take() };
    match found {
        Err(report) if report.rank == lost => Ok(()),
        Err(report) => Err(format!("not rank {lost}: {report}")),
        Ok(letter) => Err(format!("{letter:?} of a rank that is gone")),
    }
}

/// Odd ranks from the last one on, and even ranks: the groups count them otherwise than the job does.
fn halves(size: usize) -> Vec<Vec<usize>> {
    let odd: Vec<usize> = (0..size).rev().filter(|rank| rank % 2 == 1).collect();
    let even: Vec<usize> = (0..size).filter(|rank| rank % 2 == 0).collect();
    [odd, even].into_iter().filter(|ranks| !ranks.is_empty()).collect()
}

/// All post to all, themselves included, in both classes, each rank in another order. Those of one sender and class come in order.
fn exchange(mailbox: &Mailbox, size: usize) -> Result<(), String> {
    for n in 0..LETTERS {
        for k in 0..size {
            let to = (mailbox.rank() + n as usize + k) % size;
            for class in Class::ALL {
                let label = Label { kind: NEWS, ticket: n, place: to as u64 };
                let text = text(mailbox.rank(), to, class, n);
                mailbox.post(to, class, label, text).map_err(|error| error.to_string())?;
            }
        }
    }
    let mut next = vec![[0; 2]; size];
    for _ in 0..LETTERS * 2 * size as u64 {
        let letter = take(mailbox)?;
        let expected = &mut next[letter.from][letter.class as usize];
        let label = Label { kind: NEWS, ticket: *expected, place: mailbox.rank() as u64 };
        if letter.label != label || letter[..] != text(letter.from, mailbox.rank(), letter.class, *expected) {
            return Err(format!("{:?} from {} in place of {label:?}", letter.label, letter.from));
        }
        *expected += 1;
    }
    Ok(())
}

/// The first rank answers questions in the order in which they come, not knowing from whom.
fn serve(mailbox: &Mailbox, size: usize) -> Result<(), String> {
    let post = |to, kind, bytes: Vec<u8>| {
        let label = Label { kind, ..Label::default() };
        mailbox.post(to, Class::Data, label, bytes).map_err(|error| error.to_string())
    };
    if mailbox.rank() > 0 {
        post(0, QUESTION, vec![mailbox.rank() as u8])?;
        let letter = take(mailbox)?;
        let right = (letter.from, letter.label.kind, &letter[..]) == (0, ANSWER, &[!(mailbox.rank() as u8)]);
        return if right { Ok(()) } else { Err(format!("{letter:?} is no answer")) };
    }
    for _ in 1..size {
        let letter = take(mailbox)?;
        if letter.label.kind != QUESTION || letter[..] != [letter.from as u8] {
            return Err(format!("{letter:?} is no question"));
        }
        post(letter.from, ANSWER, vec![!letter[0]])?;
    }
    Ok(())
}

fn take(mailbox: &Mailbox) -> Result<Letter, String> {
    mailbox.take().map_err(said)?.ok_or_else(|| "the mailbox was closed".into())
}

/// What a letter holds.
fn text(from: usize, to: usize, class: Class, n: u64) -> Vec<u8> {
    let first = from * 31 + to * 17 + class as usize * 101 + n as usize * 7;
    (0..BYTES[class as usize][n as usize % 3]).map(|i| (first + i + (i >> 8)) as u8).collect()
}

fn said(report: polyreme_net::Report) -> String {
    report.to_string()
}
