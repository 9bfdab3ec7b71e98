//! Where a product in f32 reads its operands from: memory that tiles read as it is, or another format, of which blocks are
//! converted to f32 while they are copied to where tiles read them (`blocks`).

#[cfg(target_arch = "x86_64")]
mod blocks;

use polyreme_dtype::DType;

use crate::convert::{bf16_from_f32, f16_from_f32, f32_from_bf16, f32_from_f16};
use crate::{Floats, Isa};
#[cfg(target_arch = "x86_64")]
pub(super) use blocks::Runs;

/// An operand.
#[derive(Clone, Copy)]
pub(super) struct OperandSource<'a> {
    floats: Floats<'a>,
    /// The format that f32 is rounded to.
    rounded: Option<DType>,
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only copies of blocks use it"))]
    isa: Isa,
}

/// Both operands.
#[derive(Clone, Copy)]
pub(super) struct OperandSources<'a> {
    pub(super) a: OperandSource<'a>,
    pub(super) b: OperandSource<'a>,
}

/// Which operands are not read as they are stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Converted {
    pub(super) a: bool,
    pub(super) b: bool,
}

impl Converted {
    pub(super) const NONE: Converted = Converted { a: false, b: false };
}

/// Whether an operand in this format, if f32 is rounded to that one, is not read as it is stored.
pub(super) fn is_converted(stored: DType, rounded: Option<DType>) -> bool {
    stored != DType::F32 || rounded.is_some_and(|to| to != DType::F32)
}

impl<'a> OperandSources<'a> {
    pub(super) fn of_f32(a: &'a [f32], b: &'a [f32], isa: Isa) -> OperandSources<'a> {
        let of = |x| OperandSource::new(Floats::F32(x), None, isa);
        OperandSources { a: of(a), b: of(b) }
    }

    #[cfg(target_arch = "x86_64")]
    pub(super) fn converted(&self) -> Converted {
        Converted { a: self.a.is_converted(), b: self.b.is_converted() }
    }
}

impl<'a> OperandSource<'a> {
    /// `floats`; if they are f32, each rounded to a format.
    pub(super) fn new(floats: Floats<'a>, rounded: Option<DType>, isa: Isa) -> OperandSource<'a> {
        OperandSource { floats, rounded, isa }
    }

    pub(super) fn len(&self) -> usize {
        self.floats.len()
    }

    pub(super) fn is_converted(&self) -> bool {
        is_converted(self.floats.dtype(), self.rounded)
    }

    /// The same from an element on.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn from(&self, start: usize) -> OperandSource<'a> {
        OperandSource { floats: self.floats.part(start, self.len() - start), ..*self }
    }

    /// All of it, if it is read as it is stored.
    pub(super) fn in_place(&self) -> Option<&'a [f32]> {
        match self.floats {
            Floats::F32(x) if !self.is_converted() => Some(x),
            _ => None,
        }
    }

    /// Element `i` as f32.
    #[inline(always)]
    pub(super) fn at(&self, i: usize) -> f32 {
        match (self.floats, self.rounded) {
            (Floats::F32(x), Some(DType::F16)) => f32_from_f16(f16_from_f32(x[i])),
            (Floats::F32(x), Some(DType::Bf16)) => f32_from_bf16(bf16_from_f32(x[i])),
            (x, _) => x.at(i),
        }
    }
}
