//! What a run looks like: a progress line on a terminal, plain lines elsewhere, JSON lines for programs.
//!
//! Progress and warnings go to the standard error, results to the standard output, so that a pipe gets results only. Both
//! go through [`output`], so that training never waits for a reader.

use std::fmt::Write as _;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use polyreme_train::event::{Ending, Event, Observer, Outline, StepDone, Summary};
use polyreme_train::record::progress::{Evaluation, Progress, ProgressPace};
use polyreme_train::record::thousands;
use serde_json::json;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::output::{self, fit::fold};
use crate::process;

/// The least time between two redraws of the progress line.
const FRAME: Duration = Duration::from_millis(80);
/// The least time between two lines of a log; epochs always get one.
const LOG: Duration = Duration::from_secs(10);
/// The column of the texts in an outline and in a summary.
const OUTLINE_HANG: usize = 11;
const SUMMARY_HANG: usize = 4;

/// How events are shown.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Style {
    Line,
    Plain,
    Json,
}

/// Shows a run, and asks it to stop on Ctrl-C.
pub(super) struct Screen {
    style: Style,
    stop: Arc<AtomicBool>,
    said_stop: bool,
    shown: Option<Instant>,
    pace: ProgressPace,
    /// A smoothed loss: single values are noisy.
    loss: Option<f64>,
    metrics: Vec<(String, f64)>,
    samples_per_step: usize,
    /// Whether there are several.
    has_ranks: bool,
    /// The summary, which is printed last.
    summary: Option<String>,
}

impl Screen {
    /// For this process's terminal; asks the run to stop when `stop` is set.
    pub(super) fn new(json: bool, stop: Arc<AtomicBool>) -> Screen {
        let style = match (json, output::err().width()) {
            (true, _) => Style::Json,
            (false, Some(_)) => Style::Line,
            (false, None) => Style::Plain,
        };
        Screen {
            style,
            stop,
            said_stop: false,
            shown: None,
            pace: ProgressPace::default(),
            loss: None,
            metrics: Vec::new(),
            samples_per_step: 0,
            has_ranks: false,
            summary: None,
        }
    }

    /// Ends the display: clears the progress line and prints the summary. Waits for a reader, with a timeout.
    pub(super) fn close(self) {
        if self.style == Style::Line {
            output::err().clear();
        }
        if let Some(summary) = self.summary {
            // A launcher forwards the standard output to the terminal that this process draws on.
            output::err().settle();
            output::out().last(&summary);
        }
    }

    /// Prints a line for people.
    fn say(&self, line: &str) {
        output::err().line(&fold(line, output::err().width(), 2));
    }

    fn json(&self, value: &serde_json::Value) {
        output::out().line(&value.to_string());
    }

    fn step(&mut self, done: &StepDone) {
        // A step that was skipped has none.
        if let Some(loss) = done.loss {
            self.loss = Some(self.loss.map_or(loss, |l| l + 0.1 * (loss - l)));
        }
        self.samples_per_step = self.samples_per_step.max(done.samples);
        let wait = if self.style == Style::Line { FRAME } else { LOG };
        if self.shown.is_some_and(|at| at.elapsed() < wait) {
            return;
        }
        if self.shown.replace(Instant::now()).is_none() && self.style != Style::Line {
            self.pace.observe(done.step, done.seconds);
            return;
        }
        self.pace.observe(done.step, done.seconds);
        let progress = self.progress(done, self.loss);
        match self.style {
            Style::Line => output::err().frame(&progress.line()),
            Style::Plain => output::err().line(&progress.plain()),
            Style::Json => {
                let speed = progress.samples_per_s;
                let value = json!({"event": "step", "step": done.step, "steps": done.steps, "epoch": done.epoch,
                    "loss": self.loss, "lr": done.lr, "samples_per_s": speed, "seconds": done.seconds,
                    "waiting": done.waiting, "waiting_for_ranks": done.waiting_for_ranks});
                self.json(&value);
            }
        }
    }

