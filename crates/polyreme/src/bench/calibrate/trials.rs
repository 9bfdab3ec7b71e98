//! What a calibration runs: graphs of one op with its gradient, over grids of sizes that are no job's.

use polyreme_graph::builder::BatchNorm;
use polyreme_graph::op::{Cell, Conv, CrossEntropy, Window};
use polyreme_graph::{
    Builder, DType, Graph, Init, Precision, Tensor, TraceError, Traced, Unary, differentiate,
};
use polyreme_sim::work::WorkKind;

/// A graph, and the kinds of work whose times are taken from it.
pub(super) struct Trial {
    pub(super) step: Graph,
    pub(super) kinds: Vec<WorkKind>,
}

/// The sizes that are gone through.
pub(super) struct Grid {
    /// Rows of products.
    rows: &'static [usize],
    /// The other two sizes of products.
    widths: &'static [usize],
    /// Channels of convolutions.
    channels: &'static [usize],
    /// Rows, and columns, of their images.
    images: &'static [usize],
    /// Lengths of sequences.
    lengths: &'static [usize],
    /// Widths of heads.
    heads: &'static [usize],
    /// Hidden widths of recurrent layers.
    hidden: &'static [usize],
    /// Elements that passes go through.
    pub(super) elements: &'static [usize],
}

impl Grid {
    /// What a calibration takes.
    pub(super) const USUAL: Grid = Grid {
        rows: &[16, 128, 512, 2048],
        widths: &[10, 64, 256, 1024],
        channels: &[3, 16, 64, 256],
        images: &[8, 32],
        lengths: &[32, 128, 512],
        heads: &[32, 64, 128],
        hidden: &[32, 128, 512],
        elements: &[1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23],
    };

    /// What a first impression takes.
    pub(super) const QUICK: Grid = Grid {
        rows: &[16, 256],
        widths: &[16, 256],
        channels: &[3, 32],
        images: &[8],
        lengths: &[64],
        heads: &[32],
        hidden: &[64],
        elements: &[1 << 10, 1 << 14, 1 << 18],
    };

    /// All graphs; those of products twice, in f32 and in bf16.
    pub(super) fn trials(&self) -> Result<Vec<Trial>, TraceError> {
        let mut trials = Vec::new();
        self.products(&mut trials)?;
        self.convolutions(&mut trials)?;
        self.sequences(&mut trials)?;
        let half = Precision::half(DType::Bf16);
        let in_half = |trial: &Trial| Trial { step: half.apply(&trial.step), kinds: trial.kinds.clone() };
        trials.extend(trials.iter().map(in_half).collect::<Vec<_>>());
        for &n in self.elements {
            passes(n, &mut trials)?;
        }
        Ok(trials)
    }

    fn products(&self, trials: &mut Vec<Trial>) -> Result<(), TraceError> {
        for &m in self.rows {
            for &n in self.widths {
                for &k in self.widths {
                    let kinds = [WorkKind::ProductNt, WorkKind::Product, WorkKind::ProductTn];
                    trials.push(trial(&kinds, |b| {
                        let (x, w) = (param(b, "x", &[m, k])?, param(b, "w", &[n, k])?);
                        b.linear(x, w, None)
                    })?);
                }
            }
        }
        Ok(())
    }

    fn convolutions(&self, trials: &mut Vec<Trial>) -> Result<(), TraceError> {
        use WorkKind::*;
        let last = self.channels.len() - 1;
        let batch = 8;
        for (kernel, kinds, most) in [
            (1, [Conv1, Conv1GradInput, Conv1GradWeight], last),
            (3, [Conv3, Conv3GradInput, Conv3GradWeight], last),
            (5, [ConvWide, ConvWideGradInput, ConvWideGradWeight], last.min(2)),
        ] {
            for &c_in in &self.channels[..=most] {
                // An output of three channels is rare.
                for &c_out in &self.channels[1..=most] {
                    for &size in self.images {
                        let conv = Conv { padding: (kernel / 2, kernel / 2), ..Conv::default() };
                        trials.push(trial(&kinds, |b| {
                            let x = param(b, "x", &[batch, size, size, c_in])?;
                            let w = param(b, "w", &[c_out, c_in, kernel, kernel])?;
                            b.conv2d(x, w, None, conv)
                        })?);
                    }
                }
            }
        }
        let kinds = [ConvGrouped, ConvGroupedGradInput, ConvGroupedGradWeight];
        for &c in &self.channels[1..] {
            for width in [1, 8] {
                for &size in self.images {
                    let conv = Conv { padding: (1, 1), groups: c / width, ..Conv::default() };
                    trials.push(trial(&kinds, |b| {
                        let x = param(b, "x", &[batch, size, size, c])?;
                        let w = param(b, "w", &[c, width, 3, 3])?;
                        b.conv2d(x, w, None, conv)
                    })?);
                }
            }
        }
        Ok(())
    }

