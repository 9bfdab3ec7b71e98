//! Every key that a job file may have, and for which kinds. Readers ask for exactly these (a cursor checks it in debug
//! builds), and a test holds `docs/job-file.md` to them.

/// A table of the file.
pub(super) struct Grammar {
    /// Its path, such as `train.optimizer`; lists have the path of their elements.
    pub(super) path: &'static str,
    /// Its keys.
    pub(super) keys: &'static [Key],
}

/// A key of a table.
pub(super) struct Key {
    pub(super) name: &'static str,
    /// The kinds that have it; none: all.
    pub(super) kinds: &'static [&'static str],
}

impl Grammar {
    /// The table at a path.
    pub(super) fn at(path: &str) -> &'static Grammar {
        GRAMMARS.iter().find(|g| g.path == path).expect("paths of cursors are those of the list below")
    }

    /// The keys that a kind has; all keys, if the kind is not known.
    pub(super) fn keys_of(&self, kind: Option<&str>) -> impl Iterator<Item = &'static str> {
        let fits = move |key: &&Key| kind.is_none_or(|kind| key.is_for(kind));
        self.keys.iter().filter(fits).map(|key| key.name).collect::<Vec<_>>().into_iter()
    }
}

impl Key {
    pub(super) fn is_for(&self, kind: &str) -> bool {
        self.kinds.is_empty() || self.kinds.contains(&kind)
    }
}

const fn all(name: &'static str) -> Key {
    Key { name, kinds: &[] }
}

