//! The weights that a run begins with: a file of PyTorch's or ours, what its tensors are called here, and which are new.
//!
//! A file must have exactly the model's tensors once names are translated and those of a new head are set aside: one that is
//! missing or left over is more often a mistake than a wish. Where it is a wish, a rule of `model.map` says so.

use std::borrow::Cow;
use std::collections::HashSet;
use std::path::Path;

use polyreme_graph::LowRank;
use polyreme_nn::Model;

use crate::checkpoint::{CheckpointError, TensorShape};
use crate::job::{HeadStart, ModelSpec, NameRule};
use crate::pretrained::folder::WEIGHTS_FILE;
use crate::pretrained::{Family, names};
use crate::weights::{Weight, WeightsFile, match_weights};

/// A file to begin with.
#[derive(Clone, Debug)]
pub struct StartingWeights<'a> {
    path: Cow<'a, Path>,
    rules: &'a [NameRule],
    head: HeadStart,
    /// Whose names the file may have, and whether the model's head is its table of tokens.
    family: Option<(Family, bool)>,
    /// A layer that the file may have and the model does not.
    unused: Option<&'static str>,
}

/// What is taken of such a file.
pub(crate) struct Taken {
    /// In the order of the model, without those that are new.
    pub(crate) weights: Vec<Weight>,
    /// How many batches its batch norms have seen.
    pub(crate) batches: u64,
}

