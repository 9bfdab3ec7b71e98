//! The twin of `amx` with AVX2: 2 rows by one panel at a time, in assembly for the reason that `avx512` states.

use std::arch::asm;
use std::arch::x86_64::*;

use super::avx512::FLUSHING;
use super::task::PackedBlock;

/// Rows of a tile.
const MR: usize = 2;

/// Multiplies a block.
///
/// # Safety
/// The CPU has AVX2; the pointers are as [`PackedBlock`] says, and nothing else accesses C.
pub(super) unsafe fn multiply(block: &PackedBlock) {
    for panel in 0..block.panels {
        // A row beyond the last is zeros, and its sums have room.
        for row in (0..block.rows).step_by(MR) {
            let (a, b, c) = block.at(row, panel);
            // SAFETY: these rows are inside the strips and C, this panel inside B and C.
            unsafe { tile(block, a, b, c) };
        }
    }
}

/// The products of one row's pair, broadcast, with both halves of a panel's.
macro_rules! add_row {
    ($row:literal, $even0:literal, $odd0:literal, $even1:literal, $odd1:literal) => {
        concat!(
            "vpbroadcastd ymm12, dword ptr [{a} + 64*",
            $row,
            "]\n",
            "vpslld ymm13, ymm12, 16\n",
            "vpand ymm12, ymm12, ymm15\n",
            "vfmadd231ps ymm",
            $even0,
            ", ymm13, ymm8\n",
            "vfmadd231ps ymm",
            $odd0,
            ", ymm12, ymm9\n",
            "vfmadd231ps ymm",
            $even1,
            ", ymm13, ymm10\n",
            "vfmadd231ps ymm",
            $odd1,
            ", ymm12, ymm11\n",
        )
    };
}

/// Adds both chains of eight outputs, and that to their sums.
macro_rules! add_chains {
    ($even:literal, $odd:literal, $at:literal) => {
        concat!(
            "vaddps ymm",
            $even,
            ", ymm",
            $even,
            ", ymm",
            $odd,
            "\n",
            "vmovups ymm12, ymmword ptr ",
            $at,
            "\n",
            "vaddps ymm12, ymm12, ymm",
            $even,
            "\n",
            "vmovups ymmword ptr ",
            $at,
            ", ymm12\n",
        )
    };
}

/// One tile; `a`, `b` and `c` are its first elements.
///
/// # Safety
/// As for [`multiply`].
#[target_feature(enable = "avx2,fma")]
unsafe fn tile(block: &PackedBlock, a: *const u32, b: *const u32, c: *mut f32) {
    let mut mxcsr = [0, FLUSHING];
    // SAFETY: 2 rows of a strip and a panel, all `runs` units of them, are read, and as much of C is read and written.
    // MXCSR is restored.
    unsafe {
        if !block.add {
            for i in 0..MR {
                _mm256_storeu_ps(c.add(i * block.c_row), _mm256_setzero_ps());
                _mm256_storeu_ps(c.add(i * block.c_row + 8), _mm256_setzero_ps());
            }
        }
        asm!(
            "stmxcsr dword ptr [{mxcsr}]",
            "ldmxcsr dword ptr [{mxcsr} + 4]",
            // The upper half of each pair.
            "vpcmpeqd ymm15, ymm15, ymm15",
            "vpslld ymm15, ymm15, 16",
            // A run.
            "2:",
            "vpxor ymm0, ymm0, ymm0",
            "vpxor ymm1, ymm1, ymm1",
            "vpxor ymm2, ymm2, ymm2",
            "vpxor ymm3, ymm3, ymm3",
            "vpxor ymm4, ymm4, ymm4",
            "vpxor ymm5, ymm5, ymm5",
            "vpxor ymm6, ymm6, ymm6",
            "vpxor ymm7, ymm7, ymm7",
            "mov {pairs:e}, 16",
            // A pair of steps: the even ones are in the lower halves.
            "3:",
            "vmovdqu ymm9, ymmword ptr [{b}]",
            "vmovdqu ymm11, ymmword ptr [{b} + 32]",
            "vpslld ymm8, ymm9, 16",
            "vpslld ymm10, ymm11, 16",
            "vpand ymm9, ymm9, ymm15",
            "vpand ymm11, ymm11, ymm15",
            add_row!(0, 0, 1, 2, 3),
            add_row!(1, 4, 5, 6, 7),
            "add {a}, 4",
            "add {b}, 64",
            "dec {pairs:e}",
            "jnz 3b",
            add_chains!(0, 1, "[{c0}]"),
            add_chains!(2, 3, "[{c0} + 32]"),
            add_chains!(4, 5, "[{c1}]"),
            add_chains!(6, 7, "[{c1} + 32]"),
            // From behind the first row to the next unit.
            "add {a}, 1024 - 64",
            "dec {runs}",
            "jnz 2b",
            "ldmxcsr dword ptr [{mxcsr}]",
            mxcsr = in(reg) mxcsr.as_mut_ptr(),
            a = inout(reg) a => _,
            b = inout(reg) b => _,
            c0 = in(reg) c,
            c1 = in(reg) c.add(block.c_row),
            runs = inout(reg) block.runs => _,
            pairs = out(reg) _,
            out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _,
            out("ymm4") _, out("ymm5") _, out("ymm6") _, out("ymm7") _,
            out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _,
            out("ymm12") _, out("ymm13") _, out("ymm15") _,
            options(nostack),
        );
    }
}
