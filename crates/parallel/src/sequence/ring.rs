//! Attention of sequences that are cut over the ranks.
//!
//! Keys and values go round a ring: in `R - 1` rounds each rank passes those that it has to the next rank, and gets those of
//! the rank before. It starts to pass them before it computes with them, so they travel meanwhile.
//!
//! ```text
//! rank r, round k         has keys and values of rank s = r - k (mod R)
//! (o', lse') = attention of the rank's queries to the keys that they see of s
//! lse'' = ln(e^lse + e^lse')      o = o·e^(lse - lse'') + o'·e^(lse' - lse'')      lse = lse''
//! ```
//!
//! Backward, keys and values go round again; with the final `lse` and `o` the gradients of each part are those of ordinary
//! attention. `dq` is added up here. `dk` and `dv` are added up on their way: they follow their keys one round behind, and
//! after a last round, the `R`-th, they are at home.
//!
//! # Which keys are seen
//! Without a causal mask all are. With one, sequences are cut in a zigzag: rank `r` has pieces `r` and `2·R-1-r` of `2·R`, so
//!
//! ```text
//! s = r    its own keys, causally: the early piece comes first
//! s < r    the early piece of s, by all queries; the late one is later than all of them
//! s > r    both pieces of s, by the late queries; they are later than the early ones
//! ```
//!
//! Each is half of all pairs of queries and keys, so all ranks have the same work in every round. A rank meets `s < r` before
//! `s > r`, so its queries are cut in two once.

use polyreme_graph::op::{Attention, Binary, ExchangeKind, Unary};
use polyreme_graph::{Axis, DType, Op, ValueId};

use super::convert::Nodes;

/// What a rank computes in a round.
#[derive(Clone, Copy, PartialEq)]
enum Seen {
    /// All queries with all keys, or causally with its own.
    All { causal: bool },
    /// All queries with the early half of the keys.
    Early,
    /// The late half of the queries with all keys.
    Late,
}

/// Attention of this rank's queries to all keys; `qkv` are its operands → `[o, lse]`.
pub(super) fn forward(nodes: &mut Nodes, a: Attention, qkv: &[ValueId]) -> Vec<ValueId> {
    let (q, mut kv) = unpack(nodes, a, qkv);
    let ranks = nodes.place.ranks;
    // What the ranks' parts are added up from; in f32 whatever queries are stored in.
    let mut all: Option<[ValueId; 2]> = None;
    let mut late: Option<[ValueId; 2]> = None;
    for round in 0..ranks {
        let next = (round + 1 < ranks).then(|| pass(nodes, kv));
        let seen = seen(nodes, a, round);
        let part = block(nodes, a, seen, q, kv);
        match (seen, all) {
            (Seen::Late, Some(before)) => {
                let before = late.unwrap_or_else(|| halves(nodes, before)[1]);
                late = Some(merge(nodes, before, part));
            }
            (_, Some(before)) => all = Some(merge(nodes, before, part)),
            (_, None) => all = Some(part),
        }
        kv = next.unwrap_or(kv);
    }
    let [o, lse] = all.expect("a rank sees its own keys");
    let [o, lse] = match late {
        Some(late) => {
            let [early, _] = halves(nodes, [o, lse]);
            [
                nodes.push(Op::Concat { axis: 1 }, &[early[0], late[0]]),
                nodes.push(Op::Concat { axis: 2 }, &[early[1], late[1]]),
            ]
        }
        None => [o, lse],
    };
    let own = nodes.graph.value(q).dtype;
    vec![nodes.cast(o, own), lse]
}

