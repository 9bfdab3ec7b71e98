//! Every model's size, batch and errors, and how it passes the rewrites of a training step.

use polyreme_graph::{Graph, differentiate, fuse};

use super::*;

fn model(name: &str) -> Model {
    Model::by_name(name).unwrap()
}

/// A small batch, with images as small as the model takes.
fn small(name: &str, training: bool) -> TraceOptions {
    let image = match name {
        "alexnet" => Some((63, 63)),
        _ if name.starts_with("resnet") => Some((32, 32)),
        _ => None,
    };
    TraceOptions { image, training, ..TraceOptions::training(2) }
}

#[test]
fn parameters_are_as_many_as_in_pytorch() {
    let check = |name: &str, want: usize| {
        let graph = model(name).trace(&small(name, true)).unwrap();
        assert_eq!(graph.param_numel(), want, "{name}");
    };
    check("mlp", 669_706);
    check("tabular", 150_666);
    check("lenet", 62_006);
    check("cnn", 1_148_874);
    check("gpt", 10_942_464);
    check("gpt2", 124_439_808);
    check("alexnet", 57_044_810);
    check("resnet18", 11_181_642);
    check("resnet34", 21_289_802);
    check("resnet50", 23_528_522);
    check("resnet101", 42_520_650);
    check("resnet18_cifar", 11_173_962);
    check("resnet34_cifar", 21_282_122);
    check("resnet50_cifar", 23_520_842);
    check("resnet101_cifar", 42_512_970);
    check("lstm", 36_853);
    check("gru", 28_213);
    check("bilstm", 90_085);
    check("encoder", 73_541);
}

#[test]
fn every_model_makes_a_step() {
    for name in Model::NAMES {
        let forward = model(name).trace(&small(name, true)).unwrap();
        let step = differentiate(&forward, forward.output("loss").unwrap()).unwrap();
        for (param, grad) in step.params.iter().zip(&step.grads) {
            assert!(grad.is_some(), "{name}: {} has no gradient", param.name);
        }
        assert_eq!(step.updates.len(), step.states.len(), "{name}: a state has no update");
        fuse(&step).verify();
    }
}

#[test]
fn evaluation_has_the_same_parameters_and_changes_nothing() {
    for name in Model::NAMES {
        let names = |g: &Graph| g.params.iter().chain(&g.states).map(|s| s.name.clone()).collect::<Vec<_>>();
        let training = model(name).trace(&small(name, true)).unwrap();
        let evaluation = model(name).trace(&small(name, false)).unwrap();
        assert_eq!(names(&training), names(&evaluation), "{name}");
        assert!(evaluation.updates.is_empty(), "{name}");
        assert!(evaluation.nodes.iter().all(|n| n.op.name() != "dropout"), "{name}");
        fuse(&evaluation).verify();
    }
}

#[test]
fn the_default_batch_is_what_each_model_was_made_for() {
    let check = |name: &str, want: &[usize], dtype: DType| {
        let input = model(name).input(&TraceOptions::training(8));
        assert_eq!((input.shape.dims(), input.dtype), (want, dtype), "{name}");
    };
    check("mlp", &[8, 784], DType::F32);
    check("tabular", &[8, 16], DType::F32);
    check("lenet", &[8, 3, 32, 32], DType::F32);
    check("cnn", &[8, 3, 32, 32], DType::F32);
    check("alexnet", &[8, 3, 224, 224], DType::F32);
    check("resnet50", &[8, 3, 224, 224], DType::F32);
    check("resnet50_cifar", &[8, 3, 32, 32], DType::F32);
    check("gpt", &[8, 256], DType::I32);
    check("gpt2", &[8, 1024], DType::I32);
    check("lstm", &[8, 20], DType::I32);
    check("encoder", &[8, 32], DType::I32);
}

