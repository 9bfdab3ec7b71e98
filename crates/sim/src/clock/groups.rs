//! When collectives begin, and when they are over.
//!
//! A group does one collective after the other, in the order in which each rank begins them. It starts when the last rank has
//! come to it, and all are done when its time is over. Over links a rank comes to a collective as soon as it was started and
//! those before it are done, while the rank computes; in shared memory, when the rank waits for it, or for one behind it.

use polyreme_graph::Axis;

use super::{Clock, ClockError, GroupClock, GroupPlace, RankDoing, TickOf};
use crate::exchange::GroupOp;
use crate::score::Meeting;

impl Clock<'_> {
    /// A rank comes to the next collective of its group, if it can.
    pub(super) fn arrive(&mut self, rank: usize, axis: Axis) -> Result<(), ClockError> {
        let place = &self.scene.ranks[rank];
        let state = &mut self.ranks[rank];
        let comm = &mut state.comms[axis as usize];
        let Some(number) = place.groups[axis as usize] else {
            (comm.arrived, comm.done) = (comm.started, comm.started);
            return Ok(());
        };
        let group = &self.scene.groups[number];
        let way = &self.scene.ways[group.way];
        let waits = match state.doing {
            RankDoing::Awaiting { axis: a, target: Some(target), .. } => a == axis && target >= comm.arrived,
            RankDoing::Awaiting { .. }
            | RankDoing::Computing { .. }
            | RankDoing::Served { .. }
            | RankDoing::Nothing => false,
        };
        let comes = comm.arrived == comm.done && comm.started > comm.arrived;
        if !comes || !(waits || way.in_background()) {
            return Ok(());
        }
        let order = &self.scene.scores[place.score].order[axis as usize];
        let exchange = order[comm.arrived % order.len()];
        comm.arrived += 1;
        let Meeting::Group { op, .. } = self.scene.scores[place.score].meetings[exchange].1 else {
            unreachable!("collectives are counted by group")
        };
        let clock = &mut self.groups[number];
        if clock.op.is_some_and(|other| (other.op, other.bytes) != (op.op, op.bytes)) {
            return Err(ClockError::Differs { rank, axis });
        }
        clock.op = Some(op);
        clock.arrived += 1;
        if clock.arrived == group.members.len() {
            *clock = GroupClock { met: clock.met, ..GroupClock::default() };
            self.begin(number, op);
        }
        Ok(())
    }

    /// A group has come together.
    fn begin(&mut self, number: usize, op: GroupOp) {
        let scene = self.scene;
        let group = &scene.groups[number];
        let way = &scene.ways[group.way];
        let cores = scene.cluster.hosts[group.hosts[0]].cores;
        let numbers = op.coded.map_or(0.0, |coded| coded.numbers);
        let key = (group.way, op.op as u8, op.bytes.to_bits(), op.visible, numbers.to_bits());
        let find = || way.cost(&scene.cluster.inside, group.members.len(), cores, op);
        let cost = *self.costs.entry(key).or_insert_with(find);
        for &host in &group.hosts {
            self.seen.link_bytes[host][group.axis as usize] += cost.link_bytes;
            self.seen.memory_bytes[host] += cost.memory_bytes / group.hosts.len() as f64;
        }
        self.groups[number].core_share = cost.core_share;
        self.occupy(group, cost.core_share);
        // Ranks that stop for an exchange wait for whoever was slower this time. Others go on meanwhile.
        let measured =
            scene.cluster.inside.measured.as_ref().filter(|_| scene.contention && !way.in_background());
        let computed = self.now - self.groups[number].met;
        let uneven = measured.map_or(0.0, |c| c.links.uneven_us(group.members.len(), computed));
        self.enter(self.now + uneven + cost.us, TickOf::Group(number));
    }

    /// Takes, or gives back, a share of a core of each rank of a group.
    fn occupy(&mut self, group: &GroupPlace, share: f64) {
        if share == 0.0 {
            return;
        }
        for &rank in &group.members {
            let host = self.scene.ranks[rank].host;
            self.catch_up(host);
            self.hosts[host].background += share;
        }
    }

    pub(super) fn group_is_done(&mut self, number: usize) -> Result<(), ClockError> {
        let scene = self.scene;
        let group = &scene.groups[number];
        self.occupy(group, -self.groups[number].core_share);
        let axis = group.axis;
        self.groups[number].met = self.now;
        for &rank in &group.members {
            self.ranks[rank].comms[axis as usize].done += 1;
        }
        for &rank in &group.members {
            let done = self.ranks[rank].comms[axis as usize].done;
            self.arrive(rank, axis)?;
            if let RankDoing::Awaiting { axis: a, target: Some(target), .. } = self.ranks[rank].doing
                && a == axis
                && done > target
            {
                self.wake(rank)?;
            }
        }
        Ok(())
    }
}
