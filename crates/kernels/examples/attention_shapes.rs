//! Times attention on the shapes of reference jobs: `cargo run --release -p polyreme-kernels --example attention_shapes`.
//!
//! GFLOP/s count two products forward and five backward, and only the causal half where it is causal.

use std::time::Instant;

use polyreme_kernels::Cx;
use polyreme_kernels::attention::{Attention, Grads};
use polyreme_kernels::floats::{Floats, FloatsMut};

fn main() {
    println!("{:34} {:>9} {:>8} {:>9} {:>8}", "batch×heads t d", "fwd ms", "GFLOP/s", "bwd ms", "GFLOP/s");
    for (batch, t, heads, d, causal) in [
        (8, 256, 6, 64, true),
        (8, 256, 6, 64, false),
        (32, 64, 4, 32, true),
        (1, 1024, 12, 64, true),
        (1, 4096, 2, 64, true),
        (4, 197, 12, 64, false),
        (2, 512, 8, 128, true),
        (4, 300, 8, 40, true),
    ] {
        let at = Attention::packed(batch, t, heads, d, causal);
        let n = batch * t * heads * d;
        let qkv: Vec<f32> = (0..3 * n).map(|i| (i * 7919 % 1000) as f32 / 500.0 - 1.0).collect();
        let dy: Vec<f32> = (0..n).map(|i| (i * 7907 % 1000) as f32 / 500.0 - 1.0).collect();
        let (mut o, mut lse, mut dqkv) = (vec![0.0; n], vec![0.0; at.lse_len()], vec![0.0; 3 * n]);
        let mut scratch = vec![0.0; at.forward_scratch_len(1).max(at.backward_scratch_len(1))];
        let cx = Cx::serial();
        let (x, dy) = (Floats::F32(&qkv), Floats::F32(&dy));
        let forward = least_ms(|| {
            at.forward(&cx, x, x, x, None, FloatsMut::F32(&mut o), &mut lse, &mut scratch);
        });
        let backward = least_ms(|| {
            let grads = Grads::Packed(FloatsMut::F32(&mut dqkv));
            at.backward(&cx, dy, x, x, x, None, Floats::F32(&o), &lse, grads, &mut scratch);
        });
        let pairs = if causal { t * (t + 1) / 2 } else { t * t };
        let product = (2 * batch * heads * pairs * d) as f64 * 1e-6;
        println!(
            "{:34} {forward:9.3} {:8.1} {backward:9.3} {:8.1}",
            format!("{batch}×{heads} {t} {d}{}", if causal { " causal" } else { "" }),
            2.0 * product / forward,
            5.0 * product / backward,
        );
    }
}

/// The least of many runs, within about half a second.
fn least_ms(mut f: impl FnMut()) -> f64 {
    let (begin, mut least) = (Instant::now(), f64::INFINITY);
    let mut n = 0;
    while n < 5 || begin.elapsed().as_secs_f64() < 0.5 {
        let start = Instant::now();
        f();
        least = least.min(start.elapsed().as_secs_f64() * 1e3);
        n += 1;
    }
    least
}
