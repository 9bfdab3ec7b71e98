//! What every rank of a group runs, and the expected results.

use half::{bf16, f16};

use super::whole::{Whole, folded, value};
use crate::buffer::Buffer;
use crate::comm::Comm;
use crate::element::{Bool, Reduce};
use crate::work::Cuts;

/// Data up to this size may use another algorithm than longer ones.
const SHORT_BYTES: usize = 4 << 10;

/// More than a staging area of shared memory holds, and several segments of a message.
const LARGE: usize = 200_003;

const REDUCERS: [Reduce; 3] = [Reduce::Sum, Reduce::Max, Reduce::Min];

/// A bug that is planted on purpose.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum PlantedBug {
    /// None.
    None,
    /// Ranks choose algorithms by their own cores, and do not announce it.
    SecretWays,
    /// Rank 0 assumes that every rank has a core, the others do not, and all announce it.
    OpenWays,
    /// A result of rank 2 is changed before it is compared.
    OneElement,
}

/// Where the data of a row are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Lies {
    /// On the heap.
    Heap,
    /// In memory that other ranks of the host reach.
    Block,
    /// On even ranks on the heap, on odd ones in the middle of such memory.
    Mixed,
}

/// Runs all rows. Where data are matters only if ranks share memory.
pub(super) fn run(comm: &mut Comm, fault: PlantedBug) -> Result<(), String> {
    let large = |reduce: Reduce| Some((LARGE, reduce));
    of_type::<f32>(comm, large(Reduce::Sum), fault)?;
    of_type::<bf16>(comm, large(Reduce::Min), fault)?;
    of_type::<f64>(comm, None, fault)?;
    of_type::<f16>(comm, None, fault)?;
    of_type::<i32>(comm, None, fault)?;
    of_type::<i64>(comm, None, fault)?;
    of_type::<u8>(comm, None, fault)?;
    of_type::<i8>(comm, None, fault)?;
    of_type::<Bool>(comm, None, fault)
}

fn of_type<T: Whole>(
    comm: &mut Comm,
    large: Option<(usize, Reduce)>,
    fault: PlantedBug,
) -> Result<(), String> {
    let edge = SHORT_BYTES / size_of::<T>();
    let most = large.map_or(edge.max(1000) + 1, |(len, _)| len);
    let mut room = Room::<T> { heap: vec![T::of(0); most], block: comm.buffer(most + 1).map_err(said)? };
    let places: &[Lies] =
        if comm.shares_memory() { &[Lies::Block, Lies::Heap, Lies::Mixed] } else { &[Lies::Heap] };
    for &lies in places {
        for len in [0, 1, 3, 1000, edge - 1, edge, edge + 1] {
            for reduce in REDUCERS {
                reductions(comm, &mut room, lies, len, reduce, fault)?;
            }
            moves(comm, &mut room, lies, len)?;
        }
        if let Some((len, reduce)) = large {
            reductions(comm, &mut room, lies, len, reduce, fault)?;
            moves(comm, &mut room, lies, len)?;
        }
    }
    Ok(())
}

/// Memory for the data of a type.
struct Room<T> {
    heap: Vec<T>,
    block: Buffer<T>,
}

impl<T: Whole> Room<T> {
    /// `len` elements with the numbers of a rank.
    fn filled(&mut self, lies: Lies, rank: usize, len: usize) -> &mut [T] {
        let data = match (lies, rank % 2) {
            (Lies::Heap, _) | (Lies::Mixed, 0) => &mut self.heap[..len],
            (Lies::Block, _) => &mut self.block[..len],
            (Lies::Mixed, _) => &mut self.block[1..=len],
        };
        data.iter_mut().enumerate().for_each(|(i, x)| *x = value(rank, i));
        data
    }
}

/// Uneven cuts, some of them empty; or all for one rank.
fn cuts(ranks: usize, len: usize) -> [Cuts; 2] {
    let uneven = (0..=ranks).map(|r| len * r * r / (ranks * ranks));
    let one = (0..=ranks).map(|r| if r <= ranks / 2 { 0 } else { len });
    [uneven.collect(), one.collect()]
}

