//! Several hosts with several ranks each: memory inside hosts, sockets between their first ranks.

use std::net::TcpListener;
use std::time::Duration;

use polyreme_collective::{Comm, ShmSetup};
use polyreme_net::links::Bounds;
use polyreme_net::{Encrypt, JoinOptions, Joined, Links, Secret, join as meet};

use super::Transport;
use super::join::{Found, GENERATION, JoinFailure, start_time};

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

/// Joins the two levels. All ranks have found each other; first ranks of hosts meet once more.
pub(super) fn over_levels(
    joined: Joined,
    secret: Secret,
    encrypt: Encrypt,
    job: &str,
) -> Result<Found, JoinFailure> {
    let Joined { rank, members, streams, control, .. } = joined;
    let keys: Vec<&str> = members.iter().map(|m| m.host_key.as_str()).collect();
    let hosts = by_host(&keys);
    let host = hosts.iter().position(|ranks| ranks.contains(&rank)).expect("every rank has a host");
    let ranks = hosts[host].clone();
    let (leader, here) = (ranks[0], ranks.len());
    let fail = |why: String| {
        control.fail(&why);
        JoinFailure::Memory(why)
    };
    let leads = rank == leader;
    let own =
        (leads && here > 1).then(|| Comm::segment(here)).transpose().map_err(|e| fail(e.to_string()))?;
    let listener = (rank == 0).then(|| TcpListener::bind((members[0].addr.ip(), 0))).transpose();
    let listener = listener.map_err(JoinFailure::Listen)?;
    // Everybody tells what it has made: a path of memory, and where first ranks meet.
    let path = own.as_ref().and_then(|s| s.path()).unwrap_or_default();
    let address = listener.as_ref().and_then(|l| l.local_addr().ok()).map(|a| a.to_string());
    let said = format!("{path}\n{}", address.unwrap_or_default());
    let said = control.share(said.as_bytes()).map_err(JoinFailure::Lost)?;
    let line = |rank: usize, n: usize| {
        let text = String::from_utf8_lossy(&said[rank]);
        text.lines().nth(n).unwrap_or_default().to_string()
    };
    let inside = match here {
        1 => Comm::alone(),
        _ => {
            let segment = match own {
                Some(segment) => segment,
                None => Comm::open_segment(&line(leader, 0), here).map_err(|e| fail(e.to_string()))?,
            };
            let place = ranks.iter().position(|r| *r == rank).expect("its host has the rank");
            let (name, world) = (members[rank].host.clone(), ranks.clone());
            let setup = ShmSetup::new(place, here, segment);
            // The control plane judges who is stuck.
            let (alarm, stall) = (control.alarm(), Duration::MAX);
            let setup = ShmSetup { host: name, world, alarm, stall, ..setup };
            Comm::shm(setup).map_err(JoinFailure::Lost)?
        }
    };
    let between = match leads {
        false => None,
        true => {
            let leaders: Vec<usize> = hosts.iter().map(|ranks| ranks[0]).collect();
            let options = JoinOptions::new(host, hosts.len(), line(0, 1), secret);
            let bind = Some(members[rank].addr.ip());
            let job = format!("{job}, first ranks of hosts");
            let generation = GENERATION;
            let listener = listener.map(Into::into);
            let (timeout, patience) = (start_time(hosts.len()), control.patience());
            let options =
                JoinOptions { bind, listener, job, generation, encrypt, timeout, patience, ..options };
            let met = meet(options).map_err(JoinFailure::Join)?;
            // The first meeting's control watches over all; this one is only for its streams.
            met.control.goodbye().map_err(JoinFailure::Lost)?;
            let names = leaders.iter().map(|&r| members[r].host.clone()).collect();
            let links = Links::over(host, names, met.streams, GENERATION, control.alarm());
            let mut links = links.map_err(JoinFailure::Listen)?;
            links.set_names(leaders);
            links.set_bounds(Bounds::watched(control.patience()));
            Some(links)
        }
    };
    let names = members.iter().map(|m| m.host.clone()).collect();
    let every_two = Links::over(rank, names, streams, GENERATION, control.alarm());
    let mut every_two = every_two.map_err(JoinFailure::Listen)?;
    every_two.set_bounds(Bounds::watched(control.patience()));
    let mut comm = Comm::two_level(hosts, inside, between, every_two).map_err(JoinFailure::Lost)?;
    comm.tell(&control);
    Ok(Found { comm, control: Some(control), transport: Transport::Tcp })
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