/// `(do, o, lse)` and the operands of the attention → its gradients, packed as the operands are.
pub(super) fn backward(
    nodes: &mut Nodes,
    a: Attention,
    saved: [ValueId; 3],
    qkv: &[ValueId],
) -> Vec<ValueId> {
    let (q, mut kv) = unpack(nodes, a, qkv);
    let ranks = nodes.place.ranks;
    let dtype = nodes.graph.value(q).dtype;
    let mut dq: Option<ValueId> = None;
    // Of the keys that this rank has in the round, by the ranks that had them before.
    let mut dkv: Option<ValueId> = None;
    for round in 0..ranks {
        let next = (round + 1 < ranks).then(|| pass(nodes, kv));
        let arrived = dkv.map(|dkv| pass(nodes, dkv));
        let seen = seen(nodes, a, round);
        let [q_part, k, v] = operands(nodes, seen, q, kv);
        let [dy, o, lse] = match seen {
            Seen::Late => {
                let [dy, o] = [saved[0], saved[1]].map(|x| half(nodes, x, 1, 1));
                [dy, o, half(nodes, saved[2], 2, 1)]
            }
            Seen::All { .. } | Seen::Early => saved,
        };
        let op = Op::AttentionGrad(part_of(a, seen));
        let grads = nodes.push_all(op, &[dy, o, lse, q_part, k, v]);
        let time = nodes.graph.shape(q).dims()[1];
        let mut own_dq = nodes.cast(grads[0], DType::F32);
        let mut own_dkv = {
            let both = [grads[1], grads[2]].map(|d| in_pair(nodes, d));
            let both = nodes.push(Op::Concat { axis: 2 }, &both);
            nodes.cast(both, DType::F32)
        };
        match seen {
            Seen::All { .. } => {}
            Seen::Early => own_dkv = nodes.pad_zeros(own_dkv, 1, 0, time / 2),
            Seen::Late => own_dq = nodes.pad_zeros(own_dq, 1, time / 2, 0),
        }
        dq = Some(add(nodes, dq, own_dq));
        dkv = Some(add(nodes, arrived, own_dkv));
        kv = next.unwrap_or(kv);
    }
    let (dq, dkv) = dq.zip(dkv).expect("a rank sees its own keys");
    let dkv = pass(nodes, dkv);
    let (dq, dkv) = (nodes.cast(dq, dtype), nodes.cast(dkv, dtype));
    if a.packed {
        let dq = in_pair(nodes, dq);
        return vec![nodes.push(Op::Concat { axis: 2 }, &[dq, dkv])];
    }
    vec![dq, one_of(nodes, dkv, 0), one_of(nodes, dkv, 1)]
}

/// `q [b, t, heads, d]`, and keys and values as one message `[b, t, 2, heads, d]`.
fn unpack(nodes: &mut Nodes, a: Attention, qkv: &[ValueId]) -> (ValueId, ValueId) {
    if a.packed {
        return (one_of(nodes, qkv[0], 0), nodes.slice(qkv[0], 2, 1, 2));
    }
    let both = [qkv[1], qkv[2]].map(|x| in_pair(nodes, x));
    (qkv[0], nodes.push(Op::Concat { axis: 2 }, &both))
}

/// Element `k` of dim 2, which is left out.
fn one_of(nodes: &mut Nodes, x: ValueId, k: usize) -> ValueId {
    let one = nodes.slice(x, 2, k, 1);
    let &[b, t, _, heads, d] = nodes.graph.shape(one).dims() else {
        unreachable!("queries, keys and values side by side")
    };
    nodes.reshape(one, [b, t, heads, d].into())
}

/// `[b, t, heads, d]` as `[b, t, 1, heads, d]`.
fn in_pair(nodes: &mut Nodes, x: ValueId) -> ValueId {
    let &[b, t, heads, d] = nodes.graph.shape(x).dims() else { unreachable!("heads of a sequence") };
    nodes.reshape(x, [b, t, 1, heads, d].into())
}

/// What the rank before has, for what this one has.
fn pass(nodes: &mut Nodes, x: ValueId) -> ValueId {
    let (rank, ranks) = (nodes.place.rank, nodes.place.ranks);
    let kind = ExchangeKind::Pass { to: Some((rank + 1) % ranks), from: Some((rank + ranks - 1) % ranks) };
    nodes.push(Op::Exchange { axis: Axis::Sequence, kind }, &[x])
}

