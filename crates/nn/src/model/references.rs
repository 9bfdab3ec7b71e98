//! Every model against the reference made by its PyTorch twin: names and shapes of parameters and states, the batch,
//! the logits.

use std::path::Path;

use polyreme_graph::graph::Stored;
use serde_json::Value;

use super::*;

#[test]
fn names_and_shapes_are_those_of_the_references() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("references");
    // `bigru` has no reference: its layers are those of `gru` and `bilstm`. Those of `gpt2` and `bert` are folders, which `train` reads.
    for name in Model::NAMES.into_iter().filter(|n| !["bigru", "gpt2", "bert"].contains(n)) {
        let path = folder.join(format!("{name}.json"));
        let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let want: Value = serde_json::from_str(&text).unwrap();
        check_reference(name, &want);
    }
}

fn check_reference(name: &str, want: &Value) {
    let dims = |v: &Value| -> Vec<usize> {
        v.as_array().unwrap().iter().map(|d| d.as_u64().unwrap() as usize).collect()
    };
    let input = dims(&want["input"]);
    let model = Model::by_name(name).unwrap();
    let mut options = TraceOptions::training(input[0]);
    match *input.as_slice() {
        [_, _, h, w] => options.image = Some((h, w)),
        [_, t] => options.time = Some(t),
        _ => panic!("{name}: an input of {input:?}"),
    }
    assert_eq!(model.input(&options).shape.dims(), input, "{name}");
    assert_eq!(model.n_labels(&options) as u64, want["labels"].as_u64().unwrap(), "{name}");
    assert_eq!(model.classes() as u64, want["classes"].as_u64().unwrap(), "{name}");

    let graph = model.trace(&options).unwrap();
    let logits = graph.shape(graph.output("logits").unwrap());
    assert_eq!(logits.dims(), [model.n_labels(&options), model.classes()], "{name}");

    let rows = |key: &str| {
        let rows = want[key].as_array().unwrap().iter();
        let rows =
            rows.map(|row| (row["name"].as_str().unwrap().to_string(), Shape::from(dims(&row["shape"]))));
        sorted(
            rows.filter(|(name, _)| !name.ends_with(".num_batches_tracked")).map(|(n, s)| (n, s.to_string())),
        )
    };
    let row = |s: &Stored| (s.name.clone(), graph.shape(s.value).to_string());
    assert_eq!(sorted(graph.params.iter().map(row)), rows("params"), "{name}");
    assert_eq!(sorted(graph.states.iter().map(row)), rows("buffers"), "{name}");
}

/// `name shape`, sorted: the order of a trace is that of computation, PyTorch's that of declaration.
fn sorted(rows: impl Iterator<Item = (String, String)>) -> Vec<String> {
    let mut rows: Vec<_> = rows.map(|(name, shape)| format!("{name} {shape}")).collect();
    rows.sort();
    rows
}
