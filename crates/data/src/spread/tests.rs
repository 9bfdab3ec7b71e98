//! A spread set against the same set in one place.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::dataset::{Label, Values};
use crate::joined::Joined;
use crate::stats::Stats;
use crate::table::{OpenedTable, Table, TableFile, TableOptions, TableSchema};
use crate::together::tests::on_members;
use crate::{LabelKind, Loader, LoaderOptions, Mode, Order, Subset, Synthetic, Transform, spans};

/// Lends what all members have put there, and counts letters.
#[derive(Default)]
struct Shelves {
    parts: Mutex<HashMap<(usize, u32), Arc<dyn Dataset>>>,
    answers: Mutex<HashMap<u64, Vec<u8>>>,
    asked: AtomicUsize,
}

impl Lender for Shelves {
    fn ask(&self, member: usize, _set: u32, samples: &[(u32, u64)]) -> Result<u64, DataError> {
        let (mut letter, mut scratch) = (Vec::new(), Scratch::default());
        for (part, idx) in samples {
            let set = self.parts.lock().unwrap()[&(member, *part)].clone();
            write_sample(&set.fetch(*idx as usize, &mut scratch)?, &mut letter);
        }
        let ticket = self.asked.fetch_add(1, Ordering::Relaxed) as u64;
        self.answers.lock().unwrap().insert(ticket, letter);
        Ok(ticket)
    }

    fn wait(&self, ticket: u64) -> Result<Vec<u8>, DataError> {
        Ok(self.answers.lock().unwrap().remove(&ticket).unwrap())
    }
}

/// The set of a member that has the parts for which `has` holds; `tellers` says who lends each.
fn spread(
    parts: &[Arc<dyn Dataset>],
    tellers: &[usize],
    has: impl Fn(usize) -> bool,
    members: &mut dyn Members,
    shelves: &Arc<Shelves>,
) -> Result<SpreadSet, DataError> {
    let own: Vec<_> = parts.iter().enumerate().map(|(k, part)| has(k).then(|| part.clone())).collect();
    for (k, part) in own.iter().enumerate().filter_map(|(k, part)| Some((k, part.clone()?))) {
        shelves.parts.lock().unwrap().insert((members.rank(), k as u32), part);
    }
    let lengths = tell_lengths(&own, tellers, members)?;
    let run = |(k, len): (usize, usize)| SpreadRun {
        len,
        part: k as u32,
        first: 0,
        member: tellers[k],
        here: own[k].is_some(),
    };
    let runs = lengths.into_iter().enumerate().map(run).collect();
    SpreadSet::join(runs, own, members, shelves.clone(), 0)
}

fn assert_same(a: &dyn Dataset, b: &dyn Dataset) {
    assert_eq!((a.len(), a.spec()), (b.len(), b.spec()));
    let (mut x, mut y) = (Scratch::default(), Scratch::default());
    for i in 0..a.len() {
        assert_eq!(a.fetch(i, &mut x).unwrap(), b.fetch(i, &mut y).unwrap(), "sample {i}");
        assert_eq!(a.class(i).unwrap(), b.class(i).unwrap(), "sample {i}");
    }
}

#[test]
fn samples_are_those_of_one_place() {
    let part = |n: usize, first: usize| -> Arc<dyn Dataset> {
        Arc::new(Synthetic::new(n, &[5], 3, 0.2, 7, first).unwrap())
    };
    let (whole, parts) = (part(12, 0), [part(5, 0), part(1, 5), part(6, 6)]);
    // Member 1 has nothing; both others have the second part.
    let shelves = Arc::new(Shelves::default());
    on_members(3, |members| {
        let rank = members.rank();
        let has = |k: usize| matches!((rank, k), (0, 0 | 1) | (2, 1 | 2));
        let set = spread(&parts, &[0, 0, 2], has, members, &shelves).unwrap();
        assert_same(&set, &*whole);
        let half = Subset::range(Arc::new(set), 3, 6).unwrap();
        assert_same(&half, &Subset::range(whole.clone(), 3, 6).unwrap());
    });
    let other: Arc<dyn Dataset> = Arc::new(Synthetic::new(3, &[4], 3, 0.2, 7, 0).unwrap());
    let said = on_members(2, |members| {
        let (parts, rank) = ([part(5, 0), other.clone()], members.rank());
        spread(&parts, &[0, 1], |k| k == rank, members, &Arc::default()).err().unwrap().to_string()
    });
    assert!(said.iter().all(|why| why.contains("files of rank 1") && why.contains("same shape")), "{said:?}");
}

