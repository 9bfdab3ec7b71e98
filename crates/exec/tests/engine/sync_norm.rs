//! Synchronised batch norm on ranks that are threads of this test, against the plain norm of the whole batch.

use std::sync::Arc;
use std::thread;

use polyreme_collective::Comm;
use polyreme_exec::{Engine, Options};
use polyreme_graph::builder::BatchNorm;
use polyreme_graph::op::Conv;
use polyreme_graph::{Body, Builder, DType, Graph, Init, Program, Tensor, Traced, differentiate};
use polyreme_parallel::{both_passes, sync_batch_norm};

use crate::random::TestRandom;

const SIZE: usize = 5;
const CHANNELS: usize = 11;

fn conv_norm(b: &mut Builder, name: &str, x: Tensor) -> Traced {
    b.layer(name, |b| {
        let c = b.shape(x).last();
        let w = b.param("weight", [CHANNELS, c, 3, 3], Init::Normal { std: 0.2 })?;
        let y = b.conv2d(x, w, None, Conv { padding: (1, 1), ..Conv::default() })?;
        let gamma = b.param("gamma", [CHANNELS], Init::Uniform { bound: 1.0 })?;
        let beta = b.param("beta", [CHANNELS], Init::Uniform { bound: 0.1 })?;
        let running_mean = b.state("mean", [CHANNELS], Init::Const(0.1))?;
        let running_var = b.state("var", [CHANNELS], Init::Const(1.5))?;
        let at = BatchNorm { gamma, beta, running_mean, running_var, eps: 1e-5, momentum: 0.1 };
        b.batch_norm(y, at, true)
    })
}

/// A step of `n` samples with norms before a ReLU, before a sum and a ReLU, and before nothing; `x` is a parameter, so
/// that its gradient is seen. The loss is a mean times this rank's share of the batch.
fn step(n: usize) -> Graph {
    let mut b = Builder::new();
    let loss = |b: &mut Builder| -> Traced<(Tensor, Tensor)> {
        let x = b.param("x", [n, SIZE, SIZE, 3], Init::Const(0.0))?;
        let w = b.input("w", [n, SIZE, SIZE, CHANNELS], DType::F32)?;
        let share = b.input("share", [1, 1, 1, 1], DType::F32)?;
        let h = conv_norm(b, "stem", x)?;
        let h = b.activation("relu", h)?;
        let y = conv_norm(b, "block", h)?;
        let sum = b.add(y, h)?;
        let h = b.activation("relu", sum)?;
        let y = conv_norm(b, "last", h)?;
        let yw = b.mul(y, w)?;
        let yw = b.mul(yw, share)?;
        Ok((y, b.mean(yw, &[0, 1, 2, 3])?))
    };
    let (y, loss) = loss(&mut b).unwrap();
    differentiate(&b.finish(&[("y", y), ("loss", loss)]), loss).unwrap()
}

fn program(step: &Graph, ranks: usize) -> Program {
    both_passes(ranks, &Arc::new(Body::new(step)))
}

/// The results of one rank.
struct Results {
    /// For this rank's samples: the output, and the gradient of `x`.
    samples: [Vec<f32>; 2],
    /// To be summed over ranks: the loss, and the gradients of all parameters but `x`.
    sums: Vec<(String, Vec<f32>)>,
    /// The same on all ranks.
    states: Vec<(String, Vec<f32>)>,
}

/// Two steps of samples `first..first + n` of `total`; results of the second.
fn run(step: &Graph, first: usize, n: usize, total: usize, comm: Option<Comm>, threads: usize) -> Results {
    let mut engine =
        Engine::new(program(step, comm.as_ref().map_or(1, Comm::size)), Options::threads(threads)).unwrap();
    if let Some(comm) = comm {
        engine.attach(comm);
    }
    let whole = |seed: u64, len: usize, low: f32| -> Vec<f32> {
        let mut random = TestRandom::new(seed);
        let all: Vec<_> = (0..total * len).map(|_| random.uniform(low, 1.0)).collect();
        all[first * len..(first + n) * len].to_vec()
    };
    for seed in [3, 4] {
        engine.param_mut("x").unwrap().copy_from_slice(&whole(seed, SIZE * SIZE * 3, -0.5));
        engine.input_f32("w").unwrap().copy_from_slice(&whole(seed + 10, SIZE * SIZE * CHANNELS, -1.0));
        engine.input_f32("share").unwrap()[0] = n as f32 / total as f32;
        engine.run().unwrap();
    }
    // The gradient of a mean is small; as of a sum it is of the size of the weights.
    let scaled = |g: &[f32]| -> Vec<f32> { g.iter().map(|g| g * (total * SIZE * SIZE) as f32).collect() };
    let grad = |name: &str| scaled(engine.grad(name).unwrap().unwrap());
    let mut sums = vec![("loss".to_string(), scaled(engine.output("loss").unwrap()))];
    let params = step.params.iter().filter(|p| p.name != "x");
    sums.extend(params.map(|p| (p.name.clone(), grad(&p.name))));
    let states = step.states.iter().map(|s| (s.name.clone(), engine.state(&s.name).unwrap().to_vec()));
    let states = states.collect();
    Results { samples: [engine.output("y").unwrap().to_vec(), grad("x")], sums, states }
}

