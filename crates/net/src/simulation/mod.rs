//! A network of ranks in one process, in virtual time: it runs the real code on machines that stop and on a network
//! with delays and partitions.
//!
//! A [`Simulation`] has a seed, and everything in it follows from that and from its [`Settings`]: a failed run is
//! repeated by its seed. Every rank is a function that gets a [`System`] and runs anything on it: joining, links,
//! servers. Its threads are real, but only one runs at a time; they wait, sleep, connect, listen and start threads only
//! through their system. A thread that blocks elsewhere (on a lock, a queue, a thread) while another one holds what it
//! waits for ends the simulation with a panic.
//!
//! ```
//! # #[cfg(feature = "simulation")] {
//! use std::time::Duration;
//! use polyreme_net::simulation::{Fault, Rank, Settings, Simulation, master};
//! use polyreme_net::{JoinOptions, Secret, join};
//!
//! let faults = vec![(Duration::from_millis(1), Fault::Pause { rank: 1, time: Duration::from_secs(2) })];
//! let settings = Settings { faults, ..Settings::default() };
//! let outcome = Simulation::new(7, settings).run(2, |rank| {
//!     let mut options = JoinOptions::new(rank.rank, rank.size, master(), Secret::from_text(&"5e".repeat(32))?);
//!     options.system = rank.system;
//!     Ok::<_, Box<dyn std::error::Error + Send + Sync>>(join(options)?.control.goodbye()?)
//! });
//! assert!(outcome.failure.is_none() && outcome.results.iter().flatten().all(Result::is_ok));
//! assert!(outcome.time > Duration::from_secs(2));
//! # }
//! ```
//!
//! # Layout
//! `settings`: the network, and what goes wrong. `world`: which thread runs, and the clock. `network`: connections.
//! `local`: a rank's end of them. `host`: the system of a rank. `trace`: what happened. `random`: numbers of a seed.

mod host;
mod local;
mod network;
mod random;
mod settings;
#[cfg(test)]
mod tests;
mod trace;
mod world;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::system::System;
use host::Machine;
use world::{Remains, World};

pub use local::{LocalListener, LocalStream};
pub use random::SimRandom;
pub use settings::{Bug, Fault, Settings};
pub use trace::{SimEvent, Trace};
#[cfg(test)]
pub(crate) use world::makes;

/// Ranks on a network that may fail.
#[derive(Clone, Debug)]
pub struct Simulation {
    seed: u64,
    settings: Settings,
}

/// What a rank's function gets.
#[derive(Clone, Debug)]
pub struct Rank {
    /// This rank.
    pub rank: usize,
    /// How many there are.
    pub size: usize,
    /// Its machine.
    pub system: Arc<dyn System>,
    machine: Arc<Machine>,
}

impl Rank {
    /// Waits for this long, and counts as using the CPU all the while.
    pub fn compute(&self, time: Duration) {
        self.machine.world.set_working(self.rank, true);
        self.system.sleep(time);
        self.machine.world.set_working(self.rank, false);
    }

    /// Waits for this long without using the CPU.
    pub fn sleep(&self, time: Duration) {
        self.system.sleep(time);
    }
}

/// The result of a simulation.
#[derive(Debug)]
pub struct SimOutcome<T> {
    /// What each rank returned; none if it was killed, or the simulation failed.
    pub results: Vec<Option<T>>,
    /// What ended the simulation before all ranks returned: a panic, or a wait that never ended.
    pub failure: Option<String>,
    /// How long it took, in virtual time.
    pub time: Duration,
    /// What happened.
    pub trace: Trace,
}

/// The address at which rank 0 of a simulation can listen.
pub fn master() -> String {
    SocketAddr::new(network::ip(0), 29_500).to_string()
}

impl Simulation {
    /// A simulation with this seed and these settings.
    pub fn new(seed: u64, settings: Settings) -> Simulation {
        Simulation { seed, settings }
    }

    /// Runs this many ranks until all have returned.
    pub fn run<T: Send + 'static>(
        self,
        size: usize,
        body: impl Fn(Rank) -> T + Clone + Send + 'static,
    ) -> SimOutcome<T> {
        let world = Arc::new(World::new(self.seed, size, self.settings));
        let results: Arc<Mutex<Vec<Option<T>>>> = Arc::new(Mutex::new((0..size).map(|_| None).collect()));
        let mut threads = Vec::with_capacity(size);
        for rank in 0..size {
            let task = world.add(rank, "main", true, 0);
            let (world, results, body) = (world.clone(), results.clone(), body.clone());
            threads.push(std::thread::spawn(move || {
                let machine = Arc::new(Machine { world: world.clone(), rank });
                let system = machine.clone();
                let done = world.live(task, || body(Rank { rank, size, system, machine }));
                results.lock().unwrap_or_else(PoisonError::into_inner)[rank] = done;
            }));
        }
        world.run();
        for thread in threads {
            thread.join().expect("what panics in a simulated thread is caught there");
        }
        let Remains { trace, failure, time } = world.remains();
        let results = std::mem::take(&mut *results.lock().unwrap_or_else(PoisonError::into_inner));
        SimOutcome { results, failure, time, trace }
    }
}
