//! The setups that follow from flags, job files, environments and machines.

use super::*;

fn machine(nodes: &[&str]) -> Machine {
    let nodes = nodes.iter().map(|n| cores::parse_list(n).unwrap()).collect();
    Machine { nodes, quota: None, bound: false }
}

fn asked(words: &str) -> Asked {
    let mut asked = Asked::default();
    for (key, value) in words.split_whitespace().map(|w| w.split_once('=').unwrap()) {
        match key {
            "ranks" => asked.ranks = Some(value.parse().unwrap()),
            "processes" => asked.processes = Some(value.parse().unwrap()),
            "threads" => asked.threads = Some(value.parse().unwrap()),
            "encrypt" => asked.encrypt = Some(if value == "true" { Encrypt::Always } else { Encrypt::Never }),
            "transport" => asked.transport = Some(transport_by_name(value).unwrap()),
            _ => panic!("{key}"),
        }
    }
    asked
}

fn decide_with(flags: &str, job: &str, env: &str, machine: &Machine) -> Result<Decided, Unclear> {
    let env: Vec<(&str, &str)> = env.split_whitespace().map(|w| w.split_once('=').unwrap()).collect();
    let vars = |key: &str| env.iter().find(|(k, _)| *k == key).map(|(_, v)| v.to_string());
    decide(asked(flags), asked(job), &vars, machine)
}

/// The setup as a line: `threads 2x4`, `spawn 2x4 shm`, `rank 1/4 local 1/2 x4`.
#[track_caller]
fn check(flags: &str, job: &str, env: &str, nodes: &[&str], want: &str) {
    let decided = decide_with(flags, job, env, &machine(nodes)).unwrap();
    let got = match decided.setup {
        Setup::Threads { ranks, threads } => format!("threads {ranks}x{threads}"),
        Setup::Spawn { processes, threads, transport } => {
            format!("spawn {processes}x{threads} {}", transport.name())
        }
        Setup::Process(p) => {
            let master = match (p.transport, p.master) {
                (Some(Transport::Mpi), _) => "mpi".into(),
                (_, master) => master.unwrap_or("-".into()),
            };
            format!(
                "rank {}/{} local {}/{} x{} {master}",
                p.rank, p.size, p.local_rank, p.local_size, p.threads
            )
        }
    };
    assert_eq!(got, want, "{flags} {job} {env}");
    assert!(!decided.why.is_empty());
}

const TORCH: &str = "RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=29500 POLYREME_SECRET=8f3a61c0d94e27b5508c1f7ae2639db47016ce8f25a3d0b9614f7c82ee5d930a";

#[test]
fn without_a_word_every_core_is_used() {
    check("", "", "", &["0-1"], "threads 1x2");
    check("", "", "", &["0-3", "4-7"], "threads 2x4");
    check("", "threads=1", "", &["0-3", "4-7"], "threads 1x1");
    check("threads=3", "threads=1", "", &["0-3"], "threads 1x3");
}

#[test]
fn flags_come_before_the_job_file() {
    check("ranks=2", "", "", &["0-7"], "threads 2x4");
    check("ranks=4 threads=1", "", "", &["0-7"], "threads 4x1");
    check("ranks=8", "", "", &["0-1"], "threads 8x1");
    check("", "ranks=2", "", &["0-3"], "threads 2x2");
    check("ranks=4", "ranks=2", "", &["0-3"], "threads 4x1");
    check("processes=2", "", "", &["0-3"], "spawn 2x2 shm");
    check("processes=2 transport=tcp", "", "", &["0-3"], "spawn 2x2 tcp");
    check("ranks=2 transport=shm", "", "", &["0-3"], "spawn 2x2 shm");
    check("ranks=2", "transport=tcp", "", &["0-3"], "spawn 2x2 tcp");
    check("ranks=2 transport=local", "transport=tcp", "", &["0-3"], "threads 2x2");
    check("ranks=2 processes=2", "", "", &["0-3"], "spawn 2x2 shm");
    check("ranks=2", "", "WORLD_SIZE=1 RANK=0", &["0-3"], "threads 2x2");
}

#[test]
fn whoever_started_this_as_one_rank_is_heard() {
    check("", "", TORCH, &["0-3"], "rank 1/4 local 1/2 x2 a:29500");
    check("", "ranks=2", TORCH, &["0-3"], "rank 1/4 local 1/2 x2 a:29500");
    check("ranks=4", "", TORCH, &["0-3"], "rank 1/4 local 1/2 x2 a:29500");
    check("threads=1", "", TORCH, &["0-3"], "rank 1/4 local 1/2 x1 a:29500");
    let mpi = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=3 \
               OMPI_COMM_WORLD_LOCAL_SIZE=4 MASTER_ADDR=a MASTER_PORT=1 POLYREME_SECRET=8f3a61c0d94e27b5508c1f7ae2639db47016ce8f25a3d0b9614f7c82ee5d930a";
    check("", "", mpi, &["0-7"], "rank 3/4 local 3/4 x2 a:1");
    check("transport=mpi", "", mpi, &["0-7"], "rank 3/4 local 3/4 x2 mpi");
    let slurm = "SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=1 SLURM_STEP_ID=0 SLURM_JOB_ID=0 \
                 MASTER_ADDR=n1 MASTER_PORT=15000 SLURM_STEP_TASKS_PER_NODE=4(x2) POLYREME_SECRET=8f3a61c0d94e27b5508c1f7ae2639db47016ce8f25a3d0b9614f7c82ee5d930a";
    check("", "", slurm, &["0-7"], "rank 5/8 local 1/4 x2 n1:15000");
    // A batch script is not a rank, and may start some itself.
    check("ranks=2", "", "SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_JOB_ID=1", &["0-7"], "threads 2x4");
    // A rank that our own launcher started has its flags, and gets the master's address later.
    let ours = "POLYREME_LAUNCHED=1 RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2";
    check("processes=2", "", ours, &["0-3"], "rank 0/2 local 0/2 x2 -");
    let alone = "POLYREME_LAUNCHED=1 RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1";
    check("processes=1", "", alone, &["0-3"], "rank 0/1 local 0/1 x4 -");
}

