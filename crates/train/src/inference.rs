//! How a trained model is split over the ranks that use it.
//!
//! Files know nothing of meshes, so a model can be used on another mesh than it was trained on. What it takes is here:
//!
//! ```text
//!  [parallel] of the run ──use_spec──▶ axes ──plan(ranks)──▶ plan ──engine──▶ each rank's part of the network
//!                                                                               ▲
//!                                       checkpoint, on rank 0 ──told by parts───┘
//! ```
//!
//! Cuts and layouts are chosen as training chooses them, from the graph of a training step, so every kind of forward pass
//! splits the weights alike. An engine joins the ranks with a forward program alone: no gradients, no moments. Ranks that share
//! memory share the weights along the data axis, as in training. What ranks do together in a forward pass is in its program;
//! only reading the checkpoint and adding up scores is beside it.
//!
//! If a rank fails it says why, and the waits of all others end with that.

use polyreme_collective::Comm;
use polyreme_data::Spec;
use polyreme_exec::{Comms, Engine, Options};
use polyreme_graph::{Axis, Precision, Program, Weights};
use polyreme_parallel::pipeline::PipelineKind;
use polyreme_parallel::stage::flops;
use polyreme_parallel::{Plan, choose, standalone};

use crate::error::TrainError;
use crate::fed::Fed;
use crate::job::ParallelSpec;
use crate::loss::{Loss, LossKind};
use crate::lower::{step_graph, training_graph};
use crate::net::Net;

/// What of a run's `[parallel]` matters to those who use its model: the axes that its ranks have a copy of it together along, not
/// how many copies there were. Ranks that shard weights are counted, because they have one copy together too.
pub fn use_spec(trained: &ParallelSpec) -> ParallelSpec {
    let ParallelSpec { tensor, stage, sequence, shard_weights, encrypt, patience, stall, .. } = *trained;
    // Cuts that were written for a schedule with several chunks for each stage are for those. Otherwise one sends the least.
    let cut_by_hand = stage > 1 && !trained.cuts.is_empty();
    let several = cut_by_hand && trained.schedule.chunks_per_stage() > 1;
    let schedule = if several { trained.schedule } else { PipelineKind::OneFOneB };
    let cuts = if cut_by_hand { trained.cuts.clone() } else { Vec::new() };
    let sharded = |n: Option<usize>| n.filter(|_| shard_weights);
    ParallelSpec {
        ranks: sharded(trained.ranks),
        data: sharded(trained.data),
        tensor,
        stage,
        sequence,
        schedule,
        cuts,
        // Some schedules are only defined for as many microbatches as there are stages.
        microbatches: several.then_some(stage),
        shard_weights,
        encrypt,
        patience,
        stall,
        ..ParallelSpec::default()
    }
}

/// How many ranks use a model if nothing else is asked for.
pub fn use_ranks(spec: &ParallelSpec) -> usize {
    spec.asked_ranks().unwrap_or(spec.replica_ranks())
}

/// A network, and what of a job a forward pass of it depends on.
pub(crate) struct Network<'a> {
    pub(crate) net: &'a Net,
    pub(crate) kind: LossKind,
    pub(crate) precision: Precision,
}

impl Network<'_> {
    /// How `ranks` ranks have the network together; `n` is how many samples go through it at once. Or why they cannot.
    pub(crate) fn plan(
        &self,
        spec: &Spec,
        n: usize,
        parallel: &ParallelSpec,
        ranks: usize,
    ) -> Result<Plan, TrainError> {
        let mesh = parallel.mesh(ranks).map_err(|why| TrainError::UseMesh { why })?;
        let plan = Plan {
            mesh,
            precision: self.precision.clone(),
            microbatches: parallel.microbatches.unwrap_or(1),
            shard_weights: parallel.shard_weights,
            pipeline: parallel.schedule,
            cuts: parallel.cuts.clone(),
            ..Plan::alone()
        };
        if mesh.replica_ranks() == 1 {
            return Ok(plan);
        }
        // Two samples at least: statistics of one make no sense.
        let loss = Loss { kind: self.kind, ..Loss::default() };
        let step = step_graph(&training_graph(self.net, spec, n.max(2), loss)?)?;
        // Whether sequences can be cut so is said here, and not when programs are compiled.
        Fed::new(&step, &plan)?;
        Ok(choose(&step, &plan, &flops(&step), None)?)
    }
}

