//! The list of element types.

use std::fmt;

/// The type of the elements of a tensor or a buffer. `as u8` is its number on the wire, its place in [`DType::ALL`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum DType {
    /// 32-bit floats: what kernels compute in.
    F32,
    /// 64-bit floats.
    F64,
    /// IEEE half-precision floats.
    F16,
    /// bfloat16: the upper half of a 32-bit float.
    Bf16,
    /// 32-bit integers: labels and indices.
    I32,
    /// 64-bit integers.
    I64,
    /// Bytes.
    U8,
    /// 8-bit integers.
    I8,
    /// Booleans, one byte each: zero is false, anything else is true.
    Bool,
}

impl DType {
    /// All of them, in the order of their numbers.
    pub const ALL: [DType; 9] = [
        DType::F32,
        DType::F64,
        DType::F16,
        DType::Bf16,
        DType::I32,
        DType::I64,
        DType::U8,
        DType::I8,
        DType::Bool,
    ];

    /// Bytes of one element, which is also how it is aligned.
    pub const fn bytes(self) -> usize {
        match self {
            DType::F64 | DType::I64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::F16 | DType::Bf16 => 2,
            DType::U8 | DType::I8 | DType::Bool => 1,
        }
    }

    /// Whether it is a floating type, which gradients can have.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F64 | DType::F16 | DType::Bf16)
    }

    /// Whether it is an integer type. Booleans are not integers.
    pub const fn is_integer(self) -> bool {
        matches!(self, DType::I32 | DType::I64 | DType::U8 | DType::I8)
    }

    /// Its name in printed graphs and in messages.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::U8 => "u8",
            DType::I8 => "i8",
            DType::Bool => "bool",
        }
    }

    /// Its name in the header of a safetensors file.
    pub const fn safetensors_name(self) -> &'static str {
        match self {
            DType::F32 => "F32",
            DType::F64 => "F64",
            DType::F16 => "F16",
            DType::Bf16 => "BF16",
            DType::I32 => "I32",
            DType::I64 => "I64",
            DType::U8 => "U8",
            DType::I8 => "I8",
            DType::Bool => "BOOL",
        }
    }

    /// The type that a safetensors file calls this; files may have others, see [`Stored`](crate::Stored).
    pub fn parse(safetensors_name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| dtype.safetensors_name() == safetensors_name)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_are_listed_by_number_and_found_by_name() {
        for (i, dtype) in DType::ALL.into_iter().enumerate() {
            assert_eq!(dtype as usize, i, "{dtype}");
            assert_eq!(DType::parse(dtype.safetensors_name()), Some(dtype));
            assert_eq!(dtype.safetensors_name().to_lowercase(), dtype.name());
            // Bits at the end of a name are the bytes of an element.
            let bits = dtype.name().trim_start_matches(|c: char| c.is_alphabetic());
            assert_eq!(bits.parse().unwrap_or(8), 8 * dtype.bytes(), "{dtype}");
            assert!(!(dtype.is_float() && dtype.is_integer()));
        }
        for name in ["", "f32", "F3", "F320", "U16", "F8_E4M3", "C64"] {
            assert_eq!(DType::parse(name), None, "{name:?}");
        }
    }
}
