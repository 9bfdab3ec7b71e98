//! Small graphs, cut, partitioned and joined. That results have the same bits is tested with an engine, in `nn`.

use polyreme_graph::builder::BatchNorm;
use polyreme_graph::{
    BlockKind, Builder, DType, Graph, Init, Precision, Tensor, Traced, differentiate, fuse,
};

use super::*;

fn step(f: impl FnOnce(&mut Builder) -> Traced) -> Graph {
    let mut b = Builder::new();
    let y = f(&mut b).unwrap();
    let loss = b.layer("loss", |b| b.mean_all(y)).unwrap();
    differentiate(&b.finish(&[("loss", loss)]), loss).unwrap()
}

fn input(b: &mut Builder) -> Traced {
    b.input("x", [2, 6], DType::F32)
}

fn linear(b: &mut Builder, name: &str, x: Tensor, out: usize) -> Traced {
    b.layer(name, |b| {
        let width = b.shape(x).last();
        let w = b.param("weight", [out, width], Init::Const(1.0))?;
        let bias = b.param("bias", [out], Init::Const(0.0))?;
        let y = b.linear(x, w, Some(bias))?;
        b.activation("tanh", y)
    })
}

/// Layers `fc.0`, `fc.1` and so on, with these widths.
fn layers(widths: &[usize]) -> Graph {
    step(|b| {
        let mut x = input(b)?;
        for (k, &width) in widths.iter().enumerate() {
            x = linear(b, &format!("fc.{k}"), x, width)?;
        }
        Ok(x)
    })
}

/// Cut before these layers.
fn cut_before(step: &Graph, layers: &[&str]) -> Cut {
    cut(step, &place_by_name(step, layers).unwrap()).unwrap()
}

fn params(chunk: &ChunkGraph) -> Vec<&str> {
    chunk.graph.params.iter().map(|p| p.name.as_str()).collect()
}

/// What arrives, as `from pass [shape]`.
fn arrivals(chunk: &ChunkGraph) -> Vec<String> {
    chunk.arrives.iter().map(|c| format!("{} {:?} {}", c.from, c.pass, c.shape)).collect()
}

#[test]
fn each_chunk_has_its_own_layers_and_one_value_crosses_each_way() {
    let cut = cut_before(&layers(&[6, 5, 4]), &["fc.1", "fc.2"]);
    let [a, b, c] = &cut.chunks[..] else { panic!("{} chunks", cut.chunks.len()) };
    assert_eq!(params(a), ["fc.0.weight", "fc.0.bias"]);
    assert_eq!(params(b), ["fc.1.weight", "fc.1.bias"]);
    assert_eq!(params(c), ["fc.2.weight", "fc.2.bias"]);
    assert_eq!(arrivals(a), ["1 Backward [2, 6]"]);
    assert_eq!(arrivals(b), ["0 Forward [2, 6]", "2 Backward [2, 5]"]);
    assert_eq!(arrivals(c), ["1 Forward [2, 5]"]);
    assert!(cut.tied.is_empty());
    for chunk in &cut.chunks {
        assert!(chunk.graph.grads.iter().all(Option::is_some), "{}", chunk.graph);
        assert_eq!(chunk.graph.n_samples(), 2);
    }
    assert_eq!(a.graph.output("loss"), None);
    assert!(c.graph.output("loss").is_some());
    // What leaves one is what arrives at the other, under one name.
    let leaves = cut.chunks.iter().flat_map(|c| &c.leaves);
    for crossing in leaves {
        assert!(cut.chunks[crossing.to].arrives.contains(crossing));
        assert!(cut.chunks[crossing.from].graph.output(&crossing.name).is_some());
        assert!(cut.chunks[crossing.to].graph.inputs.iter().any(|i| i.name == crossing.name));
    }
}

#[test]
fn one_chunk_is_the_whole_step() {
    let step = layers(&[6, 5]);
    let cut = cut(&step, &vec![0; step.n_forward]).unwrap();
    assert_eq!(cut.chunks[0].graph.to_string(), step.to_string());
    assert!(cut.chunks[0].arrives.is_empty() && cut.chunks[0].leaves.is_empty());
}

