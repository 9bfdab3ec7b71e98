//! What is learnt how: `model.freeze`, `model.head`, `model.map`, `train.groups`.

use polyreme_graph::{LearningGroup, NamePattern, Tuning};

use super::declare::{keys, section};
use super::section::Section;
use super::shape::Bounds;
use super::spec::Job;
use super::types::{Type, list, maybe, one_of, single, text, within};

/// `model.head`: what the last layer begins with, where there is a file of weights.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub enum HeadStart {
    /// With the file's weights, as the other layers.
    #[default]
    File,
    /// With new ones, of this job's sizes.
    New,
}

/// A rule of `model.map`: what tensors of a file are called here. A `*` stands for any characters, and the stars of `to` for what
/// those of `from` stood for, in their order.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct NameRule {
    /// The name in the file.
    pub from: String,
    /// The name here; empty if the tensor is left out.
    pub to: String,
}

/// One of `train.groups`: parameters with a learning rate or a weight decay of their own.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct GroupSpec {
    /// Patterns of names.
    pub params: Vec<String>,
    /// The base learning rate, if it is another one.
    pub lr: Option<f64>,
    /// The weight decay, if it is another one.
    pub weight_decay: Option<f32>,
}

section! { NameRule => {
    let keys = keys! { NameRule;
        /// the name in the file, with `*` for any characters
        from: text() => |s| Some(&mut s.from); needed "write from = \"encoder.*\"";
        /// the name in the model; each `*` is what the one of `from` stood for; empty for tensors that are left out
        to: text() => |s| Some(&mut s.to); needed "write to = \"*\", or to = \"\" to leave tensors out";
    };
    let such_as = "a table such as { from = \"encoder.*\", to = \"*\" }";
    Section::new("model.map", such_as, |_| NameRule::default(), keys).check(|rule, c| {
        let stars = |text: &str| text.matches('*').count();
        if stars(&rule.to) > stars(&rule.from) {
            let message = format!("`to` of {:?} has more `*` than `from` of {:?}", rule.to, rule.from);
            c.fault("to", message, "each one stands for what one of `from` stood for");
        }
    })
} }

section! { GroupSpec => {
    let keys = keys! { GroupSpec;
        /// names of parameters or paths of layers, with `*` for any characters: `["fc", "*.bias"]`
        params: patterns() => |s| Some(&mut s.params); needed "write params = [\"fc.*\"]";
        /// the base learning rate, which the schedule changes as that of the others
        lr: maybe(within(Bounds::FROM_0)) => |s| Some(&mut s.lr); or "that of `train.optimizer`";
        /// how strongly weights are pulled towards 0
        weight_decay: maybe(single(Bounds::FROM_0)) => |s| Some(&mut s.weight_decay); or "that of `train.optimizer`";
    };
    let such_as = "a table such as { params = [\"fc.*\"], lr = 1e-3 }";
    Section::new("train.groups", such_as, |_| GroupSpec::default(), keys)
} }

/// Patterns of names of parameters.
pub(super) fn patterns() -> Type<Vec<String>> {
    list(text(), &[], "an array of names")
}

/// What the last layer begins with.
pub(super) fn head() -> Type<HeadStart> {
    one_of([
        ("file", HeadStart::File, "with the file's weights, as the other layers"),
        ("new", HeadStart::New, "with new ones, for the classes of this job; the file's are left out"),
    ])
}

impl Job {
    /// Which parameters are learnt how.
    pub fn tuning(&self) -> Tuning {
        let patterns = |texts: &[String]| texts.iter().map(NamePattern::new).collect();
        let optimizer = &self.train.optimizer;
        let group = |group: &GroupSpec| LearningGroup {
            params: patterns(&group.params),
            lr_scale: group.lr.map_or(1.0, |lr| lr / optimizer.lr),
            weight_decay: group.weight_decay,
        };
        Tuning { frozen: patterns(&self.model.freeze), groups: self.train.groups.iter().map(group).collect() }
    }
}
