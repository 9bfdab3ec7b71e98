//! Added tokens: texts that are one token wherever they occur, found before anything is split or merged.

/// One added token.
#[derive(Clone, Debug)]
pub(super) struct AddedToken {
    /// Its text, not empty.
    pub(super) content: String,
    /// Its id.
    pub(super) id: u32,
    /// Whether it absorbs white space before it.
    pub(super) lstrip: bool,
    /// Whether it absorbs white space after it.
    pub(super) rstrip: bool,
}

/// The tokens that are searched for in one pass: leftmost first, then longest.
#[derive(Clone, Debug)]
pub(super) struct Added {
    tokens: Vec<AddedToken>,
    /// For each first byte the tokens that begin with it, longest first.
    starts: Vec<Vec<usize>>,
}

/// A segment of text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stretch<'a> {
    /// An added token.
    Token(u32),
    /// Text between added tokens, not empty.
    Text(&'a str),
}

impl Added {
    pub(super) fn new(tokens: Vec<AddedToken>) -> Added {
        let mut starts = vec![Vec::new(); 256];
        for (idx, token) in tokens.iter().enumerate() {
            starts[usize::from(token.content.as_bytes()[0])].push(idx);
        }
        for same in &mut starts {
            same.sort_by_key(|&idx: &usize| std::cmp::Reverse(tokens[idx].content.len()));
        }
        Added { tokens, starts }
    }

    /// Calls `stretch` with the segments of `text` in order.
    pub(super) fn split<'a>(&self, text: &'a str, mut stretch: impl FnMut(Stretch<'a>)) {
        let mut done = 0;
        let mut at = 0;
        while !self.tokens.is_empty() && at < text.len() {
            let Some(token) = self.token_at(&text.as_bytes()[at..]) else {
                at += 1;
                continue;
            };
            let mut before = &text[done..at];
            if token.lstrip {
                before = before.trim_end();
            }
            if !before.is_empty() {
                stretch(Stretch::Text(before));
            }
            stretch(Stretch::Token(token.id));
            at += token.content.len();
            if token.rstrip {
                at = text.len() - text[at..].trim_start().len();
            }
            done = at;
        }
        if done < text.len() {
            stretch(Stretch::Text(&text[done..]));
        }
    }

    fn token_at(&self, rest: &[u8]) -> Option<&AddedToken> {
        let same = &self.starts[usize::from(rest[0])];
        same.iter().map(|&idx| &self.tokens[idx]).find(|token| rest.starts_with(token.content.as_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::Stretch::{Text, Token};
    use super::*;

    fn check(text: &str, expected: &[Stretch<'_>]) {
        let token =
            |content: &str, id, lstrip, rstrip| AddedToken { content: content.into(), id, lstrip, rstrip };
        let added = Added::new(vec![
            token("<a>", 1, false, false),
            token("<a><b>", 2, false, false),
            token("<mask>", 3, true, false),
            token("é", 4, false, true),
        ]);
        let mut found = Vec::new();
        added.split(text, |stretch| found.push(stretch));
        assert_eq!(found, expected, "{text:?}");
    }

    #[test]
    fn the_longest_of_the_leftmost_is_taken() {
        check("", &[]);
        check("plain", &[Text("plain")]);
        check("<a>", &[Token(1)]);
        check("x<a>y", &[Text("x"), Token(1), Text("y")]);
        check("<a><a><b><", &[Token(1), Token(2), Text("<")]);
        check("x \n<mask> y", &[Text("x"), Token(3), Text(" y")]);
        check("  <mask>", &[Token(3)]);
        check("ü é  ü", &[Text("ü "), Token(4), Text("ü")]);
        check("é ", &[Token(4)]);
    }
}
