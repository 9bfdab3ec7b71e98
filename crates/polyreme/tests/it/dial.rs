//! Ways in which ranks agree, through the binary: steps that ranks take by themselves, in processes over sockets.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::binary::{folder, json, polyreme, root};

/// The digits that ship with the repository, for as long as the test says. An epoch is 20 steps, none of them short.
fn digits(length: &str) -> String {
    let job = fs::read_to_string(root().join("examples/digits.toml")).unwrap();
    let data = root().join("examples/data/digits");
    let job = job.replace("data/digits", data.to_str().unwrap()).replace("epochs = 25", length);
    job.replace("[data]\n", "[data]\nfraction = 0.9899\n")
}

const OVER_SOCKETS: [&str; 5] = ["--processes", "2", "--transport", "tcp", "--json"];
const LOCAL: [&str; 4] = ["--set", "parallel.sync=local", "--set", "parallel.every=10"];
const OUTER: [&str; 2] = ["--set", "parallel.outer={ lr = 0.7, momentum = 0.9 }"];

/// The last line of a run.
fn train(folder: &Path, output: &str, more: &[&[&str]]) -> Value {
    let args = ["train", "job.toml", "--output", output];
    json(folder, &[&args[..], &more.concat()].concat()).pop().unwrap()
}

/// Weights of two processes are sent once where gradients are sent ten times.
#[test]
fn ten_steps_by_themselves_send_a_tenth_of_the_bytes() {
    let folder = folder(&digits("steps = 40"));
    let sent = |run: &Value| run["wire_bytes"].as_u64().unwrap() as f64;
    let each = train(folder.path(), "each", &[&OVER_SOCKETS]);
    let local = train(folder.path(), "local", &[&OVER_SOCKETS, &LOCAL]);
    let ratio = sent(&local) / sent(&each);
    // The totals of each step are sent beside the weights.
    assert!((0.1..0.102).contains(&ratio), "{ratio} of the bytes");
    assert_eq!(local["ledger"], each["ledger"], "the same samples counted");
    assert_eq!(local["ledger"]["exact"], true, "{local}");
}

/// Four ranks, threads with weights of their own, come to an accuracy within two points of gradients that are summed in each step.
#[test]
fn digits_are_learnt_by_ranks_by_themselves() {
    let folder = folder(&digits("epochs = 10"));
    let accuracy = |run: &Value| run["metrics"]["test_accuracy"].as_f64().unwrap();
    let four = ["--ranks", "4", "--json"];
    let each = accuracy(&train(folder.path(), "each", &[&four]));
    let local = accuracy(&train(folder.path(), "local", &[&four, &LOCAL, &["--set", "parallel.every=5"]]));
    assert!(each > 0.95 && local > each - 0.02, "{local} for {each}");
}

/// A run that is resumed has the bits of one that went on: what each rank's optimizer remembers is saved, and the velocity of outer steps. And
/// it can go on with another way to agree, and back.
#[test]
fn a_resumed_run_has_the_same_bits_and_the_dial_can_be_turned() {
    let job =
        digits("steps = 40").replace("best = \"val_loss\"", "best = \"none\"\nevery_steps = 15\nkeep = 9");
    let folder = folder(&job);
    let model = |run: &str| fs::read(folder.path().join(run).join("model.safetensors")).unwrap();
    train(folder.path(), "run", &[&OVER_SOCKETS, &LOCAL, &OUTER]);
    let (whole, from) = (model("run"), "run/checkpoints/step-00000015");
    for (file, of_each) in [("moment1-of-ranks", true), ("moment2-of-ranks", true), ("velocity", false)] {
        let bytes = fs::read(folder.path().join(from).join(file).with_extension("safetensors")).unwrap();
        assert_eq!(bytes.windows(6).any(|w| w == b"rank1."), of_each, "{file}");
    }
    let copy = |to: &str| {
        let to = folder.path().join(to).join("checkpoints/step-00000015");
        fs::create_dir_all(&to).unwrap();
        for file in fs::read_dir(folder.path().join(from)).unwrap().flatten() {
            fs::copy(file.path(), to.join(file.file_name())).unwrap();
        }
    };
    ["turned", "alone"].into_iter().for_each(copy);
    json(folder.path(), &[&["resume", from][..], &OVER_SOCKETS].concat());
    assert!(model("run") == whole, "the same bits");
    // Gradients in every step from here on: 25 of them.
    let turned = ["resume", "turned", "--set", "parallel.sync=allreduce"];
    let each = json(folder.path(), &[&turned[..], &OVER_SOCKETS].concat()).pop().unwrap();
    assert_eq!(each["steps"], 40);
    assert!(each["wire_bytes"].as_u64().unwrap() > 25 * 2 * 4 * 40_000, "{each}");
    assert!(model("turned") != whole);
    // And back, from the checkpoint of its step 30, which has no velocity.
    let back = ["resume", "turned/checkpoints/step-00000030", "--set", "parallel.sync=local"];
    let local = json(folder.path(), &[&back[..], &OVER_SOCKETS].concat()).pop().unwrap();
    assert!(local["wire_bytes"].as_u64().unwrap() * 4 < each["wire_bytes"].as_u64().unwrap(), "{local}");
    // One rank has no others to agree with.
    let alone = json(folder.path(), &["resume", "alone", "--ranks", "1", "--json"]).pop().unwrap();
    assert_eq!((&alone["wire_bytes"], &alone["steps"]), (&0.into(), &40.into()));
}

