//! How the binary behaves as a Unix program: readers that do not read, go away or fail; Ctrl-Z, a terminal that is closed; errors for
//! programs; narrow terminals.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use polyreme::train::checkpoint;
use rustix::process::Signal;
use serde_json::Value;

use crate::binary::{command, folder, polyreme};
use crate::ranks::{JOB, end, endless, living, pids, send, start, wait_for_step};

/// How long anything may take that happens at all.
const LONG: Duration = Duration::from_secs(90);

/// Many epochs of one step, and so more lines than a pipe and a terminal hold.
const EPOCHS: usize = 3000;

fn talkative() -> String {
    let job = JOB.replace("epochs = 4", &format!("epochs = {EPOCHS}"));
    let job = job.replace("samples = 600", "samples = 60").replace("validation = 0.1", "validation = 0.2");
    job.replace("every_steps = 10\nbest = \"val_accuracy\"", "every_steps = 1000000")
}

/// The command in a terminal of this many columns. What it shows comes from the child's standard output, and what is
/// typed goes to its standard input.
fn terminal(folder: &Path, columns: usize, line: &str) -> Guarded {
    let binary = env!("CARGO_BIN_EXE_polyreme");
    let script = format!("stty cols {columns} rows 25; {}", line.replace("polyreme", binary));
    let mut command = Command::new("script");
    command.args(["-qefc", &script, "/dev/null"]).current_dir(folder).env("SHELL", "/bin/bash");
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
    Guarded(Some(child.expect("`script`, which `apt-get install bsdutils` brings")))
}

/// A child that does not outlive a test that fails.
struct Guarded(Option<Child>);

impl Guarded {
    fn get(&mut self) -> &mut Child {
        self.0.as_mut().unwrap()
    }

    /// Reads what it says to the end.
    fn read(mut self) -> Output {
        self.0.take().unwrap().wait_with_output().unwrap()
    }

