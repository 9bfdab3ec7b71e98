//! Dates of a table, and the numbers that a model gets of them.
//!
//! A date is written `2024-03-31`, `2024/03/31` or `31.03.2024`, with or without a time of day (`T09:30`, ` 09:30:15.5Z`).
//! `03/04/2024` is not read as a date: whether it is in March or in April depends on who wrote it. The offset of a time zone is
//! skipped: hours are those of the clock that was written down.
//!
//! A model gets the year with its fraction, which grows with time, and for what repeats (the day of the year, the day of the
//! week, the hour) a point on a circle, so that December is next to January. Which of them vary is found in training.

use std::f64::consts::TAU;
use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

/// A point in time, by the clock that was written down.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Moment {
    /// Days since 1970-01-01.
    days: i64,
    /// Seconds since midnight.
    seconds: u32,
}

/// A number that is made of a date.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DatePart {
    /// The year with its fraction.
    Year,
    /// The sine of the day of the year.
    SeasonSin,
    /// Its cosine.
    SeasonCos,
    /// The sine of the day of the week.
    WeekdaySin,
    /// Its cosine.
    WeekdayCos,
    /// The sine of the time of day.
    HourSin,
    /// Its cosine.
    HourCos,
}

impl DatePart {
    /// All of them.
    pub(super) const ALL: [DatePart; 7] = [
        DatePart::Year,
        DatePart::SeasonSin,
        DatePart::SeasonCos,
        DatePart::WeekdaySin,
        DatePart::WeekdayCos,
        DatePart::HourSin,
        DatePart::HourCos,
    ];

    /// This part of a moment.
    pub(super) fn of(self, moment: Moment) -> f64 {
        let Moment { days, seconds } = moment;
        // 1970-01-01 was a Thursday.
        let weekday = || (days + 3).rem_euclid(7) as usize;
        match self {
            DatePart::Year => 1970.0 + (days as f64 + f64::from(seconds) / 86_400.0) / 365.2425,
            DatePart::SeasonSin => SEASONS[day_of_year(days)].0,
            DatePart::SeasonCos => SEASONS[day_of_year(days)].1,
            DatePart::WeekdaySin => WEEKDAYS[weekday()].0,
            DatePart::WeekdayCos => WEEKDAYS[weekday()].1,
            // Most dates have no time of day.
            DatePart::HourSin if seconds == 0 => 0.0,
            DatePart::HourCos if seconds == 0 => 1.0,
            DatePart::HourSin => point_of(seconds, 86_400).0,
            DatePart::HourCos => point_of(seconds, 86_400).1,
        }
    }
}

/// Where the days of the year, and those of the week, lie on their circles: a table has many dates and few of these.
static SEASONS: LazyLock<[(f64, f64); 366]> =
    LazyLock::new(|| std::array::from_fn(|day| point_of(day as u32, 366)));
static WEEKDAYS: LazyLock<[(f64, f64); 7]> =
    LazyLock::new(|| std::array::from_fn(|day| point_of(day as u32, 7)));

/// The sine and the cosine of the `of`th of `n` equal parts of a circle.
fn point_of(of: u32, n: u32) -> (f64, f64) {
    let angle = TAU * f64::from(of) / f64::from(n);
    (angle.sin(), angle.cos())
}

impl Moment {
    /// Reads a date; `None` if the text is none.
    pub(super) fn read(text: &[u8]) -> Option<Moment> {
        let bytes: &[u8; 10] = text.first_chunk()?;
        let year_first = match (bytes[4], bytes[7], bytes[2], bytes[5]) {
            (b'-', b'-', ..) | (b'/', b'/', ..) => true,
            (_, _, b'.', b'.') => false,
            _ => return None,
        };
        let (date, rest) = str::from_utf8(text).ok()?.split_at_checked(10)?;
        let (year, month, day) = match year_first {
            true => (date.get(..4)?, date.get(5..7)?, date.get(8..)?),
            false => (date.get(6..)?, date.get(3..5)?, date.get(..2)?),
        };
        let (year, month, day) = (digits(year)?, digits(month)?, digits(day)?);
        if !(1..=12).contains(&month) || !(1..=days_in(year, month)).contains(&day) {
            return None;
        }
        Some(Moment { days: days_since_1970(year.into(), month.into(), day.into()), seconds: clock(rest)? })
    }

    /// The date without the time of day.
    pub(super) fn written(self) -> String {
        let (year, month, day) = civil(self.days);
        format!("{year:04}-{month:02}-{day:02}")
    }

    /// Seconds since 1970, to be compared.
    pub(super) fn order(self) -> i64 {
        self.days * 86_400 + i64::from(self.seconds)
    }

    /// The moment that [`Moment::order`] gave.
    pub(super) fn at(order: i64) -> Moment {
        Moment { days: order.div_euclid(86_400), seconds: order.rem_euclid(86_400) as u32 }
    }
}

