//! What ops compute, against their definitions in f64, element by element. Gradients show that a backward pass belongs
//! to its forward pass; this shows that the forward pass is the intended one: layouts, dims, strides, masks.

use polyreme_dtype::{bf16, f16};
use polyreme_exec::{Engine, Options};
use polyreme_graph::builder::BatchNorm;
use polyreme_graph::op::{Cell, Conv, CrossEntropy, Op, ReduceKind, Slab, Window};

use polyreme_graph::{Builder, DType, Init, Program, Tensor};
use polyreme_kernels::elementwise::{Binary, Unary};

use crate::oracle::{Array, HIGH, LOW, check, check_with, sigmoid, unravel};
use crate::random::TestRandom;

/// The error function by its series, which converges fast enough for the small numbers here.
fn erf(x: f64) -> f64 {
    let mut term = x;
    let mut sum = x;
    for n in 1..60 {
        term *= -x * x / n as f64;
        sum += term / (2 * n + 1) as f64;
    }
    sum * 2.0 / std::f64::consts::PI.sqrt()
}

fn unary_of(op: Unary, x: f64) -> f64 {
    match op {
        Unary::Neg => -x,
        Unary::Exp => x.exp(),
        Unary::Ln => x.ln(),
        Unary::Sqrt => x.sqrt(),
        Unary::Rsqrt => 1.0 / x.sqrt(),
        Unary::Recip => 1.0 / x,
        Unary::Tanh => x.tanh(),
        Unary::Sigmoid => sigmoid(x),
        Unary::Relu => x.max(0.0),
        Unary::LeakyRelu(a) => {
            if x > 0.0 {
                x
            } else {
                f64::from(a) * x
            }
        }
        Unary::Elu(a) => {
            if x > 0.0 {
                x
            } else {
                f64::from(a) * (x.exp() - 1.0)
            }
        }
        Unary::Gelu => 0.5 * x * (1.0 + erf(x / 2f64.sqrt())),
        Unary::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }
        Unary::Silu => x * sigmoid(x),
        Unary::Erf => erf(x),
        Unary::Abs => x.abs(),
        Unary::Square => x * x,
        Unary::Sin => x.sin(),
        Unary::Cos => x.cos(),
        Unary::Softplus => (1.0 + x.exp()).ln(),
        Unary::Sign => x.signum(),
        Unary::Floor => x.floor(),
        Unary::Scale(a) => x * f64::from(a),
        Unary::Offset(a) => x + f64::from(a),
        Unary::Powf(a) => x.powf(f64::from(a)),
        Unary::Clamp(low, high) => x.clamp(f64::from(low), f64::from(high)),
        Unary::Positive => f64::from(u8::from(x > 0.0)),
        Unary::RoundF16 => f16::from_f64(x).to_f64(),
        Unary::RoundBf16 => bf16::from_f64(x).to_f64(),
    }
}

#[test]
fn elementwise() {
    let (any, positive) = ((-3.0, 3.0), (0.2, 3.0));
    let rows = [
        (any, vec![Unary::Neg, Unary::Exp, Unary::Tanh, Unary::Sigmoid, Unary::Relu, Unary::LeakyRelu(0.1)]),
        (any, vec![Unary::Elu(0.7), Unary::Gelu, Unary::GeluTanh, Unary::Silu, Unary::Erf, Unary::Abs]),
        (any, vec![Unary::Square, Unary::Sin, Unary::Cos, Unary::Softplus, Unary::Sign, Unary::Floor]),
        (any, vec![Unary::Scale(-1.5), Unary::Offset(0.3), Unary::Clamp(-0.5, 1.0), Unary::Positive]),
        (any, vec![Unary::RoundF16, Unary::RoundBf16]),
        (
            positive,
            vec![Unary::Ln, Unary::Sqrt, Unary::Rsqrt, Unary::Recip, Unary::Powf(2.5), Unary::Powf(-1.0)],
        ),
    ];
    for (range, ops) in rows {
        for op in ops {
            let want = |p: &[Array]| Array::new(&[37], |i| unary_of(op, p[0].at(i)));
            check_with(&format!("{op:?}"), range, &[&[37]], &[], |b, p| b.unary(op, p[0]), want);
        }
    }
    type Definition = fn(f64, f64) -> f64;
    let ops: [(Binary, Definition); 10] = [
        (Binary::Add, |a, b| a + b),
        (Binary::Sub, |a, b| a - b),
        (Binary::Mul, |a, b| a * b),
        (Binary::Div, |a, b| a / b),
        (Binary::Max, f64::max),
        (Binary::Min, f64::min),
        (Binary::Pow, f64::powf),
        (Binary::Greater, |a, b| f64::from(u8::from(a > b))),
        (Binary::GreaterEqual, |a, b| f64::from(u8::from(a >= b))),
        (Binary::Equal, |a, b| f64::from(u8::from(a == b))),
    ];
    for (op, f) in ops {
        for [p, q] in [[&[3, 1, 5][..], &[4, 1]], [&[5], &[3, 4, 5]], [&[3, 4, 5], &[3, 4, 5]]] {
            let want = |x: &[Array]| Array::new(&[3, 4, 5], |i| f(x[0].at(i), x[1].at(i)));
            check_with(&format!("{op:?}"), positive, &[p, q], &[], |b, x| b.binary(op, x[0], x[1]), want);
        }
    }
    check(
        "select",
        &[&[3], &[2, 1], &[2, 3]],
        |b, p| {
            let c = b.unary(Unary::Positive, p[0])?;
            b.select(c, p[1], p[2])
        },
        |p| Array::new(&[2, 3], |i| if p[0].at(i) > 0.0 { p[1].at(i) } else { p[2].at(i) }),
    );
}

