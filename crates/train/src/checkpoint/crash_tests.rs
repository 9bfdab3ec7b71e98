//! The power is cut at every moment of a checkpoint, of `keep`, of `best`, of going back, and of the model's file. And the
//! check itself is checked: it finds the mistakes that a store could make.

use std::collections::{BTreeMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use polyreme_dtype::DType;

use super::crash::{Bug, Fate, Left, Model, Record, build};
use super::disk::Faults;
use super::tests::snapshot;
use super::*;
use crate::weights::{View, read_weights, write_weights_on};

const METRIC: &str = "val_accuracy";

/// A folder in memory where there is one: thousands of files are written here.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// What is saved, and which step is then the best: 2 is saved again, 1 and 3 go by `keep`, 2 goes when 5 is better.
const SAVES: [(u64, f64, u64); 6] =
    [(1, 0.5, 1), (2, 0.7, 2), (2, 0.6, 2), (3, 0.1, 2), (4, 0.2, 2), (5, 0.9, 5)];

/// A run that saves, goes back, and saves again; what its disk was asked to do.
fn journal(base: &Path) -> Vec<Record> {
    let faults = Arc::new(Faults::default());
    let say = |newest, best| faults.journal.lock().unwrap().push(Record::Said(newest, best));
    let lock = Lock::take_on(Disk::with_faults(faults.clone()), &base.join("run")).unwrap();
    let mut store = Store::open_held(lock, 2, Some(METRIC.into())).unwrap();
    let save = |store: &mut Store, step, value| {
        store.save(snapshot(step, &[(METRIC, value)])).unwrap();
        store.finish().unwrap();
    };
    for (step, value, best) in SAVES {
        save(&mut store, step, value);
        say(step, best);
    }
    say(4, 5);
    store.go_back(4, &[]).unwrap();
    say(4, 4);
    save(&mut store, 5, 0.05);
    say(5, 4);
    save(&mut store, 6, 0.3);
    say(6, 6);
    let journal = std::mem::take(&mut *faults.journal.lock().unwrap());
    assert!(journal.len() > 120, "{}", journal.len());
    journal
}

/// What may become of `n` changes: all ways if they are few, and otherwise the extreme ones and some by chance.
fn fates(n: usize, seed: u64) -> Vec<Vec<Fate>> {
    let of = |keep: &dyn Fn(usize) -> bool| -> Vec<Fate> {
        (0..n).map(|i| if keep(i) { Fate::Kept } else { Fate::Lost }).collect()
    };
    let mut all: Vec<Vec<Fate>> = vec![vec![Fate::Half; n]];
    if n <= 5 {
        all.extend((0..1u32 << n).map(|bits| of(&|i| bits >> i & 1 == 1)));
        return all;
    }
    all.extend([of(&|_| true), of(&|_| false)]);
    all.extend((0..n).flat_map(|one| [of(&|i| i == one), of(&|i| i != one)]));
    let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for _ in 0..16 {
        all.push(of(&|i| random >> (i % 64) & 1 == 1));
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
    }
    all
}

/// What must hold of a folder, by what was said before (newest and best step) and is said next.
type CrashCheck<'a> = dyn Fn(&Path, (u64, u64), (u64, u64)) -> Result<(), String> + 'a;

/// Cuts the power after every record, in every way that [`fates`] has, and checks what is left. Gives how many
/// different disks there were.
fn cut_everywhere(
    base: &Path,
    journal: &[Record],
    bug: Option<Bug>,
    check: &CrashCheck<'_>,
) -> Result<usize, String> {
    let mut model = Model::new(base, bug);
    let (mut said, mut seen) = ((0, 0), HashSet::new());
    for (at, record) in journal.iter().enumerate() {
        model.apply(record);
        if let Record::Said(newest, best) = record {
            said = (*newest, *best);
        }
        let next = journal[at + 1..].iter().find_map(|record| match record {
            Record::Said(newest, best) => Some((*newest, *best)),
            _ => None,
        });
        for fates in fates(model.n_pending(), at as u64) {
            let left: BTreeMap<PathBuf, Option<Left>> = model.after_cut(&fates);
            let mut hasher = DefaultHasher::new();
            (&left, said, next).hash(&mut hasher);
            if seen.insert(hasher.finish()) {
                let disk = folder();
                build(&left, disk.path());
                check(disk.path(), said, next.unwrap_or(said))
                    .map_err(|why| format!("cut after record {at} ({record:.200?}), {fates:?}: {why}"))?;
            }
        }
    }
    Ok(seen.len())
}

/// Whatever has a real name is whole, what was said to be saved is there, and the run goes on.
fn check_run(base: &Path, said: (u64, u64), next: (u64, u64)) -> Result<(), String> {
    let run = base.join("run");
    let entries = list(&run).map_err(|e| e.to_string())?;
    for entry in &entries {
        let loaded = load(&entry.path).map_err(|e| format!("{} is not whole: {e}", entry.path.display()))?;
        let weights = read_weights(&loaded.path.join(MODEL_FILE)).map_err(|e| e.to_string())?;
        let first = weights[0].data.first().copied();
        let want = snapshot(entry.step, &[]).shards[0].data[0];
        if (loaded.manifest.step, first) != (entry.step, Some(want)) {
            return Err(format!("{} has the content of another", entry.path.display()));
        }
    }
    let newest = entries.last().map_or(0, |entry| entry.step);
    if newest < said.0 {
        return Err(format!("step {} was saved, and {newest} is the newest", said.0));
    }
    let best = best(&run).map_err(|e| e.to_string())?;
    let best = best.map(|path| load(&path).map(|loaded| loaded.manifest.step).map_err(|e| e.to_string()));
    let best = best.transpose()?;
    if said.0 > 0 && !best.is_some_and(|step| step == said.1 || step == next.1) {
        return Err(format!("the best is {best:?}, and not {} or {}", said.1, next.1));
    }
    // What the run went back behind is there, under its old name or the new one.
    if said == (4, 5) || said == (4, 4) || said.0 == 6 {
        let aside = [(5, "aside-step-00000005"), (5, "step-00000005")];
        let there = |(step, name): (u64, &str)| {
            load(&run.join("checkpoints").join(name)).is_ok_and(|loaded| loaded.manifest.step == step)
        };
        if !aside.into_iter().any(there) {
            return Err("what the run went back behind is gone".into());
        }
    }
    let mut store = Store::open(&run, 2, Some(METRIC.into())).map_err(|e| e.to_string())?;
    store.save(snapshot(9, &[(METRIC, 1.0)])).and_then(|()| store.finish()).map_err(|e| e.to_string())?;
    let (loaded, skipped) = latest_whole(&run).map_err(|e| e.to_string())?;
    if (loaded.manifest.step, skipped.len()) != (9, 0) {
        return Err(format!("the next run saved step 9, and {} is there", loaded.manifest.step));
    }
    Ok(())
}

#[test]
fn a_power_cut_at_any_moment_leaves_a_run_that_goes_on() {
    let base = folder();
    let journal = journal(base.path());
    let n = cut_everywhere(base.path(), &journal, None, &check_run).unwrap_or_else(|why| panic!("{why}"));
    assert!(n > 200, "only {n} different disks");
}

#[test]
fn a_forgotten_or_late_sync_is_found() {
    let base = folder();
    let journal = journal(base.path());
    for bug in [
        Bug::NoSync("manifest.json"),
        Bug::NoSync("model.safetensors"),
        Bug::NoSync("optimizer.safetensors"),
        Bug::NoSyncDir(".writing-"),
        Bug::NoSyncDir("checkpoints"),
        Bug::NoSyncDir("run"),
        Bug::RenameFirst,
        Bug::RemoveFirst,
    ] {
        let found = cut_everywhere(base.path(), &journal, Some(bug), &check_run);
        let why = found.err().unwrap_or_else(|| panic!("{bug:?} is not found"));
        eprintln!("{bug:?}: {why:.300}");
    }
}

/// Files that are replaced: the old one or the new one is there.
#[test]
fn a_power_cut_leaves_the_old_model_or_the_new_one() {
    let base = folder();
    let faults = Arc::new(Faults::default());
    let disk = Disk::with_faults(faults.clone());
    let (model, job) = (base.path().join("model.safetensors"), base.path().join("job.toml"));
    let numbers: Vec<f32> = (0..200_000).map(|i| i as f32).collect();
    for (step, n) in [(1, 10), (2, numbers.len())] {
        let view = View { name: "x", dims: &[n], dtype: DType::F32, data: &numbers[..n] };
        write_weights_on(&disk, &model, &[view], None).unwrap();
        disk.write_whole(&job, format!("step = {step}").repeat(9).as_bytes()).unwrap();
        faults.journal.lock().unwrap().push(Record::Said(step, 0));
    }
    let journal = std::mem::take(&mut *faults.journal.lock().unwrap());
    let check = |base: &Path, said: (u64, u64), next: (u64, u64)| {
        let lens = [0, 10, numbers.len()];
        let allowed = [said.0, next.0];
        let model = match base.join("model.safetensors") {
            path if path.exists() => read_weights(&path).map_err(|e| e.to_string())?[0].data.len(),
            _ => 0,
        };
        let job = std::fs::read_to_string(base.join("job.toml")).unwrap_or_default();
        let job_is =
            |step: u64| job == if step == 0 { String::new() } else { format!("step = {step}").repeat(9) };
        let model_is = |step: u64| model == lens[step as usize];
        match allowed.into_iter().any(job_is) && allowed.into_iter().any(model_is) {
            true => Ok(()),
            false => Err(format!("{model} numbers and {job:?} where steps {allowed:?} are possible")),
        }
    };
    cut_everywhere(base.path(), &journal, None, &check).unwrap_or_else(|why| panic!("{why}"));
    for bug in [Bug::NoSync(""), Bug::NoSyncDir(""), Bug::RenameFirst] {
        assert!(cut_everywhere(base.path(), &journal, Some(bug), &check).is_err(), "{bug:?} is not found");
    }
}
