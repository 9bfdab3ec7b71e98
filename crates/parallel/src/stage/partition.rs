//! Choosing where to cut: the slowest chunk as fast as it can be, in two exact searches.
//!
//! A pipeline is as fast as its slowest chunk. Positions ([`positions`]) divide the forward pass into slots, and a
//! chunk is a run of slots with some parameters. Dynamic programming finds the least cost `T` of the slowest chunk, and then,
//! among all cuts whose chunks cost at most `T`, the one that sends the fewest bytes. With `m` slots and `n` chunks it looks
//! at `n·m²/2` runs.

use std::collections::BTreeSet;

use polyreme_graph::cost::cost;
use polyreme_graph::{Graph, ValueId};

use super::by_name::PlaceError;
use super::homes::Homes;
use super::positions::{Position, positions};
use super::tied::users;

/// What a chunk holds.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ChunkLoad {
    /// Elements of its parameters.
    pub params: usize,
    /// Bytes of a microbatch that its backward pass needs of its forward pass, without recomputation.
    pub kept_bytes: usize,
}

/// A bound on the memory of each rank.
#[derive(Clone, Copy)]
pub struct MemoryBound<'a> {
    /// The most that a chunk may take.
    pub bytes: usize,
    /// What a chunk takes: its number, and what it holds. The schedule knows how many microbatches are in flight, and the
    /// optimizer how much it keeps.
    pub takes: &'a dyn Fn(usize, ChunkLoad) -> usize,
}

/// The chunk of each node of the forward pass, for `n_chunks` chunks of which the slowest is as fast as possible. `cost` is
/// the time of a node, in any unit.
pub fn partition(
    step: &Graph,
    n_chunks: usize,
    cost: &dyn Fn(usize) -> f64,
    memory: Option<MemoryBound>,
) -> Result<Vec<usize>, PlaceError> {
    let cuts = choose(step, n_chunks, cost, memory)?;
    Ok(place(step, &cuts.iter().map(|p| p.node).collect::<Vec<_>>()))
}

/// The positions between these chunks.
pub fn choose(
    step: &Graph,
    n_chunks: usize,
    cost: &dyn Fn(usize) -> f64,
    memory: Option<MemoryBound>,
) -> Result<Vec<Position>, PlaceError> {
    let positions = positions(step);
    let slots = Slots::new(step, &positions, cost);
    let (n, m) = (n_chunks.max(1), positions.len() + 1);
    let most = (0..m).filter(|&slot| slots.loads[slot][0].params > 0).count().max(1);
    if n > most {
        return Err(PlaceError::TooMany { wanted: n, most });
    }
    let takes =
        |k: usize, a: usize, b: usize| memory.map_or(0, |bound| (bound.takes)(k, slots.loads[a][b - a - 1]));
    let bound = memory.map_or(usize::MAX, |bound| bound.bytes);
    let time = |k: usize, a: usize, b: usize| {
        let learns = n == 1 || slots.loads[a][b - a - 1].params > 0;
        if learns && takes(k, a, b) <= bound { slots.cost(a, b) } else { f64::INFINITY }
    };
    let Some((slowest, _)) = best(n, m, &time, &f64::max) else {
        let least =
            best(n, m, &|k, a, b| takes(k, a, b) as f64, &f64::max).map_or(0, |(bytes, _)| bytes as usize);
        return Err(PlaceError::Memory { n_chunks: n, bound_bytes: bound, least_bytes: least });
    };
    // Sums of the same costs may differ in their last bits.
    let allowed = slowest * (1.0 + 1e-9);
    let sent = |k: usize, a: usize, b: usize| match a.checked_sub(1) {
        _ if time(k, a, b) > allowed => f64::INFINITY,
        Some(position) => positions[position].bytes as f64,
        None => 0.0,
    };
    let (_, starts) = best(n, m, &sent, &|a, b| a + b).expect("the cut that was found is one");
    Ok(starts[1..].iter().map(|&slot| positions[slot - 1].clone()).collect())
}

/// The chunk of each node of the forward pass if it is cut before these nodes, ascending.
pub(crate) fn place(step: &Graph, cuts: &[usize]) -> Vec<usize> {
    (0..step.n_forward).map(|i| cuts.partition_point(|&cut| cut <= i)).collect()
}

/// The cost of each chunk, forward and backward pass.
pub fn chunk_costs(step: &Graph, place: &[usize], cost: &dyn Fn(usize) -> f64) -> Vec<f64> {
    let homes = Homes::new(step, place);
    let mut costs = vec![0.0; homes.n_chunks()];
    for i in 0..step.nodes.len() {
        if let Some(chunk) = homes.of_node(i) {
            costs[chunk] += cost(i);
        }
    }
    costs
}

/// The cost of a node by its row: floating-point operations.
pub fn flops(step: &Graph) -> impl Fn(usize) -> f64 + '_ {
    |i| cost(step, &step.nodes[i]).flops as f64
}

