//! The twin of `amx` with AVX-512: 8 rows by one panel at a time, the same operations in the same order.
//!
//! Fused multiply-adds flush denormals only if MXCSR says so, and compiled code must never see it say so. Hence assembly:
//! all that is computed while MXCSR is changed is in one block, which restores it.

use std::arch::asm;
use std::arch::x86_64::*;

use super::task::PackedBlock;

/// Rows of a tile: half a strip.
const MR: usize = 8;

/// MXCSR as TDPBF16PS computes: denormals are read as zeros (bit 6) and written as zeros (bit 15), rounding is to nearest
/// even, and nothing is raised.
pub(super) const FLUSHING: u32 = 0x9fc0;

/// Multiplies a block.
///
/// # Safety
/// The CPU has AVX-512; the pointers are as [`PackedBlock`] says, and nothing else accesses C.
pub(super) unsafe fn multiply(block: &PackedBlock) {
    for panel in 0..block.panels {
        // Rows beyond the last are zeros, and their sums have room.
        for row in (0..block.rows).step_by(MR) {
            let (a, b, c) = block.at(row, panel);
            // SAFETY: these rows are inside the strips and C, this panel inside B and C.
            unsafe { tile(block, a, b, c) };
        }
    }
}

/// The products of one row's pair, broadcast, with those of a panel: even steps into one chain, odd ones into the other.
macro_rules! add_row {
    ($even:literal, $odd:literal, $row:literal) => {
        concat!(
            "vpslld zmm18, dword ptr [{a} + 64*",
            $row,
            "]{{1to16}}, 16\n",
            "vpandd zmm19, zmm31, dword ptr [{a} + 64*",
            $row,
            "]{{1to16}}\n",
            "vfmadd231ps zmm",
            $even,
            ", zmm18, zmm16\n",
            "vfmadd231ps zmm",
            $odd,
            ", zmm19, zmm17\n",
        )
    };
}

/// Adds a row's chains, and that to its sum.
macro_rules! add_chains {
    ($even:literal, $odd:literal, $sum:literal) => {
        concat!(
            "vaddps zmm",
            $even,
            ", zmm",
            $even,
            ", zmm",
            $odd,
            "\n",
            "vaddps zmm",
            $sum,
            ", zmm",
            $sum,
            ", zmm",
            $even,
            "\n",
        )
    };
}

/// One tile; `a`, `b` and `c` are its first elements.
///
/// # Safety
/// As for [`multiply`].
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
unsafe fn tile(block: &PackedBlock, a: *const u32, b: *const u32, c: *mut f32) {
    let mut sums = [_mm512_setzero_ps(); MR];
    let mut mxcsr = [0, FLUSHING];
    // SAFETY: 8 rows of a strip and a panel, all `runs` units of them, are read, and as much of C. MXCSR is restored.
    unsafe {
        if block.add {
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = _mm512_loadu_ps(c.add(i * block.c_row));
            }
        }
        asm!(
            "stmxcsr dword ptr [{mxcsr}]",
            "ldmxcsr dword ptr [{mxcsr} + 4]",
            "vpbroadcastd zmm31, {high:e}",
            // A run.
            "2:",
            "vpxord zmm0, zmm0, zmm0",
            "vpxord zmm1, zmm1, zmm1",
            "vpxord zmm2, zmm2, zmm2",
            "vpxord zmm3, zmm3, zmm3",
            "vpxord zmm4, zmm4, zmm4",
            "vpxord zmm5, zmm5, zmm5",
            "vpxord zmm6, zmm6, zmm6",
            "vpxord zmm7, zmm7, zmm7",
            "vpxord zmm8, zmm8, zmm8",
            "vpxord zmm9, zmm9, zmm9",
            "vpxord zmm10, zmm10, zmm10",
            "vpxord zmm11, zmm11, zmm11",
            "vpxord zmm12, zmm12, zmm12",
            "vpxord zmm13, zmm13, zmm13",
            "vpxord zmm14, zmm14, zmm14",
            "vpxord zmm15, zmm15, zmm15",
            "mov {pairs:e}, 16",
            // A pair of steps: the even ones are in the lower halves.
            "3:",
            "vpslld zmm16, zmmword ptr [{b}], 16",
            "vpandd zmm17, zmm31, zmmword ptr [{b}]",
            add_row!(0, 1, 0),
            add_row!(2, 3, 1),
            add_row!(4, 5, 2),
            add_row!(6, 7, 3),
            add_row!(8, 9, 4),
            add_row!(10, 11, 5),
            add_row!(12, 13, 6),
            add_row!(14, 15, 7),
            "add {a}, 4",
            "add {b}, 64",
            "dec {pairs:e}",
            "jnz 3b",
            add_chains!(0, 1, 20),
            add_chains!(2, 3, 21),
            add_chains!(4, 5, 22),
            add_chains!(6, 7, 23),
            add_chains!(8, 9, 24),
            add_chains!(10, 11, 25),
            add_chains!(12, 13, 26),
            add_chains!(14, 15, 27),
            // From behind the first row to the next unit.
            "add {a}, 1024 - 64",
            "dec {runs}",
            "jnz 2b",
            "ldmxcsr dword ptr [{mxcsr}]",
            mxcsr = in(reg) mxcsr.as_mut_ptr(),
            high = in(reg) 0xffff_0000u32,
            a = inout(reg) a => _,
            b = inout(reg) b => _,
            runs = inout(reg) block.runs => _,
            pairs = out(reg) _,
            inout("zmm20") sums[0],
            inout("zmm21") sums[1],
            inout("zmm22") sums[2],
            inout("zmm23") sums[3],
            inout("zmm24") sums[4],
            inout("zmm25") sums[5],
            inout("zmm26") sums[6],
            inout("zmm27") sums[7],
            out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _,
            out("zmm4") _, out("zmm5") _, out("zmm6") _, out("zmm7") _,
            out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _,
            out("zmm12") _, out("zmm13") _, out("zmm14") _, out("zmm15") _,
            out("zmm16") _, out("zmm17") _, out("zmm18") _, out("zmm19") _,
            out("zmm31") _,
            options(nostack),
        );
        for (i, sum) in sums.into_iter().enumerate() {
            _mm512_storeu_ps(c.add(i * block.c_row), sum);
        }
    }
}
