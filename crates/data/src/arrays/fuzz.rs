//! Any bytes as a file of arrays: an error, or samples that can all be read.

use polyreme_fuzz::{InFile, Target, safetensors};

use super::tests::{file, le};
use super::*;
use crate::damage;

#[test]
fn arrays() {
    let numbers = le(&[0.5f32, -1.0, 2.0, 3.0, 4.25, 5.0], f32::to_le_bytes);
    let ids = le(&[3i64, 4, 5, 6], i64::to_le_bytes);
    let target = Target {
        name: "arrays",
        corpus: vec![
            file(&[("x", "F32", &[2, 3], &numbers), ("y", "U8", &[2], &[0, 1])], 0),
            file(&[("x", "I64", &[2, 2], &ids), ("y", "I32", &[2], &[0; 8])], 1),
            file(&[("x", "F32", &[2, 3], &numbers), ("y", "F32", &[2, 2], &numbers[..16])], 0),
            file(&[("y", "U16", &[3], &[0; 6]), ("x", "U8", &[3, 1, 2, 2], &[7; 12])], 3),
            file(
                &[("x", "F64", &[2, 1, 1], &[1; 16]), ("y", "I8", &[2], &[0, 1]), ("z", "BOOL", &[1], &[1])],
                0,
            ),
        ],
        words: &safetensors::WORDS,
        mend: &safetensors::mend,
        memory: &|len| (64 << 10) + 256 * len,
    };
    let place = InFile::new("safetensors");
    target.run(|input| {
        for kind in [LabelKind::Numbers, LabelKind::Labels] {
            if let Ok(set) = Arrays::open_as(place.with(input), "x", "y", kind) {
                damage::read_all(&set).unwrap();
                assert!(set.with_classes(3).is_err());
            }
        }
        let set = Arrays::open(place.with(input), "x", "y").map_err(|e| e.to_string())?;
        damage::read_all(&set).unwrap();
        set.intact().unwrap();
        let answer = format!("{:?} {:?} {:?}", set.spec.features, set.x.dtype, set.labels.dtype);
        let set = set.with_classes(3).map_err(|e| e.to_string())?;
        match set.spec.features {
            Features::Ids { .. } => drop(set.with_vocab(5).map_err(|e| e.to_string())?),
            _ => assert!(set.with_vocab(5).is_err()),
        }
        Ok(answer)
    });
}
