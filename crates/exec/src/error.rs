//! What can go wrong while a program runs.

use polyreme_kernels::copy::BadIndex;
use polyreme_kernels::embedding::IdError;
use polyreme_kernels::loss::LabelError;

/// An error while a program runs. Parameters and optimizer state are as they were before the step.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum ExecError {
    /// The data do not fit the model.
    #[error("layer `{layer}`: {op}: {kind}")]
    Data {
        /// The path of the layer, such as `blocks.0.attention`.
        layer: String,
        /// The op.
        op: &'static str,
        /// What is wrong.
        kind: RejectedData,
    },
    /// There is no input, output, parameter or state of this name.
    #[error("no {what} `{name}`; there are {known}")]
    Unknown {
        /// `input`, `output`, `parameter` or `state`.
        what: &'static str,
        /// The name.
        name: String,
        /// The names that exist.
        known: String,
    },
    /// The wrong number of elements.
    #[error("{what} `{name}` has {want} elements, {got} were given")]
    Length {
        /// `input`, `parameter` or `state`.
        what: &'static str,
        /// The name.
        name: String,
        /// How many elements it has.
        want: usize,
        /// How many elements were given.
        got: usize,
    },
    /// The wrong element type.
    #[error("input `{name}` is {want}, {got} was given")]
    Type {
        /// The name.
        name: String,
        /// The element type of the input.
        want: polyreme_graph::DType,
        /// The element type that was given.
        got: polyreme_graph::DType,
    },
    /// An output that cannot be read as f32.
    #[error("output `{name}` is {dtype}, and outputs are read as f32; cast it in the model")]
    OutputType {
        /// The name.
        name: String,
        /// The element type of the output.
        dtype: polyreme_graph::DType,
    },
    /// An op on elements of a type that has no kernel.
    #[error("layer `{layer}`: there is no kernel for {op} of {dtype}; cast to f32 before it")]
    NoKernel {
        /// The path of the layer.
        layer: String,
        /// The op; `fused` for element-wise ops.
        op: &'static str,
        /// The element type.
        dtype: polyreme_graph::DType,
    },
    /// An optimizer's state cannot be stored in this.
    #[error(
        "this optimizer's state cannot be stored in {dtype}; f32 always works, bf16 if it goes by element"
    )]
    Moments {
        /// The element type.
        dtype: polyreme_graph::DType,
    },
    /// A program that pushes and pulls, without servers.
    #[error("this program pushes gradients to parameter servers, and the engine has none")]
    NoServers,
    /// The system has no memory for something.
    #[error(
        "no memory for {what}: {} MiB ({bytes} bytes) could not be reserved; make batches smaller, or raise the limit \
         (`ulimit -v`, `ulimit -d`, or that of the container)",
        bytes >> 20
    )]
    Reserve {
        /// What the memory was for.
        what: &'static str,
        /// How many bytes were asked for.
        bytes: usize,
    },
    /// The system could not start a thread.
    #[error("no thread for a rank: {why}; take fewer threads, or raise the limit (`ulimit -u`, `ulimit -v`)")]
    Thread {
        /// The system's reason.
        why: String,
    },
    /// Another rank was lost, or disagrees.
    #[error(transparent)]
    Rank(#[from] polyreme_collective::Report),
    /// The loss of a step is not finite. Nothing was updated.
    #[error("the loss is {loss}")]
    NotFinite {
        /// The loss over all ranks.
        loss: f64,
        /// Whether it came from this rank's samples.
        here: bool,
        /// Where it came from, if it came from this rank.
        place: Option<crate::finite::NonFinite>,
    },
    /// A program for another batch size lays out its parameters differently.
    #[error(
        "the program for another batch size lays out its parameters differently; trace both from the same model"
    )]
    Layout,
    /// A gradient was asked for that has been overwritten, because buckets take turns in a buffer.
    #[error(
        "ranks keep their own part of the gradients only; make the program without `shard_gradients` to see them"
    )]
    NotKept,
    /// Gradients were asked for, or are to be accumulated, in a program that applies them as they are computed.
    #[error(
        "this program updates parameters while it computes their gradients, and keeps none; make it with \
         `Program::train` to see them or to run it in parts"
    )]
    AtOnce,
    /// A program that updates parameters was run as one that does not.
    #[error("this program updates parameters; run it with `step`, or make it without an optimizer")]
    Updates,
    /// A step of a program without an optimizer.
    #[error("this program has no update; make it with an optimizer, or run it with `run`")]
    NoOptimizer,
}

/// Data that a kernel rejected before it wrote anything.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RejectedData {
    /// A label that is not a class.
    #[error(transparent)]
    Label(#[from] LabelError),
    /// An id that is not a row of the table.
    #[error(transparent)]
    Id(#[from] IdError),
    /// An index outside the range of its dim.
    #[error(transparent)]
    Index(#[from] BadIndex),
}
