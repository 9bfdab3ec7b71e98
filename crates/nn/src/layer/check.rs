//! Checks of options before any arithmetic on them, as errors that name the layer.

use polyreme_graph::{Builder, TraceErrorKind, Traced};

/// None of these sizes may be zero.
pub(crate) fn positive(b: &Builder, op: &'static str, sizes: &[(&str, usize)]) -> Traced<()> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        Some((what, _)) => {
            b.error(TraceErrorKind::Option { op, why: format!("`{what}` is 0; it must be at least 1") })
        }
        None => Ok(()),
    }
}

/// The first must divide the second.
pub(crate) fn divides(
    b: &Builder,
    op: &'static str,
    part: (&str, usize),
    whole: (&str, usize),
) -> Traced<()> {
    positive(b, op, &[part, whole])?;
    if whole.1.is_multiple_of(part.1) {
        return Ok(());
    }
    let why = format!("`{}` of {} does not divide `{}` of {}", part.0, part.1, whole.0, whole.1);
    b.error(TraceErrorKind::Option { op, why })
}
