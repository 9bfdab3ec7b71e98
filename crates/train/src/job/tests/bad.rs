//! Mistakes, and what is said about each: the texts are part of the interface.

use super::*;

/// The whole text of the errors; lines of `want` are indented by its first one.
fn check(text: &str, sets: &[&str], want: &str) {
    let got = read(text, sets).expect_err("a mistake").to_string();
    let want = want.strip_prefix('\n').unwrap_or(want);
    let indent = want.len() - want.trim_start().len();
    let want: Vec<_> = want.lines().map(|l| l.get(indent..).unwrap_or("")).collect();
    let want = want.join("\n");
    assert_eq!(got, want.trim_end(), "\n--- got ---\n{got}\n");
}

/// One error's message and hint.
fn check_one(text: &str, sets: &[&str], message: &str, hint: &str) {
    let errors = read(text, sets).expect_err("a mistake").errors;
    let got: Vec<_> = errors.iter().map(|e| (e.message.as_str(), e.hint.as_str())).collect();
    assert_eq!(got, [(message, hint)], "\n{text}");
}

#[test]
fn all_mistakes_are_reported_at_once() {
    let text = r#"[modle]
kind = "mlp"

[data]
kind = "idx"
path = "digits"
label = "species"
validation = 1.5

[train]
bach = 64
epochs = "3"
optimizer = { kind = "adam", lr = -1, momentum = 0.9 }
lr = 0.1

[output]
best = "accuracy"
"#;
    check(
        text,
        &["train.log_every=0"],
        r#"
        error: unknown section [modle]
         --> job.toml:1:2
          |
        1 | [modle]
          |  ^^^^^
          = help: did you mean [model]?

        error: `label` does not belong to [data] of kind `idx`
         --> job.toml:7:1
          |
        7 | label = "species"
          | ^^^^^
          = help: it belongs to csv, jsonl, parquet, tar, images

        error: `data.validation` is 1.5; it must be at least 0 and less than 1
         --> job.toml:8:14
          |
        8 | validation = 1.5
          |              ^^^

        error: unknown key `bach` in [train]
          --> job.toml:11:1
           |
        11 | bach = 64
           | ^^^^
           = help: did you mean `batch`?

        error: `train.epochs` is the string "3"; a whole number is needed
          --> job.toml:12:10
           |
        12 | epochs = "3"
           |          ^^^
           = help: leave the quotes out: 3

        error: `train.optimizer.lr` is -1.0; it must be more than 0
          --> job.toml:13:35
           |
        13 | optimizer = { kind = "adam", lr = -1, momentum = 0.9 }
           |                                   ^^

        error: `momentum` does not belong to `train.optimizer` of kind `adam`
          --> job.toml:13:39
           |
        13 | optimizer = { kind = "adam", lr = -1, momentum = 0.9 }
           |                                       ^^^^^^^^
           = help: it belongs to sgd

        error: unknown key `lr` in [train]
          --> job.toml:14:1
           |
        14 | lr = 0.1
           | ^^
           = help: `lr` is a key of `train.optimizer`

        error: `output.best` is "accuracy", which is not known
          --> job.toml:17:8
           |
        17 | best = "accuracy"
           |        ^^^^^^^^^^
           = help: did you mean "val_accuracy"?

        error: `train.log_every` is 0; it must be at least 1
         --> command line
          |
          | --set train.log_every=0
          |                       ^

        10 errors in job.toml"#,
    );
}

#[test]
fn what_is_missing() {
    check(
        "",
        &[],
        r#"
        error: there is no section [model]
         --> job.toml
          = help: say what to train: [model] and kind = "mlp", or another

        error: there is no section [data]
         --> job.toml
          = help: say what to train on: [data] and kind = "csv", or another

        2 errors in job.toml"#,
    );
    check(
        "[model]\nkind = \"mlp\"\n[data]\nkind = \"csv\"",
        &[],
        r#"
        error: [data] needs `path`
         --> job.toml:3:1
          |
        3 | [data]
          | ^^^^^^
          = help: say where the file is; paths are relative to the job file's folder

        1 error in job.toml"#,
    );
    let kinds = "known are idx, mnist, fashion-mnist, cifar10, cifar100, csv, jsonl, parquet, images, tar, text, arrays, synthetic, given";
    check_one("[model]\nkind = \"mlp\"\n[data]", &[], "[data] needs `kind`", kinds);
    let kinds = "known are mlp, tabular, lenet, cnn, gpt, gpt2, bert, alexnet, resnet18, resnet34, resnet50, resnet101, resnet18_cifar, \
                 resnet34_cifar, resnet50_cifar, resnet101_cifar, lstm, gru, bilstm, bigru, encoder, layers";
    check_one("[data]\nkind = \"synthetic\"\n[model]", &[], "[model] needs `kind`", kinds);
}

