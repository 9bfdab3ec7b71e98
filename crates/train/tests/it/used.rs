//! Trained models in use on meshes against one rank: scores, predictions and text, and what each rank holds of the weights.

use std::path::Path;
use std::sync::Arc;

use polyreme_collective::Comm;
use polyreme_data::{Augment, Dataset, Layout, Tokenizer, Transform};
use polyreme_parallel::Plan;
use polyreme_train::TrainError;
use polyreme_train::evaluate::evaluate;
use polyreme_train::generate::{NextToken, Sampling, generate};
use polyreme_train::job::ParallelSpec;
use polyreme_train::judge::block_samples;
use polyreme_train::predict::Predictor;
use polyreme_train::run::{Given, Prepared};
use polyreme_train::trained::{CheckpointNote, Trained};

use crate::mesh::{MeshCase, cases, train};

/// Ranks along the data, tensor, stage and sequence axes; and whether those of the data axis shard the weights.
type UsedMesh = ([usize; 4], bool);

/// Meshes for every model.
const MESHES: [UsedMesh; 9] = [
    ([2, 1, 1, 1], false),
    ([3, 1, 1, 1], false),
    ([1, 2, 1, 1], false),
    ([1, 1, 2, 1], false),
    ([1, 1, 4, 1], false),
    ([1, 2, 2, 1], false),
    ([2, 2, 2, 1], false),
    ([2, 1, 1, 1], true),
    ([2, 1, 2, 1], true),
];

/// And for those that read sequences.
const SEQUENCES: [UsedMesh; 3] = [([1, 1, 1, 2], false), ([1, 1, 2, 2], false), ([2, 1, 1, 2], false)];

fn spec(([data, tensor, stage, sequence], shard_weights): UsedMesh) -> ParallelSpec {
    ParallelSpec { data: Some(data), tensor, stage, sequence, shard_weights, ..ParallelSpec::default() }
}

/// A model that was trained on one rank, in a folder that lives as long.
struct UsedCase {
    case: MeshCase,
    trained: Trained,
    prepared: Prepared,
    /// The set that is evaluated and predicted.
    set: Arc<dyn Dataset>,
    _folder: tempfile::TempDir,
}

fn used(name: &str) -> UsedCase {
    let folder = tempfile::tempdir().unwrap();
    let case = cases(folder.path()).into_iter().find(|case| case.name == name).unwrap();
    let run = folder.path().join("run");
    train(&case, "", "", 1, &run);
    let trained = Trained::open(&run, &Given::default()).unwrap();
    let given = Given { sets: case.given.clone(), ..Given::default() };
    let job = trained.job.clone();
    let mut prepared = Prepared::to_use(job, given, 1, trained.preparation()).unwrap();
    prepared.stats = trained.preparation().stats();
    let sets = &prepared.sets;
    let set = sets.test.as_ref().or(sets.validation.as_ref()).unwrap_or(&sets.train).clone();
    UsedCase { case, trained, prepared, set, _folder: folder }
}

/// What `work` gives on each rank of a mesh. Other processes than rank 0's know the model by its note alone, so other
/// ranks do here.
fn on_mesh<T: Send>(
    trained: &Trained,
    plan: &Plan,
    work: impl Fn(&Trained, Comm) -> Result<T, TrainError> + Sync,
) -> Vec<T> {
    let bytes = trained.note.to_bytes().unwrap();
    std::thread::scope(|s| {
        let rank = |comm: Comm| {
            let (work, bytes) = (&work, &bytes);
            s.spawn(move || match comm.rank() {
                0 => work(trained, comm),
                _ => {
                    let note = CheckpointNote::from_bytes(bytes).unwrap();
                    work(&Trained::noted(note, &Given::default()).unwrap(), comm)
                }
            })
        };
        let ranks: Vec<_> = Comm::local(plan.mesh.ranks()).into_iter().map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap().unwrap()).collect()
    })
}

