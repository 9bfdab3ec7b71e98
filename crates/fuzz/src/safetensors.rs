//! Changes to safetensors files that keep the length of the header, and mostly the offsets in it, right.

use serde_json::{Value, json};

use crate::json;
use crate::random::Random;

/// Words of the format.
pub const WORDS: [&[u8]; 22] = [
    b"dtype",
    b"shape",
    b"data_offsets",
    b"__metadata__",
    b"F64",
    b"F32",
    b"F16",
    b"BF16",
    b"I64",
    b"I32",
    b"I16",
    b"I8",
    b"U64",
    b"U32",
    b"U16",
    b"U8",
    b"BOOL",
    b"F8_E4M3",
    b"F4",
    b"C64",
    b"x",
    b"y",
];

/// The longest that a file's data may become.
const DATA_BYTES_MAX: u64 = 4096;

/// Mutates the header, if there is one, and repairs its length and offsets.
pub fn mend(file: &mut Vec<u8>, random: &mut Random) {
    let Some((length, rest)) = file.split_first_chunk() else { return };
    let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
    let Some((header, data)) = rest.split_at_checked(length) else { return };
    let Ok(mut header) = serde_json::from_slice::<Value>(header) else { return };
    let mut data = data.to_vec();
    for _ in 0..random.below(3) {
        json::change(&mut header, &WORDS, random);
    }
    if !random.one_in(4) {
        let end = lay_out(&mut header);
        data.resize(end as usize, 0x3f);
    }
    let mut header = header.to_string();
    header.extend(std::iter::repeat_n(
        ' ',
        if random.one_in(4) { random.below(8) } else { (8 - header.len() % 8) % 8 },
    ));
    *file = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat();
}

/// Places each array after the previous one, with the length that its type and shape require. Returns where the last
/// one ends.
fn lay_out(header: &mut Value) -> u64 {
    let mut end = 0;
    let Some(arrays) = header.as_object_mut() else { return end };
    for array in arrays.values_mut() {
        let size = match array["dtype"].as_str() {
            Some("F64" | "I64" | "U64" | "C64") => 8,
            Some("F32" | "I32" | "U32") => 4,
            Some("F16" | "BF16" | "I16" | "U16") => 2,
            Some("I8" | "U8" | "BOOL" | "F8_E4M3") => 1,
            _ => continue,
        };
        let dims = array["shape"].as_array().map(|dims| dims.iter().map(|d| d.as_u64().unwrap_or(0)));
        let Some(n) = dims.and_then(|mut dims| dims.try_fold(size, |n: u64, d| n.checked_mul(d))) else {
            continue;
        };
        if n <= DATA_BYTES_MAX {
            array["data_offsets"] = json!([end, end + n]);
            end += n;
        }
    }
    end
}
