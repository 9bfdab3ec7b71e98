//! The kernel of [`super::PairOrder::Tiles`] with AMX: 32×32 outputs in four tile registers, or 16×16 in one.
//!
//! Assembly, because the compiler's intrinsics are not stable. It knows nothing of tile registers and never uses them, so
//! they need not be declared as overwritten. A block's tiles are configured when it starts and released when it ends: in
//! between nothing but this file runs.
//!
//! Linux lets a process use tile registers after it has asked once (`state`). Because few machines have AMX, and none may
//! train on wrong products, the first use in a process compares a product with the oracle, bit for bit.

use std::arch::asm;
use std::sync::OnceLock;

use super::blocks::{UNIT, UNIT_LEN};
use super::scalar;
use super::task::PackedBlock;
use super::{AmxState, RUN};
use crate::{Feature, Isa};

/// Asks the system for tile registers and checks a product, once per process.
pub(super) fn state() -> AmxState {
    static STATE: OnceLock<AmxState> = OnceLock::new();
    *STATE.get_or_init(|| {
        if !Isa::detect().has(Feature::AmxBf16) {
            return AmxState::Absent;
        }
        match ask() {
            0 => {}
            errno => return AmxState::Refused(errno),
        }
        // SAFETY: the CPU has AMX, and the system has allowed it.
        let right = agrees(|block| unsafe { multiply(block) });
        if right { AmxState::Ready } else { AmxState::Differs }
    })
}

/// Asks for tile registers, for all threads of this process. Returns 0, or why not.
#[cfg(target_os = "linux")]
fn ask() -> i32 {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    const XFEATURE_XTILEDATA: u64 = 18;
    let result: i64;
    // SAFETY: the call reads and writes no memory of this process.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    -result as i32
}

/// Elsewhere nothing is known about how to ask.
#[cfg(not(target_os = "linux"))]
fn ask() -> i32 {
    // ENOSYS.
    38
}

