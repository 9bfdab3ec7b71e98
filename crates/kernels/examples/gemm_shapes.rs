//! Prints the speed of the matrix products that the reference jobs are made of, on one core.
//!
//! `cargo run --release -p polyreme-kernels --example gemm_shapes [seconds per shape] [part of a name] [copies]`
//!
//! With several copies of the operands, each product uses the next: they are then as cold in cache as in a step.

use std::time::Instant;

use polyreme_kernels::Cx;
use polyreme_kernels::gemm::{Gemm, Strides};
use polyreme_kernels::probe::fma_peak_gflops;

fn row_major(rows: usize, cols: usize) -> Strides {
    Strides { batch: rows * cols, row: cols, col: 1 }
}
fn col_major(rows: usize, cols: usize) -> Strides {
    Strides { batch: rows * cols, row: 1, col: rows }
}

fn shapes() -> Vec<(String, Gemm)> {
    let mut all = Vec::new();
    let mut add = |name: String, batch: usize, (m, n, k): (usize, usize, usize), a: bool, b: bool| {
        let a = if a { col_major(m, k) } else { row_major(m, k) };
        let b = if b { col_major(k, n) } else { row_major(k, n) };
        all.push((name, Gemm { batch, m, n, k, a, b, c: row_major(m, n), accumulate: false, strict: false }));
    };
    let layers = [
        ("gpt", 2048, 384, 1152),
        ("gpt", 2048, 384, 384),
        ("gpt", 2048, 384, 1536),
        ("gpt", 2048, 1536, 384),
        ("gpt", 2048, 384, 256),
        ("mlp", 128, 784, 512),
        ("mlp", 128, 512, 512),
        ("mlp", 128, 512, 10),
    ];
    for (job, m, k, n) in layers {
        add(format!("{job} y  {k}->{n}"), 1, (m, n, k), false, true);
    }
    for (job, m, k, n) in layers {
        add(format!("{job} dx {k}->{n}"), 1, (m, k, n), false, false);
    }
    for (job, m, k, n) in layers {
        add(format!("{job} dw {k}->{n}"), 1, (n, k, m), true, false);
    }
    for (tiles, cin, cout) in
        [(4096, 64, 64), (1024, 64, 128), (1024, 128, 128), (256, 128, 256), (256, 256, 256)]
    {
        add(format!("winograd y  {tiles} {cin}->{cout}"), 36, (tiles, cout, cin), false, false);
        add(format!("winograd dw {tiles} {cin}->{cout}"), 36, (cin, cout, tiles), true, false);
    }
    add("attention qk".into(), 48, (256, 256, 64), false, true);
    add("attention av".into(), 48, (256, 64, 256), false, false);
    add("attention dk".into(), 48, (256, 64, 256), true, false);
    add("square 64".into(), 1, (64, 64, 64), false, false);
    add("square 64 bt".into(), 1, (64, 64, 64), false, true);
    add("rnn y  128->512".into(), 1, (64, 512, 128), false, true);
    add("rnn dx 128->512".into(), 1, (64, 128, 512), false, false);
    add("rnn dw 128->512".into(), 1, (512, 128, 64), true, false);
    add("square 1024".into(), 1, (1024, 1024, 1024), false, false);
    add("square 1024 bt".into(), 1, (1024, 1024, 1024), false, true);
    add("square 8".into(), 1, (8, 8, 8), false, false);
    add("vector w 1x1024x1024 bt".into(), 1, (1, 1024, 1024), false, true);
    add("vector w 1x1024x1024".into(), 1, (1, 1024, 1024), false, false);
    add("to one 1024x1x1024".into(), 1, (1024, 1, 1024), false, true);
    all
}

fn main() {
    let mut args = std::env::args().skip(1);
    let seconds: f64 = args.next().and_then(|v| v.parse().ok()).unwrap_or(0.15);
    let wanted = args.next().unwrap_or_default();
    let copies: usize = args.next().and_then(|v| v.parse().ok()).unwrap_or(1).max(1);
    let cx = Cx::serial();
    println!(
        "{:28} {:>5} {:>5} {:>5} {:>5}  {:>8} {:>8} {:>8}  GFLOP/s",
        "", "batch", "m", "n", "k", "best", "median", "peak"
    );
    for (name, g) in shapes() {
        if !name.contains(&wanted) {
            continue;
        }
        let fill = |len: usize| (0..len).map(|i| (i % 31) as f32 - 15.0).collect::<Vec<f32>>();
        let (a_len, b_len, c_len) = (g.batch * g.m * g.k, g.batch * g.k * g.n, g.batch * g.m * g.n);
        let (a, b, mut c) = (fill(copies * a_len), fill(copies * b_len), vec![0.0; copies * c_len]);
        let mut scratch = vec![0.0; g.scratch_len(1)];
        let peak = fma_peak_gflops(&cx);
        let mut times = Vec::new();
        let start = Instant::now();
        while times.len() < 5 || start.elapsed().as_secs_f64() < seconds {
            let i = times.len() % copies;
            let t = Instant::now();
            g.run(&cx, &a[i * a_len..], &b[i * b_len..], &mut c[i * c_len..], None, &mut scratch);
            times.push(t.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        let flops = 2.0 * (g.batch * g.m * g.n * g.k) as f64;
        let speed = |t: f64| flops / t * 1e-9;
        println!(
            "{name:28} {:5} {:5} {:5} {:5}  {:8.1} {:8.1} {peak:8.1}",
            g.batch,
            g.m,
            g.n,
            g.k,
            speed(times[0]),
            speed(times[times.len() / 2])
        );
    }
}
