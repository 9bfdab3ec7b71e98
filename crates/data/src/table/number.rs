//! Numbers written as decimals, read fast and rounded as the standard library rounds them.
//!
//! Most numbers of a table have few digits. Digits that fit into 53 bits and a power of ten up to 22 are both exact as an f64,
//! so one multiplication or division rounds once, as it must be (Clinger's fast path). Such an f64 becomes the right f32 unless it
//! lies exactly between two of them: the true number may then lie on either side. Whatever is not so simple is left to the
//! standard library.

/// Powers of ten that an f64 holds exactly.
const POWERS: [f64; 23] = [
    1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18,
    1e19, 1e20, 1e21, 1e22,
];
/// The bits of an f64 that an f32 has no room for, and what they are in the middle between two f32.
const BEYOND_F32: u64 = (1 << 29) - 1;
const MIDDLE: u64 = 1 << 28;
/// So many digits are below 2^64.
const DIGITS_MAX: usize = 19;

/// A field as an f32, if it is a number; it may be infinite or NaN.
pub(super) fn single(field: &[u8]) -> Option<f32> {
    match simple(field) {
        Some(number) if number.to_bits() & BEYOND_F32 != MIDDLE => Some(number as f32),
        _ if is_word(field) => None,
        _ => str::from_utf8(field).ok()?.parse().ok(),
    }
}

/// A field as an f64, if it is a number; it may be infinite or NaN.
pub(super) fn double(field: &[u8]) -> Option<f64> {
    match simple(field) {
        Some(number) => Some(number),
        None if is_word(field) => None,
        None => str::from_utf8(field).ok()?.parse().ok(),
    }
}

/// Whether a field cannot be a number by how it begins: numbers begin with a digit, a sign or a point, or are spelt `inf` or `nan`.
fn is_word(field: &[u8]) -> bool {
    !matches!(field.first(), Some(b'0'..=b'9' | b'-' | b'+' | b'.' | b'i' | b'I' | b'n' | b'N'))
}

/// The number, if it is simple enough.
fn simple(field: &[u8]) -> Option<f64> {
    let (negative, mut rest) = match field {
        [b'-', rest @ ..] => (true, rest),
        [b'+', rest @ ..] => (false, rest),
        rest => (false, rest),
    };
    let (mut digits, mut n_digits, mut exponent) = (0u64, 0usize, 0i32);
    let mut after_point = 0;
    while let [byte, tail @ ..] = rest {
        match byte {
            b'0'..=b'9' => {
                digits = digits.wrapping_mul(10).wrapping_add(u64::from(byte - b'0'));
                n_digits += 1;
                exponent -= after_point;
            }
            b'.' if after_point == 0 => after_point = 1,
            b'e' | b'E' => {
                exponent = exponent.checked_add(small_integer(tail)?)?;
                break;
            }
            _ => return None,
        }
        rest = tail;
    }
    if n_digits == 0 || n_digits > DIGITS_MAX || digits > 1 << 53 {
        return None;
    }
    let power = *POWERS.get(exponent.unsigned_abs() as usize)?;
    let number = if exponent < 0 { digits as f64 / power } else { digits as f64 * power };
    Some(if negative { -number } else { number })
}

/// An integer of at most three digits.
fn small_integer(text: &[u8]) -> Option<i32> {
    let (sign, digits) = match text {
        [b'-', rest @ ..] => (-1, rest),
        [b'+', rest @ ..] => (1, rest),
        rest => (1, rest),
    };
    if digits.is_empty() || digits.len() > 3 || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    Some(sign * digits.iter().fold(0, |n, digit| 10 * n + i32::from(digit - b'0')))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn check(text: &str) {
        let (slow32, slow64) = (text.parse::<f32>().ok(), text.parse::<f64>().ok());
        assert_eq!(single(text.as_bytes()).map(f32::to_bits), slow32.map(f32::to_bits), "{text:?}");
        assert_eq!(double(text.as_bytes()).map(f64::to_bits), slow64.map(f64::to_bits), "{text:?}");
    }

    #[test]
    fn all_kinds_of_numbers_are_those_of_the_standard_library() {
        let near_middle =
            ["16777217", "16777217.0000001", "16777216.9999999", "33554434e-1", "9007199254740993"];
        let odd = [
            "",
            "-",
            "+",
            ".",
            "-.",
            "1.",
            ".5",
            "+1",
            "-0",
            "0.0",
            "-0.0e5",
            "1e",
            "1e+",
            "1e-2",
            "1E22",
            "1e23",
            "1e-22",
            "1e-23",
            "1.5e-45",
            "3.5e38",
            "1e39",
            "1e400",
            "inf",
            "-infinity",
            "nan",
            "NaN",
            "0x10",
            "1_0",
            "1 ",
            "..1",
            "1.2.3",
            "1e1.5",
            "e5",
            "123456789012345678901234567890",
            "0.1",
            "00012",
            "1e0000001",
            "½",
            "word",
            "infinite",
            "Nan",
            "+inf",
            "2024-03-31",
        ];
        near_middle.iter().chain(&odd).for_each(|text| check(text));
    }

    proptest! {
        #[test]
        fn numbers_are_those_of_the_standard_library(text in "[-+]?[0-9]{0,18}(\\.[0-9]{0,12})?([eE][-+]?[0-9]{1,2})?") {
            check(&text);
        }

        #[test]
        fn every_f32_comes_back(bits: u32) {
            check(&f32::from_bits(bits).to_string());
            check(&f64::from(f32::from_bits(bits)).to_string());
        }
    }
}