const fn of(name: &'static str, kinds: &'static [&'static str]) -> Key {
    Key { name, kinds }
}

/// The kinds of `[data]`.
pub(super) const DATA_KINDS: [&str; 11] = [
    "idx",
    "mnist",
    "fashion-mnist",
    "cifar10",
    "cifar100",
    "csv",
    "images",
    "text",
    "arrays",
    "synthetic",
    "given",
];

/// The kinds of optimizers.
pub(super) const OPTIMIZER_KINDS: [&str; 4] = ["sgd", "adam", "adamw", "lamb"];

/// The kinds of schedules.
pub(super) const SCHEDULE_KINDS: [&str; 6] =
    ["constant", "step", "exponential", "cosine", "one-cycle", "linear"];

/// What ranks can talk over.
pub(super) const TRANSPORTS: [&str; 5] = ["auto", "local", "shm", "tcp", "mpi"];

/// What can be watched.
pub(super) const METRICS: [&str; 5] =
    ["train_loss", "val_loss", "val_accuracy", "val_top5", "val_perplexity"];

const IMAGE_MODELS: &[&str] = &[
    "lenet",
    "cnn",
    "alexnet",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet18_cifar",
    "resnet34_cifar",
    "resnet50_cifar",
    "resnet101_cifar",
];
const CLASSIFIERS: &[&str] = &[
    "mlp",
    "lenet",
    "cnn",
    "alexnet",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet18_cifar",
    "resnet34_cifar",
    "resnet50_cifar",
    "resnet101_cifar",
    "lstm",
    "gru",
    "bilstm",
    "bigru",
    "encoder",
    "layers",
];
const WITH_PATH: &[&str] =
    &["idx", "mnist", "fashion-mnist", "cifar10", "cifar100", "csv", "images", "text", "arrays"];
const WITH_IMAGES: &[&str] =
    &["idx", "mnist", "fashion-mnist", "cifar10", "cifar100", "images", "arrays", "synthetic", "given"];
const WITH_CLASSES: &[&str] = &[
    "idx",
    "mnist",
    "fashion-mnist",
    "cifar10",
    "cifar100",
    "csv",
    "images",
    "arrays",
    "synthetic",
    "given",
];
const CONVS: &[&str] = &["conv", "conv_transpose"];
const WINDOWS: &[&str] = &["conv", "conv_transpose", "max_pool", "avg_pool"];

/// All tables.
pub(super) const GRAMMARS: [Grammar; 11] = [
    Grammar {
        path: "",
        keys: &[all("name"), all("model"), all("data"), all("train"), all("parallel"), all("output")],
    },
    Grammar {
        path: "model",
        keys: &[
            all("kind"),
            all("weights"),
            of("layers", &["gpt", "lstm", "gru", "bilstm", "bigru", "encoder", "layers"]),
            of("input", &["layers"]),
            of("inputs", &["mlp"]),
            of("hidden", &["mlp", "lstm", "gru", "bilstm", "bigru", "encoder"]),
            of("activation", &["mlp"]),
            of("channels", IMAGE_MODELS),
            of("image", &["lenet"]),
            of("widths", &["cnn"]),
            of("width", &["gpt", "lstm", "gru", "bilstm", "bigru", "encoder"]),
            of("heads", &["gpt", "encoder"]),
            of("vocab", &["gpt", "lstm", "gru", "bilstm", "bigru", "encoder", "layers"]),
            of("context", &["gpt", "lstm", "gru", "bilstm", "bigru", "encoder", "layers"]),
            of("dropout", &["mlp", "cnn", "gpt", "alexnet", "lstm", "gru", "bilstm", "bigru", "encoder"]),
            of("classes", CLASSIFIERS),
        ],
    },
    Grammar {
        path: "model.layers",
        keys: &[
            all("kind"),
            of("outputs", &["linear", "conv", "conv_transpose"]),
            of("bias", &["linear", "conv", "conv_transpose"]),
            of("kernel", WINDOWS),
            of("stride", WINDOWS),
            of("padding", WINDOWS),
            of("dilation", CONVS),
            of("groups", &["conv", "conv_transpose", "group_norm"]),
            of("output_padding", &["conv_transpose"]),
            of("out", &["adaptive_avg_pool"]),
            of("p", &["dropout"]),
            of("width", &["embedding"]),
            of("hidden", &["lstm", "gru", "encoder_layer"]),
            of("bidirectional", &["lstm", "gru"]),
            of("heads", &["attention", "encoder_layer"]),
            of("causal", &["attention", "encoder_layer"]),
            of("activation", &["encoder_layer"]),
            of("dropout", &["encoder_layer"]),
            of("norm_first", &["encoder_layer"]),
            of("layers", &["residual"]),
        ],
    },
    Grammar {
        path: "data",
        keys: &[
            all("kind"),
            of("path", WITH_PATH),
            of("test", &["csv", "text", "arrays"]),
            of("label", &["csv"]),
            of("delimiter", &["csv"]),
            of("header", &["csv"]),
            of("size", &["images"]),
            of("grey", &["images"]),
            of("tokenizer", &["text"]),
            of("context", &["text"]),
            of("x", &["arrays"]),
            of("labels", &["arrays"]),
            of("samples", &["synthetic"]),
            of("shape", &["synthetic"]),
            of("classes", &["synthetic"]),
            of("noise", &["synthetic"]),
            all("validation"),
            of("normalise", WITH_CLASSES),
            of("augment", WITH_IMAGES),
            of("class_weights", WITH_CLASSES),
            all("order"),
            all("block"),
            all("fraction"),
            all("threads"),
            all("prefetch"),
        ],
    },
    Grammar { path: "data.augment", keys: &[all("crop"), all("flip"), all("shift"), all("erase")] },
    Grammar {
        path: "train",
        keys: &[
            all("batch"),
            all("epochs"),
            all("steps"),
            all("optimizer"),
            all("schedule"),
            all("clip"),
            all("accumulate"),
            all("ema"),
            all("label_smoothing"),
            all("mixup"),
            all("early_stop"),
            all("evaluate_every"),
            all("log_every"),
            all("seed"),
            all("precision"),
            all("memory_mib"),
        ],
    },
    Grammar {
        path: "train.optimizer",
        keys: &[
            all("kind"),
            all("lr"),
            all("weight_decay"),
            of("momentum", &["sgd"]),
            of("nesterov", &["sgd"]),
            of("betas", &["adam", "adamw", "lamb"]),
            of("eps", &["adam", "adamw", "lamb"]),
        ],
    },
    Grammar {
        path: "train.schedule",
        keys: &[
            all("kind"),
            of("warmup", &["constant", "step", "exponential", "cosine", "linear"]),
            of("every_epochs", &["step"]),
            of("factor", &["step", "exponential"]),
            of("floor", &["cosine", "linear"]),
            of("restarts", &["cosine"]),
            of("start_share", &["one-cycle"]),
            of("div", &["one-cycle"]),
            of("final_div", &["one-cycle"]),
        ],
    },
    Grammar { path: "train.early_stop", keys: &[all("metric"), all("patience"), all("min_delta")] },
    Grammar {
        path: "parallel",
        keys: &[
            all("ranks"),
            all("threads"),
            all("transport"),
            all("encrypt"),
            all("sync_batch_norm"),
            all("reproducible"),
            all("shards"),
            all("shard_optimizer"),
            all("shard_gradients"),
            all("bucket_mib"),
            all("balance"),
            all("patience"),
            all("stall"),
        ],
    },
    Grammar {
        path: "output",
        keys: &[
            all("path"),
            all("every_steps"),
            all("every_epochs"),
            all("every_minutes"),
            all("keep"),
            all("best"),
            all("tensorboard"),
        ],
    },
];