#[test]
fn moves() {
    let dims: &[usize] = &[2, 3, 4];
    check(
        "permute",
        &[dims],
        |b, p| b.permute(p[0], &[2, 0, 1]),
        |p| Array::new(&[4, 2, 3], |i| p[0].at(&[i[1], i[2], i[0]])),
    );
    check(
        "slice",
        &[dims],
        |b, p| b.slice(p[0], 1, 1, 2),
        |p| Array::new(&[2, 2, 4], |i| p[0].at(&[i[0], i[1] + 1, i[2]])),
    );
    check(
        "split",
        &[dims],
        |b, p| Ok(b.split(p[0], 2, 2)?[1]),
        |p| Array::new(&[2, 3, 2], |i| p[0].at(&[i[0], i[1], i[2] + 2])),
    );
    check(
        "pad",
        &[dims],
        |b, p| b.pad(p[0], 1, 2, 1, 0.5),
        |p| {
            Array::new(&[2, 6, 4], |i| {
                if (2..5).contains(&i[1]) { p[0].at(&[i[0], i[1] - 2, i[2]]) } else { 0.5 }
            })
        },
    );
    check(
        "concat",
        &[dims, &[2, 1, 4]],
        |b, p| b.concat(p, 1),
        |p| Array::new(&[2, 4, 4], |i| if i[1] < 3 { p[0].at(i) } else { p[1].at(&[i[0], 0, i[2]]) }),
    );
    let ids = [2, 0, 1, 1, 2, 2, 0, 0, 1, 0, 2, 1, 0, 0, 0, 1];
    let gather = |b: &mut Builder, p: &[Tensor]| {
        let ids = b.input("ids", [2, 2, 4], DType::I32)?;
        b.gather(p[0], 1, ids)
    };
    check_with("gather", (LOW, HIGH), &[dims], &[("ids", &ids)], gather, |p| {
        Array::new(&[2, 2, 4], |i| p[0].at(&[i[0], ids[i[0] * 8 + i[1] * 4 + i[2]] as usize, i[2]]))
    });
    let rows = [4, 0, 4, 2, 1, 3];
    let embed = |b: &mut Builder, p: &[Tensor]| {
        let ids = b.input("ids", [2, 3], DType::I32)?;
        b.embedding(ids, p[0])
    };
    check_with("embedding", (LOW, HIGH), &[&[5, 9]], &[("ids", &rows)], embed, |p| {
        Array::new(&[2, 3, 9], |i| p[0].at(&[rows[i[0] * 3 + i[1]] as usize, i[2]]))
    });
    for (kind, start, f) in [
        (ReduceKind::Sum, 0.0, (|a, b| a + b) as fn(f64, f64) -> f64),
        (ReduceKind::Mean, 0.0, |a, b| a + b / 8.0),
        (ReduceKind::Max, f64::MIN, f64::max),
        (ReduceKind::Min, f64::MAX, f64::min),
    ] {
        check(
            &format!("{kind:?}"),
            &[dims],
            |b, p| b.reduce(kind, p[0], &[0, 2], false),
            |p| {
                let pairs: Vec<_> = (0..8).map(|k| (k / 4, k % 4)).collect();
                Array::new(&[3], |i| pairs.iter().fold(start, |s, &(x, z)| f(s, p[0].at(&[x, i[0], z]))))
            },
        );
    }
}

