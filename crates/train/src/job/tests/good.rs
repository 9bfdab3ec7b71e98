//! Files that are right, and what they mean.

use std::path::PathBuf;

use polyreme_data::{Features, Layout, Spec, Target};
use polyreme_graph::{Adafactor, DType, Moments, Optimizer, Precision};
use polyreme_nn::Model;
use polyreme_nn::model::{Gpt, Stack, StackInput, StackLayer};

use super::super::*;
use super::{SMALL, good};
use crate::schedule::{Schedule, ScheduleShape};

#[test]
fn a_small_file_has_defaults_all_over() {
    let job = good(SMALL, &[]);
    let source = Source::Synthetic { samples: 1000, shape: vec![16], classes: 10, noise: 0.2 };
    let want = Job { data: DataSpec { source, ..DataSpec::default() }, ..Job::new("job") };
    assert_eq!(job, want);
}

#[test]
fn every_model_has_its_sizes() {
    for name in Model::NAMES {
        let job = good(&format!("[model]\nkind = \"{name}\"\n[data]\nkind = \"synthetic\""), &[]);
        assert_eq!(job.model.model, Model::by_name(name).unwrap(), "{name}");
        assert_eq!(job.model.from_data, job.model.model.sizes_from_data(), "{name}");
    }
    let check = |model: &str, want: &str, open: &[&str]| {
        let job = good(&format!("[model]\n{model}\n[data]\nkind = \"synthetic\""), &[]);
        assert_eq!(format!("{:?}", job.model.model), want);
        assert_eq!(job.model.from_data, open);
    };
    check(
        "kind = \"mlp\"\nhidden = [3]\nactivation = \"tanh\"\ninputs = 5\nclasses = 7\ndropout = 0.5",
        "Mlp(Mlp { inputs: 5, categories: [], texts: [], hidden: [3], classes: 7, activation: \"tanh\", dropout: 0.5 })",
        &[],
    );
    check(
        "kind = \"tabular\"\nwidth = 64\nhidden = 96\nlayers = 3\nembed = 0\ndropout = 0\ninputs = 9",
        "Tabular(Tabular { inputs: 9, categories: [], texts: [], embed: 0, width: 64, hidden: 96, layers: 3, classes: 10, \
         dropout: 0.0 })",
        &["classes"],
    );
    check(
        "kind = \"lenet\"\nimage = 28\nchannels = 1",
        "Lenet(Lenet { channels: 1, image: (28, 28), classes: 10 })",
        &["classes"],
    );
    check(
        "kind = \"cnn\"\nwidths = [8, 16]\nclasses = 3",
        "Cnn(Cnn { channels: 3, widths: [8, 16], classes: 3, dropout: 0.0 })",
        &["channels"],
    );
    check(
        "kind = \"gpt\"\nwidth = 64\nheads = 4\nlayers = 2\ncontext = 32\nvocab = 65\ndropout = 0.25",
        "Gpt(Gpt { vocab: 65, width: 64, heads: 4, layers: 2, context: 32, dropout: 0.25 })",
        &[],
    );
    check(
        "kind = \"resnet34_cifar\"\nchannels = 1\nclasses = 100",
        "ResNet(ResNet { depth: D34, stem: Cifar, channels: 1, classes: 100 })",
        &[],
    );
    check(
        "kind = \"alexnet\"\ndropout = 0",
        "AlexNet(AlexNet { channels: 3, classes: 10, dropout: 0.0 })",
        &["channels", "classes"],
    );
    check(
        "kind = \"bigru\"\nvocab = 9\nwidth = 8\nhidden = 7\nlayers = 1\ncontext = 6\nclasses = 2",
        "Recurrent(RecurrentClassifier { cell: Gru, vocab: 9, width: 8, hidden: 7, layers: 1, bidirectional: true, \
         context: 6, dropout: 0.0, classes: 2, padding: None, tags: false })",
        &[],
    );
    check(
        "kind = \"encoder\"\nheads = 2\nwidth = 8\nhidden = 16",
        "Encoder(EncoderClassifier { vocab: 64, width: 8, heads: 2, hidden: 16, layers: 2, context: 32, dropout: 0.0, \
         classes: 5, padding: None, tags: false })",
        &["vocab", "context", "classes"],
    );
}

