//! Fusion: chains of element-wise ops become one pass over memory, and join the product before them where they can.
//!
//! Two rewrites in one walk. First, element-wise nodes of one shape are gathered into clusters. A cluster runs where
//! its last member ran, so a node may join only if nothing outside reads the cluster's values before that. Second, a
//! cluster whose latest operand is the first output of an op that takes an epilogue is moved up to that op and works on
//! each block of its result while the block is in cache.
//!
//! Every element-wise node comes out as [`Op::Fused`] or inside an [`Op::Epilogue`]: executors see no others.

mod norm_relu;

pub use norm_relu::join_norm_relu;
pub(crate) use norm_relu::join_norm_relu_if;

use std::collections::HashMap;

use polyreme_kernels::elementwise::{Binary, Expr, Instr, Reg, Unary};

use crate::graph::{Graph, Rebuild, ValueId};
use crate::op::{Epilogue, Op};
use crate::precision::is_half;
use crate::shape::DType;

/// The graph with element-wise chains fused.
pub fn fuse(graph: &Graph) -> Graph {
    let graph = &join_norm_relu(graph);
    let clusters = Clusters::gather(graph);
    let hosts = clusters.hosts(graph);
    let mut to = Rebuild::new(graph);
    let mut n_forward = 0;
    for i in 0..graph.nodes.len() {
        if let Some(&c) = hosts.get(&i) {
            clusters.emit_epilogue(graph, &mut to, c, i);
        } else if let Some(c) = clusters.of_node[i] {
            let hosted = hosts.values().any(|&h| h == c);
            if !hosted && clusters.list[c].members.last() == Some(&i) {
                clusters.emit_fused(graph, &mut to, c);
            }
        } else {
            to.copy(graph, i);
        }
        if i + 1 == graph.n_forward {
            n_forward = to.graph.nodes.len();
        }
    }
    to.graph.n_forward = n_forward;
    let fused = to.finish(graph).without_dead();
    fused.verify();
    fused
}

/// Appends to a fused graph the sum of two values of one shape.
pub fn fused_sum(graph: &mut Graph, a: ValueId, b: ValueId) -> ValueId {
    let sum = Expr::new(2, vec![Instr::Binary(Binary::Add, 0, 1)], vec![2]).expect("a small expression");
    let (value, layer) = (graph.value(a).clone(), graph.producer(b).layer.clone());
    graph.push_shaped(Op::Fused(sum), &[a, b], &layer, vec![(value.shape, value.dtype)])[0]
}

#[derive(Default)]
struct Cluster {
    /// Nodes, ascending.
    members: Vec<usize>,
    /// Values read from outside, in order of first use; constants are not among them.
    inputs: Vec<ValueId>,
    /// Members' values that are read outside.
    outputs: Vec<ValueId>,
}

struct Clusters {
    list: Vec<Cluster>,
    of_node: Vec<Option<usize>>,
    users: Vec<Vec<usize>>,
    is_result: Vec<bool>,
}

impl Clusters {
    fn gather(graph: &Graph) -> Clusters {
        let mut users = vec![Vec::new(); graph.values.len()];
        for (i, node) in graph.nodes.iter().enumerate() {
            for v in &node.inputs {
                users[v.idx()].push(i);
            }
        }
        let mut is_result = vec![false; graph.values.len()];
        for v in graph.results() {
            is_result[v.idx()] = true;
        }
        let of_node = vec![None; graph.nodes.len()];
        let mut clusters = Clusters { list: Vec::new(), of_node, users, is_result };
        for i in 0..graph.nodes.len() {
            let floats = |v: &ValueId| graph.value(*v).dtype.is_float();
            let node = &graph.nodes[i];
            if node.op.is_elementwise() && node.inputs.iter().chain(&node.outputs).all(floats) {
                clusters.add(graph, i);
            }
        }
        for c in 0..clusters.list.len() {
            let members = std::mem::take(&mut clusters.list[c].members);
            clusters.list[c] = clusters.describe(graph, members);
        }
        clusters
    }

