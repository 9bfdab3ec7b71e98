//! Ranks that enter an elastic run while the others train.
//!
//! The ranks that have a state share the first step of the generation among themselves, and send what they have learnt beside it, each a
//! part. A rank that enters has no samples of that step. It takes part in its sums, and then waits for what it lacks, if it has not
//! come yet, and makes the update that all make ([`polyreme_exec::incoming`]). From the second step on all have samples.
//!
//! So a join holds the others for as long as it takes to form a group, and no longer, if what is learnt travels within a step. If
//! it takes longer, the update waits for it.
//!
//! # When a peer dies
//! The generation ends, as it does whoever is lost: the mailbox ends both threads. A rank whose state has not come has none, and those that
//! lent theirs overwrite it without waiting.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::{Builder, JoinHandle};

use polyreme_collective::mailbox::{Class, Label, Limits, Mailbox};
use polyreme_collective::{Cause, Report};
use polyreme_exec::{ExecError, IncomingState, LearntPart, LearntState, Loan, PART_BYTES_MAX};
use polyreme_parallel::Norms;

use super::elastic::Generation;
use super::prepared::Prepared;
use super::train::Run;
use crate::error::TrainError;

/// What a letter with a part is.
const PART: u16 = 1;
/// Parts that are under way to each rank.
const UNDER_WAY: usize = 4;

/// A thread that sends or receives what is learnt. It ends with its work, when all with whom it talked know that, or with the group.
pub(super) struct Transfer(Option<JoinHandle<()>>);

impl Drop for Transfer {
    fn drop(&mut self) {
        // If it panicked, that was seen where its result is missing.
        if let Some(thread) = self.0.take() {
            drop(thread.join());
        }
    }
}

impl Generation<'_> {
    /// Whether ranks enter it while the others train: those that have a state are as many as may train, and all of them have the same.
    pub(super) fn is_entered(&self, prepared: &Prepared) -> bool {
        let Some(held) = self.source.and_then(|source| self.held[source]) else { return false };
        let holders = self.held.iter().filter(|other| **other == Some(held)).count();
        let others = self.held.iter().filter(|other| other.is_none()).count();
        let min = prepared.job.parallel.elastic.clone().unwrap_or_default().min;
        let steps = prepared.pace.total_steps(prepared.job.train.length);
        // What follows a step, all ranks do together.
        let (step, ended) = (held / 2, held % 2 == 1);
        // Norms over all ranks need samples of each.
        let apart = prepared.learner.plan.norms != Norms::Synchronised;
        let alike = holders + others == self.held.len();
        // Servers begin with what all ranks have.
        let summed = prepared.learner.plan.servers.is_none();
        others > 0 && holders >= min && alike && ended && step < steps && !self.save_only && apart && summed
    }

    /// Shares of the first step of a generation that is entered.
    pub(super) fn first_shares(&self) -> Vec<f64> {
        self.held.iter().map(|held| f64::from(u8::from(held.is_some()))).collect()
    }
}

impl Run {
    /// Sends what is learnt to the ranks that have nothing, or receives it, while the first step goes on. Collective.
    pub(super) fn let_in(&mut self, generation: &Generation) -> Result<(), TrainError> {
        let holders: Vec<usize> =
            (0..generation.held.len()).filter(|rank| generation.held[*rank].is_some()).collect();
        let limits = bounded();
        let mail = self.learner.comm().mailbox(limits)?;
        let engine = self.learner.engine_mut();
        let parts = engine.learnt_parts().into_iter().enumerate();
        let thread = match holders.iter().position(|rank| *rank == self.rank) {
            Some(turn) => {
                let own: Vec<(usize, LearntPart)> =
                    parts.filter(|(number, _)| number % holders.len() == turn).collect();
                let lent: Vec<LearntPart> = own.iter().map(|(_, part)| part.clone()).collect();
                let loan = engine.lend_parts(&lent);
                let to: Vec<usize> =
                    (0..generation.held.len()).filter(|rank| !holders.contains(rank)).collect();
                Builder::new().name("lends".into()).spawn(move || send(&mail, &loan, own, &to))
            }
            None => {
                let (tell, told) = channel();
                let (reserve, rank) = (engine.incoming(), self.rank);
                engine.expect(Box::new(move || {
                    told.recv()
                        .unwrap_or_else(|_| Err(unexpected(rank, "the thread that receives it ended").into()))
                }));
                let receives = move || receive(&mail, rank, reserve, &tell);
                Builder::new().name("receives".into()).spawn(receives)
            }
        };
        let thread = thread.map_err(|source| TrainError::Thread { rank: self.rank, source })?;
        self.transfer = Some(Transfer(Some(thread)));
        Ok(())
    }
}

fn bounded() -> Limits {
    let mut limits = Limits::default();
    limits.data.letter_bytes_max = PART_BYTES_MAX;
    limits.data.inbox_bytes_max = UNDER_WAY * PART_BYTES_MAX;
    limits.data.outbox_bytes_max = UNDER_WAY * PART_BYTES_MAX;
    limits
}

/// Sends these parts to all who enter. What ends it early ends the generation too, which this rank hears elsewhere.
fn send(mail: &Mailbox, loan: &Loan, parts: Vec<(usize, LearntPart)>, to: &[usize]) {
    for (number, part) in parts {
        let bytes = Arc::new(loan.read_part(&part));
        let label = Label { kind: PART, ticket: 0, place: number as u64 };
        if to.iter().any(|rank| mail.post(*rank, Class::Data, label, bytes.clone()).is_err()) {
            return;
        }
    }
    drop(mail.close());
}

/// Receives all parts, and hands them over.
fn receive(
    mail: &Mailbox,
    rank: usize,
    reserve: impl FnOnce() -> Result<IncomingState, ExecError>,
    tell: &Sender<Result<LearntState, ExecError>>,
) {
    let all = || {
        let mut state = reserve()?;
        while !state.is_whole() {
            let ended = || unexpected(rank, "its mailbox is closed");
            let letter = mail.take()?.ok_or_else(ended)?;
            if letter.label.kind != PART || !state.put(letter.label.place as usize, &letter) {
                return Err(unexpected(letter.from, "it sent a part that is not missing").into());
            }
        }
        Ok(state.into_learnt())
    };
    // Nobody waits for it if the generation has ended.
    drop(tell.send(all()));
    drop(mail.close());
}

fn unexpected(rank: usize, what: &str) -> Report {
    let cause = Cause::Disagrees { what: what.into() };
    Report { rank, host: String::new(), step: 0, op: "receiving what is learnt".into(), cause }
}
