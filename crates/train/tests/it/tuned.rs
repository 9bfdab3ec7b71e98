//! Parameters that are frozen or learnt at rates of their own, on one rank and on meshes.

use std::path::Path;

use polyreme_exec::{Engine, Footprint, Isa};
use polyreme_graph::{Instr, Program};
use polyreme_train::run::{Given, Prepared};
use polyreme_train::weights::{Weight, read_weights, write_weights};

use crate::mesh::{MeshCase, agree, cases, lines, train, with_optimizer};
use crate::runs::{Outcome, job, run};

/// Which layers of a case are frozen: those at the beginning, so that the backward pass is cut.
fn frozen(name: &str) -> &'static str {
    match name {
        "mlp" => r#"["fc1", "fc2.*", "fc4.bias"]"#,
        "cnn" => r#"["conv.0", "norm.0", "conv.1.*", "norm.3.weight"]"#,
        "gpt" => r#"["tok", "pos", "blocks.0", "blocks.1.*", "*.ln1.bias"]"#,
        other => panic!("no layers of {other} are known"),
    }
}

/// The same case with more keys in `[model]`.
fn with_model(case: &MeshCase, keys: &str) -> MeshCase {
    let model = case.model.replacen("[model]\n", &format!("[model]\n{keys}\n"), 1);
    MeshCase { model, ..case.clone() }
}

fn freezing(case: &MeshCase) -> MeshCase {
    with_model(case, &format!("freeze = {}", frozen(case.name)))
}

fn of_kinds(folder: &Path, names: &[&str]) -> Vec<MeshCase> {
    cases(folder).into_iter().filter(|case| names.contains(&case.name)).collect()
}

fn in_new_folder(case: &MeshCase, parallel: &str, more: &str, ranks: usize) -> Outcome {
    let folder = tempfile::tempdir().unwrap();
    train(case, parallel, more, ranks, &folder.path().join("run"))
}

/// Whether the outcome has the same bits.
#[track_caller]
fn same_bits(a: &Outcome, b: &Outcome, what: &str) {
    assert_eq!(a.watcher.losses, b.watcher.losses, "{what}");
    for ((name, a), (other, b)) in a.weights.iter().zip(&b.weights) {
        assert!(name == other && a == b, "{name}: other bits; {what}");
    }
}

fn prepared(case: &MeshCase, parallel: &str, more: &str) -> Prepared {
    let given = Given { sets: case.given.clone(), ..Given::default() };
    Prepared::new(job(&lines(case, parallel, more)), given, 1).unwrap()
}

/// Elements of gradients that a program exchanges over ranks.
fn exchanged(program: &Program) -> usize {
    let elements = |i: &Instr| match i {
        Instr::Start(k) => program.len_of(&program.exchanges[*k].of),
        _ => 0,
    };
    program.instrs.iter().map(elements).sum()
}

fn footprint(program: &Program) -> Footprint {
    Engine::footprint(program, 1, Isa::detect())
}

/// Bytes of moments on all ranks.
fn moments(case: &MeshCase, parallel: &str) -> usize {
    let prepared = prepared(case, parallel, "");
    (0..prepared.ranks()).map(|rank| footprint(&prepared.program(rank).unwrap()).optimizer).sum()
}

