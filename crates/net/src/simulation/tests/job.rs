//! What simulated ranks do: join, work together over links and over the control plane, and part. All of it is the code that
//! runs on real machines; what is written here is only in which order it is called.

use std::sync::Arc;
use std::time::Duration;

use super::super::{Rank, master};
use crate::frame::{FrameOp, Tag, Terms};
use crate::patience::Patience;
use crate::pulse::Doing;
use crate::{Control, First, JoinError, JoinOptions, Links, Move, Moves, Report, Secret, join};

/// One thing that all ranks do together.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Act {
    /// Each computes for this long; `longer` names a rank that takes more time.
    Compute { each: Duration, longer: Option<(usize, Duration)> },
    /// Some bytes over the control plane.
    Share { bytes: usize },
    /// A sum of all, around a ring or from each to each.
    AllReduce { bytes: usize, ring: bool },
    /// From one to all.
    Broadcast { bytes: usize, root: usize },
    /// One rank sends another a few bytes without waiting for it to receive them, which it does after a barrier.
    Letter { from: usize, to: usize },
    /// A rank cannot go on.
    Fail { rank: usize },
    /// A rank waits for this long and does nothing else.
    Idle { rank: usize, time: Duration },
    /// When all are done, a rank works for this long before it leaves.
    Linger { rank: usize, time: Duration },
}

impl Act {
    fn doing(&self) -> Doing {
        match self {
            Act::Compute { .. } | Act::Fail { .. } | Act::Idle { .. } | Act::Linger { .. } => Doing::OwnWork,
            Act::Share { .. } => Doing::AllGather,
            Act::AllReduce { .. } => Doing::AllReduce,
            Act::Broadcast { .. } => Doing::Broadcast,
            Act::Letter { .. } => Doing::Send,
        }
    }
}

/// Which pairs are connected while ranks join; the others are when they first talk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Early {
    AllPairs,
    Neighbours,
    NoPairs,
}

impl Early {
    /// Whether these two are.
    pub(super) fn connects(self, one: usize, other: usize, size: usize) -> bool {
        match self {
            Early::AllPairs => true,
            Early::Neighbours => (one + 1) % size == other || (other + 1) % size == one,
            Early::NoPairs => false,
        }
    }
}

/// How a rank ended.
#[derive(Debug)]
pub(super) enum RankEnd {
    /// All that it computed is right and it left in order; `parting` is how long leaving took.
    Fine { parting: Duration },
    /// It computed something else.
    Wrong(String),
    /// It did not join.
    Alone(JoinError),
    /// It reports a lost rank.
    Lost(Report),
}

/// What a rank does from joining to leaving.
pub(super) fn work(rank: Rank, patience: Patience, early: Early, acts: &[Act]) -> RankEnd {
    let mut options = JoinOptions::new(rank.rank, rank.size, master(), secret());
    options.system = rank.system.clone();
    options.patience = patience;
    options.first = First::Some(Arc::new(move |members, me| {
        let peers = (0..members.len()).filter(|&peer| peer != me);
        peers.filter(|&peer| early.connects(me, peer, members.len())).map(|peer| (0, peer)).collect()
    }));
    options.host_key = Some(format!("host {}", rank.rank));
    let joined = match join(options) {
        Ok(joined) => joined,
        Err(e) => return RankEnd::Alone(e),
    };
    let control = joined.control.clone();
    let all: Vec<usize> = (0..rank.size).collect();
    let mut links = joined.links(0, &all).expect("a file to wait for streams");
    // As in the program, no rank leaves before all are done.
    let last = Act::AllReduce { bytes: 1, ring: false };
    for (step, act) in acts.iter().chain([&last]).enumerate() {
        let done = perform(&rank, step as u64, act, &control, &mut links);
        match done {
            Ok(Ok(())) => {}
            Ok(Err(wrong)) => return RankEnd::Wrong(format!("{wrong} at step {step}")),
            Err(report) => {
                // As the program does: the others are told why this one ends.
                control.fail(&report.to_string());
                return RankEnd::Lost(report);
            }
        }
    }
    control.pulse().at(acts.len() as u64, Doing::Finish);
    for act in acts {
        if let Act::Linger { rank: late, time } = *act
            && late == rank.rank
        {
            rank.compute(time);
        }
    }
    let begun = rank.system.now();
    match control.goodbye() {
        Ok(()) => RankEnd::Fine { parting: rank.system.now() - begun },
        Err(report) => RankEnd::Lost(report),
    }
}

type Done = Result<Result<(), String>, Report>;