#[test]
fn lists_of_layers() {
    let stack = |text: &str| {
        let job = good(&format!("[model]\n{text}\n[data]\nkind = \"synthetic\""), &[]);
        let Model::Layers(stack) = job.model.model else { panic!("layers") };
        (stack, job.model.from_data)
    };
    let linear = |outputs| StackLayer::Linear { outputs, bias: true };
    let (open, from_data) = stack("layers = [{ kind = \"linear\", outputs = 3 }, \"tanh\", \"linear\"]");
    let tanh = StackLayer::Activation { name: "tanh".into() };
    assert_eq!(open, Stack { input: StackInput::Open, layers: vec![linear(Some(3)), tanh, linear(None)] });
    assert_eq!(from_data, ["input", "classes"]);
    let (closed, from_data) = stack("kind = \"layers\"\ninput = [4]\nclasses = 5\nlayers = [\"linear\"]");
    assert_eq!(closed, Stack { input: StackInput::Row { width: 4 }, layers: vec![linear(Some(5))] });
    assert!(from_data.is_empty());
    let text = "vocab = 9\ncontext = 4\nlayers = [{ kind = \"embedding\", width = 8 }, \"positions\", \
                { kind = \"encoder_layer\", heads = 2, causal = true }, { kind = \"lstm\", hidden = 4 }, \
                { kind = \"attention\", heads = 1 }, \"rms_norm\", \"mean_time\", \"linear\"]";
    let (ids, from_data) = stack(text);
    assert_eq!((ids.input, ids.layers.len()), (StackInput::Ids { vocab: 9, context: 4 }, 8));
    assert_eq!(from_data, ["classes"]);
}

#[test]
fn layers_in_f32() {
    let check = |text: &str, sets: &[&str], want: &[&str]| {
        let job = good(&format!("[data]\nkind = \"synthetic\"\n[train]\nprecision = \"bf16\"\n{text}"), sets);
        assert_eq!(job.precision().f32_layers, want, "{text} {sets:?}");
        let f32_layers = want.iter().map(|path| path.to_string()).collect();
        assert_eq!(job.precision(), Precision { f32_layers, ..Precision::half(DType::Bf16) });
        for kind in [PrecisionKind::F32, PrecisionKind::Auto] {
            assert_eq!(job.precision_as(kind), Precision::F32);
        }
        // What is written says the same.
        assert_eq!(good(&job.to_toml(), &[]), job, "{}", job.to_toml());
    };
    let list = "[model]\nlayers = [\"batch_norm\", { kind = \"residual\", layers = [{ kind = \"linear\", outputs = 3 }, \
                { kind = \"tanh\", precision = \"f32\" }] }, \"relu\", { kind = \"linear\", precision = \"f32\" }]";
    check(list, &[], &["1.1", "3"]);
    check(list, &["model.layers.2.precision=f32"], &["1.1", "2", "3"]);
    check(list, &["model.layers.1.layers.0.precision=\"f32\""], &["1.0", "1.1", "3"]);
    check(list, &["model.layers.1.precision=f32", "model.layers.3=linear"], &["1", "1.1"]);
    let tables =
        "[[model.layers]]\nkind = \"relu\"\n[[model.layers]]\nkind = \"linear\"\nprecision = \"f32\"";
    check(tables, &[], &["1"]);
    // Beside the layers of a list, and for models without one.
    check(tables, &["train.f32_layers=[\"0\"]"], &["1", "0"]);
    check("[model]\nkind = \"gpt\"", &[], &[]);
    check("[model]\nkind = \"gpt\"", &["train.f32_layers=[\"head\", \"blocks.0\"]"], &["head", "blocks.0"]);
}

#[test]
fn groups_are_factors_of_the_base_rate() {
    let groups = "[{ params = [\"*.bias\"], weight_decay = 0 }, { params = [\"fc\", \"a.*\"], lr = 1e-3 }]";
    let optimizer = "{ kind = \"adamw\", lr = 1e-2 }";
    let text = format!(
        "[model]\nkind = \"mlp\"\n[data]\nkind = \"synthetic\"\n[train]\noptimizer = {optimizer}\ngroups = {groups}\n"
    );
    let job = good(&text, &[]);
    let tuning = job.tuning();
    assert_eq!((tuning.groups[0].lr_scale, tuning.groups[0].weight_decay), (1.0, Some(0.0)));
    assert_eq!((tuning.groups[1].lr_scale, tuning.groups[1].weight_decay), (0.1, None));
    assert_eq!(tuning.groups[1].params[1].text(), "a.*");
    assert_eq!(good(&job.to_toml(), &[]), job);
}

