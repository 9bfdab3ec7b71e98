//! The linear layer: `x·weightᵀ + bias`.

use polyreme_graph::{Builder, Init, LowRank, Tensor, Traced};

use super::{positive, uniform};

/// A linear map of the last dim, as `torch.nn.Linear`: `weight [outputs, inputs]` and `bias [outputs]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Linear {
    /// The length of the input's last dim.
    pub inputs: usize,
    /// The length of the output's last dim.
    pub outputs: usize,
    /// Whether there is a bias.
    pub bias: bool,
}

impl Linear {
    /// A linear layer with a bias.
    pub fn new(inputs: usize, outputs: usize) -> Linear {
        Linear { inputs, outputs, bias: true }
    }
    /// The same without a bias.
    pub fn without_bias(self) -> Linear {
        Linear { bias: false, ..self }
    }

    /// `[.., inputs]` → `[.., outputs]`.
    pub fn trace(&self, b: &mut Builder, name: &str, x: Tensor) -> Traced {
        self.trace_inits(b, name, x, [uniform(self.inputs); 2])
    }

    /// The same with weights that begin as `init` says and a bias of 0, as transformers often have it.
    pub fn trace_from(&self, b: &mut Builder, name: &str, x: Tensor, init: Init) -> Traced {
        self.trace_inits(b, name, x, [init, Init::Const(0.0)])
    }

    /// `y + scale · (x·Aᵀ)·Bᵀ`: `lora_a [rank, inputs]`, `lora_b [outputs, rank]`. The latter begins with 0, so at first nothing is added.
    fn with_factors(&self, b: &mut Builder, x: Tensor, y: Tensor, rank: usize, scale: f32) -> Traced {
        let down = b.param(LowRank::DOWN, [rank, self.inputs], uniform(self.inputs))?;
        let up = b.param(LowRank::UP, [self.outputs, rank], Init::Const(0.0))?;
        let low = b.linear(x, down, None)?;
        let low = b.linear(low, up, None)?;
        let low = b.scale(low, scale)?;
        b.add(y, low)
    }

    fn trace_inits(&self, b: &mut Builder, name: &str, x: Tensor, inits: [Init; 2]) -> Traced {
        let &Linear { inputs, outputs, bias } = self;
        b.layer(name, |b| {
            positive(b, "linear", &[("inputs", inputs), ("outputs", outputs)])?;
            let weight = b.param("weight", [outputs, inputs], inits[0])?;
            let bias = bias.then(|| b.param("bias", [outputs], inits[1])).transpose()?;
            let y = b.linear(x, weight, bias)?;
            match b.low_rank() {
                None => Ok(y),
                Some((rank, scale)) => self.with_factors(b, x, y, rank, scale),
            }
        })
    }
}