    /// Puts node `i` into the clusters of its operands where that is allowed, or into one of its own.
    fn add(&mut self, graph: &Graph, i: usize) {
        let mut joined = vec![i];
        let mut merged: Vec<usize> = Vec::new();
        for &v in &graph.nodes[i].inputs {
            let from = graph.value(v).producer.idx();
            let Some(c) = self.of_node[from] else { continue };
            let same_shape = graph.shape(v) == graph.shape(graph.nodes[i].outputs[0]);
            let same_pass = (from < graph.n_forward) == (i < graph.n_forward);
            if merged.contains(&c) || !same_shape || !same_pass {
                continue;
            }
            let mut trial = [&self.list[c].members[..], &joined].concat();
            trial.sort_unstable();
            if self.may_wait(graph, &trial, i) && self.fits(graph, &trial) {
                joined = trial;
                merged.push(c);
            }
        }
        let c = merged.first().copied().unwrap_or(self.list.len());
        for &other in merged.iter().skip(1) {
            self.list[other].members.clear();
        }
        for &m in &joined {
            self.of_node[m] = Some(c);
        }
        let cluster = Cluster { members: joined, ..Cluster::default() };
        if c == self.list.len() { self.list.push(cluster) } else { self.list[c] = cluster }
    }

    /// Whether the members' values can all be computed as late as node `at`.
    fn may_wait(&self, graph: &Graph, members: &[usize], at: usize) -> bool {
        members
            .iter()
            .flat_map(|&m| &graph.nodes[m].outputs)
            .all(|v| self.users[v.idx()].iter().all(|u| *u >= at || members.binary_search(u).is_ok()))
    }

    fn fits(&self, graph: &Graph, members: &[usize]) -> bool {
        let cluster = self.describe(graph, members.to_vec());
        let instrs = members.len() + consts(graph, members) + roundings(graph, members);
        // One register each, of at most 256; one input stays free for the result of a host.
        cluster.inputs.len() < Expr::INPUTS_MAX
            && instrs <= Expr::INSTRS_MAX
            && cluster.outputs.len() <= Expr::OUTPUTS_MAX
    }

    fn describe(&self, graph: &Graph, members: Vec<usize>) -> Cluster {
        let inside = |n: usize| members.binary_search(&n).is_ok();
        let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
        for &m in &members {
            for &v in &graph.nodes[m].inputs {
                let from = graph.value(v).producer.idx();
                let constant = matches!(graph.nodes[from].op, Op::Const(_));
                if !inside(from) && !constant && !inputs.contains(&v) {
                    inputs.push(v);
                }
            }
            for &v in &graph.nodes[m].outputs {
                if self.is_result[v.idx()] || self.users[v.idx()].iter().any(|&u| !inside(u)) {
                    outputs.push(v);
                }
            }
        }
        Cluster { members, inputs, outputs }
    }

    /// Decides which clusters become epilogues: `host node → cluster`.
    fn hosts(&self, graph: &Graph) -> HashMap<usize, usize> {
        let mut hosts = HashMap::new();
        // Where each cluster runs: at its last member, until a host takes it.
        let mut runs_at: Vec<_> = self.list.iter().map(|c| c.members.last().copied().unwrap_or(0)).collect();
        for (c, cluster) in self.list.iter().enumerate() {
            let Some(&last) = cluster.members.last() else { continue };
            let Some(&latest) = cluster.inputs.iter().max_by_key(|v| graph.value(**v).producer) else {
                continue;
            };
            let host = graph.value(latest).producer.idx();
            let node = &graph.nodes[host];
            let fits = node.op.takes_epilogue()
                && node.outputs[0] == latest
                && !cluster.outputs.is_empty()
                && graph.shape(latest) == graph.shape(cluster.outputs[0])
                && (host < graph.n_forward) == (last < graph.n_forward)
                && !hosts.contains_key(&host)
                && cluster.inputs.iter().all(|v| {
                    let from = graph.value(*v).producer.idx();
                    *v == latest || self.of_node[from].map_or(from, |k| runs_at[k]) < host
                });
            if fits {
                hosts.insert(host, c);
                runs_at[c] = host;
            }
        }
        hosts
    }

    fn emit_fused(&self, graph: &Graph, to: &mut Rebuild, c: usize) {
        let cluster = &self.list[c];
        if cluster.outputs.is_empty() {
            return;
        }
        let expr = express(graph, cluster, None);
        let inputs: Vec<_> = cluster.inputs.iter().map(|&v| to.get(v)).collect();
        let layer = &graph.nodes[*cluster.members.last().expect("not empty")].layer;
        to.replace(graph, &cluster.outputs, Op::Fused(expr), &inputs, layer);
    }

