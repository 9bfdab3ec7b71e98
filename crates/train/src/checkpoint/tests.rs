//! Checkpoints as their users see them: what goes in comes out, and what is damaged is named.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use polyreme_dtype::{DType, bf16, f16};
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::weights::{View, Weight, match_weights, read_weights, write_weights};

/// A shard of tensors with the given dims, one after the other, filled by `number`.
pub(super) fn shard(file: &str, dims: &[&[usize]], number: impl Fn(usize) -> f32) -> Shard {
    let mut start = 0;
    let at = |(i, dims): (usize, &&[usize])| {
        let at = TensorAt { name: format!("t{i}.weight"), dims: dims.to_vec(), start };
        start += dims.iter().product::<usize>();
        at
    };
    let tensors: Vec<TensorAt> = dims.iter().enumerate().map(at).collect();
    Shard {
        file: file.into(),
        dtype: DType::F32,
        tensors: tensors.into(),
        lent: None,
        asked: None,
        data: (0..start).map(number).collect(),
    }
}

pub(super) fn snapshot(step: u64, metrics: &[(&str, f64)]) -> Snapshot {
    let number = |i: usize| (step as usize * 1000 + i) as f32;
    Snapshot {
        step,
        epoch: step / 10,
        shards: vec![
            shard(MODEL_FILE, &[&[3, 5], &[0, 4], &[], &[7]], number),
            shard("optimizer.safetensors", &[&[23]], |i| -number(i)),
        ],
        progress: json!({ "seed": u64::MAX, "rate": 0.1 }),
        metrics: metrics.iter().map(|(name, value)| (name.to_string(), *value)).collect(),
        job: "[train]\nbatch = 8\n".into(),
        batches: step,
    }
}

/// Saves in the foreground.
fn save(store: &mut Store, snapshot: Snapshot) {
    store.save(snapshot).unwrap();
    store.finish().unwrap();
}

fn saved(steps: &[(u64, f64)], keep: usize, best: Option<&str>) -> (tempfile::TempDir, Store) {
    let run = tempfile::tempdir().unwrap();
    let mut store = Store::open(run.path(), keep, best.map(String::from)).unwrap();
    for (step, value) in steps {
        save(&mut store, snapshot(*step, &[("val_accuracy", *value)]));
    }
    (run, store)
}

fn steps_in(run: &Path) -> Vec<u64> {
    list(run).unwrap().iter().map(|entry| entry.step).collect()
}

fn step_folder(run: &Path, step: u64) -> PathBuf {
    run.join("checkpoints").join(folder::step_name(step))
}

/// Bits, so that NaNs compare.
fn bits(data: &[f32]) -> Vec<u32> {
    data.iter().map(|x| x.to_bits()).collect()
}

fn check_round_trip(shards: Vec<Shard>) {
    let run = tempfile::tempdir().unwrap();
    let mut store = Store::open(run.path(), 1, None).unwrap();
    let put = Snapshot { shards, ..snapshot(3, &[("a", 0.5), ("b", f64::NEG_INFINITY)]) };
    save(&mut store, put.clone());
    let (got, skipped) = latest_whole(run.path()).unwrap();
    assert!(skipped.is_empty());
    let Manifest { format, step, epoch, metrics, progress, job, .. } = &got.manifest;
    assert_eq!((*format, *step, *epoch), (FORMAT, put.step, put.epoch));
    assert_eq!((metrics, progress, job), (&put.metrics, &put.progress, &put.job));
    assert_eq!(got.files.len(), put.shards.len());
    for (want, file) in put.shards.iter().zip(&got.files) {
        assert_eq!(file.path.file_name(), Some(want.file.as_ref()));
        let got = read_weights(&file.path).unwrap();
        // Empty tensors share their place with a neighbour, so the order of names may differ.
        let shapes: Vec<TensorShape> =
            want.tensors.iter().map(|t| TensorShape { name: t.name.clone(), dims: t.dims.clone() }).collect();
        let got = match_weights(&shapes, got, run.path()).unwrap();
        for (at, weight) in want.tensors.iter().zip(&got) {
            let want = &want.data[at.start..at.start + weight.data.len()];
            assert_eq!(bits(want), bits(&weight.data), "{}", at.name);
        }
    }
}

