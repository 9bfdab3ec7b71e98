//! Tables and losses that are split over the vocabulary: each rank has the rows, or the logits, of some of the ids.
//!
//! # Embedding
//! A rank looks up the ids that it has, and gives zeros for the others: the rows are the sum of what the ranks give.
//!
//! # Cross-entropy
//! Logits are never put together. With `z [n, c]` of rank `t`, which has the classes `first..first + c`:
//!
//! ```text
//! m    = max over the classes of all ranks              gather of n numbers
//! s    = Σ e^(z-m)      p = z-m of the label, if the rank has it, else 0      q = Σ w (z-m), with label smoothing
//! S, P, Q = sums of s, p, q over the ranks              sum of 2 n or 3 n numbers
//! loss = mean of (1-e) w[label] (ln S - P) + e/classes (Σw · ln S - Q)       lse = m + ln S
//! dz   = e^(z-lse) · share - even · w, minus own where the label is           local
//! ```
//!
//! The means, weights and the treatment of ignored labels are those of `polyreme_kernels::loss`. A label or an id that is in
//! no rank's part is an error on every rank: they all look up the weights of the labels, or ones, in a table of all ids.

use polyreme_graph::op::{Binary, CrossEntropy, Op, ReduceKind, Unary};
use polyreme_graph::{Axis, DType, ExchangeKind, Graph, Shape, ValueId};

use super::layout::TensorPlace;

/// Adds nodes to a rank's graph.
pub(super) struct Vocabulary<'a> {
    pub(super) graph: &'a mut Graph,
    pub(super) place: TensorPlace,
    pub(super) layer: &'a str,
}

/// Where a rank's ids are among those asked for.
struct Found {
    /// In the rank's part; any place in it where the rank does not have the id.
    idx: ValueId,
    /// 1 where the rank has the id, else 0.
    mine: ValueId,
}

/// What a loss needs to know of its labels, all `[n, 1]`.
struct Labels {
    /// The labels as numbers; 0 where they are ignored.
    numbers: ValueId,
    /// The weight of each row, 0 where its label is ignored.
    weights: ValueId,
    /// 1 where the label counts; nothing if all do.
    counted: Option<ValueId>,
}

