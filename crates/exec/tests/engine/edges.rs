//! Legal but odd: results that are leaves, nothing to learn, nothing to compute.

use polyreme_exec::{Engine, Options};
use polyreme_graph::op::{Cell, Conv, CrossEntropy, ReduceKind, Window};
use polyreme_graph::{Builder, DType, Init, Program, Tensor, Traced, differentiate};
use polyreme_kernels::Isa;
use polyreme_kernels::elementwise::Unary;
use polyreme_kernels::optim::{Adafactor, Moments, Optimizer};

const SGD: Optimizer = Optimizer::Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 };

#[test]
fn outputs_may_be_leaves_and_views_of_them() {
    let mut b = Builder::new();
    let x = b.input("x", [2, 3], DType::F32).unwrap();
    let p = b.param("p", [2], Init::Const(5.0)).unwrap();
    let s = b.state("s", [2], Init::Const(6.0)).unwrap();
    let c = b.constant(7.0);
    let wide = b.expand(c, [2]).unwrap();
    let flat = b.reshape(x, [6]).unwrap();
    let column = b.reshape(p, [2, 1]).unwrap();
    let outputs = [
        ("x", x),
        ("p", p),
        ("s", s),
        ("c", c),
        ("wide", wide),
        ("flat", flat),
        ("column", column),
        ("again", flat),
    ];
    let mut engine = Engine::new(Program::forward(&b.finish(&outputs)), Options::threads(2)).unwrap();
    for k in 0..2 {
        engine.input_f32("x").unwrap().fill(k as f32);
        engine.run().unwrap();
        for (name, want, n) in
            [("p", 5.0, 2), ("s", 6.0, 2), ("c", 7.0, 1), ("wide", 7.0, 2), ("column", 5.0, 2)]
        {
            assert_eq!(engine.output(name).unwrap(), vec![want; n], "{name}");
        }
        for name in ["x", "flat", "again"] {
            assert_eq!(engine.output(name).unwrap(), [k as f32; 6], "{name}");
        }
    }
}

#[test]
fn a_parameter_may_be_the_loss() {
    let mut b = Builder::new();
    let p = b.param("p", [1], Init::Const(2.0)).unwrap();
    let program = Program::train_loss(&b.finish(&[("loss", p)]), p, SGD).unwrap();
    let mut engine = Engine::new(program, Options::threads(1)).unwrap();
    engine.step(0.25).unwrap();
    engine.step(0.25).unwrap();
    assert_eq!(engine.param("p").unwrap(), [1.5]);
    assert_eq!(engine.grad("p").unwrap(), Some(&[1.0][..]));
}

#[test]
fn two_parameters_with_one_gradient_are_both_updated() {
    let mut b = Builder::new();
    let p = b.param("p", [3], Init::Const(1.0)).unwrap();
    let q = b.param("q", [3], Init::Const(2.0)).unwrap();
    let sum = b.add(p, q).unwrap();
    let loss = b.sum(sum, &[0]).unwrap();
    let program = Program::train_loss(&b.finish(&[("loss", loss)]), loss, SGD).unwrap();
    let mut engine = Engine::new(program, Options::threads(1)).unwrap();
    engine.step(0.5).unwrap();
    assert_eq!((engine.param("p").unwrap(), engine.param("q").unwrap()), (&[0.5; 3][..], &[1.5; 3][..]));
}

#[test]
fn a_step_with_nothing_to_learn_changes_nothing() {
    let mut b = Builder::new();
    let x = b.input("x", [3], DType::F32).unwrap();
    b.param("p", [100], Init::Const(1.0)).unwrap();
    let loss = b.mean(x, &[0]).unwrap();
    let step = differentiate(&b.finish(&[("loss", loss)]), loss).unwrap();
    for optimizer in [
        SGD,
        Optimizer::AdamW(Moments::DEFAULT),
        Optimizer::Lamb(Moments::DEFAULT),
        Optimizer::Adafactor(Adafactor::DEFAULT),
    ] {
        let mut engine =
            Engine::new(Program::train(&step, optimizer, Some(1.0)), Options::threads(1)).unwrap();
        engine.step(0.5).unwrap();
        assert_eq!(engine.param("p").unwrap(), [1.0; 100]);
        assert_eq!(engine.grad_norm(), Some(0.0));
    }
}

