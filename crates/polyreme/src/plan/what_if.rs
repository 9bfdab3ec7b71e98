//! What if: a cluster with other hosts or links, or a job with other steps.

use polyreme_sim::Cluster;

use super::machine::with_hosts;

/// A change.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Change {
    /// Another number of hosts.
    Hosts(usize),
    /// Another bandwidth between hosts, in Gbit/s.
    Bandwidth(f64),
    /// Another latency between hosts, in microseconds.
    Latency(f64),
    /// One host that has this share of its speed.
    Slow(f64),
    /// So many hosts fewer.
    Lost(usize),
    /// Another number of samples per step.
    Batch(usize),
}

/// What can be changed, for messages.
const KEYS: &str = "hosts=16, bandwidth=10G (bits per second), latency=50 (microseconds), slow=0.5 (the speed of one host), \
                    lost=1 (hosts) or batch=1024";

impl Change {
    /// Reads changes such as `hosts=16,bandwidth=10G`.
    pub fn parse(text: &str) -> Result<Vec<Change>, String> {
        text.split(',').map(|word| Change::one(word.trim())).collect()
    }

    fn one(word: &str) -> Result<Change, String> {
        let refuse = || format!("--what-if: `{word}` is not understood; write {KEYS}");
        let (key, value) = word.split_once('=').ok_or_else(refuse)?;
        let (key, value) = (key.trim(), value.trim());
        let count = || value.parse::<usize>().ok().filter(|n| *n > 0).ok_or_else(refuse);
        let positive = |text: &str| text.trim().parse::<f64>().ok().filter(|x| *x > 0.0 && x.is_finite());
        match key {
            "hosts" => Ok(Change::Hosts(count()?)),
            "lost" => Ok(Change::Lost(count()?)),
            "batch" => Ok(Change::Batch(count()?)),
            "slow" => positive(value).map(Change::Slow).ok_or_else(refuse),
            "latency" => positive(value.trim_end_matches("us")).map(Change::Latency).ok_or_else(refuse),
            "bandwidth" => {
                let (number, gbits) = match value.strip_suffix(['G', 'g']) {
                    Some(number) => (number, 1.0),
                    None => match value.strip_suffix(['M', 'm']) {
                        Some(number) => (number, 1e-3),
                        None => (value, 1e-9),
                    },
                };
                positive(number).map(|n| Change::Bandwidth(n * gbits)).ok_or_else(refuse)
            }
            _ => Err(refuse()),
        }
    }

    /// The change in words.
    pub fn words(&self) -> String {
        match self {
            Change::Hosts(n) => format!("{n} hosts"),
            Change::Bandwidth(gbits) => format!("{gbits} Gbit/s"),
            Change::Latency(us) => format!("latency {us} us"),
            Change::Slow(speed) => format!("one host at {:.0} %", speed * 100.0),
            Change::Lost(1) => "a lost host".into(),
            Change::Lost(n) => format!("{n} lost hosts"),
            Change::Batch(n) => format!("batch {n}"),
        }
    }

    /// The samples of a step, if this changes them.
    pub fn batch(&self) -> Option<usize> {
        if let Change::Batch(n) = self { Some(*n) } else { None }
    }

    /// The cluster with this change.
    pub fn apply(&self, cluster: &Cluster) -> Result<Cluster, String> {
        let mut changed = cluster.clone();
        match *self {
            Change::Hosts(n) => changed = with_hosts(cluster, n),
            Change::Bandwidth(gbits) => changed.between.bytes_per_us = gbits * 125.0,
            Change::Latency(us) => changed.between.latency_us = us,
            Change::Slow(speed) => changed.hosts[0].slowness /= speed,
            Change::Lost(n) if n < cluster.hosts.len() => changed.hosts.truncate(cluster.hosts.len() - n),
            Change::Lost(n) => {
                return Err(format!("--what-if: {n} lost hosts of {} leave none", cluster.hosts.len()));
            }
            Change::Batch(_) => {}
        }
        Ok(changed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_read() {
        let read = |text: &str| Change::parse(text);
        assert_eq!(read("hosts=16, bandwidth=10G"), Ok(vec![Change::Hosts(16), Change::Bandwidth(10.0)]));
        assert_eq!(read("bandwidth=500M"), Ok(vec![Change::Bandwidth(0.5)]));
        assert_eq!(read("latency=50us,slow=0.5,lost=1,batch=8").unwrap().len(), 4);
        for wrong in ["", "hosts", "hosts=0", "speed=2", "slow=-1", "bandwidth=fast"] {
            assert!(read(wrong).unwrap_err().contains("bandwidth=10G"), "{wrong}");
        }
    }

    #[test]
    fn changes_change_the_cluster() {
        let text = "[[hosts]]\ncount = 4\ncores = 2\nmemory_gib = 8\ngflops = 50\ncore_gbs = 10\n";
        let cluster = Cluster::parse(text).unwrap();
        assert_eq!(Change::Hosts(9).apply(&cluster).unwrap().hosts.len(), 9);
        assert_eq!(Change::Lost(3).apply(&cluster).unwrap().hosts.len(), 1);
        assert!(Change::Lost(4).apply(&cluster).is_err());
        assert_eq!(Change::Slow(0.5).apply(&cluster).unwrap().hosts[0].slowness, 2.0);
        assert_eq!(Change::Bandwidth(8.0).apply(&cluster).unwrap().between.bytes_per_us, 1000.0);
    }
}
