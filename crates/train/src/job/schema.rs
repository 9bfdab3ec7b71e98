//! The keys as a JSON schema (2020-12), for editors that complete and check job files. It says what can be said of one
//! value or one table; what follows from several sections is left to `polyreme train --check`.

use std::ops::Bound;

use serde_json::{Map, Value, json};

use super::outline::{Outline, Row};
use super::read::outlines;
use super::shape::Shape;

/// The JSON schema of job files.
pub fn schema() -> Value {
    let tables = outlines();
    let defs: Map<_, _> = tables.iter().skip(1).map(|o| (o.path.to_string(), table(o))).collect();
    let mut root = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Polyreme job file",
        "$defs": defs,
    });
    if let (Some(root), Value::Object(whole)) = (root.as_object_mut(), table(tables[0])) {
        root.extend(whole);
    }
    root
}

fn table(outline: &Outline) -> Value {
    let mut properties = Map::new();
    for name in outline.names(None) {
        let rows: Vec<_> = outline.rows.iter().filter(|row| row.name == name).collect();
        properties.insert(name.into(), property(&rows));
    }
    let mut rules: Vec<_> = outline.kinds.iter().map(|(kind, _)| of_kind(outline, kind)).collect();
    let rivals = outline.rows.iter().filter_map(|row| row.instead_of.map(|other| [other, row.name]));
    rules.extend(rivals.map(|pair| json!({ "not": { "required": pair } })));
    let is_everywhere =
        |row: &&Row| row.needed && (outline.kinds.is_empty() || row.kinds.len() == outline.kinds.len());
    let mut required: Vec<_> = outline.rows.iter().filter(is_everywhere).map(|row| row.name).collect();
    if !outline.kinds.is_empty() && outline.fallback.is_none() {
        required.push("kind");
    }
    let mut whole = json!({
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": false,
    });
    if !rules.is_empty() {
        whole["allOf"] = rules.into();
    }
    if !outline.short {
        return whole;
    }
    let needs = |kind: &str| outline.rows.iter().any(|row| row.needed && row.kinds.contains(&kind));
    let alone: Vec<_> = outline.kinds.iter().map(|(kind, _)| *kind).filter(|kind| !needs(kind)).collect();
    json!({ "anyOf": [{ "enum": alone }, whole] })
}

/// What holds for a table of one kind.
fn of_kind(outline: &Outline, kind: &str) -> Value {
    let mut condition = json!({ "properties": { "kind": { "const": kind } } });
    // Without a kind, the rules of the one that is then meant hold.
    if outline.fallback.is_none_or(|(fallback, _)| fallback != kind) {
        condition["required"] = json!(["kind"]);
    }
    let rows = || outline.rows.iter().filter(|row| row.kinds.contains(&kind));
    let required: Vec<_> = rows().filter(|row| row.needed).map(|row| row.name).collect();
    // Keys that differ between kinds are accepted in any way until the kind is known.
    let differs = |row: &&Row| outline.rows.iter().filter(|other| other.name == row.name).count() > 1;
    let properties: Map<_, _> =
        rows().filter(differs).map(|row| (row.name.into(), value(&row.shape))).collect();
    let names = json!({ "enum": outline.names(Some(kind)) });
    json!({
        "if": condition,
        "then": { "required": required, "properties": properties, "propertyNames": names },
    })
}

fn property(rows: &[&Row]) -> Value {
    let line = |row: &&Row| {
        let default = if row.needed { "Needed".into() } else { format!("Default: {}", row.default) };
        match rows.len() {
            1 => format!("{}. {default}.", row.words),
            _ => format!("{}: {}. {default}.", row.kinds.join(", "), row.words),
        }
    };
    let shapes: Vec<_> = rows.iter().map(|row| value(&row.shape)).collect();
    let description = rows.iter().map(line).collect::<Vec<_>>().join("\n\n");
    match <[Value; 1]>::try_from(shapes) {
        Ok([Value::Object(mut one)]) => {
            one.insert("description".into(), description.into());
            one.into()
        }
        Ok([other]) => other,
        Err(shapes) => json!({ "anyOf": shapes, "description": description }),
    }
}

fn value(shape: &Shape) -> Value {
    match shape {
        Shape::Flag => json!({ "type": "boolean" }),
        Shape::Whole { least, most } => json!({ "type": "integer", "minimum": least, "maximum": most }),
        Shape::Real(bounds) => {
            let mut number = json!({ "type": "number" });
            match bounds.low {
                Bound::Included(low) => number["minimum"] = low.into(),
                Bound::Excluded(low) => number["exclusiveMinimum"] = low.into(),
                Bound::Unbounded => {}
            }
            match bounds.high {
                Bound::Included(high) => number["maximum"] = high.into(),
                Bound::Excluded(high) => number["exclusiveMaximum"] = high.into(),
                Bound::Unbounded => {}
            }
            number
        }
        Shape::Text => json!({ "type": "string" }),
        Shape::Path => json!({ "type": "string", "minLength": 1 }),
        Shape::Names(names) => json!({ "enum": names.iter().map(|(name, _)| *name).collect::<Vec<_>>() }),
        Shape::List { item, lengths, .. } => match lengths {
            [] => json!({ "type": "array", "items": value(item) }),
            _ => {
                let one = |n: &usize| json!({ "type": "array", "items": value(item), "minItems": n, "maxItems": n });
                json!({ "anyOf": lengths.iter().map(one).collect::<Vec<_>>() })
            }
        },
        Shape::Either(a, b) => json!({ "anyOf": [value(a), value(b)] }),
        Shape::Table(outline) => json!({ "$ref": format!("#/$defs/{}", outline().path) }),
    }
}
