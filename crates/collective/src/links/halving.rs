//! Recursive halving and doubling: few rounds, with partners at distances that are powers of two.
//!
//! Let `p` be the largest power of two that is not above the number of ranks `n`, and `b` the bytes.
//!
//! - **Fold.** If `n > p`, the first `2 (n - p)` ranks form neighbouring pairs. The odd one of each pair sends its data
//!   to the even one and sits out; at the end it gets the result. That leaves `p` *core* ranks, each of which stands
//!   for one or two neighbouring ranks. Two more rounds and up to `2 b` more bytes.
//! - **Halving** (reduce-scatter), `log2 p` rounds. First with the core rank at distance `p / 2`, then `p / 4`, down to 1: two
//!   partners hold the same block of chunks, each sends the half that the other one is responsible for, and reduces the
//!   half that it keeps. After the round with distance `d` a core rank holds the reduction of `p / d` core ranks for a
//!   block of `d` chunks. `b (p - 1) / p` bytes.
//! - **Doubling** (all-gather), `log2 p` rounds with distances 1, 2, up to `p / 2`: partners send each other all that they
//!   have. As many bytes again.
//! - **All-reduce** by halving, then doubling: `2 log2 p` rounds, `2 b (p - 1) / p` bytes. Here a core rank need not
//!   end with the chunk of its own number, so the rounds go the other way: distance 1 first, with half of the data, up
//!   to `p / 2`, and back. A core rank is then responsible for the chunk whose number is its own with the bits
//!   reversed. Neighbours are often on one core or one host: four ranks on two cores take 55 ms for 64 MiB, and 62 ms
//!   with distance 2 first.
//! - **All-reduce by exchanging everything** (`Doubling`): `log2 p` rounds, in each of which partners exchange their whole
//!   data and both reduce them: `b log2 p` bytes. For small data, where only rounds count; and for two ranks, where it
//!   sends no more than the others.
//!
//! Both partners reduce in the order of their ranks, so all ranks get the same bits. If a rank dies, its partner of the
//! current round sees the connection close and tells all others.

use std::ops::Range;

use polyreme_net::Move;

/// The core ranks: how many, and which ranks each stands for.
struct Core {
    p: usize,
    pairs: usize,
}

impl Core {
    fn of(n: usize) -> Core {
        let p = 1 << n.ilog2();
        Core { p, pairs: n - p }
    }

    /// The first rank that core rank `c` stands for: the one that takes part.
    fn rank(&self, c: usize) -> usize {
        c + c.min(self.pairs)
    }

    /// A core rank's number with its bits reversed: the chunk that it owns in an all-reduce, where the largest halves
    /// go between neighbours.
    fn turned(&self, c: usize) -> usize {
        (0..self.p.ilog2()).fold(0, |turned, bit| turned << 1 | c >> bit & 1)
    }

    /// The core rank that stands for a rank.
    fn of_rank(&self, rank: usize) -> usize {
        if rank < 2 * self.pairs { rank / 2 } else { rank - self.pairs }
    }

    /// The core rank of a rank that does not sit out.
    fn takes_part(&self, rank: usize) -> Option<usize> {
        let c = self.of_rank(rank);
        (self.rank(c) == rank).then_some(c)
    }

    /// The rank that the even one of a pair stands for.
    fn extra(&self, c: usize) -> Option<usize> {
        (c < self.pairs).then_some(2 * c + 1)
    }
}

/// Afterwards the rank holds the reduction of `cuts[rank]..cuts[rank + 1]`.
pub(super) fn reduce_scatter(rank: usize, cuts: &[usize], list: &mut Vec<Move>) {
    let n = cuts.len() - 1;
    let (core, all) = (Core::of(n), cuts[0]..cuts[n]);
    let c = core.of_rank(rank);
    let own = |r: usize| cuts[r]..cuts[r + 1];
    if core.rank(c) != rank {
        list.push(Move::send(core.rank(c), all));
        list.push(Move::recv(core.rank(c), own(rank)));
        return;
    }
    if let Some(extra) = core.extra(c) {
        list.push(Move::reduce(extra, all, false));
    }
    halve(core.p, c, |c| core.rank(c), |c| cuts[core.rank(c)], list);
    if let Some(extra) = core.extra(c) {
        list.push(Move::send(extra, own(extra)));
    }
}