/// Sizes of a folder are open until it is read; a job that has them all keeps the path.
#[test]
fn the_folder_of_a_model_has_its_sizes() {
    let head = "[data]\nkind = \"text\"\npath = \"a.txt\"\n[model]\nkind = \"gpt2\"\npath = \"gpt2\"\ndropout = 0.5\n";
    let job = good(head, &[]);
    assert_eq!(job.model.path, Some(PathBuf::from("/jobs/gpt2")));
    assert_eq!(job.model.from_data, job.model.folder_keys());
    let written = job.to_toml();
    assert!(!written.contains("width =") && written.contains("dropout = 0.5"), "{written}");
    assert_eq!(good(&written, &[]), job);
    let mut read = job.clone();
    read.model.from_data.clear();
    assert_eq!(good(&read.to_toml(), &[]), read);
}

#[test]
fn every_key_is_read() {
    let job = good(include_str!("full.toml"), &[]);
    let Model::Layers(stack) = &job.model.model else { panic!("layers") };
    assert_eq!((job.name.as_str(), stack.layers.len()), ("all", 12));
    assert_eq!(job.model.weights, Some(PathBuf::from("/jobs/start.safetensors")));
    let want = DataSpec {
        source: Source::Images {
            path: "/jobs/pictures".into(),
            size: Some((32, 32)),
            grey: false,
            table: ImageTable::default(),
        },
        validation: 0.2,
        normalise: true,
        augment: Augment { crop: 4, flip: true, shift: 2, erase: 0.1 },
        class_weights: ClassWeights::Given(vec![1.0, 2.5]),
        order: OrderSpec::Block(128),
        spread: false,
        cache: CacheSpec { path: None, max_gib: 32.0 },
        fraction: 0.5,
        threads: Some(2),
        prefetch: 8,
    };
    assert_eq!(job.data, want);
    let moments = Moments { beta1: 0.8, beta2: 0.99, eps: 1e-7, weight_decay: 0.1 };
    let rules = [("module.*", "*"), ("old.*", "")];
    let rule = |(from, to): (&str, &str)| NameRule { from: from.into(), to: to.into() };
    assert_eq!(job.model.map, rules.map(rule));
    assert_eq!((job.model.head, job.model.freeze.clone()), (HeadStart::New, vec!["0".into(), "1.*".into()]));
    let want = TrainSpec {
        groups: Vec::new(),
        batch: 96,
        length: Length::Steps(1000),
        optimizer: OptimizerSpec { rule: Optimizer::Lamb(moments), lr: 2e-3, moments: DType::F32 },
        schedule: Schedule { shape: ScheduleShape::Cosine { floor: 0.1, restarts: 2 }, warmup: 10 },
        clip: Some(1.0),
        accumulate: 4,
        ema: Some(0.999),
        precision: PrecisionKind::F16,
        f32_layers: vec!["0".into(), "11".into()],
        loss_scale: 1024.0,
        loss: LossKind::CrossEntropy,
        label_smoothing: 0.1,
        mixup: 0.2,
        early_stop: Some(EarlyStop { metric: "val_top5".into(), patience: 5, min_delta: 0.001 }),
        evaluate_every_steps: Some(100),
        log_every_steps: 10,
        seed: 7,
        memory_mib: Some(4096),
    };
    assert_eq!(job.train, want);
    let want = ParallelSpec {
        open: OpenKeys::default(),
        ranks: Some(4),
        data: None,
        tensor: 1,
        stage: 1,
        sequence: 1,
        microbatches: None,
        schedule: PipelineKind::OneFOneB,
        flush_every: 16,
        cuts: Vec::new(),
        shard_weights: false,
        threads: Some(3),
        transport: Transport::Shm,
        encrypt: Some(true),
        sync_batch_norm: true,
        reproducible: false,
        shards: 8,
        shard_optimizer: Some(false),
        shard_gradients: false,
        bucket_mib: 0.5,
        follow_load: false,
        wire: WireSpec::default(),
        sync: SyncKind::AllReduce,
        turn: None,
        every: EverySpec::default(),
        fragments: 1,
        overlap: 0,
        own: Vec::new(),
        outer: None,
        staleness: 3,
        servers: ServersSpec::default(),
        elastic: None,
        patience: 3.0,
        stall: 90.5,
        balance: Balance::Given(vec![1.0, 1.0, 2.5, 1.0]),
    };
    assert_eq!(job.parallel, want);
    let want = OutputSpec {
        path: Some("/jobs/runs/all".into()),
        every_steps: Some(500),
        every_epochs: None,
        every_minutes: Some(2.5),
        keep: 5,
        best: Some("val_loss".into()),
        tensorboard: false,
        merge: false,
        dtype: DType::F32,
    };
    assert_eq!(job.output, want);
}

