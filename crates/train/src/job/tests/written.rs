//! What is written reads as the same job.

use std::path::{Path, PathBuf};

use polyreme_dtype::DType;
use polyreme_graph::op::{Cell, Conv};
use polyreme_graph::{Adafactor, Moments, Optimizer};
use polyreme_nn::Model;
use polyreme_nn::model::{Stack, StackInput, StackLayer};
use proptest::prelude::*;
use proptest::sample::select;

use super::super::*;
use super::{SMALL, good};
use crate::schedule::{Schedule, ScheduleShape};

fn check(job: &Job) {
    let text = job.to_toml();
    let again = Job::from_text(&text, "elsewhere.toml", Path::new("/elsewhere"), &[])
        .unwrap_or_else(|e| panic!("{e}\n\n{text}"));
    assert_eq!(again, *job, "\n{text}");
}

#[test]
fn keys_that_are_left_to_the_planner_read_again() {
    let keys =
        ["tensor", "stage", "sequence", "microbatches", "schedule", "shard_weights", "shard_gradients"];
    let lines: String = keys.iter().map(|key| format!("{key} = \"auto\"\n")).collect();
    let job = good(&format!("{SMALL}[parallel]\n{lines}"), &[]);
    assert_eq!(job.parallel.open.names(), keys);
    check(&job);
    // What a plan says closes them.
    let sets = [
        "tensor=2",
        "stage=1",
        "sequence=1",
        "microbatches=4",
        "schedule=1f1b",
        "shard_weights=false",
        "shard_gradients=true",
    ];
    let sets: Vec<String> = sets.iter().map(|set| format!("parallel.{set}")).collect();
    let job = Job::from_text(&job.to_toml(), "job.toml", Path::new("."), &sets).unwrap();
    assert!(!job.parallel.open.any() && job.parallel.tensor == 2 && job.parallel.shard_gradients);
}

#[test]
fn whole_files_read_again() {
    check(&good(SMALL, &[]));
    check(&good(include_str!("full.toml"), &[]));
    for name in Model::NAMES {
        check(&good(&format!("[model]\nkind = \"{name}\"\n[data]\nkind = \"mnist\""), &[]));
        let model = ModelSpec::exact(Model::by_name(name).unwrap());
        check(&Job { model, ..Job::new("exact") });
    }
    let nothing = OutputSpec { every_epochs: None, best: None, ..OutputSpec::default() };
    check(&Job { output: nothing, ..Job::new("name with \"quotes\" and \u{e4}") });
}

#[test]
fn the_file_of_an_earlier_run_reads_as_the_same_job() {
    // Written for `full.toml` before keys were declared, and before there was a loss, a precision, its layers, its scale, an element type, a mesh,
    // a load to follow, a format on the wire, ways to agree, groups, frozen parameters, rules for names, new heads and factors to merge.
    // What is written now differs in that and in the order of keys alone.
    let (before, mut job) = (include_str!("before.toml"), good(include_str!("full.toml"), &[]));
    let TrainSpec { precision, f32_layers, loss_scale, .. } = TrainSpec::default();
    job.train = TrainSpec { precision, f32_layers, loss_scale, ..job.train };
    let ModelSpec { map, head, freeze, .. } = ModelSpec::default();
    job.model = ModelSpec { map, head, freeze, ..job.model };
    assert_eq!(good(before, &[]), job);
    let table = |text: &str| toml::from_str::<toml::Table>(text).unwrap();
    let mut now = table(&job.to_toml());
    let train = now["train"].as_table_mut().unwrap();
    let (loss, _, _) = (train.remove("loss"), train.remove("f32_layers"), train.remove("loss_scale"));
    assert_eq!(train.remove("groups"), Some(toml::Value::Array(Vec::new())));
    let model = now["model"].as_table_mut().unwrap();
    let tuned = ["map", "head", "freeze"].map(|key| model.remove(key).is_some());
    assert_eq!(tuned, [true; 3]);
    let parallel = now["parallel"].as_table_mut().unwrap();
    let newer = ["data", "tensor", "stage", "sequence", "shard_weights", "follow_load", "wire", "sync"]
        .map(|key| parallel.remove(key));
    assert!(newer.iter().all(Option::is_some), "{newer:?}");
    let output = now["output"].as_table_mut().unwrap();
    let (dtype, merge) = (output.remove("dtype"), output.remove("merge"));
    assert_eq!(merge, Some(false.into()));
    assert_eq!((loss, dtype, now), (Some("cross_entropy".into()), Some("f32".into()), table(before)));
}

