//! The page of figures of a run (`--metrics`): with the tools of the real Prometheus, and as `polyreme status` shows it.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::binary::{cannot_run, command, folder, json, polyreme};
use crate::elastic::Watched;
use crate::ranks::JOB;

const LIMIT: Duration = Duration::from_secs(60);

/// A run with parameter servers that never ends by itself, and where its page is.
fn run_with_page(folder: &Path) -> (Watched, String) {
    let args = ["train", "job.toml", "--processes", "2", "--transport", "tcp", "--json", "--output", "run"];
    let sets = ["--set", "parallel.sync=ps-async", "--set", "parallel.servers=1"];
    let mut run =
        Watched::start(command(folder, &[&args[..], &sets, &["--metrics", "127.0.0.1:0"]].concat()));
    let at = run.until(|line| line["event"] == "metrics")["at"].as_str().unwrap().to_string();
    (run, at.strip_prefix("http://").unwrap().strip_suffix("/metrics").unwrap().to_string())
}

/// The head and the body of a page.
fn answer(at: &str, path: &str) -> (String, String) {
    let mut server = TcpStream::connect(at).unwrap();
    write!(server, "GET {path} HTTP/1.1\r\nHost: {at}\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    server.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.to_string(), body.to_string())
}

/// The body of a page.
fn get(at: &str, path: &str) -> String {
    let (head, body) = answer(at, path);
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    body
}

/// Asks until what comes is as wanted.
#[track_caller]
fn until<T>(mut ask: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + LIMIT;
    loop {
        if let Some(found) = ask() {
            return found;
        }
        assert!(Instant::now() < end, "it did not come");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn endless() -> String {
    JOB.replace("epochs = 4", "epochs = 1000000")
}

#[test]
fn a_run_shows_its_figures_and_servers() {
    let folder = folder(&endless());
    let (run, at) = run_with_page(folder.path());
    let page = until(|| Some(get(&at, "/metrics")).filter(|page| page.contains("_server_staleness_sum")));
    for part in ["polyreme_ranks 2\n", "polyreme_server_ranges{server=\"0\"}", "polyreme_loss "] {
        assert!(page.contains(part), "{part} is not in\n{page}");
    }
    let at = format!("http://{at}");
    let status = json(folder.path(), &["status", &at, "--json"]).pop().unwrap();
    assert_eq!((status["state"].as_str(), &status["ranks"]), (Some("trains"), &2.into()), "{status}");
    let servers = status["servers"].as_array().unwrap();
    assert!(servers.len() == 1 && servers[0]["version"].as_u64() > Some(0), "{status}");
    let said = String::from_utf8(polyreme(folder.path(), &["status", &at]).stdout).unwrap();
    assert!(said.contains("server 0") && said.contains("clients"), "{said}");
    let summary = run.interrupt();
    assert!(summary["steps"].as_u64() >= servers[0]["version"].as_u64(), "{summary}");
    // The page went with the run.
    assert!(!polyreme(folder.path(), &["status", &at]).status.success());
}

/// Nothing is served to all networks, and a port that is taken is said before work starts.
#[test]
fn an_address_that_cannot_be_is_refused() {
    let folder = folder(&endless());
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    for (addr, why) in [("0.0.0.0:9400", "not all of them"), ("9400", "invalid"), (&taken, "in use")] {
        let out = polyreme(folder.path(), &["train", "job.toml", "--ranks", "1", "--metrics", addr]);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.code() == Some(2) && said.contains(why), "{addr}: {said}");
        assert!(!folder.path().join("runs").join("run").join("job.toml").exists());
    }
}

/// Ends a program that a test started.
struct EndedProgram(Child);

impl Drop for EndedProgram {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// The real Prometheus finds nothing wrong with the page, and scrapes it.
#[test]
fn prometheus_scrapes_a_run() {
    if ["promtool", "prometheus"].iter().any(|tool| Command::new(tool).arg("--version").output().is_err()) {
        return cannot_run("no prometheus on this machine; `apt-get install prometheus` brings it");
    }
    let folder = folder(&endless());
    let (run, at) = run_with_page(folder.path());
    let page = until(|| Some(get(&at, "/metrics")).filter(|page| page.contains("_server_staleness_sum")));
    let mut promtool = Command::new("promtool");
    promtool.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut promtool = promtool.spawn().unwrap();
    promtool.stdin.take().unwrap().write_all(page.as_bytes()).unwrap();
    let said = promtool.wait_with_output().unwrap();
    let words = String::from_utf8_lossy(&[said.stdout, said.stderr].concat()).into_owned();
    assert!(said.status.success() && words.is_empty(), "{words}\n{page}");

    let config = format!(
        "global: {{scrape_interval: 250ms}}\nscrape_configs:\n- job_name: polyreme\n  static_configs:\n  - targets: ['{at}']\n"
    );
    fs::write(folder.path().join("prometheus.yml"), config).unwrap();
    // A port that was free a moment ago.
    let own = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let flags = ["--config.file=prometheus.yml", "--storage.tsdb.path=data", "--log.level=error"];
    let mut prometheus = Command::new("prometheus");
    prometheus.current_dir(folder.path()).args(flags).arg(format!("--web.listen-address={own}"));
    let _ended = EndedProgram(prometheus.spawn().unwrap());
    until(|| TcpStream::connect(&own).ok());
    // It listens before it answers questions.
    until(|| answer(&own, "/-/ready").0.starts_with("HTTP/1.1 200").then_some(()));
    let ask = |query: &str| -> Option<f64> {
        let answer: Value = serde_json::from_str(&get(&own, &format!("/api/v1/query?query={query}"))).ok()?;
        answer["data"]["result"][0]["value"][1].as_str()?.parse().ok()
    };
    let first = until(|| ask("polyreme_steps_total").filter(|steps| *steps > 0.0));
    until(|| ask("polyreme_steps_total").filter(|steps| *steps > first));
    assert_eq!(ask("up"), Some(1.0));
    assert!(ask("polyreme_server_staleness_count").is_some_and(|count| count > 0.0));
    // Buckets that are a histogram have quantiles.
    let median = ask("histogram_quantile(0.5,polyreme_server_staleness_bucket)");
    assert!(median.is_some_and(|median| (0.0..=64.0).contains(&median)), "{median:?}");
    run.interrupt();
}
