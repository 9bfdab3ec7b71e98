//! Any bytes as a file of weights: an error, or weights that are the same when they are written and read again.

use polyreme_fuzz::{InFile, Random, Target, safetensors, scale};

use super::*;
use crate::weights::write_weights;

/// A small file of all that is read and passed over.
fn mixed() -> Vec<u8> {
    let header = concat!(
        r#"{"a.running_mean":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"#,
        r#""a.num_batches_tracked":{"dtype":"I64","shape":[],"data_offsets":[8,16]},"#,
        r#""h":{"dtype":"F16","shape":[3],"data_offsets":[16,22]},"b":{"dtype":"BF16","shape":[1,1],"data_offsets":[22,24]},"#,
        r#""d":{"dtype":"F64","shape":[1],"data_offsets":[24,32]},"m":{"dtype":"BOOL","shape":[0],"data_offsets":[32,32]},"#,
        r#""__metadata__":{"format":"pt"}}"#,
    );
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0x3c; 32]].concat()
}

#[test]
fn weights() {
    let torch = include_bytes!("../../../fixtures/torch.safetensors").to_vec();
    let words = [&safetensors::WORDS[..], &[b"running_mean", b"num_batches_tracked"]].concat();
    let target = Target {
        name: "weights",
        corpus: vec![mixed(), torch, b"PK\x03\x04 not ours".to_vec()],
        words: &words,
        mend: &|input: &mut Vec<u8>, random: &mut Random| safetensors::mend(input, random),
        memory: &|len| 2 * PART_BYTES + 256 * len,
    };
    let (file, written) = (InFile::new("in.safetensors"), InFile::new("out.safetensors"));
    let mut n_written = 0;
    target.run(|input| {
        let read = WeightsFile::read(file.with(input)).map_err(|e| e.to_string())?;
        let path = Path::new("x");
        let finite = read.check(read.weights.iter().map(|w| w.name.as_str()), path).is_ok();
        assert_eq!(finite, read.weights.iter().all(|w| w.data.iter().all(|x| x.is_finite())));
        assert!(read.weights.iter().all(|w| w.dims.iter().product::<usize>() == w.data.len()));
        n_written += 1;
        // Writing syncs, which takes longer than all the rest.
        if n_written % 8 == 1 {
            let views: Vec<View> = read.weights.iter().map(Weight::view).collect();
            let out = written.with(b"");
            write_weights(out, &views, None).unwrap();
            let again = WeightsFile::read(out).unwrap();
            let bits = |w: &Weight| {
                (w.name.clone(), w.dims.clone(), w.data.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
            };
            // Empty tensors share their place with a neighbour, so the order of names may differ.
            let sorted = |weights: &[Weight]| {
                let mut all: Vec<_> = weights.iter().map(bits).collect();
                all.sort();
                all
            };
            assert_eq!(sorted(&again.weights), sorted(&read.weights));
        }
        let steps = read.batches_tracked() as usize;
        Ok(format!("{finite} {} {} {}", scale(read.weights.len()), scale(read.integers.len()), scale(steps)))
    });
}
