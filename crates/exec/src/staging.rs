//! Half precision for kernels that compute on f32: operands in half are widened into the node's scratch space before the
//! kernel runs, and results are rounded out of it afterwards.
//!
//! It is the general way, and gives the bits that a kernel must give that reads and writes halves by itself.

use polyreme_graph::graph::{Graph, Node};
use polyreme_graph::precision::is_half;
use polyreme_graph::{DType, Op, ValueId};

use crate::launch::Launch;

/// Where operands and results are staged: in floats from the start of what the kernel does not use of the scratch space.
#[derive(Default)]
pub(crate) struct Staging {
    /// By operand.
    pub(crate) inputs: Vec<Option<usize>>,
    /// By result.
    pub(crate) outputs: Vec<Option<usize>>,
    /// The format that operands in f32 are rounded to.
    pub(crate) rounded: Option<DType>,
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
        if takes_halves(launch) {
            return staging;
        }
        let base = if let Op::Epilogue(e) = &node.op { &e.base } else { &node.op };
        if let Op::MatMul { rounded, .. } = base {
            staging.rounded = *rounded;
        }
        let mut place = |v: ValueId, always: bool| {
            let value = graph.value(v);
            let staged = is_half(value.dtype) || always && value.dtype == DType::F32;
            let at = staging.len;
            // Each begins at a cache line.
            staging.len += if staged { value.shape.numel().next_multiple_of(LINE) } else { 0 };
            staged.then_some(at)
        };
        let rounds = staging.rounded.is_some();
        let inputs = node.inputs[..n_base_inputs].iter().map(|&v| place(v, rounds)).collect();
        let outputs = node.outputs[..n_base_outputs].iter().map(|&v| place(v, false)).collect();
        (staging.inputs, staging.outputs) = (inputs, outputs);
        staging
    }
}

/// Floats of a cache line.
pub(crate) const LINE: usize = 16;

/// Whether a kernel reads and writes halves by itself.
fn takes_halves(launch: &Launch) -> bool {
    matches!(launch, Launch::Nothing | Launch::Fused(_) | Launch::Cast { .. })
}