#[test]
fn syntax() {
    check(
        "[model]\nkind = mlp\n[train\n",
        &[],
        r#"
        error: not TOML: string values must be quoted, expected literal string
         --> job.toml:2:8
          |
        2 | kind = mlp
          |        ^^^

        error: not TOML: unclosed table, expected `]`
         --> job.toml:3:7
          |
        3 | [train
          |       ^

        2 errors in job.toml"#,
    );
    check_one(&format!("{SMALL}kind = \"csv\""), &[], "not TOML: duplicate key", "");
    let deep = format!("{SMALL}\n[train]\nx = {}{}", "[".repeat(5000), "]".repeat(5000));
    assert!(read(&deep, &[]).is_err());
    let dotted = format!("{SMALL}\n[train]\n{}x = 1", "a.".repeat(50_000));
    assert!(read(&dotted, &[]).is_err());
}

#[test]
fn kinds_and_keys() {
    let check = |text: &str, message: &str, hint: &str| check_one(text, &[], message, hint);
    let model = |text: &str| format!("[data]\nkind = \"synthetic\"\n[model]\n{text}");
    let data = |text: &str| format!("[model]\nkind = \"mlp\"\n[data]\n{text}");
    let train = |text: &str| format!("{SMALL}[train]\n{text}");
    let rest = |text: &str| format!("{SMALL}{text}");
    check(
        &model("kind = \"resnet-18\""),
        "`model.kind` is \"resnet-18\", which is not known",
        "did you mean \"resnet18\"?",
    );
    check(
        &model("kind = \"gpt\"\nheads = 5"),
        "`model.heads` of 5 does not divide `model.width` of 384",
        "heads = 4 would",
    );
    check(
        &model("kind = \"gpt\"\nlayers = [\"relu\"]"),
        "`model.layers` is an array; a model of this kind has a number of layers",
        "leave `kind` out for a list of custom layers",
    );
    check(
        &model("kind = \"mlp\"\nhidden = 64"),
        "`model.hidden` is the number 64; an array of whole numbers is needed",
        "",
    );
    check(&model("kind = \"mlp\"\nhidden = [64, 0]"), "`model.hidden[1]` is 0; it must be at least 1", "");
    check(
        &model("kind = \"mlp\"\nactivation = \"rel\""),
        "`model.activation` is \"rel\", which is not known",
        "did you mean \"relu\"?",
    );
    check(
        &model("kind = \"resnet18\"\nwidth = 3"),
        "`width` does not belong to [model] of kind `resnet18`",
        "it belongs to tabular, gpt, gpt2, bert, lstm, gru, bilstm, bigru, encoder",
    );
    check(
        &model("kind = \"mlp\"\nclasses = 99999999999999999999"),
        "`model.classes` is 99999999999999999999; it must be at most 1048576",
        "",
    );
    check(
        &model("kind = \"mlp\"\nhead = \"new\""),
        "`model.head` is about a file of weights, and there is no `model.weights`",
        "give `weights = \"FILE.safetensors\"`, or leave it out",
    );
    check(
        &model("kind = \"mlp\"\nweights = \"x\"\nmap = [{ from = \"a.*\", to = \"*.*\" }]"),
        "`to` of \"*.*\" has more `*` than `from` of \"a.*\"",
        "each one stands for what one of `from` stood for",
    );
    check(
        &model("kind = \"gpt2\"\npath = \"x\"\nlayers = 2"),
        "`model.layers` is given, and the sizes are in the folder `model.path`",
        "leave it out",
    );
    check(
        &model("kind = \"gpt2\"\npath = \"x\"\nweights = \"y\""),
        "`model.path` and `model.weights` are both given, and both have weights",
        "remove one of the two",
    );
    check(
        &model("kind = \"gpt\"\npath = \"x\""),
        "`path` does not belong to [model] of kind `gpt`",
        "it belongs to gpt2, bert",
    );
    check(
        &train("optimizer = \"lamb\"\ngroups = [{ params = [\"fc1\"], lr = 0.1 }]"),
        "`train.groups` needs an optimizer that goes by element, and this one looks at whole tensors",
        "use adamw, adam, sgd or lion, or leave `groups` out",
    );
    check(
        &model("kind = \"mlp\"\nweights = \"\""),
        "`model.weights` is not a path",
        "write the path of a file or a folder",
    );
    check(
        &data("kind = \"text\"\npath = \"x\"\nnormalise = true"),
        "`normalise` does not belong to [data] of kind `text`",
        "it belongs to idx, mnist, fashion-mnist, cifar10, cifar100, csv, jsonl, parquet, images, tar, arrays, synthetic, given",
    );
    check(
        &data("kind = \"csv\"\npath = \"x\"\ndelimiter = \"ab\""),
        "`data.delimiter` is \"ab\"; one ASCII character is needed",
        "such as \",\", \";\" or \"\\t\"",
    );
    check(
        &data("kind = \"csv\"\npath = 3"),
        "`data.path` is the number 3; a string or an array of paths is needed",
        "",
    );
    check(
        &data("kind = \"synthetic\"\nshape = [3, 4]"),
        "`data.shape` has 2 elements; [width] or [channels, height, width] is needed",
        "",
    );
    check(
        &data("kind = \"synthetic\"\nshape = [9999, 9999, 9999]"),
        "`data.shape` has 999700029999 numbers per sample; at most 268435456 are possible",
        "",
    );
    check(
        &data("kind = \"synthetic\"\nblock = 8"),
        "`data.block` is given, but `data.order` is not \"block\"",
        "write order = \"block\"",
    );
    check(
        &data("kind = \"synthetic\"\naugment = true"),
        "`data.augment` is `true`; a table such as { crop = 4, flip = true } is needed",
        "",
    );
    check(
        &data("kind = \"csv\"\npath = \"s3://b/x.csv\"\ncache = { max_gib = 0 }"),
        "`data.cache.max_gib` is 0.0; it must be more than 0 and at most 1000000",
        "",
    );
    check(
        &data("kind = \"csv\"\npath = [\"s3://b/x.csv\"]\nspread = true"),
        "`data.spread` is for files of hosts, and every host reads the same from an address",
        "leave it out",
    );
    check(
        &data("kind = \"synthetic\"\naugment = { flop = true }"),
        "unknown key `flop` in `data.augment`",
        "did you mean `flip`?",
    );
    check(
        &data("kind = \"synthetic\"\nclass_weights = [1, -2]"),
        "`data.class_weights[1]` is -2.0; it must be at least 0",
        "",
    );
    check(
        &data("kind = \"synthetic\"\nfraction = 0"),
        "`data.fraction` is 0.0; it must be more than 0 and at most 1",
        "",
    );
    check(
        &train("epochs = 3\nsteps = 4"),
        "`train.epochs` and `train.steps` are both given",
        "remove one of the two",
    );
    check(
        &train("batch = 64\naccumulate = 6"),
        "`train.accumulate` of 6 does not divide `train.batch` of 64",
        "accumulate = 4 would",
    );
    check(&train("batch = 2.5"), "`train.batch` is the number 2.5; a whole number is needed", "");
    check(
        &train("optimizer = \"sdg\""),
        "`train.optimizer` is \"sdg\", which is not known",
        "did you mean \"sgd\"?",
    );
    check(
        &train("optimizer = { kind = \"sgd\", nesterov = true, momentum = 0 }"),
        "`train.optimizer.nesterov` needs a momentum",
        "write momentum = 0.9, or leave `nesterov` out",
    );
    check(
        &train("optimizer = { learning_rate = 0.1 }"),
        "unknown key `learning_rate` in `train.optimizer`",
        "did you mean `lr`?",
    );
    check(
        &train("optimizer = { betas = [0.9] }"),
        "`train.optimizer.betas` has 1 element; an array of two numbers is needed",
        "",
    );
    check(&train("optimizer = { lr = 1e999 }"), "`train.optimizer.lr` is inf; it must be more than 0", "");
    check(&train("optimizer = { lr = nan }"), "`train.optimizer.lr` is NaN; it must be more than 0", "");
    check(
        &train("schedule = { warmup = 3 }"),
        "`train.schedule` needs `kind`",
        "known are constant, step, exponential, cosine, one-cycle, linear",
    );
    check(
        &train("schedule = { kind = \"one-cycle\", warmup = 3 }"),
        "`warmup` does not belong to `train.schedule` of kind `one-cycle`",
        "it belongs to constant, step, exponential, cosine, linear",
    );
    check(
        &train("precision = \"f8\""),
        "`train.precision` is \"f8\", which is not known",
        "known are f32, f32-strict, bf16, f16, auto",
    );
    check(
        &train("optimizer = { kind = \"lamb\", moments = \"bf16\" }"),
        "`moments` does not belong to `train.optimizer` of kind `lamb`",
        "it belongs to sgd, adam, adamw, lion",
    );
    check(
        &train("f32_layers = \"head\""),
        "`train.f32_layers` is the string \"head\"; an array of paths of layers is needed",
        "",
    );
    check(&train("f32_layers = [3]"), "`train.f32_layers[0]` is the number 3; a string is needed", "");
    check(
        &train("early_stop = { metric = \"loss\" }"),
        "`train.early_stop.metric` is \"loss\", which is not known",
        "known are train_loss, val_loss, val_accuracy, val_top5, val_perplexity, val_r2, val_mae, val_f1",
    );
    check(
        &train("colour = 3"),
        "unknown key `colour` in [train]",
        "valid keys are batch, epochs, steps, optimizer, groups, schedule, clip, accumulate, ema, loss, label_smoothing, mixup, early_stop, evaluate_every, log_every, seed, precision, f32_layers, loss_scale, memory_mib",
    );
    check(
        &rest("[parallel]\nthreads = \"all\""),
        "`parallel.threads` is the string \"all\"; \"auto\" or a whole number is needed",
        "",
    );
    check(&rest("[output]\nkeep = 0"), "`output.keep` is 0; it must be at least 1", "");
    check(&rest("[output]\npath = 1979-05-27"), "`output.path` is a date; a string is needed", "");
    check(&rest("[[output]]\nkeep = 1"), "`output` is an array; a section is needed", "write [output]");
    check(
        &format!("name = \"../x\"\n{SMALL}"),
        "`name` is \"../x\"; it must be usable as the name of a folder",
        "leave out slashes",
    );
    check(&format!("batch = 3\n{SMALL}"), "unknown key `batch` in the file", "`batch` is a key of [train]");
    check(
        &rest("[network]"),
        "unknown section [network]",
        "there are name, model, data, train, parallel, output",
    );
}

#[test]
fn layers() {
    let check_list = |layers: &str, message: &str, hint: &str| {
        let text = format!("[data]\nkind = \"synthetic\"\n[model]\ninput = [1, 8, 8]\nlayers = [{layers}]");
        check_one(&text, &[], message, hint);
    };
    check_list(
        "\"flatten\", \"rleu\", \"linear\"",
        "`model.layers[1]` is \"rleu\", which is not known",
        "did you mean \"relu\"?",
    );
    check_list(
        "\"flatten\", \"linear\", \"relu\"",
        "`model.layers[1]` needs `outputs`",
        "only the last layer may leave it out, for the number of classes",
    );
    check_list(
        "\"flatten\", 3, \"linear\"",
        "`model.layers[1]` is the number 3; a layer (a table with a `kind`, or a kind alone) is needed",
        "",
    );
    check_list(
        "{ kind = \"conv\", outputs = 4, kernl = 3 }",
        "unknown key `kernl` in `model.layers[0]`",
        "did you mean `kernel`?",
    );
    check_list(
        "{ kind = \"conv\", outputs = 4, kernel = [3, 3, 3] }",
        "`model.layers[0].kernel` has 3 elements; [rows, columns] is needed",
        "",
    );
    check_list(
        "{ kind = \"flatten\", outputs = 4 }",
        "`outputs` does not belong to `model.layers[0]` of kind `flatten`",
        "it belongs to linear, conv, conv_transpose",
    );
    check_list(
        "{ kind = \"residual\", layers = [\"linear\"] }",
        "`model.layers[0].layers[0]` needs `outputs`",
        "only the last layer may leave it out, for the number of classes",
    );
    check_list(
        "{ kind = \"tanh\", precision = \"bf16\" }, \"linear\"",
        "`model.layers[0].precision` is \"bf16\"; only \"f32\" is supported",
        "",
    );
    check_list("", "`model.layers` is empty; at least one layer is needed", "");
    let text = r#"[data]
kind = "synthetic"
[model]
input = [1, 8, 8]
layers = [
    { kind = "conv", outputs = 4, kernel = 3 },
    { kind = "residual", layers = [
        { kind = "group_norm", groups = 3 },
    ] },
    "flatten",
    "linear",
]
"#;
    check(
        text,
        &[],
        r#"
        error: layers[1].layers[0] (group_norm): group_norm: `groups` of 3 does not divide `channels` of 4
         --> job.toml:8:9
          |
        8 |         { kind = "group_norm", groups = 3 },
          |         ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^

        1 error in job.toml"#,
    );
}

#[test]
fn overrides() {
    check(
        SMALL,
        &["train.bach=12"],
        r#"
        error: unknown key `bach` in [train]
         --> command line
          |
          | --set train.bach=12
          |             ^^^^
          = help: did you mean `batch`?

        1 error in job.toml"#,
    );
    let form = "write SECTION.KEY=VALUE, such as train.batch=128";
    check_one(SMALL, &["batch"], "an override needs `=`", form);
    check_one(SMALL, &["train..batch=3"], "an override needs a name on each side of a dot", form);
    check_one(SMALL, &["=3"], "an override needs a name on each side of a dot", form);
    check_one(SMALL, &["batch=3"], "unknown key `batch` in the file", "`batch` is a key of [train]");
    check_one(
        SMALL,
        &["train.batch=lots"],
        "`train.batch` is the string \"lots\"; a whole number is needed",
        "",
    );
    check_one(
        SMALL,
        &["train.optimizer.lr=x"],
        "`train.optimizer.lr` is the string \"x\"; a number is needed",
        "",
    );
    check_one(SMALL, &["data.kind.x=3"], "`kind` is the string \"synthetic\", which has no keys", form);
    check_one(SMALL, &["train=3"], "`train` is the number 3; a section is needed", "write [train]");
    let list = "[data]\nkind = \"synthetic\"\n[model]\nlayers = [\"linear\"]";
    check_one(
        list,
        &["model.layers.1.outputs=3"],
        "there is no element `1` in an array of 1; elements are counted from 0",
        form,
    );
    let errors = read(SMALL, &["train.bach=12"]).unwrap_err();
    let json = serde_json::to_value(&errors).unwrap();
    assert_eq!(json["errors"][0]["origin"], "--set train.bach=12");
    assert_eq!(json["errors"][0]["key"], "train.bach");
}

#[test]
fn long_lines_and_odd_letters_keep_their_marks() {
    let text = format!("{SMALL}[train]\n\t\"bätch\" = 3");
    let shown = read(&text, &[]).unwrap_err().to_string();
    assert!(shown.contains("job.toml:6:2\n  |\n6 |  \"bätch\" = 3\n  |  ^^^^^^^"), "{shown}");
    let text = format!("{SMALL}[train]\noptimizer = {{ lr = 0.1,{}bach = 3 }}", " ".repeat(500));
    let shown = read(&text, &[]).unwrap_err().to_string();
    let lines: Vec<_> = shown.lines().collect();
    let at = lines[3].find("bach").unwrap();
    assert_eq!(lines[4].find("^^^^"), Some(at), "{shown}");
    assert!(lines[3].len() < 140, "{shown}");
}

#[test]
fn files_that_cannot_be_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("job.toml");
    let check = |want: &str| {
        let got = Job::from_file(&path, &[]).unwrap_err().errors;
        assert_eq!((got.len(), got[0].line), (1, 0));
        assert!(got[0].message.contains(want), "{}", got[0].message);
    };
    check("cannot read");
    std::fs::write(&path, [b'a', 0xff]).unwrap();
    check("is not text: byte 1 is not UTF-8");
    std::fs::write(&path, vec![b' '; (1 << 20) + 1]).unwrap();
    check("is larger than 1048576 bytes");
}

