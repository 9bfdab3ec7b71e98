//! Sets in several files, and ranks that read only their own part.

use std::fmt::Write;
use std::fs;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::binary::{command, folder, json, polyreme};
use crate::ranks::{end, losses, pids, send, start, wait_for_step};

const TABLES: &str = r#"
[model]
layers = [{ kind = "linear", outputs = 16 }, "relu", { kind = "linear" }]
[data]
kind = "csv"
path = "part-*.csv"
order = "parts"
validation = 0.0
normalise = false
[train]
batch = 30
epochs = 3
log_every = 1
[parallel]
threads = 1
"#;

/// Rows `range` of a table of two numbers and a name.
fn rows(range: std::ops::Range<usize>) -> String {
    let mut text = String::from("a,b,label\n");
    for i in range {
        let (a, b) = (i * 37 % 101, i * 53 % 89);
        writeln!(text, "{}.5,{b},{}", a, ["ant", "bee", "cow", "dog"][i / 60 % 4]).unwrap();
    }
    text
}

#[test]
fn files_are_one_set_on_any_number_of_ranks() {
    let folder = folder(TABLES);
    let path = |name: &str| folder.path().join(name);
    // Not one of them has all classes; the tenth comes last, not second.
    for (name, range) in [("1", 0..50), ("2", 50..120), ("10", 120..247)] {
        fs::write(path(&format!("part-{name}.csv")), rows(range)).unwrap();
    }
    fs::write(path("whole.csv"), rows(0..247)).unwrap();
    let run = |name: &str, more: &[&str]| {
        json(folder.path(), &[&["train", "job.toml", "--json", "--output", name], more].concat());
        losses(&path(name))
    };
    let whole = run("whole", &["--ranks", "1", "--set", "data.path=whole.csv"]);
    assert_eq!(whole.len(), 27);
    let close =
        |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-5) && a.len() == b.len();
    for (name, more) in
        [("one", ["--ranks", "1"]), ("threads", ["--ranks", "3"]), ("processes", ["--processes", "2"])]
    {
        let got = run(name, &more);
        assert!(close(&whole, &got), "{name}: {got:?}, not {whole:?}");
    }
    let said = |set: &str| {
        let out = polyreme(folder.path(), &["train", "job.toml", "--output", "no", "--set", set]);
        assert!(!out.status.success());
        String::from_utf8(out.stderr).unwrap()
    };
    let none = said("data.path=nothing-*.csv");
    assert!(none.contains("nothing-*.csv") && none.contains("no file"), "{none}");
    fs::write(path("part-3.csv"), "a,label\n1,ant\n2,bee\n").unwrap();
    let unlike = said("data.order=sample");
    assert!(unlike.contains("part-3.csv lacks \"b\"") && unlike.contains("part-1.csv has"), "{unlike}");
}

const TEXTS: &str = r#"
[model]
kind = "gpt"
layers = 1
width = 16
heads = 2
context = 32
[data]
kind = "text"
path = "part-*.txt"
order = "parts"
validation = 0.0
[train]
batch = 64
steps = 1000000
evaluate_every = 1000000
[parallel]
threads = 1
[output]
every_steps = 50
"#;

/// Kilobytes of a file that a process has mapped and touched.
fn touched(pid: i32, file: &str) -> usize {
    let maps = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let mut inside = false;
    let mut sum = 0;
    for line in maps.lines() {
        // A mapping begins with its addresses, and ends with its file.
        if line.split(' ').next().is_some_and(|w| w.contains('-')) {
            inside = line.ends_with(file);
        } else if let (true, Some(rss)) = (inside, line.strip_prefix("Rss:")) {
            sum += rss.trim().trim_end_matches(" kB").parse::<usize>().unwrap();
        }
    }
    sum
}

/// Of each file.
const KB: usize = 1024;

#[test]
fn each_process_reads_its_own_files_only() {
    let folder = folder(TEXTS);
    for part in 0..4u32 {
        let letter = |i: u32| b'a' + (i.wrapping_mul(2_654_435_761).wrapping_add(part) >> 27) as u8 % 26;
        let text: Vec<u8> = (0..KB as u32 * 1024).map(letter).collect();
        fs::write(folder.path().join(format!("part-{part}.txt")), text).unwrap();
    }
    let (run, errors) = (folder.path().join("run"), folder.path().join("errors"));
    let until = Instant::now() + Duration::from_secs(120);
    let launcher =
        start(command(folder.path(), &["train", "job.toml", "--processes", "2", "--output", "run"]), &errors);
    let pids = pids(&errors, 2, until);
    wait_for_step(&run, 100, until);
    for (rank, pid) in pids.iter().enumerate() {
        for part in 0..4 {
            let (kb, own) = (touched(*pid, &format!("part-{part}.txt")), part / 2 == rank);
            // A fault brings some neighbours along.
            assert!(if own { kb > KB / 2 } else { kb <= 64 }, "rank {rank} touched {kb} KB of file {part}");
        }
    }
    send(launcher.id() as i32, Signal::INT);
    assert_eq!(end(launcher, Duration::from_secs(30)).status.code(), Some(130));
}
