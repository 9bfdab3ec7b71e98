//! The loader: the same batches however they are made, errors in their place, and and no wait without an end.

use std::sync::atomic::AtomicUsize;
use std::sync::mpsc;

use super::*;
use crate::augment::Augment;
use crate::batch::{BatchValues, spans};
use crate::dataset::{Fetched, Label, Values};
use crate::memory::InMemory;
use crate::order::{Mode, Order};
use crate::spec::{Features, Layout, Spec, Target};
use crate::stats::Stats;

/// What happens when one sample of a set is read.
#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Fails,
    Panics,
}

/// Rows of two numbers; one may be bad, and every fetch is counted.
struct Rows {
    spec: Spec,
    n: usize,
    bad: Option<(usize, Fate)>,
    fetched: Arc<AtomicUsize>,
}

impl Dataset for Rows {
    fn spec(&self) -> &Spec {
        &self.spec
    }
    fn len(&self) -> usize {
        self.n
    }
    fn fetch<'a>(&'a self, idx: usize, scratch: &'a mut Scratch) -> Result<Fetched<'a>, DataError> {
        self.fetched.fetch_add(1, Ordering::Relaxed);
        match self.bad {
            Some((bad, Fate::Fails)) if bad == idx => return Err(DataError::corrupt("rows", 7, "no row")),
            Some((bad, Fate::Panics)) if bad == idx => panic!("row {idx} is a bug"),
            _ => {}
        }
        scratch.numbers.clear();
        scratch.numbers.extend([idx as f32, -(idx as f32)]);
        Ok(Fetched { values: Values::F32(&scratch.numbers), label: Label::Class(idx % 3) })
    }
    fn class(&self, idx: usize) -> Result<Option<usize>, DataError> {
        Ok(Some(idx % 3))
    }
}

fn rows(n: usize, bad: Option<(usize, Fate)>) -> Arc<Rows> {
    let spec =
        Spec { features: Features::Row { width: 2 }, target: Target::Class { classes: 3, names: vec![] } };
    Arc::new(Rows { spec, n, bad, fetched: Arc::default() })
}

fn plain(set: &dyn Dataset) -> Transform {
    Transform::new(set.spec(), None, Augment::default()).unwrap()
}

fn options(threads: usize, prefetch: usize) -> LoaderOptions {
    LoaderOptions { batch_max: 16, threads, prefetch, seed: 3 }
}

/// Small images with all augmentations turned on.
fn images() -> (Arc<dyn Dataset>, Transform) {
    let features = Features::Image { channels: 3, height: 6, width: 5, layout: Layout::Interleaved };
    let spec = Spec { features, target: Target::Class { classes: 7, names: vec![] } };
    let pixels: Vec<u8> = (0..101 * 90).map(|i: usize| (i * 31 % 251) as u8).collect();
    let set = InMemory::new(spec.clone(), pixels, (0..101).map(|i| i % 7).collect()).unwrap();
    let stats = Stats::of(&set, 50).unwrap();
    let augment = Augment { crop: 2, flip: true, shift: 1, erase: 0.5 };
    (Arc::new(set), Transform::new(&spec, Some(&stats), augment).unwrap())
}

/// Three epochs in batches of 16.
fn three_epochs(len: usize) -> impl Iterator<Item = Span> + Send + 'static {
    let order = Order { len, seed: 8, epoch: 0, mode: Mode::Block(10), fraction: 0.8 };
    (0..3).flat_map(move |epoch| spans(order.of_epoch(epoch), 16))
}

#[test]
fn batches_are_the_same_for_any_threads_and_prefetch() {
    let read = |threads, prefetch| -> Vec<(Vec<u32>, Vec<i32>, Span)> {
        let (set, transform) = images();
        let bits = |x: &BatchValues| x.f32().unwrap().iter().map(|x| x.to_bits()).collect();
        Loader::start(set, transform, three_epochs(101), options(threads, prefetch))
            .map(|batch| batch.unwrap())
            .map(|batch| (bits(&batch.x), batch.labels.i32().unwrap().to_vec(), batch.span))
            .collect()
    };
    let alone = read(0, 1);
    assert_eq!(
        alone.iter().map(|(.., span)| *span).collect::<Vec<_>>(),
        three_epochs(101).collect::<Vec<_>>()
    );
    assert!(alone[0].0 != alone[6].0, "epochs differ");
    for threads in [0, 1, 2, 5] {
        for prefetch in [0, 1, 2, 3, 8, usize::MAX] {
            assert!(read(threads, prefetch) == alone, "{threads} threads, {prefetch} ahead");
        }
    }
}