#[test]
fn files_and_moments_may_be_in_half() {
    let of = |optimizer: &str| {
        let job =
            good(&format!("{SMALL}[train]\noptimizer = {optimizer}\n[output]\ndtype = \"bf16\"\n"), &[]);
        (job.train.optimizer.kind(), job.train.optimizer.moments, job.output.dtype)
    };
    for kind in ["sgd", "adam", "adamw", "lion"] {
        let table = format!("{{ kind = \"{kind}\", moments = \"bf16\" }}");
        assert_eq!(of(&table), (kind, DType::Bf16, DType::Bf16));
        assert_eq!(of(&format!("\"{kind}\"")).1, DType::F32);
    }
}

#[test]
fn sources() {
    let check = |data: &str, want: Source| {
        let job = good(&format!("[model]\nkind = \"mlp\"\n[data]\n{data}"), &[]);
        assert_eq!(job.data.source, want);
    };
    let here = |path: &str| std::path::absolute(path).unwrap();
    check("kind = \"idx\"\npath = \"d\"", Source::Idx { path: "/jobs/d".into(), known: None });
    check("kind = \"mnist\"", Source::Idx { path: here("data/mnist"), known: Some("mnist") });
    check("kind = \"mnist\"\npath = \"/m\"", Source::Idx { path: "/m".into(), known: None });
    let fashion = Source::Idx { path: here("data/fashion-mnist"), known: Some("fashion-mnist") };
    check("kind = \"fashion-mnist\"", fashion);
    check("kind = \"cifar100\"", Source::Cifar { path: here("data/cifar100"), classes: 100 });
    check(
        "kind = \"csv\"\npath = \"a.csv\"\ntest = \"b.csv\"\nlabel = 4\ndelimiter = \"\\t\"\nheader = false",
        Source::Table {
            format: TableFormat::Csv,
            path: vec!["/jobs/a.csv".into()],
            test: vec!["/jobs/b.csv".into()],
            label: vec!["4".into()],
            delimiter: b'\t',
            header: Some(false),
            choice: ColumnChoice::default(),
            in_memory: None,
        },
    );
    let several = "kind = \"csv\"\npath = [\"a.csv\", \"b/\"]\nlabel = [\"a\", 2]\n[train]\nloss = \"mse\"";
    let (path, label) = (vec!["/jobs/a.csv".into(), "/jobs/b/".into()], vec!["a".into(), "2".into()]);
    check(
        several,
        Source::Table {
            format: TableFormat::Csv,
            path,
            test: Vec::new(),
            label,
            delimiter: b',',
            header: None,
            choice: ColumnChoice::default(),
            in_memory: None,
        },
    );
    check(
        "kind = \"text\"\npath = \"a.txt\"\ntokenizer = \"t.json\"\ncontext = 8",
        Source::Text {
            path: "/jobs/a.txt".into(),
            test: None,
            tokenizer: Some("/jobs/t.json".into()),
            context: Some(8),
        },
    );
    check(
        "kind = \"arrays\"\npath = \"a.safetensors\"",
        Source::Arrays {
            path: "/jobs/a.safetensors".into(),
            test: None,
            x: "x".into(),
            labels: "labels".into(),
        },
    );
    check("kind = \"given\"", Source::Given);
}

