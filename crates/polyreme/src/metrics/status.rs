//! The figures of a run as JSON, and from there for people: what `polyreme status http://ADDR:PORT` shows.

use std::fmt::Write as _;
use std::io::{self, Read, Write as _};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use polyreme_collective::servers::STALENESS_BOUNDS;
use serde_json::{Value, json};

use super::figures::{RunFigures, ServerState};

/// How long a run may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest answer: a few lines for each server.
const ANSWER_MAX: u64 = 1 << 24;

/// What is known of a run.
pub(super) fn of(run: &RunFigures) -> Value {
    let last = run.last.as_ref();
    let metrics: serde_json::Map<_, _> = run.metrics.iter().map(|(n, v)| (n.clone(), (*v).into())).collect();
    json!({
        "name": run.name,
        "state": run.phase.name(),
        "ranks": run.ranks,
        "generation": run.generation,
        "step": run.steps.total,
        "steps": last.map(|last| last.steps),
        "steps_per_s": run.steps.per_s,
        "samples": run.samples.total,
        "samples_per_s": run.samples.per_s,
        "loss": run.loss,
        "waiting": last.map(|last| last.waiting),
        "waiting_for_ranks": last.map(|last| last.waiting_for_ranks),
        "sent_bytes": last.map(|last| last.sent_bytes),
        "batches_ready": last.map(|last| last.batches_ready),
        "metrics": metrics,
        "servers": run.servers.iter().enumerate().map(server).collect::<Vec<_>>(),
    })
}

fn server((number, ServerState { counts, applied }): (usize, &ServerState)) -> Value {
    let up_to = STALENESS_BOUNDS.iter().zip(counts.staleness_up_to);
    let up_to: serde_json::Map<_, _> = up_to.map(|(bound, n)| (bound.to_string(), n.into())).collect();
    json!({
        "server": number,
        "ranges": counts.ranges,
        "parameters": counts.params,
        "clients": counts.clients,
        "version": counts.version,
        "applied": counts.staleness.count,
        "applied_per_s": applied.per_s,
        "staleness_mean": counts.staleness.sum as f64 / counts.staleness.count.max(1) as f64,
        "staleness_max": counts.staleness.max,
        "staleness_up_to": up_to,
        "sent_bytes": counts.sent_bytes,
        "queue_bytes": counts.queued_bytes,
    })
}

/// The same in a few lines.
pub(crate) fn lines(status: &Value) -> String {
    let number = |of: &Value, key: &str| of[key].as_f64().unwrap_or(0.0);
    let text = |key: &str| status[key].as_str().unwrap_or_default();
    let mut lines = format!(
        "{}: {}, {} ranks; step {} of {}, {:.1} a second, {:.0} samples a second",
        text("name"),
        text("state"),
        status["ranks"],
        status["step"],
        status["steps"],
        number(status, "steps_per_s"),
        number(status, "samples_per_s"),
    );
    if let Some(loss) = status["loss"].as_f64() {
        // Writing into a string cannot fail.
        let _ = write!(lines, ", loss {loss:.4}");
    }
    lines.push('\n');
    for server in status["servers"].as_array().into_iter().flatten() {
        let _ = writeln!(
            lines,
            "  server {}  {} parameters in {} ranges, {} clients, version {}; {:.1} gradients a second, staleness {:.2} on the \
             average, {} at most; {:.0} KB wait, {:.1} MB sent",
            server["server"],
            server["parameters"],
            server["ranges"],
            server["clients"],
            server["version"],
            number(server, "applied_per_s"),
            number(server, "staleness_mean"),
            server["staleness_max"],
            number(server, "queue_bytes") / 1e3,
            number(server, "sent_bytes") / 1e6,
        );
    }
    lines
}

/// Asks the run whose page is at `host:port`.
pub(crate) fn ask(host_and_port: &str) -> io::Result<Value> {
    let bad = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    let mut addrs = host_and_port.to_socket_addrs()?;
    let addr = addrs.next().ok_or_else(|| bad(format!("{host_and_port} has no address")))?;
    let mut run = TcpStream::connect_timeout(&addr, PATIENCE)?;
    run.set_read_timeout(Some(PATIENCE))?;
    run.set_write_timeout(Some(PATIENCE))?;
    write!(run, "GET /status HTTP/1.1\r\nHost: {host_and_port}\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    run.take(ANSWER_MAX).read_to_string(&mut answer)?;
    let none = || bad("what answers there is not the page of a run".into());
    let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(none)?;
    if !head.starts_with("HTTP/1.1 200") {
        return Err(none());
    }
    serde_json::from_str(body).map_err(|_| none())
}

#[cfg(test)]
mod tests {
    use super::super::text::tests::figures;
    use super::*;

    #[test]
    fn people_and_programs_are_told_of_servers() {
        let status = of(&figures());
        assert_eq!(status["servers"][0]["staleness_up_to"]["16"], 13);
        assert_eq!(status["servers"][0]["clients"], 4);
        let said = lines(&status);
        for part in
            ["step 8 of 90", "loss 0.2500", "server 0  1000 parameters in 2 ranges, 4 clients", "100 at most"]
        {
            assert!(said.contains(part), "{part} is not in {said}");
        }
    }
}