#[test]
fn products() {
    for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
        for shared in [true, false] {
            let (m, k, n) = (4, 5, 3);
            let (a, q) = (if ta { [2, k, m] } else { [2, m, k] }, if tb { [2, n, k] } else { [2, k, n] });
            let (a, q) = if shared { (&a[usize::from(ta)..], &q[1..]) } else { (&a[..], &q[..]) };
            let rank = a.len();
            let dims = &[2, m, n][3 - rank..];
            check(
                &format!("{a:?} {q:?}"),
                &[a, q],
                |b, p| b.matmul(p[0], p[1], ta, tb),
                |p| {
                    Array::new(dims, |i| {
                        let (lead, row, col) = (&i[..rank - 2], i[rank - 2], i[rank - 1]);
                        let at = |x: &Array, t: bool, r, c| {
                            let last = if t { [c, r] } else { [r, c] };
                            let lead = &lead[..lead.len().min(x.dims.len() - 2)];
                            x.at(&[lead, &last].concat())
                        };
                        (0..k).map(|j| at(&p[0], ta, row, j) * at(&p[1], tb, j, col)).sum()
                    })
                },
            );
        }
    }
}

/// Rows of `(image, weight, options)`, asymmetric in every respect.
fn conv_rows() -> [([usize; 4], [usize; 4], Conv); 5] {
    let base = Conv::default();
    [
        ([2, 6, 7, 3], [4, 3, 3, 2], Conv { stride: (2, 1), padding: (1, 0), ..base }),
        ([1, 7, 8, 4], [6, 2, 2, 3], Conv { groups: 2, dilation: (2, 1), padding: (0, 2), ..base }),
        ([2, 5, 6, 8], [8, 1, 3, 3], Conv { groups: 8, padding: (1, 1), ..base }),
        ([1, 8, 9, 16], [16, 16, 3, 3], Conv { padding: (1, 1), ..base }),
        ([2, 3, 4, 5], [9, 5, 1, 1], base),
    ]
}

#[test]
fn convolutions() {
    for (x, w, c) in conv_rows() {
        let name = format!("{x:?} {w:?} {c:?}");
        let out = |i: usize, s: usize, p: usize, d: usize| (x[i] + 2 * p - (w[i + 1] - 1) * d - 1) / s + 1;
        let dims = [
            x[0],
            out(1, c.stride.0, c.padding.0, c.dilation.0),
            out(2, c.stride.1, c.padding.1, c.dilation.1),
            w[0],
        ];
        check(
            &name,
            &[&x, &w, &[w[0]]],
            |b, p| b.conv2d(p[0], p[1], Some(p[2]), c),
            |p| {
                Array::new(&dims, |i| {
                    let group = i[3] / (w[0] / c.groups);
                    let mut sum = p[2].at(&[i[3]]);
                    for (ci, ky, kx) in
                        (0..w[1] * w[2] * w[3]).map(|k| (k / (w[2] * w[3]), k / w[3] % w[2], k % w[3]))
                    {
                        let y = (i[1] * c.stride.0 + ky * c.dilation.0) as isize - c.padding.0 as isize;
                        let x = (i[2] * c.stride.1 + kx * c.dilation.1) as isize - c.padding.1 as isize;
                        sum += p[0].pixel(i[0], y, x, group * w[1] + ci).unwrap_or(0.0)
                            * p[1].at(&[i[3], ci, ky, kx]);
                    }
                    sum
                })
            },
        );
        // It maps the output of a convolution to its input: every input pixel adds its kernel to the output.
        let image = [x[0], 3, 4, w[0]];
        let extra = (c.stride.0.min(2) - 1, 0);
        let size = |i: usize, s: usize, p: usize, d: usize, e: usize| {
            (image[i] - 1) * s + (w[i + 1] - 1) * d + 1 + e - 2 * p
        };
        let dims = [
            x[0],
            size(1, c.stride.0, c.padding.0, c.dilation.0, extra.0),
            size(2, c.stride.1, c.padding.1, c.dilation.1, extra.1),
            w[1] * c.groups,
        ];
        check(
            &format!("transposed {name}"),
            &[&image, &w],
            |b, p| b.conv_transpose2d(p[0], p[1], None, c, extra),
            |p| {
                let mut y = Array::new(&dims, |_| 0.0);
                for flat in 0..image.iter().product() {
                    let i = unravel(&image, flat);
                    let group = i[3] / (w[0] / c.groups);
                    for (co, ky, kx) in
                        (0..w[1] * w[2] * w[3]).map(|k| (k / (w[2] * w[3]), k / w[3] % w[2], k % w[3]))
                    {
                        let (r, s) =
                            (i[1] * c.stride.0 + ky * c.dilation.0, i[2] * c.stride.1 + kx * c.dilation.1);
                        let (Some(r), Some(s)) = (r.checked_sub(c.padding.0), s.checked_sub(c.padding.1))
                        else {
                            continue;
                        };
                        if r < dims[1] && s < dims[2] {
                            let to = ((i[0] * dims[1] + r) * dims[2] + s) * dims[3] + group * w[1] + co;
                            y.data[to] += p[0].data[flat] * p[1].at(&[i[3], co, ky, kx]);
                        }
                    }
                }
                y
            },
        );
    }
}