/// The operand of LDTILECFG: palette 1, and for each tile register its rows and the bytes of a row.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// All eight tiles are whole: 16 rows of 64 bytes.
static WHOLE: TileConfig = TileConfig {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// Multiplies a block.
///
/// # Safety
/// The CPU has AMX with bf16 and the system allows it; the pointers are as [`PackedBlock`] says, and nothing else
/// accesses C.
pub(super) unsafe fn multiply(block: &PackedBlock) {
    let strips = block.rows.div_ceil(UNIT);
    // SAFETY: the operand is 64 bytes.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const WHOLE, options(nostack, readonly)) };
    // Two strips by two panels, then what is left of either.
    for panel in (0..block.panels).step_by(2) {
        for strip in (0..strips).step_by(2) {
            let (rows, cols) = ((strips - strip).min(2), (block.panels - panel).min(2));
            let (a, b, c) = block.at(strip * UNIT, panel);
            if rows == 2 && cols == 2 {
                // SAFETY: these strips and panels are inside A and B, and C has room for all their outputs.
                unsafe { four(block, a, b, c) };
                continue;
            }
            for (i, j) in [(0, 0), (0, 1), (1, 0)] {
                if i < rows && j < cols {
                    let (a, b, c) = block.at((strip + i) * UNIT, panel + j);
                    // SAFETY: as above.
                    unsafe { one(block, a, b, c) };
                }
            }
        }
    }
    // SAFETY: it frees what was configured above.
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}

/// Two strips by two panels: C in tmm0 to tmm3, row by row; A in tmm4 and tmm5, B in tmm6 and tmm7.
///
/// # Safety
/// As for [`multiply`]; all tiles are configured.
unsafe fn four(block: &PackedBlock, a: *const u32, b: *const u32, c: *mut f32) {
    // SAFETY: `runs` units of two strips and two panels are read; 32 rows of 128 bytes of C are written, and read if they
    // are added to.
    unsafe {
        asm!(
            "test {add:e}, {add:e}",
            "jnz 2f",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "jmp 3f",
            "2:",
            "tileloadd tmm0, [{c0} + {c_row}*1]",
            "tileloadd tmm1, [{c0} + {c_row}*1 + 64]",
            "tileloadd tmm2, [{c1} + {c_row}*1]",
            "tileloadd tmm3, [{c1} + {c_row}*1 + 64]",
            "3:",
            "tileloadd tmm4, [{a0} + {row}*1]",
            "tileloadd tmm6, [{b0} + {row}*1]",
            "tileloadd tmm7, [{b1} + {row}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{a1} + {row}*1]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a0}, 1024",
            "add {a1}, 1024",
            "add {b0}, 1024",
            "add {b1}, 1024",
            "dec {runs}",
            "jnz 3b",
            "tilestored [{c0} + {c_row}*1], tmm0",
            "tilestored [{c0} + {c_row}*1 + 64], tmm1",
            "tilestored [{c1} + {c_row}*1], tmm2",
            "tilestored [{c1} + {c_row}*1 + 64], tmm3",
            add = in(reg) u32::from(block.add),
            a0 = inout(reg) a => _,
            a1 = inout(reg) a.add(block.a_next) => _,
            b0 = inout(reg) b => _,
            b1 = inout(reg) b.add(block.b_next) => _,
            c0 = in(reg) c,
            c1 = in(reg) c.add(UNIT * block.c_row),
            c_row = in(reg) block.c_row * size_of::<f32>(),
            row = in(reg) 64usize,
            runs = inout(reg) block.runs => _,
            options(nostack),
        );
    }
}

/// One strip by one panel: C in tmm0, A in tmm4, B in tmm6.
///
/// # Safety
/// As for [`multiply`]; all tiles are configured.
unsafe fn one(block: &PackedBlock, a: *const u32, b: *const u32, c: *mut f32) {
    // SAFETY: `runs` units of a strip and a panel are read; 16 rows of 64 bytes of C are written, and read if they are
    // added to.
    unsafe {
        asm!(
            "tilezero tmm0",
            "test {add:e}, {add:e}",
            "jz 3f",
            "tileloadd tmm0, [{c} + {c_row}*1]",
            "3:",
            "tileloadd tmm4, [{a} + {row}*1]",
            "tileloadd tmm6, [{b} + {row}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "add {a}, 1024",
            "add {b}, 1024",
            "dec {runs}",
            "jnz 3b",
            "tilestored [{c} + {c_row}*1], tmm0",
            add = in(reg) u32::from(block.add),
            a = inout(reg) a => _,
            b = inout(reg) b => _,
            c = in(reg) c,
            c_row = in(reg) block.c_row * size_of::<f32>(),
            row = in(reg) 64usize,
            runs = inout(reg) block.runs => _,
            options(nostack),
        );
    }
}

/// Multiplies two strips by two panels over 8 runs, which stay in L1, `times` times, and returns the operations.
///
/// # Safety
/// The CPU has AMX with bf16 and the system allows it.
pub(crate) unsafe fn products_in_l1(times: usize) -> f64 {
    const RUNS: usize = 8;
    let (a, b) = (TileLine([0x3f80_3f80; 2 * RUNS * UNIT_LEN]), TileLine([0x3f80_3f80; 2 * RUNS * UNIT_LEN]));
    let mut c = TileLine([0.0; 4 * UNIT_LEN]);
    let (rows, c_row) = (2 * UNIT, 2 * UNIT);
    for _ in 0..times {
        let (a, b, c) = (a.0.as_ptr(), b.0.as_ptr(), c.0.as_mut_ptr());
        let next = RUNS * UNIT_LEN;
        let block = PackedBlock {
            runs: RUNS,
            rows,
            panels: 2,
            a,
            a_next: next,
            b,
            b_next: next,
            c,
            c_row,
            add: false,
        };
        // SAFETY: the caller's promise; the arrays are of two strips, two panels and their outputs.
        unsafe { multiply(&block) };
    }
    std::hint::black_box(&c.0);
    (times * 2 * rows * c_row * RUNS * RUN) as f64
}

/// What starts on a cache line.
#[repr(align(64))]
struct TileLine<T>(T);

/// Whether a kernel gives the bits of the oracle: three strips by three panels, so that whole and single tiles occur, over
/// two runs twice, so that sums are added to; with denormals, zeros of both signs and infinities in the operands.
pub(super) fn agrees(multiply: impl Fn(&PackedBlock)) -> bool {
    const SIDE: usize = 3;
    const RUNS: usize = 2;
    const LEN: usize = SIDE * RUNS * UNIT_LEN;
    const ROW: usize = SIDE * UNIT;
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut units = || {
        TileLine(std::array::from_fn::<u32, LEN, _>(|i| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let bits = (state >> 32) as u32;
            // Exponents near those of 1 in some units, near those of the smallest numbers in others.
            let near = if (i / UNIT_LEN).is_multiple_of(2) { 0x3f80_3f80 } else { 0x2000_2000 };
            match bits % 97 {
                0 => bits & 0x807f_807f,
                1 if i % 7 == 0 => bits & 0x8000_8000 | 0x7f80_7f80,
                _ => bits & 0x83ff_83ff ^ near,
            }
        }))
    };
    let (a, b) = (units(), units());
    let mut c = TileLine([f32::NAN; ROW * ROW]);
    for add in [false, true] {
        multiply(&PackedBlock {
            runs: RUNS,
            rows: ROW,
            panels: SIDE,
            a: a.0.as_ptr(),
            a_next: RUNS * UNIT_LEN,
            b: b.0.as_ptr(),
            b_next: RUNS * UNIT_LEN,
            c: c.0.as_mut_ptr(),
            c_row: ROW,
            add,
        });
    }
    // Step `l` of k of a row of A, and of a column of B.
    let half = |pair: u32, l: usize| {
        f32::from_bits(if l.is_multiple_of(2) { pair << 16 } else { pair & 0xffff_0000 })
    };
    let unit = |own: usize, run: usize| (own / UNIT * RUNS + run) * UNIT_LEN;
    let of_a = |i: usize, run: usize, l: usize| half(a.0[unit(i, run) + i % UNIT * UNIT + l / 2], l);
    let of_b = |j: usize, run: usize, l: usize| half(b.0[unit(j, run) + l / 2 * UNIT + j % UNIT], l);
    (0..ROW * ROW).all(|at| {
        let (i, j) = (at / ROW, at % ROW);
        let want = (0..2 * RUNS).fold(0.0, |sum, run| {
            let run = run % RUNS;
            scalar::add_run(sum, std::array::from_fn::<_, RUN, _>(|l| (of_a(i, run, l), of_b(j, run, l))))
        });
        let got = c.0[at];
        got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan())
    })
}
