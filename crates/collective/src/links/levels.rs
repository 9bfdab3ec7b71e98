//! Two levels: inside each host first, then between hosts, so that a host's data cross the network once.
//!
//! Each host has a leader, its first rank. With `h` hosts and `b` bytes:
//!
//! - **All-reduce**: inside each host the data are reduced to the leader; the leaders all-reduce between them (`2 b (h - 1) / h`
//!   bytes per host on the network, whatever the number of ranks per host); inside each host the leader broadcasts.
//! - **Reduce-scatter**: inside, everything is reduced to the leader; between, the leaders reduce-scatter by host; inside, the
//!   leader broadcasts its host's range, of which each rank keeps its own. `b (h - 1) / h` bytes.
//! - **All-gather**: inside, the ranges of a host are gathered; between, the leaders all-gather by host; inside, the leader
//!   broadcasts the whole.
//! - **Broadcast**: inside the root's host, then between leaders, then inside the other hosts.
//! - **Barrier**: ranks report to their leader, the leaders meet, and then release their ranks.
//!
//! Any [`Level`] can be inside (shared memory or links), and any between. Reduction inside and between
//! is deterministic if the levels are; all ranks get the leader's bits, and all leaders the same ones.
//!
//! If a rank dies, its host's ranks learn of it from the inner level and the leader tells the other leaders; if a
//! leader dies, the other leaders see that too, and each tells its host.

use polyreme_net::Report;

use super::Linked;
use crate::comm::Comm;
use crate::element::{Element, Reduce};
use crate::work::Cuts;

/// A group of ranks as a level of a larger one.
pub trait Level {
    /// This rank in the level.
    fn rank(&self) -> usize;
    /// How many ranks the level has.
    fn size(&self) -> usize;
    /// Every rank gets the reduction of all.
    fn all_reduce<T: Element>(&mut self, data: &mut [T], reduce: Reduce) -> Result<(), Report>;
    /// The first rank gets the reduction of all; the others' data are unspecified.
    fn reduce_to_first<T: Element>(&mut self, data: &mut [T], reduce: Reduce) -> Result<(), Report> {
        self.all_reduce(data, reduce)
    }
    /// Each rank gets the reduction of its range.
    fn reduce_scatter<T: Element>(
        &mut self,
        data: &mut [T],
        cuts: &Cuts,
        reduce: Reduce,
    ) -> Result<(), Report>;
    /// Every rank gets the ranges of all.
    fn all_gather<T: Element>(&mut self, data: &mut [T], cuts: &Cuts) -> Result<(), Report>;
    /// Every rank gets the data of `root`.
    fn broadcast<T: Element>(&mut self, data: &mut [T], root: usize) -> Result<(), Report>;
    /// All ranks wait for each other.
    fn barrier(&mut self) -> Result<(), Report>;
    /// Tells the others that this rank fails.
    fn fail(&mut self, why: &str);
}

macro_rules! level {
    ($t:ty, $($own:item)*) => {
        impl Level for $t {
            fn rank(&self) -> usize {
                <$t>::rank(self)
            }
            fn size(&self) -> usize {
                <$t>::size(self)
            }
            fn all_reduce<T: Element>(&mut self, data: &mut [T], reduce: Reduce) -> Result<(), Report> {
                <$t>::all_reduce(self, data, reduce)
            }
            fn reduce_scatter<T: Element>(
                &mut self,
                data: &mut [T],
                cuts: &Cuts,
                reduce: Reduce,
            ) -> Result<(), Report> {
                <$t>::reduce_scatter(self, data, cuts, reduce)
            }
            fn all_gather<T: Element>(&mut self, data: &mut [T], cuts: &Cuts) -> Result<(), Report> {
                <$t>::all_gather(self, data, cuts)
            }
            fn broadcast<T: Element>(&mut self, data: &mut [T], root: usize) -> Result<(), Report> {
                <$t>::broadcast(self, data, root)
            }
            fn barrier(&mut self) -> Result<(), Report> {
                <$t>::barrier(self)
            }
            fn fail(&mut self, why: &str) {
                <$t>::fail(self, why);
            }
            $($own)*
        }
    };
}
level!(Comm,);
level!(
    Linked,
    fn reduce_to_first<T: Element>(&mut self, data: &mut [T], reduce: Reduce) -> Result<(), Report> {
        self.reduce(data, reduce, 0)
    }
);

/// A group of ranks on several hosts.
pub struct TwoLevel<I, B> {
    rank: usize,
    /// The ranks of each host, in the order of the inner level.
    hosts: Vec<Vec<usize>>,
    host: usize,
    inside: I,
    /// For the first rank of each host.
    between: Option<B>,
}