#[test]
fn pools() {
    let x: [usize; 4] = [2, 7, 6, 3];
    for count_include_pad in [true, false] {
        let (kernel, stride, padding) = ((3, 2), (2, 1), (1, 1));
        let window = Window::Fixed { kernel, stride, padding, count_include_pad };
        let pixels = |p: &Array, i: &[usize]| -> Vec<f64> {
            let taps = (0..kernel.0 * kernel.1).map(|k| (k / kernel.1, k % kernel.1));
            let at = |(ky, kx)| {
                p.pixel(i[0], (i[1] * stride.0 + ky) as isize - 1, (i[2] * stride.1 + kx) as isize - 1, i[3])
            };
            taps.filter_map(at).collect()
        };
        let dims = [2, 4, 7, 3];
        let max = |p: &[Array]| Array::new(&dims, |i| pixels(&p[0], i).into_iter().fold(f64::MIN, f64::max));
        check("max pool", &[&x], |b, p| b.max_pool(p[0], window), max);
        let mean = |p: &[Array]| {
            Array::new(&dims, |i| {
                let all = pixels(&p[0], i);
                all.iter().sum::<f64>() / if count_include_pad { 6.0 } else { all.len() as f64 }
            })
        };
        check("average pool", &[&x], |b, p| b.avg_pool(p[0], window), mean);
    }
    for out in [(1, 1), (3, 4), (7, 9)] {
        let range = |i: usize, len: usize, out: usize| i * len / out..((i + 1) * len).div_ceil(out);
        let pixels = |p: &Array, i: &[usize]| -> Vec<f64> {
            let rows = range(i[1], 7, out.0);
            rows.flat_map(|y| range(i[2], 6, out.1).map(move |x| (y, x)))
                .map(|(y, x)| p.at(&[i[0], y, x, i[3]]))
                .collect()
        };
        let (window, dims) = (Window::Adaptive { out }, [2, out.0, out.1, 3]);
        check(
            "adaptive max",
            &[&x],
            |b, p| b.max_pool(p[0], window),
            |p| Array::new(&dims, |i| pixels(&p[0], i).into_iter().fold(f64::MIN, f64::max)),
        );
        check(
            "adaptive average",
            &[&x],
            |b, p| b.avg_pool(p[0], window),
            |p| Array::new(&dims, |i| pixels(&p[0], i).iter().sum::<f64>() / pixels(&p[0], i).len() as f64),
        );
    }
}

fn moments(x: &[f64]) -> (f64, f64) {
    let mean = x.iter().sum::<f64>() / x.len() as f64;
    (mean, x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.len() as f64)
}

