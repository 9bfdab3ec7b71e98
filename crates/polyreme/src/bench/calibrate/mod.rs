//! `polyreme bench calibrate`: what the simulator must know about this machine.
//!
//! Small graphs of one op and its gradient are run over grids of sizes, by the engine that runs training, in f32 and bf16: with one
//! thread, with all threads, and with one on each core at the same time, which is what ranks on one host cost each other. Then
//! exchanges between two ranks, in memory and over the loopback interface, by size, and codecs of what travels. No job is looked at: what a
//! simulation of one says is a prediction.

mod codecs;
mod links;
mod timing;
mod trials;

use std::error::Error;
use std::fmt;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use polyreme_kernels::Isa;
use polyreme_sim::calibration::{CalibrationFile, FORMAT, MachineFacts};
use polyreme_sim::{Calibration, CalibrationError};
use serde::Serialize;

use crate::process;
use timing::{Found, Repeats, Variant};
use trials::Grid;

/// What was measured, in a few numbers.
#[derive(Clone, Debug, Serialize)]
pub struct CalibrateReport {
    /// Where it was written.
    pub output: String,
    /// The processor.
    pub machine: String,
    /// How many cores.
    pub cores: usize,
    /// The instructions that kernels used.
    pub isa: String,
    /// Shapes that were measured.
    pub points: usize,
    /// How long it took.
    pub seconds: f64,
}

impl fmt::Display for CalibrateReport {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let CalibrateReport { output, machine, cores, isa, points, seconds } = self;
        write!(f, "{points} times of {machine}, {cores} cores, {isa}, in {seconds:.0} s: {output}")
    }
}

/// Measures this machine; `quick` for a first impression in a few seconds.
pub fn measure(isa: Isa, quick: bool) -> Result<CalibrationFile, Box<dyn Error + Send + Sync>> {
    let grid = if quick { Grid::QUICK } else { Grid::USUAL };
    let (rounds, repeats) = match quick {
        true => (1, Repeats { each: Duration::from_millis(1), runs_min: 2, runs_max: 3 }),
        false => (2, Repeats { each: Duration::from_millis(12), runs_min: 3, runs_max: 50 }),
    };
    let cores = process::cores();
    let trials = grid.trials()?;
    let mut variants = vec![Variant { threads: 1, ranks: 1 }];
    if cores > 1 {
        variants.push(Variant { threads: cores, ranks: 1 });
        variants.push(Variant { threads: 1, ranks: cores });
    }
    // Another program may use the machine for some seconds: what is measured again later is not hit by it twice.
    let mut found = vec![Found::new(); variants.len()];
    for _ in 0..rounds {
        for (variant, found) in variants.iter().zip(&mut found) {
            timing::join(found, timing::measure(&trials, grid.elements, *variant, isa, repeats)?);
        }
    }
    let tables =
        variants.iter().zip(found).flat_map(|(variant, found)| timing::tables(found, *variant)).collect();
    let unevenness = timing::unevenness(&trials, isa, if quick { 20 } else { 300 })?;
    let links = links::measure(quick, unevenness, isa)?;
    let machine = MachineFacts {
        name: process::cpu_name(),
        isa: isa.name().into(),
        cores,
        memory_bytes: process::memory_bytes() as f64,
        date: today(),
    };
    Ok(CalibrationFile { format: FORMAT, machine, tables, links })
}

/// Measures, checks and writes.
pub fn write(
    path: &std::path::Path,
    isa: Isa,
    quick: bool,
) -> Result<CalibrateReport, Box<dyn Error + Send + Sync>> {
    let began = Instant::now();
    let file = measure(isa, quick)?;
    let text = serde_json::to_string(&file)?;
    std::fs::write(path, text + "\n").map_err(|e| format!("{}: {e}", path.display()))?;
    let report = CalibrateReport {
        output: path.display().to_string(),
        machine: file.machine.name.clone(),
        cores: file.machine.cores,
        isa: file.machine.isa.clone(),
        points: file.tables.iter().map(|table| table.points.len()).sum(),
        seconds: began.elapsed().as_secs_f64(),
    };
    Calibration::new(file).map_err(|e: CalibrationError| e.to_string())?;
    Ok(report)
}

/// The day, as `2026-11-18`: from days since 1970 to a date of the Gregorian calendar, counted in eras of 400 years that begin in
/// March.
fn today() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    date_of(seconds / 86_400)
}

fn date_of(days: u64) -> String {
    let from_march = days + 719_468;
    let (era, day) = (from_march / 146_097, from_march % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day_of_year + 2) / 153;
    let (day, month) =
        (day_of_year - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    format!("{:04}-{month:02}-{day:02}", era * 400 + year + u64::from(month <= 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Everything that a program can do has times, and they can be read back.
    #[test]
    fn a_quick_one_is_complete() {
        let file = measure(Isa::detect(), true).unwrap();
        let text = serde_json::to_string(&file).unwrap();
        let read = Calibration::parse(&text).unwrap();
        assert_eq!(read, Calibration::new(file).unwrap());
        assert!(read.copy_bytes_per_us() > 10.0);
        let older = text.replacen("\"format\":1", "\"format\":0", 1);
        assert!(Calibration::parse(&older).unwrap_err().to_string().contains("format 0"));
    }

    #[test]
    fn days_are_dates() {
        for (days, date) in
            [(0, "1970-01-01"), (59, "1970-03-01"), (11_016, "2000-02-29"), (20_775, "2026-11-18")]
        {
            assert_eq!(date_of(days), date);
        }
    }
}