#[test]
fn no_prefix_of_a_file_and_no_changed_byte_makes_it_panic() {
    let text = include_str!("full.toml");
    for end in (0..text.len()).filter(|&end| text.is_char_boundary(end)) {
        let _ = read(&text[..end], &[]).map_err(|e| e.to_string());
    }
    for at in 0..text.len() {
        for byte in [b'"', b'9', b'-', b'.', b'[', b'}', b'\n'] {
            let mut bytes = text.as_bytes().to_vec();
            bytes[at] = byte;
            if let Ok(text) = String::from_utf8(bytes) {
                let _ = read(&text, &[]).map_err(|e| e.to_string());
            }
        }
    }
}

#[test]
fn losses_and_labels() {
    let check = |loss: &str, text: &str, message: &str, hint: &str| {
        let data = "kind = \"csv\"\npath = \"a.csv\"\n";
        let (data, rest) =
            text.split_once('|').map_or((data.into(), text), |(d, rest)| (format!("{data}{d}"), rest));
        let text = format!("[model]\nkind = \"mlp\"\n[data]\n{data}[train]\nloss = \"{loss}\"\n{rest}");
        check_one(&text, &[], message, hint);
    };
    check("rmse", "", "`train.loss` is \"rmse\", which is not known", "did you mean \"mse\"?");
    check(
        "mse",
        "label_smoothing = 0.1",
        "`train.label_smoothing` is for classes, and `train.loss` is \"mse\"",
        "leave it out",
    );
    check(
        "bce",
        "class_weights = \"balanced\"\n|",
        "`data.class_weights` is for classes, and `train.loss` is \"bce\"",
        "leave it out",
    );
    check(
        "cross_entropy",
        "label = [\"a\", 3]\n|",
        "`data.label` has 2 columns, and classes have one",
        "for several numbers write loss = \"mse\" under [train], for several labels of 0 or 1 loss = \"bce\"",
    );
    check("mse", "label = []\n|", "`data.label` is empty; name a column", "leave it out for the last column");
    check(
        "huber",
        "[output]\nbest = \"val_accuracy\"",
        "`output.best` is \"val_accuracy\", which is not measured with a loss of \"huber\"",
        "take train_loss, val_loss, val_r2, val_mae",
    );
    check(
        "bce",
        "early_stop = { metric = \"val_r2\" }",
        "`train.early_stop.metric` is \"val_r2\", which is not measured with a loss of \"bce\"",
        "take train_loss, val_loss, val_f1, val_accuracy",
    );
    check(
        "cross_entropy",
        "early_stop = { metric = \"val_f1\" }",
        "`train.early_stop.metric` is \"val_f1\", which is not measured with a loss of \"cross_entropy\"",
        "take train_loss, val_loss, val_accuracy, val_top5, val_perplexity",
    );
}