/// An engine of a rank of a plan, with the forward program that `compile` gives and whatever else. Its weights are random.
/// Collective.
pub(crate) fn join<T>(
    comm: Comm,
    plan: &Plan,
    options: Options,
    compile: impl FnOnce(&Plan) -> Result<(Program, T), TrainError>,
) -> Result<(Engine, T), TrainError> {
    let rank = comm.rank();
    let mut comms = Comms::new(comm, &plan.mesh)?;
    let shared = comms.along(Axis::Data).shares_memory();
    let weights = if shared { Weights::Shared } else { Weights::Own };
    let plan = Plan { rank, weights, ..plan.clone() };
    // The others would wait for this rank.
    let compiled = compile(&plan).inspect_err(|error| comms.job().fail(&error.to_string()));
    let (program, more) = compiled?;
    Ok((Engine::join(standalone(program, &plan), options, comms)?, more))
}

#[cfg(test)]
mod tests {
    use polyreme_data::{Features, Target};
    use polyreme_graph::DType;
    use polyreme_nn::Model;
    use polyreme_nn::model::Gpt;
    use polyreme_parallel::{AnswerRows, compile_answer, compile_forward};

    use super::*;
    use crate::lower::{evaluation_graph, prediction_graph};

    /// How many ranks use a model that was trained so, and how many microbatches its schedule is for.
    fn used(trained: ParallelSpec) -> (usize, Option<usize>) {
        let spec = use_spec(&trained);
        (use_ranks(&spec), spec.microbatches)
    }

    #[test]
    fn a_model_is_used_by_those_that_had_one_copy_of_it() {
        let spec = ParallelSpec::default;
        assert_eq!(used(spec()), (1, None));
        assert_eq!(used(ParallelSpec { ranks: Some(8), ..spec() }), (1, None));
        let mesh = ParallelSpec { data: Some(4), tensor: 2, stage: 2, microbatches: Some(8), ..spec() };
        assert_eq!(used(mesh.clone()), (4, None));
        assert_eq!(use_spec(&mesh).mesh(8).unwrap().data, 2, "more ranks are more copies");
        let cuts = vec!["a".into(), "b".into(), "c".into()];
        let by_hand = ParallelSpec { cuts, schedule: PipelineKind::ZbV, ..mesh.clone() };
        assert_eq!((used(by_hand.clone()), use_spec(&by_hand).schedule), ((4, Some(2)), PipelineKind::ZbV));
        assert_eq!(used(ParallelSpec { shard_weights: true, ..mesh }), (16, None));
        assert_eq!(used(ParallelSpec { shard_weights: true, ranks: Some(4), ..spec() }), (4, None));
    }

    /// The row that is picked for the next token has the bits that an evaluation has, also where activations are rounded.
    #[test]
    fn the_next_token_has_the_logits_of_its_position() {
        let (time, vocab) = (8, 16);
        let net = Net::Model(Model::Gpt(Gpt {
            vocab,
            width: 16,
            heads: 2,
            layers: 2,
            context: time,
            dropout: 0.1,
        }));
        let spec = Spec { features: Features::Ids { time, vocab }, target: Target::NextId };
        for precision in [Precision::F32, Precision::half(DType::Bf16)] {
            let network = Network { net: &net, kind: LossKind::CrossEntropy, precision: precision.clone() };
            let plan = network.plan(&spec, 1, &ParallelSpec::default(), 1).unwrap();
            let engine = |answers: bool| {
                let compile = |plan: &Plan| {
                    let program = match answers {
                        true => compile_answer(&prediction_graph(&net, &spec, 1)?, plan, AnswerRows::One)?,
                        false => {
                            compile_forward(&evaluation_graph(&net, &spec, 1, LossKind::CrossEntropy)?, plan)?
                        }
                    };
                    Ok((program, ()))
                };
                join(Comm::alone(), &plan, Options::threads(1), compile).unwrap().0
            };
            let (mut next, mut all) = (engine(true), engine(false));
            let ids: Vec<i32> = (0..time as i32).map(|i| i * 5 % vocab as i32).collect();
            for engine in [&mut next, &mut all] {
                engine.input_i32("ids").unwrap().copy_from_slice(&ids);
            }
            all.input_i32("labels").unwrap().fill(0);
            all.run().unwrap();
            for (position, row) in all.output("logits").unwrap().chunks(vocab).enumerate() {
                let at = next.input_f32(AnswerRows::AT).unwrap();
                at.fill(0.0);
                at[position] = 1.0;
                next.run().unwrap();
                assert_eq!(next.output("logits").unwrap(), row, "{precision:?}, position {position}");
            }
        }
    }
}