    fn emit_epilogue(&self, graph: &Graph, to: &mut Rebuild, c: usize, host: usize) {
        let (cluster, node) = (&self.list[c], &graph.nodes[host]);
        let base = node.outputs[0];
        let outside = |u: &usize| self.of_node[*u] != Some(c);
        let keeps_base = self.is_result[base.idx()] || self.users[base.idx()].iter().any(outside);
        let mut outputs = cluster.outputs.clone();
        let mut values = vec![if keeps_base { base } else { outputs.remove(0) }];
        values.extend_from_slice(&node.outputs[1..]);
        values.extend(outputs);
        let mut inputs: Vec<_> = node.inputs.iter().map(|&v| to.get(v)).collect();
        inputs.extend(cluster.inputs.iter().filter(|v| **v != base).map(|&v| to.get(v)));
        let expr = express(graph, cluster, Some(base));
        let dtypes = cluster.outputs.iter().map(|&v| graph.value(v).dtype).collect();
        let op =
            Epilogue { base: node.op.clone(), n_base_inputs: node.inputs.len(), expr, dtypes, keeps_base };
        to.replace(graph, &values, Op::Epilogue(Box::new(op)), &inputs, &node.layer);
    }
}

fn consts(graph: &Graph, members: &[usize]) -> usize {
    let inputs = members.iter().flat_map(|&m| &graph.nodes[m].inputs);
    inputs.filter(|v| matches!(graph.producer(**v).op, Op::Const(_))).count()
}

/// The most roundings that the members' values need inside their pass: one each for those in half, and one for the result of
/// a host.
fn roundings(graph: &Graph, members: &[usize]) -> usize {
    1 + members.iter().filter(|&&m| is_half(graph.value(graph.nodes[m].outputs[0]).dtype)).count()
}

/// The cluster as an expression; `first` is the operand that must be its input 0. It is evaluated in f32, and values in half
/// are rounded, so that what is fused makes no difference. Loads widen, and stores round.
fn express(graph: &Graph, cluster: &Cluster, first: Option<ValueId>) -> Expr {
    let mut regs: HashMap<ValueId, Reg> = HashMap::new();
    let order = first.into_iter().chain(cluster.inputs.iter().copied().filter(|v| Some(*v) != first));
    for (r, v) in order.enumerate() {
        regs.insert(v, r as Reg);
    }
    let n_inputs = cluster.inputs.len();
    let mut instrs: Vec<Instr> = Vec::new();
    let round = |instrs: &mut Vec<Instr>, reg: Reg, dtype: DType| {
        let op = match dtype {
            DType::Bf16 => Unary::RoundBf16,
            DType::F16 => Unary::RoundF16,
            _ => return reg,
        };
        instrs.push(Instr::Unary(op, reg));
        (n_inputs + instrs.len() - 1) as Reg
    };
    // What a host lends is its sums, before they are rounded.
    if let Some(base) = first {
        let reg = round(&mut instrs, 0, graph.value(base).dtype);
        regs.insert(base, reg);
    }
    for &m in &cluster.members {
        let node = &graph.nodes[m];
        let mut args = Vec::new();
        for &v in &node.inputs {
            let reg = *regs.entry(v).or_insert_with(|| {
                let Op::Const(value) = graph.producer(v).op else {
                    unreachable!("operands are inputs or members")
                };
                instrs.push(Instr::Const(value));
                (n_inputs + instrs.len() - 1) as Reg
            });
            args.push(reg);
        }
        let instr = match &node.op {
            Op::Unary(op) => Instr::Unary(*op, args[0]),
            Op::Binary(op) => Instr::Binary(*op, args[0], args[1]),
            Op::Select => Instr::Select(args[0], args[1], args[2]),
            Op::Expand | Op::Cast(DType::F32) => {
                regs.insert(node.outputs[0], args[0]);
                continue;
            }
            &Op::Cast(to) => {
                let read = cluster.members.iter().any(|&m| graph.nodes[m].inputs.contains(&node.outputs[0]));
                // A store rounds by itself.
                let reg = if read { round(&mut instrs, args[0], to) } else { args[0] };
                regs.insert(node.outputs[0], reg);
                continue;
            }
            other => unreachable!("{} is not element-wise", other.name()),
        };
        instrs.push(instr);
        let reg = (n_inputs + instrs.len() - 1) as Reg;
        let reg = round(&mut instrs, reg, graph.value(node.outputs[0]).dtype);
        regs.insert(node.outputs[0], reg);
    }
    let outputs = cluster.outputs.iter().map(|v| regs[v]).collect();
    Expr::new(n_inputs, instrs, outputs).expect("`fits` keeps clusters within the limits")
}
