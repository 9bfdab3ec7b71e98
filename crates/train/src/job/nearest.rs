//! Which name was meant.

/// What people coming from elsewhere write.
const ELSEWHERE: [(&str, &str); 14] = [
    ("batchsize", "batch"),
    ("learningrate", "lr"),
    ("numepochs", "epochs"),
    ("maxepochs", "epochs"),
    ("maxsteps", "steps"),
    ("gradclip", "clip"),
    ("gradientclipping", "clip"),
    ("shuffle", "order"),
    ("numworkers", "threads"),
    ("workers", "threads"),
    ("valsplit", "validation"),
    ("nhead", "heads"),
    ("conv2d", "conv"),
    ("batchnorm2d", "batch_norm"),
];

/// The name among `known` that is nearest to `name`, if one is near enough to be meant.
pub(super) fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let name = plain(name);
    let elsewhere =
        ELSEWHERE.iter().find(|(other, _)| other.chars().eq(name.iter().copied())).map(|(_, own)| *own);
    let mut best: Option<(usize, &str)> = None;
    for candidate in known {
        if elsewhere == Some(candidate) {
            return Some(candidate);
        }
        let to = plain(candidate);
        let far = distance(&name, &to);
        // A third of the letters may be wrong, and two letters are never enough to guess by.
        if far * 3 <= name.len().max(to.len()) && best.is_none_or(|(least, _)| far < least) {
            best = Some((far, candidate));
        }
    }
    best.map(|(_, candidate)| candidate)
}

/// Lower case, without what separates words; long names are cut, since they are near to nothing.
fn plain(name: &str) -> Vec<char> {
    let letters = name.chars().filter(|c| !matches!(c, '_' | '-' | ' '));
    letters.flat_map(char::to_lowercase).take(64).collect()
}

/// How many letters must be put in, left out, changed or swapped with their neighbour.
fn distance(a: &[char], b: &[char]) -> usize {
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for (i, row) in rows.iter_mut().enumerate() {
        row[0] = i;
    }
    for j in 0..=b.len() {
        rows[0][j] = j;
    }
    for i in 1..=a.len() {
        for j in 1..=b.len() {
            let change = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = change.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            rows[i][j] = least;
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_are_found_and_guesses_are_not_made() {
        let known = ["batch", "epochs", "steps", "optimizer", "schedule", "lr", "label_smoothing", "threads"];
        let check = |name: &str, want: Option<&str>| assert_eq!(nearest(name, known), want, "{name}");
        check("bach", Some("batch"));
        check("btach", Some("batch"));
        check("Batch", Some("batch"));
        check("batch_size", Some("batch"));
        check("learning-rate", Some("lr"));
        check("optimiser", Some("optimizer"));
        check("scheduler", Some("schedule"));
        check("epoch", Some("epochs"));
        check("labelsmoothing", Some("label_smoothing"));
        check("rl", None);
        check("x", None);
        check("", None);
        check("colour", None);
        check(&"batch".repeat(1000), None);
    }

    #[test]
    fn distances() {
        let check = |a: &str, b: &str, want| assert_eq!(distance(&plain(a), &plain(b)), want, "{a} {b}");
        check("", "", 0);
        check("abc", "", 3);
        check("abc", "acb", 1);
        check("kitten", "sitting", 3);
    }
}
