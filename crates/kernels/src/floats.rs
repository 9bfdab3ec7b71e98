//! Floats in any of the formats that values are stored in: f32, f16 and bf16.
//!
//! Kernels compute in f32. What is stored in half is widened as it is read, which is exact, and rounded once as it is
//! written, to nearest with ties to even.

use polyreme_dtype::{DType, bf16, f16};

use crate::cx::SharedMut;
use crate::{Cx, Isa, convert};

/// Elements that a task widens: about 8 µs of memory traffic.
const CHUNK: usize = 32_768;

/// Floats that are read.
#[derive(Clone, Copy, Debug)]
pub enum Floats<'a> {
    /// 32-bit floats.
    F32(&'a [f32]),
    /// IEEE half precision.
    F16(&'a [f16]),
    /// bfloat16.
    Bf16(&'a [bf16]),
}

/// Floats that are written.
#[derive(Debug)]
pub enum FloatsMut<'a> {
    /// 32-bit floats.
    F32(&'a mut [f32]),
    /// IEEE half precision.
    F16(&'a mut [f16]),
    /// bfloat16.
    Bf16(&'a mut [bf16]),
}

/// Floats that several tasks write in parts.
#[derive(Clone, Copy)]
pub enum SharedFloats<'a> {
    /// 32-bit floats.
    F32(SharedMut<'a, f32>),
    /// IEEE half precision.
    F16(SharedMut<'a, f16>),
    /// bfloat16.
    Bf16(SharedMut<'a, bf16>),
}

/// The same expression for whichever format it is.
macro_rules! each {
    ($kind:ident, $floats:expr, $x:ident => $then:expr) => {
        match $floats {
            $kind::F32($x) => $then,
            $kind::F16($x) => $then,
            $kind::Bf16($x) => $then,
        }
    };
}

pub(crate) use each;

/// The same expression for whichever format it is, in that format again.
macro_rules! map {
    ($kind:ident, $floats:expr, $to:ident, $x:ident => $then:expr) => {
        match $floats {
            $kind::F32($x) => $to::F32($then),
            $kind::F16($x) => $to::F16($then),
            $kind::Bf16($x) => $to::Bf16($then),
        }
    };
}

/// Scratch as bf16, two in the place of each float.
pub(crate) fn as_bf16(scratch: &mut [f32]) -> &mut [bf16] {
    // SAFETY: both are plain bits, and two of 16 fit where one of 32 is, which is aligned for them.
    unsafe { std::slice::from_raw_parts_mut(scratch.as_mut_ptr().cast(), 2 * scratch.len()) }
}

/// One float, in the format that it is stored in.
pub(crate) trait Float: Copy + Sync {
    /// Its value, exactly.
    fn wide(self) -> f32;

    /// The same slice, if these are f32.
    fn as_f32(_: &[Self]) -> Option<&[f32]> {
        None
    }
}

impl Float for f32 {
    #[inline(always)]
    fn wide(self) -> f32 {
        self
    }

    #[inline(always)]
    fn as_f32(x: &[f32]) -> Option<&[f32]> {
        Some(x)
    }
}

impl Float for f16 {
    #[inline(always)]
    fn wide(self) -> f32 {
        convert::f32_from_f16(self)
    }
}

impl Float for bf16 {
    #[inline(always)]
    fn wide(self) -> f32 {
        convert::f32_from_bf16(self)
    }
}

impl<'a> Floats<'a> {
    /// How many.
    #[inline]
    pub fn len(&self) -> usize {
        each!(Floats, self, x => x.len())
    }

    /// Whether there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Their format.
    pub fn dtype(&self) -> DType {
        match self {
            Floats::F32(_) => DType::F32,
            Floats::F16(_) => DType::F16,
            Floats::Bf16(_) => DType::Bf16,
        }
    }

    /// Whether they are stored in half.
    #[inline]
    pub fn is_half(&self) -> bool {
        !matches!(self, Floats::F32(_))
    }

    /// One of them, as f32.
    #[inline]
    pub fn at(self, i: usize) -> f32 {
        match self {
            Floats::F32(x) => x[i],
            Floats::F16(x) => convert::f32_from_f16(x[i]),
            Floats::Bf16(x) => convert::f32_from_bf16(x[i]),
        }
    }

    /// `start..start + len` of them.
    #[inline]
    pub fn part(self, start: usize, len: usize) -> Floats<'a> {
        map!(Floats, self, Floats, x => &x[start..][..len])
    }

    /// Prefetches `start..start + len` of them into L2. It is a hint: they need not exist.
    #[inline]
    pub(crate) fn prefetch(self, start: usize, len: usize) {
        each!(Floats, self, x => prefetch(x.as_ptr(), start, len));
    }

    /// Writes them as f32.
    ///
    /// # Panics
    /// If `to` has another length.
    #[inline]
    pub fn widen(self, isa: Isa, to: &mut [f32]) {
        match self {
            Floats::F32(x) => to.copy_from_slice(x),
            Floats::F16(x) => convert::widen_f16(isa, x, to),
            Floats::Bf16(x) => convert::widen_bf16(isa, x, to),
        }
    }

    /// Writes them as f32, in parallel.
    ///
    /// # Panics
    /// If `to` has another length.
    pub fn widen_in_chunks(self, cx: &Cx, to: &mut [f32]) {
        assert_eq!(self.len(), to.len(), "as many as there are");
        cx.for_each_chunk(to, CHUNK, |i, to| self.part(i * CHUNK, to.len()).widen(cx.isa, to));
    }

    /// `start..start + len` of them as f32: in place if they are, else widened into the beginning of `stage`.
    #[inline]
    pub fn staged<'b>(self, isa: Isa, start: usize, len: usize, stage: &'b mut [f32]) -> &'b [f32]
    where
        'a: 'b,
    {
        match self.part(start, len) {
            Floats::F32(x) => x,
            half => {
                half.widen(isa, &mut stage[..len]);
                &stage[..len]
            }
        }
    }
}

impl<'a> FloatsMut<'a> {
    /// How many.
    #[inline]
    pub fn len(&self) -> usize {
        each!(FloatsMut, self, x => x.len())
    }

    /// Whether there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Their format.
    pub fn dtype(&self) -> DType {
        self.as_floats().dtype()
    }

    /// Whether they are stored in half.
    #[inline]
    pub fn is_half(&self) -> bool {
        !matches!(self, FloatsMut::F32(_))
    }

    /// The same, for a shorter time.
    pub fn reborrow(&mut self) -> FloatsMut<'_> {
        map!(FloatsMut, self, FloatsMut, x => x)
    }

    /// The same, to be read.
    pub fn as_floats(&self) -> Floats<'_> {
        map!(FloatsMut, self, Floats, x => x)
    }

    /// `start..start + len` of them.
    #[inline]
    pub fn part(&mut self, start: usize, len: usize) -> FloatsMut<'_> {
        map!(FloatsMut, self, FloatsMut, x => &mut x[start..][..len])
    }

    /// Writes zeros.
    pub fn clear(&mut self) {
        match self {
            FloatsMut::F32(y) => y.fill(0.0),
            FloatsMut::F16(y) => y.fill(f16::ZERO),
            FloatsMut::Bf16(y) => y.fill(bf16::ZERO),
        }
    }

    /// Writes each, rounded to the format.
    ///
    /// # Panics
    /// If `from` has another length.
    #[inline]
    pub fn round(&mut self, isa: Isa, from: &[f32]) {
        match self {
            FloatsMut::F32(y) => y.copy_from_slice(from),
            FloatsMut::F16(y) => convert::round_f16(isa, from, y),
            FloatsMut::Bf16(y) => convert::round_bf16(isa, from, y),
        }
    }

    /// Writes what `f` does as f32: in place if they are, else rounded from the beginning of `stage`.
    #[inline]
    pub fn staged<R>(self, isa: Isa, stage: &mut [f32], f: impl FnOnce(&mut [f32]) -> R) -> R {
        match self {
            FloatsMut::F32(y) => f(y),
            mut half => {
                let stage = &mut stage[..half.len()];
                let result = f(stage);
                half.round(isa, stage);
                result
            }
        }
    }

    /// Writes each of `from`, rounded to the format.
    ///
    /// # Panics
    /// If `from` has another length, or both are in half and in different formats.
    pub fn copy_from(&mut self, isa: Isa, from: Floats) {
        match (self, from) {
            (to, Floats::F32(x)) => to.round(isa, x),
            (FloatsMut::F32(y), half) => half.widen(isa, y),
            (FloatsMut::F16(y), Floats::F16(x)) => y.copy_from_slice(x),
            (FloatsMut::Bf16(y), Floats::Bf16(x)) => y.copy_from_slice(x),
            (FloatsMut::F16(_), Floats::Bf16(_)) | (FloatsMut::Bf16(_), Floats::F16(_)) => {
                panic!("f16 and bf16 are converted by way of f32")
            }
        }
    }
}

impl<'a> SharedFloats<'a> {
    /// Lends `data` out in parts.
    pub fn new(data: FloatsMut<'a>) -> SharedFloats<'a> {
        map!(FloatsMut, data, SharedFloats, x => SharedMut::new(x))
    }

    /// The length of the whole.
    #[inline]
    pub fn len(&self) -> usize {
        each!(SharedFloats, self, x => x.len())
    }

    /// Whether they are f32, so that they need no rounding.
    #[inline]
    pub(crate) fn is_f32(&self) -> bool {
        matches!(self, SharedFloats::F32(_))
    }

    /// Whether the whole is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Prefetches the part `start..start + len` into L2. It is a hint: it need not exist.
    #[inline]
    pub(crate) fn prefetch(&self, start: usize, len: usize) {
        each!(SharedFloats, self, x => prefetch(x.as_mut_ptr(), start, len));
    }

    /// The part `start..start + len`. Panics if it is not inside the whole.
    ///
    /// # Safety
    /// No two parts that are alive at the same time may overlap.
    #[inline]
    pub unsafe fn part(&self, start: usize, len: usize) -> FloatsMut<'a> {
        // SAFETY: the caller's promise.
        map!(SharedFloats, self, FloatsMut, x => unsafe { x.slice(start, len) })
    }
}

/// Asks for the cache lines of `start..start + len` from `first` on.
#[inline(always)]
pub(crate) fn prefetch<T>(first: *const T, start: usize, len: usize) {
    let first = first.wrapping_add(start).cast::<u8>();
    for at in (0..len * size_of::<T>()).step_by(64) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a hint, which reads nothing: any address will do, and every CPU of this architecture has it.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T1>(first.wrapping_add(at).cast());
        }
        let _ = (first, at);
    }
}