#[test]
fn short_forms_and_defaults_by_kind() {
    let job = good(&format!("{SMALL}[train]\noptimizer = \"sgd\"\nschedule = \"one-cycle\""), &[]);
    assert_eq!(job.train.optimizer, OptimizerSpec::sgd());
    let shape = ScheduleShape::OneCycle { start_share: 0.3, div: 25.0, final_div: 1e4 };
    assert_eq!(job.train.schedule, Schedule { shape, warmup: 0 });
    let text = "[model]\nkind = \"gpt\"\n[data]\nkind = \"text\"\npath = \"x\"";
    let job = good(text, &[]);
    assert_eq!(job.output.best.as_deref(), Some("val_loss"));
    assert!(!job.data.normalise);
    assert_eq!(job.context(), 256);
    assert_eq!(good(text, &["data.context=64"]).context(), 64);
    assert_eq!(good(text, &["model.context=32"]).context(), 32);
    let job = good(&format!("{SMALL}[output]\nbest = \"none\"\nevery_epochs = 0"), &[]);
    assert_eq!((job.output.best, job.output.every_epochs), (None, None));
}

#[test]
fn overrides() {
    let job = good(
        &format!("{SMALL}[train]\nepochs = 3\noptimizer = \"adam\"\nschedule = {{ kind = \"cosine\" }}"),
        &[
            "train.batch = 128",
            "train.steps=50",
            "train.optimizer.lr=0.5",
            "train.schedule.warmup=7",
            "data.kind=csv",
            "data.path=a=b.csv",
            "model.hidden=[3, 4]",
            "model.hidden.1=5",
            "name=trial",
        ],
    );
    assert_eq!((job.train.batch, job.train.length, job.name.as_str()), (128, Length::Steps(50), "trial"));
    assert_eq!(job.train.optimizer, OptimizerSpec { lr: 0.5, ..OptimizerSpec::adam() });
    assert_eq!(job.train.schedule.warmup, 7);
    // An override's path is relative to where the command was given.
    let Source::Table { path, .. } = &job.data.source else { panic!("csv") };
    assert_eq!(*path, [std::path::absolute("a=b.csv").unwrap()]);
    let Model::Mlp(m) = &job.model.model else { panic!("mlp") };
    assert_eq!(m.hidden, [3, 5]);
    let list = "[data]\nkind = \"synthetic\"\n[model]\nlayers = [\"linear\"]";
    let job = good(list, &["model.layers.0.outputs=6", "train.optimizer.kind=lamb"]);
    let Model::Layers(stack) = &job.model.model else { panic!("layers") };
    assert_eq!(stack.layers, [StackLayer::Linear { outputs: Some(6), bias: true }]);
    assert_eq!(job.train.optimizer, OptimizerSpec::lamb());
    let lion = "train.optimizer={ kind = \"lion\", lr = 3e-4, betas = [0.8, 0.9], weight_decay = 0.5 }";
    let rule = Optimizer::Lion { beta1: 0.8, beta2: 0.9, weight_decay: 0.5 };
    let job = good(list, &["model.layers.0.outputs=6", lion]);
    assert_eq!(job.train.optimizer, OptimizerSpec { rule, lr: 3e-4, moments: DType::F32 });
    let adafactor =
        "train.optimizer={ kind = \"adafactor\", beta2_decay = -0.5, eps1 = 1e-9, eps2 = 0, d = 2 }";
    let rule = Adafactor { beta2_decay: -0.5, eps1: 1e-9, eps2: 0.0, d: 2.0, weight_decay: 0.0 };
    let job = good(list, &["model.layers.0.outputs=6", adafactor]);
    assert_eq!(
        job.train.optimizer,
        OptimizerSpec { rule: Optimizer::Adafactor(rule), lr: 0.01, moments: DType::F32 }
    );
}

