//! Text for the width of a terminal.

/// Breaks lines that are longer than `width` between words; continuation lines are indented by `hang` columns. A word
/// that is longer than a line, a path mostly, stays whole. Without a width nothing changes.
pub fn fold(text: &str, width: Option<usize>, hang: usize) -> String {
    let Some(width) = width else { return text.into() };
    let mut out = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        let mut column = 0;
        // A word with the space before it.
        let starts = line.char_indices().filter(|&(i, c)| c == ' ' && !line[..i].ends_with(' '));
        let mut cuts: Vec<usize> = starts.map(|(i, _)| i).chain([line.len()]).collect();
        cuts.dedup();
        let mut from = 0;
        for to in cuts {
            let word = &line[from..to];
            from = to;
            let columns = word.trim_end_matches('\n').chars().count();
            let bare = word.trim_start_matches(' ');
            if column > hang && column + columns > width && !bare.trim_end().is_empty() {
                out.push('\n');
                out.extend(std::iter::repeat_n(' ', hang));
                out.push_str(bare);
                column = hang + bare.trim_end_matches('\n').chars().count();
            } else {
                out.push_str(word);
                column += columns;
            }
        }
    }
    out
}

/// Cuts lines that are longer than `width`. Without a width nothing changes.
pub fn cut(text: &str, width: Option<usize>) -> String {
    let Some(width) = width else { return text.into() };
    let line = |line: &str| line.chars().take(width).collect::<String>().trim_end().to_string() + "\n";
    text.lines().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_broken_between_words() {
        let text = "  data     32 numbers, 5 classes; 900 to train\nshort\n";
        assert_eq!(fold(text, None, 11), text);
        assert_eq!(fold(text, Some(46), 11), text);
        let want = "  data     32 numbers, 5\n           classes; 900 to\n           train\nshort\n";
        assert_eq!(fold(text, Some(26), 11), want);
        for width in 20..60 {
            let folded = fold(text, Some(width), 11);
            assert!(folded.lines().all(|l| l.chars().count() <= width), "{width}: {folded}");
            let words = |s: &str| s.split_whitespace().map(String::from).collect::<Vec<_>>();
            assert_eq!(words(&folded), words(text));
        }
        let path = "  output   /a/path/that/is/longer/than/a/line\n";
        assert_eq!(fold(path, Some(20), 11), path);
        assert_eq!(fold("", Some(5), 2), "");
    }

    #[test]
    fn tables_are_cut() {
        assert_eq!(cut("a  b  c\nd  e  f\n", Some(5)), "a  b\nd  e\n");
        assert_eq!(cut("a  b\n", None), "a  b\n");
    }
}
