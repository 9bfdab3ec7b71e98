//! Searches on described clusters: what is chosen, and what must hold of every answer.

use std::time::Instant;

use polyreme_graph::{DType, Graph, Keeps, Precision, Program};
use polyreme_nn::Model;
use polyreme_nn::model::Gpt;
use polyreme_parallel::pipeline::PipelineKind;
use polyreme_parallel::{Mesh, Plan, Training};

use super::{adamw, cluster, host, planned, step_of};
use crate::search::estimate::Steps;
use crate::search::{
    ALLOWANCE, FixedKeys, LostBy, PlanChoice, Planner, Question, SearchAnswer, SearchEffort, SearchError,
    Sharding, TimeShares, why_slower,
};
use crate::{BetweenSpec, Cluster, Described, Fleet, InsideBy, InsideSpec};

/// A job, with everything that a question borrows.
struct AskedPlan {
    model: Model,
    base: Plan,
    training: Training,
    precisions: Vec<(&'static str, Precision)>,
    batch: usize,
    fixed: FixedKeys,
}

impl AskedPlan {
    fn gpt(layers: usize, batch: usize) -> AskedPlan {
        let gpt = Gpt { vocab: 64, width: 64, heads: 4, layers, context: 32, dropout: 0.0 };
        AskedPlan {
            model: Model::Gpt(gpt),
            base: Plan::alone(),
            training: adamw(),
            precisions: vec![("f32", Precision::F32)],
            batch,
            fixed: FixedKeys::default(),
        }
    }

    fn with<T>(&self, ask: impl FnOnce(&Question) -> T) -> T {
        let step = |samples: usize| -> Result<Graph, String> { Ok(step_of(&self.model, samples)) };
        let bytes_of = |program: &Program, _threads: usize| stored(program);
        ask(&Question {
            step: &step,
            training: self.training,
            batch: self.batch,
            least_samples: 1,
            bytes_of: &bytes_of,
            process_bytes: 0,
            precisions: &self.precisions,
            staleness: None,
            base: &self.base,
            fixed: self.fixed,
        })
    }

    fn search(&self, cluster: &Cluster) -> SearchAnswer {
        self.with(|question| Planner::new(question).search(cluster, SearchEffort::LITTLE)).unwrap()
    }

    fn best(&self, cluster: &Cluster) -> PlanChoice {
        self.search(cluster).plans[0].choice
    }
}

/// Values, parameters, gradients and moments, as an engine without scratch space would have them.
fn stored(program: &Program) -> usize {
    let params = program.graph().param_numel() * DType::F32.bytes();
    let states = program.optimizer.map_or(0, |o| o.n_states());
    let part = program.role.as_ref().map_or(1, |role| match role.keeps {
        Keeps::All => 1,
        Keeps::OwnMoments | Keeps::OwnGradients => role.ranks,
    });
    planned(program) + params * states / part
}

/// Hosts of one core, with this memory.
fn small(hosts: usize, memory_mib: f64, between: BetweenSpec) -> Cluster {
    let mut host = host(Described::default());
    (host.cores, host.memory_bytes) = (1, memory_mib * f64::from(1 << 20));
    Cluster::of(hosts, &host, between)
}

#[test]
fn free_links_prefer_data_parallelism() {
    let cluster = Cluster { inside: InsideSpec::free(), ..small(8, 1e4, BetweenSpec::free()) };
    let best = AskedPlan::gpt(4, 64).best(&cluster);
    assert_eq!((best.mesh, best.microbatches), (Mesh::data(8), 1), "{best:?}");
}

#[test]
fn a_job_that_does_not_fit_one_rank_is_split() {
    let asked = AskedPlan::gpt(8, 8);
    let links = BetweenSpec::new(20.0, 10.0);
    let alone = asked.search(&small(1, 1e4, links)).plans[0].process_bytes as f64 / f64::from(1 << 20);
    // A third of what it takes: recomputation does not save parameters.
    let answer = asked.search(&small(8, alone / 3.0, links));
    let best = &answer.plans[0];
    let mesh = best.choice.mesh;
    assert!(best.process_bytes as f64 <= alone / 3.0 * f64::from(1 << 20));
    assert!(
        mesh.tensor * mesh.stage > 1
            || best.choice.sharding != Sharding::Usual
            || best.choice.samples(&question_of(&asked)) < 8
    );
    // And alone it cannot be: the answer says by how much.
    let tight = asked.search(&small(1, alone / 20.0, links));
    assert!(tight.plans.is_empty(), "{:?}", tight.plans[0].choice);
    assert!(tight.lost.iter().any(|(_, why)| matches!(why, LostBy::Memory { needs, has } if needs > has)));
}

/// A host with room for everything, whose processes may each take 0.6 of what the largest plan takes.
#[test]
fn what_one_process_may_take_is_kept_to() {
    let asked = AskedPlan::gpt(8, 8);
    let mut host = small(1, 1e4, BetweenSpec::new(20.0, 10.0));
    (host.hosts[0].cores, host.inside.by) = (8, InsideBy::Processes);
    let alone = asked.search(&host).plans.iter().map(|plan| plan.process_bytes).max().unwrap() as f64;
    host.hosts[0].process_bytes = 0.6 * alone;
    let answer = asked.search(&host);
    assert!(!answer.plans.is_empty());
    assert!(answer.plans.iter().all(|plan| plan.report.memory_bytes as f64 <= 0.6 * alone));
    assert!(answer.lost.iter().any(|(_, why)| matches!(why, LostBy::Memory { .. })));
}

/// A question of which only sizes are asked.
fn question_of(asked: &AskedPlan) -> Question<'_> {
    Question {
        step: &|_| Err(String::new()),
        training: asked.training,
        batch: asked.batch,
        least_samples: 1,
        bytes_of: &|_, _| 0,
        process_bytes: 0,
        precisions: &[],
        staleness: None,
        base: &asked.base,
        fixed: asked.fixed,
    }
}

