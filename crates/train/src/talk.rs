//! What ranks tell each other outside of steps: bytes, and whether they are about to do the same thing.

use polyreme_collective::{Cause, Comm, Reduce, Report};

use crate::error::TrainError;

/// What one rank tells the others is small; more than this is a mistake.
const BYTES_MAX: usize = 1 << 28;

/// Every rank gets the bytes that `root` has. Collective.
pub(crate) fn broadcast(comm: &mut Comm, bytes: Vec<u8>, root: usize) -> Result<Vec<u8>, TrainError> {
    let mut len = [bytes.len() as i64];
    comm.broadcast(&mut len, root)?;
    let len = usize::try_from(len[0]).ok().filter(|len| *len <= BYTES_MAX);
    let Some(len) = len else {
        let what = "it announced more than a rank has to tell".into();
        return Err(disagreement(root, "broadcast", what).into());
    };
    let mut bytes = if comm.rank() == root { bytes } else { vec![0; len] };
    comm.broadcast(&mut bytes, root)?;
    Ok(bytes)
}

/// Rank 0 gets the bytes of all, one after the other. Collective.
pub(crate) fn gather(comm: &mut Comm, bytes: Vec<u8>) -> Result<Option<Vec<u8>>, TrainError> {
    let lens = gather_all(comm, &[bytes.len().min(BYTES_MAX) as f64])?;
    let mut cuts = vec![0usize];
    cuts.extend(lens.iter().scan(0usize, |sum, len| {
        *sum += *len as usize;
        Some(*sum)
    }));
    let (rank, total) = (comm.rank(), cuts[lens.len()]);
    let mut all = vec![0u8; if rank == 0 { total } else { 0 }];
    let mine = &bytes[..cuts[rank + 1] - cuts[rank]];
    comm.gather(mine, (rank == 0).then_some(&mut all[..]), &cuts.into(), 0)?;
    Ok((rank == 0).then_some(all))
}

/// Every rank gets the numbers of all, those of rank `r` at `r * mine.len()`. Collective, and exact.
pub(crate) fn gather_all(comm: &mut Comm, mine: &[f64]) -> Result<Vec<f64>, TrainError> {
    let mut all = vec![0.0; comm.size() * mine.len()];
    all[comm.rank() * mine.len()..][..mine.len()].copy_from_slice(mine);
    // Everybody else has zeros there, and adding them changes nothing.
    comm.all_reduce(&mut all, Reduce::Sum)?;
    Ok(all)
}

/// A number for a text, by which texts are told apart.
pub(crate) fn digest(text: &str) -> u64 {
    let hash = blake3::hash(text.as_bytes());
    u64::from_le_bytes(hash.as_bytes()[..8].try_into().expect("a hash has 32 bytes"))
}

/// Ends with a report that names the first rank whose `text` is not that of rank 0. Collective.
pub(crate) fn agree(comm: &mut Comm, op: &str, text: &str, what: &str) -> Result<(), TrainError> {
    let mut all = vec![0i64; comm.size()];
    all[comm.rank()] = digest(text).cast_signed();
    comm.all_reduce(&mut all, Reduce::Sum)?;
    match all.iter().position(|hash| *hash != all[0]) {
        Some(rank) => Err(disagreement(rank, op, what.into()).into()),
        None => Ok(()),
    }
}

fn disagreement(rank: usize, op: &str, what: String) -> Report {
    Report { rank, host: String::new(), step: 0, op: op.into(), cause: Cause::Disagrees { what } }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `f` on three ranks and returns what each gets.
    fn on_ranks<T: Send>(f: impl Fn(&mut Comm) -> T + Sync) -> Vec<T> {
        std::thread::scope(|s| {
            let ranks: Vec<_> = Comm::local(3)
                .into_iter()
                .map(|mut comm| {
                    let f = &f;
                    s.spawn(move || f(&mut comm))
                })
                .collect();
            ranks.into_iter().map(|r| r.join().unwrap()).collect()
        })
    }

    #[test]
    fn bytes_and_numbers_reach_everybody() {
        for root in 0..3 {
            let told = on_ranks(|comm| {
                let mine = if comm.rank() == root { b"a plan".to_vec() } else { b"nothing at all".to_vec() };
                broadcast(comm, mine, root).unwrap()
            });
            assert_eq!(told, vec![b"a plan".to_vec(); 3]);
        }
        let empty = on_ranks(|comm| broadcast(comm, Vec::new(), 1).unwrap());
        assert_eq!(empty, vec![Vec::<u8>::new(); 3]);
        let all = on_ranks(|comm| gather_all(comm, &[comm.rank() as f64, 0.1]).unwrap());
        assert_eq!(all, vec![vec![0.0, 0.1, 1.0, 0.1, 2.0, 0.1]; 3]);
    }

    #[test]
    fn a_rank_with_another_job_is_named() {
        let outcome = on_ranks(|comm| {
            let job = if comm.rank() == 2 { "batch 32" } else { "batch 64" };
            agree(comm, "comparing jobs", job, "its job is another").map_err(|e| e.to_string())
        });
        let want = "rank 2 disagrees with the others: its job is another (at step 0, in comparing jobs)";
        assert_eq!(outcome, vec![Err(want.to_string()); 3]);
        assert!(on_ranks(|comm| agree(comm, "x", "same", "y").is_ok()).into_iter().all(|ok| ok));
    }
}