/// Labels that are numbers, and pixels: whatever a set may hold arrives as it is.
#[test]
fn letters_hold_what_was_put_in() {
    let (mut numbers, mut targets, mut ids) = (Vec::new(), Vec::new(), Vec::new());
    for sample in [
        Fetched { values: Values::U8(&[1, 2, 255]), label: Label::Class(70_000) },
        Fetched { values: Values::F32(&[0.1, -0.0, f32::MAX]), label: Label::Values(&[1.5, 2.5]) },
        Fetched { values: Values::I32(&[-1, 7]), label: Label::NextId },
        Fetched { values: Values::U8(&[]), label: Label::NextId },
    ] {
        let mut letter = Vec::new();
        write_sample(&sample, &mut letter);
        let whole = letter.len();
        for cut in 0..whole {
            assert!(read_sample(&letter[..cut], &mut numbers, &mut targets, &mut ids).is_none());
        }
        letter.push(9);
        let read = read_sample(&letter, &mut numbers, &mut targets, &mut ids);
        assert_eq!(read, Some((sample, whole)));
        assert_eq!(letter::length(&letter), Some(whole));
    }
}

/// A loader asks once for each batch and member, not once for each sample.
#[test]
fn batches_are_asked_for_at_once() {
    let part = |n: usize, first: usize| -> Arc<dyn Dataset> {
        Arc::new(Synthetic::new(n, &[5], 3, 0.2, 7, first).unwrap())
    };
    let (whole, parts) = (part(60, 0), [part(30, 0), part(30, 30)]);
    let shelves = Arc::new(Shelves::default());
    on_members(2, |members| {
        let rank = members.rank();
        let set = Arc::new(spread(&parts, &[0, 1], |k| k == rank, members, &shelves).unwrap());
        if rank == 1 {
            return;
        }
        let load = |set: Arc<dyn Dataset>| {
            let order = Order { len: 60, seed: 3, epoch: 0, mode: Mode::Sample, fraction: 1.0 };
            let transform = Transform::new(set.spec(), None, Default::default()).unwrap();
            let options = LoaderOptions { batch_max: 10, threads: 2, prefetch: 2, seed: 1 };
            let plan = spans(order, 10);
            let batches = Loader::start(set, transform, plan, options);
            batches
                .map(Result::unwrap)
                .map(|batch| format!("{:?} {:?}", batch.x, batch.labels))
                .collect::<Vec<_>>()
        };
        assert_eq!(load(set.clone()), load(whole.clone()));
        assert_eq!(shelves.asked.load(Ordering::Relaxed), 6);
        let (a, b) = (Stats::of(&*set, 50).unwrap(), Stats::of(&*whole, 50).unwrap());
        assert_eq!(a, b);
        assert_eq!(shelves.asked.load(Ordering::Relaxed), 7);
    });
}

