//! Splitting a text into pieces (pre-tokens); merges happen only inside a piece.
//!
//! Each rule is a regular expression in the tokenizer file. The few that byte-level tokenizers use are written here by
//! hand, as one step: given the rest of the text, how long is the next piece. They are recognised by their exact
//! spelling; any other expression is rejected when the file is read.

use super::letters::{is_letter, is_number, is_other, is_space};

/// A rule by which a text is split.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Rule {
    /// The rule of GPT-2.
    Gpt2,
    /// The rule of GPT-4, with at most this many digits in a piece.
    Gpt4 { digits_max: usize },
    /// Splits digits from everything else, one by one or in runs.
    Digits { each: bool },
}

const GPT2: [&str; 2] = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
];
const GPT4_3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const GPT4_1: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

impl Rule {
    /// The rule of a regular expression, if it is one of ours.
    pub(super) fn of_regex(regex: &str) -> Option<Rule> {
        match regex {
            _ if GPT2.contains(&regex) => Some(Rule::Gpt2),
            GPT4_3 => Some(Rule::Gpt4 { digits_max: 3 }),
            GPT4_1 => Some(Rule::Gpt4 { digits_max: 1 }),
            _ => None,
        }
    }

    /// Calls `piece` with the pieces of `text` in order; concatenated they are the text.
    pub(super) fn split(self, text: &str, mut piece: impl FnMut(&str)) {
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            let n = match self {
                Rule::Gpt2 => gpt2(rest, first),
                Rule::Gpt4 { digits_max } => gpt4(rest, first, digits_max),
                Rule::Digits { each: true } if is_number(first) => first.len_utf8(),
                Rule::Digits { .. } => run(rest, |c| is_number(c) == is_number(first)),
            };
            piece(&rest[..n]);
            rest = &rest[n..];
        }
    }
}

/// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
fn gpt2(rest: &str, first: char) -> usize {
    if first == '\''
        && let Some(n) = contraction(rest, false)
    {
        return n;
    }
    let blank = usize::from(first == ' ');
    let word = &rest[blank..];
    match word.chars().next() {
        Some(c) if is_letter(c) => blank + run(word, is_letter),
        Some(c) if is_number(c) => blank + run(word, is_number),
        Some(c) if is_other(c) => blank + run(word, is_other),
        _ => spaces(rest),
    }
}

/// `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
fn gpt4(rest: &str, first: char, digits_max: usize) -> usize {
    if first == '\''
        && let Some(n) = contraction(rest, true)
    {
        return n;
    }
    if is_letter(first) {
        return run(rest, is_letter);
    }
    if is_number(first) {
        return rest.chars().take(digits_max).take_while(|&c| is_number(c)).map(char::len_utf8).sum();
    }
    let word = &rest[first.len_utf8()..];
    if !is_newline(first) && word.chars().next().is_some_and(is_letter) {
        return first.len_utf8() + run(word, is_letter);
    }
    let blank = usize::from(first == ' ');
    let others = run(&rest[blank..], is_other);
    if others > 0 {
        let n = blank + others;
        return n + run(&rest[n..], is_newline);
    }
    // White space up to and with its last line break, if it has one.
    match rest[..run(rest, is_space)].rfind(is_newline) {
        Some(last) => last + 1,
        None => spaces(rest),
    }
}

/// `\s+(?!\S)|\s+`: all white space at the end of the text; before a word, all except its last character, which the next
/// piece may begin with; a single one before a word is its own piece.
fn spaces(rest: &str) -> usize {
    let n = run(rest, is_space);
    let last = rest[..n].chars().next_back().map_or(0, char::len_utf8);
    if n == rest.len() || n == last { n } else { n - last }
}

/// The length of an English contraction, apostrophe included. `ſ` matches s in a regular expression that ignores case.
fn contraction(rest: &str, any_case: bool) -> Option<usize> {
    let mut ending = rest.chars().skip(1).map(|c| match c {
        'ſ' if any_case => 's',
        c if any_case => c.to_ascii_lowercase(),
        c => c,
    });
    match (ending.next()?, ending.next()) {
        ('s' | 't' | 'm' | 'd', _) => Some(1 + rest[1..].chars().next()?.len_utf8()),
        ('r' | 'v', Some('e')) | ('l', Some('l')) => Some(3),
        _ => None,
    }
}

fn is_newline(c: char) -> bool {
    matches!(c, '\r' | '\n')
}

/// How many bytes the leading characters of a class take.
fn run(text: &str, class: impl Fn(char) -> bool) -> usize {
    text.find(|c| !class(c)).unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(rule: Rule, text: &str, expected: &[&str]) {
        let mut found = Vec::new();
        rule.split(text, |piece| found.push(piece.to_string()));
        assert_eq!(found, expected, "{rule:?} on {text:?}");
    }

    #[test]
    fn gpt2_as_its_regular_expression() {
        for (text, expected) in [
            ("", &[][..]),
            ("Call me Ishmael.", &["Call", " me", " Ishmael", "."]),
            ("it's we'll I'VE 'tis", &["it", "'s", " we", "'ll", " I", "'", "VE", " '", "tis"]),
            ("a  b", &["a", " ", " b"]),
            ("a   b", &["a", "  ", " b"]),
            ("a \n b", &["a", " \n", " b"]),
            ("a\nb", &["a", "\n", "b"]),
            ("a\n\nb", &["a", "\n", "\n", "b"]),
            ("a  ", &["a", "  "]),
            (" \u{a0}é", &[" ", "\u{a0}", "é"]),
            ("x=12345;//ok", &["x", "=", "12345", ";//", "ok"]),
            ("नमस्ते", &["नमस", "्", "त", "े"]),
            ("'", &["'"]),
            ("'r", &["'", "r"]),
        ] {
            check(Rule::Gpt2, text, expected);
        }
    }

    #[test]
    fn gpt4_as_its_regular_expression() {
        for (text, expected) in [
            ("I'LL'ſ a'SS", &["I", "'LL", "'ſ", " a", "'S", "S"][..]),
            ("1234५६७८", &["123", "4५६", "७८"]),
            ("\tx  y", &["\tx", " ", " y"]),
            (";\r\n\r\nx", &[";\r\n\r\n", "x"]),
            ("a \n \n  b", &["a", " \n \n", " ", " b"]),
            ("a \n ", &["a", " \n", " "]),
            ("\nb", &["\n", "b"]),
            ("(x)", &["(x", ")"]),
            (" 7", &[" ", "7"]),
        ] {
            check(Rule::Gpt4 { digits_max: 3 }, text, expected);
        }
        check(Rule::Gpt4 { digits_max: 1 }, "a12", &["a", "1", "2"]);
        check(Rule::Digits { each: true }, "ab 12c", &["ab ", "1", "2", "c"]);
        check(Rule::Digits { each: false }, "ab 12c", &["ab ", "12", "c"]);
    }
}
