//! `polyreme plan`: what it prints, what it keeps, what it writes, what it refuses.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

/// A transformer with all sizes, so that no data are needed.
const JOB: &str = "\
# A comment that stays.
[model]
kind = \"gpt\"
vocab = 256
width = 64
heads = 4
layers = 4
context = 64

[data]
kind = \"text\"
path = \"none.txt\"

[train] # how
batch = 32
optimizer = \"adamw\"
";

/// Four hosts with a price.
const CLUSTER: &str = "\
[[hosts]]
count = 4
cores = 4
memory_gib = 8
gflops = 50
gflops_bf16 = 150
core_gbs = 10
memory_gbs = 30
price = 0.5

[between]
latency_us = 30
gbits = 10
";

fn plan(folder: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_polyreme"));
    command.current_dir(folder).arg("plan").args(args).output().unwrap()
}

fn objects(folder: &Path, args: &[&str]) -> Vec<Value> {
    let out = plan(folder, args);
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn refusal(folder: &Path, args: &[&str]) -> String {
    let out = plan(folder, args);
    assert_eq!(out.status.code(), Some(2), "{args:?} is refused: {}", String::from_utf8_lossy(&out.stdout));
    String::from_utf8(out.stderr).unwrap()
}

/// A folder with a job of these further lines, and the cluster.
fn folder(more: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("job.toml"), format!("{JOB}{more}")).unwrap();
    fs::write(folder.path().join("cluster.toml"), CLUSTER).unwrap();
    folder
}

#[test]
fn plans_are_printed_best_first() {
    let folder = folder("precision = \"auto\"\n");
    let plans = objects(folder.path(), &["job.toml", "--cluster", "cluster.toml", "--json"]);
    assert!(plans.len() > 1);
    let number = |plan: &Value, key: &str| plan[key].as_f64().unwrap_or_else(|| panic!("{key} in {plan}"));
    for plan in &plans {
        let axes = ["data", "tensor", "stage", "sequence"].map(|key| number(plan, key));
        assert_eq!(axes.iter().product::<f64>(), number(plan, "hosts") * number(plan, "ranks_per_host"));
        let (ms, rate) = (number(plan, "step_ms"), number(plan, "samples_per_s"));
        assert!((rate * ms / 1e3 / 32.0 - 1.0).abs() < 1e-9 && number(plan, "memory_mib") > 0.0);
        assert!(number(plan, "microbatches") >= 1.0 && plan["schedule"].is_string());
        assert!(["f32", "bf16"].contains(&plan["precision"].as_str().unwrap()));
    }
    let times: Vec<f64> = plans.iter().map(|plan| number(plan, "step_ms")).collect();
    assert!(times.is_sorted(), "{times:?}");
    assert!(
        plans[0]["bound_by"]["what"].is_string() && plans[0]["more_hosts"].as_array().unwrap().len() == 2
    );
    // The same for people, twice the same.
    let table = || {
        String::from_utf8(
            plan(folder.path(), &["job.toml", "--cluster", "cluster.toml", "--top", "3"]).stdout,
        )
        .unwrap()
    };
    let text = table();
    assert!(
        text.contains("4 hosts of 4 cores, by cluster.toml") && text.contains("the best is bounded by"),
        "{text}"
    );
    assert_eq!(text, table());
}

#[test]
fn keys_that_are_set_are_kept_and_the_rest_is_written() {
    let folder = folder("precision = \"f32\"  # exact\n\n[parallel]\nstage = 2 # of four layers\n");
    let file = folder.path().join("job.toml");
    let plans = objects(folder.path(), &["job.toml", "--cluster", "cluster.toml", "--json", "--write"]);
    assert!(plans.iter().all(|plan| plan["stage"] == 2 && plan["precision"] == "f32"), "{plans:?}");
    let text = fs::read_to_string(&file).unwrap();
    assert!(
        text.starts_with("# A comment that stays.\n") && text.contains("stage = 2 # of four layers\n"),
        "{text}"
    );
    assert!(text.contains("[train] # how\n") && text.contains("precision = \"f32\"  # exact\n"));
    let data = format!("data = {}\n", plans[0]["data"]);
    let schedule = format!("schedule = {}\n", plans[0]["schedule"]);
    assert!(text.contains(&data) && text.contains(&schedule), "{text}");
    // Now everything is set: there is one plan, the same.
    let again = objects(folder.path(), &["job.toml", "--cluster", "cluster.toml", "--json"]);
    let ms = |plan: &Value| plan["step_ms"].as_f64().unwrap();
    assert!((ms(&again[0]) / ms(&plans[0]) - 1.0).abs() < 1e-9, "{} {}", again[0], plans[0]);
}

