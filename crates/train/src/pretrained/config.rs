//! `config.json` of a family: the sizes of a network, and how they are written for `transformers`.
//!
//! What would change results and is not implemented here is an error that names it, never ignored. Dropout is the exception: it is
//! a matter of training, so the job says it.

use polyreme_nn::Model;
use polyreme_nn::model::{Bert, Gpt2, Pooling};
use serde_json::{Map, Value, json};

use super::Family;

/// Sizes above this are no sizes.
const SIZE_MAX: u64 = 1 << 20;

/// Activations as `transformers` and as graphs call them.
const ACTIVATIONS: [(&str, &str); 7] = [
    ("gelu_new", "gelu_tanh"),
    ("gelu_pytorch_tanh", "gelu_tanh"),
    ("gelu", "gelu"),
    ("relu", "relu"),
    ("silu", "silu"),
    ("swish", "silu"),
    ("tanh", "tanh"),
];

/// The network that a `config.json` describes, which must be of this family. An error says what to change.
pub(crate) fn read(family: Family, config: &Value) -> Result<Model, String> {
    let found = config["model_type"].as_str().unwrap_or("unknown");
    if found != family.name() {
        let known: Vec<_> = Family::ALL.iter().map(|family| format!("{:?}", family.name())).collect();
        let known = known.join(", ");
        return Err(format!(
            "`model_type` is {found:?}, and `model.kind` is {:?}; folders are read for kinds {known}",
            family.name()
        ));
    }
    let config = Config(config);
    match family {
        Family::Gpt2 => gpt2(&config).map(Model::Gpt2),
        Family::Bert => bert(&config).map(Model::Bert),
    }
}

/// The same network as a `config.json`, with what else `before` says.
pub(crate) fn write(model: &Model, before: Option<&Value>) -> Option<Value> {
    let own = match model {
        Model::Gpt2(m) => json!({
            "architectures": ["GPT2LMHeadModel"],
            "model_type": Family::Gpt2.name(),
            "vocab_size": m.vocab,
            "n_embd": m.width,
            "n_head": m.heads,
            "n_layer": m.layers,
            "n_positions": m.context,
            "n_inner": null,
            "activation_function": theirs(&m.activation)?,
            "layer_norm_epsilon": short(m.eps),
            "tie_word_embeddings": m.tied,
        }),
        Model::Bert(m) => json!({
            "architectures": [match (m.tags, m.pooling) {
                (true, _) => "BertForTokenClassification",
                (false, Pooling::First) => "BertForSequenceClassification",
                // A head on a mean is no class of `transformers`: the body is.
                (false, Pooling::Mean) => "BertModel",
            }],
            "model_type": Family::Bert.name(),
            "vocab_size": m.vocab,
            "hidden_size": m.width,
            "num_attention_heads": m.heads,
            "num_hidden_layers": m.layers,
            "intermediate_size": m.hidden,
            "max_position_embeddings": m.context,
            "type_vocab_size": m.types,
            "hidden_act": theirs(&m.activation)?,
            "layer_norm_eps": short(m.eps),
            "id2label": (0..m.classes).map(|k| (k.to_string(), json!(format!("LABEL_{k}")))).collect::<Map<_, _>>(),
            "label2id": (0..m.classes).map(|k| (format!("LABEL_{k}"), json!(k))).collect::<Map<_, _>>(),
        }),
        _ => return None,
    };
    let mut all = before.filter(|before| before.is_object()).cloned().unwrap_or_else(|| json!({}));
    if let (Some(all), Value::Object(own)) = (all.as_object_mut(), own) {
        for (key, value) in own {
            // Two names of one function, or an absent key that means its default, stay as they were.
            let keeps = match all.get(&key) {
                Some(before) if key == "activation_function" || key == "hidden_act" => {
                    before.as_str().and_then(ours) == value.as_str().and_then(ours)
                }
                // Names of as many classes.
                Some(before) if key == "id2label" || key == "label2id" => {
                    before.as_object().map(Map::len) == value.as_object().map(Map::len)
                }
                Some(_) => key == "n_inner",
                None => false,
            };
            if !keeps {
                all.insert(key, value);
            }
        }
    }
    Some(all)
}

/// What a `config.json` says.
struct Config<'a>(&'a Value);