#[test]
fn samples_are_those_of_the_order_and_the_last_batch_is_short() {
    for threads in [0, 2] {
        let set = rows(37, None);
        let order = Order { len: 37, seed: 1, epoch: 4, mode: Mode::Sample, fraction: 1.0 };
        let mut sizes = Vec::new();
        for batch in Loader::start(set.clone(), plain(&*set), spans(order, 16), options(threads, 2)) {
            let batch = batch.unwrap();
            sizes.push(batch.n);
            for (i, idx) in order.walk(batch.span.start).take(batch.n).enumerate() {
                assert_eq!(batch.x.f32().unwrap()[2 * i..2 * i + 2], [idx as f32, -(idx as f32)]);
                assert_eq!(batch.labels.i32().unwrap()[i], (idx % 3) as i32);
            }
            assert_eq!(
                (batch.x.f32().unwrap().len(), batch.labels.i32().unwrap().len()),
                (2 * batch.n, batch.n)
            );
        }
        assert_eq!(sizes, [16, 16, 5]);
    }
}

#[test]
fn ids_are_loaded_with_their_successors() {
    let spec = Spec { features: Features::Ids { time: 2, vocab: 256 }, target: Target::NextId };
    let set = Arc::new(InMemory::new(spec, b"abcdef".to_vec(), vec![]).unwrap());
    for threads in [0, 2] {
        let plan = spans(Order::in_order(2), 2);
        let batch =
            Loader::start(set.clone(), plain(&*set), plan, options(threads, 2)).next().unwrap().unwrap();
        assert_eq!(batch.x.i32().unwrap(), [97, 98, 100, 101]);
        assert_eq!(batch.labels.i32().unwrap(), [98, 99, 101, 102]);
    }
}

#[test]
fn an_error_comes_in_its_place_and_ends_the_stream() {
    for (fate, part) in
        [(Fate::Fails, "rows: at byte 7: no row"), (Fate::Panics, "sample 40 panicked: row 40 is a bug")]
    {
        for threads in [0, 1, 3] {
            for prefetch in [1, 2, 9] {
                let set = rows(200, Some((40, fate)));
                let plan = spans(Order::in_order(200), 16);
                let mut loader = Loader::start(set.clone(), plain(&*set), plan, options(threads, prefetch));
                assert!(loader.next().unwrap().is_ok() && loader.next().unwrap().is_ok());
                let error =
                    loader.next().unwrap().err().expect("sample 40 is in the third batch").to_string();
                assert!(error.contains(part), "{error}");
                assert!(loader.next().is_none() && loader.next().is_none());
            }
        }
    }
}

#[test]
fn a_plan_that_panics_is_an_error_after_what_it_said() {
    for threads in [0, 2] {
        let set = rows(100, None);
        let plan = spans(Order::in_order(100), 16).inspect(|span| assert!(span.start < 20, "no span"));
        let mut loader = Loader::start(set.clone(), plain(&*set), plan, options(threads, 3));
        assert!(loader.next().unwrap().is_ok() && loader.next().unwrap().is_ok());
        let error = loader.next().unwrap().err().expect("the plan panicked").to_string();
        assert!(error.contains("choosing samples panicked: no span"), "{error}");
        assert!(loader.next().is_none());
    }
}

#[test]
fn spans_that_do_not_fit_are_errors() {
    let span = |len, start, n| Span::new(Order::in_order(len), start, n);
    for (span, part) in [
        (span(100, 0, 17), "longer than batch_max"),
        (span(101, 0, 10), "longer than the set"),
        (span(100, 95, 10), "not in an epoch of 100"),
        (span(100, usize::MAX, 10), "not in an epoch of 100"),
    ] {
        for threads in [0, 1] {
            let set = rows(100, None);
            let mut loader =
                Loader::start(set.clone(), plain(&*set), [span].into_iter(), options(threads, 2));
            let error = loader.next().unwrap().err().expect("it does not fit").to_string();
            assert!(error.contains(part), "{error}");
        }
    }
    let (set, _) = images();
    let mut loader = Loader::start(set, plain(&*rows(1, None)), three_epochs(101), options(1, 2));
    assert!(loader.next().unwrap().is_err());
}

