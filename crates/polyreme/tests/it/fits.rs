//! A job fits into memory or it is refused, with what would fit; and memory that is not there is an error, not an abort.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::binary::{cannot_run, command, folder, json, polyreme};

/// Two layers of which the wide one is far larger than the data.
fn job(width: usize, batch: usize) -> String {
    format!(
        r#"
[model]
layers = [{{ kind = "linear", outputs = {width} }}, "relu", {{ kind = "linear" }}]
[data]
kind = "synthetic"
samples = {samples}
shape = [16]
classes = 5
validation = 0
[train]
batch = {batch}
steps = 3
[parallel]
ranks = 2
threads = 1
[output]
best = "none"
"#,
        samples = 2 * batch
    )
}

fn said(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

/// The number after `before` in a text.
#[track_caller]
fn number_behind(text: &str, before: &str) -> usize {
    let rest = text.split_once(before).unwrap_or_else(|| panic!("no {before:?} in {text}")).1;
    let digits: String = rest.chars().take_while(|c| c.is_ascii_digit() || *c == ',').collect();
    digits.replace(',', "").parse().unwrap_or_else(|_| panic!("no number behind {before:?} in {text}"))
}

/// The same, under a shell's `ulimit`.
fn limited(folder: &Path, ulimit: &str, args: &[&str]) -> Output {
    let script = format!("ulimit {ulimit} && exec \"$0\" \"$@\"");
    let mut shell = Command::new("sh");
    let program = command(folder, args);
    shell.current_dir(folder).args(["-c", &script]).arg(program.get_program()).args(args);
    shell.output().unwrap()
}

/// Follows each advice, alone: it fits or it does not, as was said. How many fit.
fn every_option_does_what_is_said_of_it(
    text: &str,
    check: impl Fn(&[&str]) -> (Option<i32>, String),
) -> usize {
    let (mut fits, mut n) = (true, 0);
    for line in text.lines() {
        fits &= !line.contains("not enough by themselves");
        let Some((setting, rest)) = line.strip_prefix("    ").and_then(|line| line.split_once(" takes "))
        else {
            continue;
        };
        n += usize::from(fits);
        let (code, why) = match setting.strip_prefix("--ranks ") {
            Some(ranks) => check(&[&format!("parallel.ranks={ranks}")]),
            None => check(&[setting]),
        };
        assert_eq!(code, Some(if fits { 0 } else { 2 }), "{setting}: {why}");
        if !fits && setting.contains("bf16") {
            let takes = rest.split_once(" MiB").unwrap().0;
            assert!(why.contains(&format!("it takes at least {takes} MiB")), "{setting}, {rest}: {why}");
        }
    }
    n
}

/// Activations are most of one job, the optimizer's state of another; what is in bf16 already is not advised.
#[test]
fn half_precision_is_advised_where_it_makes_a_job_fit() {
    let advised = |folder: &Path, kib: usize, sets: &[&str]| {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", *set]).collect();
        let args = [&["train", "job.toml", "--check"][..], &sets].concat();
        let out = limited(folder, &format!("-d {kib}"), &args);
        (out.status.code(), said(&out))
    };
    let (activations, moments) = ("train.precision = \"bf16\"", "train.optimizer.moments = \"bf16\"");
    let hidden = ["{ kind = \"linear\", outputs = 256 }, \"gelu\""; 8].join(", ");
    let layers = "{ kind = \"linear\", outputs = 256 }, \"relu\"";
    let deep = job(256, 8000).replace(layers, &hidden);
    assert!(deep.contains("gelu"));
    // Limits somewhat below what the jobs take, in KiB: 149 MiB and 93 in bf16; 1,256, 1,042 in bf16 and 1,130 with moments
    // in bf16.
    for (job, kib, fitting, other) in
        [(deep, 130_000, activations, Some(moments)), (job(1_000_000, 8), 1_220_000, moments, None)]
    {
        let folder = folder(&job);
        let check = |sets: &[&str]| advised(folder.path(), kib, sets);
        let (code, text) = check(&[]);
        assert_eq!(code, Some(2), "{text}");
        let first = text.split("not enough by themselves").next().unwrap();
        assert!(first.contains(&format!("    {fitting} takes ")), "{text}");
        assert!(other.is_none_or(|other| !first.contains(&format!("    {other} takes "))), "{text}");
        every_option_does_what_is_said_of_it(&text, check);
        let (code, text) = advised(folder.path(), kib / 2, &[activations, moments]);
        assert_eq!(code, Some(2), "{text}");
        assert!(!text.contains("bf16"), "{text}");
    }
}

#[test]
fn a_job_larger_than_the_machine_is_refused_with_what_would_fit() {
    // Terabytes for each of some values.
    let folder = folder(&job(1_000_000, 1_000_000));
    let check = |sets: &[&str]| {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", *set]).collect();
        let out = polyreme(folder.path(), &[&["train", "job.toml", "--check"][..], &sets].concat());
        (out.status.code(), said(&out))
    };
    let (code, text) = check(&[]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("the job does not fit: it takes at least "), "{text}");
    assert!(text.contains(" MiB on this host, and this machine has "), "{text}");
    let batch = number_behind(&text, "the largest batch that fits: train.batch = ");
    assert!(batch > 1000, "{text}");
    let (code, why) = check(&[&format!("train.batch={batch}")]);
    assert_eq!(code, Some(0), "a batch of {batch}: {why}");
    let (code, why) = check(&[&format!("train.batch={}", batch + batch / 100 + 2)]);
    assert_eq!(code, Some(2), "a batch larger than {batch}: {why}");
    let n = every_option_does_what_is_said_of_it(&text, check);
    assert!(text.contains("train.accumulate = ") && n > 0, "{text}");

    // It does not start either, as threads, as processes, or again.
    for flags in [&["--ranks", "2"][..], &["--processes", "2"]] {
        let out = polyreme(folder.path(), &[&["train", "job.toml", "--output", "run"][..], flags].concat());
        let text = said(&out);
        assert_eq!(out.status.code(), Some(2), "{text}");
        assert!(text.contains("the job does not fit") && text.contains("train.batch = "), "{text}");
        assert!(!folder.path().join("run").exists(), "nothing was made");
    }
}

/// Ranks over sockets hold everything for themselves; threads share the weights.
#[test]
fn processes_that_share_nothing_are_counted_one_by_one() {
    let folder = folder(&job(1_000_000, 64));
    let need = |flags: &[&str]| {
        let args = [&["train", "job.toml", "--check"][..], flags].concat();
        let out = limited(folder.path(), "-v 600000", &args);
        let text = said(&out);
        assert_eq!(out.status.code(), Some(2), "{text}");
        assert!(text.contains("in one process, and `ulimit -v` leaves "), "{text}");
        number_behind(&text, "it takes at least ")
    };
    let (threads, sockets) = (need(&["--ranks", "3"]), need(&["--processes", "3", "--transport", "tcp"]));
    let shm = need(&["--processes", "3"]);
    assert!(shm < threads, "{shm} MiB of one process, {threads} of three ranks");
    assert!(sockets > shm && sockets < threads, "{shm}, {sockets} and {threads} MiB");
}

#[test]
fn a_job_larger_than_a_ulimit_is_refused_and_one_that_fits_is_not() {
    let folder = folder(&job(16_384, 4000));
    for (flag, name) in [("-v", "`ulimit -v` leaves"), ("-d", "`ulimit -d` leaves")] {
        let out = limited(folder.path(), &format!("{flag} 500000"), &["train", "job.toml", "--check"]);
        let text = said(&out);
        assert_eq!(out.status.code(), Some(2), "{text}");
        assert!(text.contains("in one process, and ") && text.contains(name), "{text}");
        let batch = number_behind(&text, "train.batch = ");
        let args = ["train", "job.toml", "--check", "--set", &format!("train.batch={}", batch / 2)];
        let out = limited(folder.path(), &format!("{flag} 500000"), &args);
        assert_eq!(out.status.code(), Some(0), "{}", said(&out));
    }
}

#[test]
fn memory_that_cannot_be_reserved_is_an_error_that_names_it() {
    // Nothing looks ahead here.
    let folder = tempfile::tempdir().unwrap();
    let args = ["bench", "step", "--job", "gpt", "--steps", "1", "--threads", "1"];
    let out = limited(folder.path(), "-v 250000", &args);
    let text = said(&out);
    assert_eq!(out.status.code(), Some(1), "{text}");
    assert!(
        text.contains("error: no memory for activations: ") && text.contains(" bytes) could not be"),
        "{text}"
    );
}

/// Limits just above what is certainly needed: what is not counted may find no room then, and that is no abort.
#[test]
fn a_limit_that_is_hardly_enough_ends_in_an_error_if_at_all() {
    let folder = folder(&job(700_000, 64));
    let (kib, args) = (300_000, ["train", "job.toml", "--output", "run", "--overwrite"]);
    let out = limited(folder.path(), &format!("-v {kib}"), &args);
    let text = said(&out);
    assert_eq!(out.status.code(), Some(2), "{text}");
    let over = number_behind(&text, "it takes at least ") - number_behind(&text, "`ulimit -v` leaves ");
    for more in [2, 8, 24] {
        let out = limited(folder.path(), &format!("-v {}", kib + 1024 * (over + more)), &args);
        let text = said(&out);
        println!("{more} MiB more: {:?} {}", out.status, text.lines().last().unwrap_or(""));
        match out.status.code() {
            Some(0 | 2) => {}
            Some(1) => {
                assert!(text.contains("no memory for ") || text.contains("no thread for "), "{text}");
                assert!(text.contains(" bytes") || text.contains("no thread"), "{text}");
            }
            code => panic!("{more} MiB more: {code:?}, {:?}: {text}", out.status),
        }
    }
}

/// A memory cgroup of version 1 below this process's own, gone at the end.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new(bytes: usize) -> Option<Cgroup> {
        let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
        let own = groups.lines().find_map(|line| line.split_once(":memory:"))?.1;
        let own = Path::new("/sys/fs/cgroup/memory").join(own.trim_start_matches('/'));
        let group = Cgroup(own.join(format!("polyreme-test-{}", std::process::id())));
        fs::create_dir(&group.0).ok()?;
        fs::write(group.0.join("memory.limit_in_bytes"), bytes.to_string()).ok()?;
        Some(group)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _: std::io::Result<()> = fs::remove_dir(&self.0);
    }
}

