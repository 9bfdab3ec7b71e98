//! Times LSTM and GRU on one core: `cargo run --release -p polyreme-kernels --example recurrent_shapes`.
//!
//! GFLOP/s count the products with the recurrent weights alone: one forward, two backward.

use std::time::Instant;

use polyreme_kernels::Cx;
use polyreme_kernels::floats::{Floats, FloatsMut};
use polyreme_kernels::rnn::{Gru, GruBackward, GruForward, Lstm, LstmBackward, LstmForward};

fn main() {
    println!("{:26} {:>9} {:>8} {:>9} {:>8}", "cell B T H", "fwd ms", "GFLOP/s", "bwd ms", "GFLOP/s");
    for (batch, time, hidden) in [(64, 64, 128), (32, 64, 256), (16, 32, 512), (1, 64, 256)] {
        run("lstm", batch, time, hidden, 4);
        run("gru", batch, time, hidden, 3);
    }
}

fn run(cell: &str, batch: usize, time: usize, hidden: usize, n_gates: usize) {
    let cx = Cx::serial();
    let numbers =
        |n: usize| -> Vec<f32> { (0..n).map(|i| (i * 7919 % 1000) as f32 / 5000.0 - 0.1).collect() };
    let states = batch * time * hidden;
    let (xp, w, b) =
        (numbers(n_gates * states), numbers(n_gates * hidden * hidden), numbers(n_gates * hidden));
    let (h0, c0, dy) = (numbers(batch * hidden), numbers(batch * hidden), numbers(states));
    let (mut y, mut c_all, mut gates) = (numbers(states), numbers(states), numbers(4 * states));
    let (mut dxp, mut dw, mut db) = (xp.clone(), w.clone(), b.clone());
    let (mut dh0, mut dc0) = (h0.clone(), c0.clone());

    let (lstm, gru) = (
        Lstm { batch, time, hidden, reverse: false, strict: false },
        Gru { batch, time, hidden, reverse: false, strict: false },
    );
    let len = lstm.forward_scratch_len(1).max(lstm.backward_scratch_len(1)).max(gru.backward_scratch_len(1));
    let mut scratch = vec![0.0; len];
    let forward = least_ms(|| {
        let [y, c_all, gates] = [&mut y, &mut c_all, &mut gates].map(|x| FloatsMut::F32(x));
        let xp = Floats::F32(&xp);
        if cell == "lstm" {
            let x = LstmForward { xp, w_hh: &w, b_hh: Some(&b), h0: &h0, c0: &c0, y, c_all, gates };
            lstm.forward(&cx, x, &mut scratch);
        } else {
            gru.forward(&cx, GruForward { xp, w_hh: &w, b_hh: Some(&b), h0: &h0, y, gates }, &mut scratch);
        }
    });
    let backward = least_ms(|| {
        let (dxp, dw_hh, db_hh) = (FloatsMut::F32(&mut dxp), &mut dw[..], Some(&mut db[..]));
        let (dh0, dc0) = (&mut dh0[..], &mut dc0[..]);
        let (h0, c0, w_hh) = (&h0, &c0, &w);
        let [y, c_all, gates, dy] = [&y, &c_all, &gates, &dy].map(|x| Floats::F32(x));
        let (dh_n, dc_n) = (None, None);
        if cell == "lstm" {
            let x =
                LstmBackward { dy, dh_n, dc_n, w_hh, h0, c0, y, c_all, gates, dxp, dw_hh, db_hh, dh0, dc0 };
            lstm.backward(&cx, x, &mut scratch);
        } else {
            gru.backward(
                &cx,
                GruBackward { dy, dh_n, w_hh, h0, y, gates, dxp, dw_hh, db_hh, dh0 },
                &mut scratch,
            );
        }
    });
    let product = (2 * states * n_gates * hidden) as f64 * 1e-6;
    println!(
        "{:26} {forward:9.3} {:8.1} {backward:9.3} {:8.1}",
        format!("{cell} {batch} {time} {hidden}"),
        product / forward,
        2.0 * product / backward,
    );
}

/// The least of many runs, within about a third of a second.
fn least_ms(mut f: impl FnMut()) -> f64 {
    let (begin, mut least) = (Instant::now(), f64::INFINITY);
    let mut n = 0;
    while n < 5 || begin.elapsed().as_secs_f64() < 0.3 {
        let start = Instant::now();
        f();
        least = least.min(start.elapsed().as_secs_f64() * 1e3);
        n += 1;
    }
    least
}
