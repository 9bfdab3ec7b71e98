//! All-reduce over loopback TCP: one JSON line per size.
//!
//!     cargo run --release -p polyreme-collective --example allreduce_tcp -- [RANKS [ALGORITHM [KIB]]]
//!
//! Ranks are threads, each with its own sockets. `us` is the mean of 20 rounds after 3, `us_least` the best one.

use std::time::Instant;

use polyreme_collective::Reduce;
use polyreme_collective::links::{Algorithm, Linked, measure};
use polyreme_net::{Report, loopback};

const SIZES_KIB: [usize; 5] = [4, 64, 1024, 16 * 1024, 64 * 1024];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let ranks = args.next().map_or(Ok(2), |n| n.parse())?;
    let algorithm = match args.next().as_deref() {
        None | Some("auto") => None,
        Some("direct") => Some(Algorithm::Direct),
        Some("doubling") => Some(Algorithm::Doubling),
        Some("halving") => Some(Algorithm::Halving),
        Some("ring") => Some(Algorithm::Ring),
        Some("tree") => Some(Algorithm::Tree),
        Some(other) => {
            return Err(format!("no algorithm {other:?}: direct, doubling, halving, ring or tree").into());
        }
    };
    let sizes = match args.next() {
        None => SIZES_KIB.to_vec(),
        Some(kib) => vec![kib.parse()?],
    };
    let threads: Vec<_> = loopback::links(ranks)?
        .into_iter()
        .map(|links| {
            let sizes = sizes.clone();
            std::thread::spawn(move || rank(Linked::over(links), algorithm, &sizes))
        })
        .collect();
    for thread in threads {
        thread.join().map_err(|_| "a rank panicked")??;
    }
    Ok(())
}

fn rank(mut linked: Linked, algorithm: Option<Algorithm>, sizes_kib: &[usize]) -> Result<(), Report> {
    let (first, ranks) = (linked.rank() == 0, linked.size());
    let costs = measure(&mut linked)?;
    if first {
        eprintln!("{costs:?}");
    }
    linked.set_algorithm(algorithm);
    for &kib in sizes_kib {
        let mut data = vec![1.0f32; kib * 256];
        let (mut sum, mut least) = (0.0, f64::INFINITY);
        for round in 0..23 {
            if round == 3 {
                linked.barrier()?;
            }
            let start = Instant::now();
            linked.all_reduce(&mut data, Reduce::Sum)?;
            let us = start.elapsed().as_secs_f64() * 1e6;
            if round >= 3 {
                (sum, least) = (sum + us, f64::min(least, us));
            }
        }
        if first {
            println!(
                r#"{{"op": "allreduce", "transport": "tcp", "ranks": {ranks}, "bytes": {}, "us": {:.0}, "us_least": {least:.0}}}"#,
                kib * 1024,
                sum / 20.0
            );
        }
    }
    Ok(())
}
