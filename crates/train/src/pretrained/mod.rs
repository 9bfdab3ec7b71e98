//! Models of Hugging Face's `transformers`: folders with `config.json`, `model.safetensors` and perhaps `tokenizer.json`.
//!
//! A family is the same network as one of ours under other names. What differs is said in three places, each a table or a
//! function of plain values: which sizes `config.json` has (`config`), what tensors are called and how they lie (`names`), and
//! which files make a folder (`folder`). Everything else of a run (checkpoints, ranks, frozen layers) sees our names only; a
//! name is translated when a file is read and when the run's model is written, which `out` does tensor by tensor, so that no
//! rank needs room for the whole model twice.
//!
//! A folder is read once, when a run begins: its sizes then stand in the run's own job file, and `resume`, `eval` and
//! `predict` need the folder no more.
//!
//! # Layout
//! - `config`: `config.json`, both ways.
//! - `names`: names and layouts of tensors, both ways.
//! - `folder`: what a job takes from a folder, and the files beside the weights that a run writes.
//! - `out`: the run's model as a file of its family.

pub(crate) mod config;
pub(crate) mod folder;
pub(crate) mod names;
pub(crate) mod out;

use polyreme_nn::Model;

pub use out::ModelFile;

/// A family of models whose files have names of their own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Family {
    /// `GPT2LMHeadModel`.
    Gpt2,
    /// `BertModel`, with a head for texts or for words.
    Bert,
}

impl Family {
    /// All of them.
    pub const ALL: [Family; 2] = [Family::Gpt2, Family::Bert];

    /// The family that a model belongs to, if any.
    pub fn of(model: &Model) -> Option<Family> {
        match model {
            Model::Gpt2(_) => Some(Family::Gpt2),
            Model::Bert(_) => Some(Family::Bert),
            Model::Mlp(_)
            | Model::Tabular(_)
            | Model::Lenet(_)
            | Model::Cnn(_)
            | Model::Gpt(_)
            | Model::AlexNet(_)
            | Model::ResNet(_)
            | Model::Recurrent(_)
            | Model::Encoder(_)
            | Model::Layers(_) => None,
        }
    }

    /// What `config.json` calls it, which is also the kind of model in job files.
    pub fn name(self) -> &'static str {
        match self {
            Family::Gpt2 => "gpt2",
            Family::Bert => "bert",
        }
    }
}