#[test]
fn what_goes_in_comes_out() {
    // NaNs with payloads, signalling ones, infinities, subnormals, zeros of both signs: as bits.
    let odd = |i: usize| f32::from_bits([0x7fc0_1234, 0xff80_0001, 0x7f80_0000, 1, 0x8000_0000, 0][i % 6]);
    check_round_trip(vec![shard(MODEL_FILE, &[&[2, 3], &[6]], odd)]);
    check_round_trip(vec![shard(MODEL_FILE, &[], odd)]);
    check_round_trip(vec![shard(MODEL_FILE, &[&[0], &[], &[3, 0, 2], &[1], &[0]], odd)]);
    let many: Vec<&[usize]> = vec![&[3]; 2000];
    check_round_trip(vec![shard(MODEL_FILE, &many, |i| i as f32), shard("ema.safetensors", &many, odd)]);
    // Around what is written and read at once.
    for n in [16_383, 16_384, 65_535, 65_536, 65_537, 200_001] {
        check_round_trip(vec![shard(MODEL_FILE, &[&[n], &[1], &[n]], |i| i as f32)]);
    }
    // Gaps, overlaps and any order in the arena.
    let at = |name: &str, start| TensorAt { name: name.into(), dims: vec![2], start };
    let tensors: Arc<[TensorAt]> = [at("c", 8), at("a", 1), at("b", 2)].into();
    check_round_trip(vec![Shard {
        file: MODEL_FILE.into(),
        dtype: DType::F32,
        tensors,
        lent: None,
        asked: None,
        data: (0..10).map(|i| i as f32).collect(),
    }]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_bits_come_back(numbers in prop::collection::vec(any::<u32>(), 0..400), cut in 0usize..400) {
        let cut = cut.min(numbers.len());
        let dims: [&[usize]; 2] = [&[cut], &[numbers.len() - cut]];
        check_round_trip(vec![shard(MODEL_FILE, &dims, |i| f32::from_bits(numbers[i]))]);
    }

    #[test]
    fn no_file_panics(bytes in prop::collection::vec(any::<u8>(), 0..64), n in 0u64..80) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        fs::write(&path, [&n.to_le_bytes()[..], &bytes].concat()).unwrap();
        prop_assert!(read_weights(&path).is_err());
    }
}

#[test]
fn the_newest_and_the_best_stay() {
    let check = |values: &[f64], keep, best: Option<&str>, want: &[u64], want_best: Option<u64>| {
        let steps: Vec<(u64, f64)> = (1..).zip(values.iter().copied()).collect();
        let (run, mut store) = saved(&steps, keep, best);
        assert_eq!(steps_in(run.path()), want, "{values:?}");
        let best = list(run.path()).unwrap().into_iter().find(|entry| entry.is_best).map(|entry| entry.step);
        assert_eq!(best, want_best, "{values:?}");
        let via = run.path().join("checkpoints/best");
        assert_eq!(load(&via).ok().map(|loaded| loaded.manifest.step), want_best, "the link itself");
        let written = store.take_written();
        assert_eq!(written.len(), values.len());
        assert_eq!(written.last().map(|w| w.is_best), written.last().map(|w| Some(w.step) == want_best));
    };
    check(&[0.1, 0.9, 0.3, 0.4], 2, Some("val_accuracy"), &[2, 3, 4], Some(2));
    check(&[0.1, 0.9, 0.3, 0.9], 1, Some("val_accuracy"), &[2, 4], Some(2));
    check(&[0.1, 0.2, 0.3], 1, Some("val_accuracy"), &[3], Some(3));
    check(&[0.1, 0.2, 0.3], 2, None, &[2, 3], None);
    check(&[0.1, 0.2, 0.3], 2, Some("unheard_of"), &[2, 3], None);
    check(&[0.1, f64::NAN], 0, Some("val_accuracy"), &[1, 2], Some(1));
}

#[test]
fn a_step_saved_again_replaces_the_old_one() {
    let (run, mut store) = saved(&[(1, 0.1), (2, 0.9)], 3, Some("val_accuracy"));
    let again = Snapshot { job: "again".into(), ..snapshot(2, &[("val_accuracy", 0.05)]) };
    save(&mut store, again);
    let (loaded, _) = latest_whole(run.path()).unwrap();
    assert_eq!((loaded.manifest.step, loaded.manifest.job.as_str()), (2, "again"));
    assert_eq!(steps_in(run.path()), [1, 2]);
    assert!(list(run.path()).unwrap()[0].is_best, "by its new value, step 2 is no longer the best");
}

