//! Lengths of time as people write them: `250ms`, `1s`, `5m`, `6h`, `2d`.

use std::time::Duration;

const UNITS: [(&str, f64); 5] = [("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0), ("d", 86400.0)];

/// Reads one; zero is none.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is not a time: 1s, 250ms, 5m, 6h");
    let start = text.find(|c: char| c.is_ascii_alphabetic()).ok_or_else(wrong)?;
    let (number, unit) = text.split_at(start);
    let seconds = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(wrong)?.1;
    let number: f64 = number.parse().map_err(|_| wrong())?;
    let time = Duration::try_from_secs_f64(number * seconds).map_err(|_| wrong())?;
    if time.is_zero() { Err(format!("{text:?} is no time at all")) } else { Ok(time) }
}

/// One in a few characters.
pub(crate) fn words(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    let (name, unit) = UNITS.iter().rev().find(|(_, unit)| seconds >= *unit).copied().unwrap_or(("ms", 1e-3));
    let number = seconds / unit;
    // Two digits are enough to talk about.
    if number >= 10.0 || number.fract() < 0.05 {
        format!("{number:.0}{name}")
    } else {
        format!("{number:.1}{name}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_and_said() {
        for (text, ms) in [("250ms", 250), ("1s", 1000), ("1.5s", 1500), ("5m", 300_000), ("6h", 21_600_000)]
        {
            assert_eq!(
                (duration(text), words(Duration::from_millis(ms)).as_str()),
                (Ok(Duration::from_millis(ms)), text)
            );
        }
        assert_eq!(duration("2d"), Ok(Duration::from_secs(172_800)));
        for wrong in ["", "5", "h", "1y", "-1s", "1e999h", "0s", "nans"] {
            assert!(duration(wrong).is_err(), "{wrong:?}");
        }
    }
}