#[test]
fn norms() {
    const EPS: f64 = 1e-3;
    let dims: &[usize] = &[3, 4, 6];
    check(
        "layer norm",
        &[dims, &[6], &[6]],
        |b, p| b.layer_norm(p[0], p[1], p[2], EPS as f32),
        |p| {
            Array::new(dims, |i| {
                let row: Vec<_> = (0..6).map(|c| p[0].at(&[i[0], i[1], c])).collect();
                let (mean, var) = moments(&row);
                (p[0].at(i) - mean) / (var + EPS).sqrt() * p[1].at(i) + p[2].at(i)
            })
        },
    );
    check(
        "rms norm",
        &[dims, &[6]],
        |b, p| b.rms_norm(p[0], p[1], EPS as f32),
        |p| {
            Array::new(dims, |i| {
                let square = (0..6).map(|c| p[0].at(&[i[0], i[1], c]).powi(2)).sum::<f64>() / 6.0;
                p[0].at(i) / (square + EPS).sqrt() * p[1].at(i)
            })
        },
    );
    check(
        "group norm",
        &[dims, &[6], &[6]],
        |b, p| b.group_norm(p[0], p[1], p[2], 3, EPS as f32),
        |p| {
            Array::new(dims, |i| {
                let first = i[2] / 2 * 2;
                let group: Vec<_> = (0..8).map(|k| p[0].at(&[i[0], k / 2, first + k % 2])).collect();
                let (mean, var) = moments(&group);
                (p[0].at(i) - mean) / (var + EPS).sqrt() * p[1].at(i) + p[2].at(i)
            })
        },
    );
    for training in [true, false] {
        let norm = |b: &mut Builder, p: &[Tensor]| {
            let running_mean = b.state("mean", [6], Init::Const(0.2))?;
            let running_var = b.state("var", [6], Init::Const(1.7))?;
            let at = BatchNorm {
                gamma: p[1],
                beta: p[2],
                running_mean,
                running_var,
                eps: EPS as f32,
                momentum: 0.1,
            };
            b.batch_norm(p[0], at, training)
        };
        check(&format!("batch norm {training}"), &[dims, &[6], &[6]], norm, |p| {
            Array::new(dims, |i| {
                let column: Vec<_> = (0..12).map(|k| p[0].at(&[k / 4, k % 4, i[2]])).collect();
                let (mean, var) = if training { moments(&column) } else { (0.2, 1.7) };
                (p[0].at(i) - mean) / (var + EPS).sqrt() * p[1].at(i) + p[2].at(i)
            })
        });
    }
    for axis in 0..3 {
        let total = |p: &Array, i: &[usize]| -> f64 {
            let at = |k| p.at(&(0..3).map(|d| if d == axis { k } else { i[d] }).collect::<Vec<_>>());
            (0..dims[axis]).map(|k| f64::exp(at(k))).sum()
        };
        check(
            "softmax",
            &[dims],
            |b, p| b.softmax(p[0], axis),
            |p| Array::new(dims, |i| p[0].at(i).exp() / total(&p[0], i)),
        );
        check(
            "log softmax",
            &[dims],
            |b, p| b.log_softmax(p[0], axis),
            |p| Array::new(dims, |i| p[0].at(i) - total(&p[0], i).ln()),
        );
    }
}

#[test]
fn running_statistics_follow_the_batch_once_a_step() {
    let mut b = Builder::new();
    let x = b.input("x", [5, 2], DType::F32).unwrap();
    let gamma = b.param("gamma", [2], Init::Const(1.0)).unwrap();
    let beta = b.param("beta", [2], Init::Const(0.0)).unwrap();
    let running_mean = b.state("mean", [2], Init::Const(0.5)).unwrap();
    let running_var = b.state("var", [2], Init::Const(2.0)).unwrap();
    let at = BatchNorm { gamma, beta, running_mean, running_var, eps: 1e-5, momentum: 0.1 };
    let y = b.batch_norm(x, at, true).unwrap();
    let loss = b.mean(y, &[0, 1]).unwrap();
    let sgd = polyreme_kernels::optim::Optimizer::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 };
    let forward = b.finish(&[("loss", loss)]);
    let program = Program::train_loss(&forward, loss, sgd).unwrap();
    let mut engine = Engine::new(program, Options::threads(2)).unwrap();
    let gradients = Program::gradients(&polyreme_graph::differentiate(&forward, loss).unwrap());
    let gradients = engine.add(gradients).unwrap();
    let (mut mean, mut var) = ([0.5; 2], [2.0; 2]);
    let mut random = TestRandom::new(2);
    for _ in 0..3 {
        engine.input_f32("x").unwrap().fill_with(|| random.uniform(-2.0, 3.0));
        let x = engine.input_f32("x").unwrap().to_vec();
        engine.select(gradients);
        engine.input_f32("x").unwrap().copy_from_slice(&x);
        engine.run().unwrap();
        assert_eq!(engine.state("mean").unwrap(), mean.map(|m: f64| m as f32), "a run keeps nothing");
        engine.select(0);
        engine.input_f32("x").unwrap().copy_from_slice(&x);
        engine.step(0.0).unwrap();
        for c in 0..2 {
            let (m, v) = moments(&(0..5).map(|r| f64::from(x[2 * r + c])).collect::<Vec<_>>());
            // The unbiased variance goes into the running one, as in PyTorch.
            (mean[c], var[c]) = (0.9 * mean[c] + 0.1 * m, 0.9 * var[c] + 0.1 * v * 5.0 / 4.0);
            let (got_mean, got_var) = (engine.state("mean").unwrap()[c], engine.state("var").unwrap()[c]);
            assert!((f64::from(got_mean) - mean[c]).abs() < 1e-6, "mean {got_mean}, should be {}", mean[c]);
            assert!((f64::from(got_var) - var[c]).abs() < 1e-5, "variance {got_var}, should be {}", var[c]);
            (mean[c], var[c]) = (f64::from(got_mean), f64::from(got_var));
        }
    }
}

