//! Whether AMX is used, for those who report it.

use std::fmt;

/// Whether this process can use AMX, and why not.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AmxState {
    /// It can.
    Ready,
    /// The CPU has no AMX with bf16, or the system does not save its registers.
    Absent,
    /// The system refused tile registers to this process, with this error number.
    Refused(i32),
    /// A product had other bits than its twin.
    Differs,
}

impl fmt::Display for AmxState {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            AmxState::Ready => f.write_str("AMX is used"),
            AmxState::Absent => f.write_str("no AMX with bf16 on this CPU or system"),
            AmxState::Refused(errno) => {
                write!(f, "AMX is not used: the system refused its tile registers (error {errno})")
            }
            AmxState::Differs => {
                f.write_str("AMX is not used: its product of a test differs from what the manual says")
            }
        }
    }
}

/// Whether this process can use AMX for [`super::PairOrder::Tiles`], and why not. The first call asks the system for tile
/// registers and checks a product. Whether a kernel uses AMX also depends on the [`crate::Isa`] that it is given.
pub fn amx_state() -> AmxState {
    #[cfg(target_arch = "x86_64")]
    {
        super::amx::state()
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        AmxState::Absent
    }
}