/// A rule turns the dial in the middle of a run: with the bits of a run that was stopped there and resumed in the other way, before it and after
/// it, and from processes as from threads.
#[test]
fn a_rule_turns_the_dial_with_the_bits_of_resume() {
    let job =
        digits("steps = 40").replace("best = \"val_loss\"", "best = \"none\"\nevery_steps = 10\nkeep = 9");
    let folder = folder(&job);
    let numbers = |run: &str| {
        let file = fs::read(folder.path().join(run).join("model.safetensors")).unwrap();
        let header = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        file[8 + header..].to_vec()
    };
    let every = ["--set", "parallel.every=7"];
    let rule = |start: &str, then: &str| {
        format!("parallel.sync={{ start = \"{start}\", then = \"{then}\", after = 20 }}")
    };
    // By hand: twenty steps in one way, and twenty in the other.
    let by_hand = |start: &str, then: &str, run: &str, how: &[&str]| {
        train(folder.path(), run, &[how, &every, &["--set", &format!("parallel.sync={start}")]]);
        let from = format!("{run}/checkpoints/step-00000020");
        let then = format!("parallel.sync={then}");
        json(folder.path(), &[&["resume", &from, "--set", &then][..], &every, how].concat());
        numbers(run)
    };
    let want = by_hand("allreduce", "local", "hand", &OVER_SOCKETS);
    let lines = |output: &str, rule: &str, how: &[&str]| {
        json(
            folder.path(),
            &[&["train", "job.toml", "--output", output, "--set", rule][..], &every, how].concat(),
        )
    };
    let said = lines("ruled", &rule("allreduce", "local"), &OVER_SOCKETS);
    let turned: Vec<&Value> = said.iter().filter(|line| line["event"] == "turned").collect();
    assert!(turned.len() == 1 && turned[0]["step"] == 20 && turned[0]["sync"] == "local", "{turned:?}");
    assert_eq!(said.iter().filter(|line| line["event"] == "started").count(), 1);
    let end = said.last().unwrap();
    assert_eq!((&end["steps"], &end["ledger"]["exact"]), (&40.into(), &true.into()), "{end}");
    // Twenty sums of gradients, and meetings after 7, 3, 7 and 3 steps.
    let once = 2 * 4 * 40_000;
    let sent = end["wire_bytes"].as_u64().unwrap();
    assert!((24 * once..2 * 24 * once).contains(&sent), "{end}");
    assert!(numbers("ruled") == want, "the same bits");
    // Whoever resumes it need not know of the rule.
    for step in [10, 20, 30] {
        let from = format!("ruled/checkpoints/step-{step:08}");
        json(folder.path(), &[&["resume", &from][..], &OVER_SOCKETS].concat());
        assert!(numbers("ruled") == want, "the same bits from step {step}");
    }
    let threads = ["--ranks", "2", "--json"];
    let want = by_hand("local", "ps", "hand-ps", &threads);
    lines("ruled-ps", &rule("local", "ps"), &threads);
    assert!(numbers("ruled-ps") == want, "the same bits");
}

/// Numbers of a tensor in a file of weights.
fn tensor(file: &Path, name: &str) -> Vec<f32> {
    let bytes = fs::read(file).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
    let [from, to] = [0, 1].map(|k| 8 + len + header[name]["data_offsets"][k].as_u64().unwrap() as usize);
    bytes[from..to].chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect()
}

