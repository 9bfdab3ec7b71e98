//! The declarations hold together, and the schema accepts what the reader accepts.

use polyreme_graph::builder::ACTIVATIONS;
use polyreme_nn::Model;
use polyreme_nn::model::StackLayer;
use serde_json::Value;

use super::super::layers::ListedLayer;
use super::super::read::outlines;
use super::super::section::Keyed;
use super::super::*;
use super::{SMALL, good, read};
use crate::schedule::Schedule;

/// Every kind starts as what it is called; the kinds are given in order.
fn check_kinds<S: Keyed>(want: &[&str]) {
    let section = S::section();
    let got: Vec<_> = section.outline.kinds.iter().map(|(name, _)| *name).collect();
    assert_eq!(got, want, "{}", section.outline.path);
    for name in want {
        assert_eq!(section.kind_of_start(name), Some(*name), "{}", section.outline.path);
    }
}

#[test]
fn kinds_are_what_they_are_called() {
    check_kinds::<ModelSpec>(&[&Model::NAMES[..], &["layers"]].concat());
    check_kinds::<ListedLayer>(&[&StackLayer::KINDS[..], &ACTIVATIONS.map(|(name, _)| name)].concat());
    let sources = [
        "idx",
        "mnist",
        "fashion-mnist",
        "cifar10",
        "cifar100",
        "csv",
        "jsonl",
        "parquet",
        "images",
        "tar",
        "text",
        "arrays",
    ];
    check_kinds::<DataSpec>(&[&sources[..], &["synthetic", "given"]].concat());
    check_kinds::<OptimizerSpec>(&["sgd", "adam", "adamw", "lamb", "lion", "adafactor"]);
    check_kinds::<Schedule>(&["constant", "step", "exponential", "cosine", "one-cycle", "linear"]);
}

#[test]
fn a_key_has_one_row_for_each_kind_that_has_it() {
    for outline in outlines() {
        let kinds: Vec<_> = outline.kinds.iter().map(|(name, _)| *name).collect();
        for kind in if kinds.is_empty() { vec![""] } else { kinds } {
            let rows: Vec<_> = outline.rows.iter().filter(|row| row.kinds.contains(&kind)).collect();
            assert_eq!(rows.len(), outline.names(Some(kind)).len(), "{} of kind {kind:?}", outline.path);
        }
        for row in &outline.rows {
            assert!(!row.kinds.is_empty(), "no kind of {} has `{}`", outline.path, row.name);
        }
    }
}

/// Whether a value is what a schema asks for: all keywords that our schema has, and no others.
fn accepts(root: &Value, schema: &Value, value: &Value) -> bool {
    let Some(rules) = schema.as_object() else { return schema.as_bool() == Some(true) };
    let all = |list: &Value| list.as_array().unwrap().iter().all(|s| accepts(root, s, value));
    let number =
        |n: &Value, holds: fn(f64, f64) -> bool| value.as_f64().is_none_or(|x| holds(x, n.as_f64().unwrap()));
    let object = value.as_object();
    rules.iter().all(|(keyword, rule)| match keyword.as_str() {
        "$schema" | "$defs" | "title" | "description" => true,
        "$ref" => {
            let name = rule.as_str().unwrap().strip_prefix("#/$defs/").unwrap();
            accepts(root, &root["$defs"][name], value)
        }
        "type" => match rule.as_str().unwrap() {
            "object" => value.is_object(),
            "array" => value.is_array(),
            "string" => value.is_string(),
            "boolean" => value.is_boolean(),
            "integer" => value.is_u64() || value.is_i64(),
            "number" => value.is_number(),
            other => panic!("type {other}"),
        },
        "enum" => rule.as_array().unwrap().contains(value),
        "const" => rule == value,
        "minimum" => number(rule, |x, n| x >= n),
        "maximum" => number(rule, |x, n| x <= n),
        "exclusiveMinimum" => number(rule, |x, n| x > n),
        "exclusiveMaximum" => number(rule, |x, n| x < n),
        "minLength" => value.as_str().is_none_or(|s| s.len() as u64 >= rule.as_u64().unwrap()),
        "minItems" => value.as_array().is_none_or(|a| a.len() as u64 >= rule.as_u64().unwrap()),
        "maxItems" => value.as_array().is_none_or(|a| a.len() as u64 <= rule.as_u64().unwrap()),
        "items" => value.as_array().is_none_or(|a| a.iter().all(|item| accepts(root, rule, item))),
        "properties" => object.is_none_or(|o| {
            rule.as_object().unwrap().iter().all(|(k, s)| o.get(k).is_none_or(|v| accepts(root, s, v)))
        }),
        "required" => object
            .is_none_or(|o| rule.as_array().unwrap().iter().all(|k| o.contains_key(k.as_str().unwrap()))),
        "additionalProperties" => {
            assert_eq!(*rule, Value::Bool(false));
            object.is_none_or(|o| o.keys().all(|k| schema["properties"].get(k).is_some()))
        }
        "propertyNames" => object.is_none_or(|o| o.keys().all(|k| accepts(root, rule, &k.as_str().into()))),
        "allOf" => all(rule),
        "anyOf" => rule.as_array().unwrap().iter().any(|s| accepts(root, s, value)),
        "not" => !accepts(root, rule, value),
        "if" => !accepts(root, rule, value) || accepts(root, &schema["then"], value),
        "then" => true,
        other => panic!("keyword {other}"),
    })
}