/// What queries see of the keys that are here in a round.
fn seen(nodes: &Nodes, a: Attention, round: usize) -> Seen {
    let (rank, ranks) = (nodes.place.rank, nodes.place.ranks);
    let of = (rank + ranks - round) % ranks;
    match of.cmp(&rank) {
        _ if !a.causal || of == rank => Seen::All { causal: a.causal },
        std::cmp::Ordering::Less => Seen::Early,
        std::cmp::Ordering::Equal | std::cmp::Ordering::Greater => Seen::Late,
    }
}

fn part_of(a: Attention, seen: Seen) -> Attention {
    Attention { packed: false, causal: seen == Seen::All { causal: true }, ..a }
}

/// The queries, keys and values of a round.
fn operands(nodes: &mut Nodes, seen: Seen, q: ValueId, kv: ValueId) -> [ValueId; 3] {
    let q = if seen == Seen::Late { half(nodes, q, 1, 1) } else { q };
    let kv = if seen == Seen::Early { half(nodes, kv, 1, 0) } else { kv };
    [q, one_of(nodes, kv, 0), one_of(nodes, kv, 1)]
}

/// `[o, lse]` of a round.
fn block(nodes: &mut Nodes, a: Attention, seen: Seen, q: ValueId, kv: ValueId) -> [ValueId; 2] {
    let operands = operands(nodes, seen, q, kv);
    let part = nodes.push_all(Op::Attention(part_of(a, seen)), &operands);
    [nodes.cast(part[0], DType::F32), part[1]]
}

/// Attention to two sets of keys from that to each.
fn merge(nodes: &mut Nodes, a: [ValueId; 2], b: [ValueId; 2]) -> [ValueId; 2] {
    let binary = |nodes: &mut Nodes, op: Binary, x: ValueId, y: ValueId| nodes.push(Op::Binary(op), &[x, y]);
    let unary = |nodes: &mut Nodes, op: Unary, x: ValueId| nodes.push(Op::Unary(op), &[x]);
    let max = binary(nodes, Binary::Max, a[1], b[1]);
    let exp = |nodes: &mut Nodes, lse: ValueId, shift: ValueId| {
        let below = binary(nodes, Binary::Sub, lse, shift);
        unary(nodes, Unary::Exp, below)
    };
    let (ea, eb) = (exp(nodes, a[1], max), exp(nodes, b[1], max));
    let sum = binary(nodes, Binary::Add, ea, eb);
    let ln = unary(nodes, Unary::Ln, sum);
    let lse = binary(nodes, Binary::Add, max, ln);
    let weighted = |nodes: &mut Nodes, e: ValueId, o: ValueId| {
        let share = binary(nodes, Binary::Div, e, sum);
        // `[b, heads, t]` as `[b, t, heads, 1]`.
        let share = nodes.push(Op::Permute(vec![0, 2, 1]), &[share]);
        let &[b, t, heads] = nodes.graph.shape(share).dims() else { unreachable!("a number for each query") };
        let share = nodes.reshape(share, [b, t, heads, 1].into());
        binary(nodes, Binary::Mul, o, share)
    };
    let (a, b) = (weighted(nodes, ea, a[0]), weighted(nodes, eb, b[0]));
    [binary(nodes, Binary::Add, a, b), lse]
}

/// `[o, lse]` of the early and of the late queries.
fn halves(nodes: &mut Nodes, [o, lse]: [ValueId; 2]) -> [[ValueId; 2]; 2] {
    [0, 1].map(|k| [half(nodes, o, 1, k), half(nodes, lse, 2, k)])
}

/// Half `k` of a dim.
fn half(nodes: &mut Nodes, x: ValueId, axis: usize, k: usize) -> ValueId {
    let len = nodes.graph.shape(x).dims()[axis] / 2;
    nodes.slice(x, axis, k * len, len)
}

fn add(nodes: &mut Nodes, sum: Option<ValueId>, x: ValueId) -> ValueId {
    match sum {
        Some(sum) => nodes.push(Op::Binary(Binary::Add), &[sum, x]),
        None => x,
    }
}
