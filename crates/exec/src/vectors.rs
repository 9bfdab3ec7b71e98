//! Instructions on long vectors, shared out among the threads of a rank. Results do not depend on the number of threads.

use polyreme_kernels::Cx;

/// Elements of one task.
const CHUNK: usize = 1 << 15;

/// Blocks of squares of one task.
const BLOCKS: usize = 64;

/// Tasks of a comparison of two vectors.
const PARTS: usize = 64;

/// `to = from`.
pub(crate) fn copy<T: Copy + Send + Sync>(cx: &Cx, to: &mut [T], from: &[T]) {
    assert_eq!(to.len(), from.len(), "both have the same length");
    cx.for_each_chunk(to, CHUNK, |i, to| to.copy_from_slice(&from[i * CHUNK..i * CHUNK + to.len()]));
}

/// `to += from`.
pub(crate) fn add(cx: &Cx, to: &mut [f32], from: &[f32]) {
    assert_eq!(to.len(), from.len(), "both have the same length");
    combine(cx, to, from, |t, f| *t += f);
}

/// `to -= from`.
pub(crate) fn subtract(cx: &Cx, to: &mut [f32], from: &[f32]) {
    assert_eq!(to.len(), from.len(), "both have the same length");
    combine(cx, to, from, |t, f| *t -= f);
}

fn combine(cx: &Cx, to: &mut [f32], from: &[f32], op: impl Fn(&mut f32, f32) + Sync) {
    cx.for_each_chunk(to, CHUNK, |i, to| {
        let from = &from[i * CHUNK..i * CHUNK + to.len()];
        to.iter_mut().zip(from).for_each(|(t, f)| op(t, *f));
    });
}

/// `average += share · (of - average)`.
pub(crate) fn follow(cx: &Cx, average: &mut [f32], of: &[f32], share: f32) {
    assert_eq!(average.len(), of.len(), "an average for each element");
    cx.for_each_chunk(average, CHUNK, |i, average| {
        for (a, p) in average.iter_mut().zip(&of[i * CHUNK..]) {
            *a += share * (p - *a);
        }
    });
}

/// An outer step with Nesterov's momentum: with `g = from - mean`, `velocity = momentum · velocity + g`, and what was the mean becomes
/// `from - lr · (g + momentum · velocity)`.
pub(crate) fn outer(cx: &Cx, mean: &mut [f32], from: &[f32], velocity: &mut [f32], [lr, momentum]: [f32; 2]) {
    assert!(mean.len() == from.len() && mean.len() == velocity.len(), "a number of each kind for each");
    cx.for_each_chunk(velocity, CHUNK, |i, velocity| {
        let (mean, from) = (&mean[i * CHUNK..], &from[i * CHUNK..]);
        velocity
            .iter_mut()
            .zip(mean.iter().zip(from))
            .for_each(|(v, (mean, w))| *v = momentum * *v + (w - mean));
    });
    let velocity = &*velocity;
    cx.for_each_chunk(mean, CHUNK, |i, mean| {
        let (velocity, from) = (&velocity[i * CHUNK..], &from[i * CHUNK..]);
        for (w, (v, from)) in mean.iter_mut().zip(velocity.iter().zip(from)) {
            *w = from - lr * ((from - *w) + momentum * v);
        }
    });
}

/// The sum of squares of each `block` elements.
pub(crate) fn squares_by_block(cx: &Cx, of: &[f32], block: usize, squares: &mut [f64]) {
    assert_eq!(squares.len(), of.len().div_ceil(block), "a number for each block");
    cx.for_each_chunk(squares, BLOCKS, |task, squares| {
        for (k, sum) in squares.iter_mut().enumerate() {
            let at = (task * BLOCKS + k) * block;
            let block = &of[at..(at + block).min(of.len())];
            *sum = block.iter().map(|&g| f64::from(g) * f64::from(g)).sum();
        }
    });
}

/// The sum of squares of how far the elements of two vectors are apart, in f64.
pub(crate) fn squares_apart(cx: &Cx, a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len(), "both have the same length");
    let (mut sums, each) = ([0.0f64; PARTS], a.len().div_ceil(PARTS));
    cx.for_each_chunk(&mut sums, 1, |part, sum| {
        let range = (part * each).min(a.len())..((part + 1) * each).min(a.len());
        let apart = a[range.clone()].iter().zip(&b[range]).map(|(a, b)| f64::from(*a) - f64::from(*b));
        sum[0] = apart.map(|x| x * x).sum();
    });
    sums.iter().sum()
}