impl<I: Level, B: Level> TwoLevel<I, B> {
    /// Combines two levels. `hosts` has the ranks of each host; `inside` is the level of this rank's host, in that
    /// order; `between` has the hosts as its ranks, and only the first rank of each host has it.
    ///
    /// # Panics
    /// If the levels are not those that `hosts` describes.
    pub fn new(rank: usize, hosts: Vec<Vec<usize>>, inside: I, between: Option<B>) -> TwoLevel<I, B> {
        let host = hosts.iter().position(|ranks| ranks.contains(&rank)).expect("a host has the rank");
        let place = hosts[host].iter().position(|r| *r == rank);
        assert!(place == Some(inside.rank()) && inside.size() == hosts[host].len(), "the ranks of its host");
        let leads = between.as_ref().map(|level| (level.rank(), level.size()));
        assert_eq!(leads, (inside.rank() == 0).then_some((host, hosts.len())), "a leader of each host");
        TwoLevel { rank, hosts, host, inside, between }
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.hosts.iter().map(Vec::len).sum()
    }

    /// Tells the others that this rank fails.
    pub fn fail(&mut self, why: &str) {
        self.inside.fail(why);
        if let Some(between) = &mut self.between {
            between.fail(why);
        }
    }

    /// Every rank gets the reduction of all.
    pub fn all_reduce<T: Element>(&mut self, data: &mut [T], reduce: Reduce) -> Result<(), Report> {
        self.all_reduce_by(data, reduce, |between, data| between.all_reduce(data, reduce))
    }

    /// The same, with another way to reduce between the hosts' leaders.
    pub fn all_reduce_by<T: Element>(
        &mut self,
        data: &mut [T],
        reduce: Reduce,
        by: impl FnOnce(&mut B, &mut [T]) -> Result<(), Report>,
    ) -> Result<(), Report> {
        self.inside(|inside| inside.reduce_to_first(data, reduce))?;
        self.between(|between| by(between, data))?;
        self.inside(|inside| inside.broadcast(data, 0))
    }

    /// The level between hosts, if this rank leads its own.
    pub fn leading(&self) -> Option<&B> {
        self.between.as_ref()
    }

    /// Each rank gets the reduction of its own range; the rest of the memory is unspecified.
    pub fn reduce_scatter<T: Element>(
        &mut self,
        data: &mut [T],
        cuts: &Cuts,
        reduce: Reduce,
    ) -> Result<(), Report> {
        let Some(by_host) = self.by_host(cuts) else { return self.all_reduce(data, reduce) };
        self.inside(|inside| inside.reduce_to_first(data, reduce))?;
        self.between(|between| between.reduce_scatter(data, &by_host, reduce))?;
        let own = by_host[self.host]..by_host[self.host + 1];
        self.inside(|inside| inside.broadcast(&mut data[own], 0))
    }

    /// Every rank gets the ranges of all.
    pub fn all_gather<T: Element>(&mut self, data: &mut [T], cuts: &Cuts) -> Result<(), Report> {
        let Some(by_host) = self.by_host(cuts) else {
            // Ranges of a host that are not contiguous go one after the other.
            for rank in 0..self.size() {
                self.broadcast(&mut data[cuts[rank]..cuts[rank + 1]], rank)?;
            }
            return Ok(());
        };
        let first = self.hosts[self.host][0];
        let within: Cuts = cuts[first..=first + self.hosts[self.host].len()].into();
        self.inside(|inside| inside.all_gather(data, &within))?;
        self.between(|between| between.all_gather(data, &by_host))?;
        self.inside(|inside| inside.broadcast(data, 0))
    }

    /// Every rank gets the data of `root`.
    pub fn broadcast<T: Element>(&mut self, data: &mut [T], root: usize) -> Result<(), Report> {
        let host = self.hosts.iter().position(|ranks| ranks.contains(&root)).expect("the root is a rank");
        let place = self.hosts[host].iter().position(|r| *r == root).expect("its host has it");
        if self.host == host {
            self.inside(|inside| inside.broadcast(data, place))?;
        }
        self.between(|between| between.broadcast(data, host))?;
        if self.host == host {
            return Ok(());
        }
        self.inside(|inside| inside.broadcast(data, 0))
    }

    /// Waits until every rank is here.
    pub fn barrier(&mut self) -> Result<(), Report> {
        self.inside(I::barrier)?;
        self.between(B::barrier)?;
        self.inside(I::barrier)
    }

