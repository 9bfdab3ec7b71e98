//! Files of a model that several ranks have together: rank 0 writes them, and gathers each block from the ranks that have it
//! when the writer asks for it. So a file is that of one rank, and no rank ever has the whole model. Training waits until the
//! file is written.
//!
//! If a rank dies, the gather fails, the writer gets no answer and gives up, and nothing of the file is left.

use std::borrow::Cow;
use std::sync::mpsc::Receiver;

use polyreme_collective::Comm;
use polyreme_exec::Slot;

use crate::checkpoint::{NumbersRequest, TensorShape};
use crate::error::TrainError;
use crate::whole::Owners;

/// One rank's part of a file.
pub(crate) struct ServedFile<'a> {
    owners: &'a Owners,
    /// By tensor of the file: where this rank's elements of it are.
    places: Vec<Option<(usize, Slot)>>,
    arenas: Vec<Cow<'a, [f32]>>,
}

impl<'a> ServedFile<'a> {
    /// A file of `tensors`, of which this rank has what is in these arenas.
    pub(crate) fn new(
        tensors: &[TensorShape],
        owners: &'a Owners,
        arenas: Vec<(Vec<Slot>, Cow<'a, [f32]>)>,
    ) -> ServedFile<'a> {
        let place = |t: &TensorShape| {
            let of = |(k, (slots, _)): (usize, &(Vec<Slot>, Cow<[f32]>))| {
                slots.iter().find(|slot| slot.name == t.name).map(|slot| (k, slot.clone()))
            };
            arenas.iter().enumerate().find_map(of)
        };
        let places = tensors.iter().map(place).collect();
        ServedFile { owners, places, arenas: arenas.into_iter().map(|(_, numbers)| numbers).collect() }
    }

    /// This rank's elements of a tensor.
    fn mine(&self, tensor: usize) -> &[f32] {
        match &self.places[tensor] {
            Some((arena, slot)) => &self.arenas[*arena][slot.range.clone()],
            None => &[],
        }
    }
}

/// The number of a file that ends it.
const END: i64 = -1;

/// Answers what the writer of rank 0 asks, until it asks no more. Collective: the others [`follow`].
pub(crate) fn serve(
    comm: &mut Comm,
    files: &[ServedFile],
    requests: Receiver<NumbersRequest>,
) -> Result<(), TrainError> {
    for NumbersRequest { file, tensor, range, answer } in requests {
        comm.broadcast(&mut [file, tensor, range.start, range.end].map(|n| n as i64), 0)?;
        let served = &files[file];
        let numbers = served.owners.gather(comm, tensor, range, served.mine(tensor))?;
        // A writer that failed meanwhile needs no answer.
        let _ = answer.send(numbers);
    }
    Ok(comm.broadcast(&mut [END; 4], 0)?)
}

/// What other ranks than 0 do meanwhile. Collective, with [`serve`].
pub(crate) fn follow(comm: &mut Comm, files: &[ServedFile]) -> Result<(), TrainError> {
    loop {
        let mut request = [0i64; 4];
        comm.broadcast(&mut request, 0)?;
        if request[0] == END {
            return Ok(());
        }
        let [file, tensor, start, end] = request.map(|n| usize::try_from(n).unwrap_or(usize::MAX));
        let served = files.get(file).filter(|served| tensor < served.places.len());
        let served =
            served.ok_or_else(|| TrainError::Progress("rank 0 asks for a file that there is not".into()))?;
        served.owners.gather(comm, tensor, start..end, served.mine(tensor))?;
    }
}
