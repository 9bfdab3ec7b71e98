//! Codecs against what they should compute, written as plainly as can be, and every instruction set against the scalar twin.

use super::*;
use crate::lanes::testing::data;

const LENGTHS: [usize; 12] = [0, 1, 7, 31, 255, 256, 257, 1023, 1024, 1025, 5000, 100_003];

/// Numbers of very different magnitudes, as gradients of several tensors have them.
fn uneven(seed: u64, len: usize) -> Vec<f32> {
    let size = |i: usize| [1.0, 1e-4, 300.0, 1e-9][i / 700 % 4];
    data(seed, len).into_iter().enumerate().map(|(i, x)| x * size(i)).collect()
}

/// The largest error of one number of a block with this largest magnitude.
fn bound(codec: BlockCodec, x: f32, largest: f32) -> f32 {
    match codec {
        BlockCodec::Bf16 => x.abs() / 256.0,
        // Small numbers of a block are rounded to multiples of 2⁻²⁴ of its scale.
        BlockCodec::F16 => (x.abs() / 2048.0).max(largest * 2f32.powi(-38)),
        BlockCodec::Int8 => largest / 127.0 * 0.501,
        // Of its own magnitude and the mean of others.
        BlockCodec::OneBit => 2.0 * largest,
        BlockCodec::TopK { .. } => largest,
    }
}

fn block(codec: BlockCodec) -> usize {
    match codec {
        BlockCodec::Bf16 => 1,
        BlockCodec::F16 => 1024,
        BlockCodec::Int8 | BlockCodec::OneBit => 256,
        BlockCodec::TopK { .. } => topk::TOPK_CHUNK,
    }
}

#[test]
fn what_arrives_is_near_and_the_rest_is_the_residual() {
    for codec in BlockCodec::ALL {
        for n in LENGTHS {
            let (x, before) = (uneven(3, n), uneven(5, n).iter().map(|r| r * 0.01).collect::<Vec<_>>());
            let mut runs = Vec::new();
            for isa in Isa::available() {
                let (mut residual, mut coded) = (before.clone(), vec![0; codec.coded_len(n)]);
                codec.encode(isa, &x, &mut residual, &mut coded);
                let (mut y, mut sum) = (vec![f32::NAN; n], x.clone());
                codec.decode(isa, &coded, &mut y);
                codec.decode_add(isa, &coded, &mut sum);
                for i in 0..n {
                    let meant = x[i] + before[i];
                    let of_block =
                        i / block(codec) * block(codec)..n.min((i / block(codec) + 1) * block(codec));
                    let largest = of_block.map(|j| (x[j] + before[j]).abs()).fold(0.0, f32::max);
                    let name = codec.name();
                    assert!(
                        (y[i] - meant).abs() <= bound(codec, meant, largest),
                        "{name}[{i}]: {} for {meant}",
                        y[i]
                    );
                    assert!(
                        (residual[i] - (meant - y[i])).abs() <= largest * 1e-6,
                        "{name}[{i}]: what was lost"
                    );
                    assert_eq!(sum[i], x[i] + y[i], "{name}[{i}]");
                }
                runs.push((coded, y, residual));
            }
            assert!(
                runs.windows(2).all(|w| w[0] == w[1]),
                "{} of {n} on every instruction set",
                codec.name()
            );
        }
    }
}

/// What was lost is sent later: the mean of many messages of the same numbers tends to these numbers.
#[test]
fn nothing_is_lost_for_ever() {
    for codec in [BlockCodec::Bf16, BlockCodec::F16, BlockCodec::Int8] {
        let (x, isa) = (uneven(7, 3000), Isa::detect());
        let (mut residual, mut coded) = (vec![0.0; x.len()], vec![0; codec.coded_len(x.len())]);
        let mut sum = vec![0.0f32; x.len()];
        for _ in 0..64 {
            codec.encode(isa, &x, &mut residual, &mut coded);
            codec.decode_add(isa, &coded, &mut sum);
        }
        for i in 0..x.len() {
            let (mean, largest) = (sum[i] / 64.0, 300.0);
            let once = bound(codec, x[i], largest);
            assert!((mean - x[i]).abs() <= once / 16.0 + x[i].abs() * 1e-5, "{}[{i}]", codec.name());
        }
    }
}

#[test]
fn what_is_not_finite_shows_and_leaves_nothing() {
    for codec in BlockCodec::ALL {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for isa in Isa::available() {
                let mut x = uneven(9, 3000);
                x[1234] = bad;
                let (mut residual, mut coded) = (vec![0.0; x.len()], vec![0; codec.coded_len(x.len())]);
                codec.encode(isa, &x, &mut residual, &mut coded);
                let mut y = vec![0.0; x.len()];
                codec.decode(isa, &coded, &mut y);
                assert!(!y[1234].is_finite(), "{} of {bad}", codec.name());
                assert!(y[0].is_finite() && y[2999].is_finite(), "other blocks");
                assert!(residual.iter().all(|r| r.is_finite()), "{} of {bad}", codec.name());
            }
        }
    }
}

