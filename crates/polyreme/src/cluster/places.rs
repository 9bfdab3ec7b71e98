//! Where each rank runs: every rank reports its host, its process and its cores, and rank 0 shows them.

use std::fmt;

use polyreme_collective::{Comm, Cuts};
use polyreme_graph::Axis;
use polyreme_net::Report;
use polyreme_parallel::Mesh;
use serde::Serialize;

use super::cores;

/// Bytes of a rank's row on the wire.
const RECORD_BYTES: usize = 512;

/// Where a rank runs.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct RankRow {
    /// The rank.
    pub rank: usize,
    /// Its host.
    pub host: String,
    /// Its process.
    pub pid: u32,
    /// Its threads.
    pub threads: usize,
    /// The cores that they may use, as `0-3,8`; empty if it is not pinned.
    pub cores: String,
    /// What carries its data.
    pub transport: String,
}

impl RankRow {
    /// The row of a rank of this process.
    pub fn here(rank: usize, threads: usize, pinned: Option<&[usize]>, transport: &str) -> RankRow {
        RankRow {
            rank,
            host: host(),
            pid: std::process::id(),
            threads,
            cores: pinned.map(cores::list).unwrap_or_default(),
            transport: transport.into(),
        }
    }

    fn to_bytes(&self) -> Vec<u8> {
        // Long names are cut: this is for people.
        let cut = |text: &str, n| text.chars().filter(|c| *c != '\t').take(n).collect::<String>();
        let (host, cores) = (cut(&self.host, 60), cut(&self.cores, 120));
        let line = format!("{host}\t{}\t{}\t{cores}\t{}", self.pid, self.threads, cut(&self.transport, 20));
        let mut bytes = line.into_bytes();
        bytes.resize(RECORD_BYTES, 0);
        bytes
    }

    fn from_bytes(rank: usize, bytes: &[u8]) -> RankRow {
        let text = String::from_utf8_lossy(bytes);
        let mut words = text.trim_end_matches('\0').split('\t');
        let mut word = || words.next().unwrap_or("?").to_string();
        let host = word();
        let (pid, threads) = (word().parse().unwrap_or(0), word().parse().unwrap_or(0));
        RankRow { rank, host, pid, threads, cores: word(), transport: word() }
    }
}

/// Exchanges rows: every rank gets all of them.
pub fn gather(comm: &mut Comm, own: &RankRow) -> Result<Vec<RankRow>, Report> {
    let size = comm.size();
    let cuts: Cuts = (0..=size).map(|r| r * RECORD_BYTES).collect();
    let mut bytes = vec![0u8; size * RECORD_BYTES];
    let at = comm.rank() * RECORD_BYTES;
    bytes[at..at + RECORD_BYTES].copy_from_slice(&own.to_bytes());
    comm.all_gather(&mut bytes, &cuts)?;
    let rows = bytes.chunks_exact(RECORD_BYTES).enumerate();
    Ok(rows.map(|(rank, bytes)| RankRow::from_bytes(rank, bytes)).collect())
}

/// A table of rows for people.
pub struct RankTable<'a>(pub &'a [RankRow]);

impl fmt::Display for RankTable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let wide = |name: &str, of: &dyn Fn(&RankRow) -> usize| {
            self.0.iter().map(of).max().unwrap_or(0).max(name.len())
        };
        let (host, cores) = (wide("host", &|r| r.host.len()), wide("cores", &|r| r.cores.len()));
        writeln!(
            f,
            "  rank  {:<host$}  {:>8}  {:>7}  {:<cores$}  transport",
            "host", "process", "threads", "cores"
        )?;
        for r in self.0 {
            let shown = if r.cores.is_empty() { "any" } else { &r.cores };
            writeln!(
                f,
                "  {:>4}  {:<host$}  {:>8}  {:>7}  {shown:<cores$}  {}",
                r.rank, r.host, r.pid, r.threads, r.transport
            )?;
        }
        Ok(())
    }
}

