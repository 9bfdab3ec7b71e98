//! One row of logits: where its greatest stands, and how many reach the label's.
//!
//! Written so that the compiler makes vector code of it on any CPU: lanes of plain arrays, no early way out in the hot
//! loops. A row stays in the nearest cache between the loops, so two of them cost little more than one.

/// Rows are scanned in chunks of so many lanes: four SSE registers, two of AVX.
const LANES: usize = 16;

/// The index of the greatest logit, the first of equals; `None` if a logit is NaN, or if there is none.
pub(super) fn first_greatest(row: &[f32]) -> Option<usize> {
    let (chunks, tail) = row.as_chunks::<LANES>();
    let (mut most, mut nan) = ([f32::NEG_INFINITY; LANES], [0u32; LANES]);
    for chunk in chunks {
        for i in 0..LANES {
            most[i] = if chunk[i] > most[i] { chunk[i] } else { most[i] };
            nan[i] |= u32::from(chunk[i].is_nan());
        }
    }
    let mut greatest = f32::NEG_INFINITY;
    for &x in most.iter().chain(tail) {
        greatest = if x > greatest { x } else { greatest };
    }
    if nan.iter().any(|&n| n != 0) || tail.iter().any(|x| x.is_nan()) {
        return None;
    }
    // The chunk first, then the place in it: a branch a chunk and not one an element.
    let chunk = chunks.iter().position(|chunk| {
        let mut found = false;
        for &x in chunk {
            found |= x == greatest;
        }
        found
    });
    let start = chunk.unwrap_or(chunks.len()) * LANES;
    row[start..].iter().position(|&x| x == greatest).map(|i| start + i)
}

/// How many logits are at least `bound`. NaN counts: PyTorch sorts it above all numbers.
pub(super) fn at_least(row: &[f32], bound: f32) -> usize {
    // Lanes of u32 do not run over: a row of 2^32 chunks is 256 GiB. `wrapping_add`, because a check would make the
    // loop scalar in builds that have one.
    let (chunks, tail) = row.as_chunks::<LANES>();
    let mut counts = [0u32; LANES];
    for chunk in chunks {
        for i in 0..LANES {
            counts[i] = counts[i].wrapping_add(u32::from(reaches(chunk[i], bound)));
        }
    }
    counts.iter().map(|&n| n as usize).sum::<usize>() + tail.iter().filter(|&&x| reaches(x, bound)).count()
}

fn reaches(x: f32, bound: f32) -> bool {
    // Two comparisons, not `!(x < bound)`: a NaN on either side must count, and it should be seen that it does.
    x >= bound || x.is_nan() || bound.is_nan()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(row: &[f32]) {
        let mut want = None;
        for (i, &x) in row.iter().enumerate() {
            if want.is_none_or(|w: usize| x > row[w]) {
                want = Some(i);
            }
        }
        if row.iter().any(|x| x.is_nan()) {
            want = None;
        }
        assert_eq!(first_greatest(row), want, "{row:?}");
        for &bound in row {
            let want =
                row.iter().filter(|&&x| !matches!(x.partial_cmp(&bound), Some(std::cmp::Ordering::Less)));
            assert_eq!(at_least(row, bound), want.count(), "{bound} in {row:?}");
        }
    }

    #[test]
    fn every_length_and_every_place() {
        for len in [0, 1, 2, 5, 15, 16, 17, 31, 32, 33, 100] {
            // Few different values, so that there are ties.
            let row: Vec<f32> = (0..len).map(|i| ((i * 7919 + 13) % 11) as f32 - 5.0).collect();
            check(&row);
            for place in 0..len {
                for odd in [9.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -0.0] {
                    let mut row = row.clone();
                    row[place] = odd;
                    check(&row);
                }
            }
            check(&vec![f32::NEG_INFINITY; len]);
            check(&vec![f32::NAN; len]);
        }
    }
}