fn names(names: &'static [&'static str]) -> impl Strategy<Value = String> {
    select(names).prop_map(String::from)
}

fn layers(depth: u32) -> BoxedStrategy<Vec<StackLayer>> {
    let window = ((1..9_usize, 1..9_usize), (1..9_usize, 1..9_usize), (0..9_usize, 0..9_usize));
    let conv = ((1..9_usize, 1..9_usize), (0..9_usize, 0..9_usize), (1..9_usize, 1..9_usize), 1..9_usize)
        .prop_map(|(stride, padding, dilation, groups)| Conv { stride, padding, dilation, groups });
    let pair = || (1..9_usize, 1..9_usize);
    let leaf = prop_oneof![
        (1..999_usize, any::<bool>()).prop_map(|(n, bias)| StackLayer::Linear { outputs: Some(n), bias }),
        (1..99_usize, pair(), conv.clone(), any::<bool>())
            .prop_map(|(outputs, kernel, conv, bias)| StackLayer::Conv { outputs, kernel, conv, bias }),
        (1..99_usize, pair(), conv, pair(), any::<bool>()).prop_map(
            |(outputs, kernel, conv, output_padding, bias)| StackLayer::ConvTranspose {
                outputs,
                kernel,
                conv,
                output_padding,
                bias
            }
        ),
        window.clone().prop_map(|(kernel, stride, padding)| StackLayer::MaxPool { kernel, stride, padding }),
        window.prop_map(|(kernel, stride, padding)| StackLayer::AvgPool { kernel, stride, padding }),
        pair().prop_map(|out| StackLayer::AdaptiveAvgPool { out }),
        select(vec![
            StackLayer::GlobalMean,
            StackLayer::BatchNorm,
            StackLayer::LayerNorm,
            StackLayer::RmsNorm,
            StackLayer::Flatten,
            StackLayer::Positions,
            StackLayer::LastStep,
            StackLayer::MeanTime,
        ]),
        names(&["relu", "gelu_tanh", "none"]).prop_map(|name| StackLayer::Activation { name }),
        (1..9_usize).prop_map(|groups| StackLayer::GroupNorm { groups }),
        (0.0..0.99_f32).prop_map(|p| StackLayer::Dropout { p }),
        (1..99_usize).prop_map(|width| StackLayer::Embedding { width }),
        (select(vec![Cell::Lstm, Cell::Gru]), 1..99_usize, any::<bool>())
            .prop_map(|(cell, hidden, bidirectional)| StackLayer::Recurrent { cell, hidden, bidirectional }),
        (1..9_usize, any::<bool>()).prop_map(|(heads, causal)| StackLayer::Attention { heads, causal }),
        (
            1..9_usize,
            prop::option::of(1..99_usize),
            names(&["relu", "gelu"]),
            0.0..0.99_f32,
            any::<bool>(),
            any::<bool>()
        )
            .prop_map(|(heads, hidden, activation, dropout, norm_first, causal)| {
                StackLayer::EncoderLayer { heads, hidden, activation, dropout, norm_first, causal }
            }),
    ];
    let one = if depth == 0 {
        leaf.boxed()
    } else {
        prop_oneof![9 => leaf, 1 => layers(depth - 1).prop_map(|layers| StackLayer::Residual { layers })]
            .boxed()
    };
    prop::collection::vec(one, 1..6).boxed()
}

/// A list of layers with an open input: any list of layers can be read, whether they fit together or not.
fn model() -> impl Strategy<Value = ModelSpec> {
    prop_oneof![
        select(&Model::NAMES[..]).prop_map(|name| ModelSpec::new(Model::by_name(name).unwrap())),
        (layers(2), any::<u64>()).prop_map(|(layers, chosen)| {
            let paths = paths("", &layers).into_iter().enumerate();
            let f32_layers =
                paths.filter(|(i, _)| chosen >> (i % 64) & 1 == 1).map(|(_, path)| path).collect();
            let model = Model::Layers(Stack { input: StackInput::Open, layers });
            let weights = (chosen % 2 == 0).then(|| PathBuf::from("/start.safetensors"));
            let head = if chosen % 4 == 0 { HeadStart::New } else { HeadStart::File };
            let rule = NameRule { from: "a.*".into(), to: "*".into() };
            let map = weights.iter().map(|_| rule.clone()).collect();
            let freeze = (0..chosen % 3).map(|k| format!("{k}.*")).collect();
            ModelSpec { f32_layers, weights, head, map, freeze, ..ModelSpec::new(model) }
        }),
    ]
}

