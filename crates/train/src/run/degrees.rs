//! Over how many ranks the sums inside of a reproducible step are split: checkpoints record it, and a run that goes on with another
//! number says what that means.
//!
//! The numbers of data ranks and of stages change no bit of a reproducible run, and neither do sharded weights. Ranks of the
//! tensor axis each add up a part of a product, and ranks of the sequence axis a part of a gradient, so the order of these
//! sums, and the last bits, follow from how many there are.

use polyreme_parallel::Mesh;
use serde::{Deserialize, Serialize};

/// The numbers of ranks that the bits of a reproducible run depend on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Degrees {
    /// Along the tensor axis.
    pub tensor: usize,
    /// Along the sequence axis.
    pub sequence: usize,
}

impl Degrees {
    /// Those of a mesh.
    pub(super) fn of(mesh: &Mesh) -> Degrees {
        Degrees { tensor: mesh.tensor, sequence: mesh.sequence }
    }

    /// In words that follow "reproducible on any number of data ranks and stages with".
    pub fn words(&self) -> String {
        format!("tensor = {} and sequence = {}", self.tensor, self.sequence)
    }
}

/// What is to be said if a checkpoint of a reproducible run has these degrees and the run goes on with those; nothing if the bits
/// stay the same, or if either is not reproducible or not known.
pub(super) fn change(before: Option<Degrees>, now: Option<Degrees>) -> Option<String> {
    let (before, now) = (before?, now?);
    (before != now).then(|| {
        format!(
            "up to the checkpoint sums were split over {}, from here on over {}: the run goes on, but its bits will differ from \
             those of a run that was not moved; data ranks and stages change no bit",
            before.words(),
            now.words()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_degree_is_named_where_it_matters() {
        let degrees = |tensor, sequence| Some(Degrees { tensor, sequence });
        for same in [(None, degrees(2, 1)), (degrees(2, 1), None), (degrees(2, 4), degrees(2, 4))] {
            assert_eq!(change(same.0, same.1), None);
        }
        for (before, now) in [(degrees(2, 1), degrees(1, 1)), (degrees(1, 2), degrees(1, 4))] {
            let said = change(before, now).unwrap();
            let (a, b) = (before.unwrap().words(), now.unwrap().words());
            assert!(said.contains(&format!("split over {a}, from here on over {b}")), "{said}");
            assert!(said.contains("bits will differ") && !said.contains('\n'), "{said}");
        }
    }
}