/// Compares relative to the largest element of `want`.
fn close(what: &str, got: &[f32], want: &[f32], tolerance: f32) {
    assert_eq!(got.len(), want.len(), "{what}");
    let size = want.iter().fold(1e-3f32, |m, w| m.max(w.abs()));
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let off = (g - w).abs() / size;
        assert!(off <= tolerance, "{what}[{i}] is {g}, should be {w}: off by {off:e} of {size}");
    }
}

/// Runs ranks with these numbers of samples and compares with one that has them all and a plain norm.
fn check(shards: &[usize], threads: usize, tolerance: f32) {
    let total = shards.iter().sum();
    let want = run(&step(total), 0, total, total, None, 1);
    let mut first = 0;
    let ranks: Vec<_> = shards
        .iter()
        .zip(Comm::local(shards.len()))
        .map(|(&n, comm)| {
            let at = first;
            first += n;
            thread::spawn(move || run(&sync_batch_norm(&step(n)), at, n, total, Some(comm), threads))
        })
        .collect();
    let got: Vec<_> = ranks.into_iter().map(|r| r.join().unwrap()).collect();
    for (k, what) in ["y", "dx"].iter().enumerate() {
        let whole: Vec<f32> = got.iter().flat_map(|g| g.samples[k].clone()).collect();
        close(&format!("{shards:?}: {what}"), &whole, &want.samples[k], tolerance);
    }
    for (k, (name, want)) in want.sums.iter().enumerate() {
        let mut sum = vec![0.0; want.len()];
        for g in &got {
            sum.iter_mut().zip(&g.sums[k].1).for_each(|(s, g)| *s += g);
        }
        close(&format!("{shards:?}: {name}"), &sum, want, tolerance);
    }
    for (k, (name, want)) in want.states.iter().enumerate() {
        close(&format!("{shards:?}: {name}"), &got[0].states[k].1, want, tolerance);
        assert!(got.iter().all(|g| g.states[k] == got[0].states[k]), "{name} differs between ranks");
    }
}

#[test]
fn one_rank_is_the_plain_norm() {
    let (plain, synced) = (step(9), sync_batch_norm(&step(9)));
    let (want, got) = (run(&plain, 0, 9, 9, None, 1), run(&synced, 0, 9, 9, None, 2));
    close("y", &got.samples[0], &want.samples[0], 1e-6);
    close("dx", &got.samples[1], &want.samples[1], 2e-6);
    for (a, b) in got.states.iter().zip(&want.states) {
        close(&a.0, &a.1, &b.1, 1e-6);
    }
    check(&[9], 1, 2e-6);
}

#[test]
fn ranks_with_uneven_shards_are_one_rank_with_the_whole_batch() {
    for (shards, threads) in [(&[8, 8][..], 1), (&[3, 10], 2), (&[1, 6, 2], 1), (&[7, 1, 4], 2)] {
        check(shards, threads, 1e-5);
    }
}

#[test]
fn the_gradient_of_a_sum_over_ranks_is_the_sum_of_gradients() {
    // L_r = w_r (Σ p)² and L = Σ L_r: dL/dp_r = 2 Σ w · Σ p on each rank.
    let (w, p) = ([0.5f32, 2.0, -1.0], [3.0f32, -1.5, 0.25]);
    let ranks: Vec<_> = Comm::local(3)
        .into_iter()
        .enumerate()
        .map(|(r, comm)| {
            thread::spawn(move || {
                let mut b = Builder::new();
                let x = b.param("p", [1], Init::Const(p[r])).unwrap();
                let total = b.axis_sum(x).unwrap();
                let square = b.mul(total, total).unwrap();
                let loss = b.scale(square, w[r]).unwrap();
                let step = differentiate(&b.finish(&[("total", total)]), loss).unwrap();
                let mut engine = Engine::new(program(&step, 3), Options::threads(1)).unwrap();
                engine.attach(comm);
                engine.run().unwrap();
                (engine.output("total").unwrap()[0], engine.grad("p").unwrap().unwrap()[0])
            })
        })
        .collect();
    for rank in ranks {
        assert_eq!(rank.join().unwrap(), (1.75, 2.0 * 1.5 * 1.75));
    }
}

#[test]
fn a_sum_that_fails_changes_nothing() {
    let mut engine = Engine::new(program(&sync_batch_norm(&step(2)), 2), Options::threads(1)).unwrap();
    let before = engine.param("stem.weight").unwrap().to_vec();
    engine.param_mut("x").unwrap().fill(0.5);
    engine.input_f32("w").unwrap().fill(1.0);
    engine.input_f32("share").unwrap().fill(1.0);
    let mut comms = Comm::local(2);
    comms[1].fail("its disk is full");
    engine.attach(comms.remove(0));
    let error = engine.run().unwrap_err().to_string();
    assert!(error.contains("rank 1") && error.contains("its disk is full"), "{error}");
    assert_eq!(engine.param("stem.weight").unwrap(), before);
    assert_eq!(engine.state("stem.mean").unwrap(), [0.1; CHANNELS]);
    assert_eq!(engine.find_non_finite(), Ok(None), "looking for a cause communicates with no rank");
    assert!(engine.run().is_err(), "and the group still exists");
}