    fn progress(&self, done: &StepDone, loss: Option<f64>) -> Progress<'_> {
        // Before two samples only the mean since the start is known.
        let steps_per_s = self.pace.steps_per_s().unwrap_or(done.step as f64 / done.seconds.max(1e-9));
        let speed = steps_per_s * self.samples_per_step as f64;
        Progress {
            step: done.step,
            steps: done.steps,
            epoch: done.epoch,
            epochs: done.epochs,
            loss,
            lr: done.lr,
            samples_per_s: speed,
            elapsed: done.seconds,
            left: self.pace.left(done.step, done.steps),
            waiting_for_ranks: self.has_ranks.then_some(done.waiting_for_ranks),
            metrics: &self.metrics,
            width: output::err().width().unwrap_or(usize::MAX),
        }
    }

    fn evaluated(&mut self, step: u64, epoch: u64, metrics: &[(String, f64)], best: bool) {
        self.metrics = metrics.iter().filter(|(n, _)| n != "val_loss").cloned().collect();
        self.pace.pause();
        if self.style == Style::Json {
            let values: serde_json::Map<_, _> =
                metrics.iter().map(|(n, v)| (n.clone(), (*v).into())).collect();
            let value =
                json!({"event": "evaluation", "step": step, "epoch": epoch, "best": best, "metrics": values});
            return self.json(&value);
        }
        let evaluation = Evaluation { step, epoch, loss: self.loss, metrics, best };
        output::err().line(&evaluation.line(output::err().width()));
    }

    fn finished(&mut self, summary: &Summary) {
        if self.style == Style::Json {
            let value = serde_json::to_value(summary).unwrap_or_else(|e| json!({"error": e.to_string()}));
            self.summary = Some(format!("{value}\n"));
            return;
        }
        self.summary = Some(fold(&summary_text(summary), output::out().width(), SUMMARY_HANG));
    }
}

impl Observer for Screen {
    fn event(&mut self, event: Event<'_>) {
        if let Event::Started(outline) = event {
            self.has_ranks = outline.ranks > 1;
        }
        match event {
            Event::Started(outline) if self.style == Style::Json => {
                let value = json!({"event": "started", "outline": outline});
                self.json(&value);
            }
            Event::Started(outline) => {
                output::err().text(outline_text(outline, output::err().width()).into_bytes());
            }
            Event::Step(done) => self.step(done),
            Event::Evaluated { step, epoch, metrics, best } => self.evaluated(step, epoch, metrics, best),
            Event::Saving { step, held } if self.style == Style::Json => {
                self.json(&json!({"event": "checkpoint", "step": step, "held_ms": held.as_secs_f64() * 1e3}));
            }
            Event::Saving { .. } => {}
            Event::Membership { generation, ranks, step, why } if self.style == Style::Json => {
                let value = json!({"event": "membership", "generation": generation, "ranks": ranks, "step": step, "why": why});
                self.json(&value);
            }
            Event::Membership { generation: 1, .. } => {}
            Event::Membership { generation, ranks, step, why } => {
                self.has_ranks = ranks > 1;
                self.pace.pause();
                let plural = if ranks == 1 { "rank" } else { "ranks" };
                self.say(&format!(
                    "step {step}: {ranks} {plural} from here on, generation {generation}: {why}"
                ));
            }
            Event::Turned { step, sync } if self.style == Style::Json => {
                self.json(&json!({"event": "turned", "step": step, "sync": sync}));
            }
            Event::Turned { step, sync } => {
                self.pace.pause();
                self.say(&format!("step {step}: `parallel.sync` is \"{sync}\" from here on"));
            }
            Event::Balanced { step, why } if self.style == Style::Json => {
                self.json(&json!({"event": "balanced", "step": step, "why": why}));
            }
            Event::Followed { step, why } if self.style == Style::Json => {
                self.json(&json!({"event": "followed_load", "step": step, "why": why}));
            }
            Event::Balanced { step, why } | Event::Followed { step, why } => {
                self.say(&format!("step {step}: {why}"));
            }
            // Rank 0 has said it; the page of figures shows servers.
            Event::TooSlow | Event::Servers(_) => {}
            Event::Warning(text) if self.style == Style::Json => {
                self.json(&json!({"event": "warning", "message": text}));
            }
            Event::Warning(text) => self.say(&format!("warning: {text}")),
            Event::Finished(summary) => self.finished(summary),
        }
        if self.stop_requested() && !std::mem::replace(&mut self.said_stop, true) && self.style != Style::Json
        {
            self.say("stopping after this step; press Ctrl-C again to stop at once");
        }
    }

