//! Batch norm on several ranks against PyTorch (`norms.json`): synchronised, it is `BatchNorm2d` of the whole batch; with
//! statistics of each rank's own samples, it is what `DistributedDataParallel` trains, with running statistics averaged.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::thread;

use polyreme_collective::Comm;
use polyreme_exec::{Engine, ExecError, Filled, Options, StepArgs};
use polyreme_graph::{Body, Builder, DType, Graph, Init, Shape, Tensor, Traced, Weights, differentiate};
use polyreme_kernels::optim::Optimizer;
use polyreme_nn::layer::{BatchNorm2d, Conv2d, channels_last};
use polyreme_parallel::{
    Mesh, Norms, Plan, StepShape, Training, average_states, both_passes, compile, schedule, sync_batch_norm,
};
use serde::Deserialize;

use crate::fill::fill;

/// Relative to the tensor's largest element, or to 1 where all are smaller.
const TOLERANCE: f64 = 3e-6;

/// Channels of an image that is trained on.
const COLOURS: usize = 3;

#[derive(Deserialize)]
struct File {
    channels: usize,
    height: usize,
    width: usize,
    lr: f32,
    momentum: f32,
    fills: BTreeMap<String, [f32; 2]>,
    cases: Vec<NormCase>,
}

#[derive(Deserialize)]
struct NormCase {
    case: String,
    /// `once`: outputs and gradients of one norm. `sync`, `local`: a small net after a few steps.
    kind: String,
    /// Samples of each rank.
    shards: Vec<usize>,
    values: BTreeMap<String, Vec<f64>>,
}

/// The results of the ranks, by name.
type Got = BTreeMap<String, Vec<f32>>;

#[test]
fn ranks_norm_batches_as_in_pytorch() {
    let file: File = crate::read("norms");
    let kinds: Vec<_> = file.cases.iter().map(|c| (c.kind.as_str(), c.shards.len())).collect();
    assert_eq!(kinds, [("once", 2), ("sync", 2), ("local", 2), ("once", 3), ("sync", 3), ("local", 3)]);
    for case in &file.cases {
        let got = match case.kind.as_str() {
            "once" => once(&file, case),
            kind => trained(&file, case, kind == "sync"),
        };
        let what = format!("{} {} {:?}", case.case, case.kind, case.shards);
        assert!(got.keys().eq(case.values.keys()), "{what}: {:?}", got.keys());
        for (name, want) in &case.values {
            let got = &got[name];
            assert_eq!(got.len(), want.len(), "{what}: {name}");
            let peak = want.iter().fold(1.0f64, |m, w| m.max(w.abs()));
            for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
                let off = (f64::from(got) - want).abs() / peak;
                assert!(off <= TOLERANCE, "{what}: {name}[{i}] is {got}, should be {want}: off by {off:.1e}");
            }
        }
    }
}

impl File {
    /// Fills `to` with samples `rows` of a tensor.
    fn rows(&self, case: &NormCase, name: &str, rows: Range<usize>, to: &mut [f32]) {
        let each = to.len() / rows.len();
        let mut all = vec![0.0; rows.end * each];
        self.fill(case, name, &mut all);
        to.copy_from_slice(&all[rows.start * each..]);
    }

    /// Fills a whole tensor; `x0`, `x1` and so on have the range of `x`.
    fn fill(&self, case: &NormCase, name: &str, to: &mut [f32]) {
        let range = self.fills[name.trim_end_matches(|c: char| c.is_ascii_digit())];
        fill(to, &format!("{}.{name}", case.case), range);
    }

    /// Weights and running statistics at the start. Every rank has the same.
    fn start(&self, case: &NormCase, engine: &mut Engine) {
        let names: Vec<_> = engine.param_slots().into_iter().map(|s| s.name).collect();
        for name in names.iter().filter(|name| *name != "x") {
            self.fill(case, name, engine.param_mut(name).unwrap());
        }
        for slot in engine.state_slots() {
            self.fill(case, &slot.name, engine.state_mut(&slot.name).unwrap());
        }
    }
}

/// The samples of each rank.
fn parts(shards: &[usize]) -> Vec<Range<usize>> {
    let ends = shards.iter().scan(0, |end, n| {
        *end += n;
        Some(*end)
    });
    ends.zip(shards).map(|(end, n)| end - n..end).collect()
}

