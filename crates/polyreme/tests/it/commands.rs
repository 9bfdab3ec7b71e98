//! The binary itself: what it prints, what it refuses, how it exits.

use std::process::{Command, Output};

use polyreme_exec::KernelClass;
use polyreme_kernels::{Feature, Isa};
use serde_json::Value;

use crate::binary::root;

fn polyreme(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_polyreme")).args(args).output().unwrap()
}

/// The JSON objects that a command that succeeds prints, a line each.
fn objects(args: &[&str]) -> Vec<Value> {
    let out = polyreme(args);
    let (text, errors) =
        (String::from_utf8(out.stdout).unwrap(), String::from_utf8_lossy(&out.stderr).into_owned());
    assert!(out.status.success(), "{args:?}: {errors}");
    text.lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

/// What a command that is refused says.
fn refusal(args: &[&str]) -> String {
    let out = polyreme(args);
    assert!(!out.status.success(), "{args:?} is refused");
    assert!(out.stdout.is_empty(), "{args:?} says it on the other channel");
    String::from_utf8(out.stderr).unwrap()
}

#[test]
fn a_step_is_measured_and_stays_within_its_plan() {
    // Batches that make code, of which one run touches a megabyte more than the next, a small part of the memory.
    let reports = objects(&[
        "bench",
        "step",
        "--job",
        "mlp",
        "--job",
        "lenet",
        "--batch",
        "1024",
        "--threads",
        "2",
        "--steps",
        "3",
        "--json",
    ]);
    assert_eq!(reports.len(), 2);
    for (report, job) in reports.iter().zip(["mlp", "lenet"]) {
        let number = |key: &str| report[key].as_f64().unwrap_or_else(|| panic!("{key} in {report}"));
        assert_eq!(report["job"], job);
        assert_eq!(report["threads"], 2);
        assert!(number("step_ms") > 0.0 && number("gflops") > 0.0 && number("peak_share") > 0.0);
        assert!(number("loss").is_finite());
        // Gradients of linear layers, most of both jobs, are kept nowhere.
        assert!(number("param_mib") > 0.0 && number("grad_mib") < 0.5 * number("param_mib"));
        assert!(number("optimizer_mib") >= number("param_mib"));
        let (planned, actual) = (number("planned_peak_mib"), number("peak_rss_mib"));
        assert!((actual / planned - 1.0).abs() < 0.1, "{job}: planned {planned} MiB, took {actual}");
    }
}

/// A model that is split takes what was planned, and each rank has its part of the parameters and of the optimizer's state.
#[test]
fn split_steps_stay_within_their_plans() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("gpt.toml");
    // Activations and state that make code a small part of the memory.
    let text = "[model]\nkind = \"gpt\"\nlayers = 4\nwidth = 384\nheads = 4\nvocab = 256\ncontext = 128\n\
                [data]\nkind = \"text\"\npath = \"absent.txt\"\n[train]\noptimizer = { kind = \"adamw\", lr = 1e-3 }\n";
    std::fs::write(&file, text).unwrap();
    let report = |more: &str| {
        let step = ["bench", "step", "--job-file", file.to_str().unwrap(), "--batch", "8", "--threads", "1"];
        let more = more.split_whitespace().chain(["--steps", "2", "--json"]);
        objects(&step.into_iter().chain(more).collect::<Vec<_>>()).remove(0)
    };
    let number =
        |report: &Value, key: &str| report[key].as_f64().unwrap_or_else(|| panic!("{key} in {report}"));
    let whole = report("");
    // How often all ranks together have the model: of two that split it, each has at most 55 %. Ranks that split sequences have all of it.
    let splits = [
        ("--data 2", 1.0),
        ("--stage 2 --microbatches 4 --schedule 1f1b", 1.0),
        ("--stage 2 --microbatches 4 --schedule zb-v", 1.0),
        ("--tensor 2", 1.0),
        ("--tensor 2 --stage 2 --microbatches 4", 1.0),
        ("--sequence 2", 2.0),
        ("--data 2 --shard-weights", 1.0),
    ];
    for (split, copies) in splits {
        let report = report(split);
        let (planned, actual) = (number(&report, "planned_peak_mib"), number(&report, "peak_rss_mib"));
        assert!((actual / planned - 1.0).abs() < 0.05, "{split}: planned {planned} MiB, took {actual}");
        for key in ["param_mib", "optimizer_mib"] {
            let (all, one) = (number(&report, key), copies * number(&whole, key));
            assert!(all <= 1.1 * one, "{split}: {all} MiB of {key}, and {one} expected");
        }
    }
}

