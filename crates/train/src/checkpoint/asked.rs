//! Numbers that other ranks have: the writer of a file asks for them block by block, and the thread that can talk to the other
//! ranks answers. So no rank ever holds a whole model that several ranks hold together.

use std::ops::Range;
use std::sync::mpsc::{Sender, channel};

use super::CheckpointError;
use super::tensors::TensorSource;

/// A question of the writer.
#[derive(Debug)]
pub(crate) struct NumbersRequest {
    /// Which file it writes, by the number that it was given.
    pub(crate) file: usize,
    /// Which tensor of the file.
    pub(crate) tensor: usize,
    /// Which elements of the tensor.
    pub(crate) range: Range<usize>,
    /// Where the answer goes.
    pub(crate) answer: Sender<Vec<f32>>,
}

/// The end of the writer: a source of numbers that asks for them.
#[derive(Clone, Debug)]
pub(crate) struct AskedNumbers {
    /// The number that the file was given.
    pub(crate) file: usize,
    /// Where questions go.
    pub(crate) ask: Sender<NumbersRequest>,
}

impl TensorSource for AskedNumbers {
    fn read(
        &self,
        tensor: usize,
        range: Range<usize>,
        read: &mut dyn FnMut(&[f32]),
    ) -> Result<(), CheckpointError> {
        // Of each question alone: it closes with the thread that should have answered.
        let (answer, answers) = channel();
        let request = NumbersRequest { file: self.file, tensor, range, answer };
        self.ask.send(request).map_err(|_| CheckpointError::PeersLost)?;
        read(&answers.recv().map_err(|_| CheckpointError::PeersLost)?);
        Ok(())
    }
}