#[test]
fn a_job_larger_than_its_control_group_is_refused() {
    let Some(group) = Cgroup::new(256 << 20) else {
        return cannot_run("needs root and a memory cgroup of version 1");
    };
    let folder = folder(&job(16_384, 4000));
    let within = |args: &[&str]| {
        let script = "echo $$ > \"$GROUP/cgroup.procs\" && exec \"$0\" \"$@\"";
        let mut shell = Command::new("sh");
        let program = command(folder.path(), args);
        shell.current_dir(folder.path()).env("GROUP", &group.0);
        shell.args(["-c", script]).arg(program.get_program()).args(args).output().unwrap()
    };
    let out = within(&["train", "job.toml", "--check"]);
    let text = said(&out);
    assert_eq!(out.status.code(), Some(2), "{text}");
    let by = format!("its control group allows ({}/memory.limit_in_bytes) 256 MiB", group.0.display());
    assert!(text.contains(&by), "{text}");
    let batch = number_behind(&text, "train.batch = ");
    let half = format!("train.batch={}", batch / 2);
    let out = within(&["train", "job.toml", "--set", &half, "--output", "run"]);
    assert_eq!(out.status.code(), Some(0), "{}", said(&out));
}

/// What a run prints as its memory, and what it took at most, in MiB.
fn planned_and_taken(job: &str, ranks: &str) -> (f64, f64) {
    let folder = folder(job);
    let args = ["train", "job.toml", "--output", "run", "--ranks", ranks, "--threads", "1"];
    let check = json(folder.path(), &[&args[..], &["--check", "--json"]].concat());
    let planned = check[0]["memory_mib"].as_f64().unwrap();
    let mut run = command(folder.path(), &args).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    let status = format!("/proc/{}/status", run.id());
    let mut peak_kib = 0;
    let code = loop {
        // The peak never falls, so the last value that is seen counts; a process that has ended says none.
        let text = fs::read_to_string(&status).unwrap_or_default();
        let peak = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let peak = peak.and_then(|kib| kib.trim().trim_end_matches("kB").trim().parse().ok());
        peak_kib = peak.unwrap_or(peak_kib);
        if let Some(code) = run.try_wait().unwrap() {
            break code;
        }
        std::thread::yield_now();
    };
    assert!(code.success(), "{code}");
    (planned, f64::from(peak_kib) / 1024.0)
}

/// With evaluations and checkpoints, of which the run ends with an earlier one or the last.
#[test]
fn a_run_takes_the_memory_that_it_prints() {
    let rows = r#"
[model]
layers = [{ kind = "linear", outputs = 2048 }, "relu", { kind = "linear", outputs = 2048 }, "relu", { kind = "linear" }]
[data]
kind = "synthetic"
samples = 600
shape = [784]
classes = 10
[train]
batch = 64
steps = 4
evaluate_every = 1
optimizer = "adamw"
[output]
every_steps = 2
"#;
    let images = r#"
[model]
kind = "resnet18"
[data]
kind = "synthetic"
samples = 100
shape = [3, 64, 64]
classes = 20
[train]
batch = 16
steps = 2
ema = 0.9
[output]
every_steps = 1
"#;
    for (job, ranks) in [(rows, "1"), (rows, "2"), (images, "1"), (images, "2")] {
        let (planned, taken) = planned_and_taken(job, ranks);
        let ratio = taken / planned;
        println!("{ranks} ranks: {planned:.0} MiB planned, {taken:.0} taken: {ratio:.3}");
        assert!((0.9..=1.1).contains(&ratio), "{ranks} ranks: {planned} MiB planned, {taken} taken: {job}");
    }
}