/// The shapes of a job file's steps are those of its model and its data; where `[model]` gives all sizes, no data are needed.
#[test]
fn steps_of_job_files_are_measured() {
    let folder = tempfile::tempdir().unwrap();
    let check = |text: &str, args: &[&str], param_mib: f64| {
        let file = folder.path().join("mine.toml");
        std::fs::write(&file, text).unwrap();
        let file = file.to_str().unwrap();
        let all = [&["bench", "step", "--job-file", file, "--steps", "2", "--json"], args].concat();
        let report = &objects(&all)[0];
        assert_eq!(report["job"], "mine");
        assert!(report["step_ms"].as_f64().unwrap() > 0.0 && report["gflops"].as_f64().unwrap() > 0.0);
        assert!(report["loss"].as_f64().unwrap().is_finite(), "{report}");
        let got = report["param_mib"].as_f64().unwrap() * f64::from(1 << 20) / 4.0;
        // Parameters start at multiples of a cache line.
        assert!((0.0..200.0).contains(&(got - param_mib)), "{got} floats, not {param_mib}: {report}");
    };
    let absent = "[data]\nkind = \"text\"\npath = \"absent.txt\"\n";
    let gpt = "[model]\nkind = \"gpt\"\nlayers = 1\nwidth = 32\nheads = 2\n";
    let sized =
        format!("{gpt}vocab = 100\ncontext = 16\n{absent}[train]\nbatch = 4\naccumulate = 2\nclip = 1.0\n");
    let params = 2 * 100 * 32 + 16 * 32 + 12 * 32 * 32 + 13 * 32 + 2 * 32;
    check(&sized, &[], f64::from(params));
    check(&sized, &["--ranks", "2"], f64::from(params));
    let table = "[model]\nkind = \"mlp\"\nhidden = [8]\n[data]\nkind = \"csv\"\npath = \"t.csv\"\nvalidation = 0.25\n\
                 [train]\nloss = \"mse\"\n";
    std::fs::write(folder.path().join("t.csv"), "a,b,c,y\n1,2,3,4.5\n2,3,4,5.5\n3,4,5,1.5\n4,1,1,2.5\n")
        .unwrap();
    check(table, &["--batch", "3"], f64::from(3 * 8 + 8 + 8 + 1));
    let made = "[model]\nkind = \"mlp\"\nhidden = [8]\n[data]\nkind = \"synthetic\"\nshape = [5]\nclasses = 3\n\
                class_weights = \"balanced\"\n[train]\nmixup = 0.2\n";
    check(made, &["--set", "train.batch=6"], f64::from(5 * 8 + 8 + 8 * 3 + 3));
    // Sizes that nobody gives are an error that names the data.
    let file = folder.path().join("open.toml");
    std::fs::write(&file, format!("{gpt}{absent}")).unwrap();
    let said = refusal(&["bench", "step", "--job-file", file.to_str().unwrap()]);
    assert!(said.contains("absent.txt"), "{said}");
    let said = refusal(&["bench", "step", "--set", "train.batch=6"]);
    assert!(said.contains("--job-file"), "{said}");
}

