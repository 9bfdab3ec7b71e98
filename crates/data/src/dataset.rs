//! Random access to samples: the interface between file formats and the code that chooses, transforms and batches samples.

use crate::error::DataError;
use crate::remote::FarFile;
use crate::spec::Spec;

/// A set of samples, readable in any order by any number of threads.
pub trait Dataset: Send + Sync {
    /// What every sample looks like.
    fn spec(&self) -> &Spec;

    /// How many samples there are.
    fn len(&self) -> usize;

    /// The sample `idx`, which is below `len`. What is in memory already (a mapped file) is borrowed; what
    /// must be decoded is decoded into `scratch`, whose memory is reused from call to call.
    fn fetch<'a>(&'a self, idx: usize, scratch: &'a mut Scratch) -> Result<Fetched<'a>, DataError>;

    /// The class of sample `idx` without its features, where that is cheaper; `None` for other targets than
    /// [`crate::Target::Class`].
    fn class(&self, idx: usize) -> Result<Option<usize>, DataError>;

    /// How many tokens sample `idx` has, where samples differ in length; `None` where they do not.
    fn tokens(&self, _idx: usize) -> Option<usize> {
        None
    }

    /// How many labels of sample `idx` count, where samples have different numbers of them; `None` where all have
    /// [`Spec::n_labels`].
    fn n_counted(&self, _idx: usize) -> Option<usize> {
        None
    }

    /// Says that these samples will be fetched next with `scratch`, in any order: a set that must ask others for them asks for all at
    /// once, and waits. What was announced before and not fetched is forgotten.
    fn ahead(
        &self,
        _samples: &mut dyn Iterator<Item = usize>,
        _scratch: &mut Scratch,
    ) -> Result<(), DataError> {
        Ok(())
    }

    /// The file that sample `idx` is read from when it is needed, if that is not on this host.
    fn far(&self, _idx: usize) -> Option<FarFile<'_>> {
        None
    }

    /// An error if what was read since the set was opened may not be what its files held: a mapped file that is cut short
    /// reads as zeros. Called after samples were read. A set that wraps others may keep this default: all maps of the
    /// process are then checked.
    fn intact(&self) -> Result<(), DataError> {
        crate::map::all_intact()
    }

    /// Whether the set has no samples.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Memory for samples that must be decoded; one per thread.
#[derive(Default, Debug)]
pub struct Scratch {
    /// Decoded pixels.
    pub bytes: Vec<u8>,
    /// Decoded numbers.
    pub numbers: Vec<f32>,
    /// For labels that are numbers.
    pub targets: Vec<f32>,
    /// Decoded ids.
    pub ids: Vec<i32>,
    /// The content of a file before it is decoded.
    pub file: Vec<u8>,
    /// Samples that others have, and that were asked for.
    pub(crate) ahead: crate::spread::AheadSamples,
    /// The fields of a table's row.
    pub(crate) fields: crate::table::Fields,
    /// The buffers for decoding and scaling images.
    pub(crate) images: crate::images::ImageBuffers,
}

/// One sample as its set stores it, before any transformation.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Fetched<'a> {
    /// The features: as many as [`crate::Features::numel`], in the set's layout; one more for
    /// [`crate::Target::NextId`], so that features are `[..time]` and labels `[1..]`; the tokens of a text, however many.
    pub values: Values<'a>,
    /// The label.
    pub label: Label<'a>,
}

/// The features of one sample.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Values<'a> {
    /// Pixels or byte tokens.
    U8(&'a [u8]),
    /// Numbers of an image or a row.
    F32(&'a [f32]),
    /// Token ids of a sequence.
    I32(&'a [i32]),
}

/// The label of one sample.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Label<'a> {
    /// The index of a class.
    Class(usize),
    /// Each position's label is the next id.
    NextId,
    /// Numbers, or a 0 or 1 for each label.
    Values(&'a [f32]),
    /// A class for each token, or [`crate::spec::IGNORED`].
    Tags(&'a [i32]),
}

impl Values<'_> {
    /// The number of values.
    pub fn len(&self) -> usize {
        match self {
            Values::U8(values) => values.len(),
            Values::F32(values) => values.len(),
            Values::I32(values) => values.len(),
        }
    }

    /// Whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<'a> Label<'a> {
    /// The numbers, if they are numbers.
    pub fn values(&self) -> Option<&'a [f32]> {
        match self {
            Label::Values(values) => Some(values),
            Label::Class(_) | Label::NextId | Label::Tags(_) => None,
        }
    }
}
