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
    let rule = "parallel.sync={start='allreduce', then='local', after=2}";
    refused(&[rule], "add --set parallel.sync=allreduce or --set parallel.sync=local");
}