/// Afterwards the rank holds all chunks.
pub(super) fn all_gather(rank: usize, cuts: &[usize], list: &mut Vec<Move>) {
    let n = cuts.len() - 1;
    let core = Core::of(n);
    let c = core.of_rank(rank);
    let around = |r: usize| [cuts[0]..cuts[r], cuts[r + 1]..cuts[n]];
    if core.rank(c) != rank {
        list.push(Move::send(core.rank(c), cuts[rank]..cuts[rank + 1]));
        list.extend(around(rank).map(|bytes| Move::recv(core.rank(c), bytes)));
        return;
    }
    if let Some(extra) = core.extra(c) {
        list.push(Move::recv(extra, cuts[extra]..cuts[extra + 1]));
    }
    double(core.p, c, |c| core.rank(c), |c| cuts[core.rank(c)], list);
    if let Some(extra) = core.extra(c) {
        list.extend(around(extra).map(|bytes| Move::send(extra, bytes)));
    }
}

/// The first half of an all-reduce of the bytes `cuts[0]..cuts[p]`, a chunk for each core rank: afterwards each of those
/// holds the reduction of its own.
pub(super) fn all_reduce_in(rank: usize, n: usize, cuts: &[usize], list: &mut Vec<Move>) {
    let core = Core::of(n);
    if let Some(c) = fold_in(&core, rank, cuts[0]..cuts[core.p], list) {
        halve(core.p, core.turned(c), |c| core.rank(core.turned(c)), |c| cuts[c], list);
    }
}

/// The second half: afterwards the rank holds the reduction of all.
pub(super) fn all_reduce_out(rank: usize, n: usize, cuts: &[usize], list: &mut Vec<Move>) {
    let core = Core::of(n);
    if let Some(c) = core.takes_part(rank) {
        double(core.p, core.turned(c), |c| core.rank(core.turned(c)), |c| cuts[c], list);
    }
    fold_out(&core, rank, cuts[0]..cuts[core.p], list);
}

/// How many ranks take part in the halving, and how many chunks the data are cut into.
pub(super) fn parts(n: usize) -> usize {
    Core::of(n).p
}

/// All-reduce with the whole data in every round.
pub(super) fn all_reduce_whole(rank: usize, n: usize, bytes: usize, list: &mut Vec<Move>) {
    let core = Core::of(n);
    if let Some(c) = fold_in(&core, rank, 0..bytes, list) {
        for round in 0..core.p.ilog2() {
            let partner = c ^ (1 << round);
            list.push(Move::send(core.rank(partner), 0..bytes));
            list.push(Move::reduce(core.rank(partner), 0..bytes, partner < c));
        }
    }
    fold_out(&core, rank, 0..bytes, list);
}

/// Ranks that sit out send their data away; returns the core rank of the others.
fn fold_in(core: &Core, rank: usize, bytes: Range<usize>, list: &mut Vec<Move>) -> Option<usize> {
    let Some(c) = core.takes_part(rank) else {
        list.push(Move::send(core.rank(core.of_rank(rank)), bytes));
        return None;
    };
    if let Some(extra) = core.extra(c) {
        list.push(Move::reduce(extra, bytes, false));
    }
    Some(c)
}

/// Ranks that sat out get the result.
fn fold_out(core: &Core, rank: usize, bytes: Range<usize>, list: &mut Vec<Move>) {
    let c = core.of_rank(rank);
    if core.rank(c) != rank {
        list.push(Move::recv(core.rank(c), bytes));
    } else if let Some(extra) = core.extra(c) {
        list.push(Move::send(extra, bytes));
    }
}

/// `cut(c)` is where the chunk of core rank `c` starts; that of `p` is the end.
fn halve(
    p: usize,
    c: usize,
    rank: impl Fn(usize) -> usize,
    cut: impl Fn(usize) -> usize,
    list: &mut Vec<Move>,
) {
    for round in (0..p.ilog2()).rev() {
        let d = 1 << round;
        let (partner, kept) = (c ^ d, c & !(d - 1));
        let given = kept ^ d;
        list.push(Move::send(rank(partner), cut(given)..cut(given + d)));
        list.push(Move::reduce(rank(partner), cut(kept)..cut(kept + d), partner < c));
    }
}

fn double(
    p: usize,
    c: usize,
    rank: impl Fn(usize) -> usize,
    cut: impl Fn(usize) -> usize,
    list: &mut Vec<Move>,
) {
    for round in 0..p.ilog2() {
        let d = 1 << round;
        let (partner, had) = (c ^ d, c & !(d - 1));
        let got = had ^ d;
        list.push(Move::send(rank(partner), cut(had)..cut(had + d)));
        list.push(Move::recv(rank(partner), cut(got)..cut(got + d)));
    }
}
