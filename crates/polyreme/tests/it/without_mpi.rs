//! The binary on a machine without MPI: a root folder with nothing in it but the binary and the libraries that its loader asks for.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::binary::cannot_run;

const JOB: &str = r#"
[model]
layers = [{ kind = "linear", outputs = 8 }, "relu", { kind = "linear" }]
[data]
kind = "synthetic"
samples = 200
shape = [12]
classes = 3
[train]
batch = 20
steps = 12
"#;

/// The libraries that a loader is told to load at the start of a program, the loader among them.
fn libraries(program: &Path) -> Vec<PathBuf> {
    let out = Command::new("ldd").arg(program).output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(out.status.success(), "ldd: {text}");
    assert!(!text.contains("not found"), "{text}");
    // `libc.so.6 => /lib/libc.so.6 (0x7f..)`; the loader and the kernel's own page have no arrow.
    let path = |line: &str| line.split_whitespace().find(|word| word.starts_with('/')).map(PathBuf::from);
    text.lines().filter_map(path).collect()
}

/// Copies a file to the same path below a root.
fn put(root: &Path, file: &Path, at: &Path) {
    let target = root.join(at.strip_prefix("/").unwrap());
    fs::create_dir_all(target.parent().unwrap()).unwrap();
    fs::copy(file, target).unwrap();
}

/// Runs a program that lies in a root folder, with `/proc` and `/dev` in it for as long as that takes: the mounts are those of
/// a namespace that ends with the program.
fn inside(root: &Path, vars: &[(&str, &str)], args: &[&str]) -> Output {
    let script = r#"root="$1"; shift
        mount --bind /dev "$root/dev" && mount -t tmpfs tmpfs "$root/dev/shm" && mount -t proc proc "$root/proc" || exit 125
        exec chroot "$root" "$@""#;
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script, "sh"]).arg(root).args(args);
    command.env_clear().env("PATH", std::env::var_os("PATH").unwrap());
    command.envs(vars.iter().copied()).output().unwrap()
}

#[track_caller]
fn succeeds(root: &Path, args: &[&str]) -> String {
    let out = inside(root, &[], args);
    let (said, wrong) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{args:?}: {said}{wrong}");
    said.into_owned()
}

/// It would not start there if it were linked to MPI, or if it needed more than it says of the machine.
#[test]
fn the_binary_trains_on_a_machine_without_mpi() {
    if !rustix::process::geteuid().is_root() {
        return cannot_run("only root may have a root folder of its own");
    }
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let binary = Path::new(env!("CARGO_BIN_EXE_polyreme"));
    let libraries = libraries(binary);
    // Whatever `ldd` lists is copied, so a library of MPI that was linked would be there too.
    let names = || libraries.iter().filter_map(|path| path.file_name()?.to_str());
    let linked = |name: &str| names().any(|library| library.contains(name));
    assert!(!linked("mpi") && !linked("pmi") && linked("libc.so"), "{libraries:?}");
    libraries.iter().for_each(|library| put(root, library, library));
    put(root, binary, Path::new("/polyreme"));
    fs::write(root.join("job.toml"), JOB).unwrap();
    ["dev", "proc", "tmp"].iter().for_each(|name| fs::create_dir(root.join(name)).unwrap());

    let said = succeeds(root, &["/polyreme", "doctor"]);
    assert!(said.contains("no mpirun found"), "{said}");
    assert_eq!(said.matches(": no library found").count(), 2, "{said}");

    // As threads, and as processes that share memory.
    for (name, transport) in [("threads", "local"), ("processes", "shm")] {
        let output = format!("/{name}");
        let args = ["/polyreme", "train", "/job.toml", "--ranks", "2", "--transport", transport, "--output"];
        succeeds(root, &[&args[..], &[&output]].concat());
        assert!(root.join(name).join("model.safetensors").exists(), "{name}");
    }

    // Where a launcher of MPI starts it, it says what is missing.
    let rank = ["RANK=0", "SIZE=2", "LOCAL_RANK=0", "LOCAL_SIZE=2"].map(|s| format!("OMPI_COMM_WORLD_{s}"));
    let vars: Vec<_> = rank.iter().filter_map(|var| var.split_once('=')).collect();
    let out = inside(root, &vars, &["/polyreme", "train", "/job.toml", "--output", "/mpi"]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(said.contains("no MPI library of OpenMPI was found"), "{said}");
    assert!(said.contains("install the library of the launcher"), "{said}");
    assert!(!out.status.success() && !root.join("mpi").exists(), "{said}");
}
