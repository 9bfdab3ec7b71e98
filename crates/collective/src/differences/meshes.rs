//! Rows in the groups of a mesh, and operations of several groups at the same time.

use std::sync::atomic::{AtomicU64, Ordering};

use super::messages;
use super::rows::{self, PlantedBug};
use crate::comm::Comm;
use crate::element::Reduce;
use crate::split::along;
use crate::work::{Span, Work};

/// Elements of what is summed in several groups at once: one operation that fits in every cell and staging area, and one that
/// does not.
const LENGTHS: [usize; 2] = [100, 200_003];

/// Splits into the groups of every axis, runs all rows in each, and then operations of all groups at the same time.
pub(super) fn run(mut comm: Comm, sizes: &[usize]) -> Result<(), String> {
    // Every rank's numbers are in memory that the old group already knows.
    let mut known = comm.buffer::<f32>(LENGTHS[1]).map_err(said)?;
    let mut axes = split(&mut comm, sizes)?;
    for group in &mut axes {
        rows::run(group, PlantedBug::None)?;
        messages::run(group)?;
    }
    messages::run(&mut comm)?;
    for len in LENGTHS {
        beside(&mut comm, &mut axes, sizes, len)?;
    }
    for (axis, group) in axes.iter_mut().enumerate() {
        let number = |rank: usize| (rank + 1) as f32;
        known.fill(number(comm.rank()));
        group.all_reduce(&mut known, Reduce::Sum).map_err(said)?;
        let sum: f32 = members(sizes, axis, comm.rank()).into_iter().map(number).sum();
        if let Some(x) = known.iter().find(|x| **x != sum) {
            return Err(format!("axis {axis} at rank {}: {x} in a block of the job, not {sum}", comm.rank()));
        }
        let shared = group.shared_block(64, "a test").map_err(said)?;
        one_for_all(group, &shared)?;
    }
    // A group of a group: the first two axes of three.
    if sizes.len() == 3 {
        let mut plane = comm.split(&planes(sizes)).map_err(said)?;
        let mut line = plane.split(&along(&sizes[1..], 1)).map_err(said)?;
        rows::run(&mut line, PlantedBug::None)?;
        line.finish().map_err(said)?;
        plane.finish().map_err(said)?;
    }
    axes.into_iter().try_for_each(Comm::finish).map_err(said)?;
    comm.finish().map_err(said)
}

/// What the first rank of a group writes to a shared block the others read, if they share memory.
fn one_for_all(group: &mut Comm, shared: &polyreme_net::Block) -> Result<(), String> {
    let word = shared.at::<Word>(0);
    if group.rank() == 0 {
        word.0.store(77, Ordering::SeqCst);
    }
    group.barrier().map_err(said)?;
    let expected = if group.rank() == 0 || group.shares_memory() { 77 } else { 0 };
    match word.0.load(Ordering::SeqCst) {
        found if found == expected => Ok(()),
        found => Err(format!("{found} in a shared block, not {expected}")),
    }
}

/// A number that several ranks see.
#[repr(C)]
struct Word(AtomicU64);
// SAFETY: an atomic.
unsafe impl polyreme_net::Shareable for Word {}

/// What the others wait for when they notice a lost rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Missed {
    Sum,
    Message,
}