impl<'a> From<&'a [f32]> for Floats<'a> {
    fn from(x: &'a [f32]) -> Floats<'a> {
        Floats::F32(x)
    }
}

impl<'a> From<&'a mut [f32]> for FloatsMut<'a> {
    fn from(x: &'a mut [f32]) -> FloatsMut<'a> {
        FloatsMut::F32(x)
    }
}

/// For the tests of kernels: values that own their memory.
#[cfg(test)]
pub(crate) mod testing {
    use super::*;
    use crate::convert::{bf16_from_f32, f16_from_f32, f32_from_bf16, f32_from_f16};

    /// The formats of storage.
    pub(crate) const FORMATS: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];
    /// Those that are not f32.
    pub(crate) const HALVES: [DType; 2] = [DType::F16, DType::Bf16];

    /// Values in one of the formats.
    #[derive(Clone, PartialEq, Debug)]
    pub(crate) enum OwnedFloats {
        F32(Vec<f32>),
        F16(Vec<f16>),
        Bf16(Vec<bf16>),
    }

    /// Checks that a kernel gave the bits of the same kernel in f32, each of them rounded.
    pub(crate) fn same_rounded(what: &str, got: &[OwnedFloats], of_f32: &[OwnedFloats]) {
        assert_eq!(got.len(), of_f32.len(), "{what}");
        for (k, (got, want)) in got.iter().zip(of_f32).enumerate() {
            let dtype = got.get().dtype();
            let want = OwnedFloats::new(dtype, &want.wide());
            let wrong = got.bits().iter().zip(want.bits()).position(|(g, w)| *g != w);
            let at = |v: &OwnedFloats| wrong.map(|i| v.get().at(i));
            assert_eq!(got.get().len(), want.get().len(), "{what}: result {k} in {dtype}");
            assert!(
                wrong.is_none(),
                "{what}: {wrong:?} of result {k} in {dtype}: {:?}, not {:?}",
                at(got),
                at(&want)
            );
        }
    }

    impl OwnedFloats {
        /// Rounds `x` to a format.
        pub(crate) fn new(dtype: DType, x: &[f32]) -> OwnedFloats {
            match dtype {
                DType::F32 => OwnedFloats::F32(x.to_vec()),
                DType::F16 => OwnedFloats::F16(x.iter().map(|&v| f16_from_f32(v)).collect()),
                DType::Bf16 => OwnedFloats::Bf16(x.iter().map(|&v| bf16_from_f32(v)).collect()),
                _ => unreachable!("{dtype} is not a format of storage"),
            }
        }

        /// `len` values that a kernel has to overwrite.
        pub(crate) fn unset(dtype: DType, len: usize) -> OwnedFloats {
            OwnedFloats::new(dtype, &vec![7.0; len])
        }

        pub(crate) fn get(&self) -> Floats<'_> {
            map!(OwnedFloats, self, Floats, x => x)
        }

        pub(crate) fn get_mut(&mut self) -> FloatsMut<'_> {
            map!(OwnedFloats, self, FloatsMut, x => x)
        }

        /// The same values as f32.
        pub(crate) fn wide(&self) -> Vec<f32> {
            match self {
                OwnedFloats::F32(x) => x.clone(),
                OwnedFloats::F16(x) => x.iter().map(|&h| f32_from_f16(h)).collect(),
                OwnedFloats::Bf16(x) => x.iter().map(|&b| f32_from_bf16(b)).collect(),
            }
        }

        /// Their bits, since a NaN is not equal to itself.
        pub(crate) fn bits(&self) -> Vec<u32> {
            match self {
                OwnedFloats::F32(x) => x.iter().map(|v| v.to_bits()).collect(),
                OwnedFloats::F16(x) => x.iter().map(|h| h.to_bits().into()).collect(),
                OwnedFloats::Bf16(x) => x.iter().map(|b| b.to_bits().into()).collect(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::convert::{bf16_from_f32, f16_from_f32};

    #[test]
    fn parts_are_widened_and_rounded_in_every_format() {
        let x: Vec<f32> = (0..77).map(|i| (i as f32 - 30.0) * 0.37).collect();
        let halves: Vec<f16> = x.iter().map(|&v| f16_from_f32(v)).collect();
        let brains: Vec<bf16> = x.iter().map(|&v| bf16_from_f32(v)).collect();
        for isa in Isa::available() {
            for (floats, want) in [
                (Floats::F32(&x), x.clone()),
                (Floats::F16(&halves), halves.iter().map(|h| h.to_f32()).collect()),
                (Floats::Bf16(&brains), brains.iter().map(|b| b.to_f32()).collect()),
            ] {
                let mut stage = [7.0; 50];
                assert_eq!(floats.staged(isa, 5, 41, &mut stage), &want[5..46], "{}", floats.dtype());
                assert_eq!(stage[41..], [7.0; 9]);
            }
            let (mut half, mut brain) = (vec![f16::ZERO; 77], vec![bf16::ZERO; 77]);
            let shared = SharedFloats::new(FloatsMut::F16(&mut half));
            // SAFETY: one part at a time.
            unsafe { shared.part(0, 30).round(isa, &x[..30]) };
            // SAFETY: as above.
            unsafe { shared.part(30, 47).round(isa, &x[30..]) };
            assert_eq!(half, halves);
            FloatsMut::Bf16(&mut brain).round(isa, &x);
            assert_eq!(brain, brains);
        }
    }
}