/// Sequences that are cut over ranks, over every transport: the losses of one rank.
#[test]
fn sequences_are_cut_over_ranks_of_any_kind() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mine.toml");
    let text = "[model]\nkind = \"gpt\"\nlayers = 1\nwidth = 32\nheads = 2\nvocab = 100\ncontext = 16\n\
                [data]\nkind = \"text\"\npath = \"absent.txt\"\n[train]\nbatch = 4\n";
    std::fs::write(&file, text).unwrap();
    let step = ["bench", "step", "--job-file", file.to_str().unwrap(), "--steps", "1", "--threads", "1"];
    let first_losses = |more: &[&str]| -> Vec<f64> {
        let report = &objects(&[&step[..], &["--context", "32", "--json"], more].concat())[0];
        report["first_losses"].as_array().unwrap().iter().map(|l| l.as_f64().unwrap()).collect()
    };
    let one = first_losses(&["--data", "1"]);
    for transport in ["local", "shm", "tcp"] {
        let cut = first_losses(&["--sequence", "2", "--transport", transport]);
        for (a, b) in one.iter().zip(&cut) {
            assert!((a - b).abs() < 1e-5 * a.abs(), "{transport}: {a} and {b}");
        }
    }
    let said = refusal(&[&step[..], &["--context", "30", "--sequence", "2"]].concat());
    assert!(said.contains("use a context that 4 divides, such as 32"), "{said}");
    let said = refusal(&["bench", "step", "--job", "mlp", "--context", "30"]);
    assert!(said.contains("not a job on sequences"), "{said}");
}

/// The job files of `examples/` that are made to be timed are those that the comparison with PyTorch names.
#[test]
fn the_sizes_that_people_train_are_examples() {
    let compared = std::fs::read_to_string(root().join("bench/compare.py")).unwrap();
    for name in ["resnet50", "gpt2"] {
        let file = format!("examples/{name}.toml");
        assert!(compared.contains(&file), "{file}");
        polyreme_train::job::Job::from_file(&root().join(&file), &[]).unwrap();
    }
}

#[test]
fn where_the_time_goes_is_told() {
    let reports =
        objects(&["bench", "step", "--job", "mlp", "--threads", "1", "--steps", "2", "--ops", "--json"]);
    let ops: Vec<_> = reports.iter().filter_map(|r| r["op"].as_str()).collect();
    assert!(ops.contains(&"update") && ops.iter().any(|op| op.starts_with("matmul")), "{ops:?}");
}

#[test]
fn a_budget_is_kept_or_refused() {
    let step = |mib: &str| {
        objects(&["bench", "step", "--job", "cnn", "--steps", "1", "--json", "--memory-mib", mib])
    };
    let (wide, tight) = (step("200"), step("100"));
    let planned = |reports: &[Value]| reports[0]["planned_peak_mib"].as_f64().unwrap();
    // The budget is that of the engine; the process itself takes a few MiB more.
    assert!(planned(&tight) < 110.0 && planned(&wide) > 120.0, "{tight:?} {wide:?}");
    let out = polyreme(&["bench", "step", "--job", "cnn", "--steps", "1", "--memory-mib", "5"]);
    assert!(!out.status.success());
    let said = String::from_utf8(out.stderr).unwrap();
    assert!(said.contains("needs at least") && said.contains("smaller batch"), "{said}");
}

#[test]
fn stages_are_cut_by_name_by_operations_and_by_measured_times() {
    let staged = ["bench", "step", "--job", "lenet", "--stage", "2", "--microbatches", "2", "--steps", "1"];
    let step =
        |more: &[&str]| objects(&[&staged[..], &["--threads", "1", "--json"], more].concat()).remove(0);
    let reports = [
        step(&["--cuts", "operations"]),
        step(&["--cuts", "measured"]),
        step(&["--cuts", "fc1", "--memory-mib", "100"]),
    ];
    assert_eq!(reports[2]["cuts"][0], "fc1");
    for report in &reports {
        assert_eq!(report["cuts"].as_array().map(Vec::len), Some(1), "{report}");
        assert_eq!(report["first_losses"], reports[0]["first_losses"], "{report}");
    }
    let out = polyreme(&[&staged[..], &["--cuts", "fc9"]].concat());
    let said = String::from_utf8(out.stderr).unwrap();
    assert!(!out.status.success() && said.contains("`fc9`") && said.contains("fc1"), "{said}");
}

#[test]
fn a_kernel_is_measured() {
    let reports = objects(&["bench", "kernels", "matmul grad_weight", "--threads", "1", "--json"]);
    assert!(reports.len() > 4);
    assert!(reports.iter().all(|r| r["us"].as_f64().unwrap() > 0.0 && r["gflops"].as_f64().unwrap() > 0.0));
}