    /// Cuts by host, if each host's ranges are contiguous and in the order of hosts.
    fn by_host(&self, cuts: &Cuts) -> Option<Cuts> {
        let in_order = self.hosts.iter().flatten().copied().eq(0..self.size());
        let ends = self.hosts.iter().scan(0, |rank, ranks| {
            *rank += ranks.len();
            Some(cuts[*rank])
        });
        in_order.then(|| std::iter::once(cuts[0]).chain(ends).collect())
    }

    fn inside(&mut self, run: impl FnOnce(&mut I) -> Result<(), Report>) -> Result<(), Report> {
        let done = run(&mut self.inside);
        if let (Err(report), Some(between)) = (&done, &mut self.between) {
            between.fail(&report.to_string());
        }
        done
    }

    fn between(&mut self, run: impl FnOnce(&mut B) -> Result<(), Report>) -> Result<(), Report> {
        let Some(between) = &mut self.between else { return Ok(()) };
        let done = run(between);
        if let Err(report) = &done {
            self.inside.fail(&report.to_string());
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use polyreme_net::{Cause, loopback};

    use super::*;

    type Both = TwoLevel<Comm, Linked>;

    /// Threads of a process as the ranks of a host, sockets between the leaders.
    fn on_all<R: Send>(hosts: &[Vec<usize>], run: impl Fn(Both) -> R + Sync) -> Vec<R> {
        let mut ranks = Vec::new();
        for (members, links) in hosts.iter().zip(loopback::links(hosts.len()).unwrap()) {
            let mut between = Some(Linked::over(links));
            for (rank, inside) in members.iter().zip(Comm::local(members.len())) {
                ranks.push(TwoLevel::new(*rank, hosts.to_vec(), inside, between.take()));
            }
        }
        ranks.sort_by_key(Both::rank);
        let run = &run;
        thread::scope(|scope| {
            let ranks: Vec<_> = ranks.into_iter().map(|both| scope.spawn(move || run(both))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    fn check(both: &mut Both, count: usize) {
        let (r, n) = (both.rank(), both.size());
        let cuts: Cuts = (0..=n).map(|k| count * (k * k) / (n * n)).collect();
        let own = cuts[r]..cuts[r + 1];
        let mine = || (0..count).map(|i| (r * i) as i64).collect::<Vec<_>>();
        let sum = |i: usize| (i * n * (n - 1) / 2) as i64;
        let mut data = mine();
        both.all_reduce(&mut data, Reduce::Sum).unwrap();
        assert!(data.iter().enumerate().all(|(i, x)| *x == sum(i)), "all-reduce at {r}");
        let mut data = mine();
        both.reduce_scatter(&mut data, &cuts, Reduce::Sum).unwrap();
        assert!(own.clone().all(|i| data[i] == sum(i)), "reduce-scatter at {r}");
        let mut data = vec![-1; count];
        own.for_each(|i| data[i] = (1000 * r + i) as i64);
        both.all_gather(&mut data, &cuts).unwrap();
        for owner in 0..n {
            assert!((cuts[owner]..cuts[owner + 1]).all(|i| data[i] == (1000 * owner + i) as i64));
        }
        for root in 0..n {
            let mut numbers = vec![r as f64; count];
            both.broadcast(&mut numbers, root).unwrap();
            assert!(numbers.iter().all(|x| *x == root as f64), "broadcast from {root} at {r}");
        }
        both.barrier().unwrap();
    }

    #[test]
    fn hosts_of_any_shape() {
        let shapes: [&[&[usize]]; 5] =
            [&[&[0]], &[&[0, 1, 2]], &[&[0], &[1], &[2]], &[&[0, 1], &[2, 3, 4], &[5]], &[&[0, 2], &[3, 1]]];
        for hosts in shapes {
            let hosts: Vec<Vec<usize>> = hosts.iter().map(|host| host.to_vec()).collect();
            on_all(&hosts, |mut both| [0, 1, 3, 1000, 50_003].map(|count| check(&mut both, count)));
        }
    }

    /// A leader fails: its own host and the other one both end.
    #[test]
    fn a_failure_crosses_levels() {
        let reports = on_all(&[vec![0, 1], vec![2, 3]], |mut both| {
            if both.rank() == 2 {
                both.fail("out of luck");
                return None;
            }
            Some(both.all_reduce(&mut [1.0f32; 100], Reduce::Sum).unwrap_err())
        });
        for report in reports.into_iter().flatten() {
            let Cause::Failed { why } = &report.cause else { panic!("{report}") };
            assert!(why.contains("out of luck"), "{report}");
        }
    }
}
