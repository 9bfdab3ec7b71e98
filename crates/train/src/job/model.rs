//! `[model]`: one of the reference models with its sizes, or a list of layers.

use polyreme_graph::builder::ACTIVATIONS;
use polyreme_nn::model::{Pooling, Stack, StackInput, StackLayer};
use polyreme_nn::{Model, TraceOptions};

use super::cursor::{At, Cursor};
use super::declare::{keys, kinds, section};
use super::key::Key;
use super::layers::{self, ListedLayer, layers, listed, taken_apart};
use super::section::{Kind, Section};
use super::shape::Bounds;
use super::spec::ModelSpec;
use super::tree::{TreeNode, Value};
use super::tuning::{HeadStart, head, patterns};
use super::types::{Type, flag, list, maybe, name_of, one_of, pair, path, single, table, whole};
use crate::pretrained::Family;

/// Widths, channels and vocabularies. With the other limits, no product of sizes overflows.
pub(super) const WIDTH_MAX: u64 = 1 << 20;
/// Channels of images, and widths of sequences.
pub(super) const CHANNELS_MAX: u64 = 1 << 16;
/// Rows and columns of images.
pub(super) const SIDE_MAX: u64 = 1 << 12;
/// Ids of a sequence.
pub(super) const CONTEXT_MAX: u64 = 1 << 16;
/// Layers of a model that has a number of them.
const LAYERS_MAX: u64 = 1 << 10;
/// The vector of a number.
const EMBED_MAX: u64 = 1 << 10;
/// Types of tokens.
const TYPES_MAX: u64 = 1 << 10;
/// Numbers in a row.
const INPUTS_MAX: u64 = 1 << 28;

impl ModelSpec {
    /// The sizes that the folder of a model has, as job files name them; none for a model that is of no family.
    pub fn folder_keys(&self) -> &'static [&'static str] {
        match Family::of(&self.model) {
            Some(Family::Gpt2) => {
                &["layers", "width", "heads", "vocab", "context", "activation", "eps", "tied"]
            }
            Some(Family::Bert) => {
                &["layers", "width", "heads", "hidden", "vocab", "context", "types", "activation", "eps"]
            }
            None => &[],
        }
    }

    /// Whether sizes are to be taken from a folder.
    pub(crate) fn is_of_folder(&self) -> bool {
        self.path.is_some() && self.from_data.iter().any(|key| key == "width")
    }

    /// Whether there is a custom layer at this path, such as `3`, or `3.0` inside a residual.
    pub(crate) fn has_custom_layer(&self, path: &str) -> bool {
        matches!(&self.model, Model::Layers(m) if layers::has_layer(&m.layers, path))
    }
}

section! { ModelSpec => {
    let section = Section::of_kinds("model", "a section", kinds(), |s| s.model.name(), keys());
    let open = |s: &ModelSpec, key: &str| s.from_data.iter().any(|open| open == key);
    section.fallback("layers", Some("layers")).unwritten(open).check(check)
} }

fn kinds() -> Vec<Kind<ModelSpec>> {
    let named = |name| ModelSpec::new(Model::by_name(name).expect("kinds are called as the models are"));
    kinds! {
        /// linear layers with an activation between them, on rows or flattened images
        "mlp" => named;
        /// residual blocks on rows of a table, with a learnt vector for each number
        "tabular" => named;
        /// LeNet-5
        "lenet" => named;
        /// pairs of 3x3 convolutions with batch norm
        "cnn" => named;
        /// a decoder-only transformer that predicts the next token
        "gpt" => named;
        /// GPT-2: the same with one table for tokens and the last layer, of the sizes given or from a folder of Hugging Face's
        "gpt2" => named;
        /// BERT: an encoder whose head reads the first token, or each token for tags; of the sizes given or from a folder of Hugging Face's
        "bert" => named;
        /// torchvision's AlexNet, for images of 63x63 or more
        "alexnet" => named;
        /// torchvision's ResNets
        "resnet18" | "resnet34" | "resnet50" | "resnet101" => named;
        /// the same with a stem for small images
        "resnet18_cifar" | "resnet34_cifar" | "resnet50_cifar" | "resnet101_cifar" => named;
        /// recurrent networks that classify sequences, in one direction or in both
        "lstm" | "gru" | "bilstm" | "bigru" => named;
        /// a transformer encoder that classifies sequences
        "encoder" => named;
        /// a list of custom layers
        "layers" => |_| ModelSpec::new(Model::Layers(Stack { input: StackInput::Open, layers: Vec::new() }));
    }
}