#[test]
fn meshes_that_cannot_be() {
    let row = |lines: &str, message: &str, hint: &str| {
        check_one(&format!("{SMALL}[parallel]\n{lines}"), &[], message, hint);
    };
    row("stage = 0", "`parallel.stage` is 0; it must be at least 1", "");
    row(
        "ranks = 6\ntensor = 2\nstage = 2",
        "`parallel.ranks` is 6: tensor = 2, stage = 2 make 4 ranks for each copy of the model, and 6 cannot be divided by 4",
        "use 4 or 8 ranks",
    );
    row(
        "ranks = 8\ndata = 4\ntensor = 4",
        "`parallel.ranks` is 8: data = 4 and tensor = 4 make 16 ranks, and there are 8",
        "leave `parallel.data` out, or use 16 ranks",
    );
    row(
        "schedule = \"gpipe\"",
        "`parallel.schedule` is a pipeline schedule, and the job has one stage",
        "write `stage = 2` or more, or leave it out",
    );
    row(
        "stage = 2\nflush_every = 4",
        "`parallel.flush_every` is for pipelines that go on from step to step without a flush",
        "write schedule = \"2bw\", or leave it out",
    );
    row(
        "stage = 4\nmicrobatches = 2\nschedule = \"2bw\"",
        "schedule \"2bw\" with 4 stages needs 3 or more microbatches in a step, not 2; raise `parallel.microbatches`, lower \
         `parallel.stage`, or set `parallel.schedule = \"1f1b\"`",
        "",
    );
    row(
        "stage = 2\nschedule = \"2bw\"\n[train]\nprecision = \"f16\"",
        "`parallel.schedule = \"2bw\"` does not work with `train.precision = \"f16\"`: the next step's passes begin before it is \
         known whether this one overflowed",
        "use precision = \"bf16\", or the schedule \"zb-h1\"",
    );
    for (key, why) in [
        ("reproducible", "gradients that are one step old are not those of one rank"),
        ("shard_weights", "passes read two versions of the weights, and shards are gathered from one"),
        ("shard_gradients", "ranks would wait for each other's part of every update"),
        ("shard_optimizer", "ranks would wait for each other's part of every update"),
    ] {
        row(
            &format!("stage = 2\nschedule = \"2bw\"\n{key} = true"),
            &format!("`parallel.schedule = \"2bw\"` does not work with `parallel.{key}`: {why}"),
            &format!("leave `{key}` out, or use \"zb-h1\", which waits little and has no old gradients"),
        );
    }
    row(
        "stage = 2\nschedule = \"zb\"",
        "`parallel.schedule` is \"zb\", which is not known",
        "did you mean \"zb-v\"?",
    );
    row(
        "stage = 2\nschedule = \"zb-v\"\ncuts = [\"0\"]",
        "`parallel.cuts` names 1 layers, and a \"zb-v\" pipeline of 2 stages is cut before 3",
        "name 3 layers, or leave `cuts` out",
    );
    row(
        "tensor = 2\nbalance = \"auto\"",
        "`parallel.balance = \"auto\"` measures single ranks, and here several have a copy of the model together",
        "write \"equal\", or one weight for each rank of the data axis",
    );
    row(
        "stage = 2\nmicrobatches = 8\n[train]\naccumulate = 4",
        "`parallel.microbatches` is 8 and `train.accumulate` is 4; both say into how many microbatches a step is cut",
        "leave one of them out",
    );
    row(
        "reproducible = true\nmicrobatches = 4",
        "`parallel.microbatches` is 4, and a reproducible step is cut into its 8 shards",
        "leave it out, and set `shards`",
    );
    row(
        "data = 2\nstage = 2\nmicrobatches = 8\n[train]\nbatch = 8",
        "`train.batch` of 8 is too small for 8 microbatches that 2 data ranks share: 16 samples are needed",
        "use fewer microbatches or data ranks, or a larger batch",
    );
}

