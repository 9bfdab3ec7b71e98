//! The loops over shared memory: copies, and sums of many inputs in one pass.
//!
//! The only module of the shared transports that dereferences addresses. An [`Area`] is an address and a length;
//! creating one promises that the memory stays valid and that the ranks take turns with it, and everything after that
//! is checked.
//!
//! Sums are computed in the order of the ranks, element by element, whatever the timing: ((x0 + x1) + x2) + ... So it
//! has the same bits on all ranks and in all runs. Each input is read once and each output written once, in packs that
//! stay in registers, or with many inputs in tiles that stay in L1.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::element::{Bool, DType, Reduce};

/// Elements of a tile: with eight bytes each, 4 KiB, so that a tile and what is added to it fit in 32 KiB.
const TILE: usize = 512;

/// Bytes that are copied at a time. From 4 KiB on glibc copies with `rep movsb`, which takes twice as long on Zen 3.
const BURST: usize = 2048;

/// Valid memory that the ranks take turns with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Area {
    ptr: *mut u8,
    bytes: usize,
}

// SAFETY: an address and a length; the promise made to `Area::new` covers every thread of the group.
unsafe impl Send for Area {}

impl Area {
    /// # Safety
    /// The memory can be read, and written if the area is a target, until the operation it is made for has ended;
    /// until then it is only accessed by the rules of that operation.
    pub(super) unsafe fn new(ptr: *mut u8, bytes: usize) -> Area {
        Area { ptr, bytes }
    }