#[test]
fn steps_go_forward_until_one_goes_back() {
    let (run, mut store) = saved(&[(1, 0.1), (2, 0.2), (3, 0.9)], 5, Some("val_accuracy"));
    let refused = store.save(snapshot(2, &[]));
    assert!(matches!(refused, Err(CheckpointError::Backwards { step: 2, newest: 3, .. })));
    // What is newer gets another name. Damaged ones stay until a newer one is whole, whole ones for good.
    let root = run.path().join("checkpoints");
    let aside = [(3, root.join("aside-step-00000003")), (2, root.join("damaged-step-00000002"))];
    assert_eq!(store.go_back(1, &[2]).unwrap(), aside);
    assert_eq!(steps_in(run.path()), [1]);
    assert!(list(run.path()).unwrap()[0].is_best);
    assert!(aside.iter().all(|(step, path)| load(path).unwrap().manifest.step == *step));
    save(&mut store, snapshot(2, &[]));
    assert_eq!(steps_in(run.path()), [1, 2]);
    assert!(aside[0].1.exists() && !aside[1].1.exists());
    // Once more behind the same step: both stay.
    save(&mut store, snapshot(3, &[]));
    assert_eq!(store.go_back(2, &[]).unwrap(), [(3, root.join("aside-step-00000003-2"))]);
    assert!(load(&aside[0].1).is_ok());
}

#[test]
fn two_cannot_train_into_one_folder() {
    let (run, store) = saved(&[(1, 0.1)], 2, None);
    let second = Store::open(run.path(), 2, None).err().unwrap();
    let pid = std::process::id();
    assert!(matches!(second, CheckpointError::Locked { pid: Some(p), .. } if p == pid), "{second}");
    assert!(second.to_string().contains(&format!("process {pid} trains into this folder")));
    // Reading needs no lock.
    assert_eq!(latest_whole(run.path()).unwrap().0.manifest.step, 1);
    drop(store);
    assert!(Store::open(run.path(), 2, None).is_ok());
}

#[test]
fn leftovers_go_when_a_store_opens() {
    let (run, store) = saved(&[(1, 0.1), (2, 0.2)], 2, None);
    drop(store);
    let root = run.path().join("checkpoints");
    for name in [".writing-step-00000003-1", ".old-step-00000001"] {
        fs::create_dir(root.join(name)).unwrap();
        fs::write(root.join(name).join(MODEL_FILE), "half").unwrap();
    }
    // Killed between the two renames of a replacement.
    fs::rename(root.join("step-00000002"), root.join("step-00000002.new")).unwrap();
    assert_eq!(latest_whole(run.path()).unwrap().0.manifest.step, 2, "before anyone cleans");
    let plain = root.join("step-00000002");
    assert_eq!(resolve(&plain).unwrap(), GivenPath::Checkpoint(root.join("step-00000002.new")));
    let _store = Store::open(run.path(), 2, None).unwrap();
    let mut names: Vec<_> = fs::read_dir(&root).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, [".lock", "step-00000001", "step-00000002"]);
}

