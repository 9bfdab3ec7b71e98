//! How many samples per second a loader delivers: images of 28x28 bytes, as in MNIST, and synthetic ones.
//!
//! `cargo run --release -p polyreme-data --example load`

use std::sync::Arc;
use std::time::Instant;

use polyreme_data::{
    Augment, DataError, Dataset, Features, InMemory, Layout, Loader, LoaderOptions, Mode, Order, Spec, Stats,
    Synthetic, Target, Transform, spans,
};

const SAMPLES: usize = 60_000;
const BATCH: usize = 128;

fn main() -> Result<(), DataError> {
    let features = Features::Image { channels: 1, height: 28, width: 28, layout: Layout::Planes };
    let spec = Spec { features, target: Target::Class { classes: 10, names: vec![] } };
    let pixels: Vec<u8> = (0..SAMPLES * 784).map(|i| (i % 255) as u8).collect();
    let labels = (0..SAMPLES).map(|i| i % 10).collect();
    let bytes: Arc<dyn Dataset> = Arc::new(InMemory::new(spec, pixels, labels)?);
    let made_up: Arc<dyn Dataset> = Arc::new(Synthetic::new(SAMPLES, &[1, 28, 28], 10, 0.5, 1, 0)?);

    let none = Augment::default();
    let all = Augment { crop: 4, flip: true, shift: 2, erase: 0.25 };
    for (name, set, augment, epochs) in [
        ("bytes", &bytes, none, 20),
        ("bytes, cropped, flipped, shifted and erased", &bytes, all, 20),
        ("synthetic", &made_up, none, 1),
    ] {
        for threads in [0, 1, 2] {
            let transform = Transform::new(set.spec(), Some(&Stats::of(&**set, 1000)?), augment)?;
            let order = Order { len: set.len(), seed: 1, epoch: 0, mode: Mode::Sample, fraction: 1.0 };
            let plan = (0..epochs).flat_map(move |epoch| spans(order.of_epoch(epoch), BATCH));
            let options = LoaderOptions { batch_max: BATCH, threads, prefetch: 4, seed: 1 };
            let started = Instant::now();
            let mut loader = Loader::start(Arc::clone(set), transform, plan, options);
            let mut n = 0;
            for batch in loader.by_ref() {
                n += batch?.n;
            }
            let seconds = started.elapsed().as_secs_f64();
            let waited = loader.waited().as_secs_f64();
            println!(
                "{name}, {threads} threads: {:.0} samples/s, waited {waited:.2} of {seconds:.2} s",
                n as f64 / seconds
            );
        }
    }
    Ok(())
}
