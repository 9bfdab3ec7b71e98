//! Graphs that no user would write: rewrites, the memory plan and gradients on many of them.

use polyreme_exec::{Engine, Options};
use polyreme_graph::builder::BatchNorm;
use polyreme_graph::op::ReduceKind;
use polyreme_graph::{Builder, Init, Program, Tensor, Traced, differentiate, recompute};
use polyreme_kernels::elementwise::{Binary, Unary};

use crate::check::Check;
use crate::random::TestRandom;
use crate::same_bits::alone;

const SHAPES: [&[usize]; 5] = [&[4, 6], &[6], &[4, 1], &[2, 4, 6], &[]];

/// Appends `n` random ops to what can be made from `tensors`, and returns every tensor made.
fn grow(
    b: &mut Builder,
    tensors: &[Tensor],
    n: usize,
    smooth: bool,
    random: &mut TestRandom,
) -> Traced<Vec<Tensor>> {
    let mut all = tensors.to_vec();
    while all.len() < tensors.len() + n {
        // Mostly from the newest, so that chains get long.
        let x = if random.below(3) > 0 {
            all[all.len() - 1 - random.below(4)]
        } else {
            all[random.below(all.len())]
        };
        let y = all[random.below(all.len())];
        if let Some(z) = one(b, x, y, all.len(), smooth, random)? {
            all.push(z);
        }
    }
    Ok(all)
}

fn one(
    b: &mut Builder,
    x: Tensor,
    y: Tensor,
    i: usize,
    smooth: bool,
    random: &mut TestRandom,
) -> Traced<Option<Tensor>> {
    let dims = b.dims(x);
    let rank = dims.len();
    let axis = random.below(rank.max(1));
    let z = match random.below(if smooth { 17 } else { 20 }) {
        0..4 => {
            let ops =
                [Unary::Tanh, Unary::Sigmoid, Unary::Sin, Unary::Scale(0.7), Unary::Offset(0.3), Unary::Gelu];
            b.unary(ops[random.below(ops.len())], x)?
        }
        4..9 => {
            let Some(to) = b.shape(x).broadcast(b.shape(y)) else { return Ok(None) };
            if to.numel() > 96 {
                return Ok(None);
            }
            let ops = [Binary::Add, Binary::Sub, Binary::Mul, Binary::Add];
            let z = b.binary(ops[random.below(ops.len())], x, y)?;
            // Products of products would overflow.
            if random.below(2) == 0 { b.unary(Unary::Tanh, z)? } else { b.scale(z, 0.6)? }
        }
        9 if rank > 0 => {
            let kind = if random.below(2) == 0 { ReduceKind::Sum } else { ReduceKind::Mean };
            let z = b.reduce(kind, x, &[axis], random.below(2) == 0)?;
            b.unary(Unary::Tanh, z)?
        }
        10 if rank > 1 => b.transpose(x, axis, rank - 1)?,
        11 => {
            let flat: usize = dims.iter().product();
            b.reshape(x, [flat])?
        }
        12 if rank > 0 && dims[axis] > 1 => b.slice(x, axis, 1, dims[axis] - 1)?,
        13 if rank > 0 && dims.iter().product::<usize>() <= 48 => b.concat(&[x, x], axis)?,
        14 if rank > 1 => {
            let w = b.param(&format!("w{i}"), [5, dims[rank - 1]], Init::Normal { std: 0.4 })?;
            let bias = b.param(&format!("b{i}"), [5], Init::Normal { std: 0.4 })?;
            b.linear(x, w, Some(bias))?
        }
        15 if rank > 0 => b.softmax(x, axis)?,
        16 if rank > 0 && dims[rank - 1] > 2 => {
            let gamma = b.param(&format!("g{i}"), [dims[rank - 1]], Init::Normal { std: 1.0 })?;
            let beta = b.param(&format!("a{i}"), [dims[rank - 1]], Init::Normal { std: 1.0 })?;
            b.layer_norm(x, gamma, beta, 0.1)?
        }
        17 => b.activation("relu", x)?,
        18 => b.dropout(x, 0.3)?,
        19 if rank > 1 => {
            let c = dims[rank - 1];
            let at = BatchNorm {
                gamma: b.param(&format!("g{i}"), [c], Init::Normal { std: 1.0 })?,
                beta: b.param(&format!("a{i}"), [c], Init::Normal { std: 1.0 })?,
                running_mean: b.state(&format!("m{i}"), [c], Init::Const(0.0))?,
                running_var: b.state(&format!("v{i}"), [c], Init::Const(1.0))?,
                eps: 0.1,
                momentum: 0.1,
            };
            let z = b.batch_norm(x, at, true)?;
            if random.below(2) == 0 { b.activation("relu", z)? } else { z }
        }
        _ => return Ok(None),
    };
    Ok(Some(z))
}

