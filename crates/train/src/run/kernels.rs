//! Which kernels sum the products of a run: checkpoints record it, and a run that goes on with others says what that means.

use polyreme_collective::{Comm, Reduce};
use polyreme_exec::KernelClass;

use crate::error::TrainError;

/// The classes of all ranks, each once and in one order. Collective.
pub(super) fn of_all_ranks(comm: &mut Comm, own: KernelClass) -> Result<Vec<KernelClass>, TrainError> {
    let mut ranks = KernelClass::ALL.map(|class| i64::from(class == own));
    comm.all_reduce(&mut ranks, Reduce::Sum)?;
    Ok(KernelClass::ALL.into_iter().zip(ranks).filter(|(_, n)| *n > 0).map(|(class, _)| class).collect())
}

/// What is to be said if a checkpoint has these classes and the run goes on with those; nothing if it does not matter, or is
/// not known.
pub(super) fn change(before: &[String], now: &[KernelClass]) -> Option<String> {
    let known = known(before);
    if known.is_empty() {
        return None;
    }
    let all_in = |these: &[KernelClass], those: &[KernelClass]| {
        these.iter().all(|class| those.iter().any(|other| class.has_bits_of(*other)))
    };
    let same = known.len() == before.len() && all_in(&known, now) && all_in(now, &known);
    if !same {
        return Some(format!(
            "up to the checkpoint products were summed {}, from here on {}: the run goes on, but its bits will differ from \
             those of a run that was not moved; `parallel.reproducible = true` gives the same bits on every machine with AVX2",
            words(&known),
            words(now)
        ));
    }
    let slower = now.contains(&KernelClass::TilesTwin) && !known.contains(&KernelClass::TilesTwin);
    slower.then(|| {
        "up to the checkpoint products were summed by AMX, which this run does not have here: it goes on with the same bits, \
         and is slower here"
            .to_string()
    })
}

/// The classes that this version knows of those that a checkpoint names.
pub fn known(names: &[String]) -> Vec<KernelClass> {
    names.iter().filter_map(|name| KernelClass::from_name(name)).collect()
}

/// The classes in words that follow "summed".
pub fn words(classes: &[KernelClass]) -> String {
    classes.iter().map(|class| class.words()).collect::<Vec<_>>().join(" and ")
}

#[cfg(test)]
mod tests {
    use super::KernelClass::{F32, Pairs, Scalar, Tiles, TilesTwin};
    use super::*;

    #[test]
    fn other_kernels_are_named_where_they_matter() {
        let said = |before: &[&str], now: &[KernelClass]| {
            change(&before.iter().map(|name| name.to_string()).collect::<Vec<_>>(), now).unwrap_or_default()
        };
        // Of earlier versions nothing is known.
        assert_eq!(said(&[], &[F32]), "");
        for class in KernelClass::ALL {
            assert_eq!(said(&[class.name()], &[class]), "");
        }
        assert_eq!(said(&["f32", "avx512_bf16"], &[F32, Pairs]), "");
        assert_eq!(said(&["amx_bf16-twin"], &[Tiles]), "", "faster, with the same bits");
        let moved = said(&["avx512_bf16"], &[F32]);
        assert!(moved.contains("in the order of AVX512-BF16, from here on in f32: "), "{moved}");
        assert!(moved.contains("bits will differ") && !moved.contains('\n'), "{moved}");
        let slower = said(&["amx_bf16"], &[TilesTwin]);
        assert!(
            slower.contains("the same bits, and is slower here") && !slower.contains("differ"),
            "{slower}"
        );
        assert!(said(&["amx_bf16"], &[Tiles, TilesTwin]).contains("slower here"));
        let differ: [(&[&str], &[KernelClass]); 5] = [
            (&["amx_bf16-twin"], &[Scalar]),
            (&["amx_bf16"], &[Pairs]),
            (&["f32", "avx512_bf16"], &[F32]),
            (&["f32"], &[F32, Pairs]),
            // A class of a later version, beside one that is known.
            (&["f32", "avx10"], &[F32]),
        ];
        for (before, now) in differ {
            assert!(said(before, now).contains("bits will differ"), "{before:?} {now:?}");
        }
    }
}
