//! Times LSTM and GRU on one core: `cargo run --release -p polyreme-kernels --example recurrent_shapes [rounds] [tiles]`.
//!
//! In f32, on bf16 with products in f32, and with products of bf16, forward and backward; rounds of each alternate, and the
//! best counts, in time on the core: there may be other work on the machine. GFLOP/s, of the products of bf16, count the
//! products with the recurrent weights alone: one forward, two backward.

use polyreme_dtype::DType;
use polyreme_kernels::gemm::pairs::PairOrder;
use polyreme_kernels::rnn::{Gru, GruBackward, GruForward, Lstm, LstmBackward, LstmForward};
use polyreme_kernels::{Cx, Floats, FloatsMut, convert};

fn main() {
    let mut args = std::env::args().skip(1);
    let rounds: usize = args.next().and_then(|v| v.parse().ok()).unwrap_or(10);
    let order = if args.next().is_some_and(|v| v == "tiles") { PairOrder::Tiles } else { PairOrder::Pairs };
    println!(
        "{:18} ms forward: f32, on bf16, pairs and their share of on bf16, GFLOP/s; the same backward",
        "cell B T H"
    );
    for (batch, time, hidden) in [
        (64, 64, 128),
        (32, 64, 256),
        (16, 32, 512),
        (64, 16, 1024),
        (64, 20, 48),
        (64, 64, 32),
        (64, 64, 16),
        (8, 64, 128),
        (4, 64, 256),
        (2, 64, 256),
        (1, 64, 256),
        (1, 64, 32),
    ] {
        for lstm in [true, false] {
            let ways = [(DType::F32, None), (DType::Bf16, None), (DType::Bf16, Some(order))];
            let mut ways =
                ways.map(|(dtype, products)| RecurrentWay::new(lstm, [batch, time, hidden], dtype, products));
            for _ in 0..rounds {
                ways.iter_mut().for_each(RecurrentWay::run);
            }
            let n_gates = if lstm { 4 } else { 3 };
            let product = (2 * batch * time * hidden * n_gates * hidden) as f64 * 1e-6;
            print!("{:18}", format!("{} {batch} {time} {hidden}", if lstm { "lstm" } else { "gru" }));
            for (pass, products) in [(0, 1.0), (1, 2.0)] {
                let [f, wide, pairs] = ways.each_ref().map(|way| way.best_ms[pass]);
                print!(
                    " {f:8.3} {wide:8.3} {pairs:8.3} {:5.2} {:5.0}",
                    pairs / wide,
                    products * product / pairs
                );
            }
            println!();
        }
    }
}

/// One way to run a cell, its buffers, and the best times forward and backward.
struct RecurrentWay {
    lstm: Option<Lstm>,
    gru: Gru,
    /// xp, y, c_all, gates, dy and dxp: what has T steps.
    steps: [StoredAs; 6],
    /// The weights and biases, and their gradients.
    weights: [Vec<f32>; 4],
    /// h0 and c0, and their gradients.
    states: [Vec<f32>; 4],
    scratch: Vec<f32>,
    best_ms: [f64; 2],
}

/// Floats in either format.
struct StoredAs {
    wide: Vec<f32>,
    half: Option<Vec<polyreme_dtype::bf16>>,
}

impl StoredAs {
    fn new(len: usize, dtype: DType) -> StoredAs {
        let wide = numbers(len);
        let half = (dtype == DType::Bf16).then(|| {
            let mut half = vec![polyreme_dtype::bf16::ZERO; len];
            convert::f32_to_bf16(&Cx::serial(), &wide, &mut half);
            half
        });
        StoredAs { wide, half }
    }
    fn get(&self) -> Floats<'_> {
        self.half.as_ref().map_or(Floats::F32(&self.wide), |half| Floats::Bf16(half))
    }
    fn get_mut(&mut self) -> FloatsMut<'_> {
        match &mut self.half {
            Some(half) => FloatsMut::Bf16(half),
            None => FloatsMut::F32(&mut self.wide),
        }
    }
}

impl RecurrentWay {
    fn new(
        is_lstm: bool,
        [batch, time, hidden]: [usize; 3],
        dtype: DType,
        products: Option<PairOrder>,
    ) -> RecurrentWay {
        let lstm = Lstm { batch, time, hidden, reverse: false, strict: false, products };
        let gru = Gru { batch, time, hidden, reverse: false, strict: false, products };
        let states = batch * time * hidden;
        let gates = if is_lstm { 4 } else { 3 };
        let (w, b) = (numbers(gates * hidden * hidden), numbers(gates * hidden));
        let len = lstm.forward_scratch_len_half(1).max(lstm.backward_scratch_len_half(1));
        let len = len.max(lstm.backward_scratch_len(1)).max(gru.backward_scratch_len(1));
        let steps = [gates, 1, 1, 4, 1, gates].map(|n| StoredAs::new(n * states, dtype));
        RecurrentWay {
            lstm: is_lstm.then_some(lstm),
            scratch: vec![0.0; len.max(gru.backward_scratch_len_half(1))],
            gru,
            steps,
            weights: [w.clone(), b.clone(), w, b],
            states: [0; 4].map(|_| numbers(batch * hidden)),
            best_ms: [f64::INFINITY; 2],
        }
    }

    /// Both passes, twice, of which the second counts.
    fn run(&mut self) {
        let cx = Cx::serial();
        let [xp, y, c_all, gates, dy, dxp] = &mut self.steps;
        let [w_hh, b_hh, dw_hh, db_hh] = &mut self.weights;
        let [h0, c0, dh0, dc0] = &mut self.states;
        for _ in 0..2 {
            let start = on_core();
            {
                let (xp, b_hh, y, gates) = (xp.get(), Some(&b_hh[..]), y.get_mut(), gates.get_mut());
                if let Some(lstm) = &self.lstm {
                    let c_all = c_all.get_mut();
                    let x = LstmForward { xp, w_hh, b_hh, h0, c0, y, c_all, gates };
                    lstm.forward(&cx, x, &mut self.scratch);
                } else {
                    self.gru.forward(&cx, GruForward { xp, w_hh, b_hh, h0, y, gates }, &mut self.scratch);
                }
            }
            let middle = on_core();
            let (dy, y, c_all, gates, dxp) = (dy.get(), y.get(), c_all.get(), gates.get(), dxp.get_mut());
            let (dh_n, dc_n, db_hh) = (None, None, Some(&mut db_hh[..]));
            if let Some(lstm) = &self.lstm {
                let x = LstmBackward {
                    dy,
                    dh_n,
                    dc_n,
                    w_hh,
                    h0,
                    c0,
                    y,
                    c_all,
                    gates,
                    dxp,
                    dw_hh,
                    db_hh,
                    dh0,
                    dc0,
                };
                lstm.backward(&cx, x, &mut self.scratch);
            } else {
                let x = GruBackward { dy, dh_n, w_hh, h0, y, gates, dxp, dw_hh, db_hh, dh0 };
                self.gru.backward(&cx, x, &mut self.scratch);
            }
            let times = [middle - start, on_core() - middle];
            for (best, time) in self.best_ms.iter_mut().zip(times) {
                *best = best.min(1e3 * time);
            }
        }
    }
}

fn numbers(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i * 7919 % 1000) as f32 / 5000.0 - 0.1).collect()
}

/// Seconds that this thread was on a core.
fn on_core() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}