#[test]
fn memory_is_taken_once() {
    for (threads, prefetch, held) in [(0, 1, 1), (1, 1, 1), (2, 3, 1), (5, 8, 2), (2, 2, 3)] {
        let set = rows(16 * 50, None);
        let plan = (0..20).flat_map(|epoch| spans(Order::in_order(16 * 50).of_epoch(epoch), 16));
        let mut loader = Loader::start(set.clone(), plain(&*set), plan, options(threads, prefetch));
        let mut lent = VecDeque::new();
        let mut places = std::collections::HashSet::new();
        for batch in loader.by_ref() {
            let batch = batch.unwrap();
            places.insert(batch.x.f32().unwrap().as_ptr() as usize);
            lent.push_back(batch);
            if lent.len() == held {
                lent.pop_front();
            }
        }
        assert!(loader.n_batches() <= prefetch + held, "{} for {prefetch} and {held}", loader.n_batches());
        assert!(places.len() <= prefetch + held, "{} places", places.len());
    }
}

#[test]
fn no_more_than_prefetch_is_read_ahead() {
    let set = rows(1000, None);
    let mut loader =
        Loader::start(set.clone(), plain(&*set), spans(Order::in_order(1000), 10), options(3, 4));
    for taken in 1..=5 {
        let batch = loader.next().unwrap().unwrap();
        assert!(set.fetched.load(Ordering::Relaxed) <= 10 * (taken + 4));
        drop(batch);
    }
}

#[test]
fn a_dropped_loader_stops_its_threads() {
    for taken in [0, 1, 5] {
        let set = rows(100, None);
        let endless = (0..).flat_map(|epoch| spans(Order::in_order(100).of_epoch(epoch), 16));
        let mut loader = Loader::start(set.clone(), plain(&*set), endless, options(3, 4));
        let lent: Vec<_> = (0..taken).map(|_| loader.next().unwrap().unwrap()).collect();
        drop(loader);
        // Threads are joined: only this test and lent batches hold the set.
        assert_eq!(Arc::strong_count(&set), if taken == 0 { 1 } else { 2 });
        assert!(lent.iter().all(|batch| batch.n > 0));
        drop(lent);
        assert_eq!(Arc::strong_count(&set), 1);
    }
}

/// A set whose fetches wait for a signal.
struct Gate {
    spec: Spec,
    entered: mpsc::SyncSender<()>,
    open: Mutex<mpsc::Receiver<()>>,
}

impl Dataset for Gate {
    fn spec(&self) -> &Spec {
        &self.spec
    }
    fn len(&self) -> usize {
        1000
    }
    fn fetch<'a>(&'a self, idx: usize, scratch: &'a mut Scratch) -> Result<Fetched<'a>, DataError> {
        self.entered.send(()).unwrap();
        let _ = self.open.lock().unwrap().recv();
        scratch.numbers.resize(2, 0.0);
        Ok(Fetched { values: Values::F32(&scratch.numbers), label: Label::Class(idx % 3) })
    }
    fn class(&self, _: usize) -> Result<Option<usize>, DataError> {
        Ok(None)
    }
}

#[test]
fn a_batch_that_is_being_filled_stops_at_the_next_sample() {
    let (entered, has_entered) = mpsc::sync_channel(1000);
    let (open, opened) = mpsc::channel();
    let set = Arc::new(Gate { spec: rows(1, None).spec.clone(), entered, open: Mutex::new(opened) });
    let plan = spans(Order::in_order(1000), 1000);
    let options = LoaderOptions { batch_max: 1000, ..options(1, 1) };
    let loader = Loader::start(set.clone(), plain(&*set), plan, options);
    has_entered.recv().unwrap();
    let shared = Arc::clone(&loader.shared);
    let dropping = thread::spawn(move || drop(loader));
    while !shared.stopped.load(Ordering::Relaxed) {
        thread::yield_now();
    }
    drop(open);
    dropping.join().unwrap();
    assert_eq!(has_entered.try_iter().count(), 0, "no sample was read after the stop");
}

#[test]
fn waiting_is_measured() {
    let set = rows(64, None);
    for threads in [0, 1] {
        let mut loader =
            Loader::start(set.clone(), plain(&*set), spans(Order::in_order(64), 16), options(threads, 1));
        let started = Instant::now();
        assert_eq!(loader.waited(), Duration::ZERO);
        assert_eq!(loader.by_ref().count(), 4);
        assert!(loader.waited() <= started.elapsed());
        assert!(threads > 0 || loader.waited() > Duration::ZERO);
    }
}
