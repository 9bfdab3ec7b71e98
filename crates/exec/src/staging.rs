//! Half precision for kernels that compute on f32: operands in half are widened into the node's scratch space before the
//! kernel runs, and results are rounded out of it afterwards.
//!
//! It is the general way, and gives the bits that a kernel must give that reads and writes halves by itself.

use polyreme_graph::graph::{Graph, Node};
use polyreme_graph::precision::is_half;
use polyreme_graph::{ExchangeKind, ValueId};

use crate::launch::Launch;

/// Where operands and results are staged: in floats from the start of what the kernel does not use of the scratch space.
#[derive(Default)]
pub(crate) struct Staging {
    /// By operand.
    pub(crate) inputs: Vec<Option<usize>>,
    /// By result.
    pub(crate) outputs: Vec<Option<usize>>,
    /// Floats of all.
    pub(crate) len: usize,
}

impl Staging {
    /// What has to be staged for a node. Operands from `n_base_inputs` on and results from `n_base_outputs` on are those of an
    /// epilogue, which takes any format.
    pub(crate) fn new(
        graph: &Graph,
        node: &Node,
        launch: &Launch,
        (n_base_inputs, n_base_outputs): (usize, usize),
    ) -> Staging {
        let mut staging = Staging::default();
        let mut place = |v: ValueId, takes: Takes| {
            let value = graph.value(v);
            let staged = takes == Takes::F32 && is_half(value.dtype);
            let at = staging.len;
            // Each begins at a cache line.
            staging.len += if staged { value.shape.numel().next_multiple_of(LINE) } else { 0 };
            staged.then_some(at)
        };
        let inputs = node.inputs[..n_base_inputs].iter().enumerate();
        let inputs = inputs.map(|(k, &v)| place(v, takes_input(launch, k))).collect();
        let outputs = node.outputs[..n_base_outputs].iter().enumerate();
        let outputs = outputs.map(|(k, &v)| place(v, takes_output(launch, k))).collect();
        (staging.inputs, staging.outputs) = (inputs, outputs);
        staging
    }
}

/// Floats of a cache line.
pub(crate) const LINE: usize = 16;

/// What a kernel takes of an operand or a result.
#[derive(Clone, Copy, PartialEq)]
enum Takes {
    /// f32, and integers.
    F32,
    /// Any format.
    Any,
}

fn any(is: bool) -> Takes {
    if is { Takes::Any } else { Takes::F32 }
}

/// What a kernel takes of operand `k`.
fn takes_input(launch: &Launch, k: usize) -> Takes {
    match launch {
        Launch::Lstm(_) | Launch::Gru(_) => any(k == 0),
        Launch::LstmGrad(_) => any([0, 4, 5, 6].contains(&k)),
        Launch::GruGrad(_) => any([0, 3, 4].contains(&k)),
        _ => takes_all(launch),
    }
}

/// What a kernel takes of result `k`.
fn takes_output(launch: &Launch, k: usize) -> Takes {
    match launch {
        Launch::Lstm(_) | Launch::Gru(_) => Takes::Any,
        Launch::LstmGrad(_) | Launch::GruGrad(_) => any(k == 0),
        _ => takes_all(launch),
    }
}

/// Sums of f32 over the ranks take nothing else; nor do recurrent layers of what has no time steps.
fn takes_all(launch: &Launch) -> Takes {
    any(!matches!(launch, Launch::Exchange(ExchangeKind::Sum | ExchangeKind::Scatter { .. })))
}
