//! Ranks that keep only their own shard of the gradients, against ranks that keep all: the same weights, less memory.

use polyreme_collective::Comm;
use polyreme_exec::{Engine, ExecError, Inputs, Kept, Options, StepArgs};
use polyreme_graph::op::CrossEntropy;
use polyreme_graph::{
    Builder, DType, Graph, Init, Keeps, Moments, Optimizer, Tensor, Weights, differentiate,
};
use polyreme_kernels::elementwise::Unary;
use polyreme_parallel::{Norms, Plan};

use crate::ranks::{Case, Over, base, feed, near, program, step_graph, train};

/// A weight that is used three times, a parameter whose gradient the backward pass goes on from, and one that the
/// loss does not depend on.
fn shared_graph(n: usize, _: bool) -> Graph {
    let mut b = Builder::new();
    let x = b.input("x", [n, 20], DType::F32).unwrap();
    let labels = b.input("labels", [n], DType::I32).unwrap();
    let weight = b.input("weight", [1], DType::F32).unwrap();
    let uniform = Init::Uniform { bound: 0.2 };
    let first = b.param("first", [90, 20], uniform).unwrap();
    let tied = b.param("tied", [90, 90], uniform).unwrap();
    let turn = b.param("turn", [90, 90], uniform).unwrap();
    let shift = b.param("shift", [90, 90], uniform).unwrap();
    let unused = b.param("unused", [300], uniform).unwrap();
    let head = b.param("head", [5, 90], uniform).unwrap();
    let mut h: Tensor = b.linear(x, first, None).unwrap();
    for _ in 0..2 {
        h = b.linear(h, tied, None).unwrap();
        h = b.unary(Unary::Tanh, h).unwrap();
    }
    // The gradient of `sum` is that of `shift`, and products for those of `turn` and `tied` read it.
    let turned = b.linear(tied, turn, None).unwrap();
    let sum = b.add(turned, shift).unwrap();
    h = b.linear(h, sum, None).unwrap();
    let logits = b.linear(h, head, None).unwrap();
    let options = CrossEntropy { label_smoothing: 0.0, ignore_index: None };
    let loss = b.cross_entropy(logits, labels, None, options).unwrap();
    let scalar = b.reshape(weight, polyreme_graph::Shape::scalar()).unwrap();
    let weighted = b.mul(loss, scalar).unwrap();
    let graph = b.finish(&[("loss", loss), ("weighted", weighted), ("unused", unused)]);
    differentiate(&graph, weighted).unwrap()
}

fn sharded(over: Over, bucket_bytes: usize, keeps: Keeps) -> Plan {
    let weights = if over == Over::Sockets { Weights::Own } else { Weights::Shared };
    Plan { keeps, weights, bucket_bytes, ..Plan::alone() }
}

const OVER: [Over; 3] = [Over::Threads, Over::SharedMemory, Over::Sockets];

/// Buckets of one tensor, of a few, and of all.
const BUCKETS: [usize; 3] = [1, 30_000, 1 << 30];

/// With the usual `eps` Adam makes a whole step out of the rounding of a gradient that is nearly zero, and sums in another
/// order, which sockets may take, could not be compared.
const CALM: Moments = Moments { eps: 1e-3, ..Moments::DEFAULT };

