//! With the feature `mpi`: compiles the shim with the machine's `mpicc` and links what it says.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "mpi")]
    link_mpi();
}

#[cfg(feature = "mpi")]
fn link_mpi() {
    println!("cargo::rerun-if-changed=src/mpi/shim.c");
    println!("cargo::rerun-if-env-changed=MPICC");
    let mpicc = std::env::var("MPICC").unwrap_or_else(|_| "mpicc".into());
    // OpenMPI and MPICH both print the compiler's whole command.
    let shown = std::process::Command::new(&mpicc).arg("-show").output();
    let shown = match shown {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).into_owned(),
        _ => {
            println!(
                "cargo::error=the feature `mpi` needs `{mpicc}`: install OpenMPI or MPICH with its headers (Debian: \
                 libopenmpi-dev), or set MPICC"
            );
            return;
        }
    };
    let mut build = cc::Build::new();
    build.file("src/mpi/shim.c");
    for word in shown.split_whitespace() {
        if let Some(path) = word.strip_prefix("-I") {
            build.include(path);
        } else if let Some(path) = word.strip_prefix("-L") {
            println!("cargo::rustc-link-search=native={path}");
        }
    }
    build.compile("polyreme_mpi_shim");
    // After the shim, which needs them.
    for library in shown.split_whitespace().filter_map(|word| word.strip_prefix("-l")) {
        println!("cargo::rustc-link-lib={library}");
    }
}