impl Vocabulary<'_> {
    /// `(ids, part of a table [v/T, d])` → the rank's terms of `[ids.., d]`.
    pub(super) fn embedding(&mut self, ids: ValueId, table: ValueId) -> ValueId {
        let found = self.find_ids(ids, self.graph.shape(table).dims()[0]);
        let rows = self.push(Op::Embedding, &[found.idx, table]);
        let mine = self.column(found.mine);
        self.binary(Binary::Mul, rows, mine)
    }

    /// `(ids, dy)` → the gradient of the rank's `rows` rows of the table.
    pub(super) fn embedding_grad(&mut self, ids: ValueId, dy: ValueId, rows: usize) -> ValueId {
        let found = self.find_ids(ids, rows);
        let own = self.graph.value(dy).dtype;
        let mine = self.column(found.mine);
        let mine = if own == DType::F32 { mine } else { self.push(Op::Cast(own), &[mine]) };
        let dy = self.binary(Binary::Mul, dy, mine);
        self.push(Op::EmbeddingGrad { rows }, &[found.idx, dy])
    }

    /// `(part of the logits [n, c], labels [n], weights of all classes)` → `(mean loss, lse [n])`.
    pub(super) fn loss(
        &mut self,
        [logits, labels]: [ValueId; 2],
        class_weights: Option<ValueId>,
        options: CrossEntropy,
    ) -> [ValueId; 2] {
        let ranks = self.place.ranks;
        let (n, c) = self.sizes(logits);
        let labels = self.labels(labels, class_weights, options, c * ranks);
        let max = self.reduce(ReduceKind::Max, logits, 1);
        let max = self.wide(max);
        let kind = ExchangeKind::Gather { ranks, rank: self.place.rank };
        let all = self.push(Op::Exchange { axis: Axis::Tensor, kind }, &[max]);
        let max = self.reduce(ReduceKind::Max, all, 0);
        let max = self.reshape(max, [n, 1]);
        let logits = self.wide(logits);
        let z = self.binary(Binary::Sub, logits, max);
        let e = self.unary(Unary::Exp, z);
        let found = self.find(labels.numbers, c);
        let picked = self.push(Op::Gather { axis: 1 }, &[z, found.idx]);
        let mut terms =
            vec![self.reduce(ReduceKind::Sum, e, 1), self.binary(Binary::Mul, picked, found.mine)];
        let smoothing = options.label_smoothing;
        if smoothing > 0.0 {
            let weighted = match class_weights {
                Some(w) => {
                    let w = self.own_weights(w, c);
                    self.binary(Binary::Mul, z, w)
                }
                None => z,
            };
            terms.push(self.reduce(ReduceKind::Sum, weighted, 1));
        }
        let terms = self.push(Op::Concat { axis: 1 }, &terms);
        let sum = Op::Exchange { axis: Axis::Tensor, kind: ExchangeKind::Sum };
        let sums = self.push(sum, &[terms]);
        let sum = self.push(Op::Slice { axis: 1, start: 0, len: 1 }, &[sums]);
        let log_sum = self.unary(Unary::Ln, sum);
        let picked = self.push(Op::Slice { axis: 1, start: 1, len: 1 }, &[sums]);
        let cost = self.binary(Binary::Sub, log_sum, picked);
        let mut cost = self.binary(Binary::Mul, cost, labels.weights);
        if smoothing > 0.0 {
            let even = self.push(Op::Slice { axis: 1, start: 2, len: 1 }, &[sums]);
            let all = self.sum_of_weights(class_weights, c * ranks);
            let all = self.binary(Binary::Mul, log_sum, all);
            let mut even = self.binary(Binary::Sub, all, even);
            if let Some(counted) = labels.counted {
                even = self.binary(Binary::Mul, even, counted);
            }
            let even = self.unary(Unary::Scale(smoothing / (c * ranks) as f32), even);
            cost = self.unary(Unary::Scale(1.0 - smoothing), cost);
            cost = self.binary(Binary::Add, cost, even);
        }
        let cost = self.reduce(ReduceKind::Sum, cost, 0);
        let weight = self.reduce(ReduceKind::Sum, labels.weights, 0);
        let mean = self.binary(Binary::Div, cost, weight);
        let lse = self.binary(Binary::Add, max, log_sum);
        [self.reshape(mean, []), self.reshape(lse, [n])]
    }

    /// `(dloss, part of the logits, labels, lse, weights of all classes)` → the gradient of that part.
    pub(super) fn loss_grad(
        &mut self,
        [dloss, logits, labels, lse]: [ValueId; 4],
        class_weights: Option<ValueId>,
        options: CrossEntropy,
    ) -> ValueId {
        let own_type = self.graph.value(logits).dtype;
        let (n, c) = self.sizes(logits);
        let classes = c * self.place.ranks;
        let labels = self.labels(labels, class_weights, options, classes);
        let mut weight = self.reduce(ReduceKind::Sum, labels.weights, 0);
        if labels.counted.is_some() {
            // With all labels ignored gradients are 0, not 0/0.
            let least = self.constant(f32::MIN_POSITIVE);
            weight = self.binary(Binary::Max, weight, least);
        }
        let dloss = self.reshape(dloss, [1, 1]);
        let scale = self.binary(Binary::Div, dloss, weight);
        let own = self.binary(Binary::Mul, labels.weights, scale);
        let own = self.unary(Unary::Scale(1.0 - options.label_smoothing), own);
        // What every class takes of each row, with label smoothing.
        let even = (options.label_smoothing > 0.0).then(|| {
            let even = self.unary(Unary::Scale(options.label_smoothing / classes as f32), scale);
            match labels.counted {
                Some(counted) => self.binary(Binary::Mul, counted, even),
                None => even,
            }
        });
        let mut share = own;
        if let Some(even) = even {
            let all = self.sum_of_weights(class_weights, classes);
            let all = self.binary(Binary::Mul, even, all);
            share = self.binary(Binary::Add, share, all);
        }
        let lse = self.reshape(lse, [n, 1]);
        let logits = self.wide(logits);
        let z = self.binary(Binary::Sub, logits, lse);
        let p = self.unary(Unary::Exp, z);
        let mut dz = self.binary(Binary::Mul, p, share);
        if let Some(even) = even {
            let even = match class_weights {
                Some(w) => {
                    let w = self.own_weights(w, c);
                    self.binary(Binary::Mul, w, even)
                }
                None => even,
            };
            dz = self.binary(Binary::Sub, dz, even);
        }
        let found = self.find(labels.numbers, c);
        let own = self.binary(Binary::Mul, own, found.mine);
        let own = self.push(Op::ScatterAdd { axis: 1, len: c }, &[own, found.idx]);
        let dz = self.binary(Binary::Sub, dz, own);
        if own_type == DType::F32 { dz } else { self.push(Op::Cast(own_type), &[dz]) }
    }

    /// `[n]` labels and their weights.
    fn labels(
        &mut self,
        labels: ValueId,
        class_weights: Option<ValueId>,
        options: CrossEntropy,
        classes: usize,
    ) -> Labels {
        let n = self.graph.shape(labels).numel();
        let numbers = self.push(Op::Cast(DType::F32), &[labels]);
        let mut numbers = self.reshape(numbers, [n, 1]);
        let mut idx = self.reshape(labels, [1, n]);
        let mut counted = None;
        if let Some(ignored) = options.ignore_index {
            let ignored = self.constant(ignored as f32);
            let skipped = self.binary(Binary::Equal, numbers, ignored);
            let taken = self.unary(Unary::Neg, skipped);
            let taken = self.unary(Unary::Offset(1.0), taken);
            numbers = self.binary(Binary::Mul, numbers, taken);
            let known = self.push(Op::Cast(DType::I32), &[numbers]);
            idx = self.reshape(known, [1, n]);
            counted = Some(taken);
        }
        let table = self.table(class_weights, classes);
        let weights = self.push(Op::Gather { axis: 1 }, &[table, idx]);
        let mut weights = self.reshape(weights, [n, 1]);
        if let Some(counted) = counted {
            weights = self.binary(Binary::Mul, weights, counted);
        }
        Labels { numbers, weights, counted }
    }

    /// Where ids of any shape are in this rank's `len` rows.
    fn find_ids(&mut self, ids: ValueId, len: usize) -> Found {
        let shape = self.graph.shape(ids).clone();
        let numbers = self.push(Op::Cast(DType::F32), &[ids]);
        let found = self.find(numbers, len);
        // Ones, or an error if there is no such id at all.
        let table = self.table(None, len * self.place.ranks);
        let flat = self.reshape(ids, [1, shape.numel()]);
        let known = self.push(Op::Gather { axis: 1 }, &[table, flat]);
        let known = self.graph.reshape(known, shape, self.layer);
        Found { mine: self.binary(Binary::Mul, found.mine, known), ..found }
    }

    /// Where numbers of ids are in this rank's `len` ids.
    fn find(&mut self, numbers: ValueId, len: usize) -> Found {
        let first = self.place.rank * len;
        let local = self.unary(Unary::Offset(-(first as f32)), numbers);
        let last = (len - 1) as f32;
        let inside = self.unary(Unary::Clamp(0.0, last), local);
        let mine = self.binary(Binary::Equal, inside, local);
        Found { idx: self.push(Op::Cast(DType::I32), &[inside]), mine }
    }

    /// `[1, classes]`: the weight of each class, 1 if there are none.
    fn table(&mut self, class_weights: Option<ValueId>, classes: usize) -> ValueId {
        match class_weights {
            Some(w) => self.reshape(w, [1, classes]),
            None => {
                let one = self.constant(1.0);
                let shapes = vec![([1, classes].into(), DType::F32)];
                self.graph.push_shaped(Op::Expand, &[one], self.layer, shapes)[0]
            }
        }
    }

    /// The weights of this rank's classes.
    fn own_weights(&mut self, class_weights: ValueId, c: usize) -> ValueId {
        self.push(Op::Slice { axis: 0, start: self.place.rank * c, len: c }, &[class_weights])
    }

    /// A scalar, or `[1]`.
    fn sum_of_weights(&mut self, class_weights: Option<ValueId>, classes: usize) -> ValueId {
        match class_weights {
            Some(w) => self.reduce(ReduceKind::Sum, w, 0),
            None => self.constant(classes as f32),
        }
    }

    fn sizes(&self, logits: ValueId) -> (usize, usize) {
        let shape = self.graph.shape(logits);
        (shape.rows(), shape.last())
    }

    fn column(&mut self, x: ValueId) -> ValueId {
        let shape: Shape = [self.graph.shape(x).dims(), &[1]].concat().into();
        self.graph.reshape(x, shape, self.layer)
    }

    fn wide(&mut self, x: ValueId) -> ValueId {
        match self.graph.value(x).dtype {
            DType::F32 => x,
            _ => self.push(Op::Cast(DType::F32), &[x]),
        }
    }

    fn reduce(&mut self, kind: ReduceKind, x: ValueId, axis: usize) -> ValueId {
        self.push(Op::Reduce { kind, axes: vec![axis] }, &[x])
    }

    fn unary(&mut self, op: Unary, x: ValueId) -> ValueId {
        self.push(Op::Unary(op), &[x])
    }

    fn binary(&mut self, op: Binary, a: ValueId, b: ValueId) -> ValueId {
        self.push(Op::Binary(op), &[a, b])
    }

    fn constant(&mut self, value: f32) -> ValueId {
        self.push(Op::Const(value), &[])
    }

    fn reshape<const N: usize>(&mut self, x: ValueId, dims: [usize; N]) -> ValueId {
        self.graph.reshape(x, dims.into(), self.layer)
    }

    fn push(&mut self, op: Op, inputs: &[ValueId]) -> ValueId {
        let name = op.name();
        match self.graph.push(op, inputs, self.layer) {
            Ok(outputs) => outputs[0],
            Err(error) => unreachable!("{name} of a split vocabulary: {error}"),
        }
    }
}