#[test]
fn frozen_parameters_have_no_gradient_no_moments_and_no_exchange() {
    let folder = tempfile::tempdir().unwrap();
    for case in of_kinds(folder.path(), &["mlp", "cnn", "gpt"]) {
        for parallel in
            ["", "data = 2\n", "data = 2\nshard_gradients = true\n", "data = 2\nreproducible = true\n"]
        {
            let of = |case: &MeshCase| prepared(case, parallel, "").program(0).unwrap();
            let (all, tuned) = (of(&case), of(&freezing(&case)));
            let what = format!("{}: {parallel}", case.name);
            let graph = tuned.graph();
            let names: Vec<&str> =
                graph.params.iter().filter(|p| p.learning.frozen).map(|p| p.name.as_str()).collect();
            assert!(!names.is_empty() && names.len() < graph.params.len(), "{what}");
            assert!(graph.nodes.len() < all.graph().nodes.len(), "{what}");
            assert!(exchanged(&tuned) < exchanged(&all) || parallel.is_empty(), "{what}");
            let (a, t) = (footprint(&all), footprint(&tuned));
            assert!(t.grads + t.sums < a.grads + a.sums, "{what}: {t:?} {a:?}");
            // Ranks have whole blocks of moments, so one of them may have as many as before.
            assert!(moments(&freezing(&case), parallel) < moments(&case, parallel), "{what}");
            assert_eq!(t.params, a.params, "{what}");
            // The printed program has their names nowhere but where they are read.
            let text = tuned.to_string();
            let learns = |line: &&str| ["update params", "grads", "update "].iter().any(|w| line.contains(w));
            for line in text.lines().filter(learns) {
                let words: Vec<&str> = line.split(' ').collect();
                assert!(names.iter().all(|name| !words.contains(name)), "{what}: {line}");
            }
        }
    }
}

/// The slow twin: all gradients are computed, exchanged and applied, with a learning rate of 0.
#[test]
fn freezing_is_learning_at_a_rate_of_0() {
    let folder = tempfile::tempdir().unwrap();
    for case in of_kinds(folder.path(), &["mlp", "cnn", "gpt"]) {
        let rate_0 = format!("groups = [{{ params = {}, lr = 0.0 }}]\n", frozen(case.name));
        // On one rank updates are made at once, or after several microbatches.
        let same = "data = 2\nreproducible = true\n";
        for (parallel, more, ranks) in [("", "", 1), ("", "accumulate = 2\n", 1), (same, "", 2)] {
            let what = format!("{}: {parallel}{more}", case.name);
            let slow = in_new_folder(&case, parallel, &format!("{more}{rate_0}"), ranks);
            let fast = in_new_folder(&freezing(&case), parallel, more, ranks);
            same_bits(&slow, &fast, &what);
        }
    }
}

#[test]
fn frozen_layers_on_every_kind_of_mesh() {
    let folder = tempfile::tempdir().unwrap();
    for case in of_kinds(folder.path(), &["mlp", "cnn", "gpt"]) {
        let start = folder.path().join(format!("{}-start", case.name));
        let start = train(&case, "", "", 1, &start).summary.model;
        let before = read_weights(&start).unwrap();
        let case = with_model(&freezing(&case), &format!("weights = {start:?}"));
        let one = in_new_folder(&case, "", "accumulate = 2\nclip = 1.0\n", 1);
        let names = frozen_names(&case);
        let mut meshes = vec![
            ("data = 2\n", 2),
            ("data = 2\nshard_optimizer = false\n", 2),
            ("data = 2\nshard_gradients = true\n", 2),
            ("data = 2\nshard_weights = true\n", 2),
            ("tensor = 2\n", 2),
            ("stage = 2\n", 2),
            ("stage = 4\nschedule = \"zb-h1\"\n", 4),
            ("data = 2\ntensor = 2\nstage = 2\nshard_weights = true\n", 8),
        ];
        if case.name == "gpt" {
            meshes.push(("sequence = 2\n", 2));
            meshes.push(("stage = 2\nschedule = \"2bw\"\nflush_every = 1\n", 2));
        }
        for (parallel, ranks) in meshes {
            let parallel = format!("{parallel}microbatches = 2\nsync_batch_norm = true\n");
            let what = format!("{}: {parallel}", case.name);
            let many = in_new_folder(&case, &parallel, "clip = 1.0\n", ranks);
            agree(&one, &many, &what);
            for weight in before.iter().filter(|w| names.contains(&w.name)) {
                let (_, now) = many.weights.iter().find(|(name, _)| *name == weight.name).unwrap();
                assert!(*now == weight.data, "{}: frozen, and has other bits; {what}", weight.name);
            }
        }
    }
}

fn frozen_names(case: &MeshCase) -> Vec<String> {
    let program = prepared(case, "", "").program(0).unwrap();
    program.graph().params.iter().filter(|p| p.learning.frozen).map(|p| p.name.clone()).collect()
}

