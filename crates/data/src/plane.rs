//! Moves the values of an image into planes, by rows. The caller chooses how values are converted; see `transform`.

use crate::augment::Placement;
use crate::spec::Layout;

/// An image as its set stores it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Image {
    pub(crate) channels: usize,
    pub(crate) height: usize,
    pub(crate) width: usize,
    pub(crate) layout: Layout,
}

impl Image {
    /// Writes all planes; `value` returns the function for a channel's values.
    ///
    /// Pixels outside the image are that function of zero: padding comes before normalisation.
    pub(crate) fn planes<T: Copy + Default, F: Fn(T) -> f32>(
        self,
        placement: Placement,
        values: &[T],
        planes: &mut [f32],
        value: impl Fn(usize) -> F,
    ) {
        let area = self.height * self.width;
        for (channel, plane) in planes.chunks_exact_mut(area).enumerate() {
            let (start, step) = match self.layout {
                Layout::Planes => (channel * area, 1),
                Layout::Interleaved => (channel, self.channels),
            };
            self.plane(placement, &values[start..], step, plane, value(channel));
        }
    }

    /// Writes one plane from every `step`th of `values`, which begin with the channel's first value.
    fn plane<T: Copy + Default>(
        self,
        placement: Placement,
        values: &[T],
        step: usize,
        plane: &mut [f32],
        value: impl Fn(T) -> f32,
    ) {
        let (height, width) = (self.height as isize, self.width as isize);
        let Placement { down, right, flip, erased } = placement;
        if step == 1 && down == 0 && right == 0 && !flip {
            copy(plane, values, 1, false, &value);
        } else {
            let zero = value(T::default());
            // Columns of the unmirrored row that lie inside the image.
            let first = (-right).clamp(0, width);
            let end = (width - right).clamp(first, width);
            for (y, row) in plane.chunks_exact_mut(self.width).enumerate() {
                let source = y as isize + down;
                if source < 0 || source >= height || first == end {
                    row.fill(zero);
                    continue;
                }
                let from = (source * width + first + right) as usize;
                let inside = if flip { width - end..width - first } else { first..end };
                let (start, end) = (inside.start as usize, inside.end as usize);
                row[..start].fill(zero);
                row[end..].fill(zero);
                copy(&mut row[start..end], &values[from * step..], step, flip, &value);
            }
        }
        if let Some(rect) = erased {
            for row in plane.chunks_exact_mut(self.width).skip(rect.top).take(rect.height) {
                row[rect.left..rect.left + rect.width].fill(0.0);
            }
        }
    }
}

/// Writes every `step`th of `values` into `row`, backwards if `flip`.
fn copy<T: Copy>(row: &mut [f32], values: &[T], step: usize, flip: bool, value: &impl Fn(T) -> f32) {
    match (step, flip) {
        (1, false) => row.iter_mut().zip(values).for_each(|(x, &v)| *x = value(v)),
        (1, true) => row.iter_mut().rev().zip(values).for_each(|(x, &v)| *x = value(v)),
        (_, false) => row.iter_mut().zip(values.iter().step_by(step)).for_each(|(x, &v)| *x = value(v)),
        (_, true) => row.iter_mut().rev().zip(values.iter().step_by(step)).for_each(|(x, &v)| *x = value(v)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::augment::Rect;

    /// The same, value by value.
    fn naive(image: Image, placement: Placement, values: &[u8]) -> Vec<f32> {
        let Image { channels, height, width, layout } = image;
        let mut planes = Vec::new();
        for channel in 0..channels {
            for y in 0..height {
                for x in 0..width {
                    let unmirrored = if placement.flip { width - 1 - x } else { x };
                    let source_y = y as isize + placement.down;
                    let source_x = unmirrored as isize + placement.right;
                    let inside =
                        (0..height as isize).contains(&source_y) && (0..width as isize).contains(&source_x);
                    let pixel = source_y * width as isize + source_x;
                    let byte = match layout {
                        _ if !inside => 0,
                        Layout::Planes => values[channel * height * width + pixel as usize],
                        Layout::Interleaved => values[pixel as usize * channels + channel],
                    };
                    let erased = placement.erased.is_some_and(|rect| {
                        (rect.top..rect.top + rect.height).contains(&y)
                            && (rect.left..rect.left + rect.width).contains(&x)
                    });
                    planes.push(if erased { 0.0 } else { made(channel, byte) });
                }
            }
        }
        planes
    }

    fn made(channel: usize, byte: u8) -> f32 {
        1000.0 * (channel + 1) as f32 + f32::from(byte)
    }

    proptest! {
        #[test]
        fn planes_are_those_of_the_naive_loop(
            (channels, height, width) in (1_usize..5, 1_usize..9, 1_usize..9),
            (down, right) in (-10_isize..11, -10_isize..11),
            (moved, flip, erased, interleaved) in any::<(bool, bool, bool, bool)>(),
            seed: u8,
        ) {
            let layout = if interleaved { Layout::Interleaved } else { Layout::Planes };
            let image = Image { channels, height, width, layout };
            let values: Vec<u8> = (0..channels * height * width).map(|i| (i as u8).wrapping_mul(37) ^ seed).collect();
            let rect = Rect { top: height / 3, left: width / 2, height: height.div_ceil(2), width: 1 };
            let (down, right) = if moved { (down, right) } else { (0, 0) };
            let placement = Placement { down, right, flip, erased: erased.then_some(rect) };
            let mut planes = vec![f32::NAN; values.len()];
            image.planes(placement, &values, &mut planes, |channel| move |byte| made(channel, byte));
            prop_assert_eq!(planes, naive(image, placement, &values));
        }
    }
}