/// The paths of layers, each before those inside it.
fn paths(list: &str, layers: &[StackLayer]) -> Vec<String> {
    let of_one = |(k, layer): (usize, &StackLayer)| {
        let path = format!("{list}{k}");
        let inside = match layer {
            StackLayer::Residual { layers } => paths(&format!("{path}."), layers),
            _ => Vec::new(),
        };
        [path].into_iter().chain(inside)
    };
    layers.iter().enumerate().flat_map(of_one).collect()
}

fn path() -> impl Strategy<Value = PathBuf> {
    "/[a-zA-Z\"'\\\\ äß=.]{1,12}x".prop_map(|p| std::path::absolute(p).unwrap())
}

fn image_table() -> impl Strategy<Value = ImageTable> {
    let columns = (prop::option::of("[a-z]{1,9}"), prop::collection::vec("[a-z]{1,9}", 0..3));
    (prop::option::of(path()), prop::option::of(path()), columns).prop_map(
        |(labels, test, (image, label))| match labels {
            Some(_) => ImageTable { labels, test, image, label },
            None => ImageTable::default(),
        },
    )
}

fn choice() -> impl Strategy<Value = ColumnChoice> {
    let patterns = || prop::collection::vec("[a-z*\" ]{0,9}", 0..3);
    let columns = (patterns(), patterns(), patterns(), patterns(), 0..99_usize).prop_map(
        |(columns, ignore, categories, blanks, one_hot)| ColumnChoice {
            columns,
            ignore,
            categories,
            blanks,
            one_hot,
            ..ColumnChoice::default()
        },
    );
    let names = prop::collection::vec("[a-z\" ]{1,9}", 1..3);
    let texts = (names, prop::option::of(path()), prop::option::of(1..99_usize), 1..16_usize).prop_map(
        |(columns, tokenizer, length, buckets)| ColumnChoice {
            text: TextChoice { columns, tokenizer, length, buckets, tags: None },
            ..ColumnChoice::default()
        },
    );
    prop_oneof![columns, texts]
}

fn source() -> impl Strategy<Value = Source> {
    let test = || prop::option::of(path());
    prop_oneof![
        path().prop_map(|path| Source::Idx { path, known: None }),
        (path(), select(vec![10, 100])).prop_map(|(path, classes)| Source::Cifar { path, classes }),
        (
            prop::collection::vec(path(), 1..3),
            prop::collection::vec(path(), 0..3),
            prop::collection::vec("[a-z\" ]{0,9}", 0..4),
            select(b",;\t|".to_vec()),
            any::<Option<bool>>(),
            choice(),
            (select(TableFormat::ALL.to_vec()), any::<Option<bool>>())
        )
            .prop_map(|(path, test, label, delimiter, header, choice, (format, in_memory))| {
                let is_csv = format == TableFormat::Csv;
                Source::Table {
                    format,
                    path,
                    test,
                    label,
                    delimiter: if is_csv { delimiter } else { b',' },
                    header: header.filter(|_| is_csv),
                    choice,
                    in_memory: in_memory.filter(|_| format != TableFormat::Parquet),
                }
            }),
        (path(), prop::option::of((1..99_usize, 1..99_usize)), any::<bool>(), image_table())
            .prop_map(|(path, size, grey, table)| Source::Images { path, size, grey, table }),
        (
            prop::collection::vec(path(), 1..3),
            prop::collection::vec(path(), 0..3),
            prop::option::of("[a-z]{1,9}"),
            prop::option::of((1..99_usize, 1..99_usize)),
            any::<bool>()
        )
            .prop_map(|(path, test, label, size, grey)| Source::Tar {
                path,
                test,
                label,
                size,
                grey
            }),
        (path(), test(), "[a-z]{1,9}", "[a-z]{1,9}").prop_map(|(path, test, x, labels)| Source::Arrays {
            path,
            test,
            x,
            labels
        }),
        (1..9999_usize, prop::collection::vec(1..99_usize, 3), 1..99_usize, 0.0..9.0).prop_map(
            |(samples, shape, classes, noise)| Source::Synthetic { samples, shape, classes, noise }
        ),
        Just(Source::Given),
    ]
}