/// Moments of what is learnt, averaged weights, and rates by group go on as they were.
#[test]
fn a_tuned_run_resumes_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let more = "ema = 0.9\ngroups = [{ params = [\"*.bias\"], lr = 0.002, weight_decay = 0.0 }]\n";
    for case in of_kinds(folder.path(), &["mlp", "cnn", "gpt"]) {
        for (parallel, ranks) in [("", 1), ("data = 2\n", 2), ("data = 2\nshard_gradients = true\n", 2)] {
            let lines = lines(&freezing(&case), parallel, more);
            let job = job(&with_optimizer(&lines, "{ kind = \"adamw\", lr = 1e-3, weight_decay = 0.1 }"));
            let given = || Given { sets: case.given.clone(), ..Given::default() };
            let path =
                |name: &str| folder.path().join(format!("{}-{ranks}-{}-{name}", case.name, parallel.len()));
            let whole = run(&job, given(), ranks, &path("whole"), None).unwrap();
            let first = run(&job, given(), ranks, &path("cut"), Some(7)).unwrap();
            let mut rest = run(&job, given(), ranks, &path("cut"), None).unwrap();
            rest.watcher.losses.splice(0..0, first.watcher.losses);
            same_bits(&whole, &rest, &format!("{}: {parallel}", case.name));
        }
    }
}

#[test]
fn groups_have_rates_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let adamw = |lines: String, lr: &str, decay: &str| {
        let words = format!("{{ kind = \"adamw\", lr = {lr}, weight_decay = {decay} }}");
        job(&with_optimizer(&lines, &words))
    };
    for case in of_kinds(folder.path(), &["mlp", "gpt"]) {
        let given = || Given { sets: case.given.clone(), ..Given::default() };
        let of = |job, ranks, name: &str| {
            run(&job, given(), ranks, &folder.path().join(format!("{}-{name}", case.name)), None).unwrap()
        };
        // A group of everything is another learning rate: here the product is exact.
        let all = "groups = [{ params = [\"*\"], lr = 0.004, weight_decay = 0.25 }]\n";
        let grouped = of(adamw(lines(&case, "", all), "0.001", "0.0"), 1, "all");
        let plain = of(adamw(lines(&case, "", ""), "0.004", "0.25"), 1, "plain");
        same_bits(&grouped, &plain, case.name);
        // Several groups, and ranks that each update a part of the parameters.
        let some = "groups = [{ params = [\"*.bias\"], weight_decay = 0.0 }, { params = [\"*.weight\"], lr = 0.004 }]\n";
        let one = of(adamw(lines(&case, "", some), "0.001", "0.1"), 1, "one");
        let other = of(adamw(lines(&case, "", ""), "0.001", "0.1"), 1, "other");
        assert!(one.watcher.losses[19] != other.watcher.losses[19], "groups change something");
        for (k, parallel) in
            ["data = 2\n", "data = 2\nshard_gradients = true\n", "data = 2\nshard_weights = true\n"]
                .into_iter()
                .enumerate()
        {
            let mut job = adamw(lines(&case, parallel, some), "0.001", "0.1");
            job.parallel.ranks = Some(2);
            agree(&one, &of(job, 2, &format!("many{k}")), &format!("{}: {parallel}", case.name));
        }
    }
}

#[test]
fn what_cannot_be_tuned_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let case = of_kinds(folder.path(), &["mlp"]).remove(0);
    let said = |model: &str, more: &str| {
        let given = Given { sets: case.given.clone(), ..Given::default() };
        let job = job(&lines(&with_model(&case, model), "", more));
        Prepared::new(job, given, 1).map(|_| ()).unwrap_err().to_string()
    };
    let check = |model: &str, more: &str, parts: &[&str]| {
        let said = said(model, more);
        assert!(parts.iter().all(|part| said.contains(part)), "{said}");
    };
    check("freeze = [\"layer1.*\"]", "", &["model.freeze", "layer1.*", "fc1, fc2"]);
    check("freeze = [\"fc1.wieght\"]", "", &["did you mean \"fc1.weight\"?"]);
    check("freeze = [\"*\"]", "", &["nothing to train"]);
    check("", "groups = [{ params = [\"head\"], lr = 0.1 }]\n", &["train.groups", "head"]);
    check("freeze = [\"fc1\"]", "groups = [{ params = [\"fc1.*\"], lr = 0.1 }]\n", &["model.freeze"]);
}

