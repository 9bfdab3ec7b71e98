//! The memory plan: where every value of a step is stored, fixed before anything runs.
//!
//! Parameters, gradients and states have their own arenas, ordered by when gradients become ready. All other values
//! share one more: each has an offset from its computation to its last use. A reshape shares its operand's memory, and
//! an element-wise result or a sum over ranks overwrites an operand that is not read again.
//!
//! # Several microbatches at a time
//! In a pipeline the forward pass of one microbatch runs between those of others. The nodes of a body are then cut into
//! *segments*, each of which runs as a whole; what lives in one segment only needs no memory of its own for each microbatch.
//! So values are in two places: those that outlive their segment in the slot of their microbatch, the others, and scratch
//! space, in memory that all slots share.

use std::ops::Range;

use crate::body::{BlockKind, Segment};
use crate::graph::{Graph, ValueId};
use crate::op::{ExchangeKind, Op};
use crate::program::Axis;

/// Offsets are multiples of this many bytes: a cache line, and two AVX2 vectors.
pub const ALIGN_BYTES: usize = 64;

/// Where a value is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// In the arena of activations, at a byte offset; of a body in segments, in the slot of its microbatch.
    Arena(usize),
    /// In the memory that the microbatches of a body in segments share, at a byte offset.
    Shared(usize),
    /// In the parameters' arena, at an element offset.
    Param(usize),
    /// In the gradients' arena, at an element offset: that of its parameter, unless buckets alternate there.
    Grad(usize),
    /// In the states' arena, at an element offset.
    State(usize),
    /// In the inputs' arena, at a byte offset.
    Input(usize),
    /// Never stored: it only exists inside the fused passes that use it.
    Nowhere,
}

/// Every value's place and the sizes of the arenas.
#[derive(Clone, PartialEq, Debug)]
pub struct MemoryPlan {
    /// By value.
    pub places: Vec<Place>,
    /// By node: the byte offset in the arena of activations, or in what microbatches share, of the node's scratch space.
    pub scratch: Vec<usize>,
    /// By node: bytes of scratch.
    pub scratch_bytes: Vec<usize>,
    /// By parameter: the element offset in the parameters' arena.
    pub param_offsets: Vec<usize>,
    /// Elements of the parameters' arena.
    pub param_len: usize,
    /// Elements of the gradients' arena: as many as parameters that are not frozen, or those of the buffers that buckets alternate between.
    pub grad_len: usize,
    /// Elements of the states' arena.
    pub state_len: usize,
    /// Bytes of the inputs' arena.
    pub input_bytes: usize,
    /// Bytes of the arena of activations: the peak of live values, plus fragmentation. Of a body in segments, bytes of a slot.
    pub arena_bytes: usize,
    /// Bytes that all microbatches of a body in segments share; `None` if it is not in segments.
    pub shared_bytes: Option<usize>,
}

