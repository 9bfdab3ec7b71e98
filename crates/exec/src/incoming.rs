//! What is learnt, on its way to a rank that enters a group which trains.
//!
//! Parameters and moments do not change between two updates. So ranks that have them lend them ([`crate::loan`]) and send them in parts, each
//! rank others, while all compute the next step. The rank that enters has no samples of that step: it needs nothing of what is
//! learnt before the sums of the step are complete. Then it waits for the rest, takes it over, and makes the same update as all others.
//!
//! Which thread brings the parts, and over what, is the caller's business.

use std::ops::Range;

use polyreme_dtype::bf16;
use polyreme_kernels::Serial;
use polyreme_kernels::floats::FloatsMut;

use crate::engine::Engine;
use crate::error::ExecError;
use crate::loan::Loan;
use crate::state::{LearntState, Lengths, SharedBlocks, State};
use crate::weights::Kept;

/// Elements of one part: 4 MiB of f32.
const PART_LEN: usize = 1 << 20;
/// The bytes of a number as it travels.
const NUMBER_BYTES: usize = 4;
/// What travels.
const TRAVELS: [Kept; 3] = [Kept::Params, Kept::Moment1, Kept::Moment2];

/// The most bytes of a part.
pub const PART_BYTES_MAX: usize = PART_LEN * NUMBER_BYTES;

/// Waits for what is learnt, and returns it.
pub type Arrival = Box<dyn FnOnce() -> Result<LearntState, ExecError> + Send>;

/// A part of what is learnt: elements of an arena. Ranks count parts in the order of [`Engine::learnt_parts`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LearntPart {
    what: Kept,
    range: Range<usize>,
}

/// What a rank that enters has received so far.
pub struct IncomingState {
    state: State,
    /// By number: parts that have not come yet.
    missing: Vec<Option<LearntPart>>,
    left: usize,
}

impl IncomingState {
    /// Whether all of it has come.
    pub fn is_whole(&self) -> bool {
        self.left == 0
    }

    /// Takes a part over, as [`Loan::read_part`] wrote it; `false` if it has come before, or is none.
    #[must_use]
    pub fn put(&mut self, number: usize, bytes: &[u8]) -> bool {
        let missing = self.missing.get_mut(number);
        let fits = |part: &mut LearntPart| bytes.len() == part.range.len() * NUMBER_BYTES;
        let Some(LearntPart { what, range }) = missing.and_then(|part| part.take_if(fits)) else {
            return false;
        };
        self.left -= 1;
        let numbers =
            bytes.chunks_exact(NUMBER_BYTES).map(|x| f32::from_le_bytes(x.try_into().expect("four bytes")));
        match self.state.stored_mut(what) {
            FloatsMut::F32(all) => all[range].iter_mut().zip(numbers).for_each(|(to, x)| *to = x),
            // It was widened, so this is exact.
            FloatsMut::Bf16(all) => {
                all[range].iter_mut().zip(numbers).for_each(|(to, x)| *to = bf16::from_f32(x));
            }
            FloatsMut::F16(_) => unreachable!("moments are stored in f32 or bf16"),
        }
        true
    }

    /// What has come.
    ///
    /// # Panics
    /// If it is not whole.
    pub fn into_learnt(self) -> LearntState {
        assert!(self.is_whole(), "all parts have come");
        LearntState(self.state)
    }
}

impl Loan {
    /// Reads a part that was lent, as it travels.
    pub fn read_part(&self, part: &LearntPart) -> Vec<u8> {
        let mut bytes = vec![0; part.range.len() * NUMBER_BYTES];
        let mut at = 0;
        self.read(part.what, part.range.clone(), &mut |numbers| {
            let to = &mut bytes[at..at + numbers.len() * NUMBER_BYTES];
            at += to.len();
            to.chunks_exact_mut(NUMBER_BYTES)
                .zip(numbers)
                .for_each(|(to, x)| to.copy_from_slice(&x.to_le_bytes()));
        });
        bytes
    }
}

impl Engine {
    /// All parts of what is learnt, those first that a step updates first.
    pub fn learnt_parts(&self) -> Vec<LearntPart> {
        let lengths = TRAVELS.map(|what| (what, self.memory.state.len(what)));
        let n_parts = lengths.iter().map(|(_, len)| len.div_ceil(PART_LEN)).max().unwrap_or(0);
        let mut order = Vec::new();
        let updates =
            self.order_of_updates().into_iter().map(|r| r.start / PART_LEN..r.end.div_ceil(PART_LEN));
        for number in updates.flatten().chain(0..n_parts) {
            if !order.contains(&number) {
                order.push(number);
            }
        }
        let part = |(what, len): (Kept, usize), number: usize| {
            let range = number * PART_LEN..len.min((number + 1) * PART_LEN);
            (!range.is_empty()).then_some(LearntPart { what, range })
        };
        order.into_iter().flat_map(|number| lengths.map(|of| part(of, number))).flatten().collect()
    }

    /// Lends parts of what is learnt, as it is now, each to be read once. For a rank that updates all of it by itself.
    pub fn lend_parts(&mut self, parts: &[LearntPart]) -> Loan {
        self.lend_ranges(&parts.iter().map(|p| (p.what, vec![p.range.clone()])).collect::<Vec<_>>())
    }

    /// Memory for what is learnt, to be filled on the thread that receives it: for an engine that inherits.
    pub fn incoming(&self) -> impl FnOnce() -> Result<IncomingState, ExecError> + Send + use<> {
        let (lengths, parts) = (self.memory.state.lengths, self.learnt_parts());
        move || {
            // The engine has its own gradients and states.
            let lengths = Lengths { grads: 0, states: 0, residual: 0, factors: 0, velocity: 0, ..lengths };
            let mut state = State::blank(lengths, SharedBlocks::default(), &Serial)?;
            state.complete(&Serial)?;
            let left = parts.len();
            Ok(IncomingState { state, missing: parts.into_iter().map(Some).collect(), left })
        }
    }

    /// What is learnt comes later: this engine waits for it before its next update. Until then it must not be asked for it, and
    /// its steps have no samples.
    pub fn expect(&mut self, arrival: Arrival) {
        self.arrival = Some(arrival);
    }

    /// Whether it has what is learnt.
    pub fn has_learnt(&self) -> bool {
        self.arrival.is_none()
    }

    /// Waits for what is learnt, if it has not come yet.
    pub(crate) fn arrive(&mut self) -> Result<(), ExecError> {
        let Some(arrival) = self.arrival.take() else { return Ok(()) };
        match arrival() {
            Ok(LearntState(came)) => {
                let state = &mut self.memory.state;
                (state.params, state.moments) = (came.params, came.moments);
                Ok(())
            }
            Err(error) => {
                // It never comes now.
                let again = error.clone();
                self.arrival = Some(Box::new(move || Err(again)));
                Err(error)
            }
        }
    }
}
