//! Draws every pipeline schedule as it really runs: four stages, eight microbatches, blocks that sleep for as long as they would
//! compute. `cargo run -p polyreme-train --example schedules -- FOLDER` writes a timeline and a picture of each.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use polyreme_collective::Comm;
use polyreme_exec::{BlockPace, Comms, Engine, ExecError, Filled, Options, StepArgs, Timeline};
use polyreme_graph::{
    Builder, DType, Graph, Init, Microbatch, Moment, Optimizer, Segment, TraceError, differentiate,
};
use polyreme_parallel::pipeline::PipelineKind;
use polyreme_parallel::{Mesh, Plan, StepShape, Training, compile, schedule};
use polyreme_train::record::timeline::{Trace, svg};
use polyreme_train::record::trace::{About, text};

const STAGES: usize = 4;
const MICROBATCHES: usize = 8;
/// A forward pass, the input gradients and the weight gradients of a stage take this long each.
const UNIT: Duration = Duration::from_millis(12);
/// Steps of the schedule that has no flush between them.
const STEPS: usize = 3;

type Failed = Box<dyn Error + Send + Sync>;

fn main() -> Result<(), Failed> {
    let folder = PathBuf::from(std::env::args().nth(1).unwrap_or_else(|| ".".into()));
    std::fs::create_dir_all(&folder)?;
    for kind in PipelineKind::ALL {
        draw(kind, &folder)?;
    }
    Ok(())
}

fn draw(kind: PipelineKind, folder: &Path) -> Result<(), Failed> {
    let chunks = STAGES * kind.chunks_per_stage();
    let graph = layers(chunks)?;
    let mesh = Mesh { stage: STAGES, ..Mesh::data(1) };
    let cuts = (1..chunks).map(|i| format!("layer{i}")).collect();
    let plan = Plan { mesh, pipeline: kind, microbatches: MICROBATCHES, cuts, ..Plan::alone() };
    let origin = Instant::now();
    let ranks = std::thread::scope(|s| {
        let run = |comm| rank(comm, &graph, &plan, origin);
        let ranks: Vec<_> = Comm::local(STAGES).into_iter().map(|comm| s.spawn(move || run(comm))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect::<Result<Vec<_>, _>>()
    })?;
    let mut about = About::new("equal layers", mesh);
    (about.schedule, about.microbatches) = (Some(kind.name().into()), MICROBATCHES);
    let file = folder.join(format!("{kind}.json"));
    std::fs::write(&file, text(&about, &ranks))?;
    let step = Trace::read(&file)?.step(None)?;
    let (ms, idle) = (step.took_us() / 1e3, 100.0 * step.idle());
    std::fs::write(folder.join(format!("{kind}.svg")), svg(&[step]))?;
    println!("{:<12} {ms:>6.1} ms {idle:>3.0} % idle", kind.name());
    Ok(())
}

/// One rank: a step to touch memory, and one that is recorded.
fn rank(comm: Comm, graph: &Graph, plan: &Plan, origin: Instant) -> Result<Vec<Moment>, Failed> {
    let plan = Plan { rank: comm.rank(), ..plan.clone() };
    let optimizer = Optimizer::Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.0 };
    let training = Training { optimizer, moments: DType::F32, clip: None, ema: None, scaled: false };
    let body = Arc::new(compile(graph, &plan, &training, None)?);
    let steps = if plan.pipeline == PipelineKind::TwoBw { STEPS } else { 1 };
    let microbatches = vec![Microbatch { body: 0, first_sample: 0 }; steps * MICROBATCHES];
    let shape = StepShape::rounds(&microbatches, microbatches.len());
    let program = schedule(&plan, &training, &[body], &shape);
    let comms = Comms::new(comm, &plan.mesh)?;
    let mut engine = Engine::join(program, Options::threads(1), comms)?;
    let args = StepArgs { lr: 0.01, ..StepArgs::default() };
    engine.step_with::<ExecError>(&mut Filled { weight: 1.0 }, args)?;
    let chunks = plan.pipeline.chunks_per_stage() as u32;
    engine.set_pace(Some(BlockPace::new(move |body, block| {
        let within = |s: &&Segment| s.nodes.contains(&block.nodes.start);
        let of = body.segments.iter().find(within).map_or(1, |s| s.nodes.len());
        UNIT / chunks * block.nodes.len() as u32 / of as u32
    })));
    engine.set_timeline(Some(Timeline::new(origin, usize::MAX)));
    engine.step_with::<ExecError>(&mut Filled { weight: 1.0 }, args)?;
    Ok(engine.timeline().map_or(Vec::new(), |timeline| timeline.moments().to_vec()))
}

/// As many equal layers as there are chunks.
fn layers(n: usize) -> Result<Graph, TraceError> {
    let mut b = Builder::new();
    let mut x = b.input("x", [2, 8], DType::F32)?;
    for i in 0..n {
        x = b.layer(format!("layer{i}"), |b| {
            let gamma = b.param("gamma", [8], Init::Const(1.0))?;
            let beta = b.param("beta", [8], Init::Const(0.0))?;
            let weight = b.param("weight", [8, 8], Init::Uniform { bound: 0.3 })?;
            let y = b.layer_norm(x, gamma, beta, 1e-5)?;
            b.linear(y, weight, None)
        })?;
    }
    let loss = b.mean(x, &[0, 1])?;
    differentiate(&b.finish(&[("loss", loss)]), loss)
}
