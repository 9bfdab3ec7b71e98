//! Any text as a job file: errors that point into it, or a job that is the same when it is written and read again.

use std::path::Path;

use polyreme_fuzz::{Random, Target};

use super::read::outlines;
use super::tests::SMALL;
use super::*;

/// What stands before a line that is no part of the file, but an override.
const SET: &str = "#set ";

/// Puts another line of the corpus, a value, or an override in.
fn mend(input: &mut Vec<u8>, random: &mut Random, lines: &[&str]) {
    let Ok(text) = str::from_utf8(input) else { return };
    let mut all: Vec<String> = text.lines().map(String::from).collect();
    for _ in 0..random.below(3) {
        let at = random.below(all.len() + 1);
        let line = random.pick(lines).to_string();
        let value = |line: &str| line.split_once('=').map(|(_, value)| value.trim().to_owned());
        match (random.below(5), all.get(at)) {
            (0, _) => all.insert(at, line),
            (1, _) => all.insert(0, format!("{SET}train.{}", line.replacen(" = ", "=", 1))),
            (2, Some(_)) => drop(all.remove(at)),
            (_, Some(old)) => {
                if let (Some((key, _)), Some(value)) = (old.split_once('='), value(&line)) {
                    all[at] = format!("{key}= {value}");
                }
            }
            _ => {}
        }
    }
    *input = all.join("\n").into_bytes();
}

#[test]
fn job_file() {
    let examples = [
        SMALL,
        include_str!("tests/full.toml"),
        include_str!("../../../../examples/digits.toml"),
        include_str!("../../../../examples/fashion.toml"),
        include_str!("../../../../examples/gpt.toml"),
        "#set train.batch=7\n[model]\nkind = \"mlp\"\nhidden = [5, 6]\n[data]\nkind = \"csv\"\npath = \"x.csv\"\nlabel = \"y\"\n",
    ];
    let lines: Vec<&str> = examples.iter().flat_map(|text| text.lines()).collect();
    let keys = outlines().into_iter().flat_map(|o| &o.rows).map(|row| row.name.as_bytes());
    let kinds = outlines().into_iter().flat_map(|o| &o.kinds);
    let quoted: Vec<String> = kinds.map(|(kind, _)| format!("{kind:?}")).collect();
    let signs: [&[u8]; 12] = [
        b"[[",
        b"]]",
        b"[a.b]",
        b"'''",
        b"\"\"\"",
        b"\\u00e4",
        b"1979-05-27",
        b"true",
        b"\"auto\"",
        b"0x7f",
        b"inf",
        b"#set ",
    ];
    let words: Vec<&[u8]> = keys.chain(quoted.iter().map(|kind| kind.as_bytes())).chain(signs).collect();
    let target = Target {
        name: "job file",
        corpus: examples.map(|text| text.as_bytes().to_vec()).into(),
        words: &words,
        mend: &|input, random| mend(input, random, &lines),
        // Errors show lines of the text, one for each that is wrong.
        memory: &|len| (1 << 20) + 2048 * len,
    };
    target.run(|input| {
        let text = str::from_utf8(input).map_err(|_| "no text")?;
        let sets: Vec<String> =
            text.lines().filter_map(|line| line.strip_prefix(SET)).map(String::from).collect();
        let job = Job::from_text(text, "job.toml", Path::new("/jobs"), &sets).map_err(|errors| {
            assert!(!errors.errors.is_empty());
            let shown = errors.to_string();
            assert!(!shown.is_empty());
            // The first of them tells kinds apart; all of them would be as many as there are inputs.
            errors.errors[0].to_string()
        })?;
        let written = job.to_toml();
        let again = Job::from_text(&written, "elsewhere.toml", Path::new("/elsewhere"), &[]);
        assert_eq!(again.as_ref(), Ok(&job), "\n{written}");
        Ok(format!("{:?} {:?}", job.model.model, job.data.source).chars().take(40).collect())
    });
}