#[test]
fn the_schema_of_job_files_is_printed() {
    let out = polyreme(&["schema"]);
    assert!(out.status.success());
    let schema: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
    assert_eq!(schema["required"], serde_json::json!(["model", "data"]));
    let batch = &schema["$defs"]["train"]["properties"]["batch"];
    assert_eq!((&batch["type"], &batch["minimum"]), (&"integer".into(), &1.into()));
}

#[test]
fn the_doctor_measures_the_machine() {
    let reports = objects(&["doctor", "--json"]);
    assert_eq!(reports.len(), 1);
    assert!(reports[0]["simd"].is_string());
    for key in ["fma_peak_gflops", "add_bandwidth_gbs", "copy_bandwidth_gbs", "seal_gbs", "open_gbs"] {
        assert!(reports[0][key].as_f64().unwrap() > 0.0, "{key}");
    }
    let list = |key: &str| reports[0][key].as_array().unwrap().clone();
    assert!(!list("numa_nodes").is_empty());
    assert!(list("interfaces").iter().any(|i| i.as_str().unwrap().contains("127.0.0.1/8")), "{reports:?}");
    assert!(reports[0]["mpi"].is_string() || reports[0]["mpi"].is_null());
    let libraries = list("mpi_libraries");
    for (library, family) in libraries.iter().zip(["OpenMPI: ", "MPICH: "]) {
        assert!(library.as_str().unwrap().starts_with(family), "{libraries:?}");
    }
    assert_eq!(reports[0]["shared_memory"], serde_json::json!({"Ok": null}));
}

#[test]
fn the_environment_limits_the_instructions_and_the_bits_stay() {
    let with = |isa: &str, args: &[&str]| {
        let out = Command::new(env!("CARGO_BIN_EXE_polyreme")).env("POLYREME_ISA", isa).args(args).output();
        out.unwrap()
    };
    let said = |out: Output| String::from_utf8([out.stdout, out.stderr].concat()).unwrap();
    let doctor = |isa: &str| -> serde_json::Value {
        serde_json::from_slice(&with(isa, &["doctor", "--json"]).stdout).unwrap()
    };
    let scalar = doctor("scalar");
    assert_eq!((&scalar["simd"], &scalar["features"]), (&"scalar".into(), &serde_json::json!([])));
    // What is taken away is not there, and the rest is what the CPU has.
    let all = Isa::detect().without(Feature::AmxTile).without(Feature::Avx512Bf16);
    let less = doctor("-amx,-avx512_bf16");
    assert_eq!(less["features"], serde_json::json!(all.features().map(Feature::name).collect::<Vec<_>>()));
    assert_eq!(less["simd"], all.name());
    let (folder, job) = (tempfile::tempdir().unwrap(), root().join("examples/digits.toml"));
    let model = |isa: &str| {
        let run = folder.path().join(isa);
        let (job, run) = (job.to_str().unwrap(), run.to_str().unwrap());
        let out = with(isa, &["train", job, "--set", "train.epochs=1", "--ranks", "1", "--output", run]);
        assert!(out.status.success(), "{}", said(out));
        std::fs::read(folder.path().join(isa).join("model.safetensors")).unwrap()
    };
    // Both are vectors, if this CPU has any, and have the same bits.
    assert!(model("avx2") == model("avx512"));
    let wrong = with("fast", &["doctor"]);
    assert_eq!(wrong.status.code(), Some(2));
    let wrong = said(wrong);
    assert!(wrong.contains("POLYREME_ISA=fast") && wrong.contains("scalar, avx2, avx512"), "{wrong}");
    assert!(Feature::ALL.iter().all(|f| wrong.contains(&format!("-{}", f.name()))), "{wrong}");
}