fn reductions<T: Whole>(
    comm: &mut Comm,
    room: &mut Room<T>,
    lies: Lies,
    len: usize,
    reduce: Reduce,
    fault: PlantedBug,
) -> Result<(), String> {
    let (rank, ranks) = (comm.rank(), comm.size());
    let at = RowContext { rank, ranks, len, lies };
    let data = room.filled(lies, rank, len);
    comm.all_reduce(data, reduce).map_err(said)?;
    if fault == PlantedBug::OneElement && rank == 2 && len == 1000 {
        data[997] = T::of(77);
    }
    at.same(data, &format!("all-reduce ({reduce:?})"), |i| folded(ranks, i, reduce))?;
    for cuts in cuts(ranks, len) {
        let data = room.filled(lies, rank, len);
        comm.reduce_scatter(data, &cuts, reduce).map_err(said)?;
        let (from, to) = (cuts[rank], cuts[rank + 1]);
        at.same(&data[from..to], &format!("reduce-scatter ({reduce:?})"), |i| {
            folded(ranks, from + i, reduce)
        })?;
    }
    Ok(())
}

fn moves<T: Whole>(comm: &mut Comm, room: &mut Room<T>, lies: Lies, len: usize) -> Result<(), String> {
    let (rank, ranks) = (comm.rank(), comm.size());
    let at = RowContext { rank, ranks, len, lies };
    let root = len % ranks;
    let data = room.filled(lies, rank, len);
    comm.broadcast(data, root).map_err(said)?;
    at.same(data, "broadcast", |i| value(root, i))?;
    for cuts in cuts(ranks, len) {
        let owner = |i: usize| (0..ranks).find(|r| (cuts[*r]..cuts[r + 1]).contains(&i)).unwrap_or(0);
        let (from, to) = (cuts[rank], cuts[rank + 1]);
        let data = room.filled(lies, rank, len);
        comm.all_gather(data, &cuts).map_err(said)?;
        at.same(data, "all-gather", |i| value(owner(i), i))?;

        let mut whole = vec![T::of(50); if rank == root { len } else { 0 }];
        let data = room.filled(lies, rank, to - from);
        comm.gather(data, (rank == root).then_some(&mut whole[..]), &cuts, root).map_err(said)?;
        at.same(&whole, "gather", |i| value(owner(i), i - cuts[owner(i)]))?;

        let mut mine = vec![T::of(50); to - from];
        let data = room.filled(lies, rank, len);
        comm.scatter(&mut mine, (rank == root).then_some(&data[..]), &cuts, root).map_err(said)?;
        at.same(&mine, "scatter", |i| value(root, from + i))?;

        // Every rank sends range `r` to rank `r`, which gets its own range from each.
        let each = to - from;
        let mut got = vec![T::of(50); each * ranks];
        let data = room.filled(lies, rank, len);
        let into: Cuts = (0..=ranks).map(|r| r * each).collect();
        comm.all_to_all(data, &cuts, &mut got, &into).map_err(said)?;
        at.same(&got, "all-to-all", |i| value(i / each, from + i % each))?;
    }
    if ranks > 1 {
        // Around, and rank 0 receives last.
        let (next, last) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        let mut got = vec![T::of(50); len];
        let data = room.filled(lies, rank, len);
        for receives in [rank > 0, rank == 0] {
            let done = if receives { comm.recv(last, &mut got) } else { comm.send(next, data) };
            done.map_err(said)?;
        }
        at.same(&got, "send and receive", |i| value(last, i))?;
    }
    comm.barrier().map_err(said)
}

/// Where a row ran.
struct RowContext {
    rank: usize,
    ranks: usize,
    len: usize,
    lies: Lies,
}

impl RowContext {
    fn same<T: Whole>(&self, got: &[T], op: &str, want: impl Fn(usize) -> T) -> Result<(), String> {
        let Some((i, x)) = got.iter().enumerate().find(|(i, x)| **x != want(*i)) else { return Ok(()) };
        let RowContext { rank, ranks, len, lies } = self;
        let dtype = T::DTYPE;
        let want = want(i);
        Err(format!(
            "{op} of {len} {dtype:?} ({lies:?}) at rank {rank} of {ranks}: element {i} is {x:?}, not {want:?}"
        ))
    }
}

fn said(report: polyreme_net::Report) -> String {
    report.to_string()
}
