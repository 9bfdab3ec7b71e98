//! A member's side of the protocol, as a pure function of what it is told and what happens to it.

use super::message::{Formation, ToMember};

/// Where a member stands.
#[derive(Clone, Debug)]
pub struct Seat {
    /// The last generation that it was told to form; 0 for none.
    generation: u64,
    /// Whether it is in that generation still.
    inside: bool,
}

/// What a member does about something.
#[derive(Clone, PartialEq, Debug)]
pub enum SeatAction {
    /// Joins the ranks of a generation.
    Enter(Box<Formation>),
    /// Ends its waits for other ranks.
    Cancel,
    /// Leaves the generation at the end of its step, together with the others.
    LeaveAtStepEnd,
    /// Ends.
    End {
        /// Why, in words; nothing if the run is finished.
        why: Option<String>,
    },
    /// Nothing: it is about a generation that is over for this member, or news.
    Nothing,
}

impl Seat {
    /// A member that was in no generation yet.
    pub fn new() -> Seat {
        Seat { generation: 0, inside: false }
    }

    /// The last generation that it was in.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The coordinator says something.
    pub fn told(&mut self, message: ToMember) -> SeatAction {
        match message {
            ToMember::Form(form) if !self.inside && form.generation > self.generation => {
                (self.generation, self.inside) = (form.generation, true);
                SeatAction::Enter(form)
            }
            ToMember::Cancel { generation, .. } if self.is_in(generation) => SeatAction::Cancel,
            ToMember::Change { generation } if self.is_in(generation) => SeatAction::LeaveAtStepEnd,
            ToMember::End { why } => SeatAction::End { why },
            ToMember::Refused { why } => SeatAction::End { why: Some(why) },
            ToMember::Form(_)
            | ToMember::Cancel { .. }
            | ToMember::Change { .. }
            | ToMember::Welcome { .. }
            | ToMember::Alive
            | ToMember::Tally(_)
            | ToMember::Status(_) => SeatAction::Nothing,
        }
    }

    /// Its generation is over for it: it failed, was cancelled, or ended at the end of a step.
    pub fn left(&mut self) {
        self.inside = false;
    }

    fn is_in(&self, generation: u64) -> bool {
        self.inside && self.generation == generation
    }
}

impl Default for Seat {
    fn default() -> Seat {
        Seat::new()
    }
}
