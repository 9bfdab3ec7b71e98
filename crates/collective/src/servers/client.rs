//! A worker's end: pushes, pulls and leases.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use polyreme_net::Report;
use polyreme_net::mailbox::{Class, Label, Letter, Payload};

use super::letters::{
    NO_BLOCK, PUSH_HEAD, kind, label, place_of, place_of_state, read_floats, session_and_clock, write_floats,
};
use super::{ServerMail, failed, report_of};

/// The server that has the leases.
const LEASES_AT: usize = 0;

/// What a worker that asked for a block is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LeaseAnswer {
    /// A block to compute.
    Block(u64),
    /// There is none now; another answer follows.
    Rest,
    /// The segment is over.
    Over {
        /// The first block that is not of it.
        end: u64,
    },
}

/// A worker's end of its servers.
pub struct ServerClient {
    mail: ServerMail,
    servers: usize,
    session: u64,
    joined: bool,
    clock: u64,
    /// Where its clock starts at the servers, as it was told with the last lease.
    base: Option<u64>,
    block: u64,
    /// How many questions it has asked.
    asked: u64,
    /// By range and server: memory of letters, used again when the last one was sent.
    rooms: BTreeMap<(usize, usize), Arc<Vec<u8>>>,
    /// Weights and states that came before they were waited for, by server, kind of letter and place.
    came: BTreeMap<(usize, u16, u64), Letter>,
    /// Answers of the leases.
    told: VecDeque<LeaseAnswer>,
    sent_bytes: u64,
}

/// A push that is being written.
pub struct GradientLetter<'a> {
    client: &'a mut ServerClient,
    at: (usize, usize),
    bytes: Vec<u8>,
    written: usize,
}

impl GradientLetter<'_> {
    /// The next numbers of it.
    ///
    /// # Panics
    /// If they are more than it was to have.
    pub fn extend(&mut self, numbers: &[f32]) {
        let end = self.written + 4 * numbers.len();
        write_floats(numbers, &mut self.bytes[self.written..end]);
        self.written = end;
    }

    /// Posts it.
    pub fn push(self) -> Result<(), Report> {
        let GradientLetter { client, at: (server, range), bytes, written } = self;
        debug_assert_eq!(written, bytes.len(), "all numbers are there");
        let bytes = Arc::new(bytes);
        client.rooms.insert((server, range), bytes.clone());
        let label = label(kind::PUSH, client.session, client.clock, place_of(client.block, range));
        client.post(server, Class::Data, label, Payload::from(bytes))
    }
}

impl ServerClient {
    /// The end of this rank; there are servers on the first ranks.
    pub fn new(mail: ServerMail, servers: usize) -> ServerClient {
        ServerClient {
            mail,
            servers,
            session: 0,
            joined: false,
            clock: 0,
            base: None,
            block: 0,
            asked: 0,
            rooms: BTreeMap::new(),
            came: BTreeMap::new(),
            told: VecDeque::new(),
            sent_bytes: 0,
        }
    }

    /// Bytes that this worker has put on the wire.
    pub fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    /// Begins a session with all servers, unless there is one.
    pub fn join(&mut self) -> Result<(), Report> {
        if !self.joined {
            (self.session, self.clock, self.joined) = (self.session + 1, 0, true);
            self.tell_all(kind::JOIN, self.base.unwrap_or(NO_BLOCK))?;
        }
        Ok(())
    }

    /// Ends the session: no worker waits for this one any more.
    pub fn leave(&mut self) -> Result<(), Report> {
        if self.joined {
            (self.joined, self.base) = (false, None);
            self.tell_all(kind::LEAVE, 0)?;
        }
        Ok(())
    }

    /// The gradients that follow are of this block.
    pub fn begin(&mut self, block: u64) {
        self.block = block;
    }

    /// All ranges of the block were pushed, and the weights have come.
    pub fn end(&mut self) {
        self.clock += 1;
    }

