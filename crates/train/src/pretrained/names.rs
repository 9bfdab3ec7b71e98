//! Names and layouts of tensors in files of a family, both ways.
//!
//! One table per family says it: a row is a tensor of ours, what it is called there, and whether it lies transposed there. A tensor
//! of ours may be several of theirs, one below the other. The tables are read from right to left when a file is read, and from
//! left to right when one is written, so both ways agree by construction.

use std::collections::HashMap;
use std::ops::Range;

use polyreme_graph::LowRank;

use super::Family;
use crate::starting::{filled_in, stars};
use crate::weights::{Weight, WeightsFile};

/// A tensor, or all tensors of this form: `*` stands for the same in all names of a row.
struct NameRow {
    ours: &'static str,
    /// What it is made of there, one below the other.
    theirs: &'static [&'static str],
    /// Whether rows are columns there.
    turned: bool,
}

const fn same(ours: &'static str, theirs: &'static [&'static str]) -> NameRow {
    NameRow { ours, theirs, turned: false }
}

/// `transformers` calls GPT-2's linear layers `Conv1D`: their weights are `[inputs, outputs]`.
const fn turned(ours: &'static str, theirs: &'static [&'static str]) -> NameRow {
    NameRow { ours, theirs, turned: true }
}

const GPT2: &[NameRow] = &[
    same("tok.weight", &["transformer.wte.weight"]),
    same("pos.weight", &["transformer.wpe.weight"]),
    same("blocks.*.ln1.*", &["transformer.h.*.ln_1.*"]),
    turned("blocks.*.qkv.weight", &["transformer.h.*.attn.c_attn.weight"]),
    same("blocks.*.qkv.bias", &["transformer.h.*.attn.c_attn.bias"]),
    turned("blocks.*.proj.weight", &["transformer.h.*.attn.c_proj.weight"]),
    same("blocks.*.proj.bias", &["transformer.h.*.attn.c_proj.bias"]),
    same("blocks.*.ln2.*", &["transformer.h.*.ln_2.*"]),
    turned("blocks.*.up.weight", &["transformer.h.*.mlp.c_fc.weight"]),
    same("blocks.*.up.bias", &["transformer.h.*.mlp.c_fc.bias"]),
    turned("blocks.*.down.weight", &["transformer.h.*.mlp.c_proj.weight"]),
    same("blocks.*.down.bias", &["transformer.h.*.mlp.c_proj.bias"]),
    same("ln.*", &["transformer.ln_f.*"]),
    same("head.weight", &["lm_head.weight"]),
];

/// Attention comes before what has `output` in its name alone: a star stands for any characters.
const BERT: &[NameRow] = &[
    same("tok.weight", &["bert.embeddings.word_embeddings.weight"]),
    same("pos.weight", &["bert.embeddings.position_embeddings.weight"]),
    same("type.weight", &["bert.embeddings.token_type_embeddings.weight"]),
    same("ln.*", &["bert.embeddings.LayerNorm.*"]),
    same(
        "blocks.*.qkv.weight",
        &[
            "bert.encoder.layer.*.attention.self.query.weight",
            "bert.encoder.layer.*.attention.self.key.weight",
            "bert.encoder.layer.*.attention.self.value.weight",
        ],
    ),
    same(
        "blocks.*.qkv.bias",
        &[
            "bert.encoder.layer.*.attention.self.query.bias",
            "bert.encoder.layer.*.attention.self.key.bias",
            "bert.encoder.layer.*.attention.self.value.bias",
        ],
    ),
    same("blocks.*.proj.*", &["bert.encoder.layer.*.attention.output.dense.*"]),
    same("blocks.*.ln1.*", &["bert.encoder.layer.*.attention.output.LayerNorm.*"]),
    same("blocks.*.up.*", &["bert.encoder.layer.*.intermediate.dense.*"]),
    same("blocks.*.down.*", &["bert.encoder.layer.*.output.dense.*"]),
    same("blocks.*.ln2.*", &["bert.encoder.layer.*.output.LayerNorm.*"]),
    same("pooler.*", &["bert.pooler.dense.*"]),
    same("head.*", &["classifier.*"]),
];

impl Family {
    fn rows(self) -> &'static [NameRow] {
        match self {
            Family::Gpt2 => GPT2,
            Family::Bert => BERT,
        }
    }

    /// The layer that holds everything but the head, whose name files of the bare model leave out; and the heads.
    fn trunk(self) -> (&'static str, &'static [&'static str]) {
        match self {
            Family::Gpt2 => ("transformer.", &["lm_head."]),
            Family::Bert => ("bert.", &["classifier.", "cls."]),
        }
    }

    /// Tensors that are not taken: masks and positions that older versions stored, and heads that BERT was pretrained with.
    fn left_out(self) -> &'static [&'static str] {
        match self {
            Family::Gpt2 => &["transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"],
            Family::Bert => &["bert.embeddings.position_ids", "cls.*"],
        }
    }

    /// What our head is, if it is another tensor at the same time.
    fn tied(self) -> Option<(&'static str, &'static str)> {
        match self {
            Family::Gpt2 => Some(("head.weight", "tok.weight")),
            Family::Bert => None,
        }
    }
}

/// Gives the tensors of a file our names and layouts, if they have the family's; a file that has ours stays as it is. `tied` says
/// whether the model's head is its table of tokens. An error says what does not fit.
pub(crate) fn to_ours(family: Family, tied: bool, file: &mut WeightsFile) -> Result<(), String> {
    if file.weights.iter().all(|weight| found(family, &full(family, &weight.name)).is_none()) {
        return Ok(());
    }
    // By our name: the row, and its parts as far as they were found.
    let mut parts: Vec<(String, &NameRow, Vec<Option<Weight>>)> = Vec::new();
    let mut places: HashMap<String, usize> = HashMap::new();
    let mut unknown = Vec::new();
    let is_left_out = |name: &str| {
        let name = full(family, name);
        family.left_out().iter().any(|pattern| stars(pattern, &name).is_some())
    };
    file.integers.retain(|tensor| !is_left_out(&tensor.name));
    for weight in std::mem::take(&mut file.weights) {
        let name = full(family, &weight.name);
        if is_left_out(&name) {
            continue;
        }
        // Factors have our names wherever they are.
        if LowRank::is_factor(&name) {
            file.weights.push(weight);
            continue;
        }
        let Some((row, part, ours)) = found(family, &name) else {
            unknown.push(weight.name);
            continue;
        };
        let place = *places.entry(ours.clone()).or_insert_with(|| {
            parts.push((ours.clone(), row, row.theirs.iter().map(|_| None).collect()));
            parts.len() - 1
        });
        if parts[place].2[part].replace(weight).is_some() {
            return Err(format!("two tensors of the file are {name}"));
        }
    }
    if !unknown.is_empty() {
        let some: Vec<&str> = unknown.iter().take(3).map(String::as_str).collect();
        return Err(format!(
            "{} tensors are not those of a {} ({}); leave them out with `model.map`: {{ from = {:?}, to = \"\" }}",
            unknown.len(),
            family.name(),
            some.join(", "),
            unknown[0]
        ));
    }
    let joined = parts.into_iter().map(|(ours, row, parts)| joined(ours, row, parts));
    file.weights.extend(joined.collect::<Result<Vec<_>, _>>()?);
    if let (true, Some((head, table))) = (tied, family.tied()) {
        let same = |name: &str| file.weights.iter().find(|weight| weight.name == name);
        if let (Some(a), Some(b)) = (same(head), same(table))
            && (&a.dims, &a.data) != (&b.dims, &b.data)
        {
            return Err(format!(
                "{} differs from {}, and by `tie_word_embeddings` in config.json they are one; set that to false if the \
                 head is not tied",
                theirs(family, head),
                theirs(family, table)
            ));
        }
        file.weights.retain(|weight| weight.name != head);
    }
    Ok(())
}

/// A tensor as it is written.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct OutwardTensor {
    /// What it is called there.
    pub(crate) name: String,
    /// Its dims there.
    pub(crate) dims: Vec<usize>,
    /// Which of our elements it is.
    pub(crate) range: Range<usize>,
    /// Whether it is transposed.
    pub(crate) turned: bool,
}

