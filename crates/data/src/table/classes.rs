//! From the different labels of a table to classes.

use std::path::Path;

use super::text::Place;
use crate::error::DataError;
use crate::spec::Target;

/// More different labels than this are no classes but numbers to be predicted.
pub(super) const CLASSES_MAX: usize = 65_536;
/// Integers below this are classes as they are, even if few of them occur; larger ones only if at least half occur.
const SMALL: i64 = 1000;

/// A label that occurs, and where it did first.
#[derive(Clone, Debug)]
pub(super) struct Distinct {
    pub(super) text: String,
    pub(super) place: Place,
}

/// The classes that these labels make, and the class of each.
pub(super) fn number(path: &Path, distinct: &[Distinct]) -> Result<(Target, Vec<u32>), DataError> {
    let integers: Option<Vec<i64>> = distinct.iter().map(|d| integer(&d.text)).collect();
    if let Some(integers) = integers {
        let max = integers.iter().copied().max().unwrap_or(0);
        if integers.iter().all(|&i| i >= 0) && (max < SMALL || max < 2 * integers.len() as i64) {
            let target = Target::Class { classes: max as usize + 1, names: Vec::new() };
            return Ok((target, integers.iter().map(|&i| i as u32).collect()));
        }
        let (sorted, class_of) = sorted(&integers);
        return Ok((named(sorted.iter().map(|i| i.to_string()).collect()), class_of));
    }
    if distinct.iter().all(|d| d.text.parse::<f64>().is_ok())
        && let Some(fraction) = distinct.iter().find(|d| integer(&d.text).is_none())
    {
        let why = format!("label {} is no class; labels are integers or names", fraction.text);
        return Err(fraction.place.error(path, &why));
    }
    let texts: Vec<String> = distinct.iter().map(|d| d.text.clone()).collect();
    let (sorted, class_of) = sorted(&texts);
    Ok((named(sorted), class_of))
}

/// The class of each label among classes that are known already.
pub(super) fn look_up(
    path: &Path,
    distinct: &[Distinct],
    classes: usize,
    names: &[String],
) -> Result<Vec<u32>, DataError> {
    let class_of = |d: &Distinct| {
        let class = if names.is_empty() {
            integer(&d.text).and_then(|i| usize::try_from(i).ok()).filter(|&i| i < classes)
        } else {
            let normal = integer(&d.text).map(|i| i.to_string());
            names.iter().position(|n| *n == d.text || Some(n) == normal.as_ref())
        };
        class.map(|c| c as u32).ok_or_else(|| {
            let known = match names {
                [] => format!("integers below {classes}"),
                names if names.len() <= 10 => names.join(", "),
                names => format!("{}, .. ({} classes)", names[..10].join(", "), names.len()),
            };
            let why = format!("label {:?} is not among those of the training set: {known}", d.text);
            d.place.error(path, &why)
        })
    };
    distinct.iter().map(class_of).collect()
}

fn named(names: Vec<String>) -> Target {
    Target::Class { classes: names.len(), names }
}

/// The different values in order, and the position of each in that order.
fn sorted<T: Ord + Clone>(values: &[T]) -> (Vec<T>, Vec<u32>) {
    let mut sorted = values.to_vec();
    sorted.sort();
    sorted.dedup();
    let class_of = values.iter().map(|v| sorted.partition_point(|s| s < v) as u32).collect();
    (sorted, class_of)
}

/// An integer, also if written as `3.0`, as tools that keep all columns as floats do.
fn integer(text: &str) -> Option<i64> {
    text.parse().ok().or_else(|| {
        let number: f64 = text.parse().ok()?;
        (number.fract() == 0.0 && number.abs() < 1e15).then_some(number as i64)
    })
}