/// The last rank disappears in step 7, and the ranks that share a group with it find out.
pub(super) fn lose_one(mut comm: Comm, sizes: &[usize], missed: Missed) -> Result<(), String> {
    let (rank, last) = (comm.rank(), comm.size() - 1);
    let mut axes = split(&mut comm, sizes)?;
    comm.set_step(7);
    if rank == last {
        // Its last message, so that the others have a connection to lose.
        let mut word = [77i32];
        for group in axes.iter_mut().filter(|_| missed == Missed::Message) {
            let work = Work::Send { to: 0, tag: 9, span: Span::of(&mut word) };
            let mut heard = [0i32];
            let answer = Work::Receive { from: 0, tag: 10, span: Span::of(&mut heard) };
            // SAFETY: the words stay until they were waited for.
            let ticket = unsafe {
                group.start(work);
                group.start(answer)
            };
            group.wait(ticket).map_err(said)?;
        }
        return Ok(());
    }
    // Ranks that share no group with it do not notice.
    let Some(axis) = (0..sizes.len()).find(|axis| members(sizes, *axis, rank).contains(&last)) else {
        return Ok(());
    };
    let (group, mut data) = (&mut axes[axis], [1.0f32; 1000]);
    let (found, op) = match missed {
        Missed::Sum => (group.all_reduce(&mut data, Reduce::Sum).err(), "all-reduce"),
        Missed::Message => {
            let (from, mut word) = (group.size() - 1, [0i32]);
            let work = Work::Receive { from, tag: 3, span: Span::of(&mut data) };
            let last_word = Work::Receive { from, tag: 9, span: Span::of(&mut word) };
            // SAFETY: the data stay until they were waited for.
            let (ticket, heard) = unsafe { (group.start(work), group.start(last_word)) };
            group.wait(heard).map_err(said)?;
            if word != [77] {
                return Err(format!("{} is not the last message", word[0]));
            }
            let answer = Work::Send { to: from, tag: 10, span: Span::of(&mut word) };
            // SAFETY: the word stays until the end of this function, and the group is not dropped before it was sent.
            unsafe { group.start(answer) };
            (group.wait(ticket).err(), "receive")
        }
    };
    let found = found.ok_or("the loss of the last rank was not noticed")?;
    let named = (found.rank, found.step, found.op.as_str()) == (last, 7, op);
    if named { Ok(()) } else { Err(format!("not as it was: {found}")) }
}

fn split(comm: &mut Comm, sizes: &[usize]) -> Result<Vec<Comm>, String> {
    let mut axes = Vec::new();
    for axis in 0..sizes.len() {
        let group = comm.split(&along(sizes, axis)).map_err(said)?;
        let members = members(sizes, axis, comm.rank());
        let place = members.iter().position(|rank| *rank == comm.rank());
        if (Some(group.rank()), group.size()) != (place, sizes[axis]) {
            return Err(format!("rank {} of {} along axis {axis}", group.rank(), group.size()));
        }
        axes.push(group);
    }
    Ok(axes)
}

/// Starts an operation in each group and in the group of all, in a different order on every rank, and waits for them.
fn beside(comm: &mut Comm, axes: &mut [Comm], sizes: &[usize], len: usize) -> Result<(), String> {
    let rank = comm.rank();
    let n = axes.len() + 1;
    let mut data: Vec<Vec<i64>> =
        (0..n).map(|k| (0..len).map(|i| (i * (rank + k)) as i64).collect()).collect();
    let mut tickets = vec![None; n];
    for turn in 0..n {
        let k = (turn + rank) % n;
        let group = if k < axes.len() { &mut axes[k] } else { &mut *comm };
        // SAFETY: the numbers stay where they are until all tickets were waited for, below.
        tickets[k] = Some(unsafe { group.start(Work::AllReduce(Span::of(&mut data[k]), Reduce::Sum)) });
    }
    for k in 0..n {
        let group = if k < axes.len() { &mut axes[k] } else { &mut *comm };
        group.wait(tickets[k].expect("started above")).map_err(said)?;
    }
    for (k, data) in data.iter().enumerate() {
        let members = if k < axes.len() { members(sizes, k, rank) } else { (0..comm.size()).collect() };
        let sum = |i: usize| members.iter().map(|r| (i * (r + k)) as i64).sum::<i64>();
        if let Some(i) = (0..len).find(|i| data[*i] != sum(*i)) {
            return Err(format!("group {k} beside others at rank {rank}: element {i} is {}", data[i]));
        }
    }
    Ok(())
}

/// The ranks of a rank's group along an axis.
fn members(sizes: &[usize], axis: usize, rank: usize) -> Vec<usize> {
    let stride: usize = sizes[axis + 1..].iter().product();
    let first = rank - rank / stride % sizes[axis] * stride;
    (0..sizes[axis]).map(|k| first + k * stride).collect()
}

/// Ranks with the same first coordinate.
fn planes(sizes: &[usize]) -> Vec<Vec<usize>> {
    let each: usize = sizes[1..].iter().product();
    (0..sizes[0]).map(|k| (k * each..(k + 1) * each).collect()).collect()
}

fn said(report: polyreme_net::Report) -> String {
    report.to_string()
}