fn data() -> impl Strategy<Value = DataSpec> {
    let weights = prop_oneof![
        Just(ClassWeights::None),
        Just(ClassWeights::Balanced),
        prop::collection::vec(0.0..9.0_f32, 1..5).prop_map(ClassWeights::Given),
    ];
    let order = prop_oneof![
        Just(OrderSpec::InOrder),
        Just(OrderSpec::Sample),
        Just(OrderSpec::Parts),
        (1..99_usize).prop_map(OrderSpec::Block)
    ];
    let rest =
        (0.0..0.99, any::<bool>(), weights, order, 0.01..1.0, prop::option::of(1..9_usize), 1..9_usize);
    (source(), rest, (0..9_usize, any::<bool>(), 0..9_usize, 0.0..1.0)).prop_map(
        |(source, (validation, normalise, class_weights, order, fraction, threads, prefetch), augment)| {
            let (crop, flip, shift, erase) = augment;
            let is_table = matches!(source, Source::Table { .. });
            let augment = if is_table { Augment::default() } else { Augment { crop, flip, shift, erase } };
            DataSpec {
                source,
                validation,
                normalise,
                augment,
                class_weights,
                order,
                spread: false,
                cache: CacheSpec { path: normalise.then(|| "/scratch".into()), max_gib: 1.0 + validation },
                fraction,
                threads,
                prefetch,
            }
        },
    )
}

fn optimizer() -> impl Strategy<Value = OptimizerSpec> {
    let sgd = (0.01..0.99_f32, any::<bool>(), 0.0..1.0_f32)
        .prop_map(|(momentum, nesterov, weight_decay)| Optimizer::Sgd { momentum, nesterov, weight_decay });
    let moments = (0.0..0.99, 0.0..0.99, 1e-9..1e-3_f32, 0.0..1.0_f32);
    let lion = (0.0..0.99, 0.0..0.99, 0.0..1.0_f32)
        .prop_map(|(beta1, beta2, weight_decay)| Optimizer::Lion { beta1, beta2, weight_decay });
    let adafactor = (-1.0..0.0, 1e-9..1e-3_f32, 0.0..1e-2_f32, 0.5..2.0_f32, 0.0..1.0_f32).prop_map(
        |(beta2_decay, eps1, eps2, d, weight_decay)| {
            Optimizer::Adafactor(Adafactor { beta2_decay, eps1, eps2, d, weight_decay })
        },
    );
    let others = (moments, 0..3).prop_map(|((beta1, beta2, eps, weight_decay), which)| {
        let moments = Moments { beta1, beta2, eps, weight_decay };
        [Optimizer::Adam(moments), Optimizer::AdamW(moments), Optimizer::Lamb(moments)][which as usize]
    });
    (prop_oneof![sgd, others, lion, adafactor], 1e-9..10.0).prop_map(|(rule, lr)| {
        let moments = if rule.by_element() && lr > 5.0 { DType::Bf16 } else { DType::F32 };
        OptimizerSpec { rule, lr, moments }
    })
}

fn schedule() -> impl Strategy<Value = Schedule> {
    let shape = prop_oneof![
        Just(ScheduleShape::Constant),
        (1..99_u64, 0.01..2.0)
            .prop_map(|(every_epochs, factor)| ScheduleShape::Step { every_epochs, factor }),
        (0.01..2.0).prop_map(|factor| ScheduleShape::Exponential { factor }),
        (0.0..1.0, 0..9_u64).prop_map(|(floor, restarts)| ScheduleShape::Cosine { floor, restarts }),
        (0.01..0.99, 1.0..99.0, 1.0..1e5).prop_map(|(start_share, div, final_div)| {
            ScheduleShape::OneCycle { start_share, div, final_div }
        }),
        (0.0..1.0).prop_map(|floor| ScheduleShape::Linear { floor }),
    ];
    (shape, 0..999_u64).prop_map(|(shape, warmup)| {
        let warmup = if matches!(shape, ScheduleShape::OneCycle { .. }) { 0 } else { warmup };
        Schedule { shape, warmup }
    })
}