/// What a rank keeps for itself is not sent, is saved for each, and comes back bit for bit; one model has the mean of it.
#[test]
fn ranks_keep_a_head_of_their_own() {
    let job =
        digits("steps = 40").replace("best = \"val_loss\"", "best = \"none\"\nevery_steps = 15\nkeep = 9");
    let folder = folder(&job);
    let own = ["--set", "parallel.own=[\"9\"]"];
    let common = train(folder.path(), "common", &[&OVER_SOCKETS, &LOCAL]);
    let run = train(folder.path(), "run", &[&OVER_SOCKETS, &LOCAL, &OUTER, &own]);
    let sent = |run: &Value| run["wire_bytes"].as_u64().unwrap();
    // Of 43,056 numbers with what fills up cache lines, the head is 640 and 16; ranks meet after 10, 15, 20, 30 and 40 steps, and each sends half of
    // the numbers twice.
    assert_eq!(sent(&common) - sent(&run), 2 * 4 * 656 * 5, "{run}");
    let file = |run: &str| folder.path().join(run).join("model.safetensors");
    let whole = fs::read(file("run")).unwrap();
    for step in [15, 30] {
        let of = |name: &str| {
            let at = folder.path().join(format!("run/checkpoints/step-{step:08}"));
            tensor(
                &at.join(if name.starts_with("rank") { "own-of-ranks" } else { "model" })
                    .with_extension("safetensors"),
                name,
            )
        };
        let (a, b, mean) = (of("rank0.9.weight"), of("rank1.9.weight"), of("9.weight"));
        assert!(a != b && mean.iter().zip(a.iter().zip(&b)).all(|(m, (a, b))| *m == (a + b) / 2.0));
        assert_eq!(mean.len(), 640);
    }
    // What was evaluated is the model that was written.
    let eval = json(folder.path(), &["eval", "run", "--json"]).pop().unwrap();
    assert_eq!(eval["metrics"]["test_accuracy"], run["metrics"]["test_accuracy"], "{eval}");
    let from = "run/checkpoints/step-00000015";
    let copy = |to: &str| {
        let to = folder.path().join(to).join("checkpoints/step-00000015");
        fs::create_dir_all(&to).unwrap();
        for file in fs::read_dir(folder.path().join(from)).unwrap().flatten() {
            fs::copy(file.path(), to.join(file.file_name())).unwrap();
        }
    };
    ["turned", "three"].into_iter().for_each(copy);
    json(folder.path(), &[&["resume", from][..], &OVER_SOCKETS].concat());
    assert!(fs::read(file("run")).unwrap() == whole, "the same bits");
    // Over shared memory and from threads they are the same too.
    for (output, how) in [("shm", ["--processes", "2", "--json"]), ("threads", ["--ranks", "2", "--json"])] {
        train(folder.path(), output, &[&how, &LOCAL, &OUTER, &own]);
        assert_eq!(tensor(&file(output), "9.weight"), tensor(&file("run"), "9.weight"), "{output}");
    }
    // Ranks that have all in common start from the mean, as does another number of ranks.
    let turn = ["resume", "turned", "--set", "parallel.sync=allreduce"];
    let refused = polyreme(folder.path(), &[&turn[..], &OVER_SOCKETS].concat());
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("or own = []"), "{said}");
    let turned = json(folder.path(), &[&turn[..], &["--set", "parallel.own=[]"], &OVER_SOCKETS].concat());
    assert_eq!(turned.last().unwrap()["steps"], 40);
    let three = json(folder.path(), &["resume", "three", "--ranks", "3", "--json"]).pop().unwrap();
    assert_eq!(three["steps"], 40);
}

