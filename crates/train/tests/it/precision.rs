//! Runs with activations in half precision: they learn as runs in f32 do, and in f16 they find the scale of the loss.

use polyreme_exec::{Isa, KernelClass};
use polyreme_train::run::{Given, Prepared, Progress};
use polyreme_train::{TrainError, checkpoint};

use crate::runs::{Outcome, job, run};

const OUTPUT: &str = "[output]\ntensorboard = false\nevery_epochs = 0\n";
const ROWS: &str = "[data]\nkind = \"synthetic\"\nsamples = 400\nshape = [20]\nclasses = 5\nnoise = 0.6\n";
const MLP: &str = "[model]\nkind = \"mlp\"\nhidden = [64, 48]\n";
const IMAGES: &str =
    "[data]\nkind = \"synthetic\"\nsamples = 300\nshape = [3, 16, 16]\nclasses = 4\nnoise = 0.8\n";
/// Convolutions, a batch norm with running statistics, and a pool.
const CONVS: &str = "[model]\nkind = \"layers\"\ninput = [3, 16, 16]\nlayers = [\
    { kind = \"conv\", outputs = 16, kernel = 3, padding = 1 }, \"batch_norm\", \"relu\", \
    { kind = \"max_pool\", kernel = 2 }, { kind = \"conv\", outputs = 24, kernel = 3 }, \"relu\", \"flatten\", \
    { kind = \"linear\" }]\n";

/// Two recurrent layers and causal attention, over text.
const SEQUENCES: &str = "[model]\nvocab = 256\ncontext = 40\nlayers = [{ kind = \"embedding\", width = 12 }, \
    { kind = \"lstm\", hidden = 20 }, { kind = \"gru\", hidden = 24 }, \
    { kind = \"attention\", heads = 3, causal = true }, { kind = \"linear\" }]\n";

fn trained(lines: &str, ranks: usize) -> Result<Outcome, TrainError> {
    let folder = tempfile::tempdir().unwrap();
    run(&job(lines), Given::default(), ranks, &folder.path().join("run"), None)
}

fn bits(outcome: &Outcome) -> Vec<u32> {
    assert!(!outcome.weights.is_empty());
    outcome.weights.iter().flat_map(|(_, data)| data.iter().map(|x| x.to_bits())).collect()
}

#[test]
fn half_precision_learns_as_f32_does() {
    for (model, data) in [(MLP, ROWS), (CONVS, IMAGES)] {
        for ranks in [1, 2] {
            let of = |precision: &str| {
                let train = format!("[train]\nsteps = 60\nbatch = 40\nprecision = \"{precision}\"\n");
                let outcome = trained(&format!("{model}{data}{train}{OUTPUT}"), ranks).unwrap();
                let last = &outcome.watcher.losses[50..];
                last.iter().sum::<f64>() / last.len() as f64
            };
            let want = of("f32");
            for precision in ["bf16", "f16"] {
                let got = of(precision);
                assert!(
                    (got - want).abs() <= 0.03 * want.max(0.1),
                    "{precision}: {got}, f32: {want}\n{model}"
                );
            }
        }
    }
}

#[test]
fn reproducible_runs_in_bf16_are_the_same_on_any_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("text");
    let text: String = (0u32..9000).map(|i| char::from(b'a' + (i * i / 7 % 23) as u8)).collect();
    std::fs::write(&path, text).unwrap();
    let text = format!("[data]\nkind = \"text\"\npath = \"{}\"\n", path.display());
    for (model, data) in [(MLP, ROWS), (CONVS, IMAGES), (SEQUENCES, &text)] {
        let train = "[train]\nsteps = 10\nbatch = 40\nprecision = \"bf16\"\n";
        let lines = format!("{model}{data}{train}{OUTPUT}[parallel]\nreproducible = true\nshards = 8\n");
        let want = bits(&trained(&lines, 1).unwrap());
        for ranks in [2, 3] {
            assert!(bits(&trained(&lines, ranks).unwrap()) == want, "{ranks} ranks\n{lines}");
        }
    }
}

/// Large enough for products of pairs to pay, in steps and in evaluations.
const WIDE: &str = "[model]\nkind = \"mlp\"\nhidden = [128, 96]\n[data]\nkind = \"synthetic\"\nsamples = 640\n\
                    shape = [64]\nclasses = 5\nnoise = 2.0\nvalidation = 0.4\n\
                    [train]\nsteps = 8\nbatch = 128\nevaluate_every = 4\nprecision = \"bf16\"\n";
const SAME_BITS: &str = "[parallel]\nreproducible = true\nshards = 2\n";

