//! Ranks that cut sequences among them against one rank: the same losses, and the same weights after a few steps.

// All of this is tests; clippy recognises only functions marked `#[test]`.
#![allow(clippy::unwrap_used)]

mod run;

use polyreme_graph::op::{Cell, CrossEntropy};
use polyreme_graph::{DType, Precision};
use polyreme_nn::model::{EncoderClassifier, Gpt, Model, RecurrentClassifier, Stack, StackInput, StackLayer};
use polyreme_parallel::Mesh;
use run::{SequenceCase, check, compiled, footprint};

fn sequence(ranks: usize) -> Mesh {
    Mesh { sequence: ranks, ..Mesh::data(1) }
}

fn gpt(dropout: f32) -> SequenceCase {
    let model = Gpt { vocab: 32, width: 32, heads: 4, layers: 2, context: 16, dropout };
    SequenceCase::new("gpt", Model::Gpt(model), 4)
}

fn encoder(dropout: f32) -> SequenceCase {
    let model = EncoderClassifier {
        vocab: 32,
        width: 32,
        heads: 4,
        hidden: 48,
        layers: 2,
        context: 8,
        dropout,
        classes: 8,
        ..EncoderClassifier::default()
    };
    SequenceCase::new("encoder", Model::Encoder(model), 4)
}

fn recurrent(cell: Cell, bidirectional: bool) -> SequenceCase {
    let model = RecurrentClassifier {
        cell,
        vocab: 32,
        width: 16,
        hidden: 16,
        layers: 2,
        bidirectional,
        context: 8,
        dropout: 0.2,
        classes: 8,
        ..RecurrentClassifier::default()
    };
    SequenceCase::new("recurrent", Model::Recurrent(model), 4)
}

#[test]
fn a_gpt_is_cut() {
    check(&gpt(0.0), &[sequence(2), sequence(4)], 1e-5);
    check(&gpt(0.2), &[sequence(2), sequence(4)], 1e-5);
}

#[test]
fn a_gpt_of_short_sequences_is_cut() {
    let mut short = gpt(0.2);
    short.options.time = Some(8);
    check(&short, &[sequence(2), sequence(4)], 1e-5);
}

#[test]
fn an_encoder_is_cut() {
    check(&encoder(0.1), &[sequence(2), sequence(4)], 1e-5);
}

#[test]
fn recurrent_layers_hand_their_state_on() {
    for cell in [Cell::Lstm, Cell::Gru] {
        for bidirectional in [false, true] {
            check(&recurrent(cell, bidirectional), &[sequence(2), sequence(4)], 1e-5);
        }
    }
}

fn stack(layers: Vec<StackLayer>) -> SequenceCase {
    let input = StackInput::Ids { vocab: 32, context: 16 };
    let start = [StackLayer::Embedding { width: 16 }, StackLayer::Positions];
    let end = [StackLayer::Linear { outputs: Some(8), bias: true }];
    let layers = start.into_iter().chain(layers).chain(end).collect();
    SequenceCase::new("stack", Model::Layers(Stack { input, layers }), 4)
}

/// Causal attention beside a recurrent layer sees whole sequences on each rank, and flattened positions are columns.
#[test]
fn what_has_no_rule_has_the_same_results() {
    let gru = StackLayer::Recurrent { cell: Cell::Gru, hidden: 16, bidirectional: false };
    let causal = StackLayer::Attention { heads: 2, causal: true };
    let inside = vec![StackLayer::RmsNorm, causal.clone(), StackLayer::Dropout { p: 0.1 }];
    let residual = StackLayer::Residual { layers: inside };
    check(&stack(vec![gru, residual.clone(), StackLayer::Flatten]), &[sequence(2), sequence(4)], 1e-5);
    check(&stack(vec![residual.clone(), StackLayer::Flatten]), &[sequence(2), sequence(4)], 1e-5);
    // The last position is in the late piece of the first rank.
    check(&stack(vec![residual, causal, StackLayer::LastStep]), &[sequence(2), sequence(4)], 1e-5);
}

#[test]
fn the_batch_is_split_as_well() {
    let mesh = Mesh { sequence: 2, ..Mesh::data(2) };
    for case in [gpt(0.2), encoder(0.1), recurrent(Cell::Lstm, false)] {
        check(&case, &[mesh], 1e-5);
    }
}