#[test]
fn lengths_are_as_documented() {
    assert_eq!(BlockCodec::Bf16.coded_len(1025), 2050);
    assert_eq!(BlockCodec::F16.coded_len(1025), 2050 + 8);
    assert_eq!(BlockCodec::Int8.coded_len(1025), 1025 + 20);
    assert_eq!(BlockCodec::OneBit.coded_len(1025), 129 + 20);
    assert_eq!(BlockCodec::TopK { ppm: 10_000 }.coded_len(1025), 6 * 11);
    assert_eq!(BlockCodec::TopK { ppm: 10_000 }.coded_len(2 * 16_384 + 1), 6 * (164 + 164 + 1));
    // A part that begins at a multiple of a block is coded as it would be alone.
    for codec in [BlockCodec::Bf16, BlockCodec::F16, BlockCodec::Int8, BlockCodec::OneBit] {
        assert_eq!(codec.coded_len(5 * BLOCK + 3), 5 * codec.coded_len(BLOCK) + codec.coded_len(3));
    }
}

/// Codecs that send next to nothing of a number need more messages. What they have yet to send is all that is missing, and it stays
/// bounded: after three times as many messages it is no more on the whole, and no number is behind by more than a block's length. (With
/// one scale for a block, those far above the others wait until enough has gathered.)
#[test]
fn what_is_left_out_stays_bounded() {
    for codec in [BlockCodec::OneBit, BlockCodec::TopK { ppm: 100_000 }] {
        let (x, isa) = (data(7, 3000), Isa::detect());
        let (mut residual, mut coded) = (vec![0.0; x.len()], vec![0; codec.coded_len(x.len())]);
        let (mut sum, mut y) = (vec![0.0f64; x.len()], vec![0.0; x.len()]);
        let mut means = Vec::new();
        for message in 1..=3000 {
            codec.encode(isa, &x, &mut residual, &mut coded);
            codec.decode(isa, &coded, &mut y);
            sum.iter_mut().zip(&y).for_each(|(s, y)| *s += f64::from(*y));
            if message % 1000 == 0 {
                means.push(residual.iter().map(|r| f64::from(r.abs())).sum::<f64>() / x.len() as f64);
                for i in 0..x.len() {
                    let all = f64::from(message as f32) * f64::from(x[i]);
                    let off = (sum[i] + f64::from(residual[i]) - all).abs();
                    assert!(off < 1e-3 * (1.0 + all.abs()), "{}[{i}]: {off} of {all}", codec.name());
                }
            }
        }
        assert!(means[2] < 1.1 * means[0], "{}: {means:?} to be sent", codec.name());
        let largest = |all: &[f32]| all.iter().fold(0.0f32, |a, r| a.max(r.abs()));
        assert!(largest(&residual) < BLOCK as f32 * largest(&x), "{}", codec.name());
    }
}

/// The largest are found as by sorting; of equals the first are taken.
#[test]
fn the_largest_are_sent_exactly() {
    let equal = |n: usize| (0..n).map(|i| if i % 3 == 0 { -2.0 } else { 1.0 }).collect::<Vec<f32>>();
    for (ppm, n) in [(10_000, 5000), (1, 40_000), (333_333, 17_000), (1_000_000, 20_000), (500_000, 1)] {
        for x in [uneven(3, n), equal(n), vec![0.0; n]] {
            for isa in Isa::available() {
                let codec = BlockCodec::TopK { ppm };
                let (mut residual, mut coded) = (vec![0.0; n], vec![0; codec.coded_len(n)]);
                codec.encode(isa, &x, &mut residual, &mut coded);
                let mut y = vec![f32::NAN; n];
                codec.decode(isa, &coded, &mut y);
                for start in (0..n).step_by(topk::TOPK_CHUNK) {
                    let chunk = start..n.min(start + topk::TOPK_CHUNK);
                    let mut order: Vec<usize> = chunk.clone().collect();
                    order.sort_by(|a, b| x[*b].abs().total_cmp(&x[*a].abs()));
                    let (sent, rest) = order.split_at(topk::kept(ppm, chunk.len()));
                    assert!(sent.iter().all(|i| y[*i] == x[*i] && residual[*i] == 0.0), "{ppm} of {n}");
                    assert!(rest.iter().all(|i| y[*i] == 0.0 && residual[*i] == x[*i]), "{ppm} of {n}");
                }
            }
        }
    }
}
