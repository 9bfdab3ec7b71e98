//! A cluster: hosts, their cores, memory and speed, and what connects them. Read from a file that describes one that need not
//! exist, or made from the calibration of this machine.
//!
//! ```toml
//! [[hosts]]
//! count = 8
//! cores = 32
//! memory_gib = 128
//! gflops = 60          # of one core, in f32; a multiply-add is two
//! gflops_bf16 = 180
//! core_gbs = 12        # what one core reads and writes of memory, in GB/s
//! memory_gbs = 200     # and all of them together
//! price = 1.9          # of a host, per hour
//!
//! [[hosts]]            # one more, which is slow
//! count = 1
//! cores = 32
//! memory_gib = 128
//! gflops = 60
//! core_gbs = 12
//! memory_gbs = 200
//! speed = 0.5
//!
//! [inside]             # between ranks of one host
//! by = "threads"
//!
//! [between]            # between hosts
//! latency_us = 25
//! gbits = 25
//! ```

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::calibration::Calibration;
use crate::speed::{Described, HostSpeed};

/// Hosts and what connects them.
#[derive(Clone, PartialEq, Debug)]
pub struct Cluster {
    /// The hosts; ranks are placed on them in this order.
    pub hosts: Vec<HostSpec>,
    /// What connects ranks of one host.
    pub inside: InsideSpec,
    /// What connects hosts.
    pub between: BetweenSpec,
}

/// One host.
#[derive(Clone, PartialEq, Debug)]
pub struct HostSpec {
    /// How many cores it has.
    pub cores: usize,
    /// How much memory.
    pub memory_bytes: f64,
    /// How much of it one process may take.
    pub process_bytes: f64,
    /// How fast it computes.
    pub speed: HostSpeed,
    /// What every time of it is multiplied by: 2 for a host of half the speed.
    pub slowness: f64,
    /// Its price per hour, if it is known.
    pub price: Option<f64>,
}

/// How ranks of one host reach each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum InsideBy {
    /// They are threads of one process.
    #[default]
    Threads,
    /// They are processes with common memory.
    Processes,
    /// Sockets over the loopback interface, as between hosts.
    Sockets,
}

/// What connects ranks of one host.
#[derive(Clone, PartialEq, Debug)]
pub struct InsideSpec {
    /// How they reach each other.
    pub by: InsideBy,
    /// How long it takes until a rank sees that another one has arrived.
    pub meet_us: f64,
    /// What a rank copies or adds of memory that another one wrote, in bytes per microsecond.
    pub bytes_per_us: f64,
    /// The loopback interface, if they use sockets.
    pub sockets: BetweenSpec,
    /// Times that were measured here.
    pub measured: Option<Arc<Calibration>>,
}

/// What connects hosts: one link of each host, which its ranks share.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BetweenSpec {
    /// The latency of a small message.
    pub latency_us: f64,
    /// How long a rank is busy with sending one message and receiving one.
    pub message_us: f64,
    /// What goes over a host's link, each way.
    pub bytes_per_us: f64,
    /// What a rank adds up while it receives.
    pub reduce_bytes_per_us: f64,
    /// How much of a core an exchange takes while it is under way, from 0 to 1.
    pub core_share: f64,
}

impl BetweenSpec {
    /// A link of this latency and bandwidth between fast hosts.
    pub fn new(latency_us: f64, gbits: f64) -> BetweenSpec {
        BetweenSpec {
            latency_us,
            message_us: MESSAGE_US,
            bytes_per_us: gbits * 125.0,
            reduce_bytes_per_us: REDUCE_BYTES_PER_US,
            core_share: 0.0,
        }
    }

    /// The same link with less bandwidth. Sockets take as much of a core for each byte as before, and so a smaller share of it.
    pub fn slowed_to(&self, bytes_per_us: f64) -> BetweenSpec {
        let share = (bytes_per_us / self.bytes_per_us).min(1.0);
        BetweenSpec { bytes_per_us, core_share: self.core_share * share, ..*self }
    }

