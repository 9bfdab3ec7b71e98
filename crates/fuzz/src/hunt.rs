//! The loop: make an input, have it read, judge the outcome.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::memory;
use crate::mutate::Mutator;
use crate::random::Random;
use crate::shrink::shrink;
use crate::target::{BadInput, FuzzSummary, ReadResult, Target};
use crate::watch::InputWatch;

/// An input of a few KB that takes longer than this on a core is a finding.
const SLOW: Duration = Duration::from_secs(1);
/// Inputs that were answered in a new way and are changed further.
const POOL_MAX: usize = 4000;

/// Inputs between two progress lines of a long run.
const PROGRESS: u64 = 100_000;

pub(crate) type CheckFn<'a> = dyn FnMut(&[u8]) -> ReadResult + 'a;

pub(crate) fn hunt(
    target: &Target<'_>,
    n: u64,
    seed: u64,
    check: &mut CheckFn<'_>,
) -> Result<FuzzSummary, BadInput> {
    let start = Instant::now();
    let watch = InputWatch::new(target.name)
        .unwrap_or_else(|e| panic!("{}: cannot watch the search: {e}", target.name));
    let longest = target.corpus.iter().map(Vec::len).max().unwrap_or(0);
    let mutator = Mutator { words: target.words, bytes_max: (4 * longest).max(4096) };
    let mut random = Random::new(seed);
    let (mut pool, mut kinds) = (target.corpus.clone(), HashSet::new());
    let mut read = 0;
    for number in 0..n {
        // A long run reports its progress.
        if number > 0 && number % PROGRESS == 0 {
            println!("{}: {number} inputs, {:.0?}", target.name, start.elapsed());
        }
        let input = match target.corpus.get(number as usize) {
            Some(good) => good.clone(),
            None => made(target, &mutator, &pool, &mut random),
        };
        watch.next(&input);
        let began = Instant::now();
        match judge(target, &input, check) {
            Ok(answer) => {
                read += u64::from(answer.is_ok());
                if kinds.insert(kind(&answer)) && pool.len() < POOL_MAX {
                    pool.push(input);
                }
            }
            Err(why) => {
                if began.elapsed() > SLOW {
                    return Err(BadInput { input, why, number });
                }
                let mend = |input: &mut Vec<u8>| (target.mend)(input, &mut Random::new(number));
                let (input, why) = shrink(input, why, mend, |shorter| judge(target, shorter, check).err());
                return Err(BadInput { input, why, number });
            }
        }
    }
    Ok(FuzzSummary { inputs: n, read, kinds: kinds.len(), time: start.elapsed() })
}

fn made(target: &Target<'_>, mutator: &Mutator<'_>, pool: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    // Half of them one way from a good input, half wherever answers have led.
    let from = if random.one_in(2) { random.pick(&target.corpus) } else { random.pick(pool) };
    let mut input = from.clone();
    // Inputs with few changes get further into the reader; `mend` may make the only change.
    for _ in 0..random.below(5) {
        let other = random.pick(pool);
        mutator.change(&mut input, other, random);
    }
    // Without it only checksums and lengths would be tested; with it every time, they never would be.
    if !random.one_in(16) {
        (target.mend)(&mut input, random);
    }
    input
}

/// The reader's answer to an input, or what is wrong with it.
fn judge(target: &Target<'_>, input: &[u8], check: &mut CheckFn<'_>) -> Result<ReadResult, String> {
    let start = processor_time();
    let (answer, peak) = memory::peak(|| quietly(|| check(input)));
    let time = processor_time() - start;
    let answer = answer?;
    let allowed = (target.memory)(input.len()) as u64;
    if peak > allowed {
        return Err(format!("{peak} bytes of memory for an input of {}; {allowed} are allowed", input.len()));
    }
    if time > SLOW {
        return Err(format!("{time:.1?} for an input of {} bytes", input.len()));
    }
    Ok(answer)
}

/// The CPU time of this thread, so that a busy machine makes no input look slow.
pub(crate) fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
    static SAID: RefCell<String> = const { RefCell::new(String::new()) };
}

/// The answer, or what a panic said, which is not printed: there are many while an input is made shorter.
fn quietly(work: impl FnOnce() -> ReadResult) -> Result<ReadResult, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = panic::take_hook();
        panic::set_hook(Box::new(move |info| match QUIET.get() {
            true => SAID.set(info.to_string()),
            false => usual(info),
        }));
    });
    QUIET.set(true);
    let answer = panic::catch_unwind(AssertUnwindSafe(work));
    QUIET.set(false);
    answer.map_err(|_| SAID.take())
}

/// An answer without what differs from input to input: numbers and quoted text.
fn kind(answer: &ReadResult) -> String {
    let (Ok(words) | Err(words)) = answer;
    let mut kind = String::from(if answer.is_ok() { "read: " } else { "" });
    let mut quote = None;
    for c in words.chars().take(300) {
        match (quote, c) {
            (Some(open), _) if c == open => quote = None,
            (Some(_), _) => {}
            (None, '"' | '`') => quote = Some(c),
            (None, _) if c.is_ascii_digit() => {}
            (None, _) => kind.push(c),
        }
    }
    kind
}
