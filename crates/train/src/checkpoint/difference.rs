//! How the tensors of a file differ from those of a model.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::edits::edits;

/// A tensor's name and dims.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct TensorShape {
    /// The name.
    pub name: String,
    /// The dims.
    pub dims: Vec<usize>,
}

/// What the model has and the file has not, and the other way round.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Difference {
    /// Tensors of the model that the file lacks.
    pub missing: Vec<Lacking>,
    /// Tensors of the file that the model does not know.
    pub unexpected: Vec<TensorShape>,
    /// Tensors whose shapes differ.
    pub reshaped: Vec<Reshaped>,
    /// What stands before every name that is missing, in the file: `module.` of a wrapped PyTorch model, say.
    pub prefix: Option<String>,
}

/// A tensor of the model that the file lacks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lacking {
    /// The tensor.
    pub tensor: TensorShape,
    /// The nearest name among those that the file has and the model does not know.
    pub near: Option<String>,
}

/// A tensor whose shape in the file is another than in the model.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reshaped {
    /// Its name.
    pub name: String,
    /// The model's dims.
    pub model: Vec<usize>,
    /// The file's dims.
    pub file: Vec<usize>,
}

/// So many of each kind are printed.
const SHOWN: usize = 5;
/// Longer names get no hint: the distance takes the square of it.
const NAME_MAX: usize = 200;

impl Difference {
    /// What differs; `None` if names and dims agree, in whatever order.
    pub fn between<'a>(
        model: &[TensorShape],
        file: impl IntoIterator<Item = (&'a str, &'a [usize])>,
    ) -> Option<Difference> {
        let mut rest: BTreeMap<&str, &[usize]> = file.into_iter().collect();
        let mut found = Difference::default();
        let mut missing = Vec::new();
        for TensorShape { name, dims } in model {
            match rest.remove(name.as_str()) {
                None => missing.push(TensorShape { name: name.clone(), dims: dims.clone() }),
                Some(file) if file == dims.as_slice() => {}
                Some(file) => {
                    found.reshaped.push(Reshaped {
                        name: name.clone(),
                        model: dims.clone(),
                        file: file.into(),
                    });
                }
            }
        }
        if missing.is_empty() && rest.is_empty() && found.reshaped.is_empty() {
            return None;
        }
        found.prefix = common_prefix(&missing, &rest);
        found.missing = (missing.into_iter().enumerate())
            .map(|(i, tensor)| Lacking {
                near: if i < SHOWN { nearest(&tensor, &rest) } else { None },
                tensor,
            })
            .collect();
        found.unexpected = rest
            .into_iter()
            .map(|(name, dims)| TensorShape { name: name.into(), dims: dims.into() })
            .collect();
        Some(found)
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut between = "";
        let mut part = |f: &mut fmt::Formatter<'_>, what: &str, all: usize, shown: Vec<String>| {
            if all == 0 {
                return Ok(());
            }
            write!(f, "{between}{all} {what}: {}", shown.join(", "))?;
            between = "; ";
            if all > shown.len() { write!(f, " and {} more", all - shown.len()) } else { Ok(()) }
        };
        let missing = self.missing.iter().take(SHOWN).map(|Lacking { tensor, near }| match near {
            Some(near) => format!("{tensor} (perhaps {near})"),
            None => tensor.to_string(),
        });
        let unexpected = self.unexpected.iter().take(SHOWN).map(TensorShape::to_string);
        let reshaped = (self.reshaped.iter().take(SHOWN))
            .map(|r| format!("{} ({:?} in the model, {:?} in the file)", r.name, r.model, r.file));
        part(f, "missing in the file", self.missing.len(), missing.collect())?;
        part(f, "unknown to the model", self.unexpected.len(), unexpected.collect())?;
        part(f, "of another shape", self.reshaped.len(), reshaped.collect())?;
        match &self.prefix {
            Some(prefix) => write!(f, "; the names in the file begin with `{prefix}`: write it without that"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for TensorShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.name, self.dims)
    }
}

/// The `p` for which the file has `p` + name for every missing name.
fn common_prefix(missing: &[TensorShape], rest: &BTreeMap<&str, &[usize]>) -> Option<String> {
    let first = missing.first()?;
    let all: BTreeSet<&str> = rest.keys().copied().collect();
    let prefixes = all.iter().filter_map(|name| name.strip_suffix(first.name.as_str()));
    prefixes
        .filter(|prefix| prefix.ends_with('.'))
        .find(|prefix| missing.iter().all(|m| all.contains(format!("{prefix}{}", m.name).as_str())))
        .map(str::to_string)
}

/// The name nearest to that of `tensor`, if it is near at all. Of equally near ones, one with its dims.
fn nearest(tensor: &TensorShape, rest: &BTreeMap<&str, &[usize]>) -> Option<String> {
    let near = (rest.iter())
        .filter(|(name, _)| name.len() <= NAME_MAX && tensor.name.len() <= NAME_MAX)
        .map(|(name, dims)| {
            (edits(&letters(&tensor.name), &letters(name)), *dims != tensor.dims.as_slice(), *name)
        })
        .min()?;
    let (distance, _, name) = near;
    (distance * 2 <= tensor.name.len().max(name.len())).then(|| name.to_string())
}

fn letters(name: &str) -> Vec<char> {
    name.chars().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shapes(of: &[(&str, &[usize])]) -> Vec<TensorShape> {
        of.iter().map(|(name, dims)| TensorShape { name: name.to_string(), dims: dims.to_vec() }).collect()
    }

    #[test]
    fn a_difference_names_both_sides() {
        type Side<'a> = &'a [(&'a str, &'a [usize])];
        let check = |model: Side<'_>, file: Side<'_>, want: &str| {
            let found = Difference::between(&shapes(model), file.iter().copied());
            assert_eq!(found.map(|d| d.to_string()).unwrap_or_default(), want);
        };
        check(&[], &[], "");
        check(&[("a", &[2]), ("b", &[])], &[("b", &[]), ("a", &[2])], "");
        check(&[("a", &[2])], &[], "1 missing in the file: a [2]");
        check(&[], &[("a", &[2])], "1 unknown to the model: a [2]");
        check(&[("a", &[2])], &[("a", &[3])], "1 of another shape: a ([2] in the model, [3] in the file)");
        check(
            &[("fc1.weight", &[2]), ("far", &[1])],
            &[("fc2.weight", &[2]), ("xx", &[1])],
            "2 missing in the file: fc1.weight [2] (perhaps fc2.weight), far [1]; \
             2 unknown to the model: fc2.weight [2], xx [1]",
        );
        check(
            &[("w", &[1]), ("b", &[1])],
            &[("m.w", &[1]), ("m.b", &[1])],
            "2 missing in the file: w [1], b [1]; 2 unknown to the model: m.b [1], m.w [1]; \
             the names in the file begin with `m.`: write it without that",
        );
        let many: Vec<String> = (0..9).map(|i| format!("layer{i}")).collect();
        let many: Vec<(&str, &[usize])> = many.iter().map(|n| (n.as_str(), &[1][..])).collect();
        check(
            &many,
            &[],
            "9 missing in the file: layer0 [1], layer1 [1], layer2 [1], layer3 [1], layer4 [1] and 4 more",
        );
    }
}