#[test]
fn ranks_that_come_and_go() {
    let row = |lines: &str, message: &str, hint: &str| {
        check_one(
            &format!("{SMALL}[parallel]\nelastic = {{ min = 1, max = 4 }}\n{lines}"),
            &[],
            message,
            hint,
        );
    };
    row(
        "tensor = 2",
        "`parallel.elastic` is for ranks that split the batch alone",
        "leave `tensor`, `stage` and `sequence` out, or `elastic`",
    );
    row(
        "microbatches = \"auto\"",
        "`parallel.elastic` changes the number of ranks, and a plan for `microbatches` would be for one",
        "leave keys with \"auto\" out",
    );
    row(
        "transport = \"local\"",
        "`parallel.elastic` needs ranks that are processes",
        "write transport = \"shm\" or \"tcp\"",
    );
    row(
        "reproducible = true\nshards = 2",
        "`parallel.elastic` has max = 4, and a reproducible step is cut into 2 shards",
        "choose a max of at most `shards`, or more shards",
    );
    row(
        "shard_optimizer = true",
        "`parallel.elastic` keeps the whole state on every rank, so that none is lost with one",
        "leave `shard_weights`, `shard_gradients` and `shard_optimizer` out, or `elastic`",
    );
    for (store, wrong) in [
        ("redis://a:1/runs", "does not begin with etcd://"),
        ("etcd://a:2379", "has no prefix"),
        ("etcd://a:2379//", "has no prefix"),
        ("etcd://a:2379,b/runs", "has \"b\" where HOST:PORT is expected"),
        ("etcd://a:0/runs", "has \"a:0\" where HOST:PORT is expected"),
        ("etcd://me:secret@a:2379/runs", "has \"me:secret@a:2379\" where HOST:PORT is expected"),
    ] {
        check_one(
            &format!("{SMALL}[parallel]\nelastic = {{ store = {store:?} }}\n"),
            &[],
            &format!("`parallel.elastic.store` {wrong}"),
            "write store = \"etcd://HOST:2379/PREFIX\", with a prefix for this run alone",
        );
    }
}