#[test]
fn a_skipped_value_is_sent_to_each_chunk_directly_and_its_gradient_is_added_on_the_way_back() {
    let step = step(|b| {
        let x = input(b)?;
        let first = linear(b, "fc.0", x, 6)?;
        let y = linear(b, "fc.1", first, 6)?;
        let y = linear(b, "fc.2", y, 6)?;
        // In two shapes: the value is sent once.
        let view = b.reshape(first, [12])?;
        let z = b.add(y, first)?;
        let z = b.reshape(z, [12])?;
        b.mul(z, view)
    });
    let cut = cut_before(&step, &["fc.1", "fc.2"]);
    assert_eq!(arrivals(&cut.chunks[2]), ["0 Forward [2, 6]", "1 Forward [2, 6]"]);
    // Chunk 1 adds its part of the gradient to that of chunk 2.
    let to_first: Vec<_> = cut.chunks[0].arrives.iter().map(|c| c.from).collect();
    assert_eq!(to_first, [1]);
}

#[test]
fn a_tied_parameter_is_in_every_chunk_that_uses_it() {
    let step = step(|b| {
        let mut x = input(b)?;
        let shared = b.param("shared", [6, 6], Init::Const(1.0))?;
        for k in 0..3 {
            x = linear(b, &format!("fc.{k}"), x, 6)?;
            if k != 1 {
                x = b.linear(x, shared, None)?;
            }
        }
        Ok(x)
    });
    let cut = cut_before(&step, &["fc.1", "fc.2"]);
    assert_eq!(cut.tied, [Tied { name: "shared".into(), chunks: vec![0, 2], contribute: vec![0, 2] }]);
    for chunk in [0, 2] {
        let graph = &cut.chunks[chunk].graph;
        let p = graph.params.iter().position(|p| p.name == "shared").unwrap();
        assert!(graph.grads[p].is_some());
    }
    // Contributions stay where they are computed: only the gradient of an activation crosses.
    assert_eq!(arrivals(&cut.chunks[0]), ["1 Backward [2, 6]"]);
}

#[test]
fn a_state_that_changes_belongs_to_one_chunk() {
    let shared = step(|b| {
        let x = input(b)?;
        let state = b.state("count", [6], Init::Const(0.0))?;
        let x = linear(b, "fc.0", x, 6)?;
        let x = b.add(x, state)?;
        let x = linear(b, "fc.1", x, 6)?;
        let next = b.scale(state, 2.0)?;
        b.update_state(state, next)?;
        b.add(x, state)
    });
    let place = place_by_name(&shared, &["fc.1"]).unwrap();
    let error = cut(&shared, &place).unwrap_err();
    assert_eq!(error, CutError::SharedState { name: "count".into(), chunks: vec![0, 1] });
}

#[test]
fn running_statistics_go_with_their_norm() {
    let step = step(|b| {
        let mut x = input(b)?;
        for k in 0..2 {
            x = linear(b, &format!("fc.{k}"), x, 6)?;
            x = b.layer(format!("bn.{k}"), |b| {
                let at = BatchNorm {
                    gamma: b.param("gamma", [6], Init::Const(1.0))?,
                    beta: b.param("beta", [6], Init::Const(0.0))?,
                    running_mean: b.state("mean", [6], Init::Const(0.0))?,
                    running_var: b.state("var", [6], Init::Const(1.0))?,
                    eps: 1e-5,
                    momentum: 0.1,
                };
                b.batch_norm(x, at, true)
            })?;
        }
        Ok(x)
    });
    for (k, chunk) in cut_before(&step, &["fc.1"]).chunks.iter().enumerate() {
        let states: Vec<_> = chunk.graph.states.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(states, [format!("bn.{k}.mean"), format!("bn.{k}.var")]);
        assert_eq!(chunk.graph.updates.len(), 2);
    }
}