    /// A link that takes no time.
    pub fn free() -> BetweenSpec {
        BetweenSpec {
            latency_us: 0.0,
            message_us: 0.0,
            bytes_per_us: f64::INFINITY,
            reduce_bytes_per_us: f64::INFINITY,
            core_share: 0.0,
        }
    }
}

impl InsideSpec {
    /// Ranks that reach each other in this way, on a host whose cores copy so many bytes per microsecond.
    pub fn new(by: InsideBy, bytes_per_us: f64) -> InsideSpec {
        let loopback = BetweenSpec { core_share: 1.0, ..BetweenSpec::new(20.0, 16.0) };
        InsideSpec { by, meet_us: MEET_US, bytes_per_us, sockets: loopback, measured: None }
    }

    /// Ranks that exchange in no time.
    pub fn free() -> InsideSpec {
        InsideSpec {
            by: InsideBy::Threads,
            meet_us: 0.0,
            bytes_per_us: f64::INFINITY,
            sockets: BetweenSpec::free(),
            measured: None,
        }
    }
}

/// The cost of a message on a host of today, where a file does not say: that of `Costs::default` in `collective`.
const MESSAGE_US: f64 = 6.0;
/// What a core adds up, in bytes per microsecond, where a file does not say.
const REDUCE_BYTES_PER_US: f64 = 8000.0;
/// Two ranks that spin see each other in less; with more of them, some sleep.
const MEET_US: f64 = 1.0;
/// What a core keeps in its own caches, where a file does not say.
const CACHE_MIB: f64 = 1.0;

