//! Times of nodes, and cuts that are chosen from them.

use polyreme_exec::{Options, node_seconds};
use polyreme_graph::Precision;
use polyreme_parallel::stage::{chunk_costs, measured, place_by_name};
use polyreme_parallel::{Mesh, Plan, choose};

use crate::nets;

#[test]
fn cuts_are_chosen_from_measured_times() {
    for net in nets::all() {
        let program = Precision::F32.gradients(&net.step);
        let body = program.bodies[0].clone();
        let none = node_seconds(program.clone(), Options::threads(1), 1, 1000).unwrap();
        assert_eq!(none, None, "{}: no room", net.name);
        let seconds = node_seconds(program, Options::threads(1), 2, usize::MAX).unwrap().unwrap();
        assert_eq!(seconds.len(), body.graph.nodes.len());
        let costs = measured(&net.step, &body.graph, &seconds);
        let (all, sum) = (seconds.iter().sum::<f64>(), costs.iter().sum::<f64>());
        assert!(all > 0.0 && (all - sum).abs() < 1e-9 * all.max(1.0), "{}: {all} {sum}", net.name);
        let plan = Plan { mesh: Mesh { stage: 2, ..Mesh::data(1) }, microbatches: 2, ..Plan::alone() };
        let plan = choose(&net.step, &plan, &|i| costs[i], None).unwrap();
        let place = place_by_name(&net.step, &plan.cuts).unwrap();
        let parts = chunk_costs(&net.step, &place, &|i| costs[i]);
        assert!(parts.len() == 2 && parts.iter().all(|part| *part > 0.0), "{}: {parts:?}", net.name);
        assert!((parts.iter().sum::<f64>() - sum).abs() < 1e-9 * sum.max(1.0), "{}: {parts:?}", net.name);
    }
}