/// Images of five classes, for networks that knew four.
const FIVE: &str = "[data]\nkind = \"synthetic\"\nshape = [3, 8, 8]\nclasses = 5\nsamples = 60\n[train]\nsteps = 3\nbatch = 12\n\
                    [output]\nevery_epochs = 0\ntensorboard = false\n";

#[test]
fn a_new_head_takes_the_place_of_the_files() {
    let folder = tempfile::tempdir().unwrap();
    let case = of_kinds(folder.path(), &["cnn"]).remove(0);
    let start = train(&case, "", "", 1, &folder.path().join("start")).summary.model;
    // A file with other names, and tensors that are not wanted.
    let mut weights = read_weights(&start).unwrap();
    let extra = weights[0].clone();
    weights.iter_mut().for_each(|w| w.name = format!("backbone.{}", w.name));
    weights.push(Weight { name: "decoder.weight".into(), ..extra });
    let renamed = folder.path().join("renamed.safetensors");
    write_weights(&renamed, &weights.iter().map(Weight::view).collect::<Vec<_>>(), None).unwrap();
    let rules = "map = [{ from = \"backbone.*\", to = \"*\" }, { from = \"decoder.*\", to = \"\" }]";
    for (k, (file, map)) in [(&start, ""), (&renamed, rules)].into_iter().enumerate() {
        let tuned = |more: &str| {
            let model =
                format!("[model]\nkind = \"cnn\"\nwidths = [8, 16, 16]\nweights = {file:?}\n{map}\n{more}\n");
            job(&format!("{model}{FIVE}"))
        };
        let here = folder.path().join(format!("tuned{k}"));
        let kept = "freeze = [\"conv\", \"norm\"]";
        let outcome =
            run(&tuned(&format!("head = \"new\"\n{kept}")), Given::default(), 1, &here, None).unwrap();
        for (name, data) in &outcome.weights {
            let before = weights.iter().find(|w| w.name == format!("backbone.{name}")).unwrap();
            match name.as_str() {
                "head.weight" | "head.bias" => assert_eq!(data.len() * 4, before.data.len() * 5, "{name}"),
                // In training running statistics move, also those of frozen layers.
                name if name.contains("running") => assert!(*data != before.data, "{name}"),
                name => assert!(*data == before.data, "{name}: frozen, and has other bits"),
            }
        }
        let outline = Prepared::new(tuned("head = \"new\""), Given::default(), 1).unwrap();
        let outline = outline.outline(Path::new("run"), 0).unwrap();
        assert!(outline.weights.unwrap().ends_with("new: head.weight, head.bias"));
        let refused = run(&tuned(""), Given::default(), 1, &folder.path().join("refused"), None);
        let said = refused.map(|_| ()).unwrap_err().to_string();
        assert!(said.contains("head.weight") && said.contains("model.head = \"new\""), "{said}");
    }
    // Rules that fit nothing, and two tensors with one name.
    let with_map = |map: &str| {
        let model = format!(
            "[model]\nkind = \"cnn\"\nwidths = [8, 16, 16]\nhead = \"new\"\nweights = {renamed:?}\nmap = {map}\n"
        );
        let refused =
            run(&job(&format!("{model}{FIVE}")), Given::default(), 1, &folder.path().join("refused"), None);
        refused.map(|_| ()).unwrap_err().to_string()
    };
    let said = with_map("[{ from = \"encoder.*\", to = \"*\" }]");
    assert!(said.contains("\"encoder.*\"") && said.contains("backbone."), "{said}");
    let said = with_map("[{ from = \"*.weight\", to = \"head.weight\" }]");
    assert!(said.contains("two tensors would be called head.weight"), "{said}");
}