/// Runs a function on every rank, with its samples.
fn on_ranks<T: Send>(case: &NormCase, run: impl Fn(Comm, Range<usize>) -> T + Sync) -> Vec<T> {
    thread::scope(|s| {
        let ranks: Vec<_> = Comm::local(case.shards.len())
            .into_iter()
            .zip(parts(&case.shards))
            .map(|(comm, part)| {
                let run = &run;
                s.spawn(move || run(comm, part))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// A synchronised norm of `n` samples in PyTorch's layout; `x` is a parameter, so that its gradient is seen.
fn norm_step(file: &File, n: usize) -> Graph {
    let mut b = Builder::new();
    let shape = [n, file.channels, file.height, file.width];
    let traced = |b: &mut Builder| -> Traced<(Tensor, Tensor)> {
        let x = b.param("x", shape, Init::Const(0.0))?;
        let w = b.input("w", shape, DType::F32)?;
        let rows = channels_last(b, x)?;
        let y = BatchNorm2d::new(file.channels).trace(b, "bn", rows, true)?;
        let y = b.permute(y, &[0, 3, 1, 2])?;
        let yw = b.mul(y, w)?;
        Ok((y, b.sum(yw, &[0, 1, 2, 3])?))
    };
    let (y, loss) = traced(&mut b).unwrap();
    sync_batch_norm(&differentiate(&b.finish(&[("y", y), ("loss", loss)]), loss).unwrap())
}

fn once(file: &File, case: &NormCase) -> Got {
    let ranks = on_ranks(case, |comm, part| {
        let program = both_passes(comm.size(), &Arc::new(Body::new(&norm_step(file, part.len()))));
        let mut engine = Engine::new(program, Options::threads(1)).unwrap();
        engine.attach(comm);
        file.start(case, &mut engine);
        file.rows(case, "x", part.clone(), engine.param_mut("x").unwrap());
        file.rows(case, "w", part, engine.input_f32("w").unwrap());
        engine.run().unwrap();
        let grad = |name: &str| engine.grad(name).unwrap().unwrap().to_vec();
        let state = |name: &str| engine.state(name).unwrap().to_vec();
        [
            ("y", engine.output("y").unwrap().to_vec()),
            ("dx", grad("x")),
            ("dweight", grad("bn.weight")),
            ("dbias", grad("bn.bias")),
            ("running_mean", state("bn.running_mean")),
            ("running_var", state("bn.running_var")),
        ]
    });
    let mut got = Got::new();
    for (name, values) in ranks.into_iter().flatten() {
        match (name, got.get_mut(name)) {
            (_, None) => drop(got.insert(name.into(), values)),
            ("y" | "dx", Some(before)) => before.extend(values),
            ("dweight" | "dbias", Some(sum)) => sum.iter_mut().zip(values).for_each(|(s, v)| *s += v),
            (_, Some(first)) => assert_eq!(*first, values, "{name} is the same on all ranks"),
        }
    }
    got
}

/// A step of `n` samples of the small net; the loss is weighted.
fn net_step(file: &File, n: usize) -> Graph {
    let mut b = Builder::new();
    let traced = |b: &mut Builder| -> Traced<(Tensor, Tensor)> {
        let x = b.input("x", [n, COLOURS, file.height, file.width], DType::F32)?;
        let w = b.input("w", [n, file.channels, file.height, file.width], DType::F32)?;
        let weight = b.input("weight", [1], DType::F32)?;
        let (rows, w) = (channels_last(b, x)?, channels_last(b, w)?);
        let conv = Conv2d { bias: false, ..Conv2d::new(COLOURS, file.channels, 1) };
        let y = conv.trace(b, "conv", rows)?;
        let y = BatchNorm2d::new(file.channels).trace(b, "bn", y, true)?;
        let yw = b.mul(y, w)?;
        let loss = b.mean(yw, &[0, 1, 2, 3])?;
        let weight = b.reshape(weight, Shape::scalar())?;
        Ok((loss, b.mul(loss, weight)?))
    };
    let (loss, weighted) = traced(&mut b).unwrap();
    differentiate(&b.finish(&[("loss", loss), ("weighted", weighted)]), weighted).unwrap()
}

fn trained(file: &File, case: &NormCase, sync: bool) -> Got {
    let total: usize = case.shards.iter().sum();
    let sgd = Optimizer::Sgd { momentum: file.momentum, nesterov: false, weight_decay: 0.0 };
    let mut ranks = on_ranks(case, |comm, part| {
        let plan = Plan {
            mesh: Mesh::data(comm.size()),
            rank: comm.rank(),
            weights: Weights::Shared,
            norms: if sync { Norms::Synchronised } else { Norms::Local },
            ..Plan::alone()
        };
        let training = Training { optimizer: sgd, moments: DType::F32, clip: None, ema: None, scaled: false };
        let body = Arc::new(compile(&net_step(file, part.len()), &plan, &training, None).unwrap());
        let averaging = average_states(comm.size(), &body);
        let program = schedule(&plan, &training, &[body], &StepShape::one());
        let mut engine = Engine::join(program, Options::threads(1), comm).unwrap();
        let start = |engine: &mut Engine| -> Result<(), polyreme_exec::ExecError> {
            file.start(case, engine);
            Ok(())
        };
        engine.exclusively(start).unwrap();
        let mut losses = Vec::new();
        for step in 0..case.values["losses"].len() {
            for name in ["x", "w"] {
                let to = engine.input_f32(name).unwrap();
                file.rows(case, &format!("{name}{step}"), part.clone(), to);
            }
            let mut filled = Filled { weight: part.len() as f64 / total as f64 };
            let args = StepArgs { lr: file.lr, ..StepArgs::default() };
            losses.push(engine.step_with::<ExecError>(&mut filled, args).unwrap().loss as f32);
        }
        let averaging = engine.add(averaging).unwrap();
        engine.select(averaging);
        engine.run().unwrap();
        let mut got = Got::from([("losses".to_string(), losses)]);
        for slot in engine.param_slots() {
            got.insert(slot.name.clone(), engine.param(&slot.name).unwrap().to_vec());
        }
        for slot in engine.state_slots() {
            got.insert(slot.name.clone(), engine.state(&slot.name).unwrap().to_vec());
        }
        got
    });
    let last = ranks.pop().unwrap();
    assert!(ranks.iter().all(|got| *got == last), "all ranks have the same");
    last
}