fn with(words: &str) -> Given {
    Given { isa: Isa::detect().limited(words).unwrap(), ..Given::default() }
}

/// Weights and metrics do not depend on the machine, evaluations included.
#[test]
fn reproducible_runs_in_bf16_have_the_same_bits_and_metrics_on_every_machine() {
    let of = |lines: &str, given: Given| {
        let folder = tempfile::tempdir().unwrap();
        run(&job(lines), given, 1, &folder.path().join("run"), None).unwrap()
    };
    let lines = format!("{WIDE}{OUTPUT}{SAME_BITS}");
    let want = of(&lines, Given::default());
    assert!(want.watcher.metrics.iter().filter(|(name, _)| name == "val_loss").count() == 2);
    for words in ["avx2", "avx512", "-amx,-avx512_bf16"] {
        let got = of(&lines, with(words));
        assert!(bits(&got) == bits(&want), "{words}");
        assert_eq!(got.watcher.metrics, want.watcher.metrics, "{words}");
    }
    // Otherwise they do, where there are instructions for bf16.
    let fast = [Given::default(), with("avx2")].map(|given| of(&format!("{WIDE}{OUTPUT}"), given));
    let precision = job(WIDE).precision();
    let native = KernelClass::of(&precision, Isa::detect()) != KernelClass::of(&precision, with("avx2").isa);
    assert_eq!(bits(&fast[0]) != bits(&fast[1]), native);
}

/// Half of a run with all instructions, the rest with fewer.
#[test]
fn a_run_that_goes_on_with_other_kernels_says_whether_its_bits_stay() {
    for (more, words) in [("", "avx2"), ("", "scalar"), (SAME_BITS, "avx2"), (SAME_BITS, "scalar")] {
        let lines = format!("{WIDE}{OUTPUT}{more}");
        let precision = job(&lines).precision();
        let [first, second] = [Given::default(), with(words)].map(|g| KernelClass::of(&precision, g.isa));
        for ranks in [1, 2] {
            let folder = tempfile::tempdir().unwrap();
            let folder = folder.path().join("run");
            let recorded = |step: u64| {
                let path = folder.join(format!("checkpoints/step-{step:08}"));
                Progress::of(&checkpoint::load(&path).unwrap()).unwrap().kernels
            };
            run(&job(&lines), Given::default(), ranks, &folder, Some(4)).unwrap();
            assert_eq!(recorded(4), [first.name()]);
            let rest = run(&job(&lines), with(words), ranks, &folder, None).unwrap();
            assert_eq!(recorded(8), [second.name()]);
            let notes = &rest.watcher.notes;
            match (first == second, first.has_bits_of(second)) {
                (true, _) => assert!(notes.is_empty(), "{notes:?}"),
                (_, true) => assert!(notes.len() == 1 && notes[0].contains("slower here"), "{notes:?}"),
                (_, false) => {
                    let change = format!("{}, from here on {}", first.words(), second.words());
                    assert!(notes.len() == 1 && notes[0].contains(&change), "{notes:?}");
                    assert!(notes[0].contains("bits will differ"), "{notes:?}");
                }
            }
            if first.has_bits_of(second) {
                assert!(bits(&rest) == bits(&trained(&lines, ranks).unwrap()), "{words}");
            }
        }
    }
}

/// Gradients overflow with a scale far too high: the steps are skipped, until it is low enough.
#[test]
fn a_scale_that_is_far_too_high_comes_down_by_itself() {
    for (model, data, ranks) in [(MLP, ROWS, 1), (CONVS, IMAGES, 1), (CONVS, IMAGES, 2)] {
        let train =
            "[train]\nsteps = 120\nbatch = 40\nprecision = \"f16\"\nloss_scale = 1e25\nlog_every = 1\n";
        let outcome = trained(&format!("{model}{data}{train}{OUTPUT}"), ranks).unwrap();
        let (skipped, losses) = (outcome.watcher.overflows, &outcome.watcher.losses);
        // From 1e25 down to what f16 bears, which is between 1 and a few millions.
        assert!((55..90).contains(&skipped), "{skipped} steps were skipped");
        assert_eq!(losses.len() as u64 + skipped, 120);
        assert!(losses.iter().all(|l| l.is_finite()));
        assert!(losses.last().unwrap() < &(0.9 * losses[0]), "{losses:?}");
        assert!(outcome.weights.iter().all(|(_, data)| data.iter().all(|x| x.is_finite())));
    }
}

