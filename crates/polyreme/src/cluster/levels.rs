//! Several hosts with several ranks each: shared memory inside hosts, sockets between their first ranks.

use std::time::Duration;

use polyreme_collective::links::peers;
use polyreme_collective::{Comm, ShmSetup};
use polyreme_net::{Joined, Member};

use super::Transport;
use super::join::{ALL_RANKS, JoinFailure, JoinedRank, joined_by};

/// The ranks of each host, hosts in the order of their first ranks.
pub(super) fn by_host(keys: &[&str]) -> Vec<Vec<usize>> {
    let mut hosts: Vec<(&str, Vec<usize>)> = Vec::new();
    for (rank, key) in keys.iter().enumerate() {
        match hosts.iter_mut().find(|(k, _)| k == key) {
            Some((_, ranks)) => ranks.push(rank),
            None => hosts.push((key, vec![rank])),
        }
    }
    hosts.into_iter().map(|(_, ranks)| ranks).collect()
}

/// The group of the first ranks of hosts; that of all is 0.
const FIRST_RANKS: u16 = 1;

/// The pairs that talk first: first ranks with each other. Other pairs on different hosts talk only if they send
/// messages to each other.
pub(super) fn talks(members: &[Member], rank: usize) -> Vec<(u16, usize)> {
    let leaders = leaders(&hosts(members));
    let Some(place) = leaders.iter().position(|leader| *leader == rank) else { return Vec::new() };
    peers(place, leaders.len()).into_iter().map(|peer| (FIRST_RANKS, leaders[peer])).collect()
}

/// The ranks of each host.
pub(super) fn hosts(members: &[Member]) -> Vec<Vec<usize>> {
    by_host(&members.iter().map(|m| m.host_key.as_str()).collect::<Vec<_>>())
}

fn leaders(hosts: &[Vec<usize>]) -> Vec<usize> {
    hosts.iter().map(|ranks| ranks[0]).collect()
}

/// Combines the two levels, after all ranks have joined.
pub(super) fn over_levels(joined: Joined) -> Result<JoinedRank, JoinFailure> {
    let Joined { rank, size, ref members, ref control, .. } = joined;
    let hosts = hosts(members);
    let host = hosts.iter().position(|ranks| ranks.contains(&rank)).expect("every rank has a host");
    let ranks = hosts[host].clone();
    let (leader, here) = (ranks[0], ranks.len());
    let fail = |why: String| {
        control.fail(&why);
        JoinFailure::Memory(why)
    };
    let leads = rank == leader;
    let own = (leads && here > 1)
        .then(|| Comm::segment(here, joined.generation()))
        .transpose()
        .map_err(|e| fail(e.to_string()))?;
    // Every rank announces the memory that it has created.
    let path = own.as_ref().and_then(|s| s.path()).unwrap_or_default();
    let paths = control.share(path.as_bytes()).map_err(JoinFailure::Lost)?;
    let inside = match here {
        1 => Comm::alone(),
        _ => {
            let segment = match own {
                Some(segment) => segment,
                None => {
                    Comm::open_segment(&String::from_utf8_lossy(&paths[leader]), here, joined.generation())
                        .map_err(|e| fail(e.to_string()))?
                }
            };
            let place = ranks.iter().position(|r| *r == rank).expect("its host has the rank");
            let (name, world) = (members[rank].host.clone(), ranks.clone());
            let setup = ShmSetup::new(place, here, segment);
            // The control plane decides which rank is stuck.
            let (alarm, stall) = (control.alarm(), Duration::MAX);
            let setup = ShmSetup { host: name, world, alarm, stall, ..setup };
            Comm::shm(setup).map_err(JoinFailure::Lost)?
        }
    };
    let between = leads.then(|| joined.links(FIRST_RANKS, &leaders(&hosts))).transpose();
    let between = between.map_err(JoinFailure::Listen)?;
    let all: Vec<usize> = (0..size).collect();
    let every_two = joined.links(ALL_RANKS, &all).map_err(JoinFailure::Listen)?;
    let comm = Comm::two_level(hosts, inside, between, every_two).map_err(JoinFailure::Lost)?;
    Ok(joined_by(joined, comm, Transport::Tcp))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_grouped_by_host() {
        assert_eq!(by_host(&["a", "b", "a", "c", "b"]), [vec![0, 2], vec![1, 4], vec![3]]);
        assert_eq!(by_host(&[]), Vec::<Vec<usize>>::new());
    }
}
