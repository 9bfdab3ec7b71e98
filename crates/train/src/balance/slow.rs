//! Which ranks are much slower than the others for a while: said once, and once more when it is over.

use super::{Look, typical_units};

/// A rank whose units take so many times as long as those of the others is slow.
const SLOW: f64 = 2.0;
/// One that takes less than so many times as long is not.
const FINE: f64 = 1.3;
/// For so many looks in a row.
const LOOKS: usize = 2;
/// A rank with less than this of an equal share is not known to be as fast as the others, whatever it looks like.
const SHARE: f64 = 0.8;

/// What is known of the ranks of a run.
#[derive(Clone, Debug)]
pub struct SlowRanks {
    /// What each is called.
    names: Vec<String>,
    /// Whether each is said to be slow.
    said: Vec<bool>,
    /// For how many looks it has been otherwise.
    otherwise: Vec<usize>,
    /// How many times as long as the others each took in the last looks.
    times: Vec<[f64; LOOKS]>,
}

impl SlowRanks {
    /// Of ranks with these names.
    pub fn new(names: Vec<String>) -> SlowRanks {
        let (said, otherwise) = (vec![false; names.len()], vec![0; names.len()]);
        SlowRanks { said, otherwise, times: vec![[0.0; LOOKS]; names.len()], names }
    }

    /// The slowest rank, if it took more than `bound` times as long as the others in each of the last looks.
    pub fn slower_than(&self, bound: f64) -> Option<usize> {
        let least = |rank: &usize| self.times[*rank].iter().copied().fold(f64::INFINITY, f64::min);
        (0..self.names.len()).max_by(|a, b| least(a).total_cmp(&least(b))).filter(|rank| least(rank) > bound)
    }

    /// What a rank is called.
    pub fn name(&self, rank: usize) -> &str {
        &self.names[rank]
    }

    /// What there is to say after a look, in which ranks had so many units each.
    pub fn look(&mut self, look: &Look, counts: &[usize]) -> Vec<String> {
        let ranks = self.names.len();
        let seconds = typical_units(ranks, std::slice::from_ref(look));
        let total: usize = counts.iter().sum();
        let mut lines = Vec::new();
        for rank in 0..ranks {
            let mut others: Vec<f64> = (0..ranks).filter(|r| *r != rank).map(|r| seconds[r]).collect();
            let others = super::median(&mut others);
            self.times[rank].rotate_left(1);
            self.times[rank][LOOKS - 1] = if others > 0.0 { seconds[rank] / others } else { 0.0 };
            if others == 0.0 || seconds[rank] == 0.0 {
                continue;
            }
            let times = seconds[rank] / others;
            let has_enough = (counts[rank] * ranks) as f64 >= SHARE * total as f64;
            let differs = match self.said[rank] {
                false => times > SLOW,
                true => times < FINE && has_enough,
            };
            self.otherwise[rank] = if differs { self.otherwise[rank] + 1 } else { 0 };
            if self.otherwise[rank] < LOOKS {
                continue;
            }
            (self.said[rank], self.otherwise[rank]) = (!self.said[rank], 0);
            let name = &self.names[rank];
            lines.push(match self.said[rank] {
                true => format!("{name} takes {times:.1} times as long as the others for the same work"),
                false => format!("{name} is as fast as the others again"),
            });
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::balance::BLOCKS;

    #[test]
    fn a_slow_rank_is_named_once_and_once_more_when_it_is_not() {
        let mut slow = SlowRanks::new(vec!["rank 0 on a".into(), "rank 1 on b".into(), "rank 2 on c".into()]);
        let mut say = |seconds: [f64; 3], counts: [usize; 3]| {
            let look: Look = seconds.iter().map(|s| [*s; BLOCKS]).collect();
            slow.look(&look, &counts)
        };
        let even = [10; 3];
        assert!(say([1.0, 1.9, 1.0], even).is_empty());
        assert!(say([1.0, 4.0, 1.0], even).is_empty(), "one look may mislead");
        let line = "rank 1 on b takes 4.0 times as long as the others for the same work";
        assert_eq!(say([1.0, 4.0, 1.0], even), [line]);
        assert!(say([1.0, 4.0, 1.0], even).is_empty(), "once");
        // With little to do it looks fast.
        for _ in 0..5 {
            assert!(say([1.0, 1.0, 1.0], [13, 4, 13]).is_empty());
        }
        assert!(say([1.0, 1.0, 1.0], even).is_empty());
        assert_eq!(say([1.0, 1.1, 1.0], even), ["rank 1 on b is as fast as the others again"]);
        assert!(say([1.0, 1.0, 1.0], even).is_empty());
        // All slow at once, or one that had nothing to do: nothing to say.
        for _ in 0..3 {
            assert!(say([5.0, 5.0, 5.0], even).is_empty());
            assert!(say([1.0, 0.0, 1.0], [15, 0, 15]).is_empty());
        }
    }

    #[test]
    fn the_slowest_rank_is_known_when_it_was_slow_for_long_enough() {
        let mut slow = SlowRanks::new((0..4).map(|rank| format!("rank {rank}")).collect());
        let mut left_out = |seconds: [f64; 4]| {
            let look: Look = seconds.iter().map(|s| [*s; BLOCKS]).collect();
            slow.look(&look, &[10; 4]);
            slow.slower_than(2.5)
        };
        assert_eq!(left_out([1.0, 1.0, 9.0, 1.0]), None, "one look may mislead");
        assert_eq!(left_out([1.0, 4.0, 1.0, 1.0]), None, "another one");
        assert_eq!(left_out([1.0, 4.0, 3.0, 1.0]), Some(1));
        assert_eq!(left_out([1.0, 2.0, 3.0, 1.0]), Some(2));
        assert_eq!(left_out([1.0, 1.0, 1.0, 1.0]), None);
    }
}