fn train() -> impl Strategy<Value = TrainSpec> {
    let length = prop_oneof![(1..99_u64).prop_map(Length::Epochs), (1..9999_u64).prop_map(Length::Steps)];
    let loss = select(LossKind::ALL.to_vec());
    let early_stop = (names(&["val_loss", "train_loss"]), 1..9_u64, 0.0..1.0)
        .prop_map(|(metric, patience, min_delta)| EarlyStop { metric, patience, min_delta });
    let options =
        (prop::option::of(0.1..9.0), prop::option::of(0.1..0.99), prop::option::of(early_stop), any::<u64>());
    let more = (1..9_usize, 1..9_usize, 0.0..0.99_f32, 0.0..2.0, 1..99_u64);
    (length, optimizer(), schedule(), options, more, loss).prop_map(
        |(length, optimizer, schedule, options, more, loss)| {
            let (clip, ema, early_stop, seed) = options;
            let (accumulate, times, label_smoothing, mixup, log_every_steps) = more;
            let group = |k: u64| GroupSpec {
                params: vec![format!("blocks.{k}.*"), "*.bias".into()],
                lr: (k == 0).then_some(mixup),
                weight_decay: (k == 1).then_some(label_smoothing),
            };
            let n_groups = if optimizer.rule.by_element() { seed % 3 } else { 0 };
            TrainSpec {
                groups: (0..n_groups).map(group).collect(),
                batch: accumulate * times,
                length,
                optimizer,
                schedule,
                clip,
                accumulate,
                ema,
                precision: [PrecisionKind::F32, PrecisionKind::Bf16, PrecisionKind::F16][(seed % 3) as usize],
                f32_layers: (0..seed % 3).map(|k| format!("blocks.{k}")).collect(),
                loss_scale: times as f32,
                loss,
                label_smoothing: if loss == LossKind::CrossEntropy { label_smoothing } else { 0.0 },
                mixup,
                early_stop,
                evaluate_every_steps: (seed % 2 == 0).then_some(log_every_steps),
                log_every_steps,
                seed,
                memory_mib: (seed % 3 == 0).then_some(times),
            }
        },
    )
}