    /// An empty area, aligned for every element type.
    pub(super) fn nothing() -> Area {
        Area { ptr: std::ptr::without_provenance_mut(64), bytes: 0 }
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// `bytes` bytes from an offset on.
    pub(super) fn part(&self, offset: usize, bytes: usize) -> Area {
        assert!(offset <= self.bytes && bytes <= self.bytes - offset, "a part is inside its area");
        Area { ptr: self.ptr.wrapping_add(offset), bytes }
    }

    /// Copies all of it. If source and target are the same, there is nothing to do.
    pub(super) fn copy_to(&self, target: Area) {
        assert_eq!(self.bytes, target.bytes, "a copy is as long as what is copied");
        if self.ptr == target.ptr {
            return;
        }
        let apart = (self.ptr as usize).abs_diff(target.ptr as usize) >= self.bytes;
        let burst = if apart { BURST } else { self.bytes };
        for offset in (0..self.bytes).step_by(burst.max(1)) {
            let bytes = burst.min(self.bytes - offset);
            // SAFETY: both are valid while this runs; if they overlap, all goes in one burst.
            unsafe { std::ptr::copy(self.ptr.add(offset), target.ptr.add(offset), bytes) };
        }
    }

    /// The elements from one on.
    ///
    /// # Safety
    /// Nothing writes to them while the slice is used, and the area is aligned for `T`.
    unsafe fn slice<T>(&self, start: usize, len: usize) -> &[T] {
        debug_assert!((start + len) * size_of::<T>() <= self.bytes && self.ptr.cast::<T>().is_aligned());
        // SAFETY: inside the area; the rest is promised by the caller.
        unsafe { std::slice::from_raw_parts(self.ptr.cast::<T>().add(start), len) }
    }
}

/// Reduces the inputs in their order and writes the result to every output. Inputs and outputs may be the same.
pub(super) fn fold(inputs: &[Area], outputs: &[Area], dtype: DType, reduce: Reduce) {
    match dtype {
        DType::F32 => fold_of::<f32>(inputs, outputs, reduce),
        DType::F64 => fold_of::<f64>(inputs, outputs, reduce),
        DType::F16 => fold_of::<f16>(inputs, outputs, reduce),
        DType::Bf16 => fold_of::<bf16>(inputs, outputs, reduce),
        DType::I32 => fold_of::<i32>(inputs, outputs, reduce),
        DType::I64 => fold_of::<i64>(inputs, outputs, reduce),
        DType::U8 => fold_of::<u8>(inputs, outputs, reduce),
        DType::I8 => fold_of::<i8>(inputs, outputs, reduce),
        DType::Bool => fold_of::<Bool>(inputs, outputs, reduce),
    }
}

fn fold_of<T: Summand>(inputs: &[Area], outputs: &[Area], reduce: Reduce) {
    let bytes = inputs[0].bytes;
    assert!(inputs.iter().chain(outputs).all(|a| a.bytes == bytes), "inputs and outputs are equally long");
    let (n, mut tile) = (bytes / size_of::<T>(), [T::default(); TILE]);
    let packed = if inputs.len() <= 4 { fold_packs::<T>(inputs, outputs, reduce) } else { 0 };
    for start in (packed..n).step_by(TILE) {
        let len = TILE.min(n - start);
        let tile = &mut tile[..len];
        // SAFETY: inputs are elements of type `T`, and this rank alone works on this range now.
        let input = |k: usize| unsafe { inputs[k].slice::<T>(start, len) };
        tile.copy_from_slice(input(0));
        for k in 1..inputs.len() {
            match reduce {
                Reduce::Sum => T::add(tile, input(k)),
                Reduce::Max => pick(tile, input(k), |a, b| b > a),
                Reduce::Min => pick(tile, input(k), |a, b| b < a),
            }
        }
        for output in outputs {
            let target = output.part(start * size_of::<T>(), len * size_of::<T>());
            // SAFETY: as above; the tile is ours.
            unsafe { std::ptr::copy_nonoverlapping(tile.as_ptr().cast(), target.ptr, target.bytes) };
        }
    }
}

/// As much as fits in whole packs, which stay in registers: half the instructions of tiles. With many inputs it would
/// read too many streams at once.
fn fold_packs<T: Summand>(inputs: &[Area], outputs: &[Area], reduce: Reduce) -> usize {
    match reduce {
        Reduce::Sum => packs::<T>(inputs, outputs, T::add),
        Reduce::Max => packs::<T>(inputs, outputs, |a, b| pick(a, b, |a, b| b > a)),
        Reduce::Min => packs::<T>(inputs, outputs, |a, b| pick(a, b, |a, b| b < a)),
    }
}

#[inline(always)]
fn packs<T: Summand>(inputs: &[Area], outputs: &[Area], combine: impl Fn(&mut [T], &[T])) -> usize {
    let size = size_of::<T::Pack>();
    let n = inputs[0].bytes / size;
    for i in 0..n {
        // SAFETY: inside the areas, as their length was checked; this rank alone works on this range now.
        let read = |k: usize| unsafe { inputs[k].ptr.add(i * size).cast::<T::Pack>().read_unaligned() };
        let mut sum = read(0);
        for k in 1..inputs.len() {
            combine(sum.as_mut(), read(k).as_ref());
        }
        for output in outputs {
            // SAFETY: as above.
            unsafe { output.ptr.add(i * size).cast::<T::Pack>().write_unaligned(sum) };
        }
    }
    n * size / size_of::<T>()
}

#[inline(always)]
fn pick<T: Copy>(into: &mut [T], from: &[T], better: impl Fn(T, T) -> bool) {
    for (a, &b) in into.iter_mut().zip(from) {
        *a = if better(*a, b) { b } else { *a };
    }
}

/// What can be summed.
trait Summand: Copy + Default + PartialOrd {
    /// A few of them, 128 bytes.
    type Pack: Copy + AsRef<[Self]> + AsMut<[Self]>;

