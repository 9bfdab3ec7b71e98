//! Places of cuts by name: the same parameters in each chunk, whatever a model is traced for.

use polyreme_graph::{Axis, Graph, differentiate};
use polyreme_nn::{Model, TraceOptions};
use polyreme_parallel::pipeline::PipelineKind;
use polyreme_parallel::stage::{cut, flops, place_by_name, positions};
use polyreme_parallel::{Mesh, Plan, choose_cuts};

fn step(model: &Model, batch: usize) -> Graph {
    let forward = model.trace(&TraceOptions::training(batch)).unwrap();
    differentiate(&forward, forward.output("loss").unwrap()).unwrap()
}

/// The names of the parameters of each chunk, and of its states.
fn stored(graph: &Graph, cuts: &[String]) -> Vec<Vec<String>> {
    let chunks = cut(graph, &place_by_name(graph, cuts).unwrap()).unwrap().chunks;
    let names = |g: &Graph| g.params.iter().chain(&g.states).map(|s| s.name.clone()).collect();
    chunks.iter().map(|chunk| names(&chunk.graph)).collect()
}

#[test]
fn every_position_is_found_in_other_graphs_of_the_model() {
    for name in Model::NAMES {
        let model = Model::by_name(name).unwrap();
        let whole = step(&model, 4);
        let cuts: Vec<String> = positions(&whole).into_iter().map(|p| p.name).collect();
        let want = stored(&whole, &cuts);
        assert_eq!(want.len(), cuts.len() + 1, "{name}: {cuts:?}");
        assert!(want.last().is_some_and(|chunk| !chunk.is_empty()), "{name}: {cuts:?}: {want:?}");
        let evaluation = model.trace(&TraceOptions::evaluation(3)).unwrap();
        // As for predictions.
        let mut without_loss = evaluation.clone();
        without_loss.outputs.retain(|(name, _)| name == "logits");
        for other in [step(&model, 1), evaluation, without_loss.without_dead()] {
            assert_eq!(stored(&other, &cuts), want, "{name}: {cuts:?}");
        }
    }
}

#[test]
fn chosen_cuts_are_names_that_a_plan_takes() {
    let whole = super::nets::gpt();
    let mesh = Mesh { stage: 2, ..Mesh::data(1) };
    for pipeline in [PipelineKind::OneFOneB, PipelineKind::ZbV] {
        let plan = Plan { mesh, pipeline, microbatches: 4, ..Plan::alone() };
        let cuts = choose_cuts(&whole, &plan, &flops(&whole), None).unwrap();
        let chunks = if pipeline == PipelineKind::ZbV { 4 } else { 2 };
        assert_eq!(cuts.len() + 1, chunks, "{cuts:?}");
        let chosen = Plan { cuts: cuts.clone(), ..plan };
        assert_eq!(choose_cuts(&whole, &chosen, &|_| 1.0, None).unwrap(), cuts);
        assert_eq!(chosen.mesh.len(Axis::Stage), 2);
    }
    assert!(choose_cuts(&whole, &Plan::alone(), &flops(&whole), None).unwrap().is_empty());
}
