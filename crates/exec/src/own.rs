//! Parameters that each replica keeps for itself, where replicas take steps by themselves: what checkpoints need of them. In an arena they lie
//! behind those that replicas have in common.

use polyreme_graph::Axis;
use polyreme_graph::memory::own_range;

use crate::arena::floats;
use crate::engine::Engine;
use crate::error::ExecError;
use crate::group::even_cuts;
use crate::weights::{Kept, Slot};

impl Engine {
    /// Their ranges, counted from the first of them, in the order of their declaration.
    pub fn own_slots(&self) -> Vec<Slot> {
        let own = own_range(&self.layout().body.graph);
        let inside = |slot: &Slot| {
            !slot.range.is_empty() && own.start <= slot.range.start && slot.range.end <= own.end
        };
        let moved =
            |slot: Slot| Slot { range: slot.range.start - own.start..slot.range.end - own.start, ..slot };
        self.param_slots().into_iter().filter(inside).map(moved).collect()
    }

    /// How many elements they have.
    pub fn own_len(&self) -> usize {
        own_range(&self.layout().body.graph).len()
    }

    /// Collective: gathers those of all ranks on rank 0, in rank order; empty on other ranks.
    pub fn gather_own(&mut self) -> Result<Vec<f32>, ExecError> {
        let (rank, ranks) = (self.role().rank, self.role().ranks);
        let own = own_range(&self.layout().body.graph);
        let mut all = floats(if rank == 0 { ranks * own.len() } else { 0 }, "what each rank has for itself")?;
        let cuts = even_cuts(ranks, own.len());
        let mine = &self.memory.state.kept(Kept::Params)[own];
        let group = self.group.as_mut().expect("an engine that joined");
        group.comms.along(Axis::Data).gather(mine, (rank == 0).then_some(&mut all[..]), &cuts, 0)?;
        Ok(all)
    }

    /// Collective, the reverse: scatters them from rank 0, to each rank its own.
    pub fn scatter_own(&mut self, from: Option<&[f32]>) -> Result<(), ExecError> {
        let own = own_range(&self.layout().body.graph);
        let cuts = even_cuts(self.role().ranks, own.len());
        let group = self.group.as_mut().expect("an engine that joined");
        let mine = &mut self.memory.state.kept_mut(Kept::Params)[own];
        Ok(group.comms.along(Axis::Data).scatter(mine, from, &cuts, 0)?)
    }
}