#[test]
fn in_half_precision_activations_cross_in_half() {
    let step = Precision::half(DType::Bf16).apply(&layers(&[6, 6, 6, 6]));
    let cut = cut_before(&step, &["fc.1", "fc.3"]);
    let leaves: Vec<_> = cut.chunks.iter().flat_map(|c| &c.leaves).collect();
    let forward: Vec<_> =
        leaves.iter().filter(|c| c.pass == CrossingPass::Forward).map(|c| c.dtype).collect();
    assert_eq!(forward, [DType::Bf16; 2]);
    assert_eq!(leaves.len(), 4, "{leaves:?}");
}

#[test]
fn layers_are_spread_evenly() {
    let step = layers(&[6; 8]);
    let cost = flops(&step);
    for n in [1, 2, 4, 8] {
        let place = partition(&step, n, &cost, None).unwrap();
        let chunks = cut(&step, &place).unwrap().chunks;
        let weights: Vec<_> = chunks.iter().map(|c| c.graph.params.len() / 2).collect();
        assert_eq!(weights, vec![8 / n; n], "{:?}", chunk_costs(&step, &place, &cost));
    }
}

#[test]
fn an_expensive_layer_is_left_alone() {
    let step = layers(&[6, 60, 6, 6, 6]);
    let place = partition(&step, 3, &flops(&step), None).unwrap();
    let costs = chunk_costs(&step, &place, &flops(&step));
    assert_eq!(costs.len(), 3);
    let whole = chunk_costs(&step, &vec![0; step.n_forward], &flops(&step))[0];
    assert!((costs.iter().sum::<f64>() - whole).abs() < 1e-6 * whole);
    // `fc.1` and `fc.2` have 360 weights each, all others together 108 and less.
    let chunks = cut(&step, &place).unwrap().chunks;
    assert!(!params(&chunks[0]).contains(&"fc.2.weight") && params(&chunks[1]).contains(&"fc.2.weight"));
}

#[test]
fn a_residual_block_is_not_cut_where_two_values_cross() {
    let step = step(|b| {
        let mut x = input(b)?;
        for k in 0..3 {
            x = b.layer(format!("blocks.{k}"), |b| {
                let y = linear(b, "up", x, 24)?;
                let y = linear(b, "down", y, 6)?;
                b.add(x, y)
            })?;
        }
        Ok(x)
    });
    let found: Vec<_> = positions(&step).into_iter().map(|p| (p.layer, p.bytes)).collect();
    let want = [("blocks.0.down", 192), ("blocks.1.up", 48), ("blocks.2.up", 48)];
    // The first block's skip is the input, which every chunk can be fed.
    assert_eq!(found, want.map(|(layer, bytes)| (layer.to_string(), bytes)));
}

#[test]
fn a_memory_bound_moves_the_cut() {
    // By cost the first layer is half of all; by parameters of the last two it must be more.
    let step = layers(&[6, 6, 6, 6]);
    let takes = |chunk: usize, load: ChunkLoad| load.params * if chunk == 0 { 1 } else { 2 };
    let all = 4 * 42;
    let bound = |bytes| Some(MemoryBound { bytes, takes: &takes });
    let sizes = |memory| {
        let place = partition(&step, 2, &flops(&step), memory)?;
        Ok(cut(&step, &place).unwrap().chunks.iter().map(|c| c.graph.params.len() / 2).collect::<Vec<_>>())
    };
    assert_eq!(sizes(bound(all)), Ok(vec![2, 2]));
    assert_eq!(sizes(bound(3 * 42)), Ok(vec![3, 1]));
    let error: Result<Vec<usize>, _> = sizes(bound(100));
    assert_eq!(error, Err(PlaceError::Memory { n_chunks: 2, bound_bytes: 100, least_bytes: 3 * 42 }));
}

