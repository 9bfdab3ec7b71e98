//! Figures of a run in Prometheus' text format, version 0.0.4.

use std::fmt::{Display, Write};

use polyreme_collective::servers::STALENESS_BOUNDS;

use super::figures::{RunFigures, ServerState};

/// The type of a page, for its head.
pub(crate) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A page that is being written.
struct Page(String);

impl Page {
    /// A metric with its lines: labels and values.
    fn metric<L: Display, V: Display>(
        &mut self,
        (kind, name, help): (&str, &str, &str),
        lines: impl IntoIterator<Item = (L, V)>,
    ) {
        // Writing into a string cannot fail.
        let _ = writeln!(self.0, "# HELP polyreme_{name} {help}\n# TYPE polyreme_{name} {kind}");
        for (labels, value) in lines {
            let _ = writeln!(self.0, "polyreme_{name}{labels} {value}");
        }
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl Display) {
        self.metric(("gauge", name, help), [("", value)]);
    }

    fn counter(&mut self, name: &str, help: &str, value: impl Display) {
        self.metric(("counter", name, help), [("", value)]);
    }
}

/// A label's value between its quotes.
fn quoted(text: &str) -> String {
    text.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}

/// The page.
pub(crate) fn page(run: &RunFigures) -> String {
    let mut page = Page(String::with_capacity(4096));
    let labels = format!("{{job_name=\"{}\",version=\"{}\"}}", quoted(&run.name), env!("CARGO_PKG_VERSION"));
    page.metric(("gauge", "run_info", "The run, always 1."), [(labels, 1)]);
    page.gauge("training", "Whether the run trains: 0 while it prepares and when it is over.", {
        u8::from(run.phase.name() == "trains")
    });
    page.gauge("ranks", "Ranks that share the training.", run.ranks);
    page.gauge("generation", "The number of this group of ranks, in an elastic run.", run.generation);
    page.counter("steps_total", "Steps done, those before a resumption included.", run.steps.total);
    page.gauge("steps_per_second", "Steps per second, over the last second or more.", run.steps.per_s);
    page.counter("samples_total", "Samples trained on since this process began.", run.samples.total);
    page.gauge("samples_per_second", "Samples per second, over the last second or more.", run.samples.per_s);
    if let Some(loss) = run.loss {
        page.gauge("loss", "The training loss of the last step.", loss);
    }
    if let Some(last) = &run.last {
        page.gauge("steps_planned", "Steps of the whole run.", last.steps);
        page.gauge("epoch", "The epoch that the run is in, from 1.", last.epoch);
        page.gauge("learning_rate", "The learning rate of the last step.", last.lr);
        page.counter(
            "seconds_total",
            "Seconds of training, those before a resumption included.",
            last.seconds,
        );
        page.gauge("data_wait_ratio", "The share of the time spent waiting for data.", last.waiting);
        let help = "The share of the time that ranks spent waiting for each other.";
        page.gauge("rank_wait_ratio", help, last.waiting_for_ranks);
        let help = "Bytes that a rank has put on the wire in steps of training.";
        page.metric(("counter", "sent_bytes_total", help), [("{rank=\"0\"}", last.sent_bytes)]);
        let help = "Batches that were read ahead, and wait to be trained on.";
        page.metric(("gauge", "batches_ready", help), [("{rank=\"0\"}", last.batches_ready)]);
    }
    let metrics = run.metrics.iter().map(|(name, value)| (format!("{{metric=\"{}\"}}", quoted(name)), value));
    page.metric(("gauge", "evaluation", "What the last evaluation gave."), metrics);
    page.counter("checkpoints_total", "Checkpoints that were handed to the writer.", run.checkpoints);
    let help = "Seconds that training was held for checkpoints.";
    page.counter("checkpoint_held_seconds_total", help, run.held.as_secs_f64());
    page.counter("warnings_total", "Warnings.", run.warnings);
    if !run.servers.is_empty() {
        servers(&mut page, &run.servers);
    }
    page.0
}