#[test]
fn states_become_what_they_are_told() {
    let mut b = Builder::new();
    let x = b.input("x", [2], DType::F32).unwrap();
    let p = b.param("p", [2], Init::Const(1.0)).unwrap();
    let names = ["last", "before", "total", "left", "right"];
    let [last, before, total, left, right] = names.map(|n| b.state(n, [2], Init::Const(0.0)).unwrap());
    let sum = b.add(total, x).unwrap();
    let offset = b.unary(Unary::Offset(1.0), left).unwrap();
    b.update_state(last, x).unwrap();
    b.update_state(before, last).unwrap();
    b.update_state(total, sum).unwrap();
    // Each becomes what the other was at the start of the step.
    b.update_state(left, right).unwrap();
    b.update_state(right, offset).unwrap();
    let error = b.update_state(total, p).and_then(|()| b.update_state(p, sum)).unwrap_err().to_string();
    assert!(error.contains("state"), "{error}");
    let wrong = b.constant(0.0);
    let error = b.update_state(total, wrong).unwrap_err().to_string();
    assert!(error.contains("[2]") && error.contains("[]"), "{error}");
    b.update_state(total, sum).unwrap();
    let y = b.mul(x, p).unwrap();
    let loss = b.mean(y, &[0]).unwrap();
    let program = Program::train_loss(&b.finish(&[("loss", loss)]), loss, SGD).unwrap();
    let mut engine = Engine::new(program, Options::threads(2)).unwrap();
    let rows = [
        (1.0, [1.0, 0.0, 1.0, 0.0, 1.0]),
        (2.0, [2.0, 1.0, 3.0, 1.0, 1.0]),
        (4.0, [4.0, 2.0, 7.0, 1.0, 2.0]),
    ];
    for (x, want) in rows {
        engine.input_f32("x").unwrap().fill(x);
        engine.step(0.0).unwrap();
        for (name, want) in names.iter().zip(want) {
            assert_eq!(engine.state(name).unwrap(), [want; 2], "{name} after {x}");
        }
    }
}

/// Shapes with an empty dim run, forward and backward; gradients of what is not empty are zeros.
#[test]
fn nothing_to_compute() {
    type Row<'a> = (&'a str, &'a [&'a [usize]], fn(&mut Builder, &[Tensor]) -> Traced);
    let rows: [Row; 15] = [
        ("unary", &[&[0, 3]], |b, p| b.unary(Unary::Exp, p[0])),
        ("broadcast", &[&[0, 3], &[3]], |b, p| b.add(p[0], p[1])),
        ("linear", &[&[0, 3], &[4, 3], &[4]], |b, p| b.linear(p[0], p[1], Some(p[2]))),
        ("no terms", &[&[2, 0], &[4, 0]], |b, p| b.matmul(p[0], p[1], false, true)),
        ("batch", &[&[0, 2, 3], &[0, 3, 4]], |b, p| b.matmul(p[0], p[1], false, false)),
        ("conv", &[&[0, 5, 5, 3], &[4, 3, 3, 3]], |b, p| b.conv2d(p[0], p[1], None, Conv::default())),
        ("pool", &[&[0, 5, 5, 3]], |b, p| b.max_pool(p[0], Window::Adaptive { out: (1, 1) })),
        ("average", &[&[0, 5, 5, 3]], |b, p| b.avg_pool(p[0], Window::Adaptive { out: (2, 2) })),
        ("layer norm", &[&[0, 3], &[3], &[3]], |b, p| b.layer_norm(p[0], p[1], p[2], 1e-5)),
        ("group norm", &[&[0, 2, 4], &[4], &[4]], |b, p| b.group_norm(p[0], p[1], p[2], 2, 1e-5)),
        ("softmax", &[&[0, 3]], |b, p| b.softmax(p[0], 1)),
        ("sum", &[&[0, 3]], |b, p| b.reduce(ReduceKind::Sum, p[0], &[0], false)),
        ("attention", &[&[0, 4, 3, 2, 8]], |b, p| b.attention_packed(p[0], true, None)),
        ("lstm", &[&[0, 3, 8], &[8, 2], &[8]], |b, p| b.recurrent(Cell::Lstm, p[0], p[1], p[2], &[], false)),
        ("moves", &[&[0, 4]], |b, p| {
            let x = b.concat(&[p[0], p[0]], 0)?;
            let x = b.permute(x, &[1, 0])?;
            let x = b.dropout(x, 0.5)?;
            b.slice(x, 0, 1, 2)
        }),
    ];
    for (name, shapes, f) in rows {
        let mut b = Builder::new();
        let param = |(i, s): (usize, &&[usize])| b.param(&format!("p{i}"), *s, Init::Const(1.0)).unwrap();
        let params: Vec<_> = shapes.iter().enumerate().map(param).collect();
        let y = f(&mut b, &params).unwrap();
        let loss = b.sum(y, &(0..b.shape(y).rank()).collect::<Vec<_>>()).unwrap();
        let step = differentiate(&b.finish(&[("loss", loss)]), loss).unwrap();
        for isa in [Isa::detect(), Isa::SCALAR] {
            let options = Options { isa, ..Options::threads(2) };
            let mut engine = Engine::new(Program::train(&step, SGD, Some(1.0)), options).unwrap();
            engine.step(0.1).unwrap();
            assert_eq!(engine.output("loss").unwrap(), [0.0], "{name}");
            for i in 0..shapes.len() {
                let grad = engine.grad(&format!("p{i}")).unwrap().unwrap();
                assert!(grad.iter().all(|g| *g == 0.0), "{name}: {grad:?}");
            }
        }
    }
    // A batch whose every label is ignored has no mean.
    let mut b = Builder::new();
    let p = b.param("p", [2, 3], Init::Const(1.0)).unwrap();
    let labels = b.input("labels", [2], DType::I32).unwrap();
    let options = CrossEntropy { label_smoothing: 0.0, ignore_index: Some(0) };
    let loss = b.cross_entropy(p, labels, None, options).unwrap();
    let step = differentiate(&b.finish(&[("loss", loss)]), loss).unwrap();
    let mut engine = Engine::new(Program::gradients(&step), Options::threads(1)).unwrap();
    engine.run().unwrap();
    assert!(engine.output("loss").unwrap()[0].is_nan(), "as in PyTorch");
}