/// The sum of the means of some tensors.
fn gather(b: &mut Builder, all: &[Tensor], random: &mut TestRandom) -> Traced {
    let mut sum = b.constant(0.0);
    for k in 0..4 {
        let x = if k == 0 { all[all.len() - 1] } else { all[random.below(all.len())] };
        let axes: Vec<_> = (0..b.shape(x).rank()).collect();
        let mean = b.mean(x, &axes)?;
        sum = b.add(sum, mean)?;
    }
    Ok(sum)
}

#[test]
fn gradients() {
    for seed in 0..40 {
        let row = Check::new(&format!("random graph {seed}")).exact(5e-3, 1e-2);
        row.run(&SHAPES, |b, params| {
            let random = &mut TestRandom::new(seed);
            let all = grow(b, params, 20, true, random)?;
            gather(b, &all, random)
        });
    }
}

#[test]
fn rewrites_change_nothing() {
    let mut recomputed = 0;
    for seed in 0..150 {
        let random = &mut TestRandom::new(1000 + seed);
        let mut b = Builder::new();
        let param =
            |(i, s): (usize, &&[usize])| b.param(&format!("p{i}"), *s, Init::Normal { std: 1.0 }).unwrap();
        let params: Vec<_> = SHAPES.iter().enumerate().map(param).collect();
        let all = grow(&mut b, &params, 40, false, random).unwrap();
        let loss = gather(&mut b, &all, random).unwrap();
        // A value in the middle is an output too, so it must outlive the step.
        let middle = all[all.len() / 2];
        let step = differentiate(&b.finish(&[("loss", loss), ("middle", middle)]), loss).unwrap();

        let measure =
            |g: &_| Engine::footprint(&Program::gradients(g), 2, polyreme_exec::Isa::detect()).activations;
        let least = recompute(&step, 0, &measure).unwrap_err().least_bytes;
        let small = recompute(&step, least, &measure).unwrap().graph;
        recomputed += usize::from(small != step);
        let run = |program: Program, threads| {
            let mut engine = Engine::new(program, Options::threads(threads)).unwrap();
            engine.run().unwrap();
            let mut seen: Vec<_> =
                ["loss", "middle"].map(|n| (n.to_string(), engine.output(n).unwrap().to_vec())).into();
            for p in &step.params {
                let grad = engine.grad(&p.name).unwrap();
                seen.push((p.name.clone(), grad.map_or(Vec::new(), <[f32]>::to_vec)));
            }
            seen
        };
        let fused = run(Program::gradients(&step), 2);
        for (other, rounding) in [(run(alone(&step), 1), 1e-4), (run(Program::gradients(&small), 1), 0.0)] {
            for ((what, a), (_, b)) in fused.iter().zip(&other) {
                assert_eq!(a.len(), b.len());
                let size = a.iter().fold(1e-2f32, |m, x| m.max(x.abs()));
                for (a, b) in a.iter().zip(b) {
                    let close = (a - b).abs() <= rounding * size;
                    assert!(close, "seed {seed}: {what} is {a}, or {b} (rounding {rounding})\n{step}");
                }
            }
        }
    }
    assert!(recomputed > 100, "{recomputed} graphs were recomputed");
}
