//! Ranks that shard the weights of a model against one rank: the same initial weights to the bit, the same losses, and the same
//! weights and averages after a few steps.

// All of this is tests; clippy recognises only functions marked `#[test]`.
#![allow(clippy::unwrap_used)]

mod evaluation;
mod held;
mod lost;
mod random;
mod run;

use polyreme_graph::op::Cell;
use polyreme_graph::{DType, Moments, Optimizer, Precision};
use polyreme_nn::model::{
    Cnn, EncoderClassifier, Gpt, Mlp, Model, RecurrentClassifier, Tabular, TraceOptions,
};

use polyreme_parallel::pipeline::PipelineKind;

use crate::run::{ShardCase, check, check_uneven};

const ADAMW: Optimizer = Optimizer::AdamW(Moments { eps: 1e-3, weight_decay: 0.01, ..Moments::DEFAULT });
const SGD: Optimizer = Optimizer::Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.01 };

fn case(name: &'static str, model: Model) -> ShardCase {
    ShardCase {
        name,
        model,
        options: TraceOptions::training(12),
        precision: Precision::F32,
        optimizer: SGD,
        lr: 0.02,
        data: 2,
        tensor: 1,
        stage: 1,
        accumulate: 1,
        clip: None,
        ema: None,
        sharded_min: 0.9,
        pipeline: PipelineKind::OneFOneB,
        memory: None,
    }
}

fn gpt(dropout: f32) -> ShardCase {
    let model = Gpt { vocab: 36, width: 48, heads: 4, layers: 3, context: 6, dropout };
    case("gpt", Model::Gpt(model))
}

#[test]
fn an_mlp_is_sharded() {
    let model = Mlp {
        inputs: 24,
        categories: vec![],
        texts: vec![],
        hidden: vec![48, 36],
        classes: 12,
        activation: "gelu".into(),
        dropout: 0.3,
    };
    let options = TraceOptions::training(36);
    let mlp = ShardCase { sharded_min: 0.75, options, ..case("mlp", Model::Mlp(model)) };
    for data in [2, 3, 4] {
        check(&ShardCase { data, ..mlp.clone() }, 1e-5);
        check(&ShardCase { data, accumulate: 3, optimizer: ADAMW, clip: Some(0.1), ..mlp.clone() }, 1e-5);
    }
}

#[test]
fn residual_blocks_of_tables_are_sharded() {
    let (inputs, embed, width, hidden, layers, classes) = (12, 6, 24, 48, 2, 12);
    let model = Tabular {
        inputs,
        categories: Vec::new(),
        texts: Vec::new(),
        embed,
        width,
        hidden,
        layers,
        classes,
        dropout: 0.3,
    };
    let options = TraceOptions::training(36);
    let tabular = ShardCase { sharded_min: 0.75, options, ..case("tabular", Model::Tabular(model)) };
    for data in [2, 3] {
        check(&ShardCase { data, accumulate: 3, optimizer: ADAMW, clip: Some(0.1), ..tabular.clone() }, 1e-5);
    }
}

#[test]
fn convolutions_are_sharded_with_synchronised_norms() {
    // The second convolution is sharded over its inputs, since 3 does not divide 16.
    let model = Cnn { channels: 3, widths: vec![12, 16], classes: 8, dropout: 0.2 };
    let mut cnn = case("cnn", Model::Cnn(model));
    cnn.options.image = Some((8, 8));
    cnn.sharded_min = 0.6;
    for (data, accumulate) in [(2, 1), (3, 1), (4, 3)] {
        check(&ShardCase { data, accumulate, clip: Some(0.5), ..cnn.clone() }, 1e-5);
    }
}

#[test]
fn recurrent_layers_are_sharded() {
    for cell in [Cell::Lstm, Cell::Gru] {
        let model = RecurrentClassifier {
            cell,
            vocab: 48,
            width: 24,
            hidden: 24,
            layers: 2,
            bidirectional: true,
            context: 6,
            dropout: 0.2,
            classes: 12,
            ..RecurrentClassifier::default()
        };
        let recurrent = case("recurrent", Model::Recurrent(model));
        for (data, accumulate) in [(2, 3), (3, 1)] {
            check(&ShardCase { data, accumulate, optimizer: ADAMW, ..recurrent.clone() }, 1e-5);
        }
    }
}

#[test]
fn an_encoder_is_sharded() {
    let model = EncoderClassifier {
        vocab: 36,
        width: 48,
        heads: 4,
        hidden: 60,
        layers: 2,
        context: 6,
        dropout: 0.1,
        classes: 12,
        ..EncoderClassifier::default()
    };
    let encoder = case("encoder", Model::Encoder(model));
    check(&ShardCase { clip: Some(0.2), ..encoder.clone() }, 1e-5);
    check(&ShardCase { data: 3, accumulate: 2, optimizer: ADAMW, ..encoder }, 1e-5);
}

#[test]
fn a_gpt_is_sharded() {
    for (data, accumulate) in [(2, 1), (3, 1), (4, 1), (2, 3), (4, 3)] {
        check(&ShardCase { data, accumulate, ..gpt(0.2) }, 1e-5);
        let clipped = ShardCase { optimizer: ADAMW, clip: Some(0.1), ema: Some(0.9), ..gpt(0.0) };
        check(&ShardCase { data, accumulate, ..clipped }, 1e-5);
    }
}

#[test]
fn ranks_with_fewer_samples_or_none_take_part() {
    for clip in [None, Some(0.1)] {
        let gpt = ShardCase { data: 3, clip, optimizer: ADAMW, ..gpt(0.2) };
        check_uneven(&gpt, &[&[(0, 4), (4, 8)], &[(8, 12)], &[]], 1e-5);
        check_uneven(&gpt, &[&[], &[(0, 3), (3, 6), (6, 8)], &[(8, 12)]], 1e-5);
        check_uneven(&gpt, &[&[(0, 5)], &[(5, 12)], &[]], 1e-5);
    }
}

#[test]
fn shards_of_parts_of_matrices() {
    check(&ShardCase { tensor: 2, clip: Some(0.1), ..gpt(0.2) }, 1e-5);
    check(&ShardCase { tensor: 2, data: 3, accumulate: 2, optimizer: ADAMW, ..gpt(0.0) }, 1e-5);
}

#[test]
fn stages_gather_what_they_read() {
    check(&ShardCase { stage: 2, accumulate: 2, clip: Some(0.1), ..gpt(0.2) }, 1e-5);
    check(&ShardCase { stage: 2, tensor: 2, accumulate: 3, optimizer: ADAMW, ..gpt(0.0) }, 1e-5);
}

/// Chunks of one rank, and weight gradients that run later than the others.
#[test]
fn every_pipeline_gathers_what_it_reads() {
    for pipeline in
        [PipelineKind::Gpipe, PipelineKind::Interleaved { chunks: 2 }, PipelineKind::ZbH1, PipelineKind::ZbV]
    {
        check(&ShardCase { stage: 2, accumulate: 6, data: 2, clip: Some(0.1), pipeline, ..gpt(0.2) }, 1e-5);
    }
}

#[test]
fn what_is_computed_again_reads_the_weights_of_the_backward_pass() {
    for (data, memory) in [(2, 0.95), (2, 0.8), (3, 0.85)] {
        check(&ShardCase { data, memory: Some(memory), ..gpt(0.2) }, 1e-5);
    }
}

#[test]
fn halves_are_gathered() {
    for half in [DType::Bf16, DType::F16] {
        let case = ShardCase { precision: Precision::half(half), ..gpt(0.0) };
        check(&case, 1e-4);
    }
}
