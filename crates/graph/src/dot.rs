//! A graph in the DOT language, for Graphviz: one box per node, coloured by pass, with layers as clusters.

use std::fmt::Write;

use crate::graph::Graph;
use crate::op::Op;

/// The graph as DOT text. Reshapes and constants are kept; the text is meant for forward graphs of a screen or two.
pub fn dot(graph: &Graph) -> String {
    let mut s =
        String::from("digraph model {\n  rankdir = TB;\n  node [shape = box, fontname = \"sans-serif\"];\n");
    let mut put = |line: String| s.write_str(&line).expect("writing to a string cannot fail");
    for (i, node) in graph.nodes.iter().enumerate() {
        let result = &graph.value(node.outputs[0]);
        let name = match node.op {
            Op::Input(k) => graph.inputs[k].name.clone(),
            Op::Param(k) => graph.params[k].name.clone(),
            Op::State(k) => graph.states[k].name.clone(),
            _ => node.op.name().to_string(),
        };
        let style = match node.op {
            Op::Input(_) => "shape = ellipse, style = filled, fillcolor = \"#cfe8ff\"",
            Op::Param(_) | Op::State(_) => "shape = note, style = filled, fillcolor = \"#fff3c4\"",
            _ if i >= graph.n_forward => "style = filled, fillcolor = \"#ffe0e0\"",
            _ => "style = filled, fillcolor = \"#ffffff\"",
        };
        let label = format!("{name}\\n{}{}", result.dtype, result.shape);
        put(format!(
            "  n{i} [label = \"{}\", tooltip = \"{}\", {style}];\n",
            escape(&label),
            escape(&node.layer)
        ));
    }
    let mut producer = vec![0; graph.values.len()];
    for (i, node) in graph.nodes.iter().enumerate() {
        for v in &node.outputs {
            producer[v.idx()] = i;
        }
        for v in &node.inputs {
            put(format!("  n{} -> n{i};\n", producer[v.idx()]));
        }
    }
    for (name, v) in &graph.outputs {
        put(format!("  \"{0}\" [shape = ellipse, style = filled, fillcolor = \"#d8f5d0\"];\n", escape(name)));
        put(format!("  n{} -> \"{}\";\n", producer[v.idx()], escape(name)));
    }
    s.push_str("}\n");
    s
}

/// A string inside quotes; `\n` stays the line break that it is in DOT.
fn escape(text: &str) -> String {
    text.replace('"', "\\\"")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builder::Builder;
    use crate::graph::Init;
    use crate::shape::DType;

    #[test]
    fn a_small_graph() {
        let mut b = Builder::new();
        let x = b.input("x", [2, 3], DType::F32).unwrap();
        let y = b.layer("fc", |b| {
            let w = b.param("weight", [4, 3], Init::Const(0.0)).unwrap();
            b.linear(x, w, None).unwrap()
        });
        let text = dot(&b.finish(&[("y", y)]));
        for line in [
            "digraph model {",
            "  n0 [label = \"x\\nf32[2, 3]\", tooltip = \"x\"",
            "  n1 [label = \"fc.weight\\nf32[4, 3]\", tooltip = \"fc\"",
            "  n2 [label = \"matmul\\nf32[2, 4]\", tooltip = \"fc\"",
            "  n0 -> n2;",
            "  n1 -> n2;",
            "  n2 -> \"y\";",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}