fn keys() -> Vec<Key<ModelSpec>> {
    // The field of the models that have it.
    macro_rules! field {
        ($field:ident of $($model:ident)|+) => {
            |s| match &mut s.model { $(Model::$model(m) => Some(&mut m.$field),)+ _ => None }
        };
    }
    let channels = || whole(1..=CHANNELS_MAX);
    let widths = |most| list(whole(1..=most), &[], "an array of whole numbers");
    let activation = name_of(ACTIVATIONS.map(|(name, _)| name));
    let pooling = one_of([
        ("first", Pooling::First, "the first token, through a layer with a tanh, as BERT does"),
        ("mean", Pooling::Mean, "the mean of all tokens, as models of sentences do"),
    ]);
    let is_list = |s: &mut ModelSpec| matches!(s.model, Model::Layers(_));
    keys! { ModelSpec;
        /// the folder of a model of Hugging Face's: `config.json` has the sizes, `model.safetensors` the weights to start from, and
        /// `tokenizer.json` is used for text unless `data.tokenizer` names another; the run's folder becomes such a folder, too
        path: maybe(path()) => |s| Family::of(&s.model).map(|_| &mut s.path);
        /// a safetensors file to start from, with exactly the model's tensors, of a floating-point type and finite;
        /// batch norms go on counting batches where it ended
        weights: maybe(path()) => |s| Some(&mut s.weights);
        /// what tensors of that file are called in the model, where the names differ; the first rule that fits counts
        map: list(table(), &[], "an array of tables") => |s| Some(&mut s.map);
        /// what the last layer begins with, if there is such a file
        head: head() => |s| Some(&mut s.head);
        /// parameters that stay as they are: names, or paths of layers, with `*` for any characters, such as `["conv1", "layer1.*"]`;
        /// they have no gradient, no optimizer state, and are not exchanged
        freeze: patterns() => |s| Some(&mut s.freeze);
        /// low-rank factors beside frozen weights; only they are learnt, exchanged, and saved in checkpoints
        lora: maybe(table()) => |s| Some(&mut s.lora);
        /// how many layers
        layers: n_layers() => field!(layers of Tabular | Gpt | Gpt2 | Bert | Recurrent | Encoder);
        /// the layers, see below
        layers: layers(true) => listed_of, take_listed;
            only is_list; needed "write layers = [{ kind = \"linear\", outputs = 64 }, \"relu\", \"linear\"]";
        /// the input, for rows and images
        input: input() => |s| stack(s).map(|m| &mut m.input); or "from the data";
        /// the width of the input
        inputs: whole(1..=INPUTS_MAX) => field!(inputs of Mlp | Tabular); or "from the data";
        /// the widths of the hidden layers
        hidden: widths(WIDTH_MAX) => field!(hidden of Mlp);
        /// the width of the state
        hidden: channels() => field!(hidden of Recurrent);
        /// the width between the two linear layers of each block
        hidden: channels() => field!(hidden of Tabular);
        /// the width between the two linear layers of each encoder layer
        hidden: channels() => field!(hidden of Bert | Encoder);
        /// the activation between layers
        activation: activation => field!(activation of Mlp | Gpt2 | Bert);
        /// the channels of images
        channels: channels() => field!(channels of Lenet | Cnn | AlexNet | ResNet); or "from the data";
        /// the size of images
        image: pair(1..=SIDE_MAX) => field!(image of Lenet); or "from the data";
        /// the channels of each pair of convolutions
        widths: widths(CHANNELS_MAX) => field!(widths of Cnn);
        /// the width of each block
        width: channels() => field!(width of Tabular);
        /// the length of each number's vector; 0: numbers are taken as they are
        embed: whole(0..=EMBED_MAX) => field!(embed of Tabular);
        /// the length of each token's vector
        width: channels() => field!(width of Gpt | Gpt2 | Bert | Recurrent | Encoder);
        /// attention heads; must divide `width`
        heads: channels() => field!(heads of Gpt | Gpt2 | Bert | Encoder);
        /// how many tokens there are
        vocab: whole(1..=WIDTH_MAX) => field!(vocab of Gpt | Gpt2 | Bert | Recurrent | Encoder); or "from the data";
        /// the longest sequence, in tokens
        context: whole(1..=CONTEXT_MAX) => field!(context of Gpt | Gpt2 | Bert | Recurrent | Encoder);
            or "from the data, or else 256 (gpt), 1024 (gpt2), 512 (bert), 20 (lstm, gru, bilstm, bigru), 32 (encoder)";
        /// how many tokens there are, for ids; together with `context`
        vocab: whole(1..=WIDTH_MAX) => |s| ids(s).map(|(vocab, _)| vocab), |s, n| set_ids(s, Some(n), None);
            only is_list; or "from the data";
        /// the longest sequence, for ids; together with `vocab`
        context: whole(1..=CONTEXT_MAX) => |s| ids(s).map(|(_, context)| context), |s, n| set_ids(s, None, Some(n));
            only is_list; or "from the data, or else 256";
        /// the share dropped in training
        dropout: single(Bounds::BELOW_1) => field!(dropout of Mlp | Tabular | Cnn | Gpt | Gpt2 | Bert | AlexNet | Recurrent | Encoder);
        /// what is added to the variance in layer norms
        eps: single(Bounds::POSITIVE) => field!(eps of Gpt2 | Bert);
        /// how many types of tokens there are: two tell the texts of a pair apart
        types: whole(1..=TYPES_MAX) => field!(types of Bert);
        /// what the head of a text reads
        pooling: pooling => field!(pooling of Bert);
        /// whether the last layer is the table of token vectors
        tied: flag() => field!(tied of Gpt2);
        /// how many classes; if given, the labels of a table are taken as classes however many there are
        classes: whole(1..=WIDTH_MAX) => field!(classes of Mlp | Tabular | Lenet | Cnn | Bert | AlexNet | ResNet | Recurrent | Encoder);
            or "from the data";
        /// how many classes: the outputs of the last layer, if that leaves them open
        classes: whole(1..=WIDTH_MAX) => |_| None, |s, n| if let Some(m) = stack(s) { m.set_classes(n) };
            only is_list; or "from the data";
    }
}

