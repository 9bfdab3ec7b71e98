//! `[train]`: how to learn.

use std::ops::Bound;

use polyreme_graph::{Moments, Optimizer};

use super::cursor::{At, Cursor};
use super::keys::{METRICS, OPTIMIZER_KINDS, SCHEDULE_KINDS};
use super::spec::{EarlyStop, Length, OptimizerSpec, TrainSpec};
use super::tree::Value;
use crate::schedule::{Schedule, Shape};

const BATCH_MAX: usize = 1 << 20;
const COUNT_MAX: u64 = 1 << 48;
/// More than 0.
const POSITIVE: (Bound<f64>, Bound<f64>) = (Bound::Excluded(0.0), Bound::Unbounded);

/// Reads the section; what is wrong has been reported, and is as if not said.
pub(super) fn read(c: &Cursor) -> TrainSpec {
    let default = TrainSpec::default();
    let count = |key| c.whole(key, 1..=COUNT_MAX);
    let spec = TrainSpec {
        batch: c.size("batch", 1..=BATCH_MAX).unwrap_or(default.batch),
        length: length(c).unwrap_or(default.length),
        optimizer: optimizer(c).unwrap_or(default.optimizer),
        schedule: schedule(c).unwrap_or(default.schedule),
        clip: c.real("clip", POSITIVE),
        accumulate: c.size("accumulate", 1..=BATCH_MAX).unwrap_or(default.accumulate),
        ema: c.real("ema", (Bound::Excluded(0.0), Bound::Excluded(1.0))),
        label_smoothing: c.real("label_smoothing", 0.0..1.0).unwrap_or(0.0) as f32,
        mixup: c.real("mixup", 0.0..).unwrap_or(default.mixup),
        early_stop: early_stop(c),
        evaluate_every_steps: count("evaluate_every"),
        log_every_steps: count("log_every").unwrap_or(default.log_every_steps),
        seed: c.whole("seed", 0..=u64::MAX).unwrap_or(default.seed),
        memory_mib: c.size("memory_mib", 1..=(1 << 32)),
    };
    if let Some(at) = c.get("precision")
        && let Some(precision) = at.string()
        && precision != "f32"
    {
        at.fault(
            format!("`{}` is {precision:?}; f32 is what there is", at.path),
            "leave it out, or write \"f32\"",
        );
    }
    if !spec.batch.is_multiple_of(spec.accumulate) {
        let key = if c.has("accumulate") { "accumulate" } else { "batch" };
        let message = format!(
            "`train.accumulate` of {} does not divide `train.batch` of {}",
            spec.accumulate, spec.batch
        );
        let near = (1..=spec.accumulate).rev().find(|n| spec.batch.is_multiple_of(*n)).unwrap_or(1);
        c.reading.fault(c.place_of(key), &c.path_of(key), message, format!("{near} would"));
    }
    c.finish();
    spec
}

/// Exactly one of `epochs` and `steps`. An override of one puts the file's other aside.
fn length(c: &Cursor) -> Option<Length> {
    let epochs = c.whole("epochs", 1..=COUNT_MAX).map(Length::Epochs);
    let steps = c.whole("steps", 1..=COUNT_MAX).map(Length::Steps);
    if !(c.has("epochs") && c.has("steps")) {
        return epochs.or(steps);
    }
    match (c.place_of("epochs").is_override(), c.place_of("steps").is_override()) {
        (true, false) => epochs,
        (false, true) => steps,
        _ => {
            let message = "`train.epochs` and `train.steps` are both said";
            c.reading.fault(c.place_of("steps"), &c.path_of("steps"), message, "keep the one that is meant");
            None
        }
    }
}

/// A table with a kind, or the kind alone. The kind is `None` where it is wrong or not said.
fn kinded<'a>(
    at: &At<'a>,
    grammar: &'static str,
    kinds: &[&'static str],
    default: Option<&'static str>,
    needed: &str,
) -> Option<(&'static str, Option<Cursor<'a>>)> {
    if matches!(at.node.value, Value::String(_)) {
        return Some((at.choice(kinds)?, None));
    }
    let c = at.table(grammar, needed)?;
    let kind = match (c.get("kind"), default) {
        (Some(said), _) => said.choice(kinds),
        (None, Some(default)) => Some(default),
        (None, None) => {
            c.require("kind", &format!("known are {}", kinds.join(", ")));
            None
        }
    };
    match kind {
        Some(kind) => Some((kind, Some(c))),
        None => {
            c.finish_kind(None);
            None
        }
    }
}