#[test]
fn losses() {
    let labels = [2, 0, -100, 4, 1];
    for smoothing in [0.0f32, 0.2] {
        for weighted in [false, true] {
            let f = |b: &mut Builder, p: &[Tensor]| {
                let labels = b.input("labels", [5], DType::I32)?;
                let options = CrossEntropy { label_smoothing: smoothing, ignore_index: Some(-100) };
                b.cross_entropy(p[0], labels, weighted.then_some(p[1]), options)
            };
            let want = |p: &[Array]| {
                let weight = |c: usize| if weighted { p[1].at(&[c]) } else { 1.0 };
                let (mut sum, mut total) = (0.0, 0.0);
                for (r, t) in
                    labels.iter().enumerate().filter(|(_, t)| **t >= 0).map(|(r, t)| (r, *t as usize))
                {
                    let lse = (0..6).map(|c| p[0].at(&[r, c]).exp()).sum::<f64>().ln();
                    let cost = |c: usize| weight(c) * (lse - p[0].at(&[r, c]));
                    let e = f64::from(smoothing);
                    sum += (1.0 - e) * cost(t) + e / 6.0 * (0..6).map(cost).sum::<f64>();
                    total += weight(t);
                }
                Array::scalar(sum / total)
            };
            let name = format!("cross entropy {smoothing} {weighted}");
            check_with(&name, (0.1, 2.0), &[&[5, 6], &[6]], &[("labels", &labels)], f, want);
        }
    }
    let mean = |p: &[Array], f: fn(f64, f64) -> f64| {
        Array::scalar(p[0].data.iter().zip(&p[1].data).map(|(x, t)| f(*x, *t)).sum::<f64>() / 12.0)
    };
    let two: &[&[usize]] = &[&[3, 4], &[3, 4]];
    check("mse", two, |b, p| b.mse(p[0], p[1]), |p| mean(p, |x, t| (x - t).powi(2)));
    let bce = |x: f64, t: f64| -(t * sigmoid(x).ln() + (1.0 - t) * (1.0 - sigmoid(x)).ln());
    check_with("bce", (0.0, 1.0), two, &[], |b, p| b.bce_with_logits(p[0], p[1]), |p| mean(p, bce));
}