    fn sequences(&self, trials: &mut Vec<Trial>) -> Result<(), TraceError> {
        for &t in self.lengths {
            for &d in self.heads {
                for heads in [2, 16] {
                    trials.push(trial(&[WorkKind::Attention, WorkKind::AttentionGrad], |b| {
                        let qkv = param(b, "qkv", &[1, t, 3, heads, d])?;
                        b.attention_packed(qkv, true, None)
                    })?);
                }
            }
        }
        for &h in self.hidden {
            for batch in [8, 64] {
                trials.push(trial(&[WorkKind::Recurrent, WorkKind::RecurrentGrad], |b| {
                    let gates = Cell::Lstm.gates() * h;
                    let xp = param(b, "xp", &[batch, 16, gates])?;
                    let (w, bias) = (param(b, "w", &[gates, h])?, param(b, "b", &[gates])?);
                    b.recurrent(Cell::Lstm, xp, w, bias, &[], false)
                })?);
            }
        }
        Ok(())
    }
}

/// Passes over `n` elements, in rows of 256.
fn passes(n: usize, trials: &mut Vec<Trial>) -> Result<(), TraceError> {
    let (rows, width) = (n / 256, 256);
    let mut add = |kinds: &[WorkKind], f: &dyn Fn(&mut Builder) -> Traced| -> Result<(), TraceError> {
        trials.push(trial(kinds, f)?);
        Ok(())
    };
    let x = |b: &mut Builder| param(b, "x", &[rows, width]);
    let of_width = |b: &mut Builder, name: &str| param(b, name, &[width]);
    add(&[WorkKind::Elementwise], &|b| {
        let (x, y) = (x(b)?, param(b, "y", &[rows, width])?);
        b.add(x, y)
    })?;
    add(&[WorkKind::Functions], &|b| {
        let x = x(b)?;
        b.unary(Unary::GeluTanh, x)
    })?;
    add(&[WorkKind::Norm, WorkKind::NormGrad], &|b| {
        let (x, gamma, beta) = (x(b)?, of_width(b, "gamma")?, of_width(b, "beta")?);
        b.layer_norm(x, gamma, beta, 1e-5)
    })?;
    add(&[WorkKind::BatchNorm, WorkKind::BatchNormGrad], &|b| {
        let (x, gamma, beta) = (x(b)?, of_width(b, "gamma")?, of_width(b, "beta")?);
        let running_mean = b.state("mean", [width], Init::Const(0.0))?;
        let running_var = b.state("var", [width], Init::Const(1.0))?;
        b.batch_norm(x, BatchNorm { gamma, beta, running_mean, running_var, eps: 1e-5, momentum: 0.1 }, true)
    })?;
    add(&[WorkKind::Softmax, WorkKind::SoftmaxGrad], &|b| {
        let x = x(b)?;
        b.softmax(x, 1)
    })?;
    add(&[WorkKind::CrossEntropy, WorkKind::CrossEntropyGrad], &|b| {
        let x = x(b)?;
        let labels = b.input("labels", [rows], DType::I32)?;
        b.cross_entropy(x, labels, None, CrossEntropy { label_smoothing: 0.0, ignore_index: None })
    })?;
    add(&[WorkKind::Reduce], &|b| {
        let x = x(b)?;
        b.sum(x, &[0])
    })?;
    add(&[WorkKind::Pool, WorkKind::PoolGrad], &|b| {
        let size = ((rows as f64).sqrt() as usize).max(2);
        let x = param(b, "x", &[1, size, size, width])?;
        let (kernel, stride) = ((2, 2), (2, 2));
        b.max_pool(x, Window::Fixed { kernel, stride, padding: (0, 0), count_include_pad: true })
    })?;
    add(&[WorkKind::Lookup, WorkKind::LookupGrad], &|b| {
        let ids = b.input("ids", [rows], DType::I32)?;
        let table = param(b, "table", &[IDS, width])?;
        b.embedding(ids, table)
    })?;
    add(&[WorkKind::Rearrange], &|b| {
        let x = x(b)?;
        b.permute(x, &[1, 0])
    })?;
    add(&[WorkKind::Dropout], &|b| {
        let x = x(b)?;
        b.dropout(x, 0.1)
    })
}

/// Rows of tables, and so the bound of ids and labels.
pub(super) const IDS: usize = 256;

fn param(b: &mut Builder, name: &str, dims: &[usize]) -> Traced {
    b.param(name, dims, Init::Uniform { bound: 0.5 })
}

/// The differentiated graph of the mean of what `f` computes.
fn trial(kinds: &[WorkKind], f: impl FnOnce(&mut Builder) -> Traced) -> Result<Trial, TraceError> {
    let mut b = Builder::new();
    let y: Tensor = f(&mut b)?;
    let loss = b.mean_all(y)?;
    let graph = b.finish(&[("loss", loss)]);
    let loss = graph.output("loss").expect("it was named");
    Ok(Trial { step: differentiate(&graph, loss)?, kinds: kinds.to_vec() })
}
