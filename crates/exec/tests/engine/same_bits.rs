//! Training does not depend on the number of threads, bit for bit, and fusion changes rounding only.

use polyreme_exec::{Engine, Options};
use polyreme_graph::{Body, Graph, Op, Program};
use polyreme_kernels::Isa;
use polyreme_kernels::elementwise::{Expr, Instr as Step};
use polyreme_kernels::optim::{Moments, Optimizer};

use crate::nets::{self, Net};

fn adamw() -> Optimizer {
    Optimizer::AdamW(Moments { weight_decay: 0.01, ..Moments::DEFAULT })
}

/// Losses, gradients, parameters and states of three steps.
fn train(net: &Net, program: &Program, options: Options) -> Vec<(String, Vec<f32>)> {
    let mut engine = Engine::new(program.clone(), options).unwrap();
    let mut seen = Vec::new();
    for step in 0..3 {
        net.feed(&mut engine, step);
        engine.step(1e-3).unwrap();
        seen.push((format!("loss {step}"), engine.output("loss").unwrap().to_vec()));
        for p in &net.step.params {
            let grad = engine.grad(&p.name).unwrap().expect("every parameter is used").to_vec();
            assert!(grad.iter().any(|g| *g != 0.0), "{}: the gradient of {} is zero", net.name, p.name);
            seen.push((format!("gradient {step} of {}", p.name), grad));
        }
    }
    for p in &net.step.params {
        seen.push((p.name.clone(), engine.param(&p.name).unwrap().to_vec()));
    }
    for s in &net.step.states {
        seen.push((s.name.clone(), engine.state(&s.name).unwrap().to_vec()));
    }
    seen
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn for_any_number_of_threads() {
    for net in nets::all() {
        let program = Program::train(&net.step, adamw(), Some(1.0));
        let one = train(&net, &program, Options::threads(1));
        for threads in [2, 3, 4, 7] {
            let many = train(&net, &program, Options::threads(threads));
            for ((what, a), (_, b)) in one.iter().zip(&many) {
                assert!(bits(a) == bits(b), "{}: {what} differs between 1 and {threads} threads", net.name);
            }
        }
    }
}

#[test]
fn and_from_run_to_run() {
    for net in nets::all() {
        let program = Program::train(&net.step, adamw(), None);
        let [a, b] = [0, 1].map(|_| train(&net, &program, Options { seed: 5, ..Options::threads(2) }));
        assert!(a.iter().zip(&b).all(|(a, b)| bits(&a.1) == bits(&b.1)), "{}", net.name);
        let other = train(&net, &program, Options { seed: 6, ..Options::threads(2) });
        assert!(a.iter().zip(&other).any(|(a, b)| bits(&a.1) != bits(&b.1)), "{}: the seed counts", net.name);
    }
}

/// Runs each element-wise node as its own pass.
pub(crate) fn alone(graph: &Graph) -> Program {
    let mut graph = graph.clone();
    for node in &mut graph.nodes {
        let expr = match &node.op {
            Op::Unary(op) => Expr::unary(*op),
            Op::Binary(op) => Expr::binary(*op),
            Op::Select => Expr::new(3, vec![Step::Select(0, 1, 2)], vec![3]).unwrap(),
            Op::Expand => Expr::new(1, vec![], vec![0]).unwrap(),
            _ => continue,
        };
        node.op = Op::Fused(expr);
    }
    graph.verify();
    Program::of(Body::of(graph))
}

#[test]
fn fused_and_unfused_agree() {
    for net in nets::all() {
        for isa in [Isa::detect(), Isa::SCALAR] {
            let options = Options { isa, ..Options::threads(2) };
            let programs = [Program::gradients(&net.step), alone(&net.step)];
            assert!(programs[0].graph().nodes.len() < programs[1].graph().nodes.len(), "{}: fused", net.name);
            let [mut fused, mut plain] = programs.map(|p| Engine::new(p, options.clone()).unwrap());
            for engine in [&mut fused, &mut plain] {
                net.feed(engine, 0);
                engine.run().unwrap();
            }
            let (a, b) = (fused.output("loss").unwrap()[0], plain.output("loss").unwrap()[0]);
            assert!((a - b).abs() <= 1e-6 * b.abs(), "{}: loss {a} fused, {b} not", net.name);
            for p in &net.step.params {
                let (a, b) = (fused.grad(&p.name).unwrap().unwrap(), plain.grad(&p.name).unwrap().unwrap());
                let size = b.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                for (a, b) in a.iter().zip(b) {
                    assert!(
                        (a - b).abs() <= 1e-6 + 1e-5 * size,
                        "{}: {}: {a} fused, {b} not",
                        net.name,
                        p.name
                    );
                }
            }
        }
    }
}