fn perform(rank: &Rank, step: u64, act: &Act, control: &Control, links: &mut Links) -> Done {
    let (me, size) = (rank.rank, rank.size);
    control.pulse().at(step, act.doing());
    match *act {
        Act::Compute { each, longer } => {
            let longer = longer.filter(|(rank, _)| *rank == me).map_or(Duration::ZERO, |longer| longer.1);
            rank.compute(each + longer);
        }
        Act::Share { bytes } => {
            let parts = control.share(&data(me, step, bytes))?;
            let expected: Vec<_> = (0..size).map(|rank| data(rank, step, bytes)).collect();
            if parts != expected {
                return Ok(Err("the parts of an exchange are wrong".into()));
            }
        }
        Act::AllReduce { bytes, ring } => {
            let moves = if ring { around(me, size, bytes) } else { to_each(me, size, bytes) };
            let mine = data(me, step, bytes);
            let mut sum = mine.clone();
            links.run(&tag(step, FrameOp::AllReduce, bytes), &moves, &mine, &mut sum, &mut add)?;
            let mut expected = vec![0; bytes];
            (0..size).for_each(|rank| add(&mut expected, &data(rank, step, bytes), false));
            if sum != expected {
                return Ok(Err("a sum is wrong".into()));
            }
        }
        Act::Broadcast { bytes, root } => {
            let peers = (0..size).filter(|&rank| rank != root);
            let moves = match me == root {
                true => peers.map(|peer| Move::send(peer, 0..bytes)).collect(),
                false => vec![Move::recv(root, 0..bytes)],
            };
            let mut all = if me == root { data(root, step, bytes) } else { vec![0; bytes] };
            links.run(&tag(step, FrameOp::Broadcast, bytes), &Moves::new(moves), &[], &mut all, &mut add)?;
            if all != data(root, step, bytes) {
                return Ok(Err("what one sent to all is wrong".into()));
            }
        }
        Act::Letter { from, to } => {
            let (bytes, mut got) = (100, vec![0; 100]);
            let tag = tag(step, FrameOp::Send, bytes);
            if me == from {
                let moves = Moves::new(vec![Move::send_from(to, 0..bytes)]);
                links.run(&tag, &moves, &data(me, step, bytes), &mut [], &mut add)?;
            }
            control.share(b"all have met")?;
            if me == to {
                let moves = Moves::new(vec![Move::recv(from, 0..bytes)]);
                links.run(&tag, &moves, &[], &mut got, &mut add)?;
                if got != data(from, step, bytes) {
                    return Ok(Err("a letter is wrong".into()));
                }
            }
        }
        Act::Fail { rank } if rank == me => return Err(control.fail("its disk is full")),
        Act::Idle { rank: idle, time } if idle == me => rank.sleep(time),
        Act::Fail { .. } | Act::Idle { .. } | Act::Linger { .. } => {}
    }
    Ok(Ok(()))
}

fn secret() -> Secret {
    Secret::from_text(&"5e".repeat(32)).expect("64 hexadecimal digits")
}

fn tag(step: u64, op: FrameOp, bytes: usize) -> Tag {
    Tag { step, op, dtype: 0, count: bytes as u64, terms: Terms::default() }
}

fn data(rank: usize, step: u64, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i * 7 + (i >> 8) + rank * 31 + step as usize) as u8).collect()
}

fn add(into: &mut [u8], arrived: &[u8], _: bool) {
    into.iter_mut().zip(arrived).for_each(|(a, b)| *a = a.wrapping_add(*b));
}

/// Every rank sends everything to every other.
fn to_each(me: usize, size: usize, bytes: usize) -> Moves {
    let peers = || (0..size).filter(move |&peer| peer != me);
    let sends = peers().map(|peer| Move::send_from(peer, 0..bytes));
    Moves::new(sends.chain(peers().map(|peer| Move::reduce(peer, 0..bytes, false))).collect())
}

/// Around a ring: sums first, then the sums of all.
fn around(me: usize, size: usize, bytes: usize) -> Moves {
    let part = |i: usize| {
        let i = i % size;
        i * bytes / size..(i + 1) * bytes / size
    };
    let (next, last) = ((me + 1) % size, (me + size - 1) % size);
    let mut moves = Vec::new();
    for k in 0..size - 1 {
        moves.push(Move::send(next, part(me + size - k)));
        moves.push(Move::reduce(last, part(me + 2 * size - k - 1), false));
    }
    for k in 0..size - 1 {
        moves.push(Move::send(next, part(me + size + 1 - k)));
        moves.push(Move::recv(last, part(me + size - k)));
    }
    Moves::new(moves)
}