    /// Waits for its end without reading.
    fn end(mut self) -> Output {
        end(self.0.take().unwrap(), LONG)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            drop(child.kill());
            drop(child.wait());
        }
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Waits for a condition.
#[track_caller]
fn wait(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < until, "{what}: not within {LONG:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Lines of `metrics.jsonl` that have an evaluation.
fn evaluations(run: &Path) -> usize {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    text.lines().filter(|l| l.contains("val_loss")).count()
}

/// Nothing is read from any stream until the runs have ended.
#[test]
fn training_goes_on_to_its_end_while_nobody_reads_what_it_says() {
    let folder = folder(&talkative());
    let piped = |name: &str, flags: &[&str], out: Stdio, err: Stdio| {
        let args = [&["train", "job.toml", "--output", name][..], flags].concat();
        Guarded(Some(command(folder.path(), &args).stdout(out).stderr(err).spawn().unwrap()))
    };
    let held = |name: &str, flags: &str| {
        terminal(folder.path(), 80, &format!("exec polyreme train job.toml --output {name} {flags}"))
    };
    let mut runs = [
        ("json", piped("json", &["--json", "--ranks", "1"], Stdio::piped(), Stdio::null())),
        (
            "json_of_ranks",
            piped("json_of_ranks", &["--json", "--processes", "2"], Stdio::piped(), Stdio::null()),
        ),
        ("plain", piped("plain", &["--ranks", "1"], Stdio::null(), Stdio::piped())),
        ("terminal", held("terminal", "--ranks 1")),
        ("terminal_of_ranks", held("terminal_of_ranks", "--processes 2")),
    ];
    for (name, child) in &mut runs {
        let run = folder.path().join(*name);
        // The report is the last that a run writes.
        wait(name, || run.join("report.html").exists());
        assert_eq!(evaluations(&run), EPOCHS, "{name}");
        if !name.starts_with("terminal") {
            wait(name, || child.get().try_wait().unwrap().is_some());
        }
    }
    // What was written before the reader stopped is whole lines, and those of a terminal come once it reads again.
    for (name, child) in runs {
        let out = child.read();
        assert_eq!(out.status.code(), Some(0), "{name}");
        let said = text(if name == "plain" { &out.stderr } else { &out.stdout });
        assert!(said.len() > 10_000, "{name}: {} bytes", said.len());
        if name.starts_with("json") {
            assert!(said.lines().all(|l| serde_json::from_str::<Value>(l).is_ok()), "{name}");
        }
    }
}

#[test]
fn a_reader_that_comes_back_misses_nothing_that_was_kept() {
    let folder = folder(&talkative());
    let args = ["train", "job.toml", "--json", "--processes", "2", "--output", "run"];
    let child = command(folder.path(), &args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
    let child = Guarded(Some(child.unwrap()));
    let run = folder.path().join("run");
    wait("half of it", || run.join("metrics.jsonl").exists() && evaluations(&run) > EPOCHS / 2);
    let out = child.read();
    assert!(out.status.success());
    let said = text(&out.stdout);
    let lines: Vec<Value> = said.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(
        lines.iter().filter(|l| l["metrics"]["val_loss"].is_number() && l["event"] == "evaluation").count(),
        EPOCHS
    );
    assert_eq!(lines.last().unwrap()["ending"], "finished");
}

#[test]
fn commands_whose_reader_has_gone_end_quietly() {
    let folder = folder(JOB);
    assert!(polyreme(folder.path(), &["train", "job.toml", "--output", "run"]).status.success());
    let headless = |args: &[&str]| {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let out = command(folder.path(), args).stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
        end(out, LONG)
    };
    for args in [
        &["inspect", "run"][..],
        &["inspect", "run", "--json"],
        &["inspect", "job.toml"],
        &["inspect", "run", "--graph", "text"],
        &["train", "job.toml", "--check"],
        &["train", "job.toml", "--check", "--json"],
        &["eval", "run"],
        &["eval", "run", "--json"],
        &["data", "list"],
        &["data", "list", "--json"],
        &["bench", "kernels", "matmul grad_weight", "--threads", "1"],
        &["bench", "step", "--job", "mlp", "--steps", "1"],
        &["doctor"],
        &["--help"],
    ] {
        let out = headless(args);
        assert_eq!((out.status.signal(), text(&out.stderr).as_str()), (Some(13), ""), "{args:?}");
    }
    // Training is worth more than its reader.
    for more in [&["--json"][..], &["--processes", "2", "--json"], &[]] {
        let out = headless(&[&["train", "job.toml", "--overwrite", "--output", "run"], more].concat());
        assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
        assert!(folder.path().join("run/model.safetensors").exists());
    }
    // The same for the reader of errors.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let out = command(folder.path(), &["train", "none.toml"]).stderr(writer).output().unwrap();
    assert_eq!(out.status.code(), Some(2));
}

/// Whether a process is stopped.
fn is_stopped(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit(')').next().unwrap().trim_start().starts_with('T')
}

fn parent(pid: i32) -> i32 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit(')').next().unwrap().split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn ctrl_z_stops_all_ranks_and_fg_goes_on_with_them() {
    let folder = folder(&endless());
    let (run, errors) = (folder.path().join("run"), folder.path().join("errors"));
    let mut shell = terminal(folder.path(), 80, "exec bash --norc --noprofile -i");
    let mut keys = shell.get().stdin.take().unwrap();
    // What the terminal shows does not matter, but it has to be read.
    let mut screen = shell.get().stdout.take().unwrap();
    let shown = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        drop(screen.read_to_end(&mut bytes));
        text(&bytes)
    });
    let binary = env!("CARGO_BIN_EXE_polyreme");
    writeln!(keys, "{binary} train job.toml --processes 2 --output run 2>errors; echo ended with $?")
        .unwrap();
    let mut all = pids(&errors, 2, Instant::now() + LONG);
    wait_for_step(&run, 25, Instant::now() + LONG);
    all.push(parent(all[0]));
    keys.write_all(b"\x1a").unwrap();
    wait("all are stopped", || all.iter().all(|&pid| is_stopped(pid)));
    let before = steps(&run);
    keys.write_all(b"fg\n").unwrap();
    wait("all go on", || !all.iter().any(|&pid| is_stopped(pid)));
    wait("steps go on", || steps(&run) > before + 25);
    // The terminal says it to all of them, and the launcher says it again; that is no second Ctrl-C.
    keys.write_all(b"\x03").unwrap();
    wait("all end", || living(&all).is_empty());
    keys.write_all(b"exit\n").unwrap();
    drop(keys);
    shell.end();
    let shown = shown.join().unwrap();
    assert!(shown.contains("steps are saved"), "{shown}\n{}", fs::read_to_string(&errors).unwrap());
    assert!(checkpoint::latest_whole(&run).unwrap().0.manifest.step >= 50);
}

/// The step of the newest line of metrics.
fn steps(run: &Path) -> u64 {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let step = |l: &str| serde_json::from_str::<Value>(l).ok()?["step"].as_u64();
    text.lines().filter_map(step).max().unwrap_or(0)
}

#[test]
fn a_hangup_saves_and_ends_and_nohup_is_respected() {
    let folder = folder(&endless());
    for (name, flags) in [("one", ["--ranks", "1"]), ("two", ["--processes", "2"])] {
        let (run, errors) = (folder.path().join(name), folder.path().join("errors"));
        let args = [&["train", "job.toml", "--output", name][..], &flags].concat();
        let mut child = Guarded(Some(start(command(folder.path(), &args), &errors)));
        wait_for_step(&run, 25, Instant::now() + LONG);
        // The system and the shell both send it.
        send(child.get().id() as i32, Signal::HUP);
        send(child.get().id() as i32, Signal::HUP);
        let out = child.end();
        assert_eq!(out.status.code(), Some(130), "{name}: {}", fs::read_to_string(&errors).unwrap());
        assert!(text(&out.stdout).contains("steps are saved"), "{name}");
    }
    let mut nohup = Command::new("sh");
    let line = format!(
        "trap '' HUP; exec {} train job.toml --output nohup --processes 2",
        env!("CARGO_BIN_EXE_polyreme")
    );
    nohup.args(["-c", &line]).current_dir(folder.path());
    let (run, errors) = (folder.path().join("nohup"), folder.path().join("errors_nohup"));
    let mut child = Guarded(Some(start(nohup, &errors)));
    let launcher = child.get().id() as i32;
    let ranks = pids(&errors, 2, Instant::now() + LONG);
    wait_for_step(&run, 25, Instant::now() + LONG);
    for pid in ranks.iter().chain([&launcher]) {
        send(*pid, Signal::HUP);
    }
    let before = steps(&run);
    wait("steps go on", || steps(&run) > before + 100);
    send(launcher, Signal::TERM);
    assert_eq!(child.end().status.code(), Some(130));
}

#[test]
fn a_terminal_that_is_closed_saves_the_run() {
    let folder = folder(&endless());
    for flags in ["--ranks 1", "--processes 2"] {
        let run = folder.path().join(flags.split(' ').next().unwrap());
        let line = format!("echo $$ > pid; exec polyreme train job.toml {flags} --output {}", run.display());
        let terminal = terminal(folder.path(), 80, &line);
        wait_for_step(&run, 25, Instant::now() + LONG);
        let pid: i32 = fs::read_to_string(folder.path().join("pid")).unwrap().trim().parse().unwrap();
        // With the program that holds its other end, the terminal is gone.
        drop(terminal);
        wait("it ends", || living(&[pid]).is_empty());
        let (saved, _) = checkpoint::latest_whole(&run).unwrap();
        assert_eq!(saved.manifest.step, steps(&run), "{flags}: the last step is saved");
    }
}

/// The last line for programs, and the exit code that goes with it.
fn error_line(out: &Output) -> String {
    let said = text(&out.stdout);
    let last: Value = serde_json::from_str(said.lines().last().unwrap_or_default())
        .unwrap_or_else(|e| panic!("{e}: {said:?}, {}", text(&out.stderr)));
    assert_eq!(last["event"], "error", "{last}");
    assert_eq!(last["exit"].as_i64(), out.status.code().map(i64::from), "{last}");
    assert_eq!(last.as_object().unwrap().len(), 3, "{last}");
    assert_eq!(said.matches("\"event\":\"error\"").count(), 1, "{said}");
    last["message"].as_str().unwrap().to_string()
}

#[test]
fn a_program_reads_the_error_in_the_last_line() {
    let folder = folder(JOB);
    fs::create_dir(folder.path().join("empty")).unwrap();
    fs::write(
        folder.path().join("bad.toml"),
        "[model]\nkind = \"mpl\"\n[data]\nkind = \"synthetic\"\nclases = 3\n[train]\nbatch = \"many\"\n",
    )
    .unwrap();
    let bad = ["mpl", "clases", "bad.toml:7"];
    let nan = ["--set", "train.optimizer.lr=1e38", "--output", "nan", "--overwrite"];
    let no_data = ["--set", "data.kind=csv", "--set", "data.path=none.csv"];
    for (args, code, parts) in [
        (&["train", "bad.toml"][..], 2, &bad[..]),
        (&["train", "bad.toml", "--check"], 2, &bad),
        (&["train", "bad.toml", "--processes", "2"], 2, &bad),
        (&["train", "none.toml"], 2, &["none.toml"]),
        (&["train"], 2, &["a job file is needed"]),
        (&["train", "job.toml", "--bach", "3"], 2, &["--bach"]),
        (&["train", "job.toml", "--ranks", "0"], 2, &["--ranks"]),
        (&[&["train", "job.toml"], &nan[..]].concat(), 1, &["the loss is"]),
        (&[&["train", "job.toml", "--processes", "2"], &nan[..]].concat(), 1, &["rank ", "the loss is"]),
        (&["train", "job.toml", "--set", "model.layers=[{kind=\"linear\",outputs=7}]"], 2, &["last layer"]),
        (&["bensch"], 2, &["bensch"]),
        (&["resume", "none"], 1, &["none"]),
        (&["eval", "none"], 1, &["none"]),
        (&["predict", "none", "x.png"], 1, &["none"]),
        (&["inspect", "none"], 1, &["none"]),
        (&["launch", "--hosts", "a:x", "job.toml"], 2, &["--hosts"]),
        (&["data", "get", "mnist", "--mirror", "empty"], 1, &["train-images-idx3-ubyte.gz"]),
        (&["data", "get", "nosuch"], 2, &["nosuch", "mnist"]),
        (&["bench", "step", "--job", "nosuch"], 2, &["nosuch"]),
        (&["bench", "kernels", "nosuch"], 2, &["nosuch"]),
        (&["bench", "load", "none.toml"], 2, &["none.toml"]),
    ] {
        let out = polyreme(folder.path(), &[args, &["--json"]].concat());
        assert_eq!(out.status.code(), Some(code), "{args:?}: {}", text(&out.stderr));
        let message = error_line(&out);
        assert!(parts.iter().all(|p| message.contains(p)), "{args:?}: {message}");
        assert!(!message.starts_with("error: ") && !out.stderr.is_empty(), "{args:?}: {message}");
        // Without the flag nothing goes to programs.
        let plain = polyreme(folder.path(), args);
        assert!(!text(&plain.stdout).contains("\"event\""), "{args:?}");
        assert_eq!(plain.status.code(), Some(code), "{args:?}");
    }
    let out = command(folder.path(), &["doctor", "--json"]).env("POLYREME_ISA", "fast").output().unwrap();
    assert!(error_line(&out).contains("POLYREME_ISA=fast"));
    let out = polyreme(folder.path(), &[&["train", "job.toml", "--json"], &no_data[..]].concat());
    assert!(!error_line(&out).is_empty());
}

#[test]
fn output_that_cannot_be_written_is_an_error_at_the_end_of_a_whole_run() {
    let folder = folder(JOB);
    let full = || File::options().write(true).open("/dev/full").unwrap();
    for (name, flags) in [
        ("plain", &["--ranks", "1"][..]),
        ("json", &["--ranks", "1", "--json"]),
        ("ranks", &["--processes", "2"]),
        ("json_of_ranks", &["--processes", "2", "--json"]),
    ] {
        let args = [&["train", "job.toml", "--output", name], flags].concat();
        let out = command(folder.path(), &args).stdout(full()).output().unwrap();
        assert_eq!(out.status.code(), Some(1), "{name}");
        let said = text(&out.stderr);
        assert_eq!(said.matches("standard output could not be written").count(), 1, "{name}: {said}");
        assert!(said.contains("space") && !said.contains("panicked"), "{name}: {said}");
        let run = folder.path().join(name);
        assert_eq!((steps(&run), evaluations(&run)), (48, 4), "{name}");
        assert!(run.join("model.safetensors").exists(), "{name}");
    }
    for args in [&["inspect", "plain"][..], &["data", "list"], &["train", "job.toml", "--check"], &["--help"]]
    {
        let out = command(folder.path(), args).stdout(full()).output().unwrap();
        assert_eq!(out.status.code(), Some(1), "{args:?}");
        assert!(text(&out.stderr).contains("space"), "{args:?}: {}", text(&out.stderr));
    }
}

#[test]
fn a_set_that_cannot_be_fetched_is_said_once() {
    let folder = folder(JOB);
    let empty = folder.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let out = polyreme(folder.path(), &["data", "get", "mnist", "--mirror", "empty"]);
    assert_eq!(out.status.code(), Some(1));
    let said = text(&out.stderr);
    assert_eq!(said.matches("No such file").count(), 1, "{said}");
    assert!(said.contains("could not be fetched") && said.contains("name a mirror"), "{said}");
}

/// What a terminal shows, as lines: progress that is drawn over counts as one of its own.
fn screen_lines(bytes: &[u8]) -> Vec<String> {
    text(bytes).replace("\r\x1b[2K", "\n").replace('\r', "").lines().map(String::from).collect()
}

#[test]
fn no_line_is_wider_than_the_terminal() {
    let folder = folder(&JOB.replace("epochs = 4", "epochs = 12"));
    for columns in [80, 60, 40] {
        for flags in ["--ranks 1", "--processes 2"] {
            let line = format!("polyreme train job.toml {flags} --overwrite --output r");
            let out = terminal(folder.path(), columns, &line).read();
            assert!(out.status.success(), "{}", text(&out.stdout));
            let lines = screen_lines(&out.stdout);
            let wide: Vec<_> = lines.iter().filter(|l| l.chars().count() > columns).collect();
            assert!(wide.is_empty(), "{columns} columns: {wide:#?}");
            let epochs: Vec<_> = lines.iter().filter(|l| l.starts_with("epoch  ")).collect();
            assert_eq!(epochs.len(), 12, "{lines:#?}");
            assert!(epochs.iter().all(|l| l.contains("val_accuracy")), "{epochs:#?}");
            assert!(lines.iter().any(|l| l.contains("done: 144 steps")), "{lines:#?}");
        }
    }
    // A file has room for everything, whatever the terminal.
    let line = "polyreme train job.toml --ranks 1 --overwrite --output r 2>log >summary";
    assert!(terminal(folder.path(), 40, line).read().status.success());
    let log = fs::read_to_string(folder.path().join("log")).unwrap();
    let epochs: Vec<_> = log.lines().filter(|l| l.starts_with("epoch ")).collect();
    assert_eq!(epochs.len(), 12, "{log}");
    for part in ["step ", "loss ", "val_loss ", "val_accuracy "] {
        assert!(epochs.iter().all(|l| l.contains(part)), "{part}: {epochs:#?}");
    }
}

#[test]
fn help_tells_the_exit_codes() {
    let help = text(&polyreme(Path::new("."), &["--help"]).stdout);
    for code in ["0 ", "1 ", "2 ", "130", "141"] {
        assert!(help.lines().any(|l| l.starts_with(&format!("  {code}"))), "{code}: {help}");
    }
}