    fn add(into: &mut [Self], from: &[Self]);
}

macro_rules! numbers {
    ($($t:ty: $sum:expr),*) => { $(impl Summand for $t {
        type Pack = [$t; 128 / size_of::<$t>()];

        #[inline(always)]
        fn add(into: &mut [$t], from: &[$t]) {
            let sum: fn($t, $t) -> $t = $sum;
            for (a, &b) in into.iter_mut().zip(from) {
                *a = sum(*a, b);
            }
        }
    })* };
}
numbers!(
    f32: |a, b| a + b, f64: |a, b| a + b, i32: i32::wrapping_add, i64: i64::wrapping_add, u8: u8::wrapping_add,
    i8: i8::wrapping_add, Bool: |a, b| a | b
);

macro_rules! halves {
    ($($t:ty),*) => { $(impl Summand for $t {
        type Pack = [$t; 128 / size_of::<$t>()];

        fn add(into: &mut [$t], from: &[$t]) {
            let (mut a, mut b) = ([0.0f32; TILE], [0.0f32; TILE]);
            let (a, b) = (&mut a[..into.len()], &mut b[..into.len()]);
            into.convert_to_f32_slice(a);
            from.convert_to_f32_slice(b);
            f32::add(a, b);
            into.convert_from_f32_slice(a);
        }
    })* };
}
halves!(f16, bf16);

#[cfg(test)]
mod tests {
    use super::*;

    fn area<T>(data: &mut [T]) -> Area {
        // SAFETY: the tests use it only as long as the data lives.
        unsafe { Area::new(data.as_mut_ptr().cast(), size_of_val(data)) }
    }

    #[test]
    fn the_order_is_that_of_the_inputs() {
        for n in [0, 1, TILE - 1, TILE, TILE + 1, 3 * TILE + 7] {
            // 1e8 swallows a 1 that comes after it, and does not swallow 1 + 1e8's worth of ones before it.
            let mut x: Vec<Vec<f32>> = [1.0, 1e8, -1e8, 1.0].map(|v| vec![v; n]).into();
            let (mut y, mut z) = (vec![0.0f32; n], vec![0.0f32; n]);
            let inputs: Vec<_> = x.iter_mut().map(|x| area(x)).collect();
            fold(&inputs, &[area(&mut y), area(&mut z), inputs[1]], DType::F32, Reduce::Sum);
            assert!(y == vec![1.0; n] && z == y && x[1] == y, "{n}");
        }
    }

    #[test]
    fn halves_are_rounded_after_each_addition() {
        // 2048 + 1 is a tie in f16 that rounds to even, twice; 2048 + 2 is exact.
        let mut x = [[2048.0f32, 1.0, 1.0].map(f16::from_f32)].concat();
        let (inputs, mut y): (Vec<_>, _) =
            (x.iter_mut().map(|x| area(std::slice::from_mut(x))).collect(), [f16::ZERO]);
        fold(&inputs, &[area(&mut y)], DType::F16, Reduce::Sum);
        assert_eq!(y[0].to_f32(), 2048.0);
        let mut x = [256.0f32, 1.0, 3.0].map(bf16::from_f32);
        let (inputs, mut y): (Vec<_>, _) =
            (x.iter_mut().map(|x| area(std::slice::from_mut(x))).collect(), [bf16::ZERO]);
        fold(&inputs, &[area(&mut y)], DType::Bf16, Reduce::Sum);
        assert_eq!(y[0].to_f32(), 260.0);
    }

    #[test]
    fn the_largest_and_the_smallest_stay() {
        let mut x = [[3u8, 200, 0], [4, 100, 0], [2, 255, 1]];
        let inputs: Vec<_> = x.iter_mut().map(|x| area(&mut x[..])).collect();
        let (mut max, mut min, mut sum) = ([0u8; 3], [0u8; 3], [0u8; 3]);
        fold(&inputs, &[area(&mut max)], DType::U8, Reduce::Max);
        fold(&inputs, &[area(&mut min)], DType::U8, Reduce::Min);
        fold(&inputs, &[area(&mut sum)], DType::U8, Reduce::Sum);
        assert_eq!((max, min, sum), ([4, 255, 1], [2, 100, 0], [9, 43, 1]));
    }
}
