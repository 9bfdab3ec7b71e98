//! What is learnt how: `model.freeze`, `model.head`, `model.map`, `train.groups`.

use polyreme_dtype::DType;
use polyreme_graph::{LearningGroup, LowRank, NamePattern, Tuning};

use super::cursor::Cursor;
use super::declare::{keys, section};
use super::section::Section;
use super::shape::Bounds;
use super::spec::Job;
use super::types::{Type, list, maybe, one_of, single, text, whole, within};

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

/// `model.lora`: low-rank factors beside frozen weights.
#[derive(Clone, PartialEq, Debug)]
pub struct LoraSpec {
    /// The rank of the factors.
    pub rank: usize,
    /// Their product is multiplied by `alpha / rank`.
    pub alpha: f32,
    /// Patterns of the linear layers that get them.
    pub on: Vec<String>,
    /// Patterns of parameters that are learnt, too.
    pub learn: Vec<String>,
}

impl LoraSpec {
    /// What the product of two factors is multiplied by.
    pub fn scale(&self) -> f32 {
        self.alpha / self.rank as f32
    }
}

impl Default for LoraSpec {
    fn default() -> LoraSpec {
        LoraSpec { rank: 8, alpha: 16.0, on: Vec::new(), learn: Vec::new() }
    }
}

section! { LoraSpec => {
    let keys = keys! { LoraSpec;
        /// the rank of the factors
        rank: whole(1..=1 << 12) => |s| Some(&mut s.rank);
        /// their product is multiplied by `alpha / rank`
        alpha: single(Bounds::POSITIVE) => |s| Some(&mut s.alpha);
        /// the linear layers that get factors: paths, with `*` for any characters
        on: patterns() => |s| Some(&mut s.on); needed "write on = [\"*.qkv\"]";
        /// parameters that are learnt beside the factors; a new head is in any case, and all others are frozen
        learn: patterns() => |s| Some(&mut s.learn);
    };
    let such_as = "a table such as { rank = 8, alpha = 16, on = [\"*.qkv\"] }";
    Section::new("model.lora", such_as, |_| LoraSpec::default(), keys)
} }

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

/// What does not go together with low-rank factors.
pub(super) fn check_with(job: &Job, c: &Cursor) {
    let fault = |section: &str, key: &'static str, message: &str, hint: &str| {
        if let Some(c) = c.inside(section) {
            c.fault(key, message, hint);
        }
    };
    if job.model.lora.is_none() {
        if job.output.merge {
            let message = "`output.merge` is about the factors of `model.lora`, and there are none";
            fault("output", "merge", message, "leave it out");
        }
        return;
    }
    if job.train.ema.is_some() {
        let message = "`train.ema` would keep the whole model once more beside the factors of `model.lora`";
        fault("train", "ema", message, "leave `train.ema` out");
    }
    if job.output.dtype != DType::F32 {
        let message = "`output.dtype` rounds weights that `model.lora` keeps as they are";
        fault("output", "dtype", message, "leave it out: f32 is written");
    }
    if job.parallel.elastic.is_some() {
        let message =
            "`parallel.elastic` does not work with `model.lora`, whose frozen weights lie in one folder";
        fault("parallel", "elastic", message, "leave `elastic` out, or train with `model.freeze`");
    }
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
        let low_rank = self.model.lora.as_ref().map(|lora| LowRank {
            rank: lora.rank,
            scale: lora.scale(),
            on: patterns(&lora.on),
            learn: patterns(&lora.learn),
        });
        let groups = self.train.groups.iter().map(group).collect();
        let own = patterns(&self.parallel.own);
        Tuning { frozen: patterns(&self.model.freeze), groups, low_rank, own }
    }
}
