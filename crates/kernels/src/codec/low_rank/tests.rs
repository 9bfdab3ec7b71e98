//! Factors against their definition in f64, on every instruction set.

use super::*;
use crate::lanes::testing::data;

const SHAPES: [([usize; 2], usize); 5] =
    [([16, 16], 1), ([64, 27], 2), ([7, 300], 1), ([200, 130], 4), ([33, 1000], 8)];

fn matrix([rows, cols]: [usize; 2], rank: usize) -> LowRankMatrix {
    LowRankMatrix::of(0, &[rows, cols], rank).unwrap()
}

#[test]
fn small_and_flat_tensors_travel_as_they_are() {
    assert_eq!(LowRankMatrix::of(0, &[1000], 1), None);
    assert_eq!(LowRankMatrix::of(0, &[], 1), None);
    assert_eq!(LowRankMatrix::of(0, &[8, 8], 4), None);
    assert_eq!(LowRankMatrix::of(0, &[0, 8], 1), None);
    let conv = LowRankMatrix::of(5, &[64, 3, 3, 3], 2).unwrap();
    assert_eq!((conv.at, conv.rows, conv.cols, conv.rank), (5, 64, 27, 2));
}

#[test]
fn products_are_those_of_matrices() {
    for (dims, rank) in SHAPES {
        let of = matrix(dims, rank);
        let (m, q) = (data(1, of.len()), data(2, of.right_len()));
        for isa in Isa::available() {
            let (mut p, mut scratch) = (vec![0.0; of.left_len()], vec![0.0; of.scratch_len()]);
            of.left(isa, &m, &q, &mut p, &mut scratch);
            let mut back = vec![0.0; of.right_len()];
            of.right(isa, &m, &p, &mut back, &mut scratch);
            for (j, p) in p.chunks(of.rows).enumerate() {
                for (i, got) in p.iter().enumerate() {
                    let want = dot(&m[i * of.cols..][..of.cols], &q[j * of.cols..][..of.cols]);
                    assert!((f64::from(*got) - want).abs() < 1e-3, "{dims:?}");
                }
                for c in 0..of.cols {
                    let column: Vec<f32> = (0..of.rows).map(|i| m[i * of.cols + c]).collect();
                    let (want, got) = (dot(&column, p), f64::from(back[j * of.cols + c]));
                    assert!((got - want).abs() < 1e-3 * (1.0 + want.abs()), "{dims:?}: {got} for {want}");
                }
            }
        }
    }
}

#[test]
fn columns_are_orthogonal_or_zero() {
    for (dims, rank) in SHAPES {
        let of = matrix(dims, rank);
        let mut p = data(3, of.left_len());
        if rank > 2 {
            // The third is made of the first two.
            let third: Vec<f32> = (0..of.rows).map(|i| 2.0 * p[i] - 0.3 * p[of.rows + i]).collect();
            p[2 * of.rows..3 * of.rows].copy_from_slice(&third);
        }
        assert!(of.orthogonalise(&mut p));
        let columns: Vec<_> = p.chunks(of.rows).collect();
        for (i, a) in columns.iter().enumerate() {
            for (j, b) in columns.iter().enumerate() {
                let want = if i == j && (i != 2 || rank <= 2) { 1.0 } else { 0.0 };
                assert!((dot(a, b) - want).abs() < 1e-5, "{dims:?}: {i} {j}: {}", dot(a, b));
            }
        }
    }
    let of = matrix([64, 27], 2);
    let mut p = vec![1.0; of.left_len()];
    p[3] = f32::INFINITY;
    assert!(!of.orthogonalise(&mut p) && p.iter().all(|x| *x == 0.0));
}

/// What arrives and what is kept are the matrix again; and every instruction set comes to the same bits.
#[test]
fn what_is_not_sent_is_kept() {
    for (dims, rank) in SHAPES {
        let of = matrix(dims, rank);
        let (m, mut q) = (data(5, of.len()), vec![0.0; of.right_len()]);
        of.begin(&mut q);
        let (mut p, mut scratch) = (vec![0.0; of.left_len()], vec![0.0; of.scratch_len()]);
        of.left(Isa::detect(), &m, &q, &mut p, &mut scratch);
        of.orthogonalise(&mut p);
        of.right(Isa::detect(), &m, &p, &mut q, &mut scratch);
        let mut all = Vec::new();
        for isa in Isa::available() {
            let (mut sum, mut residual) = (vec![f32::NAN; of.len()], m.clone());
            of.expand(isa, &p, [&q, &q], &mut sum, &mut residual);
            for i in 0..of.len() {
                assert!((sum[i] + residual[i] - m[i]).abs() < 1e-5);
            }
            assert!(length(&residual) < length(&m));
            all.push((sum, residual));
        }
        assert!(all.iter().all(|run| *run == all[0]), "{dims:?}");
    }
}

#[test]
fn zero_columns_begin_anew_and_others_stay() {
    let of = matrix([64, 27], 2);
    let mut q = vec![0.0; of.right_len()];
    q[3] = 1.5;
    of.begin(&mut q);
    assert!(q[..27].iter().enumerate().all(|(i, x)| *x == if i == 3 { 1.5 } else { 0.0 }));
    assert!(q[27..].iter().all(|x| *x != 0.0 && x.abs() <= 1.0));
    assert!(q[27..].iter().sum::<f32>().abs() < 12.0);
}

#[test]
fn a_bucket_is_cut_into_matrices_and_the_rest() {
    let of = |at: usize| LowRankMatrix::of(at, &[20, 30], 2).unwrap();
    let layout = LowRankLayout::new(2, 1300, vec![of(10), of(620)]);
    assert_eq!(layout.plain, [0..10, 610..620, 1220..1300]);
    assert_eq!(layout.first_len(), 100 + 2 * 40);
    assert_eq!(layout.factors_len(), 2 * 60);
    assert_eq!(layout.sent_len(), 300);
}
