//! Kernel classes: which kernels sum the products of a run, and so which bits it has.
//!
//! Kernels in f32 have the same bits with AVX2 and AVX-512. Products of bf16 are summed in the order of the CPU's own
//! instructions, and in a reproducible run in that of AMX everywhere. A checkpoint records the class, so that a run that goes on
//! elsewhere can say whether its bits stay the same.

use polyreme_graph::{DType, Precision};
use polyreme_kernels::Isa;
use polyreme_kernels::gemm::pairs::PairOrder;

/// Which kernels sum the products of a run.
///
/// It says how products are summed where such kernels are used: shapes for which they do not pay are summed in f32, in every
/// class but the reproducible one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum KernelClass {
    /// In f32, without vectors, whatever the precision.
    Scalar,
    /// In f32, with vectors.
    F32,
    /// Pairs of bf16, in the order of AVX512-BF16.
    Pairs,
    /// Pairs of bf16, in the order of AMX and by it.
    Tiles,
    /// The same bits without AMX, more slowly.
    TilesTwin,
}

impl KernelClass {
    /// All of them.
    pub const ALL: [KernelClass; 5] = [
        KernelClass::Scalar,
        KernelClass::F32,
        KernelClass::Pairs,
        KernelClass::Tiles,
        KernelClass::TilesTwin,
    ];

    /// That of a run in this precision with these instructions.
    pub fn of(precision: &Precision, isa: Isa) -> KernelClass {
        let tiles = if PairOrder::Tiles.is_native(isa) { KernelClass::Tiles } else { KernelClass::TilesTwin };
        match precision.half {
            _ if !isa.has_avx2() => KernelClass::Scalar,
            Some(DType::Bf16) if precision.reproducible => tiles,
            Some(DType::Bf16) => match PairOrder::fastest(isa) {
                Some(PairOrder::Tiles) => KernelClass::Tiles,
                Some(PairOrder::Pairs) => KernelClass::Pairs,
                None => KernelClass::F32,
            },
            _ => KernelClass::F32,
        }
    }

    /// Its name in checkpoints.
    pub fn name(self) -> &'static str {
        match self {
            KernelClass::Scalar => "scalar",
            KernelClass::F32 => "f32",
            KernelClass::Pairs => "avx512_bf16",
            KernelClass::Tiles => "amx_bf16",
            KernelClass::TilesTwin => "amx_bf16-twin",
        }
    }

    /// The class of that name; `None` for those of other versions.
    pub fn from_name(name: &str) -> Option<KernelClass> {
        KernelClass::ALL.into_iter().find(|class| class.name() == name)
    }

    /// How products are summed, in words that follow "summed".
    pub fn words(self) -> &'static str {
        match self {
            KernelClass::Scalar => "in f32 without vectors",
            KernelClass::F32 => "in f32",
            KernelClass::Pairs => "in the order of AVX512-BF16",
            KernelClass::Tiles => "in the order of AMX, by AMX",
            KernelClass::TilesTwin => "in the order of AMX, without AMX",
        }
    }

    /// Whether a run has the same bits with both.
    pub fn has_bits_of(self, other: KernelClass) -> bool {
        let of =
            |class: KernelClass| if class == KernelClass::TilesTwin { KernelClass::Tiles } else { class };
        of(self) == of(other)
    }
}

#[cfg(test)]
mod tests {
    use polyreme_kernels::Feature;

    use super::*;

    #[test]
    fn classes_follow_the_precision_and_the_instructions() {
        let bf16 = Precision::half(DType::Bf16);
        let same = Precision { reproducible: true, ..bf16.clone() };
        for isa in Isa::available().chain([Isa::detect()]) {
            let f32 = if isa.has_avx2() { KernelClass::F32 } else { KernelClass::Scalar };
            for precision in [Precision::F32, Precision::F32_STRICT, Precision::half(DType::F16)] {
                assert_eq!(KernelClass::of(&precision, isa), f32, "{isa:?} {precision:?}");
                let precision = Precision { reproducible: true, ..precision };
                assert_eq!(KernelClass::of(&precision, isa), f32, "{isa:?} {precision:?}");
            }
            // No named set has instructions for pairs.
            let named = isa != Isa::detect();
            assert!(!named || KernelClass::of(&bf16, isa) == f32, "{isa:?}");
            let twin = if isa.has_avx2() { KernelClass::TilesTwin } else { KernelClass::Scalar };
            assert!(!named || KernelClass::of(&same, isa) == twin, "{isa:?}");
        }
        let pairs = Isa::detect().without(Feature::AmxTile);
        if pairs.has(Feature::Avx512Bf16) {
            assert_eq!(KernelClass::of(&bf16, pairs), KernelClass::Pairs);
            assert_eq!(KernelClass::of(&same, pairs), KernelClass::TilesTwin);
        }
    }

    #[test]
    fn names_come_back_and_only_a_twin_has_the_bits_of_another_class() {
        for class in KernelClass::ALL {
            assert_eq!(KernelClass::from_name(class.name()), Some(class));
            for other in KernelClass::ALL {
                let twins = [KernelClass::Tiles, KernelClass::TilesTwin];
                let same = class == other || twins.contains(&class) && twins.contains(&other);
                assert_eq!(class.has_bits_of(other), same, "{class:?} {other:?}");
            }
        }
        assert_eq!(KernelClass::from_name("avx1024"), None);
    }
}