/// The figures of parameter servers.
fn servers(page: &mut Page, servers: &[ServerState]) {
    let mut of_each = |kind: &str, name: &str, help: &str, value: fn(&ServerState) -> f64| {
        let lines = servers.iter().enumerate().map(|(k, s)| (format!("{{server=\"{k}\"}}"), value(s)));
        page.metric((kind, &format!("server_{name}"), help), lines);
    };
    of_each("gauge", "ranges", "Ranges of the parameters at a server.", |s| s.counts.ranges as f64);
    of_each("gauge", "parameters", "Parameters at a server.", |s| s.counts.params as f64);
    of_each("gauge", "clients", "Workers that have a session with a server.", |s| s.counts.clients as f64);
    let help = "Steps that are applied to all ranges of a server.";
    of_each("gauge", "version", help, |s| s.counts.version as f64);
    let help = "Gradients per second that a server applied to its ranges.";
    of_each("gauge", "applied_per_second", help, |s| s.applied.per_s);
    let help = "The most updates between the weights of a gradient and the update with it.";
    of_each("gauge", "staleness_max", help, |s| s.counts.staleness.max as f64);
    let help = "Bytes that a server has put on the wire.";
    of_each("counter", "sent_bytes_total", help, |s| s.counts.sent_bytes as f64);
    let help = "Bytes of letters that have come to a server and wait.";
    of_each("gauge", "queue_bytes", help, |s| s.counts.queued_bytes as f64);
    let help =
        "Updates between the weights of a gradient and the update with it, of gradients applied to a range.";
    page.metric::<&str, u64>(("histogram", "server_staleness", help), []);
    for (k, ServerState { counts, .. }) in servers.iter().enumerate() {
        let mut line = |suffix: &str, le: &str, value: u64| {
            let _ = writeln!(page.0, "polyreme_server_staleness_{suffix}{{server=\"{k}\"{le}}} {value}");
        };
        for (bound, count) in STALENESS_BOUNDS.iter().zip(counts.staleness_up_to) {
            line("bucket", &format!(",le=\"{bound}\""), count);
        }
        line("bucket", ",le=\"+Inf\"", counts.staleness.count);
        line("sum", "", counts.staleness.sum);
        line("count", "", counts.staleness.count);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::{Duration, Instant};

    use polyreme_collective::servers::{ServerCounts, Staleness};
    use polyreme_train::event::{Event, StepDone};

    use super::*;

    /// A run with a server and an awkward name.
    pub(crate) fn figures() -> RunFigures {
        let mut run = RunFigures { name: "a \"b\"\\\n".into(), ..RunFigures::default() };
        let done = StepDone {
            step: 7,
            steps: 90,
            epoch: 2,
            epochs: 9,
            loss: Some(0.25),
            lr: 1e-3,
            samples: 64,
            own_samples: 32,
            own_busy: Duration::ZERO,
            seconds: 1.5,
            waiting: 0.0,
            waiting_for_ranks: 0.125,
            sent_bytes: 1 << 20,
            batches_ready: 3,
        };
        let counts = ServerCounts {
            ranges: 2,
            params: 1000,
            clients: 4,
            version: 7,
            staleness: Staleness { sum: 9, count: 14, max: 100 },
            staleness_up_to: [8, 9, 10, 11, 12, 13, 13, 13],
            sent_bytes: 4096,
            queued_bytes: 12,
        };
        let now = Instant::now();
        run.note(now, &Event::Step(&done));
        run.note(now, &Event::Step(&StepDone { step: 8, loss: None, ..done }));
        run.note(now, &Event::Servers(&[counts, ServerCounts::default()]));
        run.note(
            now,
            &Event::Evaluated { step: 8, epoch: 2, metrics: &[("val_loss".into(), 0.5)], best: true },
        );
        run.note(now, &Event::Saving { step: 8, held: Duration::from_millis(250) });
        run
    }

    #[test]
    fn a_page_has_every_metric_once_and_names_its_lines() {
        let page = page(&figures());
        for line in [
            r#"polyreme_run_info{job_name="a \"b\"\\\n",version=""#,
            "polyreme_steps_total 8\n",
            "polyreme_samples_total 128\n",
            "polyreme_loss 0.25\n",
            "polyreme_sent_bytes_total{rank=\"0\"} 1048576\n",
            "polyreme_evaluation{metric=\"val_loss\"} 0.5\n",
            "polyreme_checkpoint_held_seconds_total 0.25\n",
            "polyreme_server_clients{server=\"0\"} 4\n",
            "polyreme_server_staleness_bucket{server=\"0\",le=\"2\"} 10\n",
            "polyreme_server_staleness_bucket{server=\"0\",le=\"+Inf\"} 14\n",
            "polyreme_server_staleness_sum{server=\"0\"} 9\n",
            "polyreme_server_staleness_count{server=\"1\"} 0\n",
        ] {
            assert!(page.contains(line), "{line} is not in\n{page}");
        }
        let types: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
        let mut names: Vec<&str> = types.iter().filter_map(|line| line.split(' ').next()).collect();
        names.sort_unstable();
        let n = names.len();
        names.dedup();
        assert_eq!(names.len(), n, "each is declared once");
    }
}