fn scores(used: &UsedCase, mesh: UsedMesh) -> Vec<Vec<(String, f64)>> {
    let (trained, set) = (&used.trained, &used.set);
    let n = block_samples(trained.net(), set.spec()).unwrap().min(10);
    let parallel = spec(mesh);
    let plan = trained.plan(set.spec(), n, &parallel, parallel.asked_ranks().unwrap()).unwrap();
    let transform = used.prepared.plain_transform(set.as_ref()).unwrap();
    on_mesh(trained, &plan, |trained, comm| {
        let mut judge = trained.judge(set.spec(), n, &plan, 1, comm)?;
        let scores = evaluate(&mut judge, set, &transform, 1, &vec![1.0; plan.ranks()])?;
        judge.leave().finish()?;
        Ok(scores.named("test"))
    })
}

/// Logits of all samples on each rank, and bytes of the parameters that it has.
fn predictions(used: &UsedCase, mesh: UsedMesh) -> Vec<(Vec<f32>, usize)> {
    let (trained, set) = (&used.trained, &used.set);
    let parallel = spec(mesh);
    // The last round is short, and with several data ranks some have nothing to do in it.
    let n = 7;
    let plan = trained.plan(set.spec(), n, &parallel, parallel.asked_ranks().unwrap()).unwrap();
    let stats = trained.preparation().stats();
    let transform = Transform::new(set.spec(), stats.as_ref(), Augment::default()).unwrap();
    on_mesh(trained, &plan, |trained, comm| {
        let mut predictor = Predictor::new(trained, set.spec(), n, &plan, 1, comm)?;
        let mut all = Vec::new();
        predictor.logits(set, &transform, &mut |row| {
            all.extend_from_slice(row);
            Ok(())
        })?;
        let bytes = predictor.engine().held().params;
        predictor.leave().finish()?;
        Ok((all, bytes))
    })
}

/// Whether ranks compute in the order of one rank.
fn same_bits(([_, tensor, _, sequence], _): UsedMesh) -> bool {
    tensor == 1 && sequence == 1
}

fn check_scores(used: &UsedCase, meshes: &[UsedMesh]) {
    let one = scores(used, ([1; 4], false)).remove(0);
    for &mesh in meshes {
        for (rank, many) in scores(used, mesh).into_iter().enumerate() {
            for ((name, a), (other, b)) in one.iter().zip(&many) {
                let bound = if same_bits(mesh) { 0.0 } else { 1e-5 * a.abs() };
                let what = format!("{}, {mesh:?}, rank {rank}", used.case.name);
                assert!(name == other && (a - b).abs() <= bound, "{what}: {name} is {b} and not {a}");
            }
        }
    }
}

fn check_predictions(used: &UsedCase, meshes: &[UsedMesh]) {
    let (one, whole) = predictions(used, ([1; 4], false)).remove(0);
    let classes = used.set.spec().outputs();
    assert_eq!(one.len(), used.set.len() * classes);
    let best = |row: &[f32]| (0..classes).max_by(|&a, &b| row[a].total_cmp(&row[b]));
    let largest = one.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
    for &mesh in meshes {
        for (rank, (many, bytes)) in predictions(used, mesh).into_iter().enumerate() {
            let what = format!("{}, {mesh:?}, rank {rank}", used.case.name);
            assert_eq!(one.len(), many.len(), "{what}");
            let bound = if same_bits(mesh) { 0.0 } else { 1e-5 * largest };
            let far = one.iter().zip(&many).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(far <= bound, "{what}: {far} of {largest}");
            let labels = |all: &[f32]| all.chunks(classes).map(best).collect::<Vec<_>>();
            assert_eq!(labels(&one), labels(&many), "{what}");
            let ([_, tensor, stage, sequence], shards) = mesh;
            // Ranks of the data axis that share memory have one copy of the weights, which the first of them counts.
            let counts = shards || rank < tensor * stage * sequence;
            assert!(if counts { 0 < bytes && bytes <= whole } else { bytes == 0 }, "{what}: {bytes}");
        }
    }
}

#[test]
fn an_mlp_is_used_on_meshes() {
    let used = used("mlp");
    check_scores(&used, &MESHES);
    check_predictions(&used, &MESHES);
}

#[test]
fn a_cnn_is_used_on_meshes() {
    let used = used("cnn");
    check_scores(&used, &MESHES);
    check_predictions(&used, &MESHES);
}

