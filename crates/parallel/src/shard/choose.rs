//! Which parameters are sharded, and along which dim. It follows from their shapes, so it is the same on every rank, and for
//! training and evaluation.

use polyreme_graph::{Graph, Part};

/// Parameters with fewer elements stay on every rank: 4 KiB are sent in less time than a rank takes to start an exchange.
const ELEMENTS_MIN: usize = 1024;

/// A rank's place among those that shard weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShardPlace {
    /// Its coordinate along the data axis.
    pub rank: usize,
    /// How many ranks there are along it.
    pub ranks: usize,
    /// Whether gradients are added up in the fixed tree of reproducible steps: they stay whole until then, and only runs of rows
    /// are sharded (see `leaves`).
    pub in_tree: bool,
}

/// The shard of a parameter with these dims that a rank keeps; `None` if every rank keeps all of it.
pub fn shard_of(dims: &[usize], place: ShardPlace) -> Option<Part> {
    let divides = |n: &usize| n.is_multiple_of(place.ranks);
    let dim = if place.in_tree {
        dims.first().filter(|n| divides(n)).map(|_| 0)
    } else {
        dims.iter().position(divides)
    }?;
    is_large(dims).then_some(Part { dim, groups: 1, index: place.rank, of: place.ranks })
}

/// Why the weights of a step cannot be sharded over this many ranks, if they cannot: most of them would stay whole.
pub fn refusal(step: &Graph, place: ShardPlace) -> Option<String> {
    let ranks = place.ranks;
    let dims = |p: usize| step.shape(step.params[p].value).dims();
    let numel = |p: &usize| dims(*p).iter().product::<usize>();
    let large: Vec<usize> = (0..step.params.len()).filter(|p| is_large(dims(*p))).collect();
    let (sharded, whole): (Vec<usize>, Vec<usize>) =
        large.into_iter().partition(|p| shard_of(dims(*p), place).is_some());
    let count = |of: &[usize]| of.iter().map(numel).sum::<usize>();
    if let Some(largest) = whole.iter().max_by_key(|p| numel(p)).filter(|_| count(&whole) > count(&sharded)) {
        let (name, dims) = (&step.params[*largest].name, dims(*largest));
        let which = if place.in_tree {
            "with `reproducible` rows are sharded, and they do not divide"
        } else {
            "no dim divides"
        };
        return Some(format!(
            "`shard_weights` over {ranks} data ranks would leave most weights whole, such as `{name}` {dims:?}: \
             {which} by {ranks}; use a number of data ranks that divides the layers' widths, or leave it out"
        ));
    }
    sharded.is_empty().then(|| {
        format!(
            "no parameter has {ELEMENTS_MIN} elements, so `shard_weights` would save nothing; leave it out"
        )
    })
}

/// Whether a parameter is worth an exchange of its own.
fn is_large(dims: &[usize]) -> bool {
    dims.len() >= 2 && dims.iter().product::<usize>() >= ELEMENTS_MIN
}
