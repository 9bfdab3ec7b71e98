//! Random augmentation of training images. This file draws the parameters; `transform` moves the pixels.
//!
//! What happens to a sample is a function of the seed, the epoch and the sample's number alone. So it is the same for
//! any number of loader threads, any batch size and any number of ranks, and each augmentation stays the same when another is
//! turned on.

use crate::draw::{Purpose, Words, below, unit, words};

/// Which augmentations training images get; zeros turn them off.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Augment {
    /// Zero padding on each side before a random crop to the original size.
    pub crop: usize,
    /// Whether half of the images are flipped horizontally.
    pub flip: bool,
    /// Random shift by up to this many pixels, filled with zeros.
    pub shift: usize,
    /// The probability that a random rectangle is erased.
    pub erase: f64,
}

/// What a sample's random draws depend on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Address {
    /// The seed of the run.
    pub seed: u64,
    /// The number of the epoch.
    pub epoch: u64,
    /// The sample's number in its set.
    pub idx: usize,
}

/// How an image is moved and changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Placement {
    /// The pixel at row `y` and column `x` is the set's at `y + down` and `x + right`, or a zero of the set.
    pub(crate) down: isize,
    pub(crate) right: isize,
    /// Whether columns are then mirrored.
    pub(crate) flip: bool,
    /// A rectangle that then becomes zero, after normalisation.
    pub(crate) erased: Option<Rect>,
}

/// A rectangle of pixels, never empty.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Rect {
    pub(crate) top: usize,
    pub(crate) left: usize,
    pub(crate) height: usize,
    pub(crate) width: usize,
}

/// The share of the image that is erased, and its height over its width: those of PyTorch's `RandomErasing`.
const ERASED_SHARE: [f64; 2] = [0.02, 0.33];
const ERASED_RATIO: [f64; 2] = [0.3, 3.3];
/// How many rectangles are tried; if none fits, the image stays as it is.
const ERASE_TRIES: usize = 10;

impl Augment {
    /// Draws the augmentation of the image of `height` by `width` at `address`. Crop and shift are one move by their sum.
    pub(crate) fn draw(&self, address: Address, height: usize, width: usize) -> Placement {
        let Address { seed, epoch, idx } = address;
        let mut placement = Placement::default();
        for (purpose, reach) in [(Purpose::Crop, self.crop), (Purpose::Shift, self.shift)] {
            if reach > 0 {
                let [down, right, ..] = words(seed, purpose, epoch, idx as u64);
                let way = |word| below(word, 2 * reach + 1) as isize - reach as isize;
                placement.down += way(down);
                placement.right += way(right);
            }
        }
        if self.flip {
            placement.flip = words(seed, Purpose::Flip, epoch, idx as u64)[0] >> 31 == 1;
        }
        if self.erase > 0.0 {
            let mut drawn = Words::new(seed, Purpose::Erase, epoch, idx as u64);
            if unit(drawn.next()) < self.erase {
                placement.erased = rectangle(&mut drawn, height, width);
            }
        }
        placement
    }
}

/// A random rectangle that is smaller than the image in both directions.
fn rectangle(drawn: &mut Words, height: usize, width: usize) -> Option<Rect> {
    let between = |[low, high]: [f64; 2], word| low + (high - low) * unit(word);
    (0..ERASE_TRIES).find_map(|_| {
        let area = (height * width) as f64 * between(ERASED_SHARE, drawn.next());
        let ratio = between(ERASED_RATIO.map(f64::ln), drawn.next()).exp();
        let rows = (area * ratio).sqrt().round() as usize;
        let columns = (area / ratio).sqrt().round() as usize;
        let (top, left) = (drawn.next(), drawn.next());
        (rows > 0 && columns > 0 && rows < height && columns < width).then(|| Rect {
            top: below(top, height - rows + 1),
            left: below(left, width - columns + 1),
            height: rows,
            width: columns,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(augment: Augment, idx: usize) -> Placement {
        augment.draw(Address { seed: 1, epoch: 2, idx }, 28, 20)
    }

    #[test]
    fn moves_reach_all_places_equally_often() {
        for (augment, reach) in
            [(Augment { crop: 2, ..Augment::default() }, 2), (Augment { shift: 3, ..Augment::default() }, 3)]
        {
            let side = 2 * reach as usize + 1;
            let mut counts = vec![0; side * side];
            for idx in 0..1000 * counts.len() {
                let placement = draw(augment, idx);
                counts[(placement.down + reach) as usize * side + (placement.right + reach) as usize] += 1;
            }
            // Five standard deviations of a count of 1000.
            assert!(counts.iter().all(|&n: &i32| (n - 1000).abs() < 160), "{counts:?}");
        }
    }

    #[test]
    fn half_are_mirrored_and_the_share_is_erased() {
        let augment = Augment { flip: true, erase: 0.25, ..Augment::default() };
        let placements: Vec<_> = (0..10_000).map(|idx| draw(augment, idx)).collect();
        let flipped = placements.iter().filter(|placement| placement.flip).count();
        let erased: Vec<Rect> = placements.iter().filter_map(|placement| placement.erased).collect();
        assert!(flipped.abs_diff(5000) < 250, "{flipped}");
        assert!(erased.len().abs_diff(2500) < 220, "{}", erased.len());
        let shares = erased.iter().map(|rect| (rect.height * rect.width) as f64 / 560.0);
        let mean = shares.clone().sum::<f64>() / erased.len() as f64;
        // Uniform between 0.02 and 0.33, except for draws that were rejected because they did not fit.
        assert!((0.15..0.18).contains(&mean), "{mean}");
        assert!(shares.clone().fold(1.0, f64::min) < 0.03 && shares.fold(0.0, f64::max) > 0.3);
        assert!(erased.iter().all(|rect| rect.top + rect.height <= 28 && rect.left + rect.width <= 20));
        assert!(erased.iter().any(|rect| rect.top + rect.height == 28 && rect.left > 0));
    }

    #[test]
    fn one_kind_does_not_change_another_and_every_part_of_the_address_counts() {
        let all = Augment { crop: 4, flip: true, shift: 2, erase: 0.5 };
        let flip = Augment { flip: true, ..Augment::default() };
        assert!((0..100).all(|idx| draw(all, idx).flip == draw(flip, idx).flip));
        let all_of = |seed, epoch| -> Vec<_> {
            (0..50).map(|idx| all.draw(Address { seed, epoch, idx }, 28, 28)).collect()
        };
        assert_eq!(all_of(1, 1), all_of(1, 1));
        assert_ne!(all_of(1, 1), all_of(2, 1));
        assert_ne!(all_of(1, 1), all_of(1, 2));
        assert!((0..50).all(|idx| draw(Augment::default(), idx) == Placement::default()));
    }

    #[test]
    fn tiny_images_cannot_be_erased_and_do_not_hang() {
        let augment = Augment { erase: 1.0, ..Augment::default() };
        for (height, width) in [(1, 1), (1, 100), (100, 1)] {
            let placement = augment.draw(Address { seed: 0, epoch: 0, idx: 0 }, height, width);
            assert_eq!(placement.erased, None);
        }
    }
}