#[test]
fn cuts_that_cannot_be_are_explained() {
    let step = layers(&[6; 3]);
    let by_name = |cuts: &[&str]| place_by_name(&step, cuts).unwrap_err().to_string();
    assert_eq!(
        by_name(&["fcs.2"]),
        "cannot cut before `fcs.2`: there is no such layer; near it are fc.2, fc.0, fc.1, loss"
    );
    assert_eq!(
        by_name(&["fc.0"]),
        "cannot cut before `fc.0`: it is where the model begins; name the first layer of the second stage"
    );
    assert_eq!(
        by_name(&["fc.2", "fc.2"]),
        "cuts before `fc.2` and `fc.2` are the same; remove one of the two"
    );
    let error = partition(&step, 9, &flops(&step), None).unwrap_err();
    assert_eq!(error, PlaceError::TooMany { wanted: 9, most: 3 });
}

#[test]
fn cuts_by_name_may_come_in_any_order() {
    let step = layers(&[6; 3]);
    assert_eq!(place_by_name(&step, &["fc.2", "fc.1"]), place_by_name(&step, &["fc.1", "fc.2"]));
}

#[test]
fn joined_chunks_follow_each_other_and_what_crosses_between_them_is_an_edge() {
    let step = layers(&[6; 4]);
    let cut = cut_before(&step, &["fc.1", "fc.2", "fc.3"]);
    let fused = |k: usize| ChunkGraph { graph: fuse(&cut.chunks[k].graph), ..cut.chunks[k].clone() };
    for chunks in [vec![0, 3], vec![1, 2], vec![0, 1, 2, 3], vec![2]] {
        let chunk_graphs: Vec<_> = chunks.iter().map(|&k| fused(k)).collect();
        let body = join(&chunk_graphs, BackwardOrder::Apart);
        let whole = join(&chunk_graphs, BackwardOrder::ByLayer);
        let kinds: Vec<_> = whole.ranges.iter().map(|(c, kind, _)| (*c, *kind)).collect();
        let backward = chunks.iter().rev().map(|c| (*c, BlockKind::InputGrad));
        let forward = chunks.iter().map(|c| (*c, BlockKind::Forward));
        assert_eq!(kinds, forward.chain(backward).collect::<Vec<_>>());
        assert_eq!(whole.graph.nodes.len(), body.graph.nodes.len());
        let kinds = [BlockKind::Forward, BlockKind::InputGrad, BlockKind::WeightGrad];
        let back: Vec<_> = chunks.iter().rev().copied().collect();
        let want: Vec<_> = kinds
            .iter()
            .flat_map(|&kind| {
                if kind == BlockKind::Forward { &chunks } else { &back }.iter().map(move |&c| (c, kind))
            })
            .collect();
        assert_eq!(body.ranges.iter().map(|(c, kind, _)| (*c, *kind)).collect::<Vec<_>>(), want);
        let mut end = 0;
        for (_, _, range) in &body.ranges {
            assert_eq!(range.start, end);
            end = range.end;
        }
        assert_eq!(end, body.graph.nodes.len());
        let inner = |c: &Crossing| chunks.contains(&c.from) && chunks.contains(&c.to);
        assert!(!body.arrives.iter().chain(&body.leaves).any(inner));
        assert_eq!(body.graph.grads.iter().flatten().count(), 2 * chunks.len());
    }
}

#[test]
fn a_tied_parameter_of_two_chunks_of_a_rank_is_one() {
    let step = step(|b| {
        let mut x = input(b)?;
        let shared = b.param("shared", [6, 6], Init::Const(1.0))?;
        for k in 0..2 {
            x = linear(b, &format!("fc.{k}"), x, 6)?;
            x = b.linear(x, shared, None)?;
        }
        Ok(x)
    });
    let chunks = cut_before(&step, &["fc.1"]).chunks;
    let fused: Vec<_> = chunks.into_iter().map(|c| ChunkGraph { graph: fuse(&c.graph), ..c }).collect();
    let body = join(&fused, BackwardOrder::Apart);
    let names: Vec<_> = body.graph.params.iter().map(|p| p.name.as_str()).collect();
    assert_eq!(names.iter().filter(|n| **n == "shared").count(), 1, "{names:?}");
    assert_eq!(body.graph.grads.iter().flatten().count(), names.len());
    assert!(body.arrives.is_empty() && body.leaves.is_empty());
}
