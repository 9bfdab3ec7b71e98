//! Cuts by name, chosen by hand or by [`choose`](super::partition::choose()).

use polyreme_graph::Graph;

use super::partition::place;
use super::points::Places;
use super::positions::unit;

/// How many names an error suggests.
const SUGGESTED: usize = 5;

/// Why a step cannot be cut as asked.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PlaceError {
    /// More chunks than the model has parts.
    #[error(
        "the model can be cut into at most {most} stages, and {wanted} are asked for; use fewer stages or more layers"
    )]
    TooMany {
        /// How many chunks were asked for.
        wanted: usize,
        /// How many there can be.
        most: usize,
    },
    /// No cut keeps all chunks within the bound.
    #[error(
        "no cut into {n_chunks} stages fits: one stage needs at least {least_bytes} bytes, and a rank may use {bound_bytes}; use more stages or smaller microbatches"
    )]
    Memory {
        /// How many chunks were asked for.
        n_chunks: usize,
        /// The bound.
        bound_bytes: usize,
        /// What the largest chunk needs at least.
        least_bytes: usize,
    },
    /// A cut names no layer.
    #[error("cannot cut before `{name}`: there is no such layer; near it are {}", near.join(", "))]
    Unknown {
        /// The name.
        name: String,
        /// Names that there are.
        near: Vec<String>,
    },
    /// A cut before the first layer.
    #[error(
        "cannot cut before `{name}`: it is where the model begins; name the first layer of the second stage"
    )]
    First {
        /// The name.
        name: String,
    },
    /// Two cuts in one place.
    #[error("cuts before `{a}` and `{b}` are the same; remove one of the two")]
    Same {
        /// A name.
        a: String,
        /// Another one.
        b: String,
    },
}

/// The chunk of each node of the forward pass if the step is cut in these places.
pub fn place_by_name(step: &Graph, cuts: &[impl AsRef<str>]) -> Result<Vec<usize>, PlaceError> {
    Ok(place(step, &nodes_by_name(step, cuts)?))
}

/// The nodes before which a step is cut, ascending, by the names of the places.
pub(crate) fn nodes_by_name(step: &Graph, cuts: &[impl AsRef<str>]) -> Result<Vec<usize>, PlaceError> {
    let places = Places::new(step);
    let nodes = places.nodes();
    let mut found: Vec<(usize, &str)> = Vec::new();
    for name in cuts.iter().map(AsRef::as_ref) {
        let node = places
            .find(name)
            .ok_or_else(|| PlaceError::Unknown { name: name.into(), near: near(step, nodes, name) })?;
        if node == nodes[0] {
            return Err(PlaceError::First { name: name.into() });
        }
        if let Some((_, other)) = found.iter().find(|(at, _)| *at == node) {
            return Err(PlaceError::Same { a: (*other).into(), b: name.into() });
        }
        found.push((node, name));
    }
    found.sort_unstable();
    Ok(found.into_iter().map(|(node, _)| node).collect())
}

/// Layers whose names are like `name`: those with the longest common beginning, and of these the ones that end alike.
fn near(step: &Graph, nodes: &[usize], name: &str) -> Vec<String> {
    let mut units: Vec<&str> = Vec::new();
    for &i in nodes {
        let unit = unit(&step.nodes[i].layer);
        if !units.contains(&unit) {
            units.push(unit);
        }
    }
    let alike = |a: &mut dyn Iterator<Item = char>, b: &mut dyn Iterator<Item = char>| {
        a.zip(b).take_while(|(a, b)| a == b).count()
    };
    units.sort_by_key(|unit| {
        let (begin, end) = (
            alike(&mut unit.chars(), &mut name.chars()),
            alike(&mut unit.chars().rev(), &mut name.chars().rev()),
        );
        std::cmp::Reverse((begin, end))
    });
    units.into_iter().take(SUGGESTED).map(String::from).collect()
}