impl<'a> StartingWeights<'a> {
    /// A file with the model's names and all of its tensors.
    pub fn file(path: &'a Path) -> StartingWeights<'a> {
        StartingWeights { path: path.into(), rules: &[], head: HeadStart::File, family: None, unused: None }
    }

    /// Those that a model names, if it does.
    pub fn of(model: &'a ModelSpec) -> Option<StartingWeights<'a>> {
        let of_folder = || model.path.as_ref().map(|folder| folder.join(WEIGHTS_FILE).into());
        let path = model.weights.as_deref().map(Cow::Borrowed).or_else(of_folder)?;
        let tied = matches!(&model.model, Model::Gpt2(m) if m.tied);
        let family = Family::of(&model.model).map(|family| (family, tied));
        let unused = matches!(&model.model, Model::Bert(m) if !m.has_pooler()).then_some("pooler.");
        Some(StartingWeights { path, rules: &model.map, head: model.head, family, unused })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the file for a model with these tensors, of which the first `n_params` are parameters. Numbers that are not finite
    /// are refused here: in training they would be blamed on the learning rate.
    pub(crate) fn read(&self, model: &[TensorShape], n_params: usize) -> Result<Taken, CheckpointError> {
        let path = self.path();
        let mut file = WeightsFile::read(path)?;
        let wrong = |why| CheckpointError::Weights { path: path.into(), why };
        renamed(&mut file, self.rules).map_err(wrong)?;
        if let Some((family, tied)) = self.family {
            names::to_ours(family, tied, &mut file).map_err(wrong)?;
        }
        if let Some(layer) = self.unused {
            file.weights.retain(|w| !w.name.starts_with(layer));
        }
        let names: Vec<String> = model[..n_params].iter().map(|t| t.name.clone()).collect();
        let new = match self.head {
            HeadStart::File => Vec::new(),
            HeadStart::New => head_of(&names),
        };
        let there: HashSet<String> = file.weights.iter().map(|w| w.name.clone()).collect();
        // Factors begin as they are drawn, unless the file is of a model that has them.
        let is_new = |name: &str| {
            new.iter().any(|new| new == name) || LowRank::is_factor(name) && !there.contains(name)
        };
        let wanted: Vec<_> = model.iter().filter(|t| !is_new(&t.name)).cloned().collect();
        file.weights.retain(|w| !is_new(&w.name));
        file.check(wanted.iter().map(|t| t.name.as_str()), path)?;
        let batches = file.batches_tracked();
        let weights = match_weights(&wanted, file.weights, path).map_err(|error| with_hint(error, &names))?;
        Ok(Taken { weights, batches })
    }
}

/// The same error; if only the last layer differs, with what to do about it.
fn with_hint(error: CheckpointError, names: &[String]) -> CheckpointError {
    let CheckpointError::OtherModel { path, difference } = &error else { return error };
    let head = head_of(names);
    let differ = difference.missing.iter().map(|lacking| &lacking.tensor.name);
    let differ = differ.chain(difference.reshaped.iter().map(|reshaped| &reshaped.name));
    if !difference.unexpected.is_empty() || !differ.into_iter().all(|name| head.contains(name)) {
        return error;
    }
    let why = format!("{difference}; for a new last layer set `model.head = \"new\"`");
    CheckpointError::Weights { path: path.clone(), why }
}

/// The parameters of the last layer that has some, by the names of all in the order of their declaration.
pub(crate) fn head_of(names: &[String]) -> Vec<String> {
    let layer = |name: &str| name.rsplit_once('.').map(|(layer, _)| layer.to_string());
    let Some(last) = names.last() else { return Vec::new() };
    let of_last = |name: &&String| *name == last || (layer(name).is_some() && layer(name) == layer(last));
    names.iter().filter(of_last).cloned().collect()
}

/// Gives tensors the names that the first rule which fits says, and drops those that it leaves out.
fn renamed(file: &mut WeightsFile, rules: &[NameRule]) -> Result<(), String> {
    if rules.is_empty() {
        return Ok(());
    }
    let name = |old: &str| rules.iter().find_map(|rule| translated(rule, old)).unwrap_or_else(|| old.into());
    for rule in rules {
        let names = file.weights.iter().map(|w| &w.name).chain(file.integers.iter().map(|t| &t.name));
        if names.clone().all(|name| translated(rule, name).is_none()) {
            let some: Vec<&str> = names.take(3).map(String::as_str).collect();
            return Err(format!(
                "no tensor is called {:?}, as a rule of `model.map` says; there are {}",
                rule.from,
                some.join(", ")
            ));
        }
    }
    file.weights.iter_mut().for_each(|w| w.name = name(&w.name));
    file.weights.retain(|w| !w.name.is_empty());
    file.integers.iter_mut().for_each(|t| t.name = name(&t.name));
    file.integers.retain(|t| !t.name.is_empty());
    let mut names: Vec<&str> = file.weights.iter().map(|w| w.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(format!("by the rules of `model.map` two tensors would be called {}", pair[0])),
        None => Ok(()),
    }
}

/// What a rule makes of a name; nothing if it is not of that form.
fn translated(rule: &NameRule, name: &str) -> Option<String> {
    Some(filled_in(&rule.to, &stars(&rule.from, name)?))
}

/// A pattern with what its stars stand for.
pub(crate) fn filled_in(pattern: &str, stood_for: &[&str]) -> String {
    let mut pieces = pattern.split('*');
    let mut text = pieces.next().unwrap_or_default().to_string();
    for (piece, part) in pieces.zip(stood_for) {
        text.push_str(part);
        text.push_str(piece);
    }
    text
}

/// What the stars of a pattern stand for in a text: each for as little as can be, the last one for the rest.
pub(crate) fn stars<'t>(pattern: &str, text: &'t str) -> Option<Vec<&'t str>> {
    let (first, rest) = match pattern.split_once('*') {
        None => return (pattern == text).then(Vec::new),
        Some(split) => split,
    };
    let text = text.strip_prefix(first)?;
    // Ends of what this star stands for, the nearest first.
    let ends = text.char_indices().map(|(at, _)| at).chain([text.len()]);
    ends.into_iter().find_map(|end| {
        let more = stars(rest, &text[end..])?;
        Some([&text[..end]].into_iter().chain(more).collect())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_translate_names() {
        let check = |from: &str, to: &str, name: &str, want: Option<&str>| {
            let rule = NameRule { from: from.into(), to: to.into() };
            assert_eq!(translated(&rule, name).as_deref(), want, "{from} {to} {name}");
        };
        check("encoder.*", "*", "encoder.fc.weight", Some("fc.weight"));
        check("encoder.*", "*", "decoder.fc.weight", None);
        check("h.*.attn.*", "blocks.*.*", "h.10.attn.qkv.bias", Some("blocks.10.qkv.bias"));
        check("*.attn.bias", "", "h.3.attn.bias", Some(""));
        check("*.attn.bias", "", "h.3.attn.bias2", None);
        check("a", "b", "a", Some("b"));
        check("*é*", "*-*", "xéy", Some("x-y"));
    }

    #[test]
    fn the_head_is_the_last_layer_with_parameters() {
        let head = |names: &[&str]| head_of(&names.iter().map(|n| n.to_string()).collect::<Vec<_>>());
        assert_eq!(head(&["a.weight", "fc.weight", "fc.bias"]), ["fc.weight", "fc.bias"]);
        assert_eq!(head(&["fc.weight", "layers.0.fc.weight"]), ["layers.0.fc.weight"]);
        assert_eq!(head(&["w1", "w2"]), ["w2"]);
        assert!(head(&[]).is_empty());
    }
}