#[test]
fn damage_is_named_and_passed_over() {
    type Damage = fn(&Path);
    type Is = fn(&CheckpointError) -> bool;
    let rows: [(Damage, Is); 5] = [
        (|at| flip(&at.join(MODEL_FILE), -1), |e| matches!(e, CheckpointError::Checksum { .. })),
        (|at| flip(&at.join(MODEL_FILE), 0), |e| matches!(e, CheckpointError::Checksum { .. })),
        (|at| flip(&at.join(MODEL_FILE), 9), |e| matches!(e, CheckpointError::Checksum { .. })),
        (|at| cut(&at.join("optimizer.safetensors")), |e| matches!(e, CheckpointError::Length { .. })),
        (|at| cut(&at.join("manifest.json")), |e| matches!(e, CheckpointError::HalfWritten { .. })),
    ];
    for (i, (damage, is)) in rows.into_iter().enumerate() {
        let (run, mut store) = saved(&[(1, 0.1), (2, 0.2)], 5, None);
        let newest = step_folder(run.path(), 2);
        damage(&newest);
        let error = load(&newest).unwrap_err();
        assert!(is(&error), "row {i}: {error}");
        let (loaded, skipped) = latest_whole(run.path()).unwrap();
        assert_eq!((loaded.manifest.step, skipped.len()), (1, 1), "row {i}");
        assert!(skipped[0].step == 2 && is(&skipped[0].why), "row {i}: {}", skipped[0].why);
        // Only what the manifest shows is seen by a list; the damaged one is still listed.
        assert_eq!(steps_in(run.path()), [1, 2]);
        damage(&step_folder(run.path(), 1));
        assert!(
            matches!(latest_whole(run.path()), Err(CheckpointError::NoneWhole { skipped, .. }) if skipped.len() == 2)
        );
        // The step that is saved again takes the damaged one's place.
        save(&mut store, snapshot(2, &[]));
        assert_eq!(latest_whole(run.path()).unwrap().0.manifest.step, 2, "row {i}");
    }
}

/// A checkpoint that cannot be read now may be whole: nobody goes back behind it unasked.
#[test]
fn what_cannot_be_read_now_is_not_passed_over() {
    type Harm = fn(&Path);
    let gone: Harm = |at| fs::remove_file(at.join(MODEL_FILE)).unwrap();
    let no_manifest: Harm = |at| fs::remove_file(at.join("manifest.json")).unwrap();
    // Root may read everything: folders and links that go nowhere are what cannot be read.
    let broken: Harm = |at| {
        fs::remove_file(at.join("optimizer.safetensors")).unwrap();
        fs::create_dir(at.join("optimizer.safetensors")).unwrap();
    };
    let looping: Harm = |at| {
        fs::remove_file(at.join(MODEL_FILE)).unwrap();
        std::os::unix::fs::symlink(MODEL_FILE, at.join(MODEL_FILE)).unwrap();
    };
    for (i, harm) in [gone, no_manifest, broken, looping].into_iter().enumerate() {
        let (run, _store) = saved(&[(1, 0.1), (2, 0.2)], 5, None);
        let (older, newest) = (step_folder(run.path(), 1), step_folder(run.path(), 2));
        harm(&newest);
        let error = latest_whole(run.path()).unwrap_err();
        let CheckpointError::Unread { path, older: Some(other), .. } = &error else {
            panic!("row {i}: {error}")
        };
        assert_eq!((path, other), (&newest, &older), "row {i}");
        let text = error.to_string();
        assert!(text.ends_with(&format!("`polyreme resume {}`", older.display())), "row {i}: {text}");
        assert_eq!(steps_in(run.path()), [1, 2], "row {i}");
    }
}

fn flip(path: &Path, at: isize) {
    let mut bytes = fs::read(path).unwrap();
    let at = at.rem_euclid(bytes.len() as isize) as usize;
    bytes[at] ^= 0x10;
    fs::write(path, bytes).unwrap();
}

fn cut(path: &Path) {
    let bytes = fs::read(path).unwrap();
    fs::write(path, &bytes[..bytes.len() - 3]).unwrap();
}

#[test]
fn a_newer_format_is_not_damage() {
    let (run, _store) = saved(&[(1, 0.1), (2, 0.2)], 5, None);
    let path = step_folder(run.path(), 2).join("manifest.json");
    let newer = fs::read_to_string(&path).unwrap().replace("\"format\": 1", "\"format\": 7");
    fs::write(&path, newer).unwrap();
    let error = latest_whole(run.path()).unwrap_err();
    assert!(matches!(error, CheckpointError::NewerFormat { found: 7, known: FORMAT, .. }), "{error}");
}