/// What to say if a group along the tensor axis, which exchanges something in every layer, is on several hosts.
pub fn tensor_apart(rows: &[RankRow], mesh: &Mesh) -> Option<String> {
    let apart = |group: &Vec<usize>| group.iter().any(|rank| rows[*rank].host != rows[group[0]].host);
    let group = mesh.groups(Axis::Tensor).into_iter().find(apart)?;
    let hosts = |group: &[usize]| {
        let mut names: Vec<&str> = group.iter().map(|rank| rows[*rank].host.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        names
    };
    let names = hosts(&group);
    let all: Vec<usize> = (0..rows.len()).collect();
    // The fewest ranks that a host has: groups no larger than that could be inside of hosts.
    let of_host = |name: &str| rows.iter().filter(|row| row.host == name).count();
    let fewest = hosts(&all).into_iter().map(of_host).min().unwrap_or(0);
    let advice = match fewest.is_multiple_of(mesh.tensor) {
        true => {
            "number the ranks of a host in a row (mpirun --map-by slot, srun --distribution=block)".into()
        }
        false => format!("use a tensor that divides the {fewest} ranks of a host"),
    };
    let ranks: Vec<String> = group.iter().map(usize::to_string).collect();
    Some(format!(
        "ranks {} split each matrix and are on hosts {}: every layer waits for the network; {advice}",
        ranks.join(", "),
        names.join(", ")
    ))
}

/// This host's name.
pub fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_that_are_split_over_hosts_are_pointed_out() {
        let said = |hosts: &[&str], tensor: usize| {
            let row = |(rank, host): (usize, &&str)| RankRow {
                host: (*host).into(),
                ..RankRow::here(rank, 1, None, "tcp")
            };
            let rows: Vec<_> = hosts.iter().enumerate().map(row).collect();
            tensor_apart(&rows, &Mesh { tensor, stage: hosts.len() / tensor, ..Mesh::data(1) })
        };
        assert_eq!(said(&["a", "a", "b", "b"], 2), None);
        assert_eq!(said(&["a", "b", "a", "b"], 1), None);
        let by_turns = said(&["a", "b", "a", "b"], 2).unwrap();
        assert!(by_turns.starts_with("ranks 0, 1 ") && by_turns.contains("on hosts a, b"), "{by_turns}");
        assert!(by_turns.contains("in a row"), "{by_turns}");
        let large = said(&["a", "a", "b", "b"], 4).unwrap();
        assert!(large.contains("divides the 2 ranks of a host"), "{large}");
    }

    #[test]
    fn rows_are_gathered_and_shown() {
        let ranks: Vec<_> = Comm::local(3)
            .into_iter()
            .map(|mut comm| {
                std::thread::spawn(move || {
                    let cores = [2 * comm.rank(), 2 * comm.rank() + 1];
                    let own = RankRow {
                        host: "h\tx".into(),
                        ..RankRow::here(comm.rank(), 2, Some(&cores), "local")
                    };
                    gather(&mut comm, &own).unwrap()
                })
            })
            .collect();
        for rows in ranks.into_iter().map(|r| r.join().unwrap()) {
            assert_eq!(rows.iter().map(|r| r.cores.as_str()).collect::<Vec<_>>(), ["0-1", "2-3", "4-5"]);
            assert!(rows.iter().all(|r| r.host == "hx" && r.pid == std::process::id()), "{rows:?}");
            let table = RankTable(&rows).to_string();
            assert_eq!(table.lines().count(), 4);
            assert!(table.contains("4-5") && table.contains("local"), "{table}");
        }
        assert!(!host().is_empty());
        let long = RankRow { host: "é".repeat(500), ..RankRow::here(0, 1, None, "tcp") };
        assert_eq!(RankRow::from_bytes(0, &long.to_bytes()).transport, "tcp");
    }
}