/// Seconds since midnight of what follows a date: nothing, or a time of day.
fn clock(rest: &str) -> Option<u32> {
    if rest.is_empty() {
        return Some(0);
    }
    let time = rest.strip_prefix(['T', 't', ' '])?;
    let end = time.find(['Z', 'z', '+', '-']).unwrap_or(time.len());
    let (time, zone) = (time[..end].trim_end(), &time[end..]);
    if !zone.bytes().all(|b| b.is_ascii_digit() || b"Zz+-:".contains(&b)) {
        return None;
    }
    let mut parts = time.split(':');
    let (hour, minute) = (digits(parts.next()?)?, digits(parts.next()?)?);
    let second = match parts.next() {
        None => 0,
        Some(second) => {
            let (whole, fraction) = second.split_once('.').unwrap_or((second, ""));
            fraction.bytes().all(|b| b.is_ascii_digit()).then(|| digits(whole)).flatten()?
        }
    };
    let fits = hour < 24 && minute < 60 && second <= 60 && parts.next().is_none();
    fits.then(|| hour * 3600 + minute * 60 + second)
}

/// One to four digits as a number.
fn digits(text: &str) -> Option<u32> {
    let plain = (1..=4).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
    plain.then(|| text.parse().ok()).flatten()
}

fn days_in(year: u32, month: u32) -> u32 {
    match month {
        2 if year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400)) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// Days since 1970-01-01 in the Gregorian calendar: years begin in March, so that the leap day is the last of its year, and
/// 400 of them always have 146,097 days.
fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

/// Year, month and day: the inverse of [`days_since_1970`].
fn civil(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let (era, of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let from_march = (5 * of_year + 2) / 153;
    let (day, month) = (of_year - (153 * from_march + 2) / 5 + 1, (from_march + 2) % 12 + 1);
    (era * 400 + year + i64::from(month <= 2), month, day)
}

/// The day of the year, from 0.
fn day_of_year(days: i64) -> usize {
    let (year, ..) = civil(days);
    (days - days_since_1970(year, 1, 1)) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_read_and_others_are_not() {
        for (text, days, seconds) in [
            ("1970-01-01", 0, 0),
            ("1969/12/31", -1, 0),
            ("29.02.2024", 19_782, 0),
            ("2000-03-01T00:00:01Z", 11_017, 1),
            ("2000-03-01 23:59", 11_017, 86_340),
            ("2000-03-01 10:00:30.25+02:00", 11_017, 36_030),
            ("0001-01-01", -719_162, 0),
        ] {
            assert_eq!(Moment::read(text.as_bytes()), Some(Moment { days, seconds }), "{text}");
        }
        for text in [
            "",
            "1970",
            "2023-02-29",
            "1900-02-29",
            "2023-13-01",
            "2023-00-10",
            "03/04/2024",
            "2024-1-1",
            "2024-01-011",
            "2024-01-01T25:00",
            "2024-01-01 noon",
            "2024-01-01T10",
            "a024-01-01",
            "2024-01/01",
            "äöüß-äö-ä",
            "+024-01-01",
        ] {
            assert_eq!(Moment::read(text.as_bytes()), None, "{text}");
        }
    }

    /// Against a calendar that counts day by day.
    #[test]
    fn days_are_counted_as_a_calendar_does() {
        let (mut year, mut month, mut day) = (1890_u32, 1, 1);
        let first = days_since_1970(1890, 1, 1);
        for n in 0..60_000 {
            assert_eq!(days_since_1970(year.into(), month.into(), day.into()), first + n);
            assert_eq!(civil(first + n), (year.into(), month.into(), day.into()));
            day += 1;
            if day > days_in(year, month) {
                (day, month) = (1, month + 1);
            }
            if month > 12 {
                (month, year) = (1, year + 1);
            }
        }
    }

    #[test]
    fn points_that_are_looked_up_are_those_that_are_computed() {
        for (days, seconds) in (0..800).flat_map(|day| [(19_000 + day * 5, 0), (19_000 + day, 86_399)]) {
            let moment = Moment { days, seconds };
            let angles = [
                (DatePart::SeasonSin, DatePart::SeasonCos, day_of_year(days) as f64, 366.0),
                (DatePart::WeekdaySin, DatePart::WeekdayCos, (days + 3).rem_euclid(7) as f64, 7.0),
                (DatePart::HourSin, DatePart::HourCos, f64::from(seconds), 86_400.0),
            ];
            for (sin, cos, part, whole) in angles {
                let angle = TAU * part / whole;
                assert_eq!((sin.of(moment), cos.of(moment)), (angle.sin(), angle.cos()), "{sin:?} {days}");
            }
        }
    }

    #[test]
    fn what_repeats_lies_on_a_circle() {
        let at = |text: &str| Moment::read(text.as_bytes()).unwrap();
        let near = |a: &str, b: &str, parts: [DatePart; 2]| {
            parts.iter().map(|p| (p.of(at(a)) - p.of(at(b))).powi(2)).sum::<f64>().sqrt()
        };
        let season = [DatePart::SeasonSin, DatePart::SeasonCos];
        let (winter, summer) =
            (near("2023-12-31", "2024-01-01", season), near("2023-12-31", "2024-07-01", season));
        assert!(winter < 0.05 && summer > 1.9, "{winter} {summer}");
        let week = [DatePart::WeekdaySin, DatePart::WeekdayCos];
        assert!(
            near("2024-01-01", "2024-01-08", week) < 1e-9 && near("2024-01-01", "2024-01-02", week) > 0.5
        );
        assert!((DatePart::Year.of(at("2024-07-01T12:00")) - 2024.5).abs() < 0.01);
        assert_eq!(Moment::at(at("1931-05-07 08:09").order()).written(), "1931-05-07");
    }
}