    /// Pushes the gradient of a range. `weight` is that of its samples, `scale` what it is to be multiplied by.
    pub fn push(
        &mut self,
        at: (usize, usize),
        weight_and_scale: (f64, f64),
        gradient: &[f32],
    ) -> Result<(), Report> {
        let mut letter = self.gradient(at, weight_and_scale, gradient.len());
        letter.extend(gradient);
        letter.push()
    }

    /// The same for a gradient of `len` numbers that do not lie beside each other.
    pub fn gradient(
        &mut self,
        (server, range): (usize, usize),
        (weight, scale): (f64, f64),
        len: usize,
    ) -> GradientLetter<'_> {
        let room = self.rooms.entry((server, range)).or_default();
        let mut bytes = Arc::get_mut(room).map(std::mem::take).unwrap_or_default();
        // As long as the last one, so nothing is written twice.
        bytes.resize(PUSH_HEAD + 4 * len, 0);
        bytes[..8].copy_from_slice(&weight.to_le_bytes());
        bytes[8..PUSH_HEAD].copy_from_slice(&scale.to_le_bytes());
        GradientLetter { client: self, at: (server, range), bytes, written: PUSH_HEAD }
    }

    /// Asks for a range, as it is when this block is in it.
    pub fn pull(&mut self, at: (usize, usize)) -> Result<(), Report> {
        self.ask_for(at, self.clock + 1)
    }

    /// Asks for a range as it is.
    pub fn pull_now(&mut self, at: (usize, usize)) -> Result<(), Report> {
        self.ask_for(at, self.clock)
    }

    fn ask_for(&mut self, (server, range): (usize, usize), clock: u64) -> Result<(), Report> {
        // Behind the pushes, in their class.
        let label = label(kind::PULL, self.session, clock, range as u64);
        self.post(server, Class::Data, label, Payload::from(Vec::new()))
    }

    /// Waits for a range that was asked for.
    pub fn receive(&mut self, (server, range): (usize, usize), into: &mut [f32]) -> Result<(), Report> {
        self.receive_letter((server, kind::WEIGHTS, range as u64), into)
    }

    /// Asks for the optimizer's state number `which` of a range, as it is.
    pub fn pull_state(&mut self, (server, range): (usize, usize), which: usize) -> Result<(), Report> {
        let label = label(kind::PULL_STATE, self.session, self.clock, place_of_state(range, which));
        self.post(server, Class::Data, label, Payload::from(Vec::new()))
    }

    /// Waits for it.
    pub fn receive_state(
        &mut self,
        (server, range): (usize, usize),
        which: usize,
        into: &mut [f32],
    ) -> Result<(), Report> {
        self.receive_letter((server, kind::STATE, place_of_state(range, which)), into)
    }

    fn receive_letter(&mut self, at: (usize, u16, u64), into: &mut [f32]) -> Result<(), Report> {
        loop {
            if let Some(letter) = self.came.remove(&at) {
                if letter.len() != 4 * into.len() {
                    let what = format!("it sent {} bytes for {} numbers", letter.len(), into.len());
                    return Err(failed(at.0, what));
                }
                read_floats(&letter, into);
                return Ok(());
            }
            self.take()?;
        }
    }

    /// Whether the server beside this rank has the leases.
    pub fn is_beside_leases(&self) -> bool {
        self.mail.rank() == LEASES_AT
    }

    /// Begins a segment: these blocks are to be done, or those that are begun within `longest`. Only for the rank beside the leases.
    pub fn open(&mut self, segment: u64, blocks: Range<u64>, longest: Duration) -> Result<(), Report> {
        let label = Label { kind: kind::OPEN, ticket: segment, place: blocks.start };
        let numbers = [blocks.end, longest.as_micros() as u64].map(u64::to_le_bytes);
        self.post(LEASES_AT, Class::Data, label, Payload::from(numbers.concat()))
    }

    /// Asks for a block; `done` is the last one that it got, if it is in all ranges now.
    pub fn ask(&mut self, segment: u64, done: Option<u64>, stop: bool) -> Result<(), Report> {
        self.ask_as(if stop { kind::ASK_AND_STOP } else { kind::ASK }, segment, done)
    }

    /// Asks for no block, and to be told when the segment is over: for a rank that only serves.
    pub fn watch(&mut self, segment: u64, stop: bool) -> Result<(), Report> {
        self.ask_as(if stop { kind::WATCH_AND_STOP } else { kind::WATCH }, segment, None)
    }

    fn ask_as(&mut self, kind: u16, segment: u64, done: Option<u64>) -> Result<(), Report> {
        self.asked += 1;
        let label = label(kind, segment, self.asked, done.unwrap_or(NO_BLOCK));
        self.post(LEASES_AT, Class::Data, label, Payload::from(Vec::new()))
    }

    /// The next answer of the leases to the last question.
    pub fn answer(&mut self) -> Result<LeaseAnswer, Report> {
        loop {
            if let Some(answer) = self.told.pop_front() {
                return Ok(answer);
            }
            self.take()?;
        }
    }

    /// The same with a deadline, after which it returns `None`. For a rank that expects no other letters.
    pub fn answer_until(&mut self, until: Instant) -> Result<Option<LeaseAnswer>, Report> {
        loop {
            if let Some(answer) = self.told.pop_front() {
                return Ok(Some(answer));
            }
            let Some(letter) = self.mail.to_workers.take_until(until)? else { return Ok(None) };
            self.put(letter)?;
        }
    }

    /// The mailboxes, to be closed.
    pub fn into_mail(self) -> ServerMail {
        self.mail
    }

    /// Waits for a letter and puts it where it is looked for.
    fn take(&mut self) -> Result<(), Report> {
        let Some(letter) = self.mail.to_workers.take()? else {
            return Err(failed(self.mail.rank(), "its mailbox was closed while it waited".into()));
        };
        self.put(letter)
    }

    fn put(&mut self, letter: Letter) -> Result<(), Report> {
        let (place, from) = (letter.label.place, letter.from);
        match letter.label.kind {
            kind @ (kind::WEIGHTS | kind::STATE) => {
                let (session, _) = session_and_clock(letter.label.ticket);
                if session == self.session {
                    self.came.insert((from, kind, place), letter);
                }
            }
            // A question that was asked again is answered again.
            kind::LEASE | kind::REST | kind::OVER if letter.label.ticket != self.asked => {}
            kind::LEASE => {
                let Ok(clock) = letter[..].try_into() else {
                    return Err(failed(from, "it sent a lease without a clock".into()));
                };
                self.base = Some(u64::from_le_bytes(clock));
                self.told.push_back(LeaseAnswer::Block(place));
            }
            kind::REST => self.told.push_back(LeaseAnswer::Rest),
            kind::OVER => self.told.push_back(LeaseAnswer::Over { end: place }),
            kind::REFUSED => {
                let why = String::from_utf8_lossy(&letter).into_owned();
                return Err(failed(self.mail.rank(), format!("server {from} refused it: {why}")));
            }
            other => return Err(failed(from, format!("it sent a letter of kind {other} to a worker"))),
        }
        Ok(())
    }

    fn tell_all(&mut self, kind: u16, place: u64) -> Result<(), Report> {
        for server in 0..self.servers {
            let label = label(kind, self.session, self.clock, place);
            self.post(server, Class::Data, label, Payload::from(Vec::new()))?;
        }
        Ok(())
    }

    fn post(&mut self, to: usize, class: Class, label: Label, payload: Payload) -> Result<(), Report> {
        self.sent_bytes += self.mail.wire_bytes(to, payload.len());
        self.mail.to_servers.post(to, class, label, payload).map_err(|error| report_of(error, to))
    }
}