#[test]
fn ranks_and_shards() {
    let row = |lines: &str, message: &str, hint: &str| {
        check_one(&format!("{SMALL}[parallel]\n{lines}"), &[], message, hint);
    };
    row("ranks = 0", "`parallel.ranks` is 0; it must be at least 1", "");
    row("ranks = true", "`parallel.ranks` is `true`; \"auto\" or a whole number is needed", "");
    row(
        "transport = \"tpc\"",
        "`parallel.transport` is \"tpc\", which is not known",
        "did you mean \"tcp\"?",
    );
    row("patience = 0.5", "`parallel.patience` is 0.5; it must be at least 1 and at most 604800", "");
    row(
        "patience = 90\nstall = 30",
        "`parallel.stall` of 30 s is shorter than `parallel.patience` of 90 s: a rank that makes no progress would end \
         the run before it counts as lost",
        "choose a stall of at least the patience",
    );
    row("bucket_mib = 0", "`parallel.bucket_mib` is 0.0; it must be more than 0 and at most 1024", "");
    row(
        "ranks = 3\nbalance = [1, 2]",
        "`parallel.balance` has 2 weights for 3 ranks",
        "write one weight for each rank, or \"auto\"",
    );
    row(
        "balance = []",
        "`parallel.balance` has 0 weights for 1 rank",
        "write one weight for each rank, or \"auto\"",
    );
    row("balance = [1, 0]", "`parallel.balance[1]` is 0.0; it must be more than 0", "");
    row(
        "balance = 2",
        "`parallel.balance` is the number 2; \"hosts\", \"equal\", \"auto\" or an array of weights is needed",
        "",
    );
    row("balance = \"atuo\"", "`parallel.balance` is \"atuo\", which is not known", "did you mean \"auto\"?");
    row("wire = \"int9\"", "`parallel.wire` is \"int9\", which is not known", "did you mean \"int8\"?");
    row(
        "wire = \"int8\"\nreproducible = true",
        "`parallel.wire = \"int8\"` does not work with `reproducible`: what is lost depends on how many ranks there are",
        "leave one of them out",
    );
    row(
        "wire = \"bf16\"\ntransport = \"shm\"",
        "`parallel.wire = \"bf16\"` is for ranks that are connected by a network; those that share memory send nothing",
        "leave `wire` out, or write transport = \"tcp\"",
    );
    row(
        "wire = { kind = \"topk\", share = 2 }",
        "`parallel.wire.share` is 2.0; it must be at least 0.000001 and at most 1",
        "",
    );
    row(
        "wire = \"onebit\"\n[train]\noptimizer = \"lion\"",
        "`parallel.wire = \"onebit\"` does not work with the optimizer \"lion\": signs of gradients say nothing of their sizes, which it needs",
        "choose sgd, or wire = \"int8\"",
    );
    row(
        "wire = \"f16\"\nshard_optimizer = true",
        "`parallel.wire = \"f16\"` works where each rank has the whole model and updates all of it, and not with `shard_optimizer`",
        "leave one of them out",
    );
    row("sync = \"locl\"", "`parallel.sync` is \"locl\", which is not known", "did you mean \"local\"?");
    row(
        "sync = { then = \"local\" }",
        "`parallel.sync` needs `after`",
        "write a number of steps, such as after = 1000",
    );
    row(
        "sync = { start = \"local\", then = \"local\", after = 10 }",
        "`parallel.sync` changes nothing",
        "name two ways, or write one of them alone",
    );
    row(
        "sync = { then = \"local\", after = 10 }\nreproducible = true",
        "`parallel.sync = \"local\"` does not work with `reproducible`: what replicas learn by themselves depends on how many there are",
        "leave one of them out",
    );
    row(
        "every = 5",
        "`parallel.every` is for replicas that take steps of their own",
        "write sync = \"local\", or leave `every` out",
    );
    row(
        "fragments = 4",
        "`parallel.fragments` is for replicas that take steps of their own",
        "write sync = \"local\", or leave `fragments` out",
    );
    row(
        "sync = \"local\"\nevery = 3\nfragments = 4",
        "`parallel.fragments` of 4 have no turn each within 3 steps",
        "choose at most 3, or a larger `every`",
    );
    row(
        "sync = \"local\"\nevery = 10\nfragments = 4\noverlap = 3",
        "`parallel.overlap` of 3 steps is longer than from one of 4 turns within 10 steps to the next",
        "choose at most 2",
    );
    row(
        "sync = \"local\"\noverlap = 3",
        "`parallel.overlap` is for parts of the model that are exchanged in turn",
        "write fragments = 4, or leave `overlap` out",
    );
    row(
        "sync = \"local\"\nfragments = 4\nevery = { steps = 50, drift = 0.02 }",
        "`parallel.sync = \"local\"` with `fragments` has a drift for each of them, and `every.drift` is a bound on all",
        "leave one of them out",
    );
    row(
        "own = [\"head\"]",
        "`parallel.own` names parameters that replicas keep for themselves, and with `sync = \"allreduce\"` they have all in common",
        "write sync = \"local\", or own = []: a run that goes on starts from their mean",
    );
    row(
        "own = [\"head\"]\nsync = { then = \"local\", after = 10 }",
        "`parallel.own` names parameters that replicas keep for themselves, and with `sync = \"allreduce\"` they have all in common",
        "write sync = \"local\", or own = []: a run that goes on starts from their mean",
    );
    row(
        "sync = \"local\"\nreproducible = true",
        "`parallel.sync = \"local\"` does not work with `reproducible`: what replicas learn by themselves depends on how many there are",
        "leave one of them out",
    );
    row(
        "sync = \"local\"\nevery = { drift = 0.02 }",
        "`parallel.every` needs `steps`",
        "write the most steps, such as steps = 50",
    );
    row(
        "sync = \"local\"\nevery = { steps = 50, look = 5 }",
        "`parallel.every.look` says after how many steps ranks look at their drift, and there is no bound on it",
        "write a `drift`, such as drift = 0.02, or leave `look` out",
    );
    row(
        "sync = \"local\"\nevery = { steps = 5, look = 4, drift = 1 }",
        "`parallel.every.look` of 4 is too much for 5 steps: what ranks see is heard one step later",
        "choose a look of at most 3",
    );
    row(
        "sync = \"local\"\nouter = { lr = 0.7, momentum = 1 }",
        "`parallel.outer.momentum` is 1.0; it must be at least 0 and less than 1",
        "",
    );
    row(
        "sync = \"local\"\nshard_optimizer = true",
        "`parallel.sync = \"local\"` works where each rank has the whole model and updates all of it, and not with `shard_optimizer`",
        "leave one of them out",
    );
    row(
        "sync = \"local\"\nwire = \"int8\"\ntransport = \"shm\"",
        "`parallel.wire = \"int8\"` is for ranks that are connected by a network; those that share memory send nothing",
        "leave `wire` out, or write transport = \"tcp\"",
    );
    row(
        "sync = { then = \"local\", after = 9 }\nwire = \"onebit\"\n[train]\noptimizer = \"lion\"",
        "`parallel.wire = \"onebit\"` does not work with the optimizer \"lion\": signs of gradients say nothing of their sizes, which it needs",
        "choose sgd, or wire = \"int8\"",
    );
    row(
        "sync = \"local\"\nbalance = \"auto\"",
        "`parallel.sync = \"local\"` does not measure the speed of ranks, which `balance = \"auto\"` asks for",
        "leave `balance` out, or write one weight for each rank",
    );
    row(
        "sync = \"local\"\nelastic = {}",
        "`parallel.elastic` does not work with `parallel.sync = \"local\"`: what a rank learnt since the last exchange would be lost with it",
        "leave `sync` out, or `elastic`",
    );
    row(
        "staleness = 2",
        "`parallel.staleness` says how far ranks may run ahead of each other",
        "write sync = \"ps-bounded\", or leave `staleness` out",
    );
    row(
        "servers = 2",
        "`parallel.servers` is for weights that servers hold",
        "write sync = \"ps\", \"ps-bounded\" or \"ps-async\", or leave `servers` out",
    );
    row(
        "sync = \"ps-async\"\nreproducible = true",
        "`parallel.sync = \"ps-async\"` applies gradients as they come, and `reproducible` wants the same order every time",
        "leave one of them out; sync = \"ps\" and \"allreduce\" are reproducible",
    );
    row(
        "sync = \"ps\"\nelastic = {}",
        "`parallel.elastic` does not work with `parallel.sync = \"ps\"`: servers have applied a step before every rank has its weights",
        "write sync = \"ps-async\" or \"ps-bounded\", or leave `sync` out",
    );
    row(
        "sync = \"ps-bounded\"\nbalance = \"auto\"",
        "`parallel.sync = \"ps-bounded\"` shares samples out equally, or as ranks come to them, and not by `balance`",
        "leave `balance` out",
    );
    row(
        "shards = 4",
        "`parallel.shards` is for reproducible runs",
        "write reproducible = true, or leave `shards` out",
    );
    row(
        "reproducible = true\nshards = 7",
        "`parallel.shards` of 7 does not divide `train.batch` of 64",
        "shards = 4 would",
    );
    row(
        "reproducible = true\nranks = 9",
        "`parallel.shards` of 8 leaves some of 9 ranks without work",
        "choose at least as many shards as ranks",
    );
    row(
        "reproducible = true\nsync_batch_norm = true",
        "`parallel.sync_batch_norm` needs all samples of a step at once, but shards are computed one by one",
        "leave it out, or leave `reproducible` out",
    );
    row(
        "reproducible = true\n[train]\naccumulate = 2",
        "`train.accumulate` and `parallel.reproducible` both cut a step into microbatches",
        "leave `accumulate` out and raise `shards`",
    );
    row(
        "shard_gradients = true\nreproducible = true",
        "`parallel.shard_gradients` does not work with `reproducible`, which adds up whole gradients in a fixed tree",
        "leave one of them out",
    );
    row(
        "shard_gradients = true\nshard_optimizer = false",
        "`parallel.shard_gradients` needs `shard_optimizer`: with its part of the gradients, a rank can update that part only",
        "leave `shard_optimizer` out",
    );
    row(
        "shard_gradients = true\n[train]\noptimizer = \"lamb\"",
        "`parallel.shard_gradients` does not work with the optimizer \"lamb\", which needs the gradients of whole tensors on every rank",
        "choose \"adamw\", or leave `shard_gradients` out",
    );
    row(
        "shard_gradients = true\n[train]\noptimizer = \"adafactor\"",
        "`parallel.shard_gradients` does not work with the optimizer \"adafactor\", which needs the gradients of whole tensors on every rank",
        "choose \"adamw\", or leave `shard_gradients` out",
    );
    let text = format!("{SMALL}[train]\nbatch = 30\n[parallel]\nreproducible = true\n");
    check(
        &text,
        &[],
        r#"
        error: `parallel.shards` of 8 does not divide `train.batch` of 30
         --> job.toml:8:1
          |
        8 | reproducible = true
          | ^^^^^^^^^^^^
          = help: shards = 6 would

        1 error in job.toml
        "#,
    );
}

/// Each of a million errors kept a copy of its line, a megabyte long.
#[test]
fn another_file_given_as_a_job_is_refused_in_few_words_and_little_memory() {
    let json = format!("{{\"a\": [{}0]}}", "1,,".repeat(20_000));
    let errors = read(&json, &[]).unwrap_err().errors;
    assert!((1..=20).contains(&errors.len()), "{} errors", errors.len());
    let more = errors.last().map(|e| e.hint.as_str());
    assert!(errors.len() < 20 || more.is_some_and(|hint| hint.contains("more errors follow")), "{more:?}");
    let keys: String = (0..3000).map(|i| format!("k{i} = 1, ")).collect();
    let errors =
        read(&format!("{SMALL}[train]\noptimizer = {{ {keys} kind = \"sgd\" }}"), &[]).unwrap_err().errors;
    assert!(errors.len() >= 3000, "all unknown keys are named");
    let shown: usize = errors.iter().map(|e| e.text.capacity()).sum();
    assert!(shown < 8 << 20, "{shown} bytes of lines");
    assert!(errors.iter().all(|e| e.line == 6));
}
