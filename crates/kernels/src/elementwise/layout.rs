//! Broadcasting, reduced to as few loops as the shapes allow.
//!
//! Dims of size 1 vanish, and neighbours merge when every input walks them as one. What is left of each input is a
//! stride for each dim, and the innermost stride is always 0 or 1.

use super::expr::{Expr, ExprError};

/// How an input is walked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum InputWalk {
    /// It has the output's shape: the same flat position.
    Full,
    /// One value for all.
    Uniform,
    /// The same run of values for every row.
    Cycle,
    /// A run of values for each row.
    Row,
    /// One value for each row.
    Splat,
}

/// The loops of an output and the strides of its inputs.
#[derive(Clone, Debug)]
pub(crate) struct LoopLayout {
    /// Sizes, outermost first; at least one.
    pub dims: Vec<usize>,
    /// For each input, its stride for each of `dims`.
    pub strides: Vec<[usize; Expr::RANK_MAX]>,
    /// For each input, how it is walked.
    pub walks: Vec<InputWalk>,
    /// For each input, how many floats it has.
    pub lens: Vec<usize>,
    /// How many floats an output has.
    pub len: usize,
}

impl LoopLayout {
    pub(crate) fn new(out: &[usize], inputs: &[&[usize]]) -> Result<LoopLayout, ExprError> {
        if out.len() > Expr::RANK_MAX {
            return Err(ExprError::Rank(out.len()));
        }
        let mut full_strides = Vec::new();
        for (k, shape) in inputs.iter().enumerate() {
            let refused = || ExprError::Broadcast { input: k, shape: shape.to_vec(), out: out.to_vec() };
            full_strides.push(strides_of(out, shape).ok_or_else(refused)?);
        }
        let (mut dims, mut kept): (Vec<usize>, Vec<usize>) = (Vec::new(), Vec::new());
        for (d, &size) in out.iter().enumerate() {
            if size == 1 {
                continue;
            }
            if let (Some(last), Some(inner)) = (dims.last_mut(), kept.last_mut())
                && full_strides.iter().all(|s| s[*inner] == s[d] * size)
            {
                *last *= size;
                *inner = d;
                continue;
            }
            dims.push(size);
            kept.push(d);
        }
        let mut strides = vec![[0; Expr::RANK_MAX]; inputs.len()];
        for (mine, full) in strides.iter_mut().zip(&full_strides) {
            for (s, &d) in mine.iter_mut().zip(&kept) {
                *s = full[d];
            }
        }
        if dims.is_empty() {
            dims.push(1);
        }
        let walks = strides.iter().map(|s| walk_of(&dims, s)).collect();
        let lens = inputs.iter().map(|s| s.iter().product()).collect();
        Ok(LoopLayout { dims, strides, walks, lens, len: out.iter().product() })
    }

    /// The size of the innermost loop.
    pub(crate) fn inner(&self) -> usize {
        self.dims[self.dims.len() - 1]
    }
}

/// An input's stride for each of the output's dims; 0 where it is broadcast.
fn strides_of(out: &[usize], shape: &[usize]) -> Option<[usize; Expr::RANK_MAX]> {
    let missing = out.len().checked_sub(shape.len())?;
    let mut strides = [0; Expr::RANK_MAX];
    let mut stride = 1;
    for (d, &size) in shape.iter().enumerate().rev() {
        if size != 1 && size != out[missing + d] {
            return None;
        }
        if size != 1 {
            strides[missing + d] = stride;
        }
        stride *= size;
    }
    Some(strides)
}

fn walk_of(dims: &[usize], strides: &[usize; Expr::RANK_MAX]) -> InputWalk {
    let mut expected = 1;
    let mut full = true;
    for (d, &size) in dims.iter().enumerate().rev() {
        full &= strides[d] == expected;
        expected *= size;
    }
    if full {
        InputWalk::Full
    } else if strides.iter().all(|&s| s == 0) {
        InputWalk::Uniform
    } else if strides[dims.len() - 1] == 1 {
        if strides[..dims.len() - 1].iter().all(|&s| s == 0) { InputWalk::Cycle } else { InputWalk::Row }
    } else {
        InputWalk::Splat
    }
}

/// A place in the loops outside the innermost one, with each input's offset there.
#[derive(Clone, Copy)]
pub(crate) struct RowCursor {
    idx: [usize; Expr::RANK_MAX],
    /// For each input, the offset of the row's first value.
    pub offsets: [usize; Expr::INPUTS_MAX],
}

impl RowCursor {
    /// At row number `row`.
    #[inline]
    pub(crate) fn new(layout: &LoopLayout, mut row: usize) -> RowCursor {
        let mut cursor = RowCursor { idx: [0; Expr::RANK_MAX], offsets: [0; Expr::INPUTS_MAX] };
        for d in (0..layout.dims.len() - 1).rev() {
            // The outermost index needs no division: it is what is left.
            let at = if d == 0 { row } else { row % layout.dims[d] };
            if d > 0 {
                row /= layout.dims[d];
            }
            cursor.idx[d] = at;
            for (offset, strides) in cursor.offsets.iter_mut().zip(&layout.strides) {
                *offset += at * strides[d];
            }
        }
        cursor
    }

    /// Moves to the next row.
    pub(crate) fn advance(&mut self, layout: &LoopLayout) {
        for d in (0..layout.dims.len() - 1).rev() {
            self.idx[d] += 1;
            let carry = self.idx[d] == layout.dims[d] && d > 0;
            if carry {
                self.idx[d] = 0;
            }
            for (offset, strides) in self.offsets.iter_mut().zip(&layout.strides) {
                *offset += strides[d];
                if carry {
                    *offset -= strides[d] * layout.dims[d];
                }
            }
            if !carry {
                return;
            }
        }
    }
}
