//! Synchronised batch norm: a rewrite of a step that gives every batch norm the statistics of all ranks.
//!
//! # What each rank does
//! Rank `r` of the data axis holds `n_r` of the batch's `N = Σ n_r` rows; the shards may differ, and may be empty.
//!
//! ```text
//! forward    sums_r = [n_r, Σ (x - shift), Σ (x - shift)²]      one rank's rows; shift is the running mean
//!            sums   = Σ over ranks of sums_r                    1 + 2·c floats, the same on every rank
//!            y, mean, rstd, running mean, running variance      from sums; the running variance over N - 1
//! backward   sums_r = [n_r, Σ g, Σ g h]                         dbeta and dgamma of the rank's rows
//!            sums   = Σ over ranks of sums_r
//!            dx     = gamma rstd (g - Σ g / N - h Σ g h / N)    from sums
//! ```
//!
//! So each norm waits twice per step, for one all-reduce of `1 + 2·c` floats each time. Running means are the same on
//! all ranks before a step (they start equal, and each step keeps them equal), which is why they serve as the shift.
//!
//! # Gradients of the parameters
//! `dgamma` and `dbeta` stay sums over the rank's own rows: they are summed with all other gradients later. The loss
//! that is differentiated is the sum of the ranks' losses, each seeded with the weight of its rank; `g` carries that
//! weight, so the sums for `dx` and the later sum of `dgamma` are both right without another factor.
//!
//! # What must hold
//! All ranks run the same steps and run their graphs equally often: each sum waits for every rank. The rewrite comes
//! after differentiation and before recomputation: sums over ranks are never computed again, so ranks with shards of
//! different size may recompute different things. If a peer dies, the sum fails and so does the step on each rank; no
//! parameter has changed.

use polyreme_graph::fuse::join_norm_relu;
use polyreme_graph::graph::Rebuild;
use polyreme_graph::op::{Epilogue, ExchangeKind};
use polyreme_graph::{Axis, Graph, Op, ValueId};

/// What a norm waits for.
const SUM: Op = Op::Exchange { axis: Axis::Data, kind: ExchangeKind::Sum };

/// The step with every batch norm of training, forward and backward, synchronised over the data axis.
///
/// Norms followed by ReLU are joined first, as fusion would; what fusion attaches to a batch norm it attaches to its
/// last part.
pub fn sync_batch_norm(step: &Graph) -> Graph {
    let step = &join_norm_relu(step);
    let mut to = Rebuild::new(step);
    for (i, node) in step.nodes.iter().enumerate() {
        if i == step.n_forward {
            to.graph.n_forward = to.graph.nodes.len();
        }
        let mut inputs: Vec<_> = node.inputs.iter().map(|&v| to.get(v)).collect();
        let (base, n_base_inputs) = match &node.op {
            Op::Epilogue(e) => (&e.base, e.n_base_inputs),
            op => (op, inputs.len()),
        };
        match *base {
            Op::BatchNorm { eps, momentum, relu } => {
                let sums = push(&mut to, Op::BatchNormSums, &[inputs[0], inputs[3]], &node.layer)[0];
                let sums = push(&mut to, SUM, &[sums], &node.layer)[0];
                inputs.insert(n_base_inputs, sums);
                let norm = Op::BatchNormFromSums { eps, momentum, relu };
                let op = match &node.op {
                    Op::Epilogue(e) => {
                        let n_base_inputs = n_base_inputs + 1;
                        Op::Epilogue(Box::new(Epilogue { base: norm, n_base_inputs, ..(**e).clone() }))
                    }
                    _ => norm,
                };
                to.replace(step, &node.outputs, op, &inputs, &node.layer);
            }
            Op::BatchNormGrad { relu } => {
                let parts = push(&mut to, Op::BatchNormGradSums { relu }, &inputs, &node.layer);
                for (old, &new) in node.outputs[1..].iter().zip(&parts[1..]) {
                    to.map[old.idx()] = Some(new);
                }
                let sums = push(&mut to, SUM, &parts[..1], &node.layer)[0];
                inputs.push(sums);
                let op = Op::BatchNormGradFromSums { relu };
                to.replace(step, &node.outputs[..1], op, &inputs, &node.layer);
            }
            _ => to.copy(step, i),
        }
    }
    if step.n_forward == step.nodes.len() {
        to.graph.n_forward = to.graph.nodes.len();
    }
    // If nothing reads a norm's dx, its sums are not needed either.
    let synced = to.finish(step).without_dead();
    synced.verify();
    synced
}