#[test]
fn attentions() {
    let (n, heads, d) = (2, 3, 4);
    for causal in [false, true] {
        for (t_q, t_k) in [(5, 5), (3, 6), (6, 3)] {
            for mask in
                [&[][..], &[t_q, t_k], &[n, 1, t_k], &[n, t_q, t_k], &[n, 1, t_q, t_k], &[n, heads, t_q, t_k]]
            {
                let o = |q: &dyn Fn(usize, usize, usize, usize) -> [f64; 3],
                         m: &dyn Fn(&[usize]) -> f64,
                         i: &[usize]| {
                    let (b, row, h, c) = (i[0], i[1], i[2], i[3]);
                    let seen = if causal { t_k.min(row + 1) } else { t_k };
                    let score = |j: usize| {
                        let dot: f64 = (0..d).map(|c| q(b, row, h, c)[0] * q(b, j, h, c)[1]).sum();
                        (dot / (d as f64).sqrt() + m(&[b, h, row, j])).exp()
                    };
                    let total: f64 = (0..seen).map(score).sum();
                    (0..seen).map(|j| score(j) / total * q(b, j, h, c)[2]).sum::<f64>()
                };
                let bias = |p: Option<&Array>, i: &[usize]| match p.filter(|_| !mask.is_empty()) {
                    Some(p) if mask.len() == 3 => p.at(&[i[0], i[2].min(mask[1] - 1), i[3]]),
                    Some(p) => p.at(i),
                    None => 0.0,
                };
                let name = format!("attention {causal} {t_q} {t_k} {mask:?}");
                let shapes: [&[usize]; 4] =
                    [&[n, t_q, heads, d], &[n, t_k, heads, d], &[n, t_k, heads, d], mask];
                let f = |b: &mut Builder, p: &[Tensor]| {
                    b.attention([p[0], p[1], p[2]], causal, (!mask.is_empty()).then(|| p[3]))
                };
                check(&name, &shapes, f, |p| {
                    // A query is asked for at its own time, keys and values at theirs.
                    let at = |x: &Array, i: &[usize]| if i[1] < x.dims[1] { x.at(i) } else { 0.0 };
                    let q = |b, t, h, c| [0, 1, 2].map(|k: usize| at(&p[k], &[b, t, h, c]));
                    Array::new(&[n, t_q, heads, d], |i| o(&q, &|i| bias(p.get(3), i), i))
                });
                if t_q != t_k {
                    continue;
                }
                let f = |b: &mut Builder, p: &[Tensor]| {
                    b.attention_packed(p[0], causal, (!mask.is_empty()).then(|| p[1]))
                };
                check(&format!("packed {name}"), &[&[n, t_q, 3, heads, d], mask], f, |p| {
                    let q = |b, t, h, c| [0, 1, 2].map(|k| p[0].at(&[b, t, k, h, c]));
                    Array::new(&[n, t_q, heads, d], |i| o(&q, &|i| bias(p.get(1), i), i))
                });
            }
        }
    }
}

#[test]
fn recurrent_layers() {
    let (n, t, h) = (2, 4, 3);
    for cell in [Cell::Lstm, Cell::Gru] {
        for reverse in [false, true] {
            for initial in [false, true] {
                let g = cell.gates() * h;
                let shapes: [&[usize]; 5] = [&[n, t, g], &[g, h], &[g], &[n, h], &[n, h]];
                let shapes = &shapes[..if cell == Cell::Lstm { 5 } else { 4 }];
                let f = |b: &mut Builder, p: &[Tensor]| {
                    b.recurrent(cell, p[0], p[1], p[2], if initial { &p[3..] } else { &[] }, reverse)
                };
                check(&format!("{cell:?} {reverse} {initial}"), shapes, f, |p| {
                    let mut y = Array::new(&[n, t, h], |_| 0.0);
                    for b in 0..n {
                        let start = |k: usize, j: usize| if initial { p[k].at(&[b, j]) } else { 0.0 };
                        let mut state: Vec<f64> = (0..h).map(|j| start(3, j)).collect();
                        let mut c: Vec<f64> =
                            (0..h).map(|j| if cell == Cell::Lstm { start(4, j) } else { 0.0 }).collect();
                        for s in 0..t {
                            let time = if reverse { t - 1 - s } else { s };
                            let xp = |gate: usize, j: usize| p[0].at(&[b, time, gate * h + j]);
                            let hp = |gate: usize, j: usize| -> f64 {
                                let row = gate * h + j;
                                (0..h).map(|k| p[1].at(&[row, k]) * state[k]).sum::<f64>() + p[2].at(&[row])
                            };
                            let next: Vec<_> = (0..h)
                                .map(|j| match cell {
                                    Cell::Lstm => {
                                        let [i, f, g, o] = [0, 1, 2, 3].map(|gate| xp(gate, j) + hp(gate, j));
                                        c[j] = sigmoid(f) * c[j] + sigmoid(i) * g.tanh();
                                        sigmoid(o) * c[j].tanh()
                                    }
                                    Cell::Gru => {
                                        let [r, z] = [0, 1].map(|gate| sigmoid(xp(gate, j) + hp(gate, j)));
                                        let new = (xp(2, j) + r * hp(2, j)).tanh();
                                        (1.0 - z) * new + z * state[j]
                                    }
                                })
                                .collect();
                            state = next;
                            y.data[(b * t + time) * h..][..h].copy_from_slice(&state);
                        }
                    }
                    y
                });
            }
        }
    }
}