#[test]
fn the_schema_accepts_what_is_right() {
    let schema = schema();
    let check = |text: &str| {
        let value: Value = toml::from_str(text).unwrap();
        assert!(accepts(&schema, &schema, &value), "{text}");
    };
    let mut texts = vec![SMALL.to_string(), include_str!("full.toml").into()];
    let inner =
        "{ kind = \"residual\", precision = \"f32\", layers = [{ kind = \"relu\", precision = \"f32\" }] }";
    texts.push(format!("[data]\nkind = \"mnist\"\n[model]\nlayers = [{inner}, \"linear\"]"));
    for example in ["digits", "fashion", "gpt"] {
        let path = format!("{}/../../examples/{example}.toml", env!("CARGO_MANIFEST_DIR"));
        texts.push(std::fs::read_to_string(path).unwrap());
    }
    for name in Model::NAMES {
        texts.push(format!("[model]\nkind = \"{name}\"\n[data]\nkind = \"mnist\""));
    }
    for text in &texts {
        check(text);
        check(&good(text, &[]).to_toml());
    }
}

#[test]
fn neither_the_schema_nor_the_reader_accepts_what_is_wrong() {
    let schema = schema();
    let model = |text: &str| format!("[data]\nkind = \"synthetic\"\n[model]\n{text}");
    let data = |text: &str| format!("[model]\nkind = \"mlp\"\n[data]\n{text}");
    let rest = |text: &str| format!("{SMALL}{text}");
    let texts = [
        "[model]\nkind = \"mlp\"".into(),
        model("kind = \"vgg\""),
        model("kind = \"resnet18\"\nwidth = 3"),
        model("kind = \"mlp\"\nhidden = 64"),
        model("kind = \"gpt\"\nlayers = [\"relu\"]"),
        model("width = 3"),
        model("layers = [{ kind = \"conv\", outputs = 3 }]"),
        model("layers = [\"conv\"]"),
        model("layers = [{ kind = \"linear\", precision = \"bf16\" }]"),
        model("layers = [{ kind = \"residual\", layers = [{ kind = \"dropout\", p = 1 }] }]"),
        data("kind = \"csv\""),
        data("path = \"x\""),
        data("kind = \"csv\"\npath = \"x\"\nlabels = \"y\""),
        data("kind = \"synthetic\"\nshape = [3, 4]"),
        data("kind = \"synthetic\"\naugment = { flop = true }"),
        rest("[train]\nbach = 3"),
        rest("[train]\nbatch = 0"),
        rest("[train]\nbatch = \"3\""),
        rest("[train]\nepochs = 3\nsteps = 4"),
        rest("[train]\noptimizer = \"sdg\""),
        rest("[train]\noptimizer = { momentum = 0.9 }"),
        rest("[train]\noptimizer = { kind = \"sgd\", betas = [0.9, 0.99] }"),
        rest("[train]\nschedule = { warmup = 3 }"),
        rest("[train]\nprecision = \"f64\""),
        rest("[train]\nf32_layers = \"head\""),
        rest("[parallel]\nranks = \"all\""),
        rest("[parallel]\npatience = 0.5"),
        rest("[output]\nbest = \"accuracy\""),
        rest("[network]\n"),
    ];
    for text in &texts {
        let value: Value = toml::from_str(text).unwrap();
        assert!(!accepts(&schema, &schema, &value), "the schema accepts\n{text}");
        assert!(read(text, &[]).is_err(), "the reader accepts\n{text}");
    }
}
