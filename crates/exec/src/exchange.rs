//! The exchanges of a step: what is handed to the other ranks, when it is waited for, and what this rank takes out of
//! the sums.

use std::time::Instant;

use polyreme_collective::{Reduce, Span, Work};
use polyreme_graph::Exchange;
use polyreme_graph::memory::ALIGN_BYTES;
use polyreme_kernels::Cx;

use crate::engine::Engine;
use crate::error::ExecError;
use crate::group::Group;
use crate::step::{add, add_or_set};
use crate::timeline::MomentKind;

impl Engine {
    /// Whether an exchange adds up a bucket.
    pub(crate) fn sums_gradients(&self, exchange: usize) -> bool {
        matches!(self.program.exchanges[exchange], Exchange::SumGrads { .. })
    }

    /// Nothing is under way; `empty` if this rank adds nothing to the sums of gradients.
    pub(crate) fn begin_exchanges(&mut self, empty: bool) {
        let n = self.program.exchanges.len();
        let group = self.group.as_mut().expect("an engine that joined");
        group.empty = empty;
        group.tickets.clear();
        group.tickets.resize(n, None);
    }

    /// Hands over the loss, the weights and the caller's numbers.
    pub(crate) fn start_totals(&mut self, at: usize, extra: [f64; 2]) {
        let role_ranks = self.role().ranks;
        let Group { comm, totals, tickets, .. } = self.group.as_mut().expect("an engine that joined");
        (totals[2], totals[3]) = (extra[0], extra[1]);
        if role_ranks > 1 {
            let work = Work::AllReduce(Span::of(&mut totals[..]), Reduce::Sum);
            // SAFETY: the totals lie on the heap and are not touched before `wait`.
            tickets[at] = Some((unsafe { comm.start(work) }, Instant::now()));
        }
    }

    /// Hands over gradients that are complete, or parameters that are updated.
    pub(crate) fn start(&mut self, at: usize) {
        if self.program.buffers.is_some() {
            self.fill_up(at);
        }
        let group = self.group.as_mut().expect("an engine that joined");
        let work = match &self.program.exchanges[at] {
            Exchange::Totals => unreachable!("totals are started with the caller's numbers"),
            Exchange::SumGrads { range, cuts, at } => {
                if group.pieces > 0 && self.program.buffers.is_none() {
                    let cx = Cx { isa: self.options.isa, par: &self.pool };
                    let (grads, sums) = self.memory.grads_and_sums(range.clone());
                    add(&cx, grads, sums);
                }
                let span = Span::of(self.memory.grads_range(*at..at + range.len()));
                match cuts {
                    Some(cuts) => Work::ReduceScatter(span, cuts.clone(), Reduce::Sum),
                    None => Work::AllReduce(span, Reduce::Sum),
                }
            }
            Exchange::GatherParams { range, cuts } => {
                Work::AllGather(self.memory.params_span(range.clone()), cuts.clone())
            }
            Exchange::Meet => return,
        };
        // SAFETY: these elements are not touched before `wait`: their gradients are complete, or their update is done.
        let ticket = unsafe { group.comm.start(work) };
        group.tickets[at] = Some((ticket, Instant::now()));
    }

    /// Zeros where a buffer still has something of another bucket: between tensors, or all over if this rank has no
    /// samples.
    fn fill_up(&mut self, exchange: usize) {
        let Exchange::SumGrads { range, at, .. } = &self.program.exchanges[exchange] else { return };
        let empty = self.group.as_ref().is_some_and(|g| g.empty);
        let buffer = self.memory.grads_range(*at..at + range.len());
        if empty {
            return buffer.fill(0.0);
        }
        let first = self.tensors.partition_point(|t| t.start < range.start);
        for tensor in self.tensors[first..].iter().take_while(|t| t.start < range.end) {
            let end = tensor.end.next_multiple_of(ALIGN_BYTES / 4);
            buffer[tensor.end - range.start..end - range.start].fill(0.0);
        }
    }

    /// Adds this rank's part of a sum to its own gradients.
    pub(crate) fn take(&mut self, exchange: usize, to: usize) {
        let Exchange::SumGrads { cuts: Some(cuts), at, .. } = &self.program.exchanges[exchange] else {
            unreachable!("parts are taken out of sums that are cut")
        };
        let rank = self.role().rank;
        let first = self.group.as_ref().is_some_and(|g| g.pieces == 0);
        let cx = Cx { isa: self.options.isa, par: &self.pool };
        let (sum, own) = self.memory.buffer_and_own(at + cuts[rank]..at + cuts[rank + 1], to);
        add_or_set(&cx, own, sum, first);
    }

    /// Waits for an exchange; after the totals, an error if the step cannot be taken.
    pub(crate) fn wait(&mut self, at: usize) -> Result<(), ExecError> {
        let ranks = self.role().ranks;
        let began = Instant::now();
        let group = self.group.as_mut().expect("an engine that joined");
        let ticket = group.tickets.get_mut(at).and_then(Option::take);
        match (&self.program.exchanges[at], ticket) {
            (Exchange::Meet, _) => group.comm.barrier()?,
            (_, Some((ticket, _))) => group.comm.wait(ticket)?,
            (_, None) => {}
        }
        group.waited += began.elapsed();
        if let (Some(timeline), true) = (&mut self.timeline, ranks > 1) {
            let name = || format!("{:?}", self.program.exchanges[at]);
            if let Some((_, started)) = ticket {
                timeline.push(name, MomentKind::Exchange, self.step, started);
            }
            timeline.push(name, MomentKind::Wait, self.step, began);
        }
        if matches!(self.program.exchanges[at], Exchange::Totals) {
            self.look_at_totals()?;
        }
        Ok(())
    }

    /// After the totals are known everywhere: whether the step can be taken.
    pub(crate) fn look_at_totals(&mut self) -> Result<(), ExecError> {
        let alone = self.role().ranks == 1;
        let group = self.group.as_mut().expect("an engine that joined");
        let (loss, here) = (group.totals[0], group.not_finite_here);
        if !loss.is_finite() {
            // What is under way works on this engine's memory.
            for (ticket, _) in group.tickets.iter_mut().filter_map(Option::take) {
                group.comm.wait(ticket)?;
            }
            return Err(ExecError::NotFinite { loss, here });
        }
        if alone && group.pieces > 0 {
            let cx = Cx { isa: self.options.isa, par: &self.pool };
            let (grads, sums) = self.memory.grads_and_sums(0..self.memory.all_grads().len());
            add(&cx, grads, sums);
        }
        self.grad_norm = None;
        Ok(())
    }
}