#[test]
fn dropout_keeps_the_mean_and_changes_from_step_to_step() {
    let mut b = Builder::new();
    let x = b.input("x", [20_000], DType::F32).unwrap();
    let w = b.param("w", [1], Init::Const(1.0)).unwrap();
    let scaled = b.mul(x, w).unwrap();
    let (one, two) = (b.dropout(scaled, 0.25).unwrap(), b.dropout(scaled, 0.25).unwrap());
    let loss = b.mean(one, &[0]).unwrap();
    let sgd = polyreme_kernels::optim::Optimizer::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 };
    let program =
        Program::train_loss(&b.finish(&[("one", one), ("two", two), ("loss", loss)]), loss, sgd).unwrap();
    let mut engine = Engine::new(program, Options::threads(2)).unwrap();
    engine.input_f32("x").unwrap().fill(3.0);
    let mut masks = Vec::new();
    for _ in 0..2 {
        engine.step(0.0).unwrap();
        for name in ["one", "two"] {
            let y = engine.output(name).unwrap();
            assert!(y.iter().all(|y| *y == 0.0 || (*y - 4.0).abs() < 1e-5), "the rest is scaled by 1/(1-p)");
            let kept = y.iter().filter(|y| **y != 0.0).count();
            // Five deviations of a binomial of 20,000.
            assert!((kept as f64 - 15_000.0).abs() < 5.0 * 61.3, "{kept} of 20000 kept");
            masks.push(y.iter().map(|y| *y != 0.0).collect::<Vec<_>>());
        }
    }
    for i in 0..masks.len() {
        for j in 0..i {
            let both = masks[i].iter().zip(&masks[j]).filter(|(a, b)| **a && **b).count();
            assert!((both as f64 - 11_250.0).abs() < 5.0 * 70.2, "masks {i} and {j} share {both}");
        }
    }
}

/// Ranks that have some columns, or some steps in time, of every sample, from any sample on, draw the masks of the whole.
#[test]
fn parts_of_samples_draw_the_masks_of_the_whole() {
    let (samples, time, width) = (6, 5, 8);
    let run = |n: usize, time: usize, width: usize, first_sample: usize, slab: Option<Slab>| -> Vec<f32> {
        let mut b = Builder::new();
        let x = b.input("x", [n, time, width], DType::F32).unwrap();
        let y = b.dropout(x, 0.5).unwrap();
        let mut graph = b.finish(&[("y", y)]);
        for node in &mut graph.nodes {
            if let Op::Dropout { slab: here, .. } = &mut node.op {
                *here = slab;
            }
        }
        let mut program = Program::forward(&graph);
        program.microbatches[0].first_sample = first_sample;
        let mut engine = Engine::new(program, Options::threads(1)).unwrap();
        engine.input_f32("x").unwrap().fill(1.0);
        engine.run().unwrap();
        engine.output("y").unwrap().to_vec()
    };
    let whole = run(samples, time, width, 0, None);
    assert!(whole.contains(&0.0) && whole.contains(&2.0));
    let of_whole = |n: [std::ops::Range<usize>; 3]| -> Vec<f32> {
        let [n, t, w] = n;
        let row = |n: usize, t: usize| whole[(n * time + t) * width..][w.clone()].to_vec();
        n.flat_map(|n| t.clone().flat_map(move |t| row(n, t))).collect()
    };
    for samples in [0..6, 2..6, 5..6] {
        let columns = Slab { first: 3, second: None, run: 4, stride: width };
        let got = run(samples.len(), time, 4, samples.start, Some(columns));
        assert_eq!(got, of_whole([samples.clone(), 0..time, 3..7]));
        let steps = Slab { first: 2 * width, second: None, run: 3 * width, stride: time * width };
        let got = run(samples.len(), 3, width, samples.start, Some(steps));
        assert_eq!(got, of_whole([samples.clone(), 2..5, 0..width]));
        // An early and a late step, as a rank has them of a sequence that is cut in a zigzag.
        let pair = Slab { first: width, second: Some(4 * width), run: width, stride: time * width };
        let got = run(samples.len(), 2, width, samples.start, Some(pair));
        let both = |n: usize| [1, 4].map(|t| of_whole([n..n + 1, t..t + 1, 0..width])).concat();
        assert_eq!(got, samples.flat_map(both).collect::<Vec<_>>());
    }
}
