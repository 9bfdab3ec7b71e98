//! Prints the time of products of half precision beside that of the same products in f32, on one core.
//!
//! `cargo run --release -p polyreme-kernels --example pair_shapes [rounds] [part of a name] [bf16|f32|f16] [tiles]`
//!
//! Short rounds of all kinds alternate, and the best of each counts, in time on the core: there may be other work on the
//! machine. The operands are in bf16; in f32, and then rounded to bf16 as they are copied; or B is in f16 and A in f32, which
//! is rounded to it, and there are no pairs. `wide` is the product in f32 of the same operands.

use polyreme_dtype::{DType, bf16, f16};
use polyreme_kernels::gemm::pairs::{PairGemm, PairOrder};
use polyreme_kernels::gemm::{Gemm, Strides, WideGemm};
use polyreme_kernels::probe::fma_peak_gflops;
use polyreme_kernels::{Cx, Floats, FloatsMut, convert};

fn strides(rows: usize, cols: usize, by_columns: bool) -> Strides {
    let (row, col) = if by_columns { (1, rows) } else { (cols, 1) };
    Strides { batch: rows * cols, row, col }
}

fn shapes() -> Vec<(String, Gemm)> {
    let mut all = Vec::new();
    let mut add = |name: String, batch: usize, (m, n, k): (usize, usize, usize), a: bool, b: bool| {
        let (a, b, c) = (strides(m, k, a), strides(k, n, b), strides(m, n, false));
        all.push((name, Gemm { batch, m, n, k, a, b, c, accumulate: false, strict: false }));
    };
    for n in [32, 64, 128, 256, 512, 1024, 2048] {
        add(format!("square {n}"), 1, (n, n, n), false, true);
    }
    for (job, m, k, n) in [
        ("gpt", 2048, 384, 1152),
        ("gpt", 2048, 384, 384),
        ("gpt", 2048, 384, 1536),
        ("gpt", 2048, 1536, 384),
        ("gpt", 4096, 384, 1536),
        ("mlp", 128, 784, 512),
        ("mlp", 128, 512, 512),
        ("mlp", 128, 512, 10),
        ("thin", 16, 512, 512),
        ("thin", 32, 512, 512),
        ("thin", 64, 512, 512),
        ("thin", 2048, 32, 512),
        ("thin", 2048, 64, 512),
        ("thin", 2048, 512, 16),
        ("thin", 2048, 512, 32),
        ("thin", 2048, 512, 64),
    ] {
        add(format!("{job} y  {m} {k}->{n}"), 1, (m, n, k), false, true);
        add(format!("{job} dx {m} {k}->{n}"), 1, (m, k, n), false, false);
        add(format!("{job} dw {m} {k}->{n}"), 1, (n, k, m), true, false);
    }
    add("attention qk".into(), 48, (256, 256, 64), false, true);
    add("attention av".into(), 48, (256, 64, 256), false, false);
    all
}

/// Seconds that this thread was on a core.
fn on_core() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

fn main() {
    let mut args = std::env::args().skip(1);
    let rounds: usize = args.next().and_then(|v| v.parse().ok()).unwrap_or(20);
    let wanted = args.next().unwrap_or_default();
    let format = args.next().unwrap_or_default();
    let order = if args.next().is_some_and(|v| v == "tiles") { PairOrder::Tiles } else { PairOrder::Pairs };
    let cx = Cx::serial();
    println!("{:26} {:>9} {:>9} {:>15}  best times in µs, and shares of f32's", "", "f32", "wide", "pairs");
    for (name, g) in shapes().into_iter().filter(|(name, _)| name.contains(&wanted)) {
        let fill = |len: usize| (0..len).map(|i| (i % 31) as f32 - 15.0).collect::<Vec<f32>>();
        let (a, b) = (fill(g.batch * g.m * g.k), fill(g.batch * g.k * g.n));
        let mut c = vec![0.0; g.batch * g.m * g.n];
        let (mut a_half, mut b_half) = (vec![bf16::ZERO; a.len()], vec![bf16::ZERO; b.len()]);
        let mut b_f16 = vec![f16::ZERO; b.len()];
        convert::f32_to_bf16(&cx, &a, &mut a_half);
        convert::f32_to_bf16(&cx, &b, &mut b_half);
        convert::f32_to_f16(&cx, &b, &mut b_f16);
        let (a_given, b_given, half) = match format.as_str() {
            "f16" => (Floats::F32(&a), Floats::F16(&b_f16), DType::F16),
            "f32" => (Floats::F32(&a), Floats::F32(&b), DType::Bf16),
            _ => (Floats::Bf16(&a_half), Floats::Bf16(&b_half), DType::Bf16),
        };
        let (a_type, b_type) = (a_given.dtype(), b_given.dtype());
        let wide = WideGemm { gemm: g.clone(), a: a_type, b: b_type, c: DType::F32, rounded: Some(half) };
        let pairs = (half == DType::Bf16).then(|| PairGemm { gemm: g.clone(), order });
        let pairs_len = pairs.as_ref().map_or(0, |pairs| pairs.scratch_len(1));
        let mut scratch = vec![0.0; g.scratch_len(1).max(wide.scratch_len(1)).max(pairs_len)];
        let flops = 2.0 * (g.batch * g.m * g.n * g.k) as f64;
        // About 2 ms of each in turn.
        let times = ((0.002 * fma_peak_gflops(&cx) * 1e9 / flops) as usize).clamp(1, 10_000);
        let mut best = [f64::INFINITY; 3];
        for _ in 0..rounds {
            for (kind, best) in best.iter_mut().enumerate() {
                let start = on_core();
                for _ in 0..times {
                    match (kind, &pairs) {
                        (0, _) => g.run(&cx, &a, &b, &mut c, None, &mut scratch),
                        (1, _) => {
                            wide.run(&cx, a_given, b_given, FloatsMut::F32(&mut c), None, &mut scratch);
                        }
                        (_, Some(pairs)) => {
                            pairs.run(&cx, a_given, b_given, FloatsMut::F32(&mut c), &mut scratch);
                        }
                        _ => continue,
                    }
                }
                *best = best.min((on_core() - start) / times as f64);
            }
        }
        let [f, w, p] = best;
        print!("{name:26} {:9.1} {:9.1} {:.2}", f * 1e6, w * 1e6, w / f);
        if pairs.is_some() {
            print!(" {:9.1} {:.2}  {:.0} GFLOP/s of pairs", p * 1e6, p / f, flops / p * 1e-9);
        }
        println!();
    }
}