impl MemoryPlan {
    /// Plans `graph`; `scratch_bytes` says how much scratch space each node needs while it runs. `segments` are runs of nodes
    /// between which other microbatches may run; none if there is only one microbatch at a time.
    pub fn new(graph: &Graph, scratch_bytes: &[usize], segments: &[Segment]) -> MemoryPlan {
        assert_eq!(scratch_bytes.len(), graph.nodes.len(), "one size per node");
        let mut plan = MemoryPlan {
            places: vec![Place::Nowhere; graph.values.len()],
            scratch: vec![0; graph.nodes.len()],
            scratch_bytes: scratch_bytes.to_vec(),
            param_offsets: vec![0; graph.params.len()],
            param_len: 0,
            grad_len: 0,
            state_len: 0,
            input_bytes: 0,
            arena_bytes: 0,
            shared_bytes: None,
        };
        plan.place_stored(graph);
        plan.grad_len = learnt_len(graph);
        let mut blocks = lifetimes(graph, &plan.places);
        for (i, &bytes) in scratch_bytes.iter().enumerate().filter(|(_, b)| **b > 0) {
            blocks.push(Reservation {
                values: Vec::new(),
                scratch_of: Some(i),
                bytes,
                from: i,
                to: i,
                offset: 0,
            });
        }
        let inside = |b: &Reservation| segments.iter().any(|s| s.nodes.start <= b.from && b.to < s.nodes.end);
        let (mut shared, mut own): (Vec<_>, Vec<_>) = blocks.into_iter().partition(inside);
        // Weight gradients run at any time after the input gradients of their chunk: what they leave for a later segment must
        // not lie where the others' input gradients still find something.
        let backward = segments.iter().find(|s| s.kind != BlockKind::Forward).map_or(0, |s| s.nodes.start);
        for block in &mut own {
            let of = segments.iter().find(|s| s.nodes.contains(&block.from));
            if of.is_some_and(|s| s.kind == BlockKind::WeightGrad) {
                block.from = backward;
            }
        }
        plan.arena_bytes = assign_offsets(&mut own);
        plan.shared_bytes = (!segments.is_empty()).then(|| assign_offsets(&mut shared));
        let place = |blocks: Vec<Reservation>, at: fn(usize) -> Place, plan: &mut MemoryPlan| {
            for block in blocks {
                for v in &block.values {
                    plan.places[v.idx()] = at(block.offset);
                }
                if let Some(i) = block.scratch_of {
                    plan.scratch[i] = block.offset;
                }
            }
        };
        place(own, Place::Arena, &mut plan);
        place(shared, Place::Shared, &mut plan);
        // A reshape of something stored elsewhere is stored there too.
        for node in &graph.nodes {
            if matches!(node.op, Op::Reshape) && plan.places[node.outputs[0].idx()] == Place::Nowhere {
                plan.places[node.outputs[0].idx()] = plan.places[node.inputs[0].idx()];
            }
        }
        plan.verify(graph);
        plan
    }

    /// Bytes of all arenas, without optimizer state.
    pub fn total_bytes(&self) -> usize {
        (self.param_len + self.grad_len + self.state_len) * size_of::<f32>()
            + self.input_bytes
            + self.arena_bytes
            + self.shared_bytes.unwrap_or(0)
    }

    fn place_stored(&mut self, graph: &Graph) {
        for input in &graph.inputs {
            self.places[input.value.idx()] = Place::Input(self.input_bytes);
            self.input_bytes += graph.value(input.value).bytes().next_multiple_of(ALIGN_BYTES);
        }
        let mut at = 0;
        for state in &graph.states {
            self.places[state.value.idx()] = Place::State(at);
            at += padded_numel(graph, state.value);
        }
        self.state_len = at;
        for (p, range) in param_ranges(graph) {
            let value = graph.params[p].value;
            self.param_offsets[p] = range.start;
            self.places[value.idx()] = Place::Param(range.start);
            if let Some(grad) = graph.grads.get(p).copied().flatten() {
                self.places[reshape_root(graph, grad).idx()] = Place::Grad(range.start);
            }
            self.param_len = range.end;
        }
    }

    /// Checks that no two values overlap while both are live: this makes it sound to hand out slices by this plan.
    fn verify(&self, graph: &Graph) {
        let in_segments = self.shared_bytes.is_some();
        let range = |v: ValueId| match self.places[v.idx()] {
            Place::Arena(o) => Some((!in_segments, o, o + graph.value(v).bytes())),
            Place::Shared(o) => Some((true, o, o + graph.value(v).bytes())),
            _ => None,
        };
        let overlap = |a: (bool, usize, usize), b: (bool, usize, usize)| a.0 == b.0 && a.1 < b.2 && b.1 < a.2;
        for (i, node) in graph.nodes.iter().enumerate().filter(|(_, n)| !matches!(n.op, Op::Reshape)) {
            let scratch = (true, self.scratch[i], self.scratch[i] + self.scratch_bytes[i]);
            for (k, a) in node.outputs.iter().enumerate() {
                let Some(ra) = range(*a) else { continue };
                assert!(!overlap(ra, scratch), "node {i}: output {a} overlaps scratch");
                for b in &node.outputs[k + 1..] {
                    assert!(range(*b).is_none_or(|rb| !overlap(ra, rb)), "node {i}: outputs {a} {b} overlap");
                }
                for b in &node.inputs {
                    let may = matches!(node.op, Op::Fused(_)) || sums_in_place(&node.op);
                    let in_place = may && range(*b) == Some(ra);
                    let clear = in_place || range(*b).is_none_or(|rb| !overlap(ra, rb));
                    assert!(clear, "node {i} ({}): output {a} overlaps input {b}", node.op.name());
                }
            }
            for b in &node.inputs {
                assert!(
                    range(*b).is_none_or(|rb| !overlap(rb, scratch)),
                    "node {i}: input {b} overlaps scratch"
                );
            }
        }
    }
}

