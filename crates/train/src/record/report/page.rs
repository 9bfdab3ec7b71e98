//! The page: head, result, charts, classes, settings and system, in the order in which a person asks for them.

use std::fmt::Write;

use super::Summary;
use super::chart::{Chart, Size};
use super::classes;
use super::curve::Curve;
use crate::metrics::Best;
use crate::record::axis::Unit;
use crate::record::escape::html;
use crate::record::history::History;
use crate::record::wording::{clock, figure, short, thousands};

const STYLE: &str = include_str!("style.css");
const HOVER: &str = include_str!("hover.js");

/// The whole page.
pub(super) fn render(history: &History, summary: &Summary) -> String {
    let title = html(&summary.title);
    let charts: String = charts(history).iter().map(Chart::render).collect();
    let classes = summary
        .confusion
        .as_ref()
        .map(|confusion| classes::render(confusion, &summary.class_names))
        .unwrap_or_default();
    let settings = settings(&summary.settings);
    let system = facts("System", &summary.system);
    let skipped = match history.skipped() {
        0 => String::new(),
        n => format!(" {n} lines of metrics could not be read."),
    };
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{title}</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n{}\n{}<div class=\"charts\">\n\
         {charts}</div>\n<div class=\"columns\">\n{classes}{settings}{system}</div>\n<footer>Written by Polyreme from metrics.jsonl.{skipped}</footer>\n\
         </main>\n<script>\n{HOVER}</script>\n</body>\n</html>\n",
        lead(summary),
        tiles(summary),
    )
}

/// What happened, in a sentence; and what is to be known of it.
fn lead(summary: &Summary) -> String {
    let speed = if summary.samples_per_s > 0.0 {
        format!(", {} samples/s", short(summary.samples_per_s))
    } else {
        String::new()
    };
    let ended = html(&summary.ended);
    let mut out = format!(
        "<p class=\"lead\">{ended} after {} steps in {}{speed}</p>",
        thousands(summary.steps),
        clock(summary.seconds)
    );
    for warning in &summary.warnings {
        let _ = write!(out, "\n<p class=\"warning\">{}</p>", html(warning));
    }
    out
}

fn tiles(summary: &Summary) -> String {
    let tile = |label: &str, value: &str, note: &str| {
        format!(
            "<div class=\"tile\"><span>{}</span><b>{}</b><span>{}</span></div>\n",
            html(label),
            html(value),
            html(note)
        )
    };
    let mut out: String =
        summary.metrics.iter().map(|(name, value)| tile(&words(name), &measured(name, *value), "")).collect();
    if let Some(Best { metric, value: Some(value), step }) = &summary.best {
        let (label, note) = (format!("best {}", words(metric)), format!("at step {}", thousands(*step)));
        out += &tile(&label, &measured(metric, *value), &note);
    }
    if out.is_empty() { out } else { format!("<div class=\"tiles\">\n{out}</div>\n") }
}

/// The charts that the metrics make: one a kind, train, validation and test together.
fn charts(history: &History) -> Vec<Chart<'_>> {
    let steps = steps(history);
    let mut kinds: Vec<(&str, Vec<Curve>)> =
        ["ranks", "loss", "accuracy", "perplexity", "r2", "mae", "f1", "lr", "samples_per_s"]
            .map(|kind| (kind, Vec::new()))
            .into();
    for (name, column) in history.columns() {
        if matches!(name, "epoch" | "seconds" | "generation") {
            continue;
        }
        let (part, kind) = match name.split_once('_') {
            Some((part @ ("train" | "val" | "test"), kind)) => (part, kind),
            _ => (name, name),
        };
        let (part, kind) =
            if kind == "top5" { (format!("{part} top 5"), "accuracy") } else { (part.into(), kind) };
        let mut curve = Curve::new(&part, column);
        if kind == "ranks" {
            curve = curve.stairs(steps.1);
        }
        match kinds.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, curves)) => curves.push(curve),
            None => kinds.push((kind, vec![curve])),
        }
    }
    kinds.retain(|(_, curves)| !curves.is_empty());
    let is_half = |kind: &str| !matches!(kind, "ranks" | "loss");
    let n_half = kinds.iter().filter(|(kind, _)| is_half(kind)).count();
    let mut half = 0;
    kinds
        .into_iter()
        .map(|(kind, mut curves)| {
            curves.sort_by_key(|curve| {
                ["train", "val", "test"].iter().position(|part| curve.name == *part).unwrap_or(3)
            });
            half += usize::from(is_half(kind));
            let size = match kind {
                "ranks" => Size::Strip,
                "loss" => Size::Large,
                // The last one takes the whole row if it would stand alone in it.
                _ if half == n_half && n_half % 2 == 1 => Size::Low,
                _ => Size::Half,
            };
            Chart {
                title: match kind {
                    "ranks" => "Ranks",
                    "loss" => "Loss",
                    "accuracy" => "Accuracy",
                    "perplexity" => "Perplexity",
                    "r2" => "R²",
                    "mae" => "Mean absolute error",
                    "f1" => "F1",
                    "lr" => "Learning rate",
                    "samples_per_s" => "Samples per second",
                    other => other,
                },
                unit: match kind {
                    "accuracy" => Unit::Percent,
                    "samples_per_s" => Unit::Short,
                    _ => Unit::Plain,
                },
                from_zero: matches!(kind, "ranks" | "lr" | "samples_per_s"),
                smooth: matches!(kind, "loss" | "samples_per_s"),
                log: matches!(kind, "loss" | "perplexity"),
                steps,
                size,
                curves,
            }
        })
        .collect()
}

/// The first and the last step of all metrics.
fn steps(history: &History) -> (f64, f64) {
    let steps = || history.columns().flat_map(|(_, column)| column.steps.iter().copied());
    let (first, last) = (steps().min().unwrap_or(0), steps().max().unwrap_or(0));
    // A run whose metrics begin near 0 is shown from there; one whose first part is missing is not.
    (if first < last / 10 { 0.0 } else { first as f64 }, last as f64)
}

/// Settings by section: `train.batch` stands under `train`.
fn settings(settings: &[(String, String)]) -> String {
    let mut sections: Vec<(&str, Vec<(String, String)>)> = Vec::new();
    for (key, value) in settings {
        let (section, key) = key.split_once('.').unwrap_or(("", key));
        match sections.iter_mut().find(|(known, _)| *known == section) {
            Some((_, rows)) => rows.push((key.into(), value.clone())),
            None => sections.push((section, vec![(key.into(), value.clone())])),
        }
    }
    let cards = sections.iter().map(|(section, rows)| match *section {
        "" => facts("Settings", rows),
        section => facts(&format!("Settings: {section}"), rows),
    });
    cards.collect()
}

fn facts(title: &str, rows: &[(String, String)]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let rows: String = rows
        .iter()
        .map(|(key, value)| format!("<tr><td>{}</td><td>{}</td></tr>\n", html(key), html(value)))
        .collect();
    format!(
        "<section class=\"card\"><header><h2>{}</h2></header>\n<table class=\"facts\"><tbody>\n{rows}</tbody></table></section>\n",
        html(title)
    )
}

/// `val_top5` in words.
fn words(metric: &str) -> String {
    metric.replace('_', " ").replace("top5", "top 5")
}

/// A metric's value with its unit.
fn measured(name: &str, value: f64) -> String {
    let share = name.ends_with("accuracy") || name.ends_with("top5");
    if share && value.is_finite() { format!("{:.2}%", value * 100.0) } else { figure(value, 4) }
}
