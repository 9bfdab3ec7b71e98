//! Changes to JSON that leave it valid: text that the parser refuses at the first comma tests nothing after it.

use serde_json::{Value, json};

use crate::mutate::shuffle;
use crate::random::Random;

/// Changes something somewhere in `root`; `words` are names and texts of the format.
pub fn change(root: &mut Value, words: &[&[u8]], random: &mut Random) {
    let n = count(root);
    let other = nth(root, random.below(n)).clone();
    let node = nth(root, random.below(n));
    match (random.below(8), &mut *node) {
        (0..3, Value::Array(items)) if !items.is_empty() => match random.one_in(4) {
            true => items.push(other),
            false => shuffle(items, random),
        },
        (0..3, Value::Object(fields)) if !fields.is_empty() => {
            let at = random.below(fields.len());
            let Some(key) = fields.keys().nth(at).cloned() else { return };
            match random.below(3) {
                0 => drop(fields.remove(&key)),
                1 => {
                    let value = fields.remove(&key).unwrap_or_default();
                    fields.insert(word(words, random), value);
                }
                _ => drop(fields.insert(word(words, random), other)),
            }
        }
        (0..5, Value::Number(number)) => {
            let near = number.as_i64().and_then(|n| n.checked_add(random.below(9) as i64 - 4));
            let edges = [
                json!(0),
                json!(1),
                json!(-1),
                json!(u64::MAX),
                json!(i64::MIN),
                json!(1 << 24),
                json!(1e308),
            ];
            *node = if random.one_in(2) { json!(near) } else { random.pick(&edges).clone() };
        }
        (0..5, Value::Bool(flag)) => *flag = !*flag,
        (0..5, Value::String(text)) => match random.below(3) {
            0 => *text = word(words, random),
            1 => text.push_str(&word(words, random)),
            _ => {
                text.pop();
            }
        },
        (5, _) => *node = other,
        _ => {
            let values = [
                json!(null),
                json!(true),
                json!(7),
                json!(-0.5),
                json!(""),
                json!([]),
                json!({}),
                json!([[]]),
            ];
            *node = random.pick(&values).clone();
        }
    }
}

fn word(words: &[&[u8]], random: &mut Random) -> String {
    match words.is_empty() || random.one_in(8) {
        true => random.pick(&["", "\0", "a", "ä", "\u{fffd}\u{10ffff}", "../x", "\"\\"]).to_string(),
        false => {
            let word: &&[u8] = random.pick(words);
            String::from_utf8_lossy(word).into_owned()
        }
    }
}

/// How many values it contains, itself included.
fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(count).sum(),
        Value::Object(fields) => fields.values().map(count).sum(),
        _ => 0,
    }
}

/// The `n`-th value in reading order.
fn nth(value: &mut Value, n: usize) -> &mut Value {
    if n == 0 {
        return value;
    }
    let mut left = n - 1;
    let parts: Vec<&mut Value> = match value {
        Value::Array(items) => items.iter_mut().collect(),
        Value::Object(fields) => fields.values_mut().collect(),
        _ => Vec::new(),
    };
    for part in parts {
        let n = count(part);
        if left < n {
            return nth(part, left);
        }
        left -= n;
    }
    unreachable!("index beyond the {n} values")
}