#[test]
fn a_checkpoint_of_another_model_is_refused() {
    let (run, _store) = saved(&[(1, 0.1)], 5, None);
    let (loaded, _) = latest_whole(run.path()).unwrap();
    let shape = |name: &str, dims: &[usize]| TensorShape { name: name.into(), dims: dims.to_vec() };
    let model = |last: TensorShape| {
        vec![shape("t0.weight", &[3, 5]), shape("t1.weight", &[0, 4]), shape("t2.weight", &[]), last]
    };
    let same = model(shape("t3.weight", &[7]));
    loaded.check_model(&same).unwrap();
    assert!(loaded.manifest.is_of(&same));
    let other = model(shape("t3.weight", &[8]));
    assert!(!loaded.manifest.is_of(&other));
    let error = loaded.check_model(&other).unwrap_err().to_string();
    assert!(error.ends_with("1 of another shape: t3.weight ([8] in the model, [7] in the file)"), "{error}");
    let other = model(shape("t3.weights", &[7]));
    let error = loaded.check_model(&other).unwrap_err().to_string();
    let want =
        "1 missing in the file: t3.weights [7] (perhaps t3.weight); 1 unknown to the model: t3.weight [7]";
    assert!(error.contains(want), "{error}");
}

#[test]
fn paths_mean_what_people_mean() {
    let (run, _store) = saved(&[(1, 0.9), (2, 0.2)], 5, Some("val_accuracy"));
    let run = run.path();
    let root = run.join("checkpoints");
    let first = step_folder(run, 1);
    let check = |path: &Path, want: GivenPath| assert_eq!(resolve(path).unwrap(), want, "{}", path.display());
    check(run, GivenPath::Run(run.into()));
    check(&root, GivenPath::Run(run.into()));
    check(&first, GivenPath::Checkpoint(first.clone()));
    check(&first.join("manifest.json"), GivenPath::Checkpoint(first.clone()));
    check(&root.join("best"), GivenPath::Checkpoint(first.clone()));
    check(&run.join("best"), GivenPath::Checkpoint(first.clone()));
    check(&first.join(MODEL_FILE), GivenPath::Weights(first.join(MODEL_FILE)));
    let elsewhere = tempfile::tempdir().unwrap();
    for missing in [run.join("nothing"), elsewhere.path().into(), elsewhere.path().join("best")] {
        assert!(matches!(resolve(&missing), Err(CheckpointError::Missing { .. })), "{}", missing.display());
    }
    assert_eq!(load_at(run).unwrap().0.manifest.step, 2);
    assert_eq!(load_at(&run.join("best")).unwrap().0.manifest.step, 1);
    let weights_only = load_at(&first.join(MODEL_FILE)).unwrap_err().to_string();
    assert!(weights_only.contains("holds weights only"), "{weights_only}");
    assert!(matches!(latest_whole(elsewhere.path()), Err(CheckpointError::Missing { .. })));
    assert!(list(elsewhere.path()).unwrap().is_empty());
}

#[test]
fn buffers_come_back() {
    let (_run, mut store) = saved(&[], 2, None);
    assert!(store.take_buffers().is_empty());
    let first = snapshot(1, &[]);
    let places: Vec<*const f32> = first.shards.iter().map(|shard| shard.data.as_ptr()).collect();
    let arenas: Vec<Vec<f32>> = first.shards.iter().map(|shard| shard.data.clone()).collect();
    let layouts: Vec<Arc<[TensorAt]>> = first.shards.iter().map(|shard| shard.tensors.clone()).collect();
    store.save(first).unwrap();
    for step in 2..5 {
        let buffers = store.take_buffers();
        assert!(!store.is_busy());
        let mut next = snapshot(step, &[]);
        next.shards = (buffers.into_iter().zip(&arenas).zip(&layouts))
            .map(|((buffer, arena), at)| Shard::copy(MODEL_FILE, at.clone(), arena, buffer))
            .collect();
        next.shards[1].file = "optimizer.safetensors".into();
        assert_eq!(next.shards.iter().map(|shard| shard.data.as_ptr()).collect::<Vec<_>>(), places);
        store.save(next).unwrap();
    }
    store.finish().unwrap();
    assert_eq!(store.take_written().iter().map(|w| w.step).collect::<Vec<_>>(), [1, 2, 3, 4]);
}