/// Differences of weights travel in every format: ranks come to the accuracy of f32, and send the stated share of its bytes.
#[test]
fn differences_of_weights_take_fewer_bytes() {
    let folder = folder(&digits("epochs = 8"));
    let accuracy = |run: &Value| run["metrics"]["test_accuracy"].as_f64().unwrap();
    // What is sent beside differences: 72 bytes for each of 160 steps, by each of two ranks.
    let sent = |run: &Value| (run["wire_bytes"].as_u64().unwrap() - 2 * 72 * 160) as f64;
    let five = ["--set", "parallel.every=5"];
    let plain = train(folder.path(), "f32", &[&OVER_SOCKETS, &LOCAL, &five]);
    assert!(accuracy(&plain) > 0.96, "{plain}");
    // Of 43,056 numbers, matrices of 32x288 and 64x512 are eight columns and rows; those of 32x9 and 10x64 would not become half as short.
    let factors = (288 + 8 * (320 + 576) + 640 + 144) as f64 / 43_056.0;
    let shares = [
        ("kind = \"bf16\"", 0.5),
        ("kind = \"int8\"", 0.25 + 1.0 / 256.0),
        ("kind = \"topk\", share = 0.1", 0.15),
        ("kind = \"onebit\"", 1.0 / 32.0 + 1.0 / 256.0),
        ("kind = \"powersgd\", rank = 8", factors),
    ];
    for (k, (wire, share)) in shares.into_iter().enumerate() {
        let wire = format!("parallel.wire={{ force = true, {wire} }}");
        let more = [&five[..], &["--set", &wire]].concat();
        let coded = train(folder.path(), &format!("coded{k}"), &[&OVER_SOCKETS, &LOCAL, &more]);
        let (a, b) = (accuracy(&coded), accuracy(&plain));
        assert!(a > b - 0.02, "{wire}: {a} for {b}");
        let ratio = sent(&coded) / sent(&plain);
        assert!((ratio - share).abs() < 0.0025, "{wire}: {ratio} of the bytes for {share}");
    }
}

/// What codes of differences lost is saved for each rank, and is no part of gradients.
#[test]
fn a_resumed_run_sends_what_codes_had_lost() {
    let job =
        digits("steps = 40").replace("best = \"val_loss\"", "best = \"none\"\nevery_steps = 15\nkeep = 9");
    let folder = folder(&job);
    let file = || fs::read(folder.path().join("run/model.safetensors")).unwrap();
    let from = "run/checkpoints/step-00000015";
    for wire in
        ["{ kind = \"topk\", force = true }", "{ kind = \"powersgd\", rank = 1, force = true, start = 12 }"]
    {
        let wire = format!("parallel.wire={wire}");
        train(folder.path(), "run", &[&OVER_SOCKETS, &LOCAL, &OUTER, &["--set", &wire]]);
        let whole = file();
        let residual = folder.path().join(from).join("residual-of-weights.safetensors");
        assert!(fs::read(&residual).unwrap().windows(6).any(|w| w == b"rank1."), "each rank has its own");
        json(folder.path(), &[&["resume", from][..], &OVER_SOCKETS].concat());
        assert!(file() == whole, "{wire}: the same bits");
        // Gradients from there on start with nothing lost.
        let turned = ["resume", from, "--set", "parallel.sync=allreduce"];
        let each = json(folder.path(), &[&turned[..], &OVER_SOCKETS].concat()).pop().unwrap();
        assert_eq!(each["steps"], 40);
        fs::remove_dir_all(folder.path().join("run")).unwrap();
    }
}

/// Ranks that have come too far meet early: so early that it is as with fewer steps, never, or in between; and a resumed run sees what the run saw.
#[test]
fn ranks_that_have_come_too_far_meet() {
    let job =
        digits("steps = 40").replace("best = \"val_loss\"", "best = \"none\"\nevery_steps = 20\nkeep = 9");
    let folder = folder(&job);
    let run = |output: &str, every: &str| {
        let every = format!("parallel.every={every}");
        let end = train(folder.path(), output, &[&OVER_SOCKETS, &LOCAL, &OUTER, &["--set", &every]]);
        assert_eq!(end["ledger"]["exact"], true, "{end}");
        (
            tensor(&folder.path().join(output).join("model.safetensors"), "9.weight"),
            end["wire_bytes"].as_u64().unwrap(),
        )
    };
    // Two numbers of each rank at each look, and the totals of each step that might have been made.
    let (look, totals) = (2 * 16, 2 * 72);
    let (five, often) = run("five", "5");
    // Of each 20 steps up to an evaluation there are runs of up to 20, 15, 10 and 5 steps.
    let near = run("near", "{ steps = 20, drift = 1e-9, look = 4 }");
    assert_eq!(near, (five, often + 2 * (3 * look + 30 * totals)));
    let (twenty, seldom) = run("twenty", "20");
    // After 4, 8, 12 and 16 steps of each 20.
    assert_eq!(run("far", "{ steps = 20, drift = 1e9, look = 4 }"), (twenty, seldom + 8 * look));
    let some = |drift: &&str| run(drift, &format!("{{ steps = 20, drift = {drift}, look = 4 }}"));
    let some = ["0.05", "0.1", "0.2", "0.3", "0.4", "0.6"].iter().map(|drift| (drift, some(drift)));
    let between = |(_, (_, sent)): &(_, (Vec<f32>, u64))| (seldom + 50 * look..often).contains(sent);
    let (drift, (weights, _)) = some.into_iter().find(between).expect("a bound between the two");
    json(
        folder.path(),
        &[&["resume", &format!("{drift}/checkpoints/step-00000020")][..], &OVER_SOCKETS].concat(),
    );
    let again = tensor(&folder.path().join(drift).join("model.safetensors"), "9.weight");
    assert!(again == weights, "the same bits with {drift}");
}

