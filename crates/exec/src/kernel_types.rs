//! Which element types there are kernels for: f32, halves, integers where an op takes them, and conversions. A graph may
//! use more types, and is then rejected before any memory is reserved.

use polyreme_graph::{DType, Graph, Op};

use crate::error::ExecError;

/// Checks that every node has a kernel for the types of its operands and results; the error names the first that has none.
pub(crate) fn check_kernels(graph: &Graph) -> Result<(), ExecError> {
    for node in &graph.nodes {
        let computes = !node.op.is_leaf() && !matches!(node.op, Op::Reshape | Op::Cast(_));
        let element_wise = node.op.is_elementwise() || matches!(node.op, Op::Epilogue(_));
        let has = |dtype: DType| match dtype {
            DType::F32 | DType::F16 | DType::Bf16 => true,
            DType::I32 => !element_wise,
            _ => false,
        };
        let types = node.inputs.iter().chain(&node.outputs).map(|&v| graph.value(v).dtype);
        if let Some(dtype) = types.into_iter().find(|&dtype| computes && !has(dtype)) {
            return Err(ExecError::NoKernel { layer: node.layer.clone(), op: node.op.name(), dtype });
        }
    }
    Ok(())
}
