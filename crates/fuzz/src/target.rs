//! A reader under test, and what the search found.

use std::path::PathBuf;
use std::time::Duration;

use crate::hunt;
use crate::random::Random;

/// How many inputs an ordinary test tries: enough to notice a gross mistake.
const INPUTS: u64 = 2000;

/// The reader's answer in words: what it read, or why it refused. Numbers and quoted words do not distinguish kinds of
/// answers; other words do.
pub type ReadResult = Result<String, String>;

/// A reader and what is known about its inputs.
///
/// ```
/// use polyreme_fuzz::Target;
///
/// let corpus = vec![b"12".to_vec(), b"7".to_vec()];
/// let target = Target { name: "numbers", corpus, words: &[b"-"], mend: &|_, _| {}, memory: &|_| 1 << 16 };
/// let found = target.hunt(2000, 0, |input| {
///     let text = str::from_utf8(input).map_err(|e| e.to_string())?;
///     let number: i8 = text.parse().map_err(|e| format!("{e}"))?;
///     Ok(format!("{}", 100 / number > 9))
/// });
/// assert_eq!(found.unwrap_err().input, b"0");
/// ```
pub struct Target<'a> {
    /// Its name, also for files.
    pub name: &'a str,
    /// Valid inputs of a few KB.
    pub corpus: Vec<Vec<u8>>,
    /// Words of the format.
    pub words: &'a [&'a [u8]],
    /// Mutates an input in ways specific to its format, and repairs its checksums and lengths.
    pub mend: &'a dyn Fn(&mut Vec<u8>, &mut Random),
    /// How many bytes may be allocated for an input of this length.
    pub memory: &'a dyn Fn(usize) -> usize,
}

/// An input that breaks what must hold.
#[derive(Clone, Debug)]
pub struct BadInput {
    /// The shortest that was found.
    pub input: Vec<u8>,
    /// What is wrong.
    pub why: String,
    /// Which input it was.
    pub number: u64,
}

/// Statistics of a search.
#[derive(Clone, Debug)]
pub struct FuzzSummary {
    /// How many there were.
    pub inputs: u64,
    /// How many of them were read.
    pub read: u64,
    /// Different kinds of answers.
    pub kinds: usize,
    /// How long it took.
    pub time: Duration,
}

impl Target<'_> {
    /// Tries as many inputs as the environment asks for. Panics with a finding, or if hardly any input gets past the
    /// first checks.
    pub fn run(&self, check: impl FnMut(&[u8]) -> ReadResult) -> FuzzSummary {
        let outcome = match std::env::var_os("FUZZ_FILE").map(PathBuf::from) {
            Some(path) => {
                let input = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
                Target { corpus: vec![input], ..*self }
                    .hunt(1, 0, check)
                    .map(|summary| FuzzSummary { read: 1, ..summary })
            }
            None => {
                let n = number("FUZZ_INPUTS").unwrap_or(INPUTS);
                self.hunt(n, number("FUZZ_SEED").unwrap_or(0), check)
            }
        };
        match outcome {
            Err(BadInput { input, why, number }) => {
                let kept = crate::watch::keep(self.name, &input).map_err(|e| e.to_string());
                let text: String =
                    input.iter().take(400).flat_map(|b| b.escape_ascii()).map(char::from).collect();
                panic!("{}: input {number}: {why}\n{} bytes, in {kept:?}:\n{text}", self.name, input.len());
            }
            Ok(summary) => {
                let FuzzSummary { inputs, read, kinds, time } = &summary;
                println!("{}: {inputs} inputs, {read} read, {kinds} kinds of answers, {time:.1?}", self.name);
                assert!(read * 50 > *inputs, "{}: only {read} of {inputs} inputs were read", self.name);
                summary
            }
        }
    }

    /// Tries `n` inputs from a seed and returns the first that breaks something.
    pub fn hunt(
        &self,
        n: u64,
        seed: u64,
        mut check: impl FnMut(&[u8]) -> ReadResult,
    ) -> Result<FuzzSummary, BadInput> {
        hunt::hunt(self, n, seed, &mut check)
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name)
        .ok()
        .map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is not a number: {text}")))
}