/// Writes the parts of a table; their columns are in different orders.
fn tables(folder: &Path, n: usize, words: bool) -> Vec<PathBuf> {
    let write = |k: usize| {
        let mut text = String::from(if k == 1 { "b,label,a,c\n" } else { "a,b,c,label\n" });
        for i in k * n..(k + 1) * n {
            let a = if words && i % 7 == 0 { String::new() } else { format!("{}.{}", i * 37 % 101, i % 10) };
            let b = if words { ["ant", "bee", "cow"][i * i % 3].to_string() } else { (i % 13).to_string() };
            let (c, label) = (0.1 * i as f64, ["no", "yes", "maybe"][(i / 3 + k) % 3]);
            text += &if k == 1 { format!("{b},{label},{a},{c}\n") } else { format!("{a},{b},{c},{label}\n") };
        }
        let path = folder.join(format!("part-{k}.csv"));
        std::fs::write(&path, text).unwrap();
        path
    };
    (0..3).map(write).collect()
}

/// What is learnt of columns and classes has the same bits, wherever the files lie.
#[test]
fn tables_are_learnt_as_in_one_place() {
    for (words, stored) in [(false, false), (true, false), (true, true)] {
        let folder = tempfile::tempdir().unwrap();
        let paths = tables(folder.path(), 50, words);
        let options = TableOptions { stored, ..TableOptions::default() };
        let whole = Table::open_all(&paths, &options).unwrap();
        let schema: Option<TableSchema> = whole[0].schema().map(|s| (**s).clone());
        assert_eq!(schema.is_some(), words);
        let (columns, like_ids) = (whole[0].columns().clone(), whole[0].like_ids());
        let joined = Joined::new(whole.into_iter().map(|t| Arc::new(t) as _).collect(), &paths).unwrap();
        let shelves = Arc::new(Shelves::default());
        on_members(3, |members| {
            // Each has one file, in another order than the members; member 1 has nothing.
            let tellers = [2, 0, 2];
            let rank = members.rank();
            let file = |k: usize| TableFile {
                path: (tellers[k] == rank).then(|| paths[k].clone()),
                teller: tellers[k],
            };
            let files: Vec<_> = (0..3).map(file).collect();
            let opened = Table::open_together(&files, &options, members).unwrap();
            let OpenedTable { tables, columns: c, schema: s, like_ids: l } = opened;
            assert_eq!((c, s.map(|s| (*s).clone()), l), (columns.clone(), schema.clone(), like_ids.clone()));
            let spec = joined.spec().clone();
            let empty = || -> Arc<dyn Dataset> { Arc::new(Nothing(spec.clone())) };
            let parts: Vec<_> =
                tables.into_iter().map(|t| t.map_or_else(empty, |t| Arc::new(t) as _)).collect();
            let set = spread(&parts, &tellers, |k| tellers[k] == rank, members, &shelves).unwrap();
            assert_same(&set, &joined);
        });
    }
}

/// A file that is wrong is named on all members, and the first one in their order is.
#[test]
fn a_wrong_file_is_named_everywhere() {
    let folder = tempfile::tempdir().unwrap();
    let paths = tables(folder.path(), 5, false);
    std::fs::write(&paths[1], "a,b,c,label\n1,2,3\n").unwrap();
    std::fs::write(&paths[2], "a,b,label\n1,2,no\n").unwrap();
    let said = on_members(3, |members| {
        let rank = members.rank();
        let file = |k: usize| TableFile { path: (k == rank).then(|| paths[k].clone()), teller: k };
        let files: Vec<_> = (0..3).map(file).collect();
        let options = TableOptions { kind: LabelKind::Classes, ..TableOptions::default() };
        Table::open_together(&files, &options, members).err().unwrap().to_string()
    });
    assert!(said.iter().all(|why| why.contains("part-1.csv")), "{said:?}");
    assert!(said[0].starts_with("rank 1: "), "{said:?}");
}

/// A part that a member does not have.
struct Nothing(Spec);

impl Dataset for Nothing {
    fn spec(&self) -> &Spec {
        &self.0
    }

    fn len(&self) -> usize {
        0
    }

    fn fetch<'a>(&'a self, _: usize, _: &'a mut Scratch) -> Result<Fetched<'a>, DataError> {
        Err(letter::corrupt(0))
    }

    fn class(&self, _: usize) -> Result<Option<usize>, DataError> {
        Ok(None)
    }
}
