//! Text that goes on: one token after another, each drawn from what the model says comes next.

use polyreme_data::{Layout, Tokenizer, Values};

use crate::draw::Draw;
use crate::error::TrainError;
use crate::preparation::Sample;
use crate::trained::Trained;

/// How tokens are drawn.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sampling {
    /// How many tokens.
    pub length: usize,
    /// 0: always the likeliest. 1: as the model says. More: wilder.
    pub temperature: f64,
    /// Only so many of the likeliest are drawn from; 0: all.
    pub top: usize,
    /// From which draws follow.
    pub seed: u64,
}

/// Continues `prompt`, and tells each token as it comes.
pub fn generate(
    trained: &Trained,
    tokenizer: &Tokenizer,
    prompt: &str,
    how: Sampling,
    threads: usize,
    tell: &mut dyn FnMut(i32),
) -> Result<Vec<i32>, TrainError> {
    let Sample::Ids { time, vocab } = trained.preparation.sample else { return Err(TrainError::NoText) };
    let mut ids = tokenizer.encode(prompt);
    if ids.is_empty() {
        // Something must come first: a line break is in every text.
        ids = tokenizer.encode("\n");
    }
    let start = ids.len();
    let mut judge = trained.judge(&trained.preparation.spec(Layout::Planes), 1, threads)?;
    let (mut window, labels) = (vec![0; time], vec![0; time]);
    let mut random = Draw::new(how.seed);
    for _ in 0..how.length {
        // The last `time` tokens; what stands behind them cannot be seen by those before.
        let seen = &ids[ids.len().saturating_sub(time)..];
        window.fill(0);
        window[..seen.len()].copy_from_slice(seen);
        let (logits, _) = judge.run(Values::I32(&window), Values::I32(&labels))?;
        let last = &logits[(seen.len() - 1) * vocab..seen.len() * vocab];
        let id = choose(last, how, &mut random);
        ids.push(id);
        tell(id);
    }
    Ok(ids.split_off(start))
}

/// An id, drawn from logits.
fn choose(logits: &[f32], how: Sampling, random: &mut Draw) -> i32 {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    if how.temperature <= 0.0 {
        return order[0] as i32;
    }
    let n = if how.top == 0 { order.len() } else { how.top.min(order.len()) };
    let best = f64::from(logits[order[0]]);
    let weight = |i: usize| ((f64::from(logits[i]) - best) / how.temperature).exp();
    let total: f64 = order[..n].iter().map(|&i| weight(i)).sum();
    let mut left = random.uniform() * total;
    for &i in &order[..n] {
        left -= weight(i);
        if left < 0.0 {
            return i as i32;
        }
    }
    order[n - 1] as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_follow_the_logits() {
        let logits = [0.0, 2f32.ln(), f32::NEG_INFINITY, 1f32.ln()];
        let count = |temperature, top| {
            let (mut counts, mut random) = ([0; 4], Draw::new(1));
            for _ in 0..4000 {
                let how = Sampling { length: 1, temperature, top, seed: 0 };
                counts[choose(&logits, how, &mut random) as usize] += 1;
            }
            counts
        };
        let [a, b, c, d] = count(1.0, 0);
        assert!((900..1100).contains(&a) && (1900..2100).contains(&b) && c == 0 && (900..1100).contains(&d));
        assert_eq!(count(0.0, 0), [0, 4000, 0, 0]);
        assert_eq!(count(1.0, 1), [0, 4000, 0, 0]);
        assert_eq!(count(1.0, 2)[3], 0, "of equals the first is among the two likeliest");
    }
}