/// Why a description of a cluster is refused.
#[derive(Clone, PartialEq, Debug, Error)]
pub enum ClusterError {
    /// It is not TOML, a key is missing or unknown.
    #[error("the cluster cannot be read: {0}")]
    Syntax(String),
    /// A number makes no sense.
    #[error("`{key}` is {value}; {want}")]
    Number {
        /// The key.
        key: String,
        /// What it is.
        value: f64,
        /// What it should be.
        want: &'static str,
    },
    /// There are no hosts.
    #[error("the cluster has no hosts; add a `[[hosts]]` section")]
    NoHosts,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ClusterFile {
    #[serde(default)]
    hosts: Vec<HostsFile>,
    #[serde(default)]
    inside: InsideFile,
    #[serde(default)]
    between: BetweenFile,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HostsFile {
    #[serde(default = "one")]
    count: usize,
    cores: usize,
    memory_gib: f64,
    gflops: f64,
    gflops_bf16: Option<f64>,
    core_gbs: f64,
    memory_gbs: Option<f64>,
    cache_mib: Option<f64>,
    speed: Option<f64>,
    price: Option<f64>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct InsideFile {
    #[serde(default)]
    by: InsideBy,
    latency_us: Option<f64>,
    gbs: Option<f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BetweenFile {
    latency_us: f64,
    gbits: f64,
    message_us: Option<f64>,
    reduce_gbs: Option<f64>,
}

impl Default for BetweenFile {
    /// Ten gigabits in a data centre.
    fn default() -> BetweenFile {
        BetweenFile { latency_us: 30.0, gbits: 10.0, message_us: None, reduce_gbs: None }
    }
}

fn one() -> usize {
    1
}

impl Cluster {
    /// Reads a description.
    pub fn parse(text: &str) -> Result<Cluster, ClusterError> {
        let file: ClusterFile = toml::from_str(text).map_err(|e| ClusterError::Syntax(e.to_string()))?;
        let mut hosts = Vec::new();
        for (i, group) in file.hosts.iter().enumerate() {
            group.check(i)?;
            hosts.extend(std::iter::repeat_n(group.host(), group.count));
        }
        let first = file.hosts.first().filter(|_| !hosts.is_empty()).ok_or(ClusterError::NoHosts)?;
        above_zero("between.latency_us", file.between.latency_us + f64::MIN_POSITIVE)?;
        above_zero("between.gbits", file.between.gbits)?;
        let mut between = BetweenSpec::new(file.between.latency_us, file.between.gbits);
        between.message_us = file.between.message_us.unwrap_or(MESSAGE_US);
        between.reduce_bytes_per_us = file.between.reduce_gbs.map_or(REDUCE_BYTES_PER_US, |gbs| gbs * 1e3);
        above_zero("between.reduce_gbs", between.reduce_bytes_per_us)?;
        let mut inside = InsideSpec::new(file.inside.by, file.inside.gbs.unwrap_or(first.core_gbs) * 1e3);
        inside.meet_us = file.inside.latency_us.unwrap_or(MEET_US);
        above_zero("inside.gbs", inside.bytes_per_us)?;
        Ok(Cluster { hosts, inside, between })
    }

    /// Hosts that are all alike, with default links inside.
    pub fn of(hosts: usize, host: &HostSpec, between: BetweenSpec) -> Cluster {
        let bytes_per_us = match &host.speed {
            HostSpeed::Described(speed) => speed.core_bytes_per_us,
            HostSpeed::Measured(calibration) => calibration.copy_bytes_per_us(),
        };
        Cluster {
            hosts: vec![host.clone(); hosts],
            inside: InsideSpec::new(InsideBy::Threads, bytes_per_us),
            between,
        }
    }

    /// So many hosts like the one that was calibrated, with these links between them.
    pub fn measured(
        calibration: &Arc<Calibration>,
        hosts: usize,
        by: InsideBy,
        between: BetweenSpec,
    ) -> Cluster {
        let host = HostSpec {
            cores: calibration.machine.cores,
            memory_bytes: calibration.machine.memory_bytes,
            process_bytes: f64::INFINITY,
            speed: HostSpeed::Measured(calibration.clone()),
            slowness: 1.0,
            price: None,
        };
        let inside = InsideSpec {
            by,
            meet_us: calibration.links.meet_us,
            bytes_per_us: calibration.copy_bytes_per_us(),
            sockets: calibration.links.loopback,
            measured: Some(calibration.clone()),
        };
        Cluster { hosts: vec![host; hosts], inside, between }
    }

    /// The price of all hosts per hour; `None` if that of one is not known.
    pub fn price_per_hour(&self) -> Option<f64> {
        self.hosts.iter().map(|host| host.price).sum()
    }
}

impl HostsFile {
    fn check(&self, i: usize) -> Result<(), ClusterError> {
        let numbers = [
            ("cores", Some(self.cores as f64)),
            ("memory_gib", Some(self.memory_gib)),
            ("gflops", Some(self.gflops)),
            ("gflops_bf16", self.gflops_bf16),
            ("core_gbs", Some(self.core_gbs)),
            ("memory_gbs", self.memory_gbs),
            ("cache_mib", self.cache_mib),
            ("speed", self.speed),
        ];
        for (key, value) in numbers {
            above_zero(&format!("hosts[{i}].{key}"), value.unwrap_or(1.0))?;
        }
        above_zero(&format!("hosts[{i}].price"), self.price.unwrap_or(0.0) + f64::MIN_POSITIVE)
    }

    fn host(&self) -> HostSpec {
        let speed = Described {
            flops_per_us: self.gflops * 1e3,
            half_flops_per_us: self.gflops_bf16.unwrap_or(self.gflops) * 1e3,
            core_bytes_per_us: self.core_gbs * 1e3,
            host_bytes_per_us: self.memory_gbs.unwrap_or(self.core_gbs * self.cores as f64) * 1e3,
            cache_bytes: self.cache_mib.unwrap_or(CACHE_MIB) * f64::from(1 << 20),
            ..Described::default()
        };
        HostSpec {
            cores: self.cores,
            memory_bytes: self.memory_gib * f64::from(1 << 30),
            process_bytes: f64::INFINITY,
            speed: HostSpeed::Described(speed),
            slowness: 1.0 / self.speed.unwrap_or(1.0),
            price: self.price,
        }
    }
}

fn above_zero(key: &str, value: f64) -> Result<(), ClusterError> {
    match value > 0.0 && value.is_finite() {
        true => Ok(()),
        false => Err(ClusterError::Number { key: key.into(), value, want: "it must be above 0" }),
    }
}