fn parallel() -> impl Strategy<Value = ParallelSpec> {
    let transport = select(Transport::ALL.to_vec());
    let balance = prop_oneof![
        Just(Balance::Hosts),
        Just(Balance::Equal),
        Just(Balance::Auto),
        prop::collection::vec(0.01..99.0, 1..9).prop_map(Balance::Given),
    ];
    let numbers = (any::<Option<u8>>(), 9..99_usize, 0.01..99.0, 1.0..99.0, 99.0..9999.0);
    let schedule = select(PipelineKind::ALL.to_vec());
    let mesh = (1..3_usize, 1..4_usize, 1..3_usize, prop::option::of(4..9_usize), schedule, any::<bool>());
    (transport, balance, numbers, any::<(bool, bool, Option<bool>, bool, Option<bool>)>(), mesh).prop_map(
        |(transport, balance, numbers, flags, mesh)| {
            let (threads, shards, bucket_mib, patience, stall) = numbers;
            let (sync_batch_norm, reproducible, shard_optimizer, shard_gradients, encrypt) = flags;
            let (tensor, stage, sequence, microbatches, schedule, shard_weights) = mesh;
            let [tensor, stage, sequence] =
                [tensor, stage, sequence].map(|n| if balance == Balance::Auto { 1 } else { n });
            let ranks = match &balance {
                Balance::Given(weights) => Some(weights.len() * tensor * stage * sequence),
                _ => None,
            };
            // What a pipeline without a flush cannot have.
            let flushless = stage > 1 && schedule == PipelineKind::TwoBw;
            let [reproducible, shard_weights, shard_gradients] =
                [reproducible, shard_weights, shard_gradients].map(|set| set && !flushless);
            let shard_optimizer = shard_optimizer.filter(|_| !flushless);
            let parts = stage * schedule.chunks_per_stage();
            let cuts = (1..if shard_weights { parts } else { 1 }).map(|k| format!("blocks.{k}"));
            let threads = threads.map(|n| usize::from(n) + 1);
            let shards = if reproducible { shards } else { ParallelSpec::default().shards };
            // A format that loses something goes only with ranks that have the whole model, over a network.
            let whole = tensor * stage * sequence == 1 && !shard_weights && !shard_gradients;
            let over_network = !matches!(transport, Transport::Local | Transport::Shm);
            let coded = whole && over_network && !reproducible && shard_optimizer != Some(true);
            // Replicas that take steps of their own have the whole model too, and nothing is measured.
            let local = coded && encrypt == Some(true) && !sync_batch_norm && balance != Balance::Auto;
            let sliced = balance != Balance::Equal && threads.is_none_or(|n| n >= 4);
            let kinds = [
                WireKind::F32,
                WireKind::F16,
                WireKind::TopK { share: 0.25 },
                WireKind::PowerSgd { rank: 3 },
            ];
            let kind = kinds[threads.unwrap_or(0) % kinds.len()];
            let given = kind != WireKind::F32;
            let wire = WireSpec { kind, start: if given { 7 } else { 0 }, force: given };
            ParallelSpec {
                open: OpenKeys::default(),
                ranks,
                data: None,
                tensor,
                stage,
                sequence,
                microbatches,
                schedule: if stage > 1 { schedule } else { ParallelSpec::default().schedule },
                flush_every: threads.filter(|_| flushless).unwrap_or(ParallelSpec::default().flush_every),
                cuts: if stage > 1 { cuts.collect() } else { Vec::new() },
                shard_weights,
                threads,
                transport,
                encrypt,
                sync_batch_norm,
                reproducible,
                shards,
                shard_optimizer,
                shard_gradients,
                bucket_mib,
                wire: if coded { wire } else { WireSpec::default() },
                sync: if local { SyncKind::Local } else { SyncKind::AllReduce },
                turn: threads.filter(|_| local).map(|n| SyncTurn {
                    start: SyncKind::Local,
                    then: SyncKind::AllReduce,
                    after: n as u64,
                }),
                every: EverySpec {
                    steps: threads.filter(|_| local).unwrap_or(ParallelSpec::default().every.steps),
                    drift: threads.filter(|_| local && balance == Balance::Equal).map(|_| bucket_mib),
                    look: None,
                },
                fragments: if local && sliced { 4 } else { 1 },
                overlap: usize::from(local && sliced && threads.is_some_and(|n| n >= 4)),
                own: if local && threads.is_none() { vec!["head.*".into()] } else { Vec::new() },
                outer: threads.filter(|_| local).map(|n| OuterSpec { lr: 0.5, momentum: 0.9 / n as f64 }),
                staleness: 3,
                servers: ServersSpec::default(),
                elastic: None,
                balance,
                follow_load: sync_batch_norm,
                patience,
                stall,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_job_reads_again(model in model(), data in data(), train in train(), parallel in parallel()) {
        let name = "a name".to_string();
        let mut job = Job { name, model, data, train, parallel, output: OutputSpec::default() };
        if job.parallel.reproducible {
            job.parallel = ParallelSpec { sync_batch_norm: false, ..job.parallel };
            job.train.batch *= job.parallel.shards;
            job.train.accumulate = 1;
            job.parallel.microbatches = None;
        }
        // What cannot be together is tested by hand.
        if job.parallel.microbatches.is_some() || job.parallel.stage > 1 {
            job.train.accumulate = 1;
            job.parallel.microbatches = job.parallel.microbatches.or(Some(4)).filter(|_| !job.parallel.reproducible);
        }
        if job.parallel.is_flushless() && job.train.precision == PrecisionKind::F16 {
            let ParallelSpec { schedule, flush_every, .. } = ParallelSpec::default();
            job.parallel = ParallelSpec { schedule, flush_every, ..job.parallel };
        }
        if job.parallel.sync == SyncKind::Local {
            job.train.ema = None;
            job.train.precision = PrecisionKind::Bf16;
        }
        if !job.train.optimizer.rule.by_element() {
            let ranks = job.parallel.ranks.map(|ranks| ranks / job.parallel.tensor);
            (job.parallel.ranks, job.parallel.tensor) = (ranks, 1);
        }
        job.train.batch *= 100;
        if job.parallel.refuses_to_shard(&job.train.optimizer).is_some() {
            job.parallel.shard_gradients = false;
        }
        match (job.train.loss, &mut job.data.source) {
            (LossKind::CrossEntropy, Source::Table { label, .. }) => label.truncate(1),
            (LossKind::CrossEntropy, _) => {}
            _ => {
                job.data.class_weights = ClassWeights::None;
                job.output.best = Some("val_loss".into());
            }
        }
        check(&job);
    }
}