#[test]
fn an_lstm_is_used_on_meshes() {
    let used = used("lstm");
    check_scores(&used, &[&MESHES[..], &SEQUENCES].concat());
    check_predictions(&used, &[&MESHES[..], &SEQUENCES].concat());
}

#[test]
fn an_encoder_is_used_on_meshes() {
    let used = used("encoder");
    check_scores(&used, &[&MESHES[..], &SEQUENCES].concat());
    check_predictions(&used, &[&MESHES[..], &SEQUENCES].concat());
}

/// The tokens that each rank of a mesh draws, greedily and from a seed, and bytes of the parameters that it has.
fn written(used: &UsedCase, mesh: UsedMesh) -> Vec<([Vec<i32>; 3], usize)> {
    let trained = &used.trained;
    let parallel = spec(mesh);
    let plan = NextToken::plan(trained, &parallel, parallel.asked_ranks().unwrap()).unwrap();
    let tokenizer = Tokenizer::bytes();
    on_mesh(trained, &plan, |trained, comm| {
        let mut next = NextToken::new(trained, &plan, 1, comm)?;
        let greedy = Sampling { length: 30, temperature: 0.0, top: 0, seed: 0 };
        let seeded = Sampling { temperature: 0.8, seed: 7, ..greedy };
        // A prompt that grows beyond the context, one that has more already, and none.
        let mut write = |prompt: &str, how| generate(&mut next, &tokenizer, prompt, how, &mut |_| ());
        let texts =
            [write("rank", greedy)?, write("the mesh of a stage of data", seeded)?, write("", seeded)?];
        let bytes = next.engine().held().params;
        next.leave().finish()?;
        Ok((texts, bytes))
    })
}

#[test]
fn a_gpt_is_used_on_meshes() {
    let used = used("gpt");
    check_scores(&used, &[&MESHES[..], &SEQUENCES].concat());
    let (one, whole) = written(&used, ([1; 4], false)).remove(0);
    assert!(one.iter().all(|text| text.len() == 30) && one[0] != one[1]);
    let copies = |([data, ..], shards): &UsedMesh| *data > 1 && !shards;
    for mesh in MESHES.into_iter().chain(SEQUENCES).filter(|mesh| !copies(mesh)) {
        for (rank, (many, bytes)) in written(&used, mesh).into_iter().enumerate() {
            assert_eq!(one, many, "{mesh:?}, rank {rank}");
            if mesh.0 == [1, 2, 2, 1] {
                // Norms and some biases are on both tensor ranks.
                let share = bytes as f64 / whole as f64;
                println!("rank {rank} of tensor 2, stage 2 has {share:.3} of {whole} bytes of weights");
                assert!((0.22..0.3).contains(&share), "rank {rank} of tensor 2, stage 2 has {share}");
            }
        }
    }
}

#[test]
fn what_cannot_be_is_said_before_anything_is_started() {
    let used = used("gpt");
    let said = |parallel: ParallelSpec, ranks: usize| {
        NextToken::plan(&used.trained, &parallel, ranks).unwrap_err().to_string()
    };
    let check = |parallel: ParallelSpec, ranks: usize, words: &[&str]| {
        let said = said(parallel, ranks);
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
    };
    let spec = ParallelSpec::default;
    check(ParallelSpec { tensor: 2, ..spec() }, 3, &["tensor = 2", "use 2 or 4 ranks", "parallel.tensor=1"]);
    check(ParallelSpec { tensor: 3, ..spec() }, 3, &["8 attention heads", "tensor = 3"]);
    check(ParallelSpec { sequence: 3, ..spec() }, 3, &["6 equal pieces", "16 positions"]);
    check(ParallelSpec { stage: 200, ..spec() }, 200, &["200"]);
    check(ParallelSpec { tensor: 2, ..spec() }, 4, &["2 copies of the model", "use 2 ranks"]);
    let spec = used.trained.preparation().spec(Layout::Planes);
    assert!(used.trained.plan(&spec, 2, &ParallelSpec::default(), 4).is_ok(), "copies can be evaluated");
    assert!(Path::new(&used.trained.note.path).exists());
}