#[test]
fn snapshots_that_no_file_can_hold_are_refused() {
    let of = |shards| Snapshot { shards, ..snapshot(2, &[]) };
    let model = || shard(MODEL_FILE, &[&[3]], |_| 0.0);
    let beyond = |dims: Vec<usize>, start| Shard {
        tensors: [TensorAt { name: "x".into(), dims, start }].into(),
        ..model()
    };
    let twice = Shard { tensors: [model().tensors[0].clone(), model().tensors[0].clone()].into(), ..model() };
    for (i, shards) in [
        vec![],
        vec![shard("optimizer.safetensors", &[], |_| 0.0)],
        vec![model(), model()],
        vec![model(), shard("../x.safetensors", &[], |_| 0.0)],
        vec![beyond(vec![4], 0)],
        vec![beyond(vec![1], usize::MAX)],
        vec![beyond(vec![usize::MAX, 2], 0)],
        vec![twice],
    ]
    .into_iter()
    .enumerate()
    {
        let (run, mut store) = saved(&[(1, 0.1)], 2, None);
        store.save(of(shards)).unwrap();
        let error = store.finish().unwrap_err();
        assert!(matches!(error, CheckpointError::Snapshot { .. }), "row {i}: {error}");
        assert_eq!(steps_in(run.path()), [1], "row {i}");
        save(&mut store, snapshot(3, &[]));
    }
}

#[test]
fn torch_files_are_read() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/torch.safetensors");
    let weights = read_weights(&path).unwrap();
    let ramp = |n: usize| (0..n).map(|i| (i as f32 - 3.0) / 4.0).collect::<Vec<f32>>();
    let edges = |bits: [u32; 6]| bits.map(f32::from_bits).to_vec();
    // Half's smallest and largest, bfloat16's, infinities, and a number that is no f32.
    let rows: [(&str, &[usize], Vec<f32>); 11] = [
        ("f64", &[2, 3], ramp(6)),
        ("f64.tenth", &[1], vec![0.1]),
        ("f32", &[2, 3], ramp(6)),
        ("f16", &[2, 3], ramp(6)),
        ("bf16", &[2, 3], ramp(6)),
        (
            "f16.edges",
            &[6],
            vec![2f32.powi(-24), 65504.0, f32::INFINITY, f32::NEG_INFINITY, -0.0, 2f32.powi(-14)],
        ),
        (
            "bf16.edges",
            &[6],
            edges([1 << 16, 0x7f7f << 16, 0x7f80 << 16, 0xff80 << 16, 0x8000 << 16, 0x80 << 16]),
        ),
        ("empty", &[0, 3], vec![]),
        ("scalar", &[], vec![2.5]),
        ("bn.running_mean", &[2], vec![0.0, 0.0]),
        ("bn.running_var", &[2], vec![1.0, 1.0]),
    ];
    let model: Vec<TensorShape> = rows
        .iter()
        .map(|(name, dims, _)| TensorShape { name: name.to_string(), dims: dims.to_vec() })
        .collect();
    let matched = match_weights(&model, weights, &path).unwrap();
    for ((name, _, want), got) in rows.iter().zip(&matched) {
        assert_eq!(bits(want), bits(&got.data), "{name}");
    }
}

#[test]
fn weights_are_written_as_torch_wants_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    fs::write(&path, "the old file").unwrap();
    let view = |name, data| View { name, dims: &[2], dtype: DType::F32, data };
    let tensors = [view("bn.running_mean", &[1.0, 2.0][..]), view("bn.weight", &[3.0, 4.0])];
    write_weights(&path, &tensors, Some(70)).unwrap();
    let bytes = fs::read(&path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let counter = file.tensor("bn.num_batches_tracked").unwrap();
    assert_eq!(
        (counter.dtype(), counter.shape(), counter.data()),
        (safetensors::Dtype::I64, &[][..], &70i64.to_le_bytes()[..])
    );
    assert_eq!(file.len(), 3);
    let (_, about) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(about.metadata().as_ref().unwrap()["format"], "pt");
    let got: Vec<Weight> = read_weights(&path).unwrap();
    assert_eq!(got.iter().map(Weight::view).collect::<Vec<_>>(), tensors);
    write_weights(&path, &tensors, None).unwrap();
    assert_eq!(safetensors::SafeTensors::deserialize(&fs::read(&path).unwrap()).unwrap().len(), 2);
    let wrong = write_weights(&path, &[view("x", &[1.0][..])], None).unwrap_err();
    assert!(matches!(wrong, CheckpointError::Snapshot { .. }), "{wrong}");
    assert_eq!(read_weights(&path).unwrap().len(), 2, "the old file stays");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside it");
}