/// A run in bf16 that is resumed with fewer instructions says so, once; one that is reproducible goes on with its bits.
#[test]
fn a_run_that_is_resumed_with_other_instructions_says_what_that_means() {
    let (folder, job) = (tempfile::tempdir().unwrap(), root().join("examples/digits.toml"));
    let with = |isa: &str, args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_polyreme"));
        let out = command.current_dir(folder.path()).env("POLYREME_ISA", isa).args(args).output().unwrap();
        let said = String::from_utf8([out.stdout, out.stderr].concat()).unwrap();
        assert!(out.status.success(), "{isa} {args:?}: {said}");
        said
    };
    let recorded =
        |run: &str| -> Value { serde_json::from_str(&with("-amx", &["inspect", run, "--json"])).unwrap() };
    // The best that is sure to be without AMX, and whether that has products of pairs.
    let pairs = Isa::detect().without(Feature::AmxTile).has(Feature::Avx512Bf16);
    let vectors = Isa::detect().has_avx2();
    for (run, reproducible, first, then) in [
        ("fast", "false", if pairs { "avx512_bf16" } else { "f32" }, "f32"),
        ("same", "true", "amx_bf16-twin", "amx_bf16-twin"),
    ] {
        let (first, then) = if vectors { (first, then) } else { ("scalar", "scalar") };
        let same = format!("parallel.reproducible={reproducible}");
        let sets = ["--set", "train.precision=bf16", "--set", "train.epochs=1", "--set", &same];
        let args = [&["train", job.to_str().unwrap(), "--ranks", "1", "--output", run][..], &sets].concat();
        with("-amx", &args);
        assert_eq!(recorded(run)["kernels"], serde_json::json!([first]));
        let degrees = (reproducible == "true").then(|| serde_json::json!({ "tensor": 1, "sequence": 1 }));
        assert_eq!(recorded(run)["degrees"], degrees.unwrap_or_default());
        let said = with("avx2", &["resume", run, "--ranks", "1", "--set", "train.epochs=2"]);
        let notes: Vec<&str> = said.lines().filter(|line| line.contains("products were summed")).collect();
        assert_eq!(notes.len(), usize::from(first != then), "{said}");
        assert!(
            notes.iter().all(|note| note.starts_with("warning: ") && note.contains("bits will differ")),
            "{said}"
        );
        // The best checkpoint may be of either half.
        let last = format!("{run}/checkpoints/step-00000042");
        assert_eq!(recorded(&last)["kernels"], serde_json::json!([then]));
        let shown = with("-amx", &["inspect", &last]);
        let words = KernelClass::from_name(then).unwrap().words();
        assert!(shown.contains(&format!("\n  products are summed {words}\n")), "{shown}");
        assert_eq!(shown.contains(" with tensor = 1 and sequence = 1\n"), reproducible == "true", "{shown}");
    }
}

#[test]
fn wrong_words_are_refused_with_the_right_ones() {
    let said = refusal(&["bench", "step", "--job", "mpl"]);
    assert!(said.contains("mpl") && said.contains("mlp") && said.contains("gpt"), "{said}");
    let said = refusal(&["bench", "step", "--threads", "0"]);
    assert!(said.contains("--threads"), "{said}");
    let said = refusal(&["bench", "step", "--shard-gradients"]);
    assert!(said.contains("--ranks"), "{said}");
    let out = polyreme(&["bench", "kernels", "nosuch"]);
    assert!(!out.status.success());
    assert!(String::from_utf8(out.stderr).unwrap().contains("nosuch"));
    let said = refusal(&["bensch"]);
    assert!(said.contains("bench"), "{said}");
}

#[test]
fn well_known_sets_are_named_and_a_folder_can_be_their_mirror() {
    let sets = objects(&["data", "list", "--json"]);
    assert!(
        sets.iter().any(|s| s["name"] == "cifar10" && s["bytes"].as_u64() > Some(100_000_000)),
        "{sets:?}"
    );
    let folder = tempfile::tempdir().unwrap();
    let (empty, into) = (folder.path().join("empty"), folder.path().join("mnist"));
    std::fs::create_dir(&empty).unwrap();
    let refused = polyreme(&[
        "data",
        "get",
        "mnist",
        "--json",
        "--mirror",
        empty.to_str().unwrap(),
        "--into",
        into.to_str().unwrap(),
    ]);
    assert!(!refused.status.success());
    let errors = String::from_utf8(refused.stderr).unwrap();
    assert!(errors.contains("train-images-idx3-ubyte.gz"), "{errors}");
}