#[test]
fn slow_links_prefer_stages_to_parts_of_matrices() {
    // Too large for one host, and links on which every all-reduce hurts.
    let asked = AskedPlan {
        fixed: FixedKeys { data: Some(1), ranks: Some(4), ..FixedKeys::default() },
        ..AskedPlan::gpt(8, 16)
    };
    let slow = small(4, 1e4, BetweenSpec::new(100.0, 1.0));
    let answer = asked.search(&slow);
    let best = &answer.plans[0].choice;
    assert_eq!((best.mesh.tensor, best.mesh.stage), (1, 4), "{best:?}");
    // Inside one host with fast memory, parts of matrices are an option; and what loses says why.
    let by_tensor = answer.plans.iter().find(|plan| plan.choice.mesh.tensor == 4);
    if let Some(plan) = by_tensor {
        let why = asked.with(|question| why_slower(question, &slow, plan, &answer.plans[0]));
        assert!(why.contains("parts of matrices"), "{why}");
    }
}

#[test]
fn what_is_fixed_is_kept() {
    let fixed = FixedKeys {
        stage: Some(2),
        microbatches: Some(4),
        schedule: Some(PipelineKind::Gpipe),
        threads: Some(2),
        ..FixedKeys::default()
    };
    let asked = AskedPlan { fixed, ..AskedPlan::gpt(4, 16) };
    for plan in asked.search(&cluster(2)).plans {
        let choice = plan.choice;
        assert_eq!((choice.mesh.stage, choice.microbatches, choice.schedule), (2, 4, PipelineKind::Gpipe));
        assert_eq!(choice.seating.threads, 2);
        assert_eq!(choice.mesh.ranks(), choice.seating.ranks());
    }
    let refused = |fixed: FixedKeys| {
        let asked = AskedPlan { fixed, ..AskedPlan::gpt(4, 16) };
        asked.with(|question| Planner::new(question).search(&cluster(2), SearchEffort::LITTLE).err())
    };
    // A key that no cluster can meet is the reason; keys that do not go together are another one.
    let odd = refused(FixedKeys { tensor: Some(7), ..FixedKeys::default() });
    assert!(matches!(&odd, Some(SearchError::Refused(why)) if why.contains("4 attention heads")), "{odd:?}");
    let few = refused(FixedKeys { tensor: Some(4), ranks: Some(2), ..FixedKeys::default() });
    assert!(matches!(few, Some(SearchError::NoChoice { hosts: 2, .. })), "{few:?}");
}

