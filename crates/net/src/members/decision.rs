//! What happens to the members of a job, what the coordinator does about it, and why.

use std::fmt;

use super::message::{Formation, MemberId, Ready, Returned};

/// How many generations in a row may end without a lost rank and without a step before the run is given up: then it is not a loss that
/// ends them.
pub(super) const FRUITLESS_MAX: u32 = 10;

/// Something that happened.
#[derive(Clone, PartialEq, Debug)]
pub enum MemberEvent {
    /// A process has proved the secret and wants to be a rank. `watched`: the coordinator's host runs it, so that its end is reported
    /// and it can be killed.
    Entered {
        /// Whether it is watched.
        watched: bool,
        /// The member that this process was before, if it comes back.
        was: Option<MemberId>,
    },
    /// A rank whose coordinator was lost comes to this one.
    Returned(Returned),
    /// It runs on the coordinator's host, as a process that the coordinator watches and can kill, and that can share memory with others
    /// there. Comes before it is ready.
    Here,
    /// A member can form a generation.
    Ready(Ready),
    /// A member trains.
    Running {
        /// The generation.
        generation: u64,
    },
    /// A sign of life.
    Beat {
        /// Steps done.
        step: u64,
    },
    /// A member wants to leave at the end of a step.
    Leaves,
    /// Training is complete on a member, and everything is written.
    Done {
        /// The generation.
        generation: u64,
    },
    /// Its connection has closed.
    Closed,
    /// Its own host says that its process has ended.
    Exited,
    /// The test that runs this job has killed it: stalls are counted from here.
    Struck,
}

/// What a coordinator does.
#[derive(Clone, PartialEq, Debug)]
pub enum MemberAction {
    /// These members form a generation, by rank.
    Form {
        /// Who.
        members: Vec<MemberId>,
        /// What each is told, by rank.
        forms: Vec<Formation>,
    },
    /// These members end their generation now.
    Cancel {
        /// Which.
        generation: u64,
        /// Who.
        members: Vec<MemberId>,
    },
    /// These members end their generation at the end of a step.
    Change {
        /// Which.
        generation: u64,
        /// Who.
        members: Vec<MemberId>,
    },
    /// This member is no longer one: its connection is closed, and if it is watched it is killed.
    Remove {
        /// Who.
        member: MemberId,
    },
    /// This member is let go as it wished.
    Release {
        /// Who.
        member: MemberId,
    },
    /// This process was a rank and is one no longer: it ends, or enters as new.
    Dismiss {
        /// Who.
        member: MemberId,
    },
    /// Training stands still until members come.
    Wait,
    /// All ranks train again; the tally has changed.
    Trains,
    /// The run is over.
    End {
        /// Whether it is finished.
        finished: bool,
    },
}

/// Why a coordinator does something.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Reason {
    /// All that the first generation waits for are there.
    Begin,
    /// A rank's process has ended.
    Exited(MemberId),
    /// A rank's connection has closed.
    Closed(MemberId),
    /// A rank was silent for longer than patience.
    Silent(MemberId),
    /// A rank's group failed without a loss that the coordinator knows of.
    Failed(MemberId, String),
    /// A rank has come back that was not told of its generation.
    Untold(MemberId),
    /// A rank has come back that the others went on without.
    TooLate,
    /// Ranks of a run that trains already may be on their way back.
    HoldsOff,
    /// Members want in.
    Joins(usize),
    /// A rank wants to leave.
    Leaves(MemberId),
    /// There are fewer members than the least number of ranks.
    BelowMin {
        /// Members.
        there: usize,
        /// The least number.
        min: usize,
    },
    /// Fewer than half of the last generation are there, and the others may be alive elsewhere.
    NoMajority {
        /// Of the last generation.
        there: usize,
        /// How many it had, without those whose end was reported.
        of: usize,
    },
    /// Generations end again and again without a loss.
    Fruitless(String),
    /// All ranks run.
    AllRun,
    /// Training is complete.
    Finished,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Reason::Begin => write!(f, "all ranks of the start are there"),
            Reason::Exited(id) => write!(f, "the process of member {id} ended"),
            Reason::Closed(id) => write!(f, "member {id} closed its connection"),
            Reason::Silent(id) => write!(f, "member {id} was silent for longer than `parallel.patience`"),
            Reason::Failed(id, why) => write!(f, "member {id} lost its group: {why}"),
            Reason::Untold(id) => {
                write!(f, "the coordinator was lost before member {id} was told of its generation")
            }
            Reason::TooLate => {
                write!(f, "the others went on without this rank; `polyreme join` brings it back")
            }
            Reason::HoldsOff => write!(f, "ranks that train already may be on their way back"),
            Reason::Joins(1) => write!(f, "a rank joins"),
            Reason::Joins(n) => write!(f, "{n} ranks join"),
            Reason::Leaves(id) => write!(f, "member {id} leaves"),
            Reason::BelowMin { there, min } => {
                write!(
                    f,
                    "there are {there} ranks and at least {min} are needed (`parallel.elastic.min`); waiting for more"
                )
            }
            Reason::NoMajority { there, of } => write!(
                f,
                "only {there} of {of} ranks of the last generation are there, and the others may be alive behind a cut network; waiting for them"
            ),
            Reason::Fruitless(why) => {
                write!(
                    f,
                    "{FRUITLESS_MAX} generations in a row ended without a step and without a lost rank: {why}"
                )
            }
            Reason::AllRun => write!(f, "all ranks run"),
            Reason::Finished => write!(f, "training is complete"),
        }
    }
}

/// An action and why it is taken.
#[derive(Clone, PartialEq, Debug)]
pub struct Decision {
    /// What is done.
    pub action: MemberAction,
    /// Why.
    pub why: Reason,
}
