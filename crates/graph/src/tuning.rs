//! How parameters are learnt, where they are not all learnt alike: frozen ones, learning rates by group.
//!
//! It is a property of each parameter ([`Learning`]), set while a model is traced and carried by every rewrite. So a frozen
//! parameter is one that differentiation does not ask about: what it has no gradient for is never computed, has no place in the
//! arena of gradients, no moments, and is in no exchange. Nothing later has to know of it.
//!
//! Names are chosen by [`NamePattern`]s. They say nothing of files: which weights a run begins with is another matter.

use std::ops::Range;

use crate::graph::Graph;
use crate::memory::param_ranges;

/// How a parameter is learnt.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Learning {
    /// Whether it stays as it is.
    pub frozen: bool,
    /// What the step's learning rate is multiplied by.
    pub lr_scale: f64,
    /// The weight decay, if it is another one than the optimizer's.
    pub weight_decay: Option<f32>,
    /// Whether each replica keeps its own, where replicas have weights of their own.
    pub own: bool,
}

impl Learning {
    /// As the optimizer says.
    pub const PLAIN: Learning = Learning { frozen: false, lr_scale: 1.0, weight_decay: None, own: false };

    /// Not at all.
    pub const FROZEN: Learning = Learning { frozen: true, ..Learning::PLAIN };

    /// What a printed update says of it; nothing if it is as the optimizer says.
    pub(crate) fn words(&self) -> String {
        let lr = if self.lr_scale == 1.0 { String::new() } else { format!(", rate x {}", self.lr_scale) };
        let decay = self.weight_decay.map_or(String::new(), |decay| format!(", weight decay {decay}"));
        format!("{lr}{decay}")
    }
}

/// The parts of a range of the parameters' arena whose parameters are learnt alike, in their order.
pub fn learnt_alike(graph: &Graph, range: &Range<usize>) -> Vec<(Range<usize>, Learning)> {
    let mut parts: Vec<(Range<usize>, Learning)> = Vec::new();
    for (p, of_param) in param_ranges(graph) {
        let part = of_param.start.max(range.start)..of_param.end.min(range.end);
        let learning = graph.params[p].learning;
        match parts.last_mut() {
            _ if part.is_empty() => {}
            Some((last, alike)) if *alike == learning => last.end = part.end,
            _ => parts.push((part, learning)),
        }
    }
    parts
}

/// Names of parameters or paths of layers, with `*` for any characters: `layer1`, `blocks.*.qkv`, `*.bias`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NamePattern(String);

impl NamePattern {
    /// A pattern as it is written.
    pub fn new(text: impl Into<String>) -> NamePattern {
        NamePattern(text.into())
    }

    /// As it is written.
    pub fn text(&self) -> &str {
        &self.0
    }

    /// Whether it is the name, or the path of a layer that the parameter or layer with this name is inside of.
    pub fn matches(&self, name: &str) -> bool {
        let ends = name.match_indices('.').map(|(at, _)| at).chain([name.len()]);
        ends.map(|end| &name[..end]).any(|path| is_like(&self.0, path))
    }
}

/// Whether a text is as a pattern says, all of it. After a star the earliest place that fits is as good as any later one, so no
/// choice is ever taken back further than the last star.
fn is_like(pattern: &str, text: &str) -> bool {
    let mut pieces = pattern.split('*');
    let first = pieces.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    let Some(last) = pieces.next_back() else { return rest.is_empty() };
    for piece in pieces {
        let Some(at) = rest.find(piece) else { return false };
        rest = &rest[at + piece.len()..];
    }
    rest.ends_with(last)
}

/// Parameters that are learnt in another way than the rest.
#[derive(Clone, PartialEq, Debug)]
pub struct LearningGroup {
    /// Which ones.
    pub params: Vec<NamePattern>,
    /// What the learning rate is multiplied by.
    pub lr_scale: f64,
    /// The weight decay, if it is another one.
    pub weight_decay: Option<f32>,
}

/// Low-rank factors beside weights that stay as they are (LoRA): a linear layer `x·Wᵀ` gets `scale · (x·Aᵀ)·Bᵀ` beside it, and only
/// `A [rank, inputs]` and `B [outputs, rank]` are learnt.
#[derive(Clone, PartialEq, Debug)]
pub struct LowRank {
    /// The rank of the factors.
    pub rank: usize,
    /// What their product is multiplied by.
    pub scale: f32,
    /// The linear layers that get them.
    pub on: Vec<NamePattern>,
    /// Parameters that are learnt, too.
    pub learn: Vec<NamePattern>,
}

