//! The generator of `references/README.md`: every weight and batch follows from a name and an index, here as in PyTorch.

use serde::Deserialize;

/// 24 bits for a name and an index.
pub(crate) fn k(name: &str, i: usize) -> u64 {
    let seed =
        name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    let mut z = seed.wrapping_add((i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ z >> 31) >> 40
}

/// A number in [-1, 1) for a name and an index.
pub(crate) fn v(name: &str, i: usize) -> f32 {
    (k(name, i) as f32 - 8_388_608.0) / 8_388_608.0
}

/// `center + spread * v(name, i)`.
pub(crate) fn fill(to: &mut [f32], name: &str, [center, spread]: [f32; 2]) {
    for (i, x) in to.iter_mut().enumerate() {
        *x = center + spread * v(name, i);
    }
}

#[test]
fn the_generator_is_that_of_the_files() {
    #[derive(Deserialize)]
    struct Streams {
        streams: Vec<serde_json::Value>,
    }
    let streams: Streams = crate::read("fill");
    assert!(!streams.streams.is_empty());
    for stream in &streams.streams {
        let name = stream["name"].as_str().unwrap();
        for (i, want) in stream["k"].as_array().unwrap().iter().enumerate() {
            assert_eq!(k(name, i), want.as_u64().unwrap(), "{name} {i}");
        }
    }
}
