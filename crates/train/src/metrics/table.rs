//! A confusion matrix as text that fits a terminal of 80 columns: all of it up to 20 classes, else the worst mistakes.

use std::fmt::{self, Display, Formatter};

use super::confusion::Confusion;

/// Columns that a table may have.
const WIDTH: usize = 80;
/// The most classes that are printed as a matrix.
const MATRIX_MAX: usize = 20;
/// How many mistakes are printed where the matrix is not.
const PAIRS: usize = 15;
/// The longest that a class's name is printed.
const NAME_MAX: usize = 16;

/// A confusion matrix with the names of its classes, to be printed.
#[derive(Clone, Copy, Debug)]
pub struct Table<'a> {
    confusion: &'a Confusion,
    names: &'a [String],
}

impl Confusion {
    /// The matrix with names instead of numbers; classes without a name keep their number.
    pub fn with_names<'a>(&'a self, names: &'a [String]) -> Table<'a> {
        Table { confusion: self, names }
    }
}

impl Display for Confusion {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.with_names(&[]).fmt(f)
    }
}

impl Display for Table<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if self.confusion.classes() <= MATRIX_MAX { self.matrix(f) } else { self.pairs(f) }
    }
}

impl Table<'_> {
    fn name(&self, class: usize, max: usize) -> String {
        let name = self.names.get(class).cloned().unwrap_or_else(|| class.to_string());
        // A name comes from a folder or a file: what moves the cursor does not get to the terminal.
        let name: String = name.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
        if name.chars().count() <= max {
            return name;
        }
        name.chars().take(max.saturating_sub(1)).chain(['…']).collect()
    }

    fn matrix(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (confusion, classes) = (self.confusion, self.confusion.classes());
        let most = (0..classes).flat_map(|truth| confusion.row(truth)).max().copied().unwrap_or(0);
        let counts_width = (most.to_string().len() + 1).max(4);
        // Where a name is too wide for a column, columns have numbers, and rows have both.
        let room = match classes {
            16.. => 3,
            _ if classes * counts_width + NAME_MAX > WIDTH => 4,
            _ => counts_width,
        };
        let short = (0..classes).all(|class| self.name(class, NAME_MAX).chars().count() < room);
        let label = |class| match (short, self.name(class, NAME_MAX)) {
            (true, name) => name,
            (false, name) => format!("{class} {name}"),
        };
        let wanted = (0..classes).map(|class| label(class).chars().count()).max().unwrap_or(0).max(5);
        // The counts if they fit, else shares in percent. With 20 classes those have three columns each, and a 100
        // touches what stands before it; that is a dot, because a 100 leaves nothing for the others.
        let percent = wanted + classes * counts_width > WIDTH;
        let width = match percent {
            false => counts_width,
            true if wanted + classes * 4 <= WIDTH => 4,
            true => 3,
        };
        let head = wanted.min(WIDTH - classes * width).max(2);
        let title = if percent {
            "rows: truth, in % of the row; columns: predicted"
        } else {
            "rows: truth; columns: predicted"
        };
        writeln!(f, "{title}")?;
        write!(f, "{:head$}", "")?;
        for class in 0..classes {
            let name = if short { self.name(class, width - 1) } else { class.to_string() };
            write!(f, "{name:>width$}")?;
        }
        for truth in 0..classes {
            write!(f, "\n{:head$}", label(truth).chars().take(head).collect::<String>())?;
            let support = confusion.support(truth);
            for &count in confusion.row(truth) {
                let shown = if percent { percent_of(count, support) } else { count };
                if shown == 0 { write!(f, "{:>width$}", "·")? } else { write!(f, "{shown:>width$}")? }
            }
        }
        Ok(())
    }

    fn pairs(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let pairs = self.confusion.worst_pairs(PAIRS);
        let right = self.confusion.accuracy().unwrap_or(0.0) * 100.0;
        write!(f, "{} classes, {right:.2}% right; the most frequent mistakes:", self.confusion.classes())?;
        if pairs.is_empty() {
            write!(f, " none")?;
        }
        for pair in pairs {
            let (truth, predicted) = (self.name(pair.truth, NAME_MAX), self.name(pair.predicted, NAME_MAX));
            let share = pair.share * 100.0;
            write!(
                f,
                "\n{truth:>NAME_MAX$} taken for {predicted:NAME_MAX$} {:>8} ({share:.1}%)",
                pair.count
            )?;
        }
        Ok(())
    }
}

/// Rounded, but 100 only for all of it.
fn percent_of(count: u64, support: u64) -> u64 {
    if count == support && count > 0 {
        return 100;
    }
    ((100.0 * count as f64 / support.max(1) as f64).round() as u64).min(99)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn diagonal(classes: usize, right: u64, wrong: u64) -> Confusion {
        let cell = |truth, predicted| match (truth == predicted, predicted == (truth + 1) % classes) {
            (true, _) => right,
            (_, true) => wrong,
            _ => 0,
        };
        let rows: Vec<Vec<u64>> = (0..classes).map(|t| (0..classes).map(|p| cell(t, p)).collect()).collect();
        Confusion::from_rows(&rows).unwrap()
    }

    fn check(confusion: &Confusion, names: &[&str], want: &str) {
        let names: Vec<String> = names.iter().map(|name| name.to_string()).collect();
        assert_eq!(confusion.with_names(&names).to_string(), want.trim_matches('\n'));
    }

    #[test]
    fn small_matrices_are_printed_whole() {
        check(
            &diagonal(3, 12, 3),
            &["cat", "dog", "\u{1b}[H"],
            "
rows: truth; columns: predicted
      cat dog ?[H
cat    12   3   ·
dog     ·  12   3
?[H     3   ·  12
",
        );
        check(
            &diagonal(2, 12, 3),
            &["coat", "ankle boot"],
            "
rows: truth; columns: predicted
               0   1
0 coat        12   3
1 ankle boot   3  12
",
        );
        check(
            &diagonal(2, 0, 0),
            &[],
            "rows: truth; columns: predicted\n        0   1\n0       ·   ·\n1       ·   ·",
        );
        check(&Confusion::new(0).unwrap(), &[], "rows: truth; columns: predicted\n     ");
    }

    #[test]
    fn every_size_fits() {
        let names: Vec<String> = (0..1000).map(|i| format!("a class with a long name {i}")).collect();
        for classes in [1, 2, 5, 9, 10, 15, 16, 18, 19, 20, 21, 100, 1000] {
            for right in [0, 9, 999, 12_345_678] {
                let confusion = diagonal(classes, right, right / 3);
                for text in [confusion.to_string(), confusion.with_names(&names).to_string()] {
                    let widest = text.lines().map(|line| line.chars().count()).max().unwrap();
                    assert!(widest <= WIDTH, "{classes} classes: {widest} columns\n{text}");
                    let lines = if classes <= 20 { classes + 2 } else { 1 + PAIRS };
                    assert!(text.lines().count() <= lines, "{text}");
                }
            }
        }
        let text = diagonal(20, 100_000, 0).to_string();
        assert!(text.contains("% of the row") && text.contains("·100"), "{text}");
        let text = diagonal(30, 7, 1).to_string();
        assert!(text.starts_with("30 classes, 87.50% right") && text.contains("0 taken for 1"), "{text}");
    }
}