#[test]
fn errors_name_the_layer() {
    let check = |model: Model, options: TraceOptions, want: &str| {
        assert_eq!(model.trace(&options).unwrap_err().to_string(), want);
    };
    let batch = TraceOptions::training(2);
    let image = |h, w| TraceOptions { image: Some((h, w)), ..batch };
    check(
        model("lenet"),
        image(28, 28),
        "layer `fc1`: matmul: shapes [2, 256] and [120, 400] do not fit: the dims summed over are 256 and 400",
    );
    check(
        model("lenet"),
        image(8, 8),
        "layer `conv2`: conv2d: shape [2, 2, 2, 6] does not fit: the kernel spans 5 rows, more than the padded \
         input's 2 (2 + 2x0); use a smaller kernel or more padding",
    );
    check(
        model("alexnet"),
        image(62, 62),
        "layer `features.12`: max_pool: shape [2, 2, 2, 256] does not fit: the kernel spans 3 rows, more than the \
         padded input's 2 (2 + 2x0); use a smaller kernel or more padding",
    );
    check(
        Model::Gpt(Gpt { heads: 7, ..Gpt::default() }),
        batch,
        "layer `blocks.0`: attention: `heads` of 7 does not divide `width` of 384",
    );
    check(
        model("gpt"),
        TraceOptions { time: Some(257), ..batch },
        "layer `pos`: positions: shape [2, 257, 384] does not fit: \
         the sequence of 257 is longer than the context of 256",
    );
    check(
        Model::Mlp(Mlp { activation: "swish".into(), ..Mlp::default() }),
        batch,
        "layer `model`: unknown activation `swish`; known are none, relu, leaky_relu, elu, gelu, gelu_tanh, silu, \
         sigmoid, tanh, softplus, exp, abs",
    );
    check(
        Model::Mlp(Mlp { hidden: vec![512, 0], ..Mlp::default() }),
        batch,
        "layer `fc2`: linear: `outputs` is 0; it must be at least 1",
    );
    check(model("gpt"), TraceOptions::training(0), "layer `model`: input: `ids` is 0; it must be at least 1");
}

#[test]
fn an_unknown_name_is_told_the_known_ones() {
    let error = Model::by_name("vgg").unwrap_err().to_string();
    assert!(
        error.starts_with(
            "unknown model `vgg`; known are mlp, tabular, lenet, cnn, gpt, gpt2, bert, alexnet, resnet18"
        ),
        "{error}"
    );
}

#[test]
fn tables_may_have_numbers_or_categories_or_both() {
    let check = |inputs: usize, categories: &[usize], embed: usize, first: usize| {
        let categories = categories.to_vec();
        let model = Model::Tabular(Tabular { inputs, categories, embed, ..Tabular::default() });
        let graph = model.trace(&TraceOptions::training(4)).unwrap();
        let weight = graph.params.iter().find(|p| p.name == "first.weight").unwrap();
        assert_eq!(graph.shape(weight.value).dims(), [128, first]);
        let vectors = graph.params.iter().any(|p| p.name == "numbers.weight");
        assert_eq!(vectors, embed > 0 && inputs > model_categories(&model));
    };
    fn model_categories(model: &Model) -> usize {
        if let Model::Tabular(m) = model { m.categories.len() } else { 0 }
    }
    check(5, &[], 8, 40);
    check(5, &[], 0, 5);
    // Vectors of 13 and of 5: 40 and 7 ids.
    check(5, &[40, 7], 8, 3 * 8 + 13 + 5);
    check(2, &[40, 7], 8, 13 + 5);
    check(1, &[7], 0, 5);
}

#[test]
fn lenet_forward() {
    let got = model("lenet").trace(&TraceOptions::training(4)).unwrap().to_string();
    let want = include_str!("../../snapshots/lenet_forward.txt");
    assert_eq!(got, want, "\n--- got ---\n{got}");
}

#[test]
fn dropout_is_off_unless_asked_for() {
    let drops = |model: &Model, training: bool| {
        let graph = model.trace(&TraceOptions { training, ..TraceOptions::training(2) }).unwrap();
        graph.nodes.iter().filter(|n| n.op.name() == "dropout").count()
    };
    let check = |model: Model, want: usize| {
        assert_eq!((drops(&model, true), drops(&model, false)), (want, 0), "{}", model.name());
    };
    check(Model::Gpt(Gpt { layers: 2, ..Gpt::default() }), 0);
    check(Model::Gpt(Gpt { layers: 2, dropout: 0.1, ..Gpt::default() }), 5);
    check(Model::Mlp(Mlp { dropout: 0.1, ..Mlp::default() }), 2);
    check(Model::Tabular(Tabular { dropout: 0.0, ..Tabular::default() }), 0);
    check(Model::Tabular(Tabular::default()), 4);
    check(Model::Cnn(Cnn { dropout: 0.1, ..Cnn::default() }), 1);
    check(Model::Recurrent(RecurrentClassifier { dropout: 0.1, ..RecurrentClassifier::default() }), 1);
}
