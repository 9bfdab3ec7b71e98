//! The programs of all ranks of a plan, each distinct one lowered once.
//!
//! Ranks with the same place along the stage and sequence axes run the same nodes. Along the data axis the first rank may also
//! keep averages, and along the tensor axis the first counts what several ranks have; the others differ from each other only in
//! which rows or columns they have, of which there are as many. So thousands of ranks have a few dozen programs:
//!
//! ```text
//!  data 64 x tensor 8 x stage 8:   (first, other) x (first, other) x 8 stages = 32 programs, 16 bodies
//! ```
//!
//! With logical shards ranks send each other sums in a tree, in which every data rank has its own place: there is one program for
//! each of them.

use std::collections::BTreeMap;
use std::sync::Arc;

use polyreme_graph::{Axis, Body, Graph, Program};
use polyreme_parallel::stage::flops;
use polyreme_parallel::{Budget, CompileError, CutRoom, Mesh, Plan, Training, choose, compile, schedule};

/// The programs of all ranks.
#[derive(Clone, Debug)]
pub struct Fleet {
    /// How the ranks are arranged.
    pub mesh: Mesh,
    /// The plan, with everything that was chosen for it; of rank 0.
    pub plan: Plan,
    /// The distinct programs.
    pub programs: Vec<FleetProgram>,
    /// By rank: which of them it runs.
    pub of_rank: Vec<usize>,
}

/// A program of some of the ranks.
#[derive(Clone, Debug)]
pub struct FleetProgram {
    /// The program.
    pub program: Arc<Program>,
    /// What a rank takes that runs it.
    pub memory_bytes: usize,
}

/// What ranks with one program have in common: their places along data, tensor, stage and sequence, or the first place of those that are
/// alike.
type Likeness = [usize; 4];

impl Fleet {
    /// Lowers a step for every rank of a plan whose ranks all have the same number of samples. `step` is the differentiated graph
    /// of a microbatch; what the plan leaves open is chosen. `bytes_of` is what a rank takes that runs a program; with
    /// `budget_bytes`, ranks recompute activations to take no more.
    pub fn lower(
        step: &Graph,
        plan: &Plan,
        training: &Training,
        bytes_of: &dyn Fn(&Program) -> usize,
        budget_bytes: Option<usize>,
    ) -> Result<Fleet, CompileError> {
        let room = budget_bytes.map(|bytes| CutRoom { bytes, training });
        let plan = choose(step, &Plan { rank: 0, ..plan.clone() }, &flops(step), room)?;
        let mesh = plan.mesh;
        let mut bodies: BTreeMap<Likeness, Arc<Body>> = BTreeMap::new();
        let mut known: BTreeMap<Likeness, usize> = BTreeMap::new();
        let (mut programs, mut of_rank) = (Vec::new(), Vec::with_capacity(mesh.ranks()));
        for rank in 0..mesh.ranks() {
            let alike = likeness(&plan, rank);
            if let Some(&program) = known.get(&alike) {
                of_rank.push(program);
                continue;
            }
            let own = Plan { rank, ..plan.clone() };
            // Ranks along the data axis have the same body, unless they have shards of the weights.
            let of_body = if plan.shard_weights { alike } else { [0, alike[1], alike[2], alike[3]] };
            let body = match bodies.get(&of_body) {
                Some(body) => body.clone(),
                None => {
                    let budget = budget_bytes.map(|bytes| Budget { bytes, measure: bytes_of });
                    let body = Arc::new(compile(step, &own, training, budget)?);
                    bodies.insert(of_body, body.clone());
                    body
                }
            };
            let program = schedule(&own, training, &[body], &own.whole_step());
            let memory_bytes = bytes_of(&program);
            programs.push(FleetProgram { program: Arc::new(program), memory_bytes });
            known.insert(alike, programs.len() - 1);
            of_rank.push(programs.len() - 1);
        }
        Ok(Fleet { mesh, plan, programs, of_rank })
    }

    /// One rank that runs this program.
    pub fn alone(program: Program, plan: &Plan, memory_bytes: usize) -> Fleet {
        let programs = vec![FleetProgram { program: Arc::new(program), memory_bytes }];
        Fleet { mesh: Mesh::data(1), plan: plan.clone(), programs, of_rank: vec![0] }
    }

    /// The program of a rank.
    pub fn program(&self, rank: usize) -> &FleetProgram {
        &self.programs[self.of_rank[rank]]
    }
}

fn likeness(plan: &Plan, rank: usize) -> Likeness {
    let place = |axis| plan.mesh.place(rank, axis);
    let data = if plan.shards.is_some() { place(Axis::Data) } else { place(Axis::Data).min(1) };
    [data, place(Axis::Tensor).min(1), place(Axis::Stage), place(Axis::Sequence)]
}
