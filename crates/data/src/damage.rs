//! For tests: damaged copies of a good file, and what must hold of all of them.

use std::fs;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;

use crate::dataset::{Dataset, Scratch};
use crate::error::DataError;

/// Writes `n` damaged copies of `good` to `path` and reads each with `read`, which may fail but must not panic. The
/// damage is a function of the copy's number: bytes flipped, ranges cut out, zeroed or doubled, the end cut off.
pub(crate) fn each(good: &[u8], n: u64, path: &Path, read: impl Fn() -> Result<(), DataError>) {
    let mut failed = 0;
    for seed in 0..n {
        // A new file each time: some file systems flush a file that is cut and written again.
        fs::remove_file(path).ok();
        fs::write(path, damaged(good, seed)).unwrap();
        let outcome = panic::catch_unwind(AssertUnwindSafe(&read));
        let outcome = outcome.unwrap_or_else(|_| panic!("{}: panicked with damage {seed}", path.display()));
        failed += u64::from(outcome.is_err());
    }
    assert!(failed > n / 10, "{}: only {failed} of {n} damaged copies were rejected", path.display());
}

/// Reads every sample and checks it against the spec.
pub(crate) fn read_all(set: &dyn Dataset) -> Result<(), DataError> {
    let mut scratch = Scratch::default();
    for i in 0..set.len() {
        let fetched = set.fetch(i, &mut scratch)?;
        let len = match fetched.values {
            crate::Values::U8(v) => v.len(),
            crate::Values::F32(v) => v.len(),
            crate::Values::I32(v) => v.len(),
        };
        assert_eq!(len, set.spec().features.numel());
        match fetched.label {
            crate::Label::Class(label) => {
                assert!(label < set.spec().classes());
                assert_eq!(set.class(i)?, Some(label));
            }
            crate::Label::Values(values) => {
                assert_eq!((values.len(), set.class(i)?), (set.spec().n_labels(), None));
                assert!(values.iter().all(|v| v.is_finite()), "{values:?}");
                let labels = matches!(set.spec().target, crate::Target::Labels { .. });
                assert!(!labels || values.iter().all(|&v| v == 0.0 || v == 1.0), "{values:?}");
            }
            crate::Label::NextId | crate::Label::Tags(_) => panic!("a class or numbers are expected"),
        }
    }
    Ok(())
}

fn damaged(good: &[u8], seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut below = |n: usize| {
        // The random generator is SplitMix64.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n.max(1) as u64) as usize
    };
    let mut bytes = good.to_vec();
    for _ in 0..1 + below(3) {
        // Most can go wrong in headers: half of the damage is done there.
        let at = if below(2) == 0 { below(bytes.len().min(32)) } else { below(bytes.len()) };
        let end = at + below(9).min(bytes.len() - at);
        match below(6) {
            0 => bytes[at] ^= 1 << below(8),
            1 => bytes[at] = below(256) as u8,
            2 => bytes[at..end].fill([0, 0xff][below(2)]),
            3 => drop(bytes.drain(at..end)),
            4 => bytes.extend_from_within(at..end),
            _ => bytes.truncate(at),
        }
        if bytes.is_empty() {
            break;
        }
    }
    bytes
}
