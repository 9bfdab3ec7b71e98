//! Vectors of sentences by a BERT of Hugging Face's: the mean of its last hidden states over the tokens of each.
//!
//! `cargo run --release -p polyreme-train --example embed -- FOLDER SENTENCES.txt` reads a sentence from each line and prints a JSON array
//! for each. FOLDER has `config.json`, `tokenizer.json` and `model.safetensors`. Sentences of a batch are filled up to the longest.

use std::error::Error;
use std::fs;
use std::path::Path;

use polyreme_data::TextTokenizer;
use polyreme_exec::{Engine, Options};
use polyreme_graph::{Builder, DType, Program};
use polyreme_nn::Model;
use polyreme_nn::model::{Bert, Pooling};
use polyreme_train::install::install_file;
use polyreme_train::job::ModelSpec;
use polyreme_train::starting::StartingWeights;
use polyreme_train::whole::WholeModel;

/// Sentences that are computed together.
const BATCH: usize = 20;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [folder, sentences] = args.as_slice() else { return Err("give FOLDER and SENTENCES.txt".into()) };
    let folder = Path::new(folder);
    let tokenizer = TextTokenizer::from_file(&folder.join("tokenizer.json"))?;
    let mut spec = ModelSpec::of_folder(folder)?;
    let Model::Bert(read) = &mut spec.model else { return Err("the folder is not that of a BERT".into()) };
    let padding = tokenizer.padding().ok_or("the tokenizer has no token for padding")?;
    (read.pooling, read.padding) = (Pooling::Mean, Some(padding));
    let bert = read.clone();
    let text = fs::read_to_string(sentences)?;
    let ids = |line: &str| tokenizer.with_specials(&[line.as_bytes()], bert.context).map(|tokens| tokens.ids);
    let rows = text.lines().map(ids).collect::<Result<Vec<_>, _>>()?;
    for batch in rows.chunks(BATCH) {
        let means = means(&bert, &spec, batch, padding as i32)?;
        means.chunks(bert.width).for_each(|mean| println!("{mean:?}"));
    }
    Ok(())
}

/// The vectors of some sentences, one after the other.
fn means(bert: &Bert, spec: &ModelSpec, rows: &[Vec<i32>], padding: i32) -> Result<Vec<f32>, Box<dyn Error>> {
    let time = rows.iter().map(Vec::len).max().unwrap_or(1);
    let mut b = Builder::new();
    let ids = b.input("ids", [rows.len(), time], DType::I32)?;
    let means = bert.embeddings(&mut b, ids)?;
    let graph = b.finish(&[("means", means)]);
    let mut engine = Engine::new(Program::forward(&graph), Options::threads(1))?;
    let start = StartingWeights::of(spec).ok_or("the folder has no weights")?;
    install_file(&mut engine, &WholeModel::of(&graph), start)?;
    let to = engine.input_i32("ids")?;
    to.fill(padding);
    to.chunks_mut(time).zip(rows).for_each(|(to, row)| to[..row.len()].copy_from_slice(row));
    engine.run()?;
    Ok(engine.output("means")?.to_vec())
}
