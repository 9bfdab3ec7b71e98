//! The machine's cores: which of them this process may use, by NUMA node, and which rank gets which.
//!
//! Ranks get **sets** of cores, and the system moves a rank's threads inside its set. Together the sets are all cores
//! that the process may use, so two jobs that run at the same time with few threads do not share a core.

use std::fs;
use std::io;
use std::path::Path;

use rustix::process::{Pid, getppid};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The cores that this process may use.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Machine {
    /// Cores of each NUMA node that has any; hardware threads of one core are adjacent.
    pub nodes: Vec<Vec<usize>>,
    /// The CPU quota of this process in cores, if that is less than the cores it may run on (a container's limit). Then
    /// it owns no core, so nothing is pinned.
    pub quota: Option<usize>,
    /// A launcher such as `mpirun` or `srun` bound this process to these cores: other ranks have others.
    pub bound: bool,
}

impl Machine {
    /// Reads it from the system.
    pub fn read() -> Machine {
        let parallel = std::thread::available_parallelism().map_or(1, |n| n.get());
        let Some(allowed) = affinity(None) else {
            return Machine { nodes: vec![(0..parallel).collect()], quota: Some(parallel), bound: false };
        };
        let of_parent = getppid().and_then(|parent| affinity(Some(parent)));
        let bound = of_parent.is_some_and(|parent| parent.len() > allowed.len());
        let quota = (parallel < allowed.len()).then_some(parallel);
        Machine { nodes: by_node(Path::new("/sys/devices/system"), &allowed), quota, bound }
    }

    /// How many threads can run at once.
    pub fn cores(&self) -> usize {
        let cores = self.nodes.iter().map(Vec::len).sum::<usize>().max(1);
        self.quota.map_or(cores, |quota| quota.clamp(1, cores))
    }

    /// The cores of each of `ranks` ranks of this host: whole nodes if there are more nodes than ranks; otherwise each
    /// node is divided between its ranks. If there are more ranks than cores, they share.
    pub fn shares(&self, ranks: usize) -> Vec<Vec<usize>> {
        let (ranks, n_nodes) = (ranks.max(1), self.nodes.len().max(1));
        if self.nodes.iter().all(Vec::is_empty) {
            return vec![Vec::new(); ranks];
        }
        if ranks <= n_nodes {
            let cut = |rank: usize| rank * n_nodes / ranks;
            return (0..ranks).map(|r| self.nodes[cut(r)..cut(r + 1)].concat()).collect();
        }
        let mut shares = Vec::with_capacity(ranks);
        for (node, n) in self.nodes.iter().zip(self.ranks_of_nodes(ranks)) {
            shares.extend((0..n).map(|i| part(node, i, n)));
        }
        shares
    }

    /// How many ranks each node gets: one each, and the others where a rank would have the most cores.
    fn ranks_of_nodes(&self, ranks: usize) -> Vec<usize> {
        let mut n = vec![1; self.nodes.len()];
        for _ in self.nodes.len()..ranks {
            let roomy = |&k: &usize| (self.nodes[k].len() * 1000 / (n[k] + 1), usize::MAX - k);
            let most = (0..n.len()).max_by_key(roomy).expect("there are nodes");
            n[most] += 1;
        }
        n
    }

    /// How many threads a rank with this share has, out of `ranks` ranks of this host.
    pub fn threads(&self, share: &[usize], ranks: usize) -> usize {
        match self.quota {
            None => share.len().max(1),
            Some(_) => share.len().min(self.cores() / ranks.max(1)).max(1),
        }
    }
}

/// Pins the calling thread, and those that it will start, to these cores.
pub fn pin(cores: &[usize]) -> io::Result<()> {
    let mut set = CpuSet::new();
    cores.iter().filter(|c| **c < CpuSet::MAX_CPU).for_each(|c| set.set(*c));
    if set.count() == 0 {
        return Ok(());
    }
    Ok(sched_setaffinity(None, &set)?)
}

/// The cores that the calling thread may run on now.
pub fn pinned() -> Vec<usize> {
    affinity(None).unwrap_or_default()
}

/// A list of cores as text: `0-3,8`.
pub fn list(cores: &[usize]) -> String {
    let mut sorted = cores.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    let runs = sorted.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [one] => one.to_string(),
        [first, .., last] => format!("{first}-{last}"),
        [] => String::new(),
    });
    runs.collect::<Vec<_>>().join(",")
}

/// Parses what [`list`] writes; the system's files have the same form.
pub fn parse_list(text: &str) -> Option<Vec<usize>> {
    let mut cores = Vec::new();
    for piece in text.trim().split(',').filter(|p| !p.is_empty()) {
        let (first, last) = piece.split_once('-').unwrap_or((piece, piece));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if first > last || last >= CpuSet::MAX_CPU {
            return None;
        }
        cores.extend(first..=last);
    }
    Some(cores)
}

fn affinity(pid: Option<Pid>) -> Option<Vec<usize>> {
    let set = sched_getaffinity(pid).ok()?;
    let cores: Vec<_> = (0..CpuSet::MAX_CPU).filter(|c| set.is_set(*c)).collect();
    (!cores.is_empty()).then_some(cores)
}

