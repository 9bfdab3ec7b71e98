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

/// What a rank computes with another one's keys.
#[derive(Clone, Copy, PartialEq)]
enum SeenKeys {
    /// All queries with all keys.
    All,
    /// All queries with the early half of the keys.
    Early,
    /// The late half of the queries with all keys.
    Late,
}

/// Attention of this rank's queries to all keys; `qkv` are its operands → `[o, lse]`.
pub(super) fn forward(nodes: &mut Nodes, a: Attention, qkv: &[ValueId]) -> Vec<ValueId> {
    let [q, k, v] = unpack(nodes, a, qkv);
    let mut kv = [k, v];
    let dtype = nodes.graph.value(q).dtype;
    let mut next = pass(nodes, kv);
    // Its own keys, from where they are. What parts are added up in is f32, whatever queries are stored in.
    let own = nodes.push_all(Op::Attention(a), qkv);
    let mut all = [nodes.cast(own[0], DType::F32), own[1]];
    let mut late: Option<[ValueId; 2]> = None;
    for round in 1..nodes.place.ranks {
        kv = next;
        if round + 1 < nodes.place.ranks {
            next = pass(nodes, kv);
        }
        let seen = seen(nodes, a, round);
        let operands = operands(nodes, seen, q, kv);
        let part = nodes.push_all(Op::Attention(part_of(a)), &operands);
        let part = [nodes.cast(part[0], DType::F32), part[1]];
        match seen {
            SeenKeys::All | SeenKeys::Early => all = merge(nodes, all, part),
            SeenKeys::Late => {
                let before = late.unwrap_or_else(|| halves(nodes, all, 1));
                late = Some(merge(nodes, before, part));
            }
        }
    }
    if let Some(late) = late {
        let early = halves(nodes, all, 0);
        all = [
            nodes.push(Op::Concat { axis: 1 }, &[early[0], late[0]]),
            nodes.push(Op::Concat { axis: 2 }, &[early[1], late[1]]),
        ];
    }
    vec![nodes.cast(all[0], dtype), all[1]]
}

/// `(do, o, lse)` and the operands of the attention → its gradients, packed as the operands are.
pub(super) fn backward(
    nodes: &mut Nodes,
    a: Attention,
    saved: [ValueId; 3],
    qkv: &[ValueId],
) -> Vec<ValueId> {
    let [q, k, v] = unpack(nodes, a, qkv);
    let mut kv = [k, v];
    let dtype = nodes.graph.value(q).dtype;
    let mut next = pass(nodes, kv);
    let own = nodes.push_all(Op::AttentionGrad(a), &[&saved[..], qkv].concat());
    let [mut dq, dk, dv] = unpack(nodes, a, &own).map(|d| nodes.cast(d, DType::F32));
    // Of the keys that this rank has in the round, by the ranks that had them before.
    let mut dkv = [dk, dv];
    for round in 1..nodes.place.ranks {
        kv = next;
        if round + 1 < nodes.place.ranks {
            next = pass(nodes, kv);
        }
        let arrives = pass(nodes, dkv);
        let seen = seen(nodes, a, round);
        let [q, k, v] = operands(nodes, seen, q, kv);
        let [dy, o, lse] = match seen {
            SeenKeys::Late => {
                let [o, lse] = halves(nodes, [saved[1], saved[2]], 1);
                [half(nodes, saved[0], 1, 1), o, lse]
            }
            SeenKeys::All | SeenKeys::Early => saved,
        };
        let grads = nodes.push_all(Op::AttentionGrad(part_of(a)), &[dy, o, lse, q, k, v]);
        let mut grads = [0, 1, 2].map(|k| nodes.cast(grads[k], DType::F32));
        let missing = nodes.graph.shape(kv[0]).dims()[1] / 2;
        match seen {
            SeenKeys::All => {}
            SeenKeys::Early => {
                for d in &mut grads[1..] {
                    *d = nodes.pad_zeros(*d, 1, 0, missing);
                }
            }
            SeenKeys::Late => grads[0] = nodes.pad_zeros(grads[0], 1, missing, 0),
        }
        let [dq_part, dk, dv] = grads;
        let mut add = |x: ValueId, y: ValueId| nodes.push(Op::Binary(Binary::Add), &[x, y]);
        dq = add(dq, dq_part);
        dkv = [add(arrives[0], dk), add(arrives[1], dv)];
    }
    let [dk, dv] = pass(nodes, dkv);
    let grads = [dq, dk, dv].map(|d| nodes.cast(d, dtype));
    if !a.packed {
        return grads.to_vec();
    }
    let grads = grads.map(|x| {
        let &[b, t, heads, d] = nodes.graph.shape(x).dims() else { unreachable!("heads of a sequence") };
        nodes.reshape(x, [b, t, 1, heads, d].into())
    });
    vec![nodes.push(Op::Concat { axis: 2 }, &grads)]
}

/// Queries, keys and values, each `[b, t, heads, d]`; or their gradients.
fn unpack(nodes: &mut Nodes, a: Attention, qkv: &[ValueId]) -> [ValueId; 3] {
    [0, 1, 2].map(|k| {
        if !a.packed {
            return qkv[k];
        }
        let one = nodes.slice(qkv[0], 2, k, 1);
        let &[b, t, _, heads, d] = nodes.graph.shape(one).dims() else {
            unreachable!("queries, keys and values side by side")
        };
        nodes.reshape(one, [b, t, heads, d].into())
    })
}

/// What the rank before has, for what this one has.
fn pass(nodes: &mut Nodes, x: [ValueId; 2]) -> [ValueId; 2] {
    let (rank, ranks) = (nodes.place.rank, nodes.place.ranks);
    let kind = ExchangeKind::Pass { to: Some((rank + 1) % ranks), from: Some((rank + ranks - 1) % ranks) };
    x.map(|x| nodes.push(Op::Exchange { axis: Axis::Sequence, kind }, &[x]))
}

/// What queries see of other ranks' keys, which are here in a round.
fn seen(nodes: &Nodes, a: Attention, round: usize) -> SeenKeys {
    let (rank, ranks) = (nodes.place.rank, nodes.place.ranks);
    let of = (rank + ranks - round) % ranks;
    match (a.causal, of < rank) {
        (false, _) => SeenKeys::All,
        (true, true) => SeenKeys::Early,
        (true, false) => SeenKeys::Late,
    }
}

/// The attention of a round: of other ranks' keys, all are seen that are there.
fn part_of(a: Attention) -> Attention {
    Attention { packed: false, causal: false, ..a }
}

/// The queries, keys and values of a round.
fn operands(nodes: &mut Nodes, seen: SeenKeys, q: ValueId, [k, v]: [ValueId; 2]) -> [ValueId; 3] {
    match seen {
        SeenKeys::All => [q, k, v],
        SeenKeys::Early => [q, half(nodes, k, 1, 0), half(nodes, v, 1, 0)],
        SeenKeys::Late => [half(nodes, q, 1, 1), k, v],
    }
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

/// `[o, lse]` of the early queries, 0, or of the late ones, 1.
fn halves(nodes: &mut Nodes, [o, lse]: [ValueId; 2], k: usize) -> [ValueId; 2] {
    [half(nodes, o, 1, k), half(nodes, lse, 2, k)]
}

/// Half `k` of a dim.
fn half(nodes: &mut Nodes, x: ValueId, axis: usize, k: usize) -> ValueId {
    let len = nodes.graph.shape(x).dims()[axis] / 2;
    nodes.slice(x, axis, k * len, len)
}