#[test]
fn sizes_come_from_the_data() {
    let mut job = good(SMALL, &[]);
    let features = Features::Image { channels: 1, height: 8, width: 8, layout: Layout::Planes };
    let target = Target::Class { classes: 3, names: Vec::new() };
    job.model.fit(&Spec { features: features.clone(), target }).unwrap();
    let Model::Mlp(m) = &job.model.model else { panic!("mlp") };
    assert_eq!((m.inputs, m.classes), (64, 3));
    assert!(job.model.from_data.is_empty());
    let target = Target::Class { classes: 4, names: Vec::new() };
    let error = job.model.fit(&Spec { features, target }).unwrap_err().to_string();
    assert_eq!(error, "model.classes is 3, the data has 4 classes; leave it out to take it from the data");
}

#[test]
fn jobs_are_made_in_rust() {
    let job = Job {
        model: ModelSpec::new(Model::Gpt(Gpt { layers: 2, ..Gpt::default() })),
        train: TrainSpec { length: Length::Steps(10), ..TrainSpec::default() },
        ..Job::new("mine")
    };
    assert_eq!(job.model.from_data, ["vocab", "context"]);
    assert_eq!(ModelSpec::exact(job.model.model.clone()).from_data, Vec::<String>::new());
    assert_eq!((job.train.batch, job.output.keep), (64, 3));
}

#[test]
fn a_file_gives_its_name_and_folder() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("digits.v2.toml");
    std::fs::write(&path, "[model]\nkind = \"mlp\"\n[data]\nkind = \"csv\"\npath = \"x.csv\"").unwrap();
    let job = Job::from_file(&path, &[]).unwrap();
    assert_eq!(job.name, "digits.v2");
    let Source::Table { path, .. } = &job.data.source else { panic!("csv") };
    assert_eq!(*path, [folder.path().join("x.csv")]);
}

#[test]
fn gradients_are_sharded_on_request() {
    let parallel = |lines: &str| good(&format!("{SMALL}[parallel]\n{lines}"), &[]).parallel;
    assert!(!parallel("").follow_load && parallel("follow_load = true").follow_load);
    assert!(!parallel("").shard_gradients && !parallel("shard_gradients = false").shard_gradients);
    let spec = parallel("shard_gradients = true");
    assert_eq!((spec.shard_gradients, spec.shard_optimizer), (true, None));
    assert!(parallel("shard_gradients = true\nshard_optimizer = true").shard_gradients);
}

#[test]
fn encryption_is_left_to_the_hosts_unless_it_is_said() {
    let parallel = |lines: &str| good(&format!("{SMALL}[parallel]\n{lines}"), &[]).parallel;
    let rows = [
        ("", None),
        ("encrypt = \"auto\"", None),
        ("encrypt = true", Some(true)),
        ("encrypt = false", Some(false)),
    ];
    for (lines, want) in rows {
        assert_eq!(parallel(lines).encrypt, want, "{lines}");
    }
}

#[test]
fn elastic_jobs_are_read_and_written() {
    let usual = |min, max, leave_out| Elastic { min, max, leave_out, store: None };
    let (servers, prefix) = (vec!["a:2379".into(), "[::1]:1".into()], "runs/7".into());
    let store = Some(StoreAddress { servers, prefix });
    for (lines, want) in [
        ("elastic = { min = 2, max = 4 }", usual(2, 4, None)),
        ("elastic = {}", usual(1, 16, None)),
        ("elastic = { max = 8 }\nreproducible = true", usual(1, 8, None)),
        ("elastic = { leave_out = 2.5 }", usual(1, 16, Some(2.5))),
        ("elastic = { store = \"etcd://a:2379,[::1]:1/runs/7\" }", Elastic { store, ..Elastic::default() }),
        ("elastic = {}\nsync = \"ps-async\"\nservers = 2", usual(1, 16, None)),
    ] {
        let job = good(&format!("{SMALL}[parallel]\n{lines}"), &[]);
        assert_eq!(job.parallel.elastic, Some(want), "{lines}");
        assert_eq!(good(&job.to_toml(), &[]).parallel, job.parallel, "{lines}");
    }
}

