//! What parameter servers and workers move over loopback, beside a plain copy through a socket: one JSON line.
//!
//!     cargo run --release -p polyreme-collective --example push_pull -- [WORKERS [SERVERS [MIB [ROUNDS]]]]
//!
//! Ranks are processes; the first ones only serve. In each round every worker pushes MIB mebibytes of gradients, in ranges of one, which the servers subtract
//! from the weights as they come, and pulls as many of weights. Then the first worker sends as many bytes to the first server through a plain socket, and gets
//! as many back. `push_pull_gb_s` is what all workers push and pull together, `copy_gb_s` what the two copy.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use polyreme_collective::servers::{
    Discipline, HostOptions, PushedGradient, RangeStore, ServerClient, ServerHost, ServerMail,
};
use polyreme_collective::{Comm, Reduce};
use polyreme_net::{JoinOptions, Secret, join};

type PushPullResult<T> = Result<T, Box<dyn std::error::Error>>;

/// Elements of a range.
const RANGE: usize = 1 << 18;
/// The variables that tell a process which rank it is, where rank 0 listens, and the secret.
const PLACE: [&str; 3] = ["PUSH_PULL_RANK", "PUSH_PULL_ADDRESS", "PUSH_PULL_SECRET"];

/// What is measured.
#[derive(Clone, Copy)]
struct Setting {
    workers: usize,
    servers: usize,
    mib: usize,
    rounds: u64,
}

fn main() -> PushPullResult<()> {
    let args: Vec<usize> = std::env::args().skip(1).map(|arg| arg.parse()).collect::<Result<_, _>>()?;
    let arg = |at: usize, usual: usize| args.get(at).copied().unwrap_or(usual).max(1);
    let setting =
        Setting { workers: arg(0, 1), servers: arg(1, 1), mib: arg(2, 64), rounds: arg(3, 10) as u64 };
    let size = setting.workers + setting.servers;
    if let [Ok(rank), Ok(address), Ok(secret)] = PLACE.map(std::env::var) {
        let options = JoinOptions::new(rank.parse()?, size, address, Secret::from_text(&secret)?);
        return of_rank(options, setting);
    }
    let (listener, secret) = (TcpListener::bind("127.0.0.1:0")?, Secret::random()?);
    let address = listener.local_addr()?.to_string();
    let start = |rank: usize| {
        let place = [rank.to_string(), address.clone(), secret.to_hex()];
        let mut command = Command::new(std::env::current_exe()?);
        command.args(std::env::args().skip(1)).envs(PLACE.into_iter().zip(place)).spawn()
    };
    let others = (1..size).map(start).collect::<Result<Vec<Child>, _>>()?;
    let mut options = JoinOptions::new(0, size, address.clone(), secret);
    options.listener = Some(listener.into());
    of_rank(options, setting)?;
    for mut other in others {
        if !other.wait()?.success() {
            return Err("a rank failed".into());
        }
    }
    Ok(())
}

/// Weights from which gradients are subtracted as they come.
struct Subtracted {
    weights: Vec<Vec<f32>>,
    gradient: Vec<f32>,
}

impl RangeStore for Subtracted {
    fn len_of(&self, range: usize) -> usize {
        self.weights[range].len()
    }

    fn sums_of(&self, _: usize) -> usize {
        1
    }

    fn apply(&mut self, range: usize, _: u64, gradients: &[PushedGradient]) {
        for gradient in gradients {
            gradient.copy_to(&mut self.gradient);
            self.weights[range].iter_mut().zip(&self.gradient).for_each(|(w, g)| *w -= g);
        }
    }

    fn weights(&self, range: usize) -> &[f32] {
        &self.weights[range]
    }

    fn state(&self, _: usize, _: usize) -> Option<&[f32]> {
        None
    }
}

