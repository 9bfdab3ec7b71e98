//! The label of a sample: the member `.cls`, or a key of the member `.json`.

use serde_json::Value;

use crate::spec::LabelKind;

/// The longest member that is a label.
const BYTES_MAX: usize = 1 << 20;

/// What is read of labels.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LabelWanted {
    /// As what; `None`: samples have no labels, or they are not of interest.
    pub kind: Option<LabelKind>,
    /// The key of the `.json`; `None`: labels are the `.cls`.
    pub key: Option<String>,
}

/// A label that was read.
pub(super) enum ReadLabel {
    /// A class as it is written.
    Word(String),
    /// Numbers, or a 0 or 1 for each label.
    Numbers(Vec<f32>),
}

impl LabelWanted {
    /// The ending of members with labels.
    pub(super) fn ending(&self) -> Option<&'static str> {
        self.kind?;
        Some(if self.key.is_some() { "json" } else { "cls" })
    }

    /// What to do about a sample whose label is missing.
    pub(super) fn missing(&self, sample: &str, ending: &str) -> String {
        match self.key {
            Some(_) => format!("there is no {sample}.{ending}; add it, or leave the sample out"),
            None => format!(
                "there is no {sample}.{ending}; add it, or name a key of {sample}.json with `data.label`, if there is one"
            ),
        }
    }

    /// Reads the content of a label. All samples have as many numbers as those before.
    pub(super) fn read(&self, content: &[u8], before: Option<usize>) -> Result<ReadLabel, String> {
        let kind = self.kind.unwrap_or_default();
        if content.len() > BYTES_MAX {
            return Err(format!("{} bytes, too long for a label", content.len()));
        }
        let values = match &self.key {
            Some(key) => values_of(content, key)?,
            None => {
                let text = std::str::from_utf8(content).map_err(|_| "not a text (UTF-8)".to_string())?.trim();
                match kind {
                    LabelKind::Classes => vec![text.to_string()],
                    LabelKind::Numbers | LabelKind::Labels => text
                        .split([',', ' ', '\t', '\n', '\r'])
                        .filter(|v| !v.is_empty())
                        .map(String::from)
                        .collect(),
                }
            }
        };
        if kind == LabelKind::Classes {
            let [word] = values.as_slice() else {
                return Err(format!(
                    "{} values, and a sample has one class; for numbers set `train.loss = \"mse\"`",
                    values.len()
                ));
            };
            let one_line = !word.is_empty() && !word.contains(char::is_control);
            return match one_line {
                true => Ok(ReadLabel::Word(word.clone())),
                false => Err(format!("{word:?} is not a class; one word or number is needed")),
            };
        }
        if values.is_empty() || before.is_some_and(|n| n != values.len()) {
            let wanted =
                before.map_or("at least one is needed".into(), |n| format!("the samples before have {n}"));
            return Err(format!("{} numbers, and {wanted}", values.len()));
        }
        let number = |text: &String| match (text.parse::<f32>(), kind) {
            (Ok(n), LabelKind::Labels) if n != 0.0 && n != 1.0 => Err(format!("{text} is neither 0 nor 1")),
            (Ok(n), _) if n.is_finite() => Ok(n),
            _ => Err(format!("{text:?} is not a number; for classes set `train.loss = \"cross-entropy\"`")),
        };
        values.iter().map(number).collect::<Result<_, _>>().map(ReadLabel::Numbers)
    }
}

/// What a key of a JSON object holds: one value, or several of an array.
fn values_of(content: &[u8], key: &str) -> Result<Vec<String>, String> {
    let object: Value = serde_json::from_slice(content).map_err(|e| format!("not JSON: {e}"))?;
    let Value::Object(object) = &object else { return Err("not a JSON object".into()) };
    let Some(value) = object.get(key) else {
        let mut keys: Vec<_> = object.keys().take(8).map(String::as_str).collect();
        keys.sort_unstable();
        return Err(format!("has no key {key:?} (`data.label`); it has {}", keys.join(", ")));
    };
    let one = |value: &Value| match value {
        Value::String(text) => Ok(text.clone()),
        Value::Number(number) => Ok(number.to_string()),
        Value::Bool(yes) => Ok(u8::from(*yes).to_string()),
        Value::Null | Value::Array(_) | Value::Object(_) => {
            Err(format!("{key:?} is not a word, a number or an array of numbers"))
        }
    };
    match value {
        Value::Array(values) => values.iter().map(one).collect(),
        other => one(other).map(|value| vec![value]),
    }
}
