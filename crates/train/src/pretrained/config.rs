//! `config.json` of a family: the sizes of a network, and how they are written for `transformers`.
//!
//! What would change results and is not implemented here is an error that names it, never ignored. Dropout is the exception: it is
//! a matter of training, so the job says it.

use polyreme_nn::Model;
use polyreme_nn::model::Gpt2;
use serde_json::{Value, json};

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
        _ => return None,
    };
    let mut all = before.filter(|before| before.is_object()).cloned().unwrap_or_else(|| json!({}));
    if let (Some(all), Value::Object(own)) = (all.as_object_mut(), own) {
        for (key, value) in own {
            // Two names of one function, or an absent key that means its default, stay as they were.
            let keeps = match all.get(&key) {
                Some(before) if key == "activation_function" => {
                    before.as_str().and_then(ours) == value.as_str().and_then(ours)
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
