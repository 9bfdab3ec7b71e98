//! Labels, the two classes of letters, and how much of each is held.

/// The class of a letter. Each class has its own connections, thread and bounds, so neither waits for the other.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Class {
    /// Membership and other decisions: short, and taken first.
    Urgent = 0,
    /// Everything that may be long.
    Data = 1,
}

impl Class {
    /// Both, in the order in which they are taken.
    pub const ALL: [Class; 2] = [Class::Urgent, Class::Data];

    /// Its name in reports and in names of threads.
    pub fn name(self) -> &'static str {
        match self {
            Class::Urgent => "urgent",
            Class::Data => "data",
        }
    }
}

/// What a sender writes on a letter: numbers that are carried and not interpreted. A request for a range needs no
/// payload beside them, and a payload needs no header of its own.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct Label {
    /// What kind of letter it is.
    pub kind: u16,
    /// Which request it makes or answers.
    pub ticket: u64,
    /// A position: the start of a range, a clock, a version.
    pub place: u64,
}

/// How much of one class is held. All ranks have the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ClassBounds {
    /// The longest letter, in bytes. A longer one is refused where it is posted, and where it would arrive.
    pub letter_bytes_max: usize,
    /// Bytes from one sender that have arrived and were not taken. Above it nothing more is read from that sender,
    /// which slows it down.
    pub inbox_bytes_max: usize,
    /// Bytes for one receiver that were posted and not sent. Above it a post waits.
    pub outbox_bytes_max: usize,
}

/// How much a mailbox holds. A letter that is longer than a bound of an inbox or outbox is held if it is the only one there, so
/// at most the larger of the two is held for each peer, class and direction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Of urgent letters.
    pub urgent: ClassBounds,
    /// Of data.
    pub data: ClassBounds,
}

impl Default for Limits {
    fn default() -> Limits {
        let urgent =
            ClassBounds { letter_bytes_max: 1 << 20, inbox_bytes_max: 1 << 20, outbox_bytes_max: 1 << 20 };
        let data =
            ClassBounds { letter_bytes_max: 1 << 30, inbox_bytes_max: 64 << 20, outbox_bytes_max: 64 << 20 };
        Limits { urgent, data }
    }
}

impl Limits {
    /// Those of a class.
    pub fn of(&self, class: Class) -> ClassBounds {
        match class {
            Class::Urgent => self.urgent,
            Class::Data => self.data,
        }
    }
}

/// What a letter counts beyond its bytes, so that empty ones are bounded too.
const LETTER_BYTES: usize = 128;

/// How much a letter of this many bytes counts.
pub(super) fn weight(bytes: usize) -> usize {
    bytes.saturating_add(LETTER_BYTES)
}

/// Whether a letter fits: within the bound, or because it is the only one.
pub(super) fn fits(held: usize, bytes: usize, max: usize) -> bool {
    held == 0 || held.saturating_add(weight(bytes)) <= max
}