fn of_rank(options: JoinOptions, setting: Setting) -> PushPullResult<()> {
    let Setting { workers, servers, mib, rounds } = setting;
    let (rank, all) = (options.rank, (0..options.size).collect::<Vec<_>>());
    let joined = join(options)?;
    let (links, control) = (joined.links(0, &all)?, joined.control.clone());
    let mut comm = Comm::tcp(links)?;
    comm.tell(&control);
    comm.set_joined(joined);
    let mail = ServerMail::new(&mut comm)?;
    // Range `k` is at server `k % servers`.
    let places: Vec<(usize, usize)> = (0..mib).map(|k| (k % servers, k / servers)).collect();
    let host = match rank < servers {
        true => {
            let n_ranges = places.iter().filter(|(server, _)| *server == rank).count();
            let store = Subtracted { weights: vec![vec![0.0; RANGE]; n_ranges], gradient: vec![0.0; RANGE] };
            let options = HostOptions { discipline: Discipline::Free, n_ranges, done: 0, leases: false };
            Some(ServerHost::start(mail.clone(), Arc::new(Mutex::new(store)), options)?)
        }
        false => None,
    };
    let mut client = ServerClient::new(mail, servers);
    let gradient = vec![1.0f32; RANGE];
    let mut weights = vec![vec![0.0f32; RANGE]; mib];
    let mut seconds = 0.0;
    // The first round is to make connections and reserve memory.
    for (timed, rounds) in [(false, 0..1), (true, 1..rounds + 1)] {
        comm.barrier()?;
        let start = Instant::now();
        if rank >= servers {
            client.join()?;
            for round in rounds {
                client.begin(round * workers as u64 + (rank - servers) as u64);
                places.iter().try_for_each(|at| client.push(*at, (1.0, 1.0), &gradient))?;
                places.iter().try_for_each(|at| client.pull(*at))?;
                let mut to = places.iter().zip(&mut weights);
                to.try_for_each(|(at, weights)| client.receive(*at, weights))?;
                client.end();
            }
        }
        comm.barrier()?;
        if timed {
            seconds = start.elapsed().as_secs_f64();
        }
    }
    if rank >= servers {
        places.iter().try_for_each(|at| client.pull_now(*at))?;
        places.iter().zip(&mut weights).try_for_each(|(at, weights)| client.receive(*at, weights))?;
        let want = -((rounds + 1) as f32 * workers as f32);
        if weights.iter().flatten().any(|w| *w != want) {
            return Err("weights are not what was pushed".into());
        }
        client.leave()?;
    }
    let copy = plain_copy(&mut comm, setting)?;
    comm.barrier()?;
    drop(host);
    comm.barrier()?;
    client.into_mail().close()?;
    if rank == 0 {
        let bytes = 2.0 * (mib << 20) as f64 * rounds as f64;
        let (moved, copied) = (workers as f64 * bytes / seconds / 1e9, bytes / copy / 1e9);
        println!(
            r#"{{"workers": {workers}, "servers": {servers}, "mib": {mib}, "push_pull_gb_s": {moved:.3}, "copy_gb_s": {copied:.3}, "share": {:.3}}}"#,
            moved / copied
        );
    }
    comm.finish()?;
    control.goodbye()?;
    Ok(())
}

/// Seconds in which the first worker sends as many bytes to the first server through a socket as it pushed, and gets as many back.
fn plain_copy(comm: &mut Comm, setting: Setting) -> PushPullResult<f64> {
    let Setting { servers, mib, rounds, .. } = setting;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut port = [i64::from(listener.local_addr()?.port())];
    comm.broadcast(&mut port, 0)?;
    let mut seconds = [0.0];
    let mut bytes = vec![1u8; mib << 20];
    if comm.rank() == 0 {
        let (mut worker, _) = listener.accept()?;
        for _ in 0..=rounds {
            worker.read_exact(&mut bytes)?;
            worker.write_all(&bytes)?;
        }
    } else if comm.rank() == servers {
        let mut server = TcpStream::connect(("127.0.0.1", u16::try_from(port[0])?))?;
        let mut start = Instant::now();
        for round in 0..=rounds {
            if round == 1 {
                start = Instant::now();
            }
            server.write_all(&bytes)?;
            server.read_exact(&mut bytes)?;
        }
        seconds = [start.elapsed().as_secs_f64()];
    }
    comm.all_reduce(&mut seconds, Reduce::Sum)?;
    Ok(seconds[0])
}