impl Config<'_> {
    /// A size, or what `transformers` takes where there is none.
    fn size(&self, key: &str, default: usize) -> Result<usize, String> {
        match &self.0[key] {
            Value::Null => Ok(default),
            value => match value.as_u64().filter(|n| (1..=SIZE_MAX).contains(n)) {
                Some(n) => Ok(n as usize),
                None => Err(format!("`{key}` is {value}, and a size from 1 to {SIZE_MAX} is needed")),
            },
        }
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool, String> {
        match &self.0[key] {
            Value::Null => Ok(default),
            value => {
                value.as_bool().ok_or_else(|| format!("`{key}` is {value}, and true or false is needed"))
            }
        }
    }

    /// A flag that must be as it usually is.
    fn usual(&self, key: &str, usual: bool) -> Result<(), String> {
        match self.flag(key, usual)? == usual {
            true => Ok(()),
            false => Err(format!("`{key}` is {}, which is not supported; only {usual} is", !usual)),
        }
    }

    fn activation(&self, key: &str, default: &str) -> Result<String, String> {
        let name = match &self.0[key] {
            Value::Null => default,
            value => value.as_str().unwrap_or_default(),
        };
        let known = ACTIVATIONS.map(|(name, _)| name).join(", ");
        let said = &self.0[key];
        let wrong = || format!("`{key}` is {said}, which is not supported; {known} are");
        ours(name).map(String::from).ok_or_else(wrong)
    }

    fn eps(&self, key: &str, default: f32) -> Result<f32, String> {
        match &self.0[key] {
            Value::Null => Ok(default),
            value => match value.as_f64().map(|eps| eps as f32).filter(|eps| *eps > 0.0 && *eps < 1.0) {
                Some(eps) => Ok(eps),
                None => Err(format!("`{key}` is {value}, and a number between 0 and 1 is needed")),
            },
        }
    }
}

fn ours(theirs: &str) -> Option<&'static str> {
    ACTIVATIONS.iter().find(|(name, _)| *name == theirs).map(|(_, ours)| *ours)
}

fn theirs(ours: &str) -> Option<&'static str> {
    ACTIVATIONS.iter().find(|(_, name)| *name == ours).map(|(theirs, _)| *theirs)
}

/// A number with as few digits as an f32 needs, which an f64 of it would not have.
fn short(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(f64::from(x))
}

fn heads_divide(heads: usize, width: usize, keys: [&str; 2]) -> Result<(), String> {
    match width.is_multiple_of(heads) {
        true => Ok(()),
        false => Err(format!("`{}` of {heads} does not divide `{}` of {width}", keys[0], keys[1])),
    }
}

fn gpt2(config: &Config) -> Result<Gpt2, String> {
    let usual = Gpt2::default();
    let width = config.size("n_embd", usual.width)?;
    let heads = config.size("n_head", usual.heads)?;
    heads_divide(heads, width, ["n_head", "n_embd"])?;
    let inner = config.size("n_inner", 4 * width)?;
    if inner != 4 * width {
        return Err(format!("`n_inner` is {inner}, and only 4 times `n_embd` ({}) is supported", 4 * width));
    }
    config.usual("scale_attn_weights", true)?;
    config.usual("scale_attn_by_inverse_layer_idx", false)?;
    config.usual("add_cross_attention", false)?;
    Ok(Gpt2 {
        vocab: config.size("vocab_size", usual.vocab)?,
        width,
        heads,
        layers: config.size("n_layer", usual.layers)?,
        context: config.size("n_positions", usual.context)?,
        activation: config.activation("activation_function", "gelu_new")?,
        eps: config.eps("layer_norm_epsilon", usual.eps)?,
        tied: config.flag("tie_word_embeddings", true)?,
        dropout: 0.0,
    })
}

