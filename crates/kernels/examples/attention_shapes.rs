//! Times attention on one core: `cargo run --release -p polyreme-kernels --example attention_shapes [rounds] [tiles]`.
//!
//! In f32, on bf16 with products in f32, and with products of bf16, forward and backward; short rounds of each alternate, and
//! the best counts, in time on the core: there may be other work on the machine. GFLOP/s, of the products of bf16, count two
//! products forward and five backward, and only the causal half where it is causal.

use polyreme_dtype::bf16;
use polyreme_kernels::attention::{Attention, Grads};
use polyreme_kernels::gemm::pairs::PairOrder;
use polyreme_kernels::{Cx, Floats, FloatsMut, convert};

/// Buffers of one way to run it.
struct AttentionWay {
    at: Attention,
    half: bool,
    best_ms: [f64; 2],
}

fn main() {
    let mut args = std::env::args().skip(1);
    let rounds: usize = args.next().and_then(|v| v.parse().ok()).unwrap_or(10);
    let order = if args.next().is_some_and(|v| v == "tiles") { PairOrder::Tiles } else { PairOrder::Pairs };
    println!(
        "{:24} ms forward: f32, on bf16, pairs and their share of on bf16, GFLOP/s; the same backward",
        "batch×heads t d"
    );
    for (batch, t, heads, d, causal) in [
        (8, 256, 6, 64, true),
        (8, 256, 6, 64, false),
        (2, 512, 12, 64, true),
        (1, 1024, 12, 64, true),
        (1, 4096, 2, 64, true),
        (4, 197, 12, 64, false),
        (2, 512, 8, 128, true),
        (4, 300, 8, 40, true),
        (32, 64, 4, 32, true),
        (32, 64, 4, 32, false),
        (32, 64, 4, 64, true),
        (64, 32, 4, 64, true),
        (64, 32, 4, 32, false),
        (64, 16, 4, 32, false),
        (16, 256, 4, 32, true),
        (16, 256, 4, 24, true),
        (16, 256, 4, 16, true),
        (16, 256, 4, 8, true),
    ] {
        let f32 = Attention::packed(batch, t, heads, d, causal);
        let pairs = Attention { products: Some(order), ..f32.clone() };
        let mut ways = [(&f32, false), (&f32, true), (&pairs, true)].map(|(at, half)| AttentionWay {
            at: at.clone(),
            half,
            best_ms: [f64::INFINITY; 2],
        });
        let n = batch * t * heads * d;
        let numbers = |len: usize, step: usize| -> Vec<f32> {
            (0..len).map(|i| (i * step % 1000) as f32 / 500.0 - 1.0).collect()
        };
        let (qkv, dy) = (numbers(3 * n, 7919), numbers(n, 7907));
        let cx = Cx::serial();
        let halves = |x: &[f32]| {
            let mut y = vec![bf16::ZERO; x.len()];
            convert::f32_to_bf16(&cx, x, &mut y);
            y
        };
        let (qkv_half, dy_half) = (halves(&qkv), halves(&dy));
        let (mut o, mut dqkv, mut lse) = (vec![0.0; n], vec![0.0; 3 * n], vec![0.0; f32.lse_len()]);
        let (mut o_half, mut dqkv_half) = (halves(&o), halves(&dqkv));
        for _ in 0..rounds {
            for way in &mut ways {
                let at = &way.at;
                let mut scratch = vec![0.0; at.forward_scratch_len(1).max(at.backward_scratch_len(1))];
                let (x, dy) = if way.half {
                    (Floats::Bf16(&qkv_half), Floats::Bf16(&dy_half))
                } else {
                    (Floats::F32(&qkv), Floats::F32(&dy))
                };
                let forward = ms(|| {
                    let o = if way.half { FloatsMut::Bf16(&mut o_half) } else { FloatsMut::F32(&mut o) };
                    at.forward(&cx, x, x, x, None, o, &mut lse, &mut scratch);
                });
                let backward = ms(|| {
                    let (o, out) = if way.half {
                        (Floats::Bf16(&o_half), FloatsMut::Bf16(&mut dqkv_half))
                    } else {
                        (Floats::F32(&o), FloatsMut::F32(&mut dqkv))
                    };
                    at.backward(&cx, dy, x, x, x, None, o, &lse, Grads::Packed(out), &mut scratch);
                });
                way.best_ms = [way.best_ms[0].min(forward), way.best_ms[1].min(backward)];
            }
        }
        let seen = if causal { t * (t + 1) / 2 } else { t * t };
        let product = (2 * batch * heads * seen * d) as f64 * 1e-6;
        print!("{:24}", format!("{batch}×{heads} {t} {d}{}", if causal { " causal" } else { "" }));
        for (pass, products) in [(0, 2.0), (1, 5.0)] {
            let [f, wide, pairs] = ways.each_ref().map(|way| way.best_ms[pass]);
            print!(" {f:8.3} {wide:8.3} {pairs:8.3} {:5.2} {:5.0}", pairs / wide, products * product / pairs);
        }
        println!();
    }
}

/// Milliseconds on the core, of the second of two runs.
fn ms(mut f: impl FnMut()) -> f64 {
    f();
    let start = on_core();
    f();
    1e3 * (on_core() - start)
}

/// Seconds that this thread was on a core.
fn on_core() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}
