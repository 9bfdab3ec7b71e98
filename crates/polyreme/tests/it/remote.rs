//! Sets in stores, through the binary, against a real S3 server (`moto_server`, from PyPI) and a real web server: they train to the
//! bits of the same files on this host, also if the cache is smaller than the set and the run is killed; wrong ones are said.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use crate::binary::{cannot_run, command, folder, root};
use crate::ranks::{start, wait_for_step};
use crate::spread::model;

/// Tars of which a cache of this size holds two.
const TAR_CACHE: &str = "data.cache.max_gib=2.3e-5";
const TARS: &str = "[model]\nlayers = ['flatten', 'linear']\n[data]\nkind = 'tar'\npath = 'tars/part-{0..5}.tar'\nsize = [8, 8]\n\
                    order = 'block'\nblock = 2\nvalidation = 0.0\n[train]\nbatch = 2\nepochs = 400\n[parallel]\nranks = 1\nthreads = 1\n\
                    [output]\ntensorboard = false\nevery_steps = 50\n";

/// Tables of which a cache of this size holds two.
const CSV_CACHE: &str = "data.cache.max_gib=5.5e-5";
const TABLES: &str = "[model]\nkind = 'mlp'\nhidden = [8]\n[data]\nkind = 'csv'\npath = 'tables/part-*.csv'\nin_memory = false\n\
                      order = 'block'\nblock = 500\nvalidation = 0.1\n[train]\nbatch = 50\nepochs = 12\n[parallel]\nranks = 1\n\
                      threads = 1\n[output]\ntensorboard = false\nevery_steps = 20\n";

/// A server that ends with the test.
struct TestServer {
    child: Child,
    address: String,
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Starts a server and waits until it says where it listens: after `before`, up to a space.
fn serve(mut command: Command, before: &str) -> TestServer {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let address = loop {
        let line = lines.next().expect("the server says where it listens").unwrap();
        if let Some((_, rest)) = line.split_once(before) {
            break rest.split([' ', ')']).next().unwrap().trim_end_matches('/').to_string();
        }
    };
    // What it says goes on to be read, so that it never waits.
    std::thread::spawn(move || lines.map_while(Result::ok).for_each(drop));
    TestServer { child, address }
}

/// The folder of `moto_server` and of the Python that it belongs to.
fn moto() -> Option<PathBuf> {
    let named = std::env::var_os("POLYREME_MOTO").map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = named
        .into_iter()
        .chain(std::env::split_paths(&path))
        .find(|folder| folder.join("moto_server").exists());
    if found.is_none() {
        cannot_run(
            "no moto_server; install it from PyPI (`moto[server]`) and name its folder in POLYREME_MOTO",
        );
    }
    found
}

/// An S3 server with a bucket, and a folder whose files are in it.
struct Bucket {
    server: TestServer,
    python: PathBuf,
    folder: TempDir,
}

impl Bucket {
    /// Starts it; `None` if there is no such server on this machine.
    fn start(job: &str) -> Option<Bucket> {
        let moto = moto()?;
        let mut command = Command::new(moto.join("moto_server"));
        command.args(["-H", "127.0.0.1", "-p", "0"]);
        let server = serve(command, "Running on ");
        let bucket = Bucket { server, python: moto.join("python"), folder: folder(job) };
        bucket.ask("s3.create_bucket(Bucket='set')");
        Some(bucket)
    }

    /// Asks the server for something.
    fn ask(&self, what: &str) {
        let code = format!(
            "import boto3, os\ns3 = boto3.client('s3', endpoint_url='{}', region_name='us-east-1', aws_access_key_id='a', \
             aws_secret_access_key='s')\n{what}\n",
            self.server.address
        );
        let status = Command::new(&self.python).args(["-c", &code]).current_dir(self.folder.path()).status();
        assert!(status.unwrap().success(), "{what}");
    }

    /// Puts the files of a folder into the bucket.
    fn upload(&self, folder: &str) {
        self.ask(&format!(
            "for n in os.listdir('{folder}'): s3.upload_file('{folder}/' + n, 'set', '{folder}/' + n)"
        ));
    }

