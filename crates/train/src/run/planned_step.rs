//! What a planner predicted of a run, kept with the run, so that both can be compared when it has run.
//!
//! The prediction is part of what checkpoints know of a run ([`super::Progress`]), and so is the memory that rank 0's process took at most.
//! How long steps took is not recorded a second time: it follows from the times of the lines in `metrics.jsonl`.

use polyreme_parallel::Mesh;
use serde::{Deserialize, Serialize};

use crate::record::history::History;

/// What was predicted of the steps of a run, for the mesh that was chosen.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct PlannedStep {
    /// Ranks along data, tensor, stage and sequence.
    pub mesh: [usize; 4],
    /// Threads of each rank.
    pub threads: usize,
    /// How long a step takes.
    pub step_ms: f64,
    /// What the largest process takes.
    pub memory_mib: f64,
    /// Where the times of the machine come from, in words.
    pub source: String,
}

impl PlannedStep {
    /// Whether it is about ranks that are arranged so.
    pub fn is_of(&self, mesh: &Mesh, threads: usize) -> bool {
        self.mesh() == *mesh && self.threads == threads
    }

    /// How the ranks are arranged.
    pub fn mesh(&self) -> Mesh {
        let [data, tensor, stage, sequence] = self.mesh;
        Mesh { data, tensor, stage, sequence }
    }
}

/// Lines of records have times in milliseconds: of lines that follow each other faster, only the mean is known.
const FAST_LINE_SECONDS: f64 = 0.02;

/// How long a step took, in milliseconds, by the records of a run: the median over the lines of training. Each stands for the steps since
/// the line before, without evaluations; the first, which warms up, counts only if there is no other. Of lines that follow each other
/// within 20 ms it is the mean, because their times are rounded.
pub fn recorded_step_ms(history: &History) -> Option<f64> {
    // Every line has its time, and only lines of training have a learning rate. The line of an evaluation comes behind it.
    let (times, of_training) = (history.column("seconds")?, &history.column("lr")?.steps);
    let mut before = (0, 0.0);
    let mut found = Vec::new();
    for (&step, &seconds) in times.steps.iter().zip(&times.values) {
        let steps = step.saturating_sub(before.0);
        if steps > 0 && of_training.binary_search(&step).is_ok() {
            found.push((seconds - before.1, steps));
        }
        before = (step, seconds);
    }
    let later = found.split_off(usize::from(found.len() > 1));
    let all = later.iter().fold((0.0, 0), |sum, line| (sum.0 + line.0, sum.1 + line.1));
    if all.0 < FAST_LINE_SECONDS * later.len() as f64 {
        return Some(all.0 * 1e3 / all.1 as f64);
    }
    let mut each: Vec<f64> = later.iter().map(|(seconds, steps)| seconds * 1e3 / *steps as f64).collect();
    each.sort_by(f64::total_cmp);
    let middle = each.len().checked_sub(1)? / 2;
    Some((each[middle] + each[each.len() / 2]) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorded(lines: &str) -> Option<f64> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        std::fs::write(&path, lines).unwrap();
        recorded_step_ms(&History::read(&path).unwrap())
    }

    fn training(step: u64, seconds: f64) -> String {
        format!("{{\"step\":{step},\"epoch\":0,\"seconds\":{seconds},\"lr\":0.1}}\n")
    }

    fn evaluation(step: u64, seconds: f64) -> String {
        format!("{{\"step\":{step},\"epoch\":0,\"seconds\":{seconds},\"val_loss\":1}}\n")
    }

    #[test]
    fn evaluations_and_the_first_steps_do_not_count() {
        assert_eq!(recorded(""), None);
        assert_eq!(recorded(&training(10, 2.0)), Some(200.0));
        // Steps of 100 ms but for the first ones; evaluations of 5 s, one at a line of training and one between two.
        let lines = [
            training(10, 3.0),
            training(20, 4.0),
            evaluation(20, 9.0),
            training(30, 10.0),
            evaluation(35, 15.5),
            training(40, 16.0),
        ];
        let ms = recorded(&lines.concat()).unwrap();
        assert!((ms - 100.0).abs() < 1e-9, "{ms}");
    }

    #[test]
    fn of_fast_steps_it_is_the_mean() {
        let lines: String = (1..=9).map(|step| training(step, (step / 3) as f64 * 0.001)).collect();
        let ms = recorded(&lines).unwrap();
        assert!((ms - 3.0 / 8.0).abs() < 1e-9, "{ms}");
    }

    #[test]
    fn a_plan_is_of_its_mesh() {
        let plan = PlannedStep {
            mesh: [2, 1, 2, 1],
            threads: 1,
            step_ms: 1.0,
            memory_mib: 1.0,
            source: String::new(),
        };
        let mesh = Mesh { data: 2, tensor: 1, stage: 2, sequence: 1 };
        assert!(plan.is_of(&mesh, 1) && !plan.is_of(&mesh, 2) && !plan.is_of(&Mesh::data(4), 1));
    }
}
