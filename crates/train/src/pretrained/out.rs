//! The model that a run ends with, as a file: in our names, or in those of its family.

use std::cell::RefCell;
use std::ops::Range;
use std::path::Path;

use polyreme_dtype::DType;

use super::Family;
use super::names::{OutwardTensor, to_theirs, transposed};
use crate::checkpoint::CheckpointError;
use crate::checkpoint::tensors::TensorSource;
use crate::low_rank::{Selected, Selection};
use crate::weights::write_tensors;
use crate::whole::WholeModel;

/// What is asked of a source at once: sources of several ranks gather it.
const ASKED: usize = 1 << 20;

/// How a run's model is written.
#[derive(Clone, Default, Debug)]
pub struct ModelFile {
    /// Whose names it has, if not ours.
    pub family: Option<Family>,
    /// Which tensors it has.
    pub tensors: Selection,
    /// What its header says beside its tensors.
    pub about: Vec<(String, String)>,
}

impl ModelFile {
    /// Writes tensors of a model, by name, dims and type, with their numbers, and the counter of batches beside batch norms.
    pub(crate) fn write(
        &self,
        path: &Path,
        whole: &WholeModel,
        tensors: &[(&str, &[usize], DType)],
        batches: u64,
        numbers: &(impl TensorSource + ?Sized),
    ) -> Result<(), CheckpointError> {
        let numbers = &Selected::new(self.tensors, whole, tensors, numbers);
        let tensors: Vec<_> = numbers.tensors().iter().map(|k| tensors[*k]).collect();
        let Some(family) = self.family else {
            return write_tensors(path, tensors.iter().copied(), Some(batches), &self.about, numbers);
        };
        let mut heads = Vec::new();
        for (tensor, (name, dims, dtype)) in tensors.iter().enumerate() {
            heads.extend(to_theirs(family, name, dims).into_iter().map(|theirs| (tensor, *dtype, theirs)));
        }
        let names = heads.iter().map(|(_, dtype, t)| (t.name.as_str(), t.dims.as_slice(), *dtype));
        let source = Translated { heads: &heads, numbers, last: RefCell::new((usize::MAX, Vec::new())) };
        write_tensors(path, names, Some(batches), &self.about, &source)
    }
}

/// Numbers as they lie in the files of a family: tensor by tensor, the last one kept, because files ask for them in parts.
struct Translated<'a, S: ?Sized> {
    /// Which of our tensors it is, and what it is there.
    heads: &'a [(usize, DType, OutwardTensor)],
    numbers: &'a S,
    last: RefCell<(usize, Vec<f32>)>,
}

impl<S: TensorSource + ?Sized> TensorSource for Translated<'_, S> {
    fn read(
        &self,
        tensor: usize,
        range: Range<usize>,
        read: &mut dyn FnMut(&[f32]),
    ) -> Result<(), CheckpointError> {
        let (ours, _, theirs) = &self.heads[tensor];
        if !theirs.turned {
            let start = theirs.range.start;
            return self.numbers.read(*ours, start + range.start..start + range.end, read);
        }
        let mut last = self.last.borrow_mut();
        if last.0 != tensor {
            let mut all = Vec::with_capacity(theirs.range.len());
            for start in theirs.range.clone().step_by(ASKED) {
                let part = start..(start + ASKED).min(theirs.range.end);
                self.numbers.read(*ours, part, &mut |numbers| all.extend_from_slice(numbers))?;
            }
            let (rows, columns) = (theirs.dims[1], theirs.dims[0]);
            *last = (tensor, transposed(&all, rows, columns));
        }
        read(&last.1[range]);
        Ok(())
    }
}