/// Parts of the model take turns, and steps go on meanwhile: the bytes are as stated, a resumed run has the same bits, and digits are learnt.
#[test]
fn parts_of_the_model_take_turns() {
    let job =
        digits("steps = 40").replace("best = \"val_loss\"", "best = \"none\"\nevery_steps = 20\nkeep = 9");
    let folder = folder(&job);
    let turns = ["--set", "parallel.every=8", "--set", "parallel.fragments=4", "--set", "parallel.overlap=2"];
    let run = train(folder.path(), "run", &[&OVER_SOCKETS, &LOCAL, &turns, &OUTER]);
    // Of 20 steps a part is sent after 2, 4, ... and 16, and all of it at the end: three times the 43,056 numbers of the model.
    assert_eq!(run["wire_bytes"], 2 * (2 * 3 * 4 * 43_056 + 40 * 72), "{run}");
    assert_eq!(run["ledger"]["exact"], true, "{run}");
    let file = |run: &str| folder.path().join(run).join("model.safetensors");
    let whole = fs::read(file("run")).unwrap();
    json(folder.path(), &[&["resume", "run/checkpoints/step-00000020"][..], &OVER_SOCKETS].concat());
    assert!(fs::read(file("run")).unwrap() == whole, "the same bits");
    let threads = ["--ranks", "2", "--json"];
    train(folder.path(), "threads", &[&threads, &LOCAL, &turns, &OUTER]);
    assert_eq!(tensor(&file("threads"), "9.weight"), tensor(&file("run"), "9.weight"));
    let coded = ["--set", "parallel.wire={ kind = \"int8\", force = true }"];
    let coded = train(folder.path(), "coded", &[&OVER_SOCKETS, &LOCAL, &turns, &coded]);
    assert!(coded["wire_bytes"].as_u64().unwrap() * 3 < run["wire_bytes"].as_u64().unwrap(), "{coded}");
    let many = ["train", "job.toml", "--ranks", "2", "--output", "many", "--set", "parallel.fragments=9"];
    let out = polyreme(folder.path(), &[&many[..], &LOCAL].concat());
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.code() == Some(2) && said.contains("choose at most 8"), "{said}");
    fs::write(folder.path().join("job.toml"), digits("epochs = 10")).unwrap();
    let accuracy = |output: &str, more: &[&str]| {
        let end = train(folder.path(), output, &[&threads, &LOCAL, more]);
        end["metrics"]["test_accuracy"].as_f64().unwrap()
    };
    let (in_turn, at_once) =
        (accuracy("in-turn", &turns), accuracy("at-once", &["--set", "parallel.every=8"]));
    assert!(at_once > 0.94 && in_turn > at_once - 0.02, "{in_turn} for {at_once}");
}

/// A pattern must name something that is learnt, and leave something.
#[test]
fn what_cannot_be_kept_is_refused() {
    let folder = folder(&digits("steps = 4"));
    for (own, freeze, want) in [
        ("[\"head\"]", "[]", "`parallel.own`: the model has no parameter \"head\""),
        ("[\"0\"]", "[\"0\"]", "all that are called so are frozen"),
        ("[\"*\"]", "[]", "ranks would have nothing to agree on"),
    ] {
        let (own, freeze) = (format!("parallel.own={own}"), format!("model.freeze={freeze}"));
        let args = ["train", "job.toml", "--set", &own, "--set", &freeze, "--ranks", "2", "--output", "run"];
        let out = polyreme(folder.path(), &[&args[..], &LOCAL].concat());
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.code() == Some(2) && said.contains(want), "{said}");
        assert!(!folder.path().join("run").exists(), "no folder is made");
    }
}