#[test]
fn the_same_question_has_the_same_answer() {
    let asked = AskedPlan {
        precisions: vec![("f32", Precision::F32), ("bf16", Precision::half(DType::Bf16))],
        ..AskedPlan::gpt(4, 16)
    };
    let text = || {
        let answer = asked.search(&cluster(4));
        let plans: Vec<_> =
            answer.plans.iter().map(|p| (p.choice, p.report.step_us.to_bits(), p.process_bytes)).collect();
        format!("{plans:?} {:?} {} {}", answer.lost, answer.considered, answer.simulated)
    };
    assert_eq!(text(), text());
}

#[test]
fn plans_are_ordered_and_their_shares_add_up() {
    let asked = AskedPlan::gpt(4, 32);
    let cluster = cluster(4);
    let answer = asked.search(&cluster);
    assert!(
        answer.plans.len() > 2
            && answer.simulated >= answer.plans.len()
            && answer.considered > answer.simulated
    );
    assert!(answer.plans.windows(2).all(|w| w[0].report.step_us <= w[1].report.step_us));
    for plan in &answer.plans {
        let s = TimeShares::of(plan, &cluster);
        let all = s.computing + s.memory + s.data + s.tensor + s.stage + s.sequence;
        assert!((0.5..1.1).contains(&all), "{s:?} of {:?}", plan.choice);
        let why = asked.with(|question| why_slower(question, &cluster, plan, &answer.plans[0]));
        assert!(!why.is_empty());
    }
    // More than the heads that there are is refused by whoever splits matrices, in its words.
    let refusals = answer.lost.iter().filter(|(_, why)| matches!(why, LostBy::Refused(_)));
    assert!(refusals.count() > 0, "{:?}", answer.lost);
}

#[test]
fn what_pipelines_cannot_do_is_refused() {
    let step = step_of(&AskedPlan::gpt(24, 4).model, 1);
    let refused =
        |plan: Plan| Fleet::lower(&step, &plan, &adamw(), &|_| 0, None).map(|_| ()).unwrap_err().to_string();
    let mesh = Mesh { data: 2, tensor: 1, stage: 2, sequence: 1 };
    let own = Plan { mesh, microbatches: 4, keeps: Keeps::OwnGradients, ..Plan::alone() };
    assert!(refused(own.clone()).contains("shard_weights = true"), "{}", refused(own));
    let mesh = Mesh { stage: 23, ..Mesh::data(1) };
    let long = Plan { mesh, microbatches: 23, ..Plan::alone() };
    assert!(refused(long.clone()).contains("at most 22"), "{}", refused(long));
}

/// Estimates order choices, and are compared with times that were simulated: far above one they would discard what may win.
#[test]
fn estimates_are_below_what_is_simulated_or_near_it() {
    let asked = AskedPlan::gpt(4, 32);
    for cluster in [cluster(1), cluster(4), small(8, 1e4, BetweenSpec::new(100.0, 1.0))] {
        let answer = asked.search(&cluster);
        asked.with(|question| {
            let mut steps = Steps::new(question);
            for plan in &answer.plans {
                let estimate = steps.estimate(&plan.choice, &cluster).unwrap().step_us;
                let ratio = estimate / plan.report.step_us;
                assert!((0.1..ALLOWANCE).contains(&ratio), "{ratio} of {:?}", plan.choice);
            }
        });
    }
}

/// 64 hosts of 32 cores: in a release build on one core this must take less than 30 s; tests are built with checks.
#[test]
fn a_search_over_64_hosts_takes_seconds() {
    let began = Instant::now();
    let gpt = Gpt { vocab: 50_304, width: 1024, heads: 16, layers: 24, context: 1024, dropout: 0.0 };
    let asked = AskedPlan { model: Model::Gpt(gpt), batch: 512, ..AskedPlan::gpt(1, 1) };
    let mut host = host(Described::default());
    host.cores = 32;
    let cluster = Cluster::of(64, &host, BetweenSpec::new(20.0, 100.0));
    let answer = asked.with(|question| Planner::new(question).search(&cluster, SearchEffort::USUAL)).unwrap();
    let took = began.elapsed();
    for plan in answer.plans.iter().take(10) {
        let why = asked.with(|question| why_slower(question, &cluster, plan, &answer.plans[0]));
        println!("{:9.1} ms  {:?}  {why}", plan.report.step_us / 1e3, plan.choice);
    }
    println!("{} choices, {} simulated, {took:?}", answer.considered, answer.simulated);
    assert!(!answer.plans.is_empty() && took.as_secs() < 120, "{took:?}");
}
