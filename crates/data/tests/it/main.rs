//! Mapped files that change while a loader reads them. Separate from the unit tests, because a SIGBUS handler is process-wide.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use polyreme_data::arrays::Arrays;
use polyreme_data::{
    Augment, DataError, Dataset, Fetched, Loader, LoaderOptions, Order, Scratch, Spec, Text, Tokenizer,
    Transform, spans,
};

/// Endless epochs in batches of 64, loaded by this many threads.
fn load(set: Arc<dyn Dataset>, threads: usize) -> Loader {
    let transform = Transform::new(set.spec(), None, Augment::default()).unwrap();
    let order = Order::in_order(set.len());
    let plan = (0..u64::MAX).flat_map(move |epoch| spans(order.of_epoch(epoch), 64));
    Loader::start(set, transform, plan, LoaderOptions { batch_max: 64, threads, prefetch: 4, seed: 0 })
}

fn cut(path: &Path, len: u64) {
    File::options().write(true).open(path).unwrap().set_len(len).unwrap();
}

/// The error of a loader whose file is cut after some batches.
fn error_after_cut(set: Arc<dyn Dataset>, threads: usize, path: &Path, len: u64) -> String {
    let mut loader = load(set, threads);
    for _ in 0..5 {
        loader.next().unwrap().unwrap();
    }
    cut(path, len);
    let start = Instant::now();
    loop {
        match loader.next().unwrap() {
            Ok(_) => assert!(start.elapsed() < Duration::from_secs(120), "nothing was said"),
            Err(error) => {
                assert!(matches!(error, DataError::Corrupt { .. }), "{error}");
                return error.to_string();
            }
        }
    }
}

fn text(folder: &Path, n_bytes: usize) -> (std::path::PathBuf, Arc<dyn Dataset>) {
    let path = folder.join("text.txt");
    fs::write(&path, vec![b'x'; n_bytes]).unwrap();
    let text = Text::open(&path, &Tokenizer::bytes(), 32).unwrap();
    (path, Arc::new(text))
}

#[test]
fn a_file_that_is_cut_while_threads_read_it_is_named_with_the_place() {
    for threads in [0, 1, 4] {
        let folder = tempfile::tempdir().unwrap();
        let (path, set) = text(folder.path(), 1 << 20);
        let said = error_after_cut(set, threads, &path, 100_000);
        assert!(
            said.contains("text.txt: at byte 1") && said.contains("cut from 1048576 to 100000 bytes"),
            "{said}"
        );
    }
}

/// Past the end, in the last page, zeros are read without a signal.
#[test]
fn a_file_that_loses_less_than_a_page_is_named_too() {
    let folder = tempfile::tempdir().unwrap();
    let (path, set) = text(folder.path(), 3000);
    let said = error_after_cut(set, 2, &path, 2000);
    assert!(said.contains("text.txt: at byte 2000: the file was cut from 3000 to 2000 bytes"), "{said}");
}

/// A custom set that wraps one of a file.
struct Wrapped(Arc<dyn Dataset>);

impl Dataset for Wrapped {
    fn spec(&self) -> &Spec {
        self.0.spec()
    }
    fn len(&self) -> usize {
        self.0.len()
    }
    fn fetch<'a>(&'a self, idx: usize, scratch: &'a mut Scratch) -> Result<Fetched<'a>, DataError> {
        self.0.fetch(idx, scratch)
    }
    fn class(&self, idx: usize) -> Result<Option<usize>, DataError> {
        self.0.class(idx)
    }
}

#[test]
fn a_wrapped_set_does_not_hide_a_cut() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("arrays.safetensors");
    let (n, width) = (4096, 16);
    let header = format!(
        "{{\"x\":{{\"dtype\":\"F32\",\"shape\":[{n},{width}],\"data_offsets\":[0,{x}]}},\
         \"labels\":{{\"dtype\":\"U8\",\"shape\":[{n}],\"data_offsets\":[{x},{end}]}}}}",
        x = 4 * n * width,
        end = 4 * n * width + n
    );
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.resize(file.len() + 4 * n * width + n, 1);
    fs::write(&path, &file).unwrap();
    let set = Arc::new(Wrapped(Arc::new(Arrays::open(&path, "x", "labels").unwrap())));
    let said = error_after_cut(set, 2, &path, 50_000);
    assert!(said.contains("arrays.safetensors: at byte") && said.contains("to 50000 bytes"), "{said}");
}

#[test]
fn a_file_that_is_replaced_by_rename_is_read_to_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let (path, set) = text(folder.path(), 1 << 18);
    let mut loader = load(set.clone(), 2);
    loader.next().unwrap().unwrap();
    let new = folder.path().join("new");
    fs::write(&new, "short").unwrap();
    fs::rename(&new, &path).unwrap();
    let start = Instant::now();
    // Longer than the interval at which lengths are checked.
    while start.elapsed() < Duration::from_millis(1500) {
        let batch = loader.next().unwrap().unwrap();
        assert!(batch.labels.i32().unwrap().iter().all(|&id| id == i32::from(b'x')));
    }
    assert!(set.intact().is_ok());
}