/// The least `combined` weight of `n` runs that cover slots `0..m`, none empty, and the first slot of each. `weight` is that of
/// run `k` from slot `a` to before `b`; infinite if it may not be. `None` if there is no way.
fn best(
    n: usize,
    m: usize,
    weight: &dyn Fn(usize, usize, usize) -> f64,
    combined: &dyn Fn(f64, f64) -> f64,
) -> Option<(f64, Vec<usize>)> {
    // By number of runs and end: the least weight, and where the last run starts.
    let mut table = vec![vec![(f64::INFINITY, 0); m + 1]; n + 1];
    table[0][0].0 = 0.0;
    for k in 0..n {
        for b in k + 1..=m {
            for a in k..b {
                let before = table[k][a].0;
                if before.is_infinite() {
                    continue;
                }
                let total = combined(before, weight(k, a, b));
                if total < table[k + 1][b].0 {
                    table[k + 1][b] = (total, a);
                }
            }
        }
    }
    let total = table[n][m].0;
    if total.is_infinite() {
        return None;
    }
    let mut starts = vec![0; n];
    let mut end = m;
    for k in (0..n).rev() {
        end = table[k + 1][end].1;
        starts[k] = end;
    }
    Some((total, starts))
}

/// The runs of nodes between positions: what they cost and hold.
struct Slots {
    /// By slot: the cost of all before it; one more at the end.
    cost_before: Vec<f64>,
    /// By first slot, and number of slots less one.
    loads: Vec<Vec<ChunkLoad>>,
}

impl Slots {
    fn new(step: &Graph, positions: &[Position], cost: &dyn Fn(usize) -> f64) -> Slots {
        let cuts: Vec<usize> = positions.iter().map(|p| p.node).collect();
        // Each slot as a chunk of its own.
        let place = place(step, &cuts);
        let mut costs = chunk_costs(step, &place, cost);
        costs.resize(positions.len() + 1, 0.0);
        let mut cost_before = vec![0.0];
        cost_before.extend(costs.iter().scan(0.0, |sum, cost| {
            *sum += cost;
            Some(*sum)
        }));
        let homes = Homes::new(step, &place);
        let mut params = vec![Vec::new(); costs.len()];
        for (p, slots) in users(step, &homes).iter().enumerate() {
            slots.iter().for_each(|&slot| params[slot].push(p));
        }
        let kept = kept(step, &homes, costs.len());
        let from = |a: usize| {
            let (mut seen_params, mut seen_values) = (BTreeSet::new(), BTreeSet::new());
            let mut load = ChunkLoad::default();
            let upto = |slot: usize| {
                for &p in params[slot].iter().filter(|p| seen_params.insert(**p)) {
                    load.params += step.shape(step.params[p].value).numel();
                }
                for &v in kept[slot].iter().filter(|v| seen_values.insert(**v)) {
                    load.kept_bytes += step.value(v).bytes();
                }
                load
            };
            (a..costs.len()).map(upto).collect()
        };
        Slots { cost_before, loads: (0..costs.len()).map(from).collect() }
    }

    fn cost(&self, a: usize, b: usize) -> f64 {
        self.cost_before[b] - self.cost_before[a]
    }
}

/// By slot: what its backward pass reads of the forward pass, leaves apart.
fn kept(step: &Graph, homes: &Homes, n_slots: usize) -> Vec<BTreeSet<ValueId>> {
    let mut kept = vec![BTreeSet::new(); n_slots];
    for i in step.n_forward..step.nodes.len() {
        let Some(slot) = homes.of_node(i) else { continue };
        for &v in &step.nodes[i].inputs {
            let source = homes.source(step, v);
            let forward = step.value(source).producer.idx() < step.n_forward;
            if forward && homes.of_value(step, source).is_some() {
                kept[slot].insert(source);
            }
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::best;

    /// Every way to cover `m` slots with `n` runs, by their first slots.
    fn ways(n: usize, m: usize) -> Vec<Vec<usize>> {
        let sets = (0..1usize << (m - 1)).filter(|set| set.count_ones() as usize == n - 1);
        let starts = |set: usize| (0..m).filter(move |&i| i == 0 || set >> (i - 1) & 1 == 1).collect();
        sets.map(starts).collect()
    }

    #[test]
    fn the_best_of_all_ways_is_found() {
        let mut state = 1u32;
        for m in 1..=8 {
            let mut random = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                f64::from(state >> 24)
            };
            let weights: Vec<f64> = (0..m).map(|_| random()).collect();
            let weight =
                |k: usize, a: usize, b: usize| weights[a..b].iter().sum::<f64>() * (1.0 + k as f64 / 8.0);
            for n in 1..=m {
                for combined in [&f64::max as &dyn Fn(f64, f64) -> f64, &|a, b| a + b] {
                    let total = |starts: &[usize]| {
                        let end = |k: usize| starts.get(k + 1).copied().unwrap_or(m);
                        (0..n).fold(0.0, |sum, k| combined(sum, weight(k, starts[k], end(k))))
                    };
                    let least = ways(n, m).iter().map(|w| total(w)).fold(f64::INFINITY, f64::min);
                    let (found, starts) = best(n, m, &weight, combined).unwrap();
                    assert_eq!((found, total(&starts)), (least, least), "{n} runs of {weights:?}");
                }
            }
        }
    }

    #[test]
    fn there_may_be_no_way() {
        assert_eq!(best(3, 2, &|_, _, _| 0.0, &f64::max), None);
        assert_eq!(best(1, 2, &|_, a, b| if b - a > 1 { f64::INFINITY } else { 1.0 }, &f64::max), None);
    }
}