#[test]
fn what_if_is_a_table_and_an_image() {
    let folder = folder("");
    let args = ["job.toml", "--cluster", "cluster.toml", "--what-if", "hosts=8,slow=0.25,lost=2,batch=64"];
    let rows = objects(folder.path(), &[&args[..], &["--json", "--plot", "if.svg"]].concat());
    let what: Vec<_> = rows.iter().map(|row| row["what_if"].as_str().unwrap()).collect();
    assert_eq!(what[..5], ["as it is", "8 hosts", "one host at 25 %", "2 lost hosts", "batch 64"]);
    assert_eq!(rows.len(), 6, "each alone, and all together");
    let ms = |row: usize, key: &str| rows[row][key].as_f64().unwrap();
    assert!(ms(2, "same_plan_ms") >= ms(0, "step_ms"), "a slow host makes nothing faster: {rows:?}");
    assert!(
        rows.iter().all(|row| row["step_ms"].as_f64() <= row["same_plan_ms"].as_f64().or(Some(f64::MAX)))
    );
    assert!(fs::read_to_string(folder.path().join("if.svg")).unwrap().contains("one host at 25 %"));
}

#[test]
fn what_cannot_be_is_refused_in_words() {
    let folder = folder("");
    let with =
        |args: &[&str]| refusal(folder.path(), &[&["job.toml", "--cluster", "cluster.toml"], args].concat());
    assert!(with(&["--what-if", "speed=2"]).contains("bandwidth=10G"));
    assert!(with(&["--set", "parallel.data=5"]).contains("no mesh goes together"));
    // What a key that is set cannot do is the error itself, whether the cluster has room for so many ranks or not.
    for (set, why) in [
        ("parallel.tensor=3", "which tensor = 3 does not divide"),
        ("parallel.tensor=8", "which tensor = 8 does not divide"),
        ("parallel.stage=16", "stages, and 16 are asked for"),
    ] {
        let text = with(&["--set", set]);
        assert!(text.contains(why) && !text.contains("fits") && text.lines().count() == 1, "{set}: {text}");
    }
    assert!(refusal(folder.path(), &["job.toml", "--cluster", "none.toml"]).contains("none.toml"));
    let small = CLUSTER.replace("memory_gib = 8", "memory_gib = 0.001");
    fs::write(folder.path().join("small.toml"), small).unwrap();
    let text = refusal(folder.path(), &["job.toml", "--cluster", "small.toml"]);
    assert!(text.contains("no plan fits") && text.contains("does not fit"), "{text}");
}

#[test]
fn what_losses_leave_of_the_time_is_said() {
    let folder = folder(
        "\n[output]\nevery_minutes = 10\n\n[parallel]\ntensor = 1\nstage = 1\nsequence = 1\npatience = 5\n",
    );
    let args = ["job.toml", "--cluster", "cluster.toml", "--lost-every", "1h"];
    let shares = |more: &[&str]| {
        let plans = objects(folder.path(), &[&args[..], more, &["--json"]].concat());
        let goodput = &plans[0]["goodput"];
        assert!(plans[1..].iter().all(|plan| plan.get("goodput").is_none()));
        [&goodput["elastic"], &goodput["restarted"]].map(|share| share.as_f64().expect("a share"))
    };
    let [elastic, restarted] = shares(&[]);
    // A host that is missing for five minutes of an hour is a quarter of the cluster at most; a restart also loses five minutes.
    assert!(elastic > 0.9 && elastic < 0.999 && restarted < elastic - 0.05, "{elastic} {restarted}");
    assert!(shares(&["--replaced-after", "20m"])[0] < elastic - 0.01);
    let text = plan(folder.path(), &args);
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("with `train --elastic`") && text.contains("one every 10m"), "{text}");
    assert!(refusal(folder.path(), &["job.toml", "--lost-every", "soon"]).contains("is not a time"));
}