/// Whether an op is an exchange that ends where its operand is, if nothing else reads that.
fn sums_in_place(op: &Op) -> bool {
    matches!(op, Op::Exchange { kind: ExchangeKind::Sum | ExchangeKind::Scatter { .. }, .. })
}

/// Elements of a value, padded so that the next one begins at a multiple of [`ALIGN_BYTES`].
fn padded_numel(graph: &Graph, v: ValueId) -> usize {
    graph.shape(v).numel().next_multiple_of(ALIGN_BYTES / graph.value(v).dtype.bytes())
}

/// Elements of the states' arena.
pub fn state_len(graph: &Graph) -> usize {
    graph.states.iter().map(|state| padded_numel(graph, state.value)).sum()
}

/// Parameters in the order in which their gradients are computed: first those whose gradients are summed over the ranks, so that
/// they can be sent together, then those of which this rank has a shard, then those without a gradient; frozen ones last. Those that
/// each replica keeps for itself come behind the ones that replicas have in common.
///
/// How a graph is split over ranks, and so the order of its nodes, may depend on the number of samples, but parameters have one
/// place: there it is the order of the traced nodes that gradients come from, the last one first.
pub fn readiness(graph: &Graph) -> Vec<usize> {
    let split = graph
        .nodes
        .iter()
        .any(|node| matches!(node.op, Op::Exchange { axis: Axis::Tensor | Axis::Sequence, .. }));
    let place = |p: usize| match graph.grads.get(p).copied().flatten() {
        Some(grad) => {
            let node = graph.value(grad).producer;
            let when = if split { u32::MAX - graph.nodes[node.idx()].origin } else { node.0 };
            (u8::from(graph.params[p].shard.is_some()), graph.params[p].learning.own, when)
        }
        None => (u8::MAX, false, u32::from(graph.params[p].learning.frozen)),
    };
    let mut order: Vec<_> = (0..graph.params.len()).collect();
    order.sort_by_key(|&p| (place(p), p));
    order
}

/// The value whose elements `v` shows: itself unless it is a reshape.
pub fn reshape_root(graph: &Graph, mut v: ValueId) -> ValueId {
    while matches!(graph.producer(v).op, Op::Reshape) {
        v = graph.producer(v).inputs[0];
    }
    v
}

/// Values (or a scratch space) that share memory, and when it is in use.
struct Reservation {
    values: Vec<ValueId>,
    scratch_of: Option<usize>,
    bytes: usize,
    from: usize,
    to: usize,
    offset: usize,
}

