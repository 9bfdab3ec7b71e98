//! Numbers as people read them: in progress lines and in the report. Files for machines keep every digit.

/// So many significant digits; plain between 1e-4 and 1e7, scientific outside.
pub(super) fn figure(x: f64, digits: usize) -> String {
    if !x.is_finite() || x == 0.0 {
        return x.abs().to_string().replace("inf", if x < 0.0 { "-inf" } else { "inf" });
    }
    // Rounded first: 9.9996 has one digit more before the point than it seems.
    let rounded = format!("{x:.*e}", digits.saturating_sub(1));
    let exponent: i32 = rounded.split_once('e').and_then(|(_, e)| e.parse().ok()).unwrap_or(0);
    if !(-4..7).contains(&exponent) {
        return rounded;
    }
    let decimals = (digits as i32 - 1 - exponent).max(0) as usize;
    format!("{x:.decimals$}")
}

/// Like [`figure`], without the zeros that say nothing.
pub(super) fn trimmed(x: f64, digits: usize) -> String {
    let text = figure(x, digits);
    let (number, exponent) = text.split_once('e').map_or((text.as_str(), None), |(n, e)| (n, Some(e)));
    let number =
        if number.contains('.') { number.trim_end_matches('0').trim_end_matches('.') } else { number };
    exponent.map_or(number.into(), |e| format!("{number}e{e}"))
}

/// Three digits and a letter for the thousands: `12.3k`.
pub(super) fn short(x: f64) -> String {
    let size = x.abs();
    match size {
        _ if size < 999.5 => trimmed(x, 3),
        _ if size < 999.5e3 => trimmed(x / 1e3, 3) + "k",
        _ if size < 999.5e6 => trimmed(x / 1e6, 3) + "M",
        _ => trimmed(x / 1e9, 3) + "G",
    }
}

/// With a comma at every thousand.
pub fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A length of time as on a clock: `0:07`, `12:34`, `1:02:03`, `3d 04:05`.
pub(super) fn clock(seconds: f64) -> String {
    // Saturates, and NaN is 0.
    let s = seconds.round() as u64;
    match s {
        0..3_600 => format!("{}:{:02}", s / 60, s % 60),
        3_600..86_400 => format!("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60),
        _ => format!("{}d {:02}:{:02}", s / 86_400, s / 3600 % 24, s / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures() {
        for (x, digits, full, short_form) in [
            (0.0, 4, "0", "0"),
            (0.41234, 4, "0.4123", "0.4123"),
            (0.4, 4, "0.4000", "0.4"),
            (9.9996, 4, "10.00", "10"),
            (123.456, 4, "123.5", "123.5"),
            (100.0, 2, "100", "100"),
            (123_456.0, 4, "123456", "123456"),
            (3e-4, 3, "0.000300", "0.0003"),
            (3e-5, 3, "3.00e-5", "3e-5"),
            (-1.25e9, 2, "-1.2e9", "-1.2e9"),
            (f64::NAN, 4, "NaN", "NaN"),
            (f64::INFINITY, 4, "inf", "inf"),
            (f64::NEG_INFINITY, 4, "-inf", "-inf"),
            (f64::MIN_POSITIVE, 3, "2.23e-308", "2.23e-308"),
        ] {
            assert_eq!((figure(x, digits).as_str(), trimmed(x, digits).as_str()), (full, short_form), "{x}");
        }
    }

    #[test]
    fn amounts_and_times() {
        for (x, want) in [
            (0.0, "0"),
            (7.0, "7"),
            (999.4, "999"),
            (999.6, "1k"),
            (12_345.0, "12.3k"),
            (2.5e6, "2.5M"),
            (4e9, "4G"),
        ] {
            assert_eq!(short(x), want);
        }
        for (n, want) in [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(thousands(n), want);
        }
        for (s, want) in [
            (f64::NAN, "0:00"),
            (-3.0, "0:00"),
            (6.6, "0:07"),
            (754.0, "12:34"),
            (3723.0, "1:02:03"),
            (273_900.0, "3d 04:05"),
            (59.7, "1:00"),
        ] {
            assert_eq!(clock(s), want);
        }
    }
}