#[test]
fn a_forward_pass_reads_views_of_parameters_where_training_has_them() {
    let mut b = Builder::new();
    let x = b.input("x", [2, 3], DType::F32).unwrap();
    // The second parameter's gradient is ready first, so it comes first in memory.
    let first = b.param("first", [9], Init::Const(2.0)).unwrap();
    let second = b.param("second", [3], Init::Const(3.0)).unwrap();
    let offset = b.state("offset", [6], Init::Const(4.0)).unwrap();
    let view = b.reshape(first, [3, 3]).unwrap();
    let y = b.linear(x, view, None).unwrap();
    let row = b.reshape(second, [1, 3]).unwrap();
    let y = b.mul(y, row).unwrap();
    let shift = b.reshape(offset, [2, 3]).unwrap();
    let y = b.add(y, shift).unwrap();
    let loss = b.mean_all(y).unwrap();
    let graph = b.finish(&[("y", y), ("loss", loss)]);
    let step = differentiate(&graph, loss).unwrap();
    let mut engine = Engine::new(Program::train(&step, SGD, None), Options::threads(1)).unwrap();
    let forward = engine.add(Program::forward(&graph)).unwrap();
    engine.select(forward);
    engine.input_f32("x").unwrap().fill(1.0);
    engine.run().unwrap();
    assert_eq!(engine.output("y").unwrap(), [3.0 * 2.0 * 3.0 + 4.0; 6]);
    // A forward pass may do without a parameter, but not have another one.
    let mut b = Builder::new();
    let first = b.param("first", [9], Init::Const(2.0)).unwrap();
    let alone = engine.add(Program::forward(&b.finish(&[("first", first)]))).unwrap();
    engine.select(alone);
    engine.run().unwrap();
    assert_eq!(engine.output("first").unwrap(), [2.0; 9]);
    for (name, n) in [("third", 9), ("first", 8)] {
        let mut b = Builder::new();
        let other = b.param(name, [n], Init::Const(2.0)).unwrap();
        let error = engine.add(Program::forward(&b.finish(&[("other", other)]))).unwrap_err();
        assert_eq!(error, polyreme_exec::ExecError::Layout);
    }
}