fn push(to: &mut Rebuild, op: Op, inputs: &[ValueId], layer: &str) -> Vec<ValueId> {
    let name = op.name();
    match to.graph.push(op, inputs, layer) {
        Ok(outputs) => outputs,
        Err(error) => unreachable!("{name} of operands that were checked: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use polyreme_graph::builder::BatchNorm;
    use polyreme_graph::op::Conv;
    use polyreme_graph::{Builder, DType, Init, Tensor, Traced, differentiate, fuse, recompute};

    fn conv_norm(b: &mut Builder, name: &str, x: Tensor, out: usize) -> Traced {
        b.layer(name, |b| {
            let c = b.shape(x).last();
            let w = b.param("weight", [out, c, 3, 3], Init::Normal { std: 0.1 })?;
            let y = b.conv2d(x, w, None, Conv { padding: (1, 1), ..Conv::default() })?;
            norm(b, y)
        })
    }

    fn norm(b: &mut Builder, x: Tensor) -> Traced {
        let c = b.shape(x).last();
        let at = BatchNorm {
            gamma: b.param("gamma", [c], Init::Const(1.0))?,
            beta: b.param("beta", [c], Init::Const(0.0))?,
            running_mean: b.state("mean", [c], Init::Const(0.0))?,
            running_var: b.state("var", [c], Init::Const(1.0))?,
            eps: 1e-5,
            momentum: 0.1,
        };
        b.batch_norm(x, at, true)
    }

    /// Convolution, norm, ReLU; convolution, norm, sum with the first, ReLU.
    fn residual(b: &mut Builder) -> Traced {
        let x = b.input("x", [2, 6, 6, 3], DType::F32)?;
        let h = conv_norm(b, "stem", x, 4)?;
        let h = b.activation("relu", h)?;
        let y = conv_norm(b, "block", h, 4)?;
        let sum = b.add(y, h)?;
        let h = b.activation("relu", sum)?;
        b.mean(h, &[0, 1, 2, 3])
    }

    fn step(model: impl Fn(&mut Builder) -> Traced) -> Graph {
        let mut b = Builder::new();
        let loss = model(&mut b).unwrap();
        differentiate(&b.finish(&[("loss", loss)]), loss).unwrap()
    }

    fn count(graph: &Graph, name: &str) -> usize {
        graph.nodes.iter().filter(|n| n.op.name() == name).count()
    }

    #[test]
    fn a_residual_step_keeps_its_fusions() {
        let got = fuse(&sync_batch_norm(&step(residual))).to_string();
        assert_eq!(got, include_str!("../snapshots/sync_residual_step.txt"), "\n--- got ---\n{got}");
    }

    #[test]
    fn a_fused_step_is_rewritten_to_the_same() {
        let before = sync_batch_norm(&fuse(&step(residual)));
        assert_eq!(before.to_string(), fuse(&sync_batch_norm(&step(residual))).to_string());
    }

    #[test]
    fn a_graph_without_batch_norm_stays() {
        let plain = step(|b| {
            let x = b.input("x", [2, 3], DType::F32)?;
            let w = b.param("w", [4, 3], Init::Const(1.0))?;
            let y = b.linear(x, w, None)?;
            b.mean(y, &[0, 1])
        });
        assert_eq!(sync_batch_norm(&plain), plain);
        assert_eq!(sync_batch_norm(&Graph::default()), Graph::default());
    }

    #[test]
    fn nobody_waits_for_sums_that_nobody_reads() {
        let first = sync_batch_norm(&step(|b| {
            let x = b.input("x", [2, 3], DType::F32)?;
            let y = norm(b, x)?;
            let y = b.activation("tanh", y)?;
            b.mean(y, &[0, 1])
        }));
        assert_eq!(count(&first, "axis_sum"), 1, "{first}");
        assert_eq!(first.grads.iter().flatten().count(), 2);
    }

    #[test]
    fn recomputation_adds_no_sum_over_ranks() {
        let synced = sync_batch_norm(&step(residual));
        let kept = |g: &Graph| {
            let forward = |v: &&ValueId| g.value(**v).producer.idx() < g.n_forward;
            let mut read: Vec<_> =
                g.nodes[g.n_forward..].iter().flat_map(|n| &n.inputs).filter(forward).collect();
            read.sort_unstable();
            read.dedup();
            read.iter().map(|v| g.value(**v).bytes()).sum()
        };
        let budget = kept(&synced) - 1;
        let again = recompute(&synced, budget, &kept).unwrap();
        assert!(count(&again.graph, "batch_norm_from_sums") > 2, "a norm is computed again\n{}", again.graph);
        assert_eq!(count(&again.graph, "axis_sum"), 4, "{}", again.graph);
        assert_eq!(count(&synced, "axis_sum"), 4);
    }
}