#[test]
fn a_rank_that_was_bound_already_keeps_its_cores() {
    let bound = Machine { bound: true, ..machine(&["2-3"]) };
    let Setup::Process(place) = decide_with("", "", TORCH, &bound).unwrap().setup else {
        panic!("a process")
    };
    assert_eq!(place.threads, 2);
}

#[test]
fn mpi_is_taken_where_nothing_else_is_said() {
    let cores = machine(&["0-7"]);
    for (env, family) in [
        ("OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=3", MpiFamily::OpenMpi),
        ("PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=3 MPI_LOCALNRANKS=4", MpiFamily::Mpich),
    ] {
        let Setup::Process(place) = decide_with("", "", env, &cores).unwrap().setup else {
            panic!("a process")
        };
        assert_eq!((place.transport, place.mpi), (Some(Transport::Mpi), vec![family]));
        let said = decide_with("transport=tcp", "", env, &cores).unwrap_err().to_string();
        assert!(said.contains("MASTER_ADDR") && said.contains("leave --transport out"), "{said}");
    }
    // Slurm says where rank 0 could listen; MPI is meant if it can be asked and there is no secret.
    let slurm = "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_JOB_ID=7 SLURM_STEP_NODELIST=n[1-2]";
    for (more, want) in [
        (" PMIX_RANK=1", Ok(Some(Transport::Mpi))),
        (
            " PMIX_RANK=1 POLYREME_SECRET=8f3a61c0d94e27b5508c1f7ae2639db47016ce8f25a3d0b9614f7c82ee5d930a",
            Ok(None),
        ),
        (" POLYREME_SECRET=8f3a61c0d94e27b5508c1f7ae2639db47016ce8f25a3d0b9614f7c82ee5d930a", Ok(None)),
        ("", Err("POLYREME_SECRET")),
    ] {
        let decided = decide_with("", "", &format!("{slurm}{more}"), &cores);
        match (decided.map(|d| d.setup), want) {
            (Ok(Setup::Process(place)), Ok(want)) => assert_eq!(place.transport, want, "{more}"),
            (Err(said), Err(want)) => assert!(said.to_string().contains(want), "{said}"),
            (got, _) => panic!("{more}: {got:?}"),
        }
    }
}

#[test]
fn flags_and_then_the_job_say_what_is_encrypted() {
    let rows = [
        ("", "", Encrypt::Auto),
        ("", "encrypt=true", Encrypt::Always),
        ("encrypt=false", "encrypt=true", Encrypt::Never),
    ];
    for (flags, job, want) in rows {
        let Setup::Process(place) = decide_with(flags, job, TORCH, &machine(&["0-3"])).unwrap().setup else {
            panic!("a process")
        };
        assert_eq!(place.encrypt, want, "{flags} {job}");
    }
    let mpi = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=3";
    let said =
        decide_with("encrypt=true transport=mpi", "", mpi, &machine(&["0-3"])).unwrap_err().to_string();
    assert!(said.contains("use --transport tcp"), "{said}");
}

#[test]
fn a_quota_is_no_room_for_a_rank_a_node() {
    let limited = Machine { quota: Some(3), ..machine(&["0-7", "8-15"]) };
    let decided = decide_with("", "", "", &limited).unwrap();
    assert_eq!(decided.setup, Setup::Threads { ranks: 1, threads: 3 });
}

#[test]
fn what_makes_no_sense_is_refused_with_what_to_do() {
    let rows = [
        ("ranks=2 processes=3", "", "remove one"),
        ("ranks=2", TORCH, "leave the flag out"),
        ("processes=2 transport=local", "", "shm"),
        ("transport=mpi", "", "mpirun"),
        ("transport=local", TORCH, "leave it out"),
        ("ranks=0", "", "can have 1 to"),
        ("ranks=100000", "", "can have 1 to"),
        ("", "RANK=4 WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=1", "count from 0"),
        ("", "RANK=x WORLD_SIZE=4", "whole number"),
        ("", "RANK=0 WORLD_SIZE=4", "MASTER_ADDR"),
        ("", "RANK=0 WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=70000", "MASTER_PORT"),
        ("", "RANK=0 WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=1", "openssl rand -hex 32"),
        ("", "RANK=0 WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=1 POLYREME_SECRET=open-sesame", "hexadecimal"),
        ("", "RANK=0 WORLD_SIZE=99999999 MASTER_ADDR=a MASTER_PORT=1", "is impossible"),
        ("", "POLYREME_LAUNCHED=1", "unset it"),
        ("processes=2", "POLYREME_LAUNCHED=1 RANK=3", "unset it"),
        ("", "SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_JOB_ID=1", "srun"),
        ("", "POLYREME_TRANSPORT=carrier-pigeon", "choose local"),
    ];
    for (flags, env, say) in rows {
        let said = decide_with(flags, "", env, &machine(&["0-3"])).unwrap_err().to_string();
        assert!(said.contains(say), "{flags} {env}: {said}");
    }
}
