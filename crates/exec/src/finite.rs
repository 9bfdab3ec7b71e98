//! Where a number that is not finite came from: the last run again, node by node.

use std::fmt;

use polyreme_dtype::{bf16, f16};
use polyreme_graph::{DType, ExchangeKind, Instr, Op, Place, ValueId};

use crate::engine::Engine;
use crate::error::ExecError;

/// The first place in a step where a number is infinite or not a number.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NonFinite {
    /// An input holds it: the data are wrong.
    Input {
        /// The name of the input.
        name: String,
        /// The index of the element.
        idx: usize,
    },
    /// A parameter or state holds it since an earlier update.
    Param {
        /// The name of the parameter or state.
        name: String,
    },
    /// A node made it out of finite operands.
    Node {
        /// The path of the layer.
        layer: String,
        /// The name of the op.
        op: &'static str,
        /// Whether it belongs to the backward pass.
        backward: bool,
        /// Whether a number was too large for the half-precision format of the result, and is infinite for no other reason.
        overflow: bool,
    },
}

impl fmt::Display for NonFinite {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            NonFinite::Input { name, idx } => {
                write!(f, "the data: element {idx} of the input `{name}` is not finite")
            }
            NonFinite::Param { name } => write!(f, "the last update: `{name}` is no longer finite"),
            NonFinite::Node { layer, op, backward, overflow } => {
                let why =
                    if *overflow { "is too large for f16" } else { "is the first result that is not finite" };
                let pass = if *backward { "backward" } else { "forward" };
                write!(f, "layer `{layer}`: {op}, in the {pass} pass, {why}")
            }
        }
    }
}

impl Engine {
    /// Runs the last microbatch again and checks every result; `None` if all is finite.
    ///
    /// Slow: meant for the end of a run that has failed. It communicates with no other rank, since others may look
    /// elsewhere or not at all: sums over ranks hold this rank's terms only, weights that are gathered hold its shard only, and a number that came from
    /// another rank is found there.
    pub fn find_non_finite(&mut self) -> Result<Option<NonFinite>, ExecError> {
        let loaded = self.loaded();
        let load = |i: &Instr| match i {
            Instr::Load { microbatch, .. } => Some(*microbatch),
            _ => None,
        };
        let Some(last) = loaded.program.instrs.iter().rev().find_map(load) else { return Ok(None) };
        let last = &loaded.program.microbatches[last];
        let body = loaded.bodies[last.body];
        let ready = self.bodies[body].as_ref().expect("bodies of a program stay with it");
        self.memory.set_constants(ready, 0);
        self.find_non_finite_in(body, 0, last.first_sample as u64)
    }

    /// The same for the microbatch that lies in a slot.
    pub(crate) fn find_non_finite_in(
        &mut self,
        body: usize,
        slot: usize,
        first_sample: u64,
    ) -> Result<Option<NonFinite>, ExecError> {
        let ready = self.bodies[body].as_ref().expect("bodies of a program stay with it");
        let compiled = ready.body.clone();
        let graph = &compiled.graph;
        for input in &graph.inputs {
            if let Some((idx, _)) = self.first_bad(body, slot, input.value) {
                return Ok(Some(NonFinite::Input { name: input.name.clone(), idx }));
            }
        }
        for stored in graph.params.iter().chain(&graph.states) {
            if self.first_bad(body, slot, stored.value).is_some() {
                return Ok(Some(NonFinite::Param { name: stored.name.clone() }));
            }
        }
        for (i, node) in graph.nodes.iter().enumerate().filter(|(i, _)| compiled.applied[*i].is_none()) {
            // What other ranks would bring is not there: zeros, rather than what the memory held last.
            if let Op::Exchange { kind: ExchangeKind::Gather { .. } | ExchangeKind::Swap { .. }, .. } =
                node.op
            {
                self.memory.clear(self.bodies[body].as_ref().expect("bodies stay"), slot, node.outputs[0]);
            }
            self.run_node(body, slot, i, first_sample)?;
            if let Some((_, overflow)) = node.outputs.iter().find_map(|&v| self.first_bad(body, slot, v)) {
                let (layer, op) = (node.layer.clone(), node.op.name());
                return Ok(Some(NonFinite::Node { layer, op, backward: i >= graph.n_forward, overflow }));
            }
        }
        Ok(None)
    }

    /// The first element of a value that is not finite, and whether all such elements are infinite numbers in half precision.
    fn first_bad(&self, body: usize, slot: usize, v: ValueId) -> Option<(usize, bool)> {
        let ready = self.bodies[body].as_ref().expect("bodies of a program stay with it");
        if ready.plan.places[v.idx()] == Place::Nowhere {
            return None;
        }
        fn of<T: Copy>(x: &[T], wide: impl Fn(T) -> f32 + Copy, half: bool) -> Option<(usize, bool)> {
            let first = x.iter().position(|&x| !wide(x).is_finite())?;
            Some((first, half && !x[first..].iter().any(|&x| wide(x).is_nan())))
        }
        match ready.body.graph.value(v).dtype {
            DType::F32 => of(self.memory.read::<f32>(ready, slot, v), |x| x, false),
            DType::F16 => of(self.memory.read::<f16>(ready, slot, v), f16::to_f32, true),
            DType::Bf16 => of(self.memory.read::<bf16>(ready, slot, v), bf16::to_f32, true),
            _ => None,
        }
    }
}
