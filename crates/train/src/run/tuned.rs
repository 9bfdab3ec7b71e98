//! Whether the parameters that a job names are in its network, and what it begins with.

use polyreme_graph::graph::{Graph, Stored};
use polyreme_graph::{Learning, LowRank, NamePattern};

use super::prepared::Prepared;
use crate::about::about;
use crate::error::TrainError;
use crate::job::{HeadStart, Job, SyncKind, nearest};
use crate::low_rank::Selection;
use crate::lower::training_graph;
use crate::preparation::Preparation;
use crate::pretrained::{Family, ModelFile};
use crate::starting::{StartingWeights, head_of};

/// Checks that every pattern names a parameter that is learnt, and that something is.
pub(super) fn check_tuning(job: &Job, graph: &Graph) -> Result<(), TrainError> {
    let names = |pattern: &NamePattern, p: &Stored| pattern.matches(&p.name);
    let tuning = job.tuning();
    for pattern in &tuning.frozen {
        if !graph.params.iter().any(|p| names(pattern, p)) {
            return Err(unknown("model.freeze", pattern, graph));
        }
    }
    if let Some(low) = &tuning.low_rank {
        check_factors(low, graph)?;
    }
    for pattern in tuning.groups.iter().flat_map(|group| &group.params) {
        let mut named = graph.params.iter().filter(|p| names(pattern, p)).peekable();
        if named.peek().is_none() {
            return Err(unknown("train.groups", pattern, graph));
        }
        if named.all(|p| p.learning.frozen) {
            let hint = "`model.freeze` names all of these; take them out of one of the two".into();
            return Err(TrainError::NoParameter {
                key: "train.groups",
                pattern: pattern.text().into(),
                hint,
            });
        }
    }
    if graph.params.iter().all(|p| p.learning == Learning::FROZEN) {
        return Err(TrainError::AllFrozen);
    }
    for pattern in &tuning.own {
        let mut named = graph.params.iter().filter(|p| names(pattern, p)).peekable();
        if named.peek().is_none() {
            return Err(unknown("parallel.own", pattern, graph));
        }
        if named.all(|p| p.learning.frozen) {
            let hint = "all that are called so are frozen; leave the pattern out".into();
            return Err(TrainError::NoParameter {
                key: "parallel.own",
                pattern: pattern.text().into(),
                hint,
            });
        }
    }
    let common = graph.params.iter().filter(|p| !p.learning.own && !p.learning.frozen).count();
    if job.parallel.fragments > common.max(1) && job.parallel.agrees_by(SyncKind::Local) {
        return Err(TrainError::Mesh(format!(
            "`fragments` of {} for a model of {common} tensors that ranks have in common; choose at most {common}",
            job.parallel.fragments
        )));
    }
    if common == 0 {
        let what =
            "`own` names every parameter that is learnt, so ranks would have nothing to agree on; name fewer";
        return Err(TrainError::Mesh(what.into()));
    }
    Ok(())
}

/// Checks that every pattern of factors names what it should.
fn check_factors(low: &LowRank, graph: &Graph) -> Result<(), TrainError> {
    let layers = || graph.params.iter().filter_map(|p| p.name.strip_suffix(LowRank::DOWN)?.strip_suffix('.'));
    if let Some(pattern) = low.on.iter().find(|pattern| !layers().any(|layer| pattern.matches(layer))) {
        return Err(unknown("model.lora.on", pattern, graph));
    }
    let named = |pattern: &NamePattern| graph.params.iter().any(|p| pattern.matches(&p.name));
    if let Some(pattern) = low.learn.iter().find(|pattern| !named(pattern)) {
        return Err(unknown("model.lora.learn", pattern, graph));
    }
    Ok(())
}

impl Job {
    /// A new head is learnt beside the factors: from here on the job says so by its name. Every graph of a run then agrees on
    /// what is frozen, also where `resume`, `eval` and `predict` know nothing else of it.
    pub(super) fn learn_new_head(&mut self, graph: &Graph) {
        let (HeadStart::New, Some(lora)) = (self.model.head, &mut self.model.lora) else { return };
        let names: Vec<String> = graph.params.iter().map(|p| p.name.clone()).collect();
        let new = head_of(&names)
            .into_iter()
            .filter(|name| !LowRank::is_factor(name) && !lora.learn.contains(name));
        let new: Vec<String> = new.collect();
        lora.learn.extend(new);
    }
}

fn unknown(key: &'static str, pattern: &NamePattern, graph: &Graph) -> TrainError {
    let all = graph.params.iter().map(|p| p.name.as_str());
    let hint = match nearest(pattern.text(), all.clone()) {
        Some(near) => format!("did you mean {near:?}?"),
        None => {
            let mut outermost: Vec<&str> = all.map(|name| name.split('.').next().unwrap_or(name)).collect();
            outermost.dedup();
            format!("its parameters are in {}", outermost.join(", "))
        }
    };
    TrainError::NoParameter { key, pattern: pattern.text().into(), hint }
}

/// How many elements stay as they are.
pub(super) fn frozen_numel(graph: &Graph) -> usize {
    let frozen = graph.params.iter().filter(|p| p.learning.frozen);
    frozen.map(|p| graph.shape(p.value).numel()).sum()
}

impl Prepared {
    /// How the run's model is written, whose samples were prepared so.
    pub(super) fn model_file(&self, preparation: &Preparation) -> ModelFile {
        let model = &self.job.model.model;
        // A network of the program's own is not the job's.
        let family = Family::of(model).filter(|_| self.net.name() == model.name());
        let tensors = match (&self.job.model.lora, self.job.output.merge) {
            (None, _) => Selection::All,
            (Some(_), false) => Selection::Learnt,
            (Some(lora), true) => Selection::Merged { scale: lora.scale() },
        };
        ModelFile { family, tensors, about: about(&self.job, preparation) }
    }

    /// What the run begins with, if that is not random: the file, and which tensors are new.
    pub(super) fn weights_note(&self) -> Result<Option<String>, TrainError> {
        let model = &self.job.model;
        let Some(start) = StartingWeights::of(model) else { return Ok(None) };
        let file = start.path().display();
        if model.head == HeadStart::File {
            return Ok(Some(file.to_string()));
        }
        let graph = training_graph(&self.net, &self.spec, 2, self.learner.loss)?;
        let names: Vec<String> = graph.params.iter().map(|p| p.name.clone()).collect();
        Ok(Some(format!("{file}; new: {}", head_of(&names).join(", "))))
    }
}
