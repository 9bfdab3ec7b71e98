//! Errors name the layer and the shapes, and nothing panics.

use polyreme_exec::{Engine, ExecError, Options};
use polyreme_graph::op::{Cell, Conv, CrossEntropy, ReduceKind, Window};
use polyreme_graph::{Builder, DType, Init, Program, Tensor, Traced, differentiate};
use polyreme_kernels::elementwise::Unary;
use polyreme_kernels::optim::{Moments, Optimizer};

/// Traces `f` in layer `net.bad` with zeros of these shapes; the message must name the layer and each of `parts`.
fn check(shapes: &[&[usize]], f: impl FnOnce(&mut Builder, &[Tensor]) -> Traced, parts: &[&str]) {
    let mut b = Builder::new();
    let zeros = |(i, s): (usize, &&[usize])| b.param(&format!("p{i}"), *s, Init::Const(0.0)).unwrap();
    let params: Vec<_> = shapes.iter().enumerate().map(zeros).collect();
    let result = b.layer("net", |b| b.layer("bad", |b| f(b, &params)));
    let message = result.expect_err("it should be refused").to_string();
    assert!(message.starts_with("layer `net.bad`: "), "{message}");
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
    assert!(!message.ends_with('.'), "{message}");
}

#[test]
fn shapes_of_products_and_moves() {
    type Row<'a> = (&'a [&'a [usize]], fn(&mut Builder, &[Tensor]) -> Traced, &'a [&'a str]);
    let rows: &[Row] = &[
        (
            &[&[2, 3], &[4, 5]],
            |b, p| b.matmul(p[0], p[1], false, false),
            &["matmul", "[2, 3]", "[4, 5]", "3 and 4"],
        ),
        (&[&[2, 3], &[4, 5]], |b, p| b.matmul(p[0], p[1], true, true), &["2 and 5"]),
        (&[&[3], &[3, 4]], |b, p| b.matmul(p[0], p[1], false, false), &["[3]", "[3, 4]", "two dims"]),
        (
            &[&[2, 3, 4], &[5, 4, 3]],
            |b, p| b.matmul(p[0], p[1], false, false),
            &["[2, 3, 4]", "[5, 4, 3]", "leading"],
        ),
        (&[&[4, 3], &[5, 3, 2]], |b, p| b.matmul(p[0], p[1], false, false), &["[4, 3]", "[5, 3, 2]"]),
        (
            &[&[2, 3, 4], &[3, 5]],
            |b, p| b.matmul(p[0], p[1], true, false),
            &["[2, 3, 4]", "[3, 5]", "transposed"],
        ),
        (&[&[2, 3], &[4, 5], &[4]], |b, p| b.linear(p[0], p[1], Some(p[2])), &["[2, 3]", "[4, 5]"]),
        (&[&[2, 3], &[4, 3], &[5]], |b, p| b.linear(p[0], p[1], Some(p[2])), &["add", "[2, 4]", "[5]"]),
        (&[&[2, 3], &[2]], |b, p| b.add(p[0], p[1]), &["add", "[2, 3]", "[2]"]),
        (&[&[4], &[2, 3], &[3]], |b, p| b.select(p[0], p[1], p[2]), &["select", "[4]", "[2, 3]"]),
        (&[&[2, 3]], |b, p| b.reshape(p[0], [4, 2]), &["reshape", "[2, 3]", "[4, 2]", "6", "8"]),
        (&[&[2, 3]], |b, p| b.expand(p[0], [4, 3]), &["expand", "[2, 3]", "[4, 3]"]),
        (&[&[2, 3]], |b, p| b.expand(p[0], [3]), &["expand", "[2, 3]", "[3]"]),
        (&[&[2, 3], &[3, 4]], |b, p| b.concat(p, 0), &["concat", "[2, 3]", "[3, 4]", "dim 0"]),
        (&[&[2, 3], &[2, 3, 1]], |b, p| b.concat(p, 1), &["concat", "[2, 3]", "[2, 3, 1]"]),
        (&[&[2, 3, 1], &[2, 3]], |b, p| b.concat(p, 2), &["concat", "[2, 3]"]),
        (&[&[2, 3]], |b, p| b.concat(p, 2), &["concat", "[2, 3]", "dim 2"]),
        (&[], |b, _| b.concat(&[], 0), &["concat", "nothing"]),
        (&[&[2, 3]], |b, p| b.permute(p[0], &[0, 0]), &["permute", "[2, 3]", "[0, 0]"]),
        (&[&[2, 3]], |b, p| b.permute(p[0], &[1]), &["permute", "[2, 3]", "[1]"]),
        (&[&[2, 3]], |b, p| b.permute(p[0], &[0, 2]), &["permute", "[2, 3]", "[0, 2]"]),
        (&[&[2, 3]], |b, p| b.transpose(p[0], 0, 2), &["transpose", "[2, 3]", "dim 2"]),
        (&[&[2, 3]], |b, p| b.slice(p[0], 1, 2, 2), &["slice", "[2, 3]", "2..4"]),
        (&[&[2, 3]], |b, p| b.slice(p[0], 2, 0, 1), &["slice", "[2, 3]", "dim 2"]),
        (&[&[2, 3]], |b, p| b.slice(p[0], 1, 2, usize::MAX), &["slice", "[2, 3]"]),
        (&[&[2, 3]], |b, p| b.split(p[0], 1, 2).map(|v| v[0]), &["split", "[2, 3]", "2 equal"]),
        (&[&[2, 3]], |b, p| b.split(p[0], 2, 2).map(|v| v[0]), &["[2, 3]", "dim 2"]),
        (&[&[2, 3]], |b, p| b.pad(p[0], 2, 1, 1, 0.0), &["pad", "[2, 3]", "dim 2"]),
        (&[&[2, 3]], |b, p| b.sum(p[0], &[2]), &["sum", "[2, 3]", "dim 2"]),
        (&[&[2, 3]], |b, p| b.reduce(ReduceKind::Max, p[0], &[0, 5], true), &["max", "[2, 3]", "dim 5"]),
        (&[&[2, 3]], |b, p| b.softmax(p[0], 2), &["softmax", "[2, 3]", "dim 2"]),
        (&[&[2, 3], &[2, 3]], |b, p| b.gather(p[0], 0, p[1]), &["gather", "f32", "i32"]),
        (&[&[1; 9]], |b, p| b.unary(Unary::Exp, p[0]), &["exp", "8"]),
        (&[&[1; 9]], |b, p| b.permute(p[0], &[1, 0, 2, 3, 4, 5, 6, 7, 8]), &["permute", "8"]),
    ];
    for (shapes, f, parts) in rows {
        check(shapes, f, parts);
    }
}

#[test]
fn shapes_of_images() {
    let conv = |c: Conv| move |b: &mut Builder, p: &[Tensor]| b.conv2d(p[0], p[1], None, c);
    let base = Conv::default();
    check(
        &[&[1, 5, 5, 3], &[8, 4, 3, 3]],
        conv(base),
        &["conv2d", "[1, 5, 5, 3]", "[8, 4, 3, 3]", "3 channels"],
    );
    let grouped = Conv { groups: 2, ..base };
    check(&[&[1, 5, 5, 3], &[8, 1, 3, 3]], conv(grouped), &["[1, 5, 5, 3]", "[8, 1, 3, 3]", "2 group"]);
    check(&[&[1, 5, 5, 4], &[7, 2, 3, 3]], conv(grouped), &["[1, 5, 5, 4]", "[7, 2, 3, 3]", "multiple"]);
    check(&[&[1, 5, 5, 4], &[7, 2, 3, 3]], conv(Conv { groups: 0, ..base }), &["[1, 5, 5, 4]", "0 group"]);
    check(&[&[1, 2, 5, 3], &[8, 3, 3, 3]], conv(base), &["[1, 2, 5, 3]", "spans 3 rows", "padded input's 2"]);
    let far = Conv { dilation: (1, 3), padding: (0, 0), ..base };
    check(&[&[1, 5, 5, 3], &[8, 3, 3, 3]], conv(far), &["[1, 5, 5, 3]", "spans 7 columns", "more padding"]);
    check(&[&[1, 5, 5, 3], &[8, 3, 3, 3]], conv(Conv { stride: (0, 1), ..base }), &["stride 0"]);
    check(&[&[5, 5, 3], &[8, 3, 3, 3]], conv(base), &["conv2d", "[5, 5, 3]", "4 dims"]);
    check(&[&[1, 5, 5, 3], &[8, 3, 3]], conv(base), &["conv2d", "[8, 3, 3]", "4 dims"]);

    let transposed =
        |c: Conv, extra| move |b: &mut Builder, p: &[Tensor]| b.conv_transpose2d(p[0], p[1], None, c, extra);
    let name = "conv_transpose2d";
    check(&[&[1, 5, 5, 3], &[4, 8, 3, 3]], transposed(base, (0, 0)), &[name, "[1, 5, 5, 3]", "[4, 8, 3, 3]"]);
    check(&[&[1, 5, 5, 3], &[3, 8, 3]], transposed(base, (0, 0)), &[name, "[1, 5, 5, 3]", "[3, 8, 3]"]);
    check(&[&[1, 5, 5, 3], &[3, 8, 3, 3]], transposed(base, (1, 0)), &[name, "output padding (1, 0)"]);
    let cut = Conv { padding: (4, 4), ..base };
    check(&[&[1, 5, 5, 3], &[3, 8, 3, 3]], transposed(cut, (0, 0)), &[name, "padding (4, 4)"]);
    check(&[&[1, 0, 5, 3], &[3, 8, 3, 3]], transposed(base, (0, 0)), &[name, "[1, 0, 5, 3]"]);
    check(&[&[1, 5, 5, 3], &[3, 8, 0, 3]], transposed(base, (0, 0)), &[name, "[3, 8, 0, 3]"]);

    let window = |kernel, stride, padding| Window::Fixed { kernel, stride, padding, count_include_pad: true };
    let max = |w: Window| move |b: &mut Builder, p: &[Tensor]| b.max_pool(p[0], w);
    let image: &[&[usize]] = &[&[1, 3, 5, 2]];
    check(image, max(window((4, 4), (1, 1), (0, 0))), &["max_pool", "[1, 3, 5, 2]", "spans 4 rows"]);
    check(image, max(window((2, 2), (1, 1), (2, 0))), &["max_pool", "(2, 0)", "half"]);
    check(image, max(window((2, 2), (0, 1), (0, 0))), &["max_pool", "stride 0"]);
    check(image, max(window((0, 2), (1, 1), (0, 0))), &["max_pool", "kernel 0"]);
    check(image, max(Window::Adaptive { out: (0, 1) }), &["max_pool", "at least one"]);
    check(
        &[&[3, 5, 2]],
        |b, p| b.avg_pool(p[0], Window::Adaptive { out: (1, 1) }),
        &["avg_pool", "[3, 5, 2]"],
    );
}

#[test]
fn shapes_of_norms_losses_and_sequences() {
    check(
        &[&[4, 5], &[4], &[5]],
        |b, p| b.layer_norm(p[0], p[1], p[2], 1e-5),
        &["layer_norm", "[4, 5]", "[4]"],
    );
    check(&[&[4, 5], &[4]], |b, p| b.rms_norm(p[0], p[1], 1e-5), &["rms_norm", "[4, 5]", "[4]"]);
    let group = |b: &mut Builder, p: &[Tensor]| b.group_norm(p[0], p[1], p[2], 4, 1e-5);
    check(&[&[2, 3, 6], &[6], &[6]], group, &["group_norm", "[2, 3, 6]", "4 groups"]);

    let entropy = |label_smoothing: f32, rows: usize, dtype: DType| {
        move |b: &mut Builder, p: &[Tensor]| {
            let labels = b.input("labels", [rows], dtype)?;
            b.cross_entropy(p[0], labels, None, CrossEntropy { label_smoothing, ignore_index: None })
        }
    };
    check(&[&[4, 5]], entropy(0.0, 3, DType::I32), &["cross_entropy", "[4, 5]", "[3]"]);
    check(&[&[4, 5]], entropy(0.0, 4, DType::F32), &["cross_entropy", "f32", "i32"]);
    check(&[&[4, 5]], entropy(1.0, 4, DType::I32), &["cross_entropy", "smoothing 1"]);
    check(&[&[4, 5, 6]], entropy(0.0, 4, DType::I32), &["cross_entropy", "[4, 5, 6]", "[4]"]);

    let qkv = |b: &mut Builder, p: &[Tensor]| b.attention([p[0], p[1], p[2]], false, None);
    let q: &[usize] = &[2, 4, 3, 8];
    check(&[q, &[2, 4, 3, 9], &[2, 4, 3, 9]], qkv, &["attention", "[2, 4, 3, 8]", "[2, 4, 3, 9]"]);
    check(&[q, q, &[2, 5, 3, 8]], qkv, &["attention", "[2, 4, 3, 8]", "[2, 5, 3, 8]"]);
    check(&[&[2, 4, 2, 8]], |b, p| b.attention_packed(p[0], true, None), &["attention", "[2, 4, 2, 8]", "3"]);
    let masked = |b: &mut Builder, p: &[Tensor]| b.attention_packed(p[0], true, Some(p[1]));
    check(&[&[2, 4, 3, 2, 8], &[4, 5]], masked, &["attention", "[4, 5]", "[4, 4]"]);

    let lstm = |b: &mut Builder, p: &[Tensor]| b.recurrent(Cell::Lstm, p[0], p[1], p[2], &p[3..], false);
    let (xp, w, bias): (&[usize], &[usize], &[usize]) = (&[2, 5, 12], &[12, 3], &[12]);
    check(&[xp, w, bias, &[2, 3]], lstm, &["recurrent", "1 initial states", "2 needed"]);
    check(&[xp, w, bias, &[2, 3], &[3, 3]], lstm, &["lstm", "[3, 3]", "[2, 3]"]);
    check(&[xp, &[12, 4], bias], lstm, &["lstm", "[2, 5, 12]", "[12, 4]"]);
    check(&[xp, w, &[3]], lstm, &["lstm", "[3]", "[12]"]);
    let gru = |b: &mut Builder, p: &[Tensor]| b.recurrent(Cell::Gru, p[0], p[1], p[2], &p[3..], false);
    check(
        &[&[2, 5, 9], &[9, 3], &[9], &[2, 3], &[2, 3]],
        gru,
        &["recurrent", "2 initial states", "1 needed"],
    );
    check(&[&[5, 9], &[9, 3], &[9]], gru, &["gru", "[5, 9]", "3 dims"]);
}

#[test]
fn options_and_names() {
    for p in [1.0, 1.5, -0.1, f32::NAN] {
        check(&[&[3]], |b, x| b.dropout(x[0], p), &["dropout", "0..1", &p.to_string()]);
    }
    check(&[&[3]], |b, x| b.activation("rellu", x[0]), &["activation", "`rellu`", "relu, leaky_relu"]);
    check(
        &[],
        |b, _| {
            b.param("w", [3], Init::Const(0.0))?;
            b.param("w", [4], Init::Const(0.0))
        },
        &["`net.bad.w`", "parameter"],
    );
    check(
        &[],
        |b, _| {
            b.state("s", [3], Init::Const(0.0))?;
            b.state("s", [3], Init::Const(0.0))
        },
        &["`net.bad.s`", "state"],
    );
    check(
        &[],
        |b, _| {
            b.input("x", [3], DType::F32)?;
            b.input("x", [3], DType::I32)
        },
        &["`x`", "input"],
    );
}

#[test]
fn a_loss_is_one_number() {
    let mut b = Builder::new();
    let x = b.param("x", [3], Init::Const(0.0)).unwrap();
    let y = b.layer("head", |b| b.scale(x, 2.0)).unwrap();
    let error = differentiate(&b.finish(&[("y", y)]), y).unwrap_err().to_string();
    assert!(error.contains("layer `head`") && error.contains("[3]") && error.contains("mean"), "{error}");
}

/// `x -> embedding -> gather -> linear -> cross entropy`, each of which can be fed nonsense.
fn engine(at_once: bool) -> Engine {
    let mut b = Builder::new();
    let ids = b.input("ids", [4], DType::I32).unwrap();
    let at = b.input("at", [4, 3], DType::I32).unwrap();
    let labels = b.input("labels", [4], DType::I32).unwrap();
    let table = b.layer("embed", |b| b.param("table", [5, 6], Init::Normal { std: 1.0 })).unwrap();
    let rows = b.layer("embed", |b| b.embedding(ids, table)).unwrap();
    let some = b.layer("pick", |b| b.gather(rows, 1, at)).unwrap();
    let w = b.param("w", [2, 3], Init::Normal { std: 1.0 }).unwrap();
    let options = CrossEntropy { label_smoothing: 0.0, ignore_index: Some(-7) };
    let loss = b.layer("head", |b| {
        let logits = b.linear(some, w, None)?;
        b.cross_entropy(logits, labels, None, options)
    });
    let loss = loss.unwrap();
    let forward = b.finish(&[("loss", loss)]);
    let (step, adamw) = (differentiate(&forward, loss).unwrap(), Optimizer::AdamW(Moments::DEFAULT));
    let program = match at_once {
        true => Program::train_at_once(&step, adamw),
        false => Program::train(&step, adamw, None),
    };
    let mut engine = Engine::new(program, Options::threads(2)).unwrap();
    engine.input_i32("ids").unwrap().copy_from_slice(&[0, 4, 2, 2]);
    engine.input_i32("at").unwrap().copy_from_slice(&[0, 5, 1, 2, 3, 4, 4, 4, 4, 0, 0, 0]);
    engine.input_i32("labels").unwrap().copy_from_slice(&[0, 1, 1, -7]);
    engine
}

#[test]
fn data_out_of_range_leaves_everything_as_it_was() {
    [false, true].into_iter().for_each(check_out_of_range);
}

fn check_out_of_range(at_once: bool) {
    // The results of the next good steps without any bad one in between.
    let mut good = engine(at_once);
    good.step(0.1).unwrap();
    good.step(0.1).unwrap();
    for (input, value, parts) in [
        ("labels", 2, ["layer `head`: cross_entropy", "label 2 at position 2", "0..2"]),
        ("labels", -1, ["layer `head`: cross_entropy", "label -1 at position 2", "0..2"]),
        ("ids", 5, ["layer `embed`: embedding", "id 5 at position 2", "0..5"]),
        ("ids", -1, ["layer `embed`: embedding", "id -1 at position 2", "0..5"]),
        ("ids", i32::MIN, ["layer `embed`: embedding", "at position 2", "0..5"]),
        ("at", 6, ["layer `pick`: gather", "index 6 at position 2", "0..6"]),
        ("at", -1, ["layer `pick`: gather", "index -1 at position 2", "0..6"]),
        ("at", i32::MAX, ["layer `pick`: gather", "at position 2", "0..6"]),
    ] {
        let mut engine = engine(at_once);
        engine.step(0.1).unwrap();
        let before = ["embed.table", "w"].map(|p| engine.param(p).unwrap().to_vec());
        let kept = std::mem::replace(&mut engine.input_i32(input).unwrap()[2], value);
        let error = engine.step(0.1).unwrap_err();
        assert!(matches!(error, ExecError::Data { .. }), "{error:?}");
        for part in parts {
            assert!(error.to_string().contains(part), "`{part}` is not in: {error}");
        }
        assert_eq!(before, ["embed.table", "w"].map(|p| engine.param(p).unwrap().to_vec()), "{error}");
        assert_eq!(engine.steps_done(), 1);
        engine.input_i32(input).unwrap()[2] = kept;
        engine.step(0.1).unwrap();
        assert_eq!(engine.output("loss").unwrap(), good.output("loss").unwrap(), "after {error}");
        for p in ["embed.table", "w"] {
            assert_eq!(engine.param(p).unwrap(), good.param(p).unwrap(), "after {error}");
        }
    }
}

#[test]
fn names_and_types_of_an_engine() {
    let mut engine = engine(false);
    let message = |e: ExecError| e.to_string();
    assert_eq!(
        engine.input_i32("id").map(|_| ()).map_err(message),
        Err("no input `id`; there are ids, at, labels".into())
    );
    assert_eq!(
        engine.input_f32("ids").map(|_| ()).map_err(message),
        Err("input `ids` is i32, f32 was given".into())
    );
    assert!(engine.output("logits").unwrap_err().to_string().contains("there are loss"));
    assert!(engine.param("table").unwrap_err().to_string().contains("embed.table, w"));
    assert!(engine.param_mut("table").is_err() && engine.grad("table").is_err());
    assert!(engine.state("mean").is_err() && engine.state_mut("mean").is_err());
}

#[test]
fn an_output_that_is_not_f32_is_an_error() {
    let mut b = Builder::new();
    let x = b.input("x", [3], DType::F32).unwrap();
    let (half, integer) = (b.cast(x, DType::F16).unwrap(), b.cast(x, DType::I32).unwrap());
    let mut engine =
        Engine::new(Program::forward(&b.finish(&[("half", half), ("int", integer)])), Options::threads(1))
            .unwrap();
    engine.run().unwrap();
    for (name, dtype) in [("half", "f16"), ("int", "i32")] {
        let error = engine.output(name).unwrap_err().to_string();
        assert!(error.contains(&format!("`{name}` is {dtype}")), "{error}");
    }
}

/// What graphs can express and kernels cannot run yet is an error with the layer's name, not a panic.
#[test]
fn types_without_kernels_are_errors_when_an_engine_is_made() {
    let refused = |f: &dyn Fn(&mut Builder, Tensor) -> Traced, dtype: DType| {
        let mut b = Builder::new();
        let x = b.input("x", [2, 3], DType::F32).unwrap();
        let x = b.cast(x, dtype).unwrap();
        let y = f(&mut b, x).unwrap();
        let y = b.cast(y, DType::F32).unwrap();
        Engine::new(Program::forward(&b.finish(&[("y", y)])), Options::threads(1))
            .err()
            .map(|e| e.to_string())
    };
    let wide = |b: &mut Builder, x| b.expand(x, [4, 2, 3]);
    for dtype in [DType::F16, DType::Bf16] {
        assert_eq!(refused(&|b, x| b.scale(x, 2.0), dtype), None);
        assert_eq!(refused(&wide, dtype), None);
        assert_eq!(refused(&|b, x| b.matmul(x, x, false, true), dtype), None);
        assert_eq!(refused(&|b, x| b.transpose(x, 0, 1), dtype), None);
    }
    let said = "layer `model`: there is no kernel for expand of i32; cast to f32 before it";
    assert_eq!(refused(&wide, DType::I32).as_deref(), Some(said));
    assert_eq!(refused(&|b, x| b.transpose(x, 0, 1), DType::I32), None);
}