/// Plans know steps that ranks take by themselves, formats on the wire and parameter servers; of a rule they say what to do.
#[test]
fn plans_know_the_dial_and_formats() {
    let folder = folder(&digits("steps = 4"));
    let links = "[[hosts]]\ncount = 4\ncores = 1\nmemory_gib = 4\ngflops = 20\ncore_gbs = 8\n[between]\nlatency_us = 100\ngbits = 0.01\n";
    std::fs::write(folder.path().join("slow.toml"), links).unwrap();
    let step_ms = |sets: &[&str]| {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        let plan = [
            "plan",
            "job.toml",
            "--cluster",
            "slow.toml",
            "--json",
            "--set",
            "parallel.ranks=4",
            "--set",
            "parallel.data=4",
        ];
        let plans = json(folder.path(), &[&plan, &sets[..]].concat());
        assert!(
            plans.iter().all(|plan| plan["data"] == 4 && plan["step_ms"].as_f64().is_some()),
            "{plans:?}"
        );
        plans[0]["step_ms"].as_f64().unwrap()
    };
    let sums = step_ms(&[]);
    let local = |every: &str| step_ms(&["parallel.sync=local", every]);
    let (ten, forty) = (local("parallel.every=10"), local("parallel.every=40"));
    // What is sent is most of such a step: with a tenth of the exchanges it takes little more than a tenth of the time.
    assert!(forty < ten && ten < 0.3 * sums, "{sums} {ten} {forty}");
    let [bf16, int8] = ["bf16", "int8"].map(|wire| step_ms(&[&format!("parallel.wire={wire}")]));
    assert!(int8 < bf16 && bf16 < 0.7 * sums, "{sums} {bf16} {int8}");
    let refused = |sets: &[&str], part: &str| {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        let out = polyreme(folder.path(), &[&["plan", "job.toml"][..], &sets[..]].concat());
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(!out.status.success() && said.contains(part), "{said}");
    };
    // One server has all gradients of four ranks on its link, four have a quarter of them each.
    let served = |sync: &str, servers: &str| {
        step_ms(&[&format!("parallel.sync={sync}"), &format!("parallel.servers={servers}")])
    };
    let (one, four) = (served("ps", "1"), served("ps", "4"));
    assert!(one > 1.8 * four && four < 2.0 * sums, "{sums} {one} {four}");
    // Without waiting for each other, one rank's letters travel while others compute; a step is one rank's.
    let free = served("ps-async", "4");
    assert!(free <= 1.05 * four, "{four} {free}");
    // What else local steps have: parts in turn send the model once in as many steps, codes of differences less of it.
    let parts = step_ms(&["parallel.sync=local", "parallel.every=40", "parallel.fragments=2"]);
    assert!(parts > 0.8 * forty && parts < 2.0 * forty, "{forty} {parts}");
    let coded = step_ms(&["parallel.sync=local", "parallel.every=40", "parallel.wire=int8"]);
    let bounded = step_ms(&["parallel.sync=local", "parallel.every={ steps = 40, drift = 0.5 }"]);
    assert!(coded < forty && bounded < 1.5 * forty, "{forty} {coded} {bounded}");
    refused(
        &["parallel.sync=ps", "parallel.servers.ranks=1", "parallel.ranks=4"],
        "add --set parallel.servers=1",
    );
    refused(
        &["parallel.sync=ps", "parallel.reproducible=true", "parallel.ranks=4"],
        "add --set parallel.reproducible=false",
    );
    // What plans predict can be measured, between processes that agree on nothing but when to begin too.
    let step = [
        "bench",
        "step",
        "--job",
        "mlp",
        "--threads",
        "1",
        "--steps",
        "3",
        "--json",
        "--servers",
        "2",
        "--free",
    ];
    let measured = json(folder.path(), &[&step[..], &["--processes", "2", "--transport", "tcp"]].concat());
    assert!(measured[0]["step_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{measured:?}");
    let rule = "parallel.sync={start='allreduce', then='local', after=2}";
    refused(&[rule], "add --set parallel.sync=allreduce or --set parallel.sync=local");
}
