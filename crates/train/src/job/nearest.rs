//! Which name was meant.

use crate::edits::edits;

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
pub(crate) fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let name = plain(name);
    let elsewhere =
        ELSEWHERE.iter().find(|(other, _)| other.chars().eq(name.iter().copied())).map(|(_, own)| *own);
    let mut best: Option<(usize, &str)> = None;
    for candidate in known {
        if elsewhere == Some(candidate) {
            return Some(candidate);
        }
        let to = plain(candidate);
        let far = edits(&name, &to);
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
        let check = |a: &str, b: &str, want| assert_eq!(edits(&plain(a), &plain(b)), want, "{a} {b}");
        check("", "", 0);
        check("abc", "", 3);
        check("abc", "acb", 1);
        check("kitten", "sitting", 3);
    }
}
