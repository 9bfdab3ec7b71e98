//! Timetables as text: a line per stage, a cell per unit of time.
//!
//! A cell has the pass and the microbatch: `F3` forward, `B3` backward (two cells, the second `--`), `I3` input gradients,
//! `W3` weight gradients. With two chunks per stage the second one has small letters; with more, cells begin with the
//! number of the chunk among those of its stage. Dots are idle time.

use std::fmt::Write;

use super::simulate::{Costs, Stuck, simulate};
use super::timetable::{Action, StagePass, Timetable};
use super::two_bw::AcrossSteps;

/// A timetable in which forwards, input gradients and weight gradients take one unit of time each, messages none.
pub fn picture(timetable: &Timetable) -> Result<String, Stuck> {
    draw(timetable, |action| {
        let own = action.chunk / timetable.stages;
        match timetable.chunks_per_stage {
            1 | 2 => label(action.pass, action.microbatch, own == 1),
            _ => format!("{own}{}", label(action.pass, action.microbatch, false)),
        }
    })
}

/// The same for a pipeline that is not flushed between steps. Every other step has small letters.
pub fn picture_across(lists: &AcrossSteps, steps: usize) -> Result<String, Stuck> {
    draw(&lists.run(steps), |action| {
        let (step, microbatch) =
            (action.microbatch / lists.microbatches, action.microbatch % lists.microbatches);
        label(action.pass, microbatch, step % 2 == 1)
    })
}

fn label(pass: StagePass, microbatch: usize, small: bool) -> String {
    let letter = match pass {
        StagePass::Forward => 'F',
        StagePass::Backward => 'B',
        StagePass::InputGrad => 'I',
        StagePass::WeightGrad => 'W',
    };
    let letter = if small { letter.to_ascii_lowercase() } else { letter };
    format!("{letter}{microbatch}")
}

fn draw(timetable: &Timetable, label: impl Fn(&Action) -> String) -> Result<String, Stuck> {
    let costs = Costs::even(timetable.place.len(), 1.0, 1.0, 1.0);
    let simulation = simulate(timetable, &costs)?;
    let labels = timetable.by_stage.iter().flatten().map(|action| label(action).len());
    let width = labels.max().unwrap_or(0);
    let mut text = String::new();
    for (stage, actions) in timetable.by_stage.iter().enumerate() {
        // Units are whole, and so are all times.
        let mut cells = vec![".".repeat(width); simulation.makespan as usize];
        for (action, start) in actions.iter().zip(&simulation.starts[stage]) {
            let start = *start as usize;
            cells[start..start + costs.of(action) as usize].fill("-".repeat(width));
            cells[start] = format!("{:<width$}", label(action));
        }
        // Writing into a String cannot fail.
        let _ = writeln!(text, "{stage} {}", cells.concat().trim_end());
    }
    Ok(text)
}