impl LowRank {
    /// What the factor next to the input is called in its layer.
    pub const DOWN: &str = "lora_a";
    /// What the factor next to the output is called in its layer.
    pub const UP: &str = "lora_b";

    /// Whether a parameter of this name is a factor.
    pub fn is_factor(name: &str) -> bool {
        let last = name.rsplit('.').next();
        last == Some(LowRank::DOWN) || last == Some(LowRank::UP)
    }

    fn learns(&self, name: &str) -> bool {
        LowRank::is_factor(name) || self.learn.iter().any(|pattern| pattern.matches(name))
    }
}

/// Which parameters of a model are learnt how. By default all as the optimizer says.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct Tuning {
    /// Parameters that stay as they are.
    pub frozen: Vec<NamePattern>,
    /// The others; the first group that names a parameter counts.
    pub groups: Vec<LearningGroup>,
    /// Factors beside linear layers: then everything else is frozen.
    pub low_rank: Option<LowRank>,
    /// Parameters that each replica keeps for itself, where replicas have weights of their own.
    pub own: Vec<NamePattern>,
}

impl Tuning {
    /// How a parameter is learnt.
    pub fn of(&self, name: &str) -> Learning {
        let frozen = self.frozen.iter().any(|pattern| pattern.matches(name));
        if frozen || self.low_rank.as_ref().is_some_and(|low| !low.learns(name)) {
            return Learning::FROZEN;
        }
        let names = |group: &&LearningGroup| group.params.iter().any(|pattern| pattern.matches(name));
        let own = self.own.iter().any(|pattern| pattern.matches(name));
        let plain = Learning { own, ..Learning::PLAIN };
        self.groups.iter().find(names).map_or(plain, |group| Learning {
            lr_scale: group.lr_scale,
            weight_decay: group.weight_decay,
            ..plain
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_name_parameters_and_layers() {
        let check = |pattern: &str, yes: &[&str], no: &[&str]| {
            let pattern = NamePattern::new(pattern);
            yes.iter().for_each(|name| assert!(pattern.matches(name), "{pattern:?} {name}"));
            no.iter().for_each(|name| assert!(!pattern.matches(name), "{pattern:?} {name}"));
        };
        check("fc.weight", &["fc.weight"], &["fc.bias", "fc.weights", "a.fc.weight"]);
        check("layer1", &["layer1", "layer1.0.conv1.weight"], &["layer10.0.conv1.weight", "bn1.weight"]);
        check("layer1.*", &["layer1.0.conv1.weight"], &["layer10.0.conv1.weight", "layer1"]);
        check("*.bias", &["fc.bias", "blocks.0.qkv.bias"], &["bias", "fc.biased"]);
        check("blocks.*.qkv", &["blocks.3.qkv.weight", "blocks.1.a.qkv"], &["blocks.3.qkv2.weight"]);
        check("*a*b*", &["ab", "xaxbx", "a.c.b"], &["ba", ""]);
        check("*", &["", "x", "x.y"], &[]);
        check("", &[""], &["x"]);
    }

    #[test]
    fn the_first_group_counts_and_freezing_comes_before() {
        let group = |pattern: &str, lr_scale| LearningGroup {
            params: vec![NamePattern::new(pattern)],
            lr_scale,
            weight_decay: Some(0.0),
        };
        let tuning = Tuning {
            frozen: vec![NamePattern::new("a")],
            groups: vec![group("*.weight", 2.0), group("*", 3.0)],
            own: vec![NamePattern::new("a"), NamePattern::new("b.bias")],
            low_rank: None,
        };
        assert_eq!(tuning.of("a.weight"), Learning::FROZEN);
        assert_eq!((tuning.of("b.weight").lr_scale, tuning.of("b.bias").lr_scale), (2.0, 3.0));
        assert_eq!(["a.bias", "b.weight", "b.bias"].map(|name| tuning.of(name).own), [false, false, true]);
        assert_eq!(Tuning::default().of("a.weight"), Learning::PLAIN);
    }

    #[test]
    fn beside_factors_everything_is_frozen() {
        let (on, learn) = (vec![NamePattern::new("*.qkv")], vec![NamePattern::new("head")]);
        let low_rank = Some(LowRank { rank: 2, scale: 1.0, on, learn });
        let tuning = Tuning { low_rank, ..Tuning::default() };
        for (name, frozen) in
            [("a.qkv.weight", true), ("a.qkv.lora_a", false), ("a.qkv.lora_b", false), ("head.bias", false)]
        {
            assert_eq!(tuning.of(name).frozen, frozen, "{name}");
        }
    }
}
