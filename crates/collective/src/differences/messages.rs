//! Messages that are started: in cycles, with tags in any order, beside other operations.

use super::whole::{Whole, value};
use crate::comm::Comm;
use crate::element::Reduce;
use crate::work::{Span, Work};

/// The longest exceeds a ring, a socket buffer and an eager message of MPI.
const LENGTHS: [usize; 4] = [0, 1, 1000, 300_007];

/// Tags in the order in which they are sent; each rank receives them in another order.
const TAGS: [u16; 4] = [0, 7, 32_767, 7];

/// All of them, in one group.
pub(super) fn run(comm: &mut Comm) -> Result<(), String> {
    if comm.size() == 1 {
        return Ok(());
    }
    for len in LENGTHS {
        circle::<f32>(comm, len)?;
        circle::<u8>(comm, len)?;
        all_to_all::<i64>(comm, len.min(1000))?;
    }
    many(comm)
}

/// Every rank sends to its two neighbours at once, waits for its sends and then for its receives.
fn circle<T: Whole>(comm: &mut Comm, len: usize) -> Result<(), String> {
    let (rank, ranks) = (comm.rank(), comm.size());
    let next = (rank + 1) % ranks;
    let last = (rank + ranks - 1) % ranks;
    let mine = |k: usize| -> Vec<T> { (0..len).map(|i| value(rank + 3 * k, i)).collect() };
    let mut sent: Vec<Vec<T>> = (0..TAGS.len()).map(mine).collect();
    let mut got: Vec<Vec<T>> = vec![vec![T::of(50); len]; TAGS.len()];
    let mut sum = vec![rank as i64; len];
    let mut tickets = Vec::new();
    for (tag, data) in TAGS.iter().zip(&mut sent) {
        let work = Work::Send { to: next, tag: *tag, span: Span::of(data) };
        // SAFETY: all that is started here stays until the last ticket was waited for, or the group is dropped.
        tickets.push(unsafe { comm.start(work) });
    }
    // SAFETY: as above.
    let beside = unsafe { comm.start(Work::AllReduce(Span::of(&mut sum), Reduce::Sum)) };
    // Messages with one tag keep their order, so the two of tag 7 do here.
    let order = if rank % 2 == 0 { [2, 1, 3, 0] } else { [1, 0, 3, 2] };
    let mut receives = Vec::new();
    for k in order {
        let work = Work::Receive { from: last, tag: TAGS[k], span: Span::of(&mut got[k]) };
        // SAFETY: as above.
        receives.push(unsafe { comm.start(work) });
    }
    for ticket in tickets.into_iter().chain(receives.into_iter().rev()) {
        comm.wait(ticket).map_err(said)?;
    }
    comm.wait(beside).map_err(said)?;
    for (k, got) in got.iter().enumerate() {
        let wrong = got.iter().enumerate().find(|(i, x)| **x != value(last + 3 * k, *i));
        if let Some((i, x)) = wrong {
            return Err(format!(
                "message {k} of {len} from {last} to {rank} of {ranks}: element {i} is {x:?}"
            ));
        }
    }
    let all = (ranks * (ranks - 1) / 2) as i64;
    if sum.iter().any(|x| *x != all) { Err(format!("a sum beside messages at {rank}")) } else { Ok(()) }
}

/// Every rank sends to every other, with receives started first.
fn all_to_all<T: Whole>(comm: &mut Comm, len: usize) -> Result<(), String> {
    let (rank, ranks) = (comm.rank(), comm.size());
    let mut sent: Vec<T> = (0..len).map(|i| value(rank, i)).collect();
    let mut got: Vec<Vec<T>> = vec![vec![T::of(50); len]; ranks];
    let mut tickets = Vec::new();
    for from in (0..ranks).filter(|from| *from != rank) {
        let work = Work::Receive { from, tag: 1, span: Span::of(&mut got[from]) };
        // SAFETY: what is started here stays until the last ticket was waited for, or the group is dropped.
        tickets.push(unsafe { comm.start(work) });
    }
    for to in (0..ranks).filter(|to| *to != rank) {
        let work = Work::Send { to, tag: 1, span: Span::of(&mut sent) };
        // SAFETY: as above.
        tickets.push(unsafe { comm.start(work) });
    }
    for ticket in tickets {
        comm.wait(ticket).map_err(said)?;
    }
    for from in (0..ranks).filter(|from| *from != rank) {
        if (0..len).any(|i| got[from][i] != value(from, i)) {
            return Err(format!("a message from {from} to {rank} of {ranks}"));
        }
    }
    Ok(())
}

/// More messages than there are cells for, in both directions, before any of them is received.
fn many(comm: &mut Comm) -> Result<(), String> {
    const MESSAGES: usize = 150;
    let (rank, ranks) = (comm.rank(), comm.size());
    let pair = rank ^ 1;
    if pair >= ranks {
        return Ok(());
    }
    let mut sent: Vec<i32> = (0..MESSAGES as i32).collect();
    let mut got = vec![-1i32; MESSAGES];
    let mut tickets = Vec::new();
    for one in sent.chunks_mut(1) {
        let work = Work::Send { to: pair, tag: 2, span: Span::of(one) };
        // SAFETY: what is started here stays until the last ticket was waited for, or the group is dropped.
        tickets.push(unsafe { comm.start(work) });
    }
    for one in got.chunks_mut(1) {
        let work = Work::Receive { from: pair, tag: 2, span: Span::of(one) };
        // SAFETY: as above.
        tickets.push(unsafe { comm.start(work) });
    }
    for ticket in tickets {
        comm.wait(ticket).map_err(said)?;
    }
    if sent == got { Ok(()) } else { Err(format!("many messages from {pair} to {rank}: {got:?}")) }
}

fn said(report: polyreme_net::Report) -> String {
    report.to_string()
}