#[test]
fn layers_are_split_as_well() {
    let mesh = Mesh { sequence: 2, stage: 2, ..Mesh::data(1) };
    for case in [gpt(0.2), encoder(0.1), recurrent(Cell::Lstm, true)] {
        check(&SequenceCase { microbatches: 2, clip: Some(0.5), ..case }, &[mesh], 1e-5);
    }
    check(&SequenceCase { microbatches: 2, ..gpt(0.0) }, &[Mesh { sequence: 4, ..mesh }], 1e-5);
    let all = Mesh { sequence: 2, stage: 2, tensor: 2, ..Mesh::data(1) };
    check(&SequenceCase { microbatches: 2, clip: Some(0.5), ..gpt(0.0) }, &[all], 1e-5);
}

#[test]
fn matrices_are_split_as_well() {
    let mesh = Mesh { sequence: 2, tensor: 2, ..Mesh::data(1) };
    for case in [gpt(0.0), gpt(0.2), encoder(0.1), recurrent(Cell::Lstm, false), recurrent(Cell::Gru, true)] {
        check(&case, &[mesh], 1e-5);
    }
}

#[test]
fn a_norm_is_clipped_and_microbatches_are_added_up() {
    check(&SequenceCase { clip: Some(0.5), microbatches: 2, ..gpt(0.0) }, &[sequence(2)], 1e-5);
}

#[test]
fn labels_are_smoothed_and_ignored_as_on_one_rank() {
    for (label_smoothing, ignore_index) in [(0.1, None), (0.0, Some(3)), (0.2, Some(3))] {
        let mut smooth = gpt(0.0);
        smooth.options.loss = CrossEntropy { label_smoothing, ignore_index };
        check(&smooth, &[sequence(2), sequence(4)], 1e-5);
        check(&SequenceCase { class_weights: true, ..smooth }, &[sequence(2)], 1e-5);
    }
}

#[test]
fn a_rank_may_have_no_labels_that_count() {
    let mut middle = gpt(0.0);
    middle.options.loss = CrossEntropy { label_smoothing: 0.1, ignore_index: Some(3) };
    // The second of two ranks has these positions.
    check(&SequenceCase { ignored: 4..12, ..middle }, &[sequence(2)], 1e-5);
}

#[test]
fn activations_are_computed_again() {
    for (case, kept) in [(gpt(0.2), 0.9), (recurrent(Cell::Lstm, false), 0.97)] {
        check(&SequenceCase { kept: Some(kept), ..case }, &[sequence(2)], 1e-5);
    }
}

#[test]
fn halves_are_cut() {
    for case in [gpt(0.0), encoder(0.0), recurrent(Cell::Lstm, false)] {
        check(&SequenceCase { precision: Precision::half(DType::Bf16), ..case }, &[sequence(2)], 2e-2);
    }
    check(&SequenceCase { precision: Precision::half(DType::F16), ..gpt(0.2) }, &[sequence(4)], 2e-2);
}

#[test]
fn twenty_steps_stay_together() {
    for case in [gpt(0.0), encoder(0.0), recurrent(Cell::Lstm, false)] {
        check(&SequenceCase { steps: 20, ..case }, &[sequence(2), sequence(4)], 1e-4);
    }
}

#[test]
fn a_long_context_takes_half_the_memory_on_two_ranks() {
    let model = Gpt { context: 4096, ..Gpt::default() };
    let case = SequenceCase::new("gpt", Model::Gpt(model), 1);
    let one = footprint(&case, Mesh::data(1), 0);
    for rank in 0..2 {
        let share = footprint(&case, sequence(2), rank) as f64 / one as f64;
        assert!(share <= 0.55, "rank {rank} has {share} of one rank's activations");
    }
}

#[test]
fn what_cannot_be_cut_is_explained() {
    let mut odd = gpt(0.0);
    odd.options.time = Some(10);
    let said = compiled(&odd, sequence(2), 0).unwrap_err().to_string();
    assert!(said.contains("4 equal pieces") && said.contains("such as 12"), "{said}");
}

#[test]
fn a_forward_pass_leaves_logits_cut() {
    run::forward_agrees(&gpt(0.0), 2);
    run::forward_agrees(&encoder(0.0), 2);
    run::forward_agrees(&recurrent(Cell::Gru, true), 2);
}
