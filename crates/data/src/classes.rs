//! Maps the distinct labels of a set, as they are written, to classes.
//!
//! A column of numbers to be predicted must not become hundreds of classes unseen.
//! So labels are refused that are fractions; integers of which there are more than [`FEW`], if they have gaps as amounts have
//! (fewer than half of those between the least and the largest occur) or have fewer than [`ROWS_A_NUMBER`] rows each on the
//! average; and words of which there are more than [`FEW`], if they have fewer than [`ROWS_A_WORD`] rows each. What is
//! refused is a matter of judgement: options that say that labels are classes end it.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::error::DataError;
use crate::spec::Target;

/// More different labels than this are not classes but numbers to be predicted.
pub(crate) const CLASSES_MAX: usize = 65_536;
/// Integers below this are classes as they are, even if few of them occur; larger ones only if at least half occur.
const SMALL: i64 = 1000;
/// Up to this many distinct labels are taken as classes, whatever they are.
const FEW: usize = 50;
/// With more distinct integers than that, each needs this many rows.
const ROWS_A_NUMBER: usize = 10;
/// With more distinct words than that, each needs this many rows.
const ROWS_A_WORD: usize = 2;

/// Where a label is written.
pub(crate) trait LabelPlace {
    /// An error there.
    fn error(&self, why: &str) -> DataError;
}

/// A distinct label, where it occurs first, and how often.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Distinct<P> {
    pub(crate) text: String,
    pub(crate) place: P,
    pub(crate) rows: usize,
}

/// The classes that these labels make. `column` is the name of the label's column, for errors.
pub(crate) fn number<P: LabelPlace>(
    column: Option<&str>,
    distinct: &[Distinct<P>],
    surely_classes: bool,
) -> Result<Target, DataError> {
    let rows: usize = distinct.iter().map(|d| d.rows).sum();
    let refuse = |at: &Distinct<P>, what: String, numeric: bool, target: Target| {
        let why = refusal(column, (distinct.len(), rows), &what, numeric, &target);
        Err(at.place.error(&why))
    };
    let many = distinct.len() > FEW && !surely_classes;
    let integers: Option<Vec<i64>> = distinct.iter().map(|d| integer(&d.text)).collect();
    if let (Some(integers), Some(first)) = (integers, distinct.first()) {
        let max = integers.iter().copied().max().unwrap_or(0);
        let min = integers.iter().copied().min().unwrap_or(0);
        let gaps = max.saturating_sub(min) >= 2 * integers.len() as i64;
        let as_they_are =
            integers.iter().all(|&i| i >= 0) && (max < SMALL || max < 2 * integers.len() as i64);
        let target = match as_they_are {
            true => Target::Class { classes: max as usize + 1, names: Vec::new() },
            false => named(sorted(integers).iter().map(|i| i.to_string()).collect()),
        };
        if many && (gaps || rows < ROWS_A_NUMBER * distinct.len()) {
            return refuse(first, format!("integers from {min} to {max}"), true, target);
        }
        return Ok(target);
    }
    if distinct.iter().all(|d| d.text.parse::<f64>().is_ok())
        && let Some(fraction) = distinct.iter().find(|d| integer(&d.text).is_none())
    {
        let why = format!(
            "label {} is not a class; for a numeric target set `train.loss = \"mse\"` ({} has {} different values in {rows} \
             rows)",
            fraction.text,
            the_label(column),
            distinct.len()
        );
        return Err(fraction.place.error(&why));
    }
    let target = named(sorted(distinct.iter().map(|d| d.text.clone()).collect()));
    match distinct.first().filter(|_| many && rows < ROWS_A_WORD * distinct.len()) {
        Some(first) => refuse(first, format!("words such as {:?}", first.text), false, target),
        None => Ok(target),
    }
}

/// Why labels are not classes, and what to write instead; `target` is what they would be as classes.
fn refusal(
    column: Option<&str>,
    (n, rows): (usize, usize),
    what: &str,
    numeric: bool,
    target: &Target,
) -> String {
    let classes = match target {
        Target::Class { classes, .. } => {
            format!("; if each value is a class, set `model.classes = {classes}`")
        }
        Target::Tags { .. } | Target::NextId | Target::Numbers { .. } | Target::Labels { .. } => {
            String::new()
        }
    };
    let numeric = if numeric { "; for a numeric target set `train.loss = \"mse\"`" } else { "" };
    format!(
        "{} has {n} different values in {rows} rows, {what}: these do not look like classes{numeric}; name the label's \
         column with `data.label`{classes}",
        the_label(column)
    )
}

/// The error for more labels than there can be classes.
pub(crate) fn too_many(column: Option<&str>) -> String {
    format!(
        "{} has over {CLASSES_MAX} different values, too many for classes; for a numeric target set `train.loss = \"mse\"`; \
         name the label's column with `data.label`",
        the_label(column)
    )
}

fn the_label(column: Option<&str>) -> String {
    column.map_or("the label's column".into(), |name| format!("the label's column {name:?}"))
}

/// The class of each label among classes that are known already.
pub(crate) fn look_up<P: LabelPlace>(
    distinct: &[Distinct<P>],
    classes: usize,
    names: &[String],
) -> Result<Vec<u32>, DataError> {
    let by_name: HashMap<&str, usize> = names.iter().enumerate().map(|(i, n)| (n.as_str(), i)).collect();
    let class_of = |d: &Distinct<P>| {
        let class = if names.is_empty() {
            integer(&d.text).and_then(|i| usize::try_from(i).ok()).filter(|&i| i < classes)
        } else {
            let normal = || by_name.get(integer(&d.text)?.to_string().as_str());
            by_name.get(d.text.as_str()).or_else(normal).copied()
        };
        class.map(|c| c as u32).ok_or_else(|| {
            let known = match names {
                [] => format!("integers below {classes}"),
                names if names.len() <= 10 => names.join(", "),
                names => format!("{}, .. ({} classes)", names[..10].join(", "), names.len()),
            };
            let why = format!("label {:?} is not among those of the training set: {known}", d.text);
            d.place.error(&why)
        })
    };
    distinct.iter().map(class_of).collect()
}

fn named(names: Vec<String>) -> Target {
    Target::Class { classes: names.len(), names }
}

/// The distinct values in order.
fn sorted<T: Ord>(mut values: Vec<T>) -> Vec<T> {
    values.sort();
    values.dedup();
    values
}

/// An integer, even if written as `3.0`, as tools do that store all columns as floats.
fn integer(text: &str) -> Option<i64> {
    text.parse().ok().or_else(|| {
        let number: f64 = text.parse().ok()?;
        (number.fract() == 0.0 && number.abs() < 1e15).then_some(number as i64)
    })
}
