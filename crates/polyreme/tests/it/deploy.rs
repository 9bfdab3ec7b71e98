//! Manifests and scripts in `deploy/`, and documents: they can be read, and every command and flag in them exists.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use yaml_rust2::{Yaml, YamlLoader};

use crate::binary::{command, polyreme, root};

/// The help of a subcommand such as `bench collective`, asked once.
struct Helps(HashMap<String, Option<String>>);

impl Helps {
    fn of(&mut self, command: &str) -> Option<&str> {
        let ask = || {
            let words: Vec<_> = command.split(' ').chain(["--help"]).collect();
            let out = polyreme(Path::new("."), &words);
            out.status.success().then(|| String::from_utf8(out.stdout).unwrap())
        };
        self.0.entry(command.into()).or_insert_with(ask).as_deref()
    }

    /// Checks a call, the words after `polyreme`.
    #[track_caller]
    fn check(&mut self, words: &[&str], place: &str) {
        let Some(&command) = words.first() else { return };
        let mut command = command.to_string();
        if matches!(command.as_str(), "bench" | "data") {
            command = format!("{command} {}", words[1]);
        }
        // Under `launch` flags may be those of the command that is launched.
        let mut known = self
            .of(&command)
            .unwrap_or_else(|| panic!("{place}: {words:?}: no command {command}"))
            .to_string();
        if command == "launch" {
            let inner = if words.contains(&"resume") { "resume" } else { "train" };
            known.push_str(self.of(inner).unwrap());
        }
        for flag in words.iter().filter(|w| w.starts_with("--")) {
            let name = flag.split('=').next().unwrap();
            let found = known.split(|c: char| !(c.is_alphanumeric() || c == '-')).any(|w| w == name);
            assert!(found, "{place}: {command} has no {name}");
        }
    }

    /// Checks every call in a text: `polyreme` and what follows on the line.
    fn check_text(&mut self, text: &str, place: &str) -> usize {
        let mut n = 0;
        for line in text.lines() {
            for call in line.split("polyreme ").skip(1) {
                // What follows a comment, a quote, a semicolon or the end of a table's cell is not the call.
                let call = call.split(['#', '`', ';', '|', '"', '\\']).next().unwrap();
                let words: Vec<_> = call.split_whitespace().collect();
                let is_call = words.first().is_some_and(|w| self.of(w).is_some() || self.is_close(w));
                if is_call {
                    self.check(&words, place);
                    n += 1;
                }
            }
        }
        n
    }

    /// Prose may follow the name; a word that looks like a command must be one.
    fn is_close(&self, word: &str) -> bool {
        ["train", "resume", "launch", "bench", "doctor", "eval", "predict", "coordinator", "join", "status"]
            .contains(&word)
    }
}

fn helps() -> Helps {
    Helps(HashMap::new())
}

fn documents(file: &str) -> Vec<Yaml> {
    let text = fs::read_to_string(root().join(file)).unwrap();
    YamlLoader::load_from_str(&text).unwrap_or_else(|e| panic!("{file}: {e}"))
}

/// The program and the arguments of each container below a node.
fn containers(node: &Yaml, found: &mut Vec<(String, Vec<String>)>) {
    match node {
        Yaml::Hash(map) => {
            for (key, value) in map {
                if key.as_str() == Some("containers") {
                    for c in value.as_vec().unwrap() {
                        let words = |key: &str| {
                            let list = c[key].as_vec().cloned().unwrap_or_default();
                            list.iter().map(|w| w.as_str().unwrap().to_string()).collect::<Vec<_>>()
                        };
                        let all = [words("command"), words("args")].concat();
                        found.push((c["name"].as_str().unwrap().into(), all));
                    }
                }
                containers(value, found);
            }
        }
        Yaml::Array(list) => list.iter().for_each(|n| containers(n, found)),
        _ => {}
    }
}

/// The commands of a file's containers of this name.
pub(crate) fn commands_of(file: &str, container: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    documents(file).iter().for_each(|document| containers(document, &mut found));
    found.into_iter().filter(|(name, _)| name == container).map(|(_, words)| words).collect()
}

#[test]
fn the_pytorch_job_is_what_its_operator_wants() {
    let documents = documents("deploy/kubernetes/pytorchjob.yaml");
    let [secret, job] = &documents[..] else { panic!("a secret and a job") };
    assert_eq!(secret["kind"].as_str(), Some("Secret"));
    assert_eq!(
        (job["apiVersion"].as_str(), job["kind"].as_str()),
        (Some("kubeflow.org/v1"), Some("PyTorchJob"))
    );
    let mut found = Vec::new();
    containers(job, &mut found);
    assert_eq!(found.len(), 2, "master and workers");
    for (name, words) in found {
        assert_eq!(name, "pytorch");
        assert_eq!(helps().check_text(&words.join(" "), "pytorchjob.yaml"), 2);
    }
    let env = &job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["env"][0];
    assert_eq!(env["name"].as_str(), Some("POLYREME_SECRET"));
    assert_eq!(env["valueFrom"]["secretKeyRef"]["name"], secret["metadata"]["name"]);
    // Whoever forgets to write a secret is told so, and what to write.
    let placeholder = secret["stringData"]["secret"].as_str().unwrap();
    let mut rank = command(&root(), &["train", "examples/digits.toml"]);
    rank.envs([("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")]);
    let out = rank.env("POLYREME_SECRET", placeholder).output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{said}");
    assert!(said.contains("POLYREME_SECRET: the secret is still the placeholder"), "{said}");
    assert!(said.contains("openssl rand -hex 32"), "{said}");
}