/// Numbers of several types, over several blocks of a file: larger ones first, so that each is aligned and none is cut.
#[test]
fn weights_in_half_are_rounded_once_and_read_back_as_they_were_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let numbers = |n: usize, seed: usize| -> Vec<f32> {
        (0..n).map(|i| ((i * 7919 + seed * 104_729) % 65_521) as f32 / 65_521.0 - 0.5).collect()
    };
    let rows = [
        ("a", DType::Bf16, numbers(70_001, 1)),
        ("bn.running_mean", DType::F32, numbers(40_003, 2)),
        ("c", DType::F16, numbers(3, 3)),
        ("d", DType::F64, numbers(9_001, 4)),
        ("e", DType::Bf16, numbers(50_000, 5)),
        ("none", DType::Bf16, vec![]),
        // A tie goes to the even one; beyond the range is infinite.
        (
            "ties",
            DType::Bf16,
            [0x3f80_8000, 0x3f81_8000, 0x3f80_8001, 0x7f7f_ffff].map(f32::from_bits).to_vec(),
        ),
    ];
    let dims = rows.each_ref().map(|(_, _, data)| [data.len()]);
    let views: Vec<View> = rows
        .iter()
        .zip(&dims)
        .map(|((name, dtype, data), dims)| View { name, dims, dtype: *dtype, data })
        .collect();
    write_weights(&path, &views, Some(3)).unwrap();
    let bytes = fs::read(&path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let got: Vec<Weight> = read_weights(&path).unwrap();
    assert_eq!(file.len(), rows.len() + 1);
    for (name, dtype, data) in &rows {
        let weight = got.iter().find(|w| w.name == *name).unwrap();
        let round = |x: &f32| match dtype {
            DType::Bf16 => bf16::from_f32(*x).to_f32(),
            DType::F16 => f16::from_f32(*x).to_f32(),
            _ => *x,
        };
        let want: Vec<f32> = data.iter().map(round).collect();
        assert!(bits(&want) == bits(&weight.data), "{name}");
        assert_eq!(
            (weight.dtype, file.tensor(name).unwrap().dtype().to_string()),
            (*dtype, dtype.safetensors_name().into())
        );
        let mut rounded = data.clone();
        tensors::round(*dtype, &mut rounded);
        assert!(bits(&want) == bits(&rounded), "{name}");
        let at = file.tensor(name).unwrap().data().as_ptr() as usize - bytes.as_ptr() as usize;
        assert!(at.is_multiple_of(dtype.bytes()), "{name} begins at byte {at}");
    }
    let ties = &got.iter().find(|w| w.name == "ties").unwrap().data;
    assert_eq!(bits(ties), [0x3f80_0000, 0x3f82_0000, 0x3f81_0000, 0x7f80_0000]);
    let integers =
        write_weights(&path, &[View { name: "x", dims: &[0], dtype: DType::I32, data: &[] }], None);
    assert!(integers.unwrap_err().to_string().contains("cannot be written as i32"));
}

#[test]
fn files_that_are_no_weights_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let check = |header: &str, data: &[u8], want: &str| {
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat();
        fs::write(&path, bytes).unwrap();
        let error = read_weights(&path).unwrap_err().to_string();
        assert!(error.contains(want), "{error}");
    };
    check("{", b"", "the header is damaged");
    check(r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#, &[0; 7], "cut off?");
    check(r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#, &[0; 8], "the header is damaged");
    check(r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#, &[0; 12], "the header is damaged");
    check(
        r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}}"#,
        &[0; 8],
        "the header is damaged",
    );
    check(
        r#"{"a":{"dtype":"F8_E4M3","shape":[8],"data_offsets":[0,8]}}"#,
        &[0; 8],
        "tensor a has type F8_E4M3",
    );
    fs::write(&path, [0xff; 16]).unwrap();
    assert!(read_weights(&path).unwrap_err().to_string().contains("not a safetensors file, or cut off"));
    assert!(matches!(read_weights(folder.path()), Err(CheckpointError::Missing { .. })));
    assert!(matches!(read_weights(&folder.path().join("no")), Err(CheckpointError::Missing { .. })));
}