/// Sorts the allowed cores by the nodes that `sys` describes; one node where it says nothing.
fn by_node(sys: &Path, allowed: &[usize]) -> Vec<Vec<usize>> {
    let read = |path: &str| fs::read_to_string(sys.join(path)).ok().and_then(|text| parse_list(&text));
    // The first hardware thread of a core stands for the core.
    let place = |cpu: usize| {
        let siblings = read(&format!("cpu/cpu{cpu}/topology/thread_siblings_list"));
        (siblings.and_then(|s| s.into_iter().min()).unwrap_or(cpu), cpu)
    };
    let mut nodes = Vec::new();
    let mut left: Vec<_> = allowed.to_vec();
    for node in read("node/online").unwrap_or_default() {
        let of_node = read(&format!("node/node{node}/cpulist")).unwrap_or_default();
        let (here, elsewhere) = left.into_iter().partition(|c| of_node.contains(c));
        left = elsewhere;
        nodes.push(here);
    }
    nodes.push(left);
    nodes.retain(|n: &Vec<usize>| !n.is_empty());
    nodes.iter_mut().for_each(|node| node.sort_by_key(|c| place(*c)));
    nodes
}

/// Part `i` of `n` of a node's cores; shared where there are not enough.
fn part(node: &[usize], i: usize, n: usize) -> Vec<usize> {
    if n > node.len() {
        return vec![node[i * node.len() / n]];
    }
    node[i * node.len() / n..(i + 1) * node.len() / n].to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(nodes: &[&str]) -> Machine {
        let nodes = nodes.iter().map(|n| parse_list(n).unwrap()).collect();
        Machine { nodes, quota: None, bound: false }
    }

    #[track_caller]
    fn check(nodes: &[&str], ranks: usize, want: &[&str]) {
        let machine = machine(nodes);
        let shares = machine.shares(ranks);
        assert_eq!(shares.iter().map(|s| list(s)).collect::<Vec<_>>(), want);
        // No rank gets a core that is not allowed, and no core is left idle.
        let (mut all, mut given) = (machine.nodes.concat(), shares.concat());
        all.sort_unstable();
        given.sort_unstable();
        given.dedup();
        assert!(given.iter().all(|c| all.contains(c)));
        assert!(ranks > all.len() || given == all, "{given:?} of {all:?}");
    }

    #[test]
    fn ranks_get_cores_of_one_node() {
        check(&["0-1"], 1, &["0-1"]);
        check(&["0-1"], 2, &["0", "1"]);
        check(&["0-1"], 3, &["0", "0", "1"]);
        check(&["0-7"], 3, &["0-1", "2-4", "5-7"]);
        check(&["0-3", "4-7"], 1, &["0-7"]);
        check(&["0-3", "4-7"], 2, &["0-3", "4-7"]);
        check(&["0-3", "4-7"], 3, &["0-1", "2-3", "4-7"]);
        check(&["0-3", "4-7"], 4, &["0-1", "2-3", "4-5", "6-7"]);
        check(&["0-1", "2-3", "4-5", "6-7"], 2, &["0-3", "4-7"]);
        check(&["0-1", "2-3", "4-5"], 2, &["0-1", "2-5"]);
        // A node with few allowed cores gets fewer ranks.
        check(&["0-5", "8"], 4, &["0-1", "2-3", "4-5", "8"]);
    }

    #[test]
    fn lists_are_read_and_written() {
        for (text, cores) in [("", vec![]), ("3", vec![3]), ("0-2,5", vec![0, 1, 2, 5]), ("0,2", vec![0, 2])]
        {
            assert_eq!(parse_list(text).unwrap(), cores);
            assert_eq!(list(&cores), text);
        }
        for bad in ["x", "3-1", "0-99999999999", "1-", "-1", "5000"] {
            assert_eq!(parse_list(bad), None, "{bad}");
        }
    }

    #[test]
    fn nodes_come_from_the_system_with_siblings_together() {
        let sys = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = sys.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("node/online", "0-1\n");
        write("node/node0/cpulist", "0-1,4-5\n");
        write("node/node1/cpulist", "2-3,6-7\n");
        for cpu in 0..8 {
            let first = cpu % 4;
            write(
                &format!("cpu/cpu{cpu}/topology/thread_siblings_list"),
                &format!("{first},{}\n", first + 4),
            );
        }
        let all: Vec<_> = (0..8).collect();
        assert_eq!(by_node(sys.path(), &all), [vec![0, 4, 1, 5], vec![2, 6, 3, 7]]);
        assert_eq!(by_node(sys.path(), &[1, 5]), [vec![1, 5]]);
        // A core that no node lists is still used, and so is a machine without these files.
        assert_eq!(by_node(sys.path(), &[0, 9]), [vec![0], vec![9]]);
        assert_eq!(by_node(Path::new("/nowhere"), &[0, 1]), [vec![0, 1]]);
    }

    #[test]
    fn a_quota_limits_threads_and_a_thread_keeps_its_cores() {
        let limited = Machine { quota: Some(2), ..machine(&["0-7"]) };
        assert_eq!(limited.cores(), 2);
        assert_eq!(limited.threads(&limited.shares(1)[0], 1), 2);
        assert_eq!(limited.threads(&limited.shares(4)[0], 4), 1);

        let here = Machine::read();
        assert!(here.cores() >= 1);
        let first = here.nodes[0][0];
        let inherited = std::thread::spawn(move || {
            pin(&[first]).unwrap();
            std::thread::spawn(pinned).join().unwrap()
        });
        assert_eq!(inherited.join().unwrap(), [first]);
        assert_eq!(
            pinned().len(),
            here.nodes.iter().map(Vec::len).sum::<usize>(),
            "this thread is as it was"
        );
    }
}