#[test]
fn servers_may_hold_the_weights() {
    let apart = ServersSpec::Apart(ServingRanks { ranks: 2, share: true });
    let alone = ServersSpec::Apart(ServingRanks { ranks: 2, share: false });
    for (lines, want) in [
        ("sync = \"ps\"", (SyncKind::Ps, ServersSpec::Beside(1), 3)),
        (
            "sync = \"ps-bounded\"\nstaleness = 0\nservers = 4",
            (SyncKind::PsBounded, ServersSpec::Beside(4), 0),
        ),
        ("sync = \"ps-async\"\nservers = 2", (SyncKind::PsAsync, ServersSpec::Beside(2), 3)),
        ("sync = \"ps-async\"\nservers = { ranks = 2 }", (SyncKind::PsAsync, apart, 3)),
        ("sync = \"ps-async\"\nservers.ranks = 2", (SyncKind::PsAsync, apart, 3)),
        ("sync = \"ps-async\"\nservers = { ranks = 2, share = false }", (SyncKind::PsAsync, alone, 3)),
    ] {
        let job = good(&format!("{SMALL}[parallel]\n{lines}"), &[]);
        let ParallelSpec { sync, servers, staleness, .. } = job.parallel;
        assert_eq!((sync, servers, staleness), want, "{lines}");
        assert_eq!(good(&job.to_toml(), &[]).parallel, job.parallel, "{lines}");
    }
}

#[test]
fn servers_are_on_the_first_ranks_and_some_rank_learns() {
    let check = |lines: &str, ranks: usize, want: Result<(usize, usize), &str>| {
        let job = good(&format!("{SMALL}[parallel]\nsync = \"ps-async\"\n{lines}"), &[]);
        let got = job.parallel.server_plan(ranks).map(|plan| plan.map(|plan| (plan.servers, plan.serving)));
        match want {
            Ok(want) => assert_eq!(got, Ok(Some(want)), "{lines}, {ranks} ranks"),
            Err(want) => assert!(got.as_ref().is_err_and(|got| got.contains(want)), "{lines}: {got:?}"),
        }
    };
    check("servers = 2", 4, Ok((2, 0)));
    check("servers = 5", 4, Err("a rank hosts one server at most"));
    check("servers = 5\nelastic = {}", 4, Ok((4, 0)));
    check("servers = { ranks = 2 }", 4, Ok((2, 2)));
    check("servers = { ranks = 2 }", 5, Ok((5, 2)));
    check("servers = { ranks = 2, share = false }", 5, Ok((2, 2)));
    check("servers = { ranks = 4 }", 4, Err("leaves no rank that learns: of 4, 4 only serve"));
    check("servers = { ranks = 4 }\nelastic = {}", 4, Ok((3, 3)));
    check("servers = { ranks = 4 }\nelastic = {}", 1, Ok((1, 0)));
}

#[test]
fn replicas_may_agree_in_another_way_later() {
    let turn = |start, then, after| Some(SyncTurn { start, then, after });
    let (each, local) = (SyncKind::AllReduce, SyncKind::Local);
    for (lines, want) in [
        ("sync = { then = \"local\", after = 9 }", (each, turn(each, local, 9), 50)),
        (
            "sync = { start = \"local\", then = \"ps\", after = 1 }\nevery = 5",
            (local, turn(local, SyncKind::Ps, 1), 5),
        ),
        (
            "sync = { start = \"ps-async\", then = \"local\", after = 100 }\nevery = 7\nservers = 2",
            (SyncKind::PsAsync, turn(SyncKind::PsAsync, local, 100), 7),
        ),
    ] {
        let job = good(&format!("{SMALL}[parallel]\n{lines}"), &[]);
        let ParallelSpec { sync, turn, every, .. } = job.parallel;
        assert_eq!((sync, turn, every.steps), want, "{lines}");
        assert_eq!(good(&job.to_toml(), &[]).parallel, job.parallel, "{lines}");
        // A run that goes on in one way.
        let one = good(&job.to_toml(), &["parallel.sync=allreduce"]).parallel;
        assert_eq!((one.sync, one.turn), (each, None), "{lines}");
    }
}