#[test]
fn a_run_resumes_in_the_middle_of_the_search_for_the_scale() {
    let train = "[train]\nsteps = 80\nbatch = 40\nprecision = \"f16\"\nloss_scale = 1e20\n";
    let lines = format!("{CONVS}{IMAGES}{train}{OUTPUT}");
    for ranks in [1, 2] {
        let want = trained(&lines, ranks).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("run");
        let first = run(&job(&lines), Given::default(), ranks, &folder, Some(20)).unwrap();
        assert!(first.watcher.losses.is_empty(), "all of the first steps are skipped");
        let rest = run(&job(&lines), Given::default(), ranks, &folder, None).unwrap();
        assert_eq!(first.watcher.overflows + rest.watcher.overflows, want.watcher.overflows);
        assert!(bits(&rest) == bits(&want), "{ranks} ranks");
    }
}

/// What no scale can help is an error that says where, and what to do.
#[test]
fn an_activation_that_f16_cannot_hold_ends_the_run_with_its_layer() {
    let data = "[data]\nkind = \"synthetic\"\nsamples = 64\nshape = [20]\nclasses = 3\nnoise = 0.5\nnormalise = false\n";
    let train = "[train]\nsteps = 200\nbatch = 32\nprecision = \"f16\"\nclip = 1e9\n\
                 optimizer = { kind = \"sgd\", lr = 1e6 }\n";
    let error =
        trained(&format!("{MLP}{data}{train}{OUTPUT}"), 1).err().expect("it cannot go on").to_string();
    assert!(error.contains("layer `") && error.contains("too large for f16"), "{error}");
    assert!(error.contains("bf16"), "{error}");
}

/// Layers that stay in f32, by the list of layers and by their paths: with all of them, the run is one in f32.
#[test]
fn layers_stay_in_f32() {
    let list = |of_each: [&str; 3]| {
        let [first, second, last] = of_each;
        format!(
            "[model]\nlayers = [{{ kind = \"linear\", outputs = 32{first} }}, {{ kind = \"gelu\"{second} }}, \
             {{ kind = \"linear\"{last} }}]\n"
        )
    };
    let of = |model: &str, train: &str| {
        let train = format!("[train]\nsteps = 10\nbatch = 40\n{train}\n");
        bits(&trained(&format!("{model}{ROWS}{train}{OUTPUT}"), 1).unwrap())
    };
    const HERE: &str = ", precision = \"f32\"";
    const BF16: &str = "precision = \"bf16\"";
    let plain = list([""; 3]);
    let (f32, bf16) = (of(&plain, ""), of(&plain, BF16));
    assert!(f32 != bf16);
    assert!(of(&list([HERE; 3]), BF16) == f32, "all layers");
    assert!(of(&plain, &format!("{BF16}\nf32_layers = [\"0\", \"1\", \"2\"]")) == f32, "all paths");
    let last = of(&list(["", "", HERE]), BF16);
    assert!(last != f32 && last != bf16);
    assert!(of(&plain, &format!("{BF16}\nf32_layers = [\"2\"]")) == last, "one path");
    let activation = of(&list(["", HERE, ""]), BF16);
    assert!(activation != f32 && activation != bf16 && activation != last);
}

#[test]
fn a_layer_that_is_not_there_is_named() {
    let refusal = |model: &str, paths: &str| {
        let lines = format!("{model}[train]\nprecision = \"bf16\"\nf32_layers = {paths}\n{OUTPUT}");
        Prepared::new(job(&lines), Given::default(), 1).err().expect("there is no such layer").to_string()
    };
    let resnet =
        "[model]\nkind = \"resnet18_cifar\"\n[data]\nkind = \"synthetic\"\nsamples = 20\nshape = [3, 8, 8]\n";
    assert_eq!(
        refusal(resnet, "[\"fc\", \"layr1.0\"]"),
        "\"layr1.0\" is to stay in f32, and the model has no such layer; did you mean \"layer1.0\"?"
    );
    assert_eq!(
        refusal(resnet, "[\"head\"]"),
        "\"head\" is to stay in f32, and the model has no such layer; its outermost layers are conv1, bn1, layer1, layer2, \
         layer3, layer4, fc"
    );
    // A layer that does nothing is still one; only residuals have layers in them.
    let list = "[model]\nlayers = [\"flatten\", \"linear\"]\n";
    let list = &format!("{list}{ROWS}");
    assert!(refusal(list, "[\"0\", \"2\"]").starts_with("\"2\" is to stay in f32"));
    assert!(refusal(list, "[\"0.0\"]").starts_with("\"0.0\" is to stay in f32"));
}
