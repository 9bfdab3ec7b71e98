//! Makes an input that breaks something shorter and plainer, as long as it still does.

use std::time::{Duration, Instant};

/// How long to try.
const TIME: Duration = Duration::from_secs(5);

/// The shortest input that was found, and what is wrong with it. `mend` repairs checksums.
pub(crate) fn shrink(
    mut input: Vec<u8>,
    mut why: String,
    mend: impl Fn(&mut Vec<u8>),
    mut wrong: impl FnMut(&[u8]) -> Option<String>,
) -> (Vec<u8>, String) {
    let start = Instant::now();
    let mut part = input.len().div_ceil(2).max(1);
    loop {
        let (mut at, before) = (0, input.len());
        while at < input.len() && start.elapsed() < TIME {
            let end = (at + part).min(input.len());
            let shorter = [&input[..at], &input[end..]].concat();
            let mut mended = shorter.clone();
            mend(&mut mended);
            let found = [shorter, mended].into_iter().find_map(|shorter| {
                let said = if shorter.len() < input.len() { wrong(&shorter) } else { None };
                Some((shorter, said?))
            });
            match found {
                Some(found) => (input, why) = found,
                None => at = end,
            }
        }
        if start.elapsed() >= TIME || part == 1 && input.len() == before {
            return (input, why);
        }
        part = part.div_ceil(2).max(1);
    }
}