/// What a tensor of ours is in a file of the family; itself if the family has no name for it.
pub(crate) fn to_theirs(family: Family, name: &str, dims: &[usize]) -> Vec<OutwardTensor> {
    let numel: usize = dims.iter().product();
    let row = family.rows().iter().find_map(|row| Some((row, stars(row.ours, name)?)));
    let Some((row, stood_for)) = row else {
        return vec![OutwardTensor { name: name.into(), dims: dims.into(), range: 0..numel, turned: false }];
    };
    let n = row.theirs.len();
    let part = |(k, theirs): (usize, &&str)| {
        let mut dims = dims.to_vec();
        if let Some(first) = dims.first_mut() {
            *first /= n;
        }
        if row.turned {
            dims.reverse();
        }
        let range = k * (numel / n)..(k + 1) * (numel / n);
        OutwardTensor { name: filled_in(theirs, &stood_for), dims, range, turned: row.turned }
    };
    row.theirs.iter().enumerate().map(part).collect()
}

/// `[rows, columns]` with rows and columns exchanged.
pub(crate) fn transposed(numbers: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    (0..columns).flat_map(|c| (0..rows).map(move |r| numbers[r * columns + c])).collect()
}

/// A name with the trunk's, which files of a bare model leave out.
fn full(family: Family, name: &str) -> String {
    let (trunk, heads) = family.trunk();
    let has = name.starts_with(trunk) || heads.iter().any(|head| name.starts_with(head));
    let name = if has { name.into() } else { format!("{trunk}{name}") };
    // What layer norms were called in files that came from TensorFlow.
    match (family, name.strip_suffix("LayerNorm.gamma"), name.strip_suffix("LayerNorm.beta")) {
        (Family::Bert, Some(before), _) => format!("{before}LayerNorm.weight"),
        (Family::Bert, _, Some(before)) => format!("{before}LayerNorm.bias"),
        (Family::Bert | Family::Gpt2, _, _) => name,
    }
}