/// A number; a list of layers is for another kind.
fn n_layers() -> Type<usize> {
    let Type { shape, read, write } = whole(1..=LAYERS_MAX);
    let read = move |at: &At| {
        if !matches!(at.node.value, Value::Array(_)) {
            return read(at);
        }
        let message = format!("`{}` is an array; a model of this kind has a number of layers", at.path);
        at.fault(message, "leave `kind` out for a list of custom layers");
        None
    };
    Type { shape, read: Box::new(read), write }
}

/// The layers of a list as the file has them, with the precision of each.
fn listed_of(spec: &ModelSpec) -> Option<Vec<ListedLayer>> {
    if let Model::Layers(m) = &spec.model { Some(listed(&m.layers, &spec.f32_layers)) } else { None }
}

fn take_listed(spec: &mut ModelSpec, listed: Vec<ListedLayer>) {
    if let Model::Layers(m) = &mut spec.model {
        (m.layers, spec.f32_layers) = taken_apart(listed);
    }
}

fn stack(spec: &mut ModelSpec) -> Option<&mut Stack> {
    if let Model::Layers(stack) = &mut spec.model { Some(stack) } else { None }
}

fn ids(spec: &ModelSpec) -> Option<(usize, usize)> {
    match &spec.model {
        Model::Layers(Stack {
            input: StackInput::Ids { vocab, context } | StackInput::Texts { vocab, context, .. },
            ..
        }) => Some((*vocab, *context)),
        _ => None,
    }
}

/// Sets one of the sizes of ids, and keeps the other one if there is one.
fn set_ids(spec: &mut ModelSpec, vocab: Option<usize>, context: Option<usize>) {
    let (old_vocab, old_context) = ids(spec).unwrap_or((1, 1));
    if let Some(stack) = stack(spec) {
        let (vocab, context) = (vocab.unwrap_or(old_vocab), context.unwrap_or(old_context));
        stack.input = StackInput::Ids { vocab, context };
    }
}

/// `[width]` or `[channels, height, width]`.
fn input() -> Type<StackInput> {
    let dims = list(whole(1..=INPUTS_MAX), &[1, 3], "[width] or [channels, height, width]");
    let dims = dims.check(|dims: &Vec<usize>| match *dims.as_slice() {
        [channels, height, width]
            if channels as u64 > CHANNELS_MAX || height.max(width) as u64 > SIDE_MAX =>
        {
            Some((format!("is too large; images have at most {SIDE_MAX} rows and columns"), ""))
        }
        _ => None,
    });
    let to = |dims: Vec<usize>| match *dims.as_slice() {
        [width] => StackInput::Row { width },
        [channels, height, width] => StackInput::Image { channels, height, width },
        _ => unreachable!("the type has one length or three"),
    };
    dims.map(to, |input| match *input {
        StackInput::Row { width } => Some(vec![width]),
        StackInput::Image { channels, height, width } => Some(vec![channels, height, width]),
        StackInput::Open | StackInput::Ids { .. } | StackInput::Texts { .. } => None,
    })
}