fn bert(config: &Config) -> Result<Bert, String> {
    let usual = Bert::default();
    let width = config.size("hidden_size", usual.width)?;
    let heads = config.size("num_attention_heads", usual.heads)?;
    heads_divide(heads, width, ["num_attention_heads", "hidden_size"])?;
    config.usual("is_decoder", false)?;
    config.usual("add_cross_attention", false)?;
    let positions = &config.0["position_embedding_type"];
    if !positions.is_null() && positions != "absolute" {
        return Err(format!(
            "`position_embedding_type` is {positions}, which is not supported; only \"absolute\" is"
        ));
    }
    Ok(Bert {
        vocab: config.size("vocab_size", usual.vocab)?,
        width,
        heads,
        hidden: config.size("intermediate_size", usual.hidden)?,
        layers: config.size("num_hidden_layers", usual.layers)?,
        context: config.size("max_position_embeddings", usual.context)?,
        types: config.size("type_vocab_size", usual.types)?,
        activation: config.activation("hidden_act", "gelu")?,
        eps: config.eps("layer_norm_eps", usual.eps)?,
        ..usual
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_written() {
        let model = read(Family::Gpt2, &json!({ "model_type": "gpt2", "n_embd": 32, "n_head": 4 })).unwrap();
        let want = Gpt2 { width: 32, heads: 4, ..Gpt2::default() };
        assert_eq!(model, Model::Gpt2(want.clone()));
        let other = Model::Gpt2(Gpt2 { activation: "gelu".into(), eps: 1e-6, tied: false, ..want });
        let before = json!({ "bos_token_id": 3, "activation_function": "gelu_pytorch_tanh" });
        let written = write(&other, Some(&before)).unwrap();
        assert_eq!(read(Family::Gpt2, &written).unwrap(), other);
        assert_eq!((&written["bos_token_id"], &written["layer_norm_epsilon"]), (&json!(3), &json!(1e-6)));
        // Another name of the same function stays.
        let written = write(&model, Some(&before)).unwrap();
        assert_eq!(written["activation_function"], json!("gelu_pytorch_tanh"));
        assert_eq!(read(Family::Gpt2, &written).unwrap(), model);
    }

    #[test]
    fn sizes_of_bert_are_read_and_written() {
        let given = json!({ "model_type": "bert", "hidden_size": 32, "num_attention_heads": 4, "layer_norm_eps": 1e-12 });
        let model = read(Family::Bert, &given).unwrap();
        let want = Bert { width: 32, heads: 4, ..Bert::default() };
        assert_eq!(model, Model::Bert(want.clone()));
        let before = json!({ "pad_token_id": 0, "id2label": { "0": "ham", "1": "spam" }, "label2id": { "ham": 0, "spam": 1 } });
        let written = write(&model, Some(&before)).unwrap();
        assert_eq!(read(Family::Bert, &written).unwrap(), model);
        assert_eq!((&written["pad_token_id"], &written["id2label"]["1"]), (&json!(0), &json!("spam")));
        // Names of other classes go.
        let other = Model::Bert(Bert { classes: 3, tags: true, ..want });
        let written = write(&other, Some(&before)).unwrap();
        assert_eq!(written["id2label"].as_object().map(Map::len), Some(3));
        assert_eq!(written["architectures"], json!(["BertForTokenClassification"]));
        let check = |key: &str, value: Value, want: &str| {
            let mut config = given.clone();
            config[key] = value;
            let said = read(Family::Bert, &config).unwrap_err();
            assert!(said.contains(want) && said.contains(key), "{said}");
        };
        check("model_type", json!("roberta"), "\"bert\"");
        check("num_attention_heads", json!(5), "does not divide");
        check("position_embedding_type", json!("relative_key"), "absolute");
        check("hidden_act", json!("mish"), "gelu");
        check("is_decoder", json!(true), "only false");
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let check = |key: &str, value: Value, want: &str| {
            let mut config = json!({ "model_type": "gpt2", "n_embd": 32, "n_head": 4 });
            config[key] = value;
            let said = read(Family::Gpt2, &config).unwrap_err();
            assert!(said.contains(want) && said.contains(key), "{said}");
        };
        check("model_type", json!("llama"), "\"gpt2\"");
        check("model_type", Value::Null, "unknown");
        check("n_head", json!(5), "does not divide");
        check("n_layer", json!(-1), "from 1 to");
        check("n_layer", json!("two"), "from 1 to");
        check("n_inner", json!(64), "4 times");
        check("activation_function", json!("mish"), "gelu_new");
        check("scale_attn_weights", json!(false), "only true");
        check("add_cross_attention", json!(true), "only false");
        check("layer_norm_epsilon", json!(0), "between 0 and 1");
        check("tie_word_embeddings", json!(1), "true or false");
    }
}
