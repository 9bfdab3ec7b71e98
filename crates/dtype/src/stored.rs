//! Element types that files may hold: more than programs compute with.

use std::fmt;

use crate::DType;

/// An element type of a safetensors file that can be read: one of ours, or an integer of another width, which is
/// converted while it is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stored {
    /// An element type.
    Element(DType),
    /// 16-bit unsigned integers: the ids of most vocabularies.
    U16,
    /// 16-bit integers.
    I16,
    /// 32-bit unsigned integers.
    U32,
    /// 64-bit unsigned integers.
    U64,
}

impl Stored {
    /// The type that a safetensors file calls this; none for floats of 8 bits and fewer, and for complex numbers.
    pub fn parse(safetensors_name: &str) -> Option<Stored> {
        let others = [Stored::U16, Stored::I16, Stored::U32, Stored::U64];
        let other = || others.into_iter().find(|stored| stored.name() == safetensors_name);
        DType::parse(safetensors_name).map(Stored::Element).or_else(other)
    }

    /// What the file calls it.
    pub const fn name(self) -> &'static str {
        match self {
            Stored::Element(dtype) => dtype.safetensors_name(),
            Stored::U16 => "U16",
            Stored::I16 => "I16",
            Stored::U32 => "U32",
            Stored::U64 => "U64",
        }
    }

    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Stored::Element(dtype) => dtype.bytes(),
            Stored::U16 | Stored::I16 => 2,
            Stored::U32 => 4,
            Stored::U64 => 8,
        }
    }

    /// Whether it is a floating type.
    pub const fn is_float(self) -> bool {
        matches!(self, Stored::Element(dtype) if dtype.is_float())
    }

    /// Whether it is an integer type. Booleans are not integers.
    pub const fn is_integer(self) -> bool {
        match self {
            Stored::Element(dtype) => dtype.is_integer(),
            Stored::U16 | Stored::I16 | Stored::U32 | Stored::U64 => true,
        }
    }
}

impl fmt::Display for Stored {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_kind_and_size() {
        let check = |name: &str, bytes: usize, float: bool, integer: bool| {
            let stored = Stored::parse(name).expect(name);
            assert_eq!((stored.name(), stored.to_string().as_str()), (name, name));
            assert_eq!((stored.bytes(), stored.is_float(), stored.is_integer()), (bytes, float, integer));
        };
        for (name, bytes) in [("F64", 8), ("F32", 4), ("F16", 2), ("BF16", 2)] {
            check(name, bytes, true, false);
        }
        let integers =
            [("U8", 1), ("I8", 1), ("U16", 2), ("I16", 2), ("U32", 4), ("I32", 4), ("U64", 8), ("I64", 8)];
        for (name, bytes) in integers {
            check(name, bytes, false, true);
        }
        check("BOOL", 1, false, false);
        for name in ["F4", "F6_E2M3", "F8_E4M3", "F8_E8M0", "C64", "u16", "U128", ""] {
            assert_eq!(Stored::parse(name), None, "{name:?}");
        }
    }
}
