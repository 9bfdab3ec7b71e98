//! Between PyTorch's order of an image's dims, `[n, c, h, w]`, and the graphs', `[n, h, w, c]`.

use polyreme_graph::{Builder, Tensor, TraceErrorKind, Traced};

/// `[n, c, h, w]` → `[n, h, w, c]`: once, at the start of a model.
pub fn channels_last(b: &mut Builder, x: Tensor) -> Traced {
    let [n, c, h, w] = dims(b, "channels_last", x, "[n, c, h, w]")?;
    // With one channel or one pixel the elements are in the right order already.
    if c == 1 || h * w == 1 { b.reshape(x, [n, h, w, c]) } else { b.permute(x, &[0, 2, 3, 1]) }
}

/// `[n, h, w, c]` → `[n, c·h·w]` in PyTorch's order, so that a linear layer after it has the same weights.
pub fn flatten(b: &mut Builder, x: Tensor) -> Traced {
    let [n, h, w, c] = dims(b, "flatten", x, "[n, h, w, c]")?;
    let x = if c == 1 || h * w == 1 { x } else { b.permute(x, &[0, 3, 1, 2])? };
    b.reshape(x, [n, c * h * w])
}

/// `[n, h, w, c]` → `[n, c]`: the mean over all pixels.
pub fn global_mean(b: &mut Builder, x: Tensor) -> Traced {
    dims(b, "global_mean", x, "[n, h, w, c]")?;
    b.mean(x, &[1, 2])
}

fn dims(b: &Builder, op: &'static str, x: Tensor, legend: &str) -> Traced<[usize; 4]> {
    match b.shape(x).dims() {
        &[d0, d1, d2, d3] => Ok([d0, d1, d2, d3]),
        _ => {
            let why = format!("4 dims are needed: {legend}");
            b.error(TraceErrorKind::Shape { op, shape: b.shape(x).clone(), why })
        }
    }
}