fn optimizer(c: &Cursor) -> Option<OptimizerSpec> {
    let needed = "an optimizer's name, or a table such as { kind = \"adamw\", lr = 0.001 }";
    let (kind, c) = kinded(&c.get("optimizer")?, "train.optimizer", &OPTIMIZER_KINDS, Some("adamw"), needed)?;
    let mut spec = match kind {
        "sgd" => OptimizerSpec::sgd(),
        "adam" => OptimizerSpec::adam(),
        "adamw" => OptimizerSpec::adamw(),
        _ => OptimizerSpec::lamb(),
    };
    let Some(c) = c else { return Some(spec) };
    if let Some(lr) = c.real("lr", POSITIVE) {
        spec.lr = lr;
    }
    let decay = c.real("weight_decay", 0.0..).map(|d| d as f32);
    match &mut spec.rule {
        Optimizer::Sgd { momentum, nesterov, weight_decay } => {
            *weight_decay = decay.unwrap_or(*weight_decay);
            *momentum = c.real("momentum", 0.0..1.0).map_or(*momentum, |m| m as f32);
            *nesterov = c.flag("nesterov").unwrap_or(*nesterov);
            if *nesterov && *momentum == 0.0 {
                let message = format!("`{}.nesterov` needs a momentum", c.path);
                let hint = "write momentum = 0.9, or leave `nesterov` out";
                c.reading.fault(c.place_of("nesterov"), &c.path_of("nesterov"), message, hint);
            }
        }
        Optimizer::Adam(m) | Optimizer::AdamW(m) | Optimizer::Lamb(m) => {
            m.weight_decay = decay.unwrap_or(m.weight_decay);
            m.eps = c.real("eps", POSITIVE).map_or(m.eps, |e| e as f32);
            betas(&c, m);
        }
    }
    c.finish_kind(Some(kind));
    Some(spec)
}

fn betas(c: &Cursor, moments: &mut Moments) {
    let Some(at) = c.get("betas") else { return };
    let needed = "an array of two numbers";
    let Some(items) = at.items(needed) else { return };
    if items.len() != 2 {
        at.fault(format!("`{}` has {} elements; {needed} is needed", at.path, items.len()), "");
        return;
    }
    if let (Some(beta1), Some(beta2)) = (items[0].real(0.0..1.0), items[1].real(0.0..1.0)) {
        (moments.beta1, moments.beta2) = (beta1, beta2);
    }
}

fn schedule(c: &Cursor) -> Option<Schedule> {
    let needed = "a schedule's name, or a table such as { kind = \"cosine\", warmup = 100 }";
    let (kind, c) = kinded(&c.get("schedule")?, "train.schedule", &SCHEDULE_KINDS, None, needed)?;
    let floor = |c: &Option<Cursor>| c.as_ref().and_then(|c| c.real("floor", 0.0..=1.0)).unwrap_or(0.0);
    let real = |key, least: (Bound<f64>, Bound<f64>), default: f64| {
        c.as_ref().and_then(|c| c.real(key, least)).unwrap_or(default)
    };
    let share = (Bound::Excluded(0.0), Bound::Excluded(1.0));
    let shape = match kind {
        "step" => {
            let every_epochs = c.as_ref().and_then(|c| c.whole("every_epochs", 1..=COUNT_MAX)).unwrap_or(10);
            Shape::Step { every_epochs, factor: real("factor", POSITIVE, 0.1) }
        }
        "exponential" => Shape::Exponential { factor: real("factor", POSITIVE, 0.95) },
        "cosine" => {
            let restarts = c.as_ref().and_then(|c| c.whole("restarts", 0..=COUNT_MAX)).unwrap_or(0);
            Shape::Cosine { floor: floor(&c), restarts }
        }
        "one-cycle" => Shape::OneCycle {
            start_share: real("start_share", share, 0.3),
            div: real("div", POSITIVE, 25.0),
            final_div: real("final_div", POSITIVE, 1e4),
        },
        "linear" => Shape::Linear { floor: floor(&c) },
        _ => Shape::Constant,
    };
    let mut warmup = 0;
    if let Some(c) = &c {
        if kind != "one-cycle" {
            warmup = c.whole("warmup", 0..=COUNT_MAX).unwrap_or(0);
        }
        c.finish_kind(Some(kind));
    }
    Some(Schedule { shape, warmup })
}

fn early_stop(c: &Cursor) -> Option<EarlyStop> {
    let needed = "a table such as { metric = \"val_loss\", patience = 3 }";
    let c = c.get("early_stop")?.table("train.early_stop", needed)?;
    let default = EarlyStop::default();
    let stop = EarlyStop {
        metric: c.choice("metric", &METRICS).map_or(default.metric, String::from),
        patience: c.whole("patience", 1..=COUNT_MAX).unwrap_or(default.patience),
        min_delta: c.real("min_delta", 0.0..).unwrap_or(default.min_delta),
    };
    c.finish();
    Some(stop)
}
