//! Models cut into the chunks of a pipeline: every chunk in an engine of its own, and the bits of the whole step.
//!
//! # Layout
//! - `nets`: the models. `run`: a step, whole and in chunks. `cuts`: places by name, in every graph of a model.
//!   `evaluation`: forward passes of engines that train on a mesh.

// All of this is tests; clippy recognises only functions marked `#[test]`.
#![allow(clippy::unwrap_used)]

mod cuts;
mod evaluation;
mod nets;
mod run;

use polyreme_graph::Graph;
use polyreme_parallel::stage::{BackwardOrder, Cut, cut, flops, partition, positions};

use crate::run::{StepResults, in_chunks, on_ranks, whole};

/// Cuts into 1 to 4 chunks: at arbitrary nodes, also inside of blocks and between a norm and its ReLU, and where the search for
/// even costs would.
fn check(name: &str, step: &Graph) {
    let want = whole(step);
    assert!(want.contains_key("output loss") && want.keys().any(|k| k.starts_with("gradient")), "{name}");
    let n = step.n_forward;
    for chunks in 1..=4 {
        let anywhere: Vec<usize> = (0..n).map(|i| i * chunks / n).collect();
        check_cut(&format!("{name} in {chunks}, anywhere"), &cut(step, &anywhere).unwrap(), &want);
        if chunks <= positions(step).len() + 1 {
            let even = partition(step, chunks, &flops(step), None).unwrap();
            check_cut(&format!("{name} in {chunks}, evenly"), &cut(step, &even).unwrap(), &want);
        }
    }
}

fn check_cut(name: &str, cut: &Cut, want: &StepResults) {
    same(name, &in_chunks(cut), want);
    let n = cut.chunks.len();
    let mut without_states = want.clone();
    without_states.retain(|what, _| !what.starts_with("state"));
    let orders = [BackwardOrder::Apart, BackwardOrder::ByLayer];
    let all = &[(0..n).collect()];
    same(&format!("{name}, joined"), &on_ranks(cut, all, orders[n % 2]), &without_states);
    if n == 4 {
        // As a V: the first rank has the first chunk and the last.
        let ranks = [vec![0, 3], vec![1, 2]];
        let of_rank = |chunk: &usize| ranks.iter().position(|r| r.contains(chunk));
        for tied in cut.tied.iter().filter(|t| t.chunks.iter().any(|c| of_rank(c) != of_rank(&t.chunks[0]))) {
            without_states.remove(&format!("gradient {}", tied.name));
        }
        for order in orders {
            same(&format!("{name}, as a V, {order:?}"), &on_ranks(cut, &ranks, order), &without_states);
        }
    }
}

fn same(name: &str, got: &StepResults, want: &StepResults) {
    assert!(got.keys().eq(want.keys()), "{name}: {:?}", got.keys());
    for (what, want) in want {
        assert!(got[what] == *want, "{name}: {what} has other bits");
    }
}

macro_rules! nets {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            check(stringify!($name), &nets::$name());
        })*
    };
}

nets! { mlp tabular lenet cnn resnet18 lstm bigru encoder gpt tied skips shared_gradients }
