//! Ranks of different speed, which tests of whole runs cannot bring about; and what is said before a run.

use std::path::Path;

use polyreme_collective::Comm;
use polyreme_parallel::buckets::PART_ALIGN;

use super::prepared::{Given, Prepared};
use super::train::Run;
use crate::event::{Event, Observer, Silent};
use crate::job::{Elastic, Job, Length};

/// Remembers how samples were shared out, and whether this rank was too slow.
#[derive(Default)]
struct Notes(Vec<String>);

impl Observer for Notes {
    fn event(&mut self, event: Event<'_>) {
        if let Event::Balanced { step, why } = event {
            self.0.push(format!("{step}: {why}"));
        }
        if let Event::TooSlow = event {
            self.0.push("too slow".into());
        }
    }
}

fn job() -> Job {
    let lines = "[model]\nkind = \"mlp\"\nhidden = [8]\n[data]\nkind = \"synthetic\"\nsamples = 300\n[train]\n\
                 batch = 30\nsteps = 500\n[parallel]\nranks = 2\nbalance = \"auto\"\n[output]\ntensorboard = false\n";
    Job::from_text(lines, "job.toml", Path::new("/"), &[]).unwrap()
}

#[test]
fn a_slow_rank_gets_fewer_samples_from_the_next_step_on() {
    let folder = tempfile::tempdir().unwrap();
    let prepared = Prepared::new(job(), Given::default(), 1).unwrap();
    let rank = |comm: Comm| {
        let (mut notes, rank) = (Notes::default(), comm.rank());
        let mut run = Run::new(prepared.clone(), comm, 2, None).unwrap();
        run.open(&folder.path().join("run"), None, None).unwrap();
        // Rank 1 takes twice as long for a sample, and then for a while rank 0 does.
        let mut look = |run: &mut Run, step: u64, seconds: [f64; 2]| {
            let pulse = run.pulse.as_mut().unwrap();
            (0..20).for_each(|_| pulse.timings.note(10, 10.0 * seconds[rank]));
            run.rebalance(step, &mut notes).unwrap()
        };
        assert!(!look(&mut run, 20, [1.0, 2.0]), "one look may mislead");
        assert!(look(&mut run, 40, [1.0, 2.0]));
        assert_eq!(run.prepared.cut.weights, [20.0, 10.0]);
        assert_eq!(run.part.lengths(), [[20], [10]][rank]);
        for step in [60, 80, 100] {
            assert!(!look(&mut run, step, [1.0, 2.0]), "they are as fast as they were");
        }
        assert!(!look(&mut run, 120, [2.0, 1.0]), "one look may mislead");
        assert!(look(&mut run, 140, [2.0, 1.0]));
        assert_eq!(run.part.lengths(), [[15], [15]][rank], "half as much again, for a trial");
        assert!(look(&mut run, 160, [2.0, 1.0]));
        assert_eq!(run.part.lengths(), [[10], [20]][rank]);
        run.prepared.job.train.length = Length::Steps(15);
        let summary = run.train(&mut Silent, false).unwrap().unwrap();
        assert_eq!(summary.steps, 15);
        notes.0
    };
    let notes = std::thread::scope(|s| {
        let ranks: Vec<_> = Comm::local(2).into_iter().map(|comm| s.spawn(|| rank(comm))).collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect::<Vec<_>>()
    });
    let want = [
        "40: ranks take 20, 10 samples a step from now on, by their speed; that wins 33 %",
        "160: ranks take 10, 20 samples a step from now on, by their speed; that wins 33 %",
    ];
    assert_eq!(notes[0], want);
}

#[test]
fn a_rank_that_is_too_slow_is_told_to_leave_unless_too_few_would_be_left() {
    let notes = |min: usize| {
        let folder = tempfile::tempdir().unwrap();
        let prepared = Prepared::new(job(), Given::default(), 1).unwrap();
        let rank = |comm: Comm| {
            let (mut notes, rank) = (Notes::default(), comm.rank());
            let mut run = Run::new(prepared.clone(), comm, 2, None).unwrap();
            run.open(&folder.path().join("run"), None, None).unwrap();
            run.prepared.job.parallel.elastic =
                Some(Elastic { min, max: 2, leave_out: Some(1.9), store: None });
            for step in [20, 40] {
                let pulse = run.pulse.as_mut().unwrap();
                (0..20).for_each(|_| pulse.timings.note(10, [10.0, 20.0][rank]));
                run.rebalance(step, &mut notes).unwrap();
            }
            notes.0.retain(|note| note.contains("slow"));
            notes.0
        };
        std::thread::scope(|s| {
            let ranks: Vec<_> = Comm::local(2).into_iter().map(|comm| s.spawn(|| rank(comm))).collect();
            ranks.into_iter().map(|r| r.join().unwrap()).collect::<Vec<_>>()
        })
    };
    assert_eq!(notes(1), [vec!["40: rank 1 is too slow, and leaves"], vec!["too slow"]]);
    assert_eq!(notes(2), [[""; 0]; 2]);
}

/// Twice as large a batch in twice as many microbatches takes the same, and the sums of the microbatches.
#[test]
fn the_outline_counts_the_sums_of_microbatches_and_shards() {
    let outline = |batch: usize, accumulate: usize, shard_gradients: bool| {
        let mut job = job();
        (job.train.batch, job.train.accumulate) = (batch, accumulate);
        job.parallel.shard_gradients = shard_gradients;
        Prepared::new(job, Given::default(), 1).unwrap().outline(Path::new("/"), 0).unwrap()
    };
    let (whole, cut) = (outline(30, 1, false), outline(60, 2, false));
    let more = (cut.memory_mib - whole.memory_mib) * f64::from(1 << 20);
    // Gradients of both ranks; tensors begin at whole lines.
    let (least, most) = (2 * 4 * whole.params, 2 * 4 * (whole.params + 4 * 16));
    assert!((least as f64..=most as f64).contains(&more), "{more} bytes more for {} weights", whole.params);
    // A logical shard on each rank: its sums, what is sent of them, and what comes from both.
    let mut shards = job();
    (shards.parallel.reproducible, shards.parallel.shards) = (true, 2);
    let shards = Prepared::new(shards, Given::default(), 1).unwrap().outline(Path::new("/"), 0).unwrap();
    let more = (shards.memory_mib - whole.memory_mib) * f64::from(1 << 20);
    // The larger part of what comes may be longer than half of it by a block.
    let (least, most) = (3 * least, 3 * most + 2 * 2 * 4 * PART_ALIGN);
    assert!((least as f64..=most as f64).contains(&more), "{more} bytes more for shards");
    assert_eq!(outline(30, 1, true).memory_mib, outline(60, 2, true).memory_mib);
}