/// The row of a name, which of its parts it is, and our name.
fn found(family: Family, theirs: &str) -> Option<(&'static NameRow, usize, String)> {
    family.rows().iter().find_map(|row| {
        let part = |(k, pattern): (usize, &&str)| Some((k, stars(pattern, theirs)?));
        let (part, stood_for) = row.theirs.iter().enumerate().find_map(part)?;
        Some((row, part, filled_in(row.ours, &stood_for)))
    })
}

/// The first name of a tensor of ours.
fn theirs(family: Family, ours: &str) -> String {
    to_theirs(family, ours, &[]).swap_remove(0).name
}

/// A tensor of ours out of its parts.
fn joined(ours: String, row: &NameRow, parts: Vec<Option<Weight>>) -> Result<Weight, String> {
    let mut all: Option<Weight> = None;
    for (part, theirs) in parts.into_iter().zip(row.theirs) {
        let Some(mut part) = part else { return Err(format!("there is no {theirs} for {ours}")) };
        if let (true, &[rows, columns]) = (row.turned, part.dims.as_slice()) {
            part.data = transposed(&part.data, rows, columns);
            part.dims.reverse();
        }
        match &mut all {
            None => all = Some(Weight { name: ours.clone(), ..part }),
            Some(all) if all.dims.get(1..) == part.dims.get(1..) && !all.dims.is_empty() => {
                all.dims[0] += part.dims[0];
                all.data.append(&mut part.data);
            }
            Some(_) => return Err(format!("{} does not fit the other parts of {ours}", part.name)),
        }
    }
    all.ok_or_else(|| format!("{ours} is made of nothing"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use polyreme_dtype::DType;

    use super::*;

    fn weight(name: &str, dims: &[usize]) -> Weight {
        let numel: usize = dims.iter().product();
        let data = (0..numel).map(|i| i as f32 + name.len() as f32).collect();
        Weight { name: name.into(), dims: dims.into(), dtype: DType::F32, data }
    }

    fn read(tied: bool, weights: Vec<Weight>) -> Result<Vec<Weight>, String> {
        let mut file = WeightsFile { weights, integers: Vec::new(), about: BTreeMap::new() };
        to_ours(Family::Gpt2, tied, &mut file).map(|()| file.weights)
    }

    /// Every tensor of ours, written and read again, is itself.
    #[test]
    fn both_ways_agree() {
        for family in Family::ALL {
            for row in family.rows() {
                let ours = weight(&row.ours.replace('*', "7"), &[6, 4]);
                let parts = to_theirs(family, &ours.name, &ours.dims).into_iter().map(|part| {
                    let data = ours.data[part.range].to_vec();
                    let data = if part.turned { transposed(&data, part.dims[1], part.dims[0]) } else { data };
                    Weight { name: part.name, dims: part.dims, dtype: DType::F32, data }
                });
                let mut file =
                    WeightsFile { weights: parts.collect(), integers: Vec::new(), about: BTreeMap::new() };
                to_ours(family, false, &mut file).unwrap();
                assert_eq!(file.weights, [ours]);
            }
        }
    }

    #[test]
    fn names_are_found_with_and_without_the_trunk() {
        for trunk in ["", "transformer."] {
            let named = |name: &str| weight(&format!("{trunk}{name}"), &[2, 3]);
            let got = read(true, vec![named("h.11.attn.c_attn.weight"), named("h.0.attn.bias")]).unwrap();
            assert_eq!(
                (got.len(), got[0].name.as_str(), &got[0].dims),
                (1, "blocks.11.qkv.weight", &vec![3, 2])
            );
        }
        // BERT of a bare model and with a head, in TensorFlow's names, with what is not taken.
        for trunk in ["", "bert."] {
            let named = |name: &str| weight(&format!("{trunk}{name}"), &[2, 2]);
            let self_attention = |part: &str| named(&format!("encoder.layer.3.attention.self.{part}.weight"));
            let weights = vec![
                named("encoder.layer.3.output.LayerNorm.gamma"),
                self_attention("value"),
                named("encoder.layer.3.attention.output.dense.weight"),
                self_attention("query"),
                self_attention("key"),
                weight("cls.predictions.bias", &[4]),
                weight("classifier.weight", &[2, 2]),
            ];
            let mut file = WeightsFile { weights, integers: Vec::new(), about: BTreeMap::new() };
            to_ours(Family::Bert, false, &mut file).unwrap();
            let mut names: Vec<&str> = file.weights.iter().map(|w| w.name.as_str()).collect();
            names.sort_unstable();
            assert_eq!(
                names,
                ["blocks.3.ln2.weight", "blocks.3.proj.weight", "blocks.3.qkv.weight", "head.weight"]
            );
            let qkv = file.weights.iter().find(|w| w.name == "blocks.3.qkv.weight").unwrap();
            // Each begins with the length of its name: query, key, value.
            let first = |k: usize| qkv.data[4 * k] - trunk.len() as f32;
            assert_eq!(
                (qkv.dims.as_slice(), first(0) - first(1), first(2) - first(1)),
                (&[6, 2][..], 2.0, 2.0)
            );
        }
        // Our own names stay.
        let ours = vec![weight("blocks.0.qkv.weight", &[3, 2])];
        assert_eq!(read(true, ours.clone()).unwrap(), ours);
    }

    #[test]
    fn what_does_not_fit_is_said() {
        let check = |tied, weights: Vec<Weight>, want: &str| {
            let said = read(tied, weights).unwrap_err();
            assert!(said.contains(want), "{said}");
        };
        let table = || weight("wte.weight", &[4, 2]);
        check(true, vec![table(), weight("lm_head.weight", &[4, 2])], "tie_word_embeddings");
        check(true, vec![table(), weight("score.weight", &[4, 2])], "score.weight");
        check(true, vec![table(), weight("transformer.wte.weight", &[4, 2])], "two tensors");
        let same = Weight { name: "lm_head.weight".into(), ..table() };
        assert_eq!(read(true, vec![table(), same.clone()]).unwrap().len(), 1);
        assert_eq!(read(false, vec![table(), same]).unwrap().len(), 2);
    }
}