#[test]
fn the_mpi_job_is_what_its_operator_wants() {
    let documents = documents("deploy/kubernetes/mpijob.yaml");
    let [job] = &documents[..] else { panic!("a job") };
    assert_eq!(
        (job["apiVersion"].as_str(), job["kind"].as_str()),
        (Some("kubeflow.org/v2beta1"), Some("MPIJob"))
    );
    let spec = &job["spec"];
    let mut found = Vec::new();
    containers(spec, &mut found);
    let launcher = found.iter().find(|(name, _)| name == "launcher").unwrap().1.join(" ");
    assert_eq!(helps().check_text(&launcher, "mpijob.yaml"), 2);
    let numbers = launcher.split("mpirun -n ").skip(1).map(|rest| rest.split(' ').next().unwrap());
    let numbers: Vec<i64> = numbers.map(|n| n.parse().unwrap()).collect();
    assert!(numbers.len() == 2 && numbers[0] == numbers[1], "{numbers:?}");
    let ranks = numbers[0];
    let workers = spec["mpiReplicaSpecs"]["Worker"]["replicas"].as_i64().unwrap();
    assert_eq!(ranks, workers * spec["slotsPerWorker"].as_i64().unwrap());
}

/// A coordinator and ranks that find it by name; each is started again when it fails, and ends when the run does.
#[test]
fn the_elastic_jobs_find_each_other() {
    let documents = documents("deploy/kubernetes/elastic.yaml");
    let [secret, service, coordinator, ranks] = &documents[..] else { panic!("four documents") };
    let name = |document: &Yaml| document["metadata"]["name"].as_str().unwrap().to_string();
    let port = service["spec"]["ports"][0]["port"].as_i64().unwrap();
    assert_eq!(service["spec"]["clusterIP"].as_str(), Some("None"));
    let labels = &coordinator["spec"]["template"]["metadata"]["labels"];
    assert_eq!(service["spec"]["selector"], *labels);
    let mut words = Vec::new();
    for (job, n) in [(coordinator, 1), (ranks, 4)] {
        assert_eq!((job["apiVersion"].as_str(), job["kind"].as_str()), (Some("batch/v1"), Some("Job")));
        let spec = &job["spec"];
        assert_eq!(spec["template"]["spec"]["restartPolicy"].as_str(), Some("OnFailure"));
        assert_eq!(spec["parallelism"].as_i64().unwrap_or(1), n);
        assert_eq!(spec["completions"].as_i64().unwrap_or(1), n);
        let mut found = Vec::new();
        containers(job, &mut found);
        let command = found[0].1.join(" ");
        assert_eq!(helps().check_text(&command, "elastic.yaml"), 1);
        words.push(command);
        let env = &spec["template"]["spec"]["containers"][0]["env"][0];
        assert_eq!(env["valueFrom"]["secretKeyRef"]["name"], secret["metadata"]["name"]);
    }
    assert!(words[0].contains(&format!("--listen 0.0.0.0:{port}")), "{}", words[0]);
    assert!(words[1].contains(&format!("join {}:{port}", name(service))), "{}", words[1]);
}

#[test]
fn scripts_and_documents_name_what_there_is() {
    let mut helps = helps();
    for (file, calls_min) in [
        ("deploy/slurm/train.sbatch", 2),
        ("deploy/slurm/elastic.sbatch", 2),
        ("deploy/docker/Dockerfile", 0),
        ("docs/clusters.md", 12),
        ("docs/elastic.md", 6),
        ("README.md", 1),
    ] {
        let text = fs::read_to_string(root().join(file)).unwrap();
        let n = helps.check_text(&text, file);
        assert!(n >= calls_min, "{file}: {n} calls were found");
    }
    for script in ["deploy/slurm/train.sbatch", "deploy/slurm/elastic.sbatch"] {
        let read = std::process::Command::new("bash").arg("-n").arg(root().join(script)).status().unwrap();
        assert!(read.success(), "{script}");
    }
}

#[test]
fn a_call_that_does_not_exist_is_found() {
    for wrong in [
        "polyreme train job.toml --rank 3",
        "polyreme launch --host a job.toml",
        "polyreme bench collectives",
    ] {
        let found = std::panic::catch_unwind(|| helps().check_text(wrong, "here"));
        assert!(found.is_err(), "{wrong}");
    }
}