/// Joins values into reservations: reshapes with their operands, in-place results with what they overwrite.
fn lifetimes(graph: &Graph, places: &[Place]) -> Vec<Reservation> {
    let end = graph.nodes.len();
    let mut last_use = vec![0; graph.values.len()];
    for (i, node) in graph.nodes.iter().enumerate() {
        for v in &node.inputs {
            last_use[v.idx()] = i;
        }
    }
    for v in graph.results() {
        last_use[v.idx()] = end;
    }
    let mut blocks: Vec<Reservation> = Vec::new();
    let mut of_value: Vec<Option<usize>> = vec![None; graph.values.len()];
    for (i, node) in graph.nodes.iter().enumerate() {
        let mut taken: Option<usize> = None;
        for &v in &node.outputs {
            if places[v.idx()] != Place::Nowhere {
                continue;
            }
            let to = last_use[v.idx()].max(i);
            let shared = match &node.op {
                Op::Reshape => match of_value[node.inputs[0].idx()] {
                    Some(b) => Some(b),
                    None => continue,
                },
                // A constant is written before the first step and must last.
                Op::Const(_) => {
                    let bytes = graph.value(v).bytes();
                    of_value[v.idx()] = Some(blocks.len());
                    blocks.push(Reservation {
                        values: vec![v],
                        scratch_of: None,
                        bytes,
                        from: 0,
                        to: end,
                        offset: 0,
                    });
                    continue;
                }
                Op::Fused(_) => node.inputs.iter().find_map(|u| {
                    let b = of_value[u.idx()]?;
                    let free = blocks[b].to == i && taken != Some(b);
                    // Another view of the same memory would be read at other offsets than it is written.
                    let alone = node
                        .inputs
                        .iter()
                        .all(|w| of_value[w.idx()] != Some(b) || graph.shape(*w) == graph.shape(v));
                    (free && alone && graph.value(*u).dtype == graph.value(v).dtype).then_some(b)
                }),
                // A sum over ranks is made where its terms are.
                op if sums_in_place(op) => of_value[node.inputs[0].idx()].filter(|&b| blocks[b].to == i),
                _ => None,
            };
            let b = shared.unwrap_or_else(|| {
                let bytes = graph.value(v).bytes();
                blocks.push(Reservation {
                    values: Vec::new(),
                    scratch_of: None,
                    bytes,
                    from: i,
                    to: i,
                    offset: 0,
                });
                blocks.len() - 1
            });
            if matches!(node.op, Op::Fused(_)) && shared.is_some() {
                taken = Some(b);
            }
            blocks[b].values.push(v);
            blocks[b].to = blocks[b].to.max(to);
            of_value[v.idx()] = Some(b);
        }
    }
    blocks
}

/// The parameters in the order in which gradients become ready, with the elements of the arena that each takes, padding
/// included: the ranges follow each other without gaps.
pub fn param_ranges(graph: &Graph) -> Vec<(usize, Range<usize>)> {
    let mut next = 0;
    let range = |p: usize| {
        let start = next;
        next += padded_numel(graph, graph.params[p].value);
        (p, start..next)
    };
    readiness(graph).into_iter().map(range).collect()
}

/// Elements of the parameters' arena that come before the frozen parameters: as many gradients and moments as there can be.
pub fn learnt_len(graph: &Graph) -> usize {
    let ranges = param_ranges(graph).into_iter();
    ranges.filter(|(p, _)| !graph.params[*p].learning.frozen).map(|(_, range)| range.end).max().unwrap_or(0)
}

/// The elements of the parameters' arena that each replica keeps for itself; those that replicas have in common come before them.
pub fn own_range(graph: &Graph) -> Range<usize> {
    let end = learnt_len(graph);
    let has_grad = |p: usize| graph.grads.get(p).is_some_and(Option::is_some);
    let own = param_ranges(graph).into_iter().filter(|(p, _)| graph.params[*p].learning.own && has_grad(*p));
    own.map(|(_, range)| range).reduce(|all, range| all.start..range.end).unwrap_or(end..end)
}

/// Largest first, each at the lowest offset that is free for its whole life. Returns the arena's size.
fn assign_offsets(blocks: &mut [Reservation]) -> usize {
    let mut order: Vec<_> = (0..blocks.len()).collect();
    order.sort_by_key(|&b| (std::cmp::Reverse(blocks[b].bytes), blocks[b].from));
    let mut placed: Vec<usize> = Vec::new();
    let mut total = 0;
    for b in order {
        let mut busy: Vec<(usize, usize)> = placed
            .iter()
            .map(|&p| &blocks[p])
            .filter(|p| p.from <= blocks[b].to && blocks[b].from <= p.to)
            .map(|p| (p.offset, p.offset + p.bytes.next_multiple_of(ALIGN_BYTES)))
            .collect();
        busy.sort_unstable();
        let mut offset = 0;
        for (start, end) in busy {
            if offset + blocks[b].bytes <= start {
                break;
            }
            offset = offset.max(end);
        }
        blocks[b].offset = offset;
        total = total.max(offset + blocks[b].bytes.next_multiple_of(ALIGN_BYTES));
        placed.push(b);
    }
    total
}