#[test]
fn replicas_may_take_steps_of_their_own() {
    let outer = |lr, momentum| Some(OuterSpec { lr, momentum });
    for (lines, want) in [
        ("sync = \"allreduce\"", (SyncKind::AllReduce, 50, None)),
        ("sync = \"local\"", (SyncKind::Local, 50, None)),
        ("sync = \"local\"\nevery = 8\nouter = {}", (SyncKind::Local, 8, outer(0.7, 0.9))),
        ("sync = \"local\"\nouter = { lr = 1, momentum = 0 }", (SyncKind::Local, 50, outer(1.0, 0.0))),
    ] {
        let job = good(&format!("{SMALL}[parallel]\n{lines}"), &[]);
        let ParallelSpec { sync, every, outer, .. } = job.parallel;
        assert_eq!((sync, every.steps, outer), want, "{lines}");
        assert_eq!(good(&job.to_toml(), &[]).parallel, job.parallel, "{lines}");
    }
}

#[test]
fn replicas_may_meet_when_they_have_come_too_far() {
    for (every, want, look) in [
        ("{ steps = 50, drift = 0.02 }", (50, Some(0.02)), 5),
        ("{ steps = 4, drift = 1 }", (4, Some(1.0)), 1),
        ("{ steps = 64, drift = 0.5, look = 8 }", (64, Some(0.5)), 8),
        ("{ steps = 7 }", (7, None), 1),
    ] {
        let job = good(&format!("{SMALL}[parallel]\nsync = \"local\"\nevery = {every}"), &[]);
        let spec = job.parallel.every;
        assert_eq!(((spec.steps, spec.drift), spec.look()), (want, look), "{every}");
        assert_eq!(good(&job.to_toml(), &[]).parallel, job.parallel, "{every}");
    }
}

#[test]
fn parts_of_the_model_may_take_turns() {
    for (lines, want, apart) in [
        ("", (1, 0), 50),
        ("fragments = 4\noverlap = 12", (4, 12), 400),
        ("fragments = 8\nevery = 200", (8, 0), 1000),
    ] {
        let job = good(&format!("{SMALL}[parallel]\nsync = \"local\"\n{lines}"), &[]);
        let spec = &job.parallel;
        assert_eq!(((spec.fragments, spec.overlap), spec.steps_apart()), (want, apart), "{lines}");
        assert_eq!(good(&job.to_toml(), &[]).parallel, job.parallel, "{lines}");
    }
}

#[test]
fn differences_of_weights_may_be_coded() {
    for wire in ["int8", "onebit", "topk", "auto", "powersgd"] {
        let lines =
            format!("{SMALL}[train]\noptimizer = \"lion\"\n[parallel]\nsync = \"local\"\nwire = \"{wire}\"");
        assert_eq!(good(&lines, &[]).parallel.wire.name(), wire);
    }
}

#[test]
fn reproducible_steps_have_shards() {
    let parallel = |lines: &str| good(&format!("{SMALL}[parallel]\n{lines}"), &[]).parallel;
    assert_eq!(parallel("reproducible = true").shards, 8);
    let spec = parallel("reproducible = true\nshards = 16\nranks = 16\nbalance = \"auto\"");
    assert_eq!((spec.shards, spec.ranks, spec.balance), (16, Some(16), Balance::Auto));
    let spec = parallel("ranks = \"auto\"\nbalance = [3, 1]");
    assert_eq!((spec.ranks, spec.balance), (Some(2), Balance::Given(vec![3.0, 1.0])));
    assert_eq!(good(SMALL, &[]).parallel, ParallelSpec::default());
}

/// Paths become absolute; addresses stay as they are, also when the job is written and read again.
#[test]
fn addresses_are_kept() {
    let text = concat!(
        "[model]\nkind = \"mlp\"\n[data]\nkind = \"csv\"\npath = [\"s3://b/x-{0..3}.csv\", \"gs://b/y.csv\"]\ntest = \"https://h/t.csv\"\n",
        "cache = { path = \"copies\", max_gib = 0.5 }\n"
    );
    let job = good(text, &[]);
    let Source::Table { path, test, .. } = &job.data.source else { panic!("a table") };
    assert_eq!(*path, ["s3://b/x-{0..3}.csv", "gs://b/y.csv"].map(PathBuf::from));
    assert_eq!(*test, [PathBuf::from("https://h/t.csv")]);
    let cache = &job.data.cache;
    assert!(cache.path.as_ref().is_some_and(|path| path.is_absolute() && path.ends_with("copies")));
    assert_eq!(cache.max_gib, 0.5);
    assert_eq!(good(&job.to_toml(), &[]).data, job.data);
}