/// One microbatch without clipping: the same sums in the same order.
#[test]
fn one_piece_gives_the_same_bits() {
    let adam = Optimizer::AdamW(Moments { weight_decay: 0.1, ..CALM });
    for graph in [step_graph as fn(usize, bool) -> Graph, shared_graph] {
        for optimizer in [base().optimizer, adam] {
            for over in OVER {
                // 7 ranks: shares of 3 and 4 samples.
                for ranks in [1, 2, 3, 4, 7, 8] {
                    for bucket_bytes in BUCKETS {
                        let case = |keeps: Keeps| {
                            let plan = sharded(over, bucket_bytes, keeps);
                            train(&Case { ranks, plan, optimizer, over, graph, ..base() })
                        };
                        let (all, own) = (case(Keeps::OwnMoments), case(Keeps::OwnGradients));
                        let what = format!("{optimizer:?}, {over:?}, {ranks} ranks, {bucket_bytes}");
                        // Over sockets, the speed of the links decides the order of a sum.
                        if over == Over::Sockets {
                            near(&what, &own.params, &all.params);
                            near(&what, &own.moments, &all.moments);
                        } else {
                            assert!(own.params == all.params, "{what}: parameters");
                            assert!(own.moments == all.moments, "{what}: moments");
                            assert_eq!(own.losses, all.losses, "{what}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn microbatches_clipping_and_norms_give_the_weights_of_one_rank() {
    let adam = Optimizer::Adam(CALM);
    for (optimizer, clip, graph) in [
        (base().optimizer, None, step_graph as fn(usize, bool) -> Graph),
        (base().optimizer, Some(0.3), shared_graph),
        (adam, Some(0.3), step_graph),
    ] {
        let one = train(&Case { optimizer, clip, graph, ..base() });
        for over in OVER {
            for ranks in [2, 3, 4, 8] {
                // Up to 5 microbatches for 3 samples: some are empty.
                for (bucket_bytes, microbatches) in [(1, 1), (4096, 2), (1 << 20, 3), (1, 5)] {
                    let plan = sharded(over, bucket_bytes, Keeps::OwnGradients);
                    let many =
                        train(&Case { ranks, plan, optimizer, clip, microbatches, over, graph, ..base() });
                    let what = format!(
                        "{optimizer:?}, clip {clip:?}, {over:?}, {ranks} ranks, {bucket_bytes}, {microbatches} microbatches"
                    );
                    near(&what, &many.params, &one.params);
                    near(&what, &many.moments, &one.moments);
                    let (a, b) = (many.losses.last().unwrap(), one.losses.last().unwrap());
                    assert!((a - b).abs() < 1e-6 * b, "{what}: {a} and {b}");
                }
            }
        }
    }
}

/// With buckets of one tensor, that of `shift` would be in flight while products still read it.
#[test]
fn a_gradient_that_is_read_again_is_summed_later() {
    let graph = shared_graph;
    let one = train(&Case { graph, ..base() });
    for keeps in [Keeps::All, Keeps::OwnMoments] {
        for ranks in [2, 3] {
            let plan = sharded(Over::Sockets, 1, keeps);
            let many = train(&Case { ranks, plan, over: Over::Sockets, graph, ..base() });
            near(&format!("{ranks} ranks, {keeps:?}"), &many.params, &one.params);
        }
    }
}

#[test]
fn ranks_may_have_no_samples() {
    let one = train(&base());
    for over in OVER {
        // 24 samples for 30 ranks; 11 ranks with up to 3 samples in 4 microbatches.
        for (ranks, microbatches) in [(30, 1), (11, 4)] {
            let many = train(&Case {
                ranks,
                plan: sharded(over, 1, Keeps::OwnGradients),
                microbatches,
                over,
                ..base()
            });
            near(&format!("{over:?}, {ranks} ranks"), &many.params, &one.params);
        }
    }
}

#[test]
fn norms_over_one_rank_and_over_all() {
    for over in OVER {
        let (sync, local) = (Norms::Synchronised, Norms::Local);
        for (norms, microbatches) in [(sync, 1), (local, 1), (sync, 2), (local, 2)] {
            let case = |keeps: Keeps| {
                let plan = Plan { norms, ..sharded(over, 1, keeps) };
                train(&Case { ranks: 3, plan, microbatches, over, norm: true, ..base() })
            };
            let (all, own) = (case(Keeps::OwnMoments), case(Keeps::OwnGradients));
            near(&format!("{over:?}, {norms:?}, {microbatches}"), &own.params, &all.params);
            near(&format!("{over:?}, {norms:?}, {microbatches}: states"), &own.states, &all.states);
        }
    }
}

fn case(ranks: usize, keeps: Keeps, microbatches: usize) -> Case {
    let plan = sharded(Over::Threads, 1, keeps);
    Case { ranks, plan, microbatches, graph: shared_graph, ..base() }
}

#[test]
fn a_rank_takes_its_part_and_two_buckets() {
    let all =
        Engine::footprint(&program(&case(4, Keeps::OwnMoments, 1), 0).0, 1, polyreme_exec::Isa::detect());
    let own: Vec<_> = (0..4)
        .map(|rank| {
            Engine::footprint(
                &program(&case(4, Keeps::OwnGradients, 1), rank).0,
                1,
                polyreme_exec::Isa::detect(),
            )
        })
        .collect();
    let buffers = program(&case(4, Keeps::OwnGradients, 1), 0).0.grad_buffers.unwrap();
    // The largest pair of neighbours is the gradients of 90 x 90.
    assert_eq!(buffers.len, 2 * (8100usize.next_multiple_of(16)));
    let kept: usize = own.iter().map(|f| f.grads - buffers.len * 4).sum();
    let learnt = 4 * buffers.buckets.last().unwrap().end;
    assert_eq!(kept, learnt, "every gradient is kept once");
    assert_eq!(all.grads, learnt + 4 * 300usize.next_multiple_of(16), "and otherwise by each rank");
    for own in own {
        assert_eq!((own.params, own.activations), (all.params, all.activations));
    }
}

#[test]
fn what_is_no_longer_there_cannot_be_read() {
    let comms = Comm::local(2).into_iter();
    std::thread::scope(|s| {
        comms.for_each(|comm| {
            s.spawn(move || {
                let (program, _) = program(&case(2, Keeps::OwnGradients, 1), comm.rank());
                assert!(program.buffers.iter().any(|b| b.name == "own gradients"), "{program}");
                let engine = Engine::join(program, Options::threads(1), comm).unwrap();
                assert_eq!(engine.grad("tied"), Err(ExecError::NotKept));
            });
        });
    });
}

#[test]
fn a_loss_that_is_not_finite_leaves_nothing_under_way() {
    for bad in [0, 1] {
        std::thread::scope(|s| {
            for comm in Comm::local(3) {
                s.spawn(move || {
                    let rank = comm.rank();
                    let (program, samples) = program(&case(3, Keeps::OwnGradients, 2), rank);
                    let mut engine = Engine::join(program, Options::threads(1), comm).unwrap();
                    let before = engine.kept(Kept::Params).to_vec();
                    let step = |engine: &mut Engine, bad: Option<usize>| {
                        let mut load = |microbatch: usize, inputs: &mut Inputs| -> Result<f64, ExecError> {
                            feed(inputs, 0, samples[microbatch].clone());
                            if (rank, Some(microbatch)) == (1, bad) {
                                inputs.f32("x").unwrap()[7] = f32::NAN;
                            }
                            Ok(0.5)
                        };
                        engine.step_with(&mut load, StepArgs { lr: 0.1, ..StepArgs::default() })
                    };
                    let error = step(&mut engine, Some(bad)).unwrap_err();
                    assert!(matches!(error, ExecError::NotFinite { here, .. } if here == (rank == 1)));
                    assert!(engine.kept(Kept::Params) == before);
                    // The next step starts from scratch.
                    let totals = step(&mut engine, None).unwrap();
                    assert!(
                        totals.loss.is_finite() && engine.kept(Kept::Params).iter().all(|p| p.is_finite())
                    );
                });
            }
        });
    }
}