    /// The binary, with what it needs to know of the server.
    fn polyreme(&self, args: &[&str]) -> Command {
        let mut command = command(self.folder.path(), args);
        let keys = [("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "s"), ("AWS_REGION", "us-east-1")];
        command.envs(keys).env("AWS_ENDPOINT_URL", &self.server.address).env("HOME", self.folder.path());
        command.env("XDG_CACHE_HOME", self.folder.path().join("cache"));
        command
    }

    #[track_caller]
    fn json(&self, args: &[&str]) -> Vec<Value> {
        let out = self.polyreme(args).output().unwrap();
        assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout)
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    /// What a command that is refused says.
    #[track_caller]
    fn refuses(&self, mut command: Command, parts: &[&str]) {
        let out = command.output().unwrap();
        let said = String::from_utf8(out.stderr).unwrap();
        assert!(!out.status.success(), "{said}");
        parts.iter().for_each(|part| assert!(said.contains(part), "{part} is not in\n{said}"));
    }

    /// Trains on the files, on the objects, and on the objects with a kill in the middle; `path` is the set in the bucket.
    fn trains_to_the_bits_of_files(&self, set: &str, cache: &str) {
        let path = self.folder.path();
        let run = |name: &str| path.join("runs").join(name);
        self.json(&["train", "job.toml", "--json", "--output", "runs/files"]);
        let far = format!("data.path=s3://set/{set}");
        let args = ["--json", "--set", &far, "--set", cache];
        self.json(&[&["train", "job.toml", "--output", "runs/far"], &args[..]].concat());
        assert!(model(&run("far")) == model(&run("files")), "weights");
        self.cache_is_bounded(cache);
        let killed = [&["train", "job.toml", "--output", "runs/killed"], &args[..]].concat();
        let mut child = start(self.polyreme(&killed), &path.join("errors"));
        wait_for_step(&run("killed"), 60, Instant::now() + Duration::from_secs(60));
        // SIGKILL: nothing is tidied up.
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!run("killed").join("model.safetensors").exists(), "it was killed before its end");
        self.json(&["resume", "runs/killed", "--json"]);
        assert!(model(&run("killed")) == model(&run("files")), "weights of the run that was killed");
        self.cache_is_bounded(cache);
    }

    /// Copies take no more than they may.
    fn cache_is_bounded(&self, cache: &str) {
        let gib: f64 = cache.rsplit_once('=').unwrap().1.parse().unwrap();
        let bytes = bytes_in(&self.folder.path().join("cache/polyreme"));
        assert!(bytes > 0 && bytes as f64 <= gib * (1u64 << 30) as f64, "{bytes}");
    }
}

/// The bytes of all files under a folder.
fn bytes_in(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| if path.is_dir() { bytes_in(&path) } else { path.metadata().unwrap().len() }).sum()
}

/// Six tars of two images each, in a folder.
fn make_tars(folder: &Path) {
    let names = [
        ["alpha.png", "baseline.jpg"],
        ["coarse.jpg", "grey.jpg"],
        ["grown.png", "half.jpg"],
        ["narrow.jpg", "odd.png"],
        ["palette.png", "progressive.jpg"],
        ["restarts.jpg", "whole.jpg"],
    ];
    let tars = folder.join("tars");
    fs::create_dir(&tars).unwrap();
    for (k, names) in names.into_iter().enumerate() {
        let images = tempfile::tempdir().unwrap();
        for (i, name) in names.into_iter().enumerate() {
            fs::copy(root().join("crates/data/references").join(name), images.path().join(name)).unwrap();
            let label = images.path().join(name).with_extension("cls");
            fs::write(label, ["cat", "dog"][(i + k) % 2]).unwrap();
        }
        let tar = tars.join(format!("part-{k}.tar"));
        let mut command = Command::new("tar");
        command.args(["--sort=name", "--mtime=@0", "-cf"]).arg(tar).arg("-C").arg(images.path()).arg(".");
        assert!(command.status().unwrap().success());
    }
}

/// Five tables of numbers and words, in a folder.
fn make_tables(folder: &Path) {
    let tables = folder.join("tables");
    fs::create_dir(&tables).unwrap();
    for part in 0..5 {
        let row = |i: usize| {
            let (a, b) = ((i * 37 % 101) as f32 / 50.0 - 1.0, (i * 61 % 103) as f32 / 50.0 - 1.0);
            format!("{a},{b},{},{}\n", ["red", "green", "blue"][i % 3], if a > b { "right" } else { "left" })
        };
        let rows: String = (part * 1000..part * 1000 + 1000).map(row).collect();
        fs::write(tables.join(format!("part-{part}.csv")), format!("a,b,colour,side\n{rows}")).unwrap();
    }
}

#[test]
fn tars_in_a_bucket_train_to_the_bits_of_files() {
    let Some(bucket) = Bucket::start(TARS) else { return };
    make_tars(bucket.folder.path());
    bucket.upload("tars");
    bucket.trains_to_the_bits_of_files("tars/part-{0..5}.tar", TAR_CACHE);
    // A folder and a pattern stand for the same; ranks that are processes share the cache.
    for (name, path) in [("folder", "s3://set/tars/"), ("pattern", "s3://set/tars/part-*.tar")] {
        let (path, output) = (format!("data.path={path}"), format!("runs/{name}"));
        let epochs =
            ["--set", "train.epochs=2", "--set", "parallel.reproducible=true", "--set", "parallel.shards=2"];
        let args = ["train", "job.toml", "--json", "--output", &output, "--set", &path, "--set", TAR_CACHE];
        let processes: &[&str] = if name == "folder" { &["--processes", "2"] } else { &[] };
        bucket.json(&[&args[..], &epochs, processes].concat());
    }
    let weights = |name: &str| model(&bucket.folder.path().join("runs").join(name)).1;
    assert!(weights("folder") == weights("pattern"), "weights of two processes");
}

#[test]
fn tables_in_a_bucket_train_to_the_bits_of_files() {
    let Some(bucket) = Bucket::start(TABLES) else { return };
    make_tables(bucket.folder.path());
    bucket.upload("tables");
    bucket.trains_to_the_bits_of_files("tables/part-*.csv", CSV_CACHE);
    // What is read as a whole is brought as a whole: the same rows, in memory.
    let train = |path: &str, output: &str| {
        let path = format!("data.path={path}");
        let args = ["train", "job.toml", "--json", "--set", "data.in_memory=true", "--output", output];
        bucket.json(&[&args[..], &["--set", "train.epochs=1", "--set", &path]].concat());
        model(&bucket.folder.path().join(output))
    };
    assert!(train("s3://set/tables/part-*.csv", "runs/in") == train("tables/part-*.csv", "runs/here"));
}

#[test]
fn what_is_wrong_with_a_store_is_said() {
    let Some(bucket) = Bucket::start(TARS) else { return };
    let folder = bucket.folder.path();
    make_tars(folder);
    bucket.upload("tars");
    let check = |path: &str, more: &[&str]| {
        let path = format!("data.path={path}");
        bucket.polyreme(&[&["train", "job.toml", "--check", "--set", &path], more].concat())
    };
    let tars = "s3://set/tars/part-{0..5}.tar";
    bucket.refuses(
        check("s3://nosuch/part-{0..5}.tar", &[]),
        &["s3://nosuch/", "there is no bucket \"nosuch\"", "AWS_ENDPOINT_URL"],
    );
    bucket.refuses(check("s3://nosuch/*.tar", &[]), &["there is no bucket \"nosuch\""]);
    bucket.refuses(
        check("s3://set/tars/part-9.tar", &[]),
        &["s3://set/tars/part-9.tar: not found", "no such object in the bucket"],
    );
    bucket.refuses(
        check("s3://set/tars/x-*.tar", &[]),
        &["x-*.tar: not found", "no object in s3://set/tars matches"],
    );
    bucket.refuses(check("s3://set/", &[]), &["no object in it ends in .tar"]);
    bucket.refuses(check("ftp://set/x.tar", &[]), &["ftp:// is not read"]);
    let mut nobody = check(tars, &[]);
    nobody.env_remove("AWS_ACCESS_KEY_ID").env_remove("AWS_SECRET_ACCESS_KEY");
    bucket.refuses(nobody, &["no credentials for S3", "AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE"]);
    // In random order all files would be needed all the time; and an object larger than the cache is never there.
    fs::write(folder.join("random.toml"), TARS.replace("order = 'block'\nblock = 2\n", "")).unwrap();
    let path = format!("data.path={tars}");
    bucket.refuses(
        bucket.polyreme(&["train", "random.toml", "--check", "--set", &path, "--set", TAR_CACHE]),
        &["the files of the training set have", "order = \"block\"", "max_gib"],
    );
    bucket.refuses(
        check(tars, &["--set", "data.cache.max_gib=1e-6"]),
        &["part-0.tar: 10240 bytes", "raise `data.cache.max_gib`"],
    );
    bucket.refuses(check(tars, &["--set", "data.cache.max_gib=0"]), &["data.cache.max_gib"]);
    // An object that is damaged is named by its address, before training.
    fs::write(folder.join("tars/part-3.tar"), "no tar").unwrap();
    bucket.upload("tars");
    bucket.refuses(check(tars, &[]), &["s3://set/tars/part-3.tar", "not a tar"]);
    // The server goes away: said soon, and by the address.
    let gone =
        format!("http://{}/x.tar", std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap());
    bucket.refuses(check(&gone, &[]), &[&gone, "check the network"]);
}

/// A run whose objects change or go while it trains ends with an error that names the object, and `resume` says what changed.
#[test]
fn objects_that_change_or_go_end_the_run() {
    let Some(bucket) = Bucket::start(TABLES) else { return };
    let folder = bucket.folder.path();
    make_tables(folder);
    bucket.upload("tables");
    let start_run = |output: &str| {
        let args = [
            "train",
            "job.toml",
            "--json",
            "--output",
            output,
            "--set",
            "data.path=s3://set/tables/",
            "--set",
            CSV_CACHE,
        ];
        let child = start(
            bucket.polyreme(&[&args[..], &["--set", "train.epochs=1000"]].concat()),
            &folder.join(output.replace('/', "-")),
        );
        wait_for_step(&folder.join(output), 20, Instant::now() + Duration::from_secs(60));
        child
    };
    let ends = |child: Child, output: &str, parts: &[&str]| {
        let out = crate::ranks::end(child, Duration::from_secs(60));
        let said = fs::read_to_string(folder.join(output.replace('/', "-"))).unwrap();
        assert!(!out.status.success());
        parts.iter().for_each(|part| assert!(said.contains(part), "{part} is not in\n{said}"));
    };
    let run = start_run("runs/changed");
    bucket.ask("s3.put_object(Bucket='set', Key='tables/part-3.csv', Body=open('tables/part-2.csv', 'rb'))");
    ends(run, "runs/changed", &["s3://set/tables/part-3.csv", "not what it was when the set was opened"]);
    bucket.refuses(
        bucket.polyreme(&["resume", "runs/changed"]),
        &["the data are not those", "part-3.csv: ", "--changed-data"],
    );
    let run = start_run("runs/gone");
    bucket.ask("s3.delete_object(Bucket='set', Key='tables/part-3.csv')");
    ends(run, "runs/gone", &["s3://set/tables/part-3.csv", "the object is gone"]);
}

/// A web server that knows no ranges and lists nothing, as Python's: files are named, and come whole.
#[test]
fn a_plain_web_server_serves_sets() {
    let Some(python) = moto().map(|folder| folder.join("python")) else { return };
    let made = folder(TARS);
    make_tars(made.path());
    let mut command = Command::new(python);
    command.args(["-u", "-c", "import http.server, sys; s = http.server.ThreadingHTTPServer(('127.0.0.1', 0), \
                   http.server.SimpleHTTPRequestHandler); print(f'Running on http://127.0.0.1:{s.server_port} ', file=sys.stderr); s.serve_forever()"]);
    command.current_dir(made.path());
    let server = serve(command, "Running on ");
    let train = |path: &str, output: &str| {
        let path = format!("data.path={path}");
        let args = [
            "train",
            "job.toml",
            "--json",
            "--output",
            output,
            "--set",
            "train.epochs=2",
            "--set",
            TAR_CACHE,
            "--set",
            &path,
        ];
        let mut command = crate::binary::command(made.path(), &args);
        let out = command.env("XDG_CACHE_HOME", made.path().join("cache")).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        model(&made.path().join(output))
    };
    let far = train(&format!("{}/tars/part-{{0..5}}.tar", server.address), "runs/far");
    assert!(far == train("tars/part-{0..5}.tar", "runs/here"));
}