fn check(spec: &mut ModelSpec, c: &Cursor) {
    let heads = match &spec.model {
        Model::Gpt(m) => Some((m.heads, m.width)),
        Model::Gpt2(m) => Some((m.heads, m.width)),
        Model::Bert(m) => Some((m.heads, m.width)),
        Model::Encoder(m) => Some((m.heads, m.width)),
        _ => None,
    };
    if let Some((heads, width)) = heads
        && !width.is_multiple_of(heads)
    {
        let key = if c.has("heads") { "heads" } else { "width" };
        let message = format!("`model.heads` of {heads} does not divide `model.width` of {width}");
        let near = (1..=heads).rev().find(|h| width.is_multiple_of(*h)).unwrap_or(1);
        c.fault(key, message, format!("heads = {near} would"));
    }
    if let Model::Layers(stack) = &spec.model {
        check_stack(stack, c);
    }
    let of_file = [("head", spec.head != HeadStart::File), ("map", !spec.map.is_empty())];
    let starts = spec.weights.is_some() || spec.path.is_some();
    for (key, _) in of_file.into_iter().filter(|(_, given)| *given && !starts) {
        let message = format!("`model.{key}` is about a file of weights, and there is no `model.weights`");
        c.fault(key, message, "give `weights = \"FILE.safetensors\"`, or leave it out");
    }
    let open = ModelSpec::new(spec.model.clone()).from_data;
    let is_layers = matches!(spec.model, Model::Layers(_));
    spec.from_data = open.into_iter().filter(|key| is_layers || !c.has(key)).collect();
    if spec.path.is_some() {
        check_folder(spec, c);
    }
}

/// The sizes of a folder: all from there, or all given, as in the job of a run that began with it.
fn check_folder(spec: &mut ModelSpec, c: &Cursor) {
    let keys = spec.folder_keys();
    let given = |key: &&&str| c.has(key);
    let first = keys.iter().find(given);
    let all = keys.iter().all(|key| c.has(key));
    if let (Some(key), false) = (first, all) {
        let message = format!("`model.{key}` is given, and the sizes are in the folder `model.path`");
        c.fault(key, message, "leave it out");
    }
    // What the folder does not have stays with the data.
    spec.from_data.retain(|key| !keys.contains(&key.as_str()));
    if !all {
        spec.from_data.splice(0..0, keys.iter().map(|key| key.to_string()));
    }
    if spec.weights.is_some() {
        let message = "`model.path` and `model.weights` are both given, and both have weights";
        c.fault("weights", message, "remove one of the two");
    }
}

/// Layers whose input is given are traced once, so that a layer that does not fit is found here.
fn check_stack(stack: &Stack, c: &Cursor) {
    if c.has("vocab") || c.has("context") {
        let hint = "token ids have both; leave both out to take them from the data";
        c.require("vocab", hint);
        c.require("context", hint);
        if c.has("input") {
            let message = "`model.input` cannot be given together with `model.vocab` or `model.context`";
            c.fault("input", message, "`input` is for rows and images, the others are for token ids");
        }
    }
    if let (true, Some(last)) = (c.has("classes"), stack.layers.last()) {
        let has_outputs =
            |item: &TreeNode| matches!(&item.value, Value::Table(t) if t.get("outputs").is_some());
        let is_said = c.get("layers").is_some_and(|at| at.node.items().last().is_some_and(has_outputs));
        if is_said || !matches!(last, StackLayer::Linear { .. }) {
            let message = "`model.classes` is given, but the last layer does not leave its `outputs` open";
            c.fault("classes", message, "end with \"linear\", or leave `classes` out");
        }
    }
    if stack.input == StackInput::Open || stack.layers.is_empty() || !c.is_clean() {
        return;
    }
    let mut closed = stack.clone();
    closed.set_classes(2);
    if let (Err(e), Some(list)) = (Model::Layers(closed).trace(&TraceOptions::evaluation(2)), c.get("layers"))
    {
        // The error's layer is the layer's path below [model], and its kind.
        let path = e.layer.split(' ').next().unwrap_or_default();
        let place = layers::place_of(list.node, path).unwrap_or(&list.node.place);
        c.reading.fault(place, &c.path_of(path), format!("{}: {}", e.layer, e.kind), "");
    }
}
