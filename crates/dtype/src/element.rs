//! The Rust type of each element type. The only unsafe code of this crate: the promises that casts of memory rely on.

use half::{bf16, f16};

use crate::DType;

/// A Rust type whose values are elements: plain numbers, which buffers are cast to and from.
///
/// Only the types of this crate are elements. No other crate can add one, because bytes from files and from other ranks
/// are reinterpreted as elements:
///
/// ```compile_fail
/// #[derive(Clone, Copy)]
/// struct Flag(bool);
/// // SAFETY: none: this must not compile.
/// unsafe impl polyreme_dtype::Element for Flag {
///     const DTYPE: polyreme_dtype::DType = polyreme_dtype::DType::Bool;
/// }
/// ```
///
/// Nor can safe code, which could not be blamed for what unsafe code then does:
///
/// ```compile_fail
/// #[derive(Clone, Copy)]
/// struct Flag(bool);
/// impl polyreme_dtype::Element for Flag {
///     const DTYPE: polyreme_dtype::DType = polyreme_dtype::DType::Bool;
/// }
/// ```
///
/// # Safety
/// The type has no padding and no invalid bit pattern, is `DTYPE.bytes()` long and is aligned to at most that.
pub unsafe trait Element: sealed::Sealed + Copy + Send + Sync + 'static {
    /// Its element type.
    const DTYPE: DType;
}

/// A truth value in a buffer: any byte but zero is true. `bool` itself is not an element, because of the 256 patterns
/// that a byte from a file or from another rank can have, it allows only two.
#[derive(Clone, Copy, Default, Debug)]
#[repr(transparent)]
pub struct Bool(u8);

impl Bool {
    /// Whether it is true.
    #[inline]
    pub const fn get(self) -> bool {
        self.0 != 0
    }
    /// Its byte in memory.
    #[inline]
    pub const fn to_ne_bytes(self) -> [u8; 1] {
        [self.0]
    }
    /// The value that a byte in memory stands for.
    #[inline]
    pub const fn from_ne_bytes(bytes: [u8; 1]) -> Bool {
        Bool(bytes[0])
    }
}

impl From<bool> for Bool {
    fn from(value: bool) -> Bool {
        Bool(value.into())
    }
}

impl std::ops::BitOr for Bool {
    type Output = Bool;
    #[inline]
    fn bitor(self, other: Bool) -> Bool {
        (self.get() | other.get()).into()
    }
}

// By truth, not by bits; false comes before true.
impl PartialEq for Bool {
    #[inline]
    fn eq(&self, other: &Bool) -> bool {
        self.get() == other.get()
    }
}
impl Eq for Bool {}
impl PartialOrd for Bool {
    #[inline]
    fn partial_cmp(&self, other: &Bool) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Bool {
    #[inline]
    fn cmp(&self, other: &Bool) -> std::cmp::Ordering {
        self.get().cmp(&other.get())
    }
}

macro_rules! elements {
    ($($t:ty => $d:ident),*) => { $(
        impl sealed::Sealed for $t {}
        // SAFETY: a number, or a transparent wrapper of one, without padding and with a meaning for all bits; its size
        // and alignment are checked below.
        unsafe impl Element for $t {
            const DTYPE: DType = DType::$d;
        }
        const _: () = assert!(size_of::<$t>() == DType::$d.bytes() && align_of::<$t>() <= DType::$d.bytes());
    )* };
}
elements!(
    f32 => F32, f64 => F64, f16 => F16, bf16 => Bf16, i32 => I32, i64 => I64, u8 => U8, i8 => I8, Bool => Bool
);

/// Out of reach of other crates, so that no type of theirs can be an [`Element`].
mod sealed {
    pub trait Sealed {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_a_truth_value() {
        let (no, yes) = (Bool::from(false), Bool::from(true));
        for byte in 0..=u8::MAX {
            let x = Bool::from_ne_bytes([byte]);
            assert_eq!((x.get(), x.to_ne_bytes()), (byte != 0, [byte]));
            assert_eq!((x == yes, x == no, x > no, x < yes), (byte > 0, byte == 0, byte > 0, byte == 0));
            assert_eq!(((x | no).to_ne_bytes(), (x | yes).to_ne_bytes()), ([u8::from(byte > 0)], [1]));
        }
    }
}