    fn stop_requested(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// From now on the first Ctrl-C (or SIGTERM) sets `stop`, and the second ends this process at once. A hangup of the
/// terminal sets `stop` too, however often it comes.
///
/// A rank that a launcher started leaves the second one to the launcher: the terminal signals both.
pub(super) fn catch_interrupts(stop: &Arc<AtomicBool>, launched: bool) -> io::Result<()> {
    for signal in [SIGINT, SIGTERM] {
        if !launched {
            signal_hook::flag::register_conditional_shutdown(signal, 130, stop.clone())?;
        }
        signal_hook::flag::register(signal, stop.clone())?;
    }
    // `nohup` ignores it.
    if !process::ignores(SIGHUP) {
        signal_hook::flag::register(SIGHUP, stop.clone())?;
    }
    Ok(())
}

/// The outline of a run, as a few lines of at most `width` columns.
pub(super) fn outline_text(o: &Outline, width: Option<usize>) -> String {
    let mut sets = format!("{} samples to train", thousands(o.train_samples as u64));
    for (n, what) in [(o.val_samples, "to validate"), (o.test_samples, "to test")] {
        if n > 0 {
            let _ = write!(sets, ", {} {what}", thousands(n as u64));
        }
    }
    let model = match o.val_samples {
        0 => format!("\n  model    of {}; there is no validation set", o.model_of),
        _ => String::new(),
    };
    let precision = match o.precision.as_str() {
        "f32" => String::new(),
        other => format!("\n  numbers  {other}"),
    };
    let from = if o.first_step > 0 { format!(", from step {}", o.first_step) } else { String::new() };
    let threads = |n: usize| if n == 1 { "1 thread".to_string() } else { format!("{n} threads") };
    let seats = match o.ranks {
        1 => threads(o.threads),
        ranks if o.shard_gradients => {
            format!("{ranks} ranks of {}, each with its shard of the gradients", threads(o.threads))
        }
        ranks => format!("{ranks} ranks of {}", threads(o.threads)),
    };
    let mesh = o.mesh.as_ref().map_or_else(String::new, |mesh| format!("\n  mesh     {mesh}"));
    let frozen = match o.frozen_params {
        0 => String::new(),
        n => format!(", {} of them frozen", thousands(n as u64)),
    };
    let weights = o.weights.as_ref().map_or_else(String::new, |words| format!("\n  weights  {words}"));
    let columns: String = o.columns.iter().map(|line| format!("\n  columns  {line}")).collect();
    let text = format!(
        "{}: {}, {} parameters{frozen}{weights}\n  data     {}; {}{columns}\n  training {} steps of {} samples, {} per epoch{from}{model}{precision}\n  machine  {}, \
         {:.0} MiB planned, {:.2} GFLOP a step{mesh}\n  output   {}\n",
        o.name,
        o.model,
        thousands(o.params as u64),
        o.sample,
        sets,
        thousands(o.steps),
        o.batch,
        thousands(o.steps_per_epoch),
        seats,
        o.memory_mib,
        o.step_gflop,
        o.output.display(),
    );
    fold(&text, width, OUTLINE_HANG)
}

/// The summary of a run, as a few lines.
fn summary_text(s: &Summary) -> String {
    let metric = |name: &str| s.metrics.get(name).and_then(serde_json::Value::as_f64);
    let mut text = match s.ending {
        Ending::Finished => format!("done: {} steps in {:.1} s", s.steps, s.seconds),
        Ending::EarlyStop => {
            format!("stopped early: no more improvement after {} steps, {:.1} s", s.steps, s.seconds)
        }
        Ending::Interrupted => format!("interrupted: {} steps are saved", s.steps),
    };
    let _ = write!(text, ", {:.0} samples/s, loss {:.4}", s.samples_per_s, s.final_loss);
    for (name, what) in [
        ("test_accuracy", "test accuracy"),
        ("val_accuracy", "validation accuracy"),
        ("val_perplexity", "perplexity"),
    ] {
        if let Some(value) = metric(name) {
            let shown = if name.ends_with("accuracy") {
                format!("{:.2} %", value * 100.0)
            } else {
                format!("{value:.3}")
            };
            let _ = write!(text, "\n  {what:<20} {shown}");
            break;
        }
    }
    if let Some(ledger) = &s.ledger {
        let _ = write!(text, "\n  samples              {}", ledger.words);
    }
    if s.wire_bytes > 0 {
        let mb = s.wire_bytes as f64 / 1e6;
        let _ = write!(text, "\n  sent between ranks   {mb:.1} MB in steps of training");
    }
    if let (Some(mean), Some(max)) = (s.staleness_mean, s.staleness_max) {
        let _ = write!(text, "\n  age of gradients     {mean:.2} updates on the average, {max} at most");
    }
    if s.ending == Ending::Interrupted {
        let _ = writeln!(text, "\n  to go on: {}", Summary::resume_hint(&s.output));
        return text;
    }
    let _ = writeln!(text, "\n  model                {} (of step {})", s.model.display(), s.model_step);
    let _ = writeln!(text, "  report               {}", s.output.join("report.html").display());
    text
}
