//! Tiles of every instruction set against plain loops, and their bits against each other.

use super::avx2::{pack_panels, pack_transposed, panels_len};
use super::*;
use crate::Isa;

fn numbers(n: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 37 + 11) % 23) as f32 - 11.0).collect()
}

/// Small whole numbers: every sum is exact, so tiles equal the plain loops bit for bit.
fn check<T: Tiles>(m: usize, n: usize, depth: usize) {
    let (a, b) = (numbers(m * depth), numbers(n * depth));
    let ldc = round_cols(n);
    let b_t: Vec<f32> = (0..n * depth).map(|x| b[(x % n.max(1)) * depth + x / n.max(1)]).collect();
    let mut panels = [vec![f32::NAN; panels_len(depth, n)], vec![f32::NAN; panels_len(depth, n)]];
    // SAFETY: the CPU has AVX2, and the buffers have the lengths that the functions state.
    unsafe {
        pack_transposed(b.as_ptr(), depth, n, depth, panels[0].as_mut_ptr());
        pack_panels(b_t.as_ptr(), n, n, depth, panels[1].as_mut_ptr());
    }
    assert_eq!(panels[0], panels[1], "packing {n}×{depth}");
    let mut c = vec![1.0; m * ldc];
    // SAFETY: as above.
    unsafe { product::<T, true>(m, n, depth, a.as_ptr(), depth, panels[0].as_ptr(), c.as_mut_ptr(), ldc) };
    for i in 0..m {
        for j in 0..n {
            let want: f32 = (0..depth).map(|l| a[i * depth + l] * b[j * depth + l]).sum();
            assert_eq!(c[i * ldc + j], want + 1.0, "{m}×{n}×{depth} at {i},{j}");
        }
    }
    // The same with the left operand turned and the right one in rows, one tile.
    let (rows, cols) = (m.min(T::ROWS), ldc.min(T::COLS));
    let a_t: Vec<f32> = (0..rows * depth).map(|x| a[(x % rows.max(1)) * depth + x / rows.max(1)]).collect();
    let mut b_rows = vec![0.0; depth * cols];
    for (l, row) in b_rows.chunks_exact_mut(cols.max(1)).enumerate() {
        let n = n.min(cols);
        row[..n].copy_from_slice(&(0..n).map(|j| b[j * depth + l]).collect::<Vec<_>>());
    }
    if rows > 0 && n > 0 {
        let mut c = vec![0.0; rows * cols];
        let (left, right) = (Left::Columns(rows), Right::rows(cols));
        // SAFETY: as above.
        unsafe {
            let (a, b, c) = (a_t.as_ptr(), b_rows.as_ptr(), c.as_mut_ptr());
            T::tile::<false>(rows, cols, depth, a, left, b, right, c, cols);
        }
        for (i, row) in c.chunks(cols).enumerate() {
            for (j, &sum) in row.iter().enumerate().take(n) {
                let want: f32 = (0..depth).map(|l| a[i * depth + l] * b[j * depth + l]).sum();
                assert_eq!(sum, want, "turned {rows}×{cols}×{depth} at {i},{j}");
            }
        }
    }
}

#[test]
fn tiles_equal_plain_loops() {
    for m in (0..=14).chain([24, 25]) {
        for n in [0, 1, 7, 8, 15, 16, 17, 32, 33, 49, 64, 65] {
            for depth in [0, 1, 7, 8, 9, 20] {
                for isa in Isa::available() {
                    if isa.has_avx512() {
                        check::<Avx512>(m, n, depth);
                    } else if isa.has_avx2() {
                        check::<Avx2>(m, n, depth);
                    }
                }
            }
        }
    }
}
