//! The groups that a rank is in: that of the whole job, those along the axes of its mesh, and that of its replica: the ranks
//! that have the whole model together.

use polyreme_collective::{Comm, Report, staging_bytes};
use polyreme_graph::Axis;
use polyreme_parallel::Mesh;

/// A rank's ends of its groups.
pub struct Comms {
    job: Comm,
    /// By axis: the group along it. `None` where that is the whole job.
    axes: [Option<Comm>; 4],
    replica: Replica,
}

/// The ranks with the same place along the data axis.
enum Replica {
    /// All of the job.
    Job,
    /// This rank alone; its group is made when it is asked for.
    Lone(Option<Comm>),
    /// Some of the job.
    Group(Comm),
}

impl From<Comm> for Comms {
    /// Ranks that split only the batch.
    fn from(job: Comm) -> Comms {
        Comms { job, axes: [const { None }; 4], replica: Replica::Lone(None) }
    }
}

impl Comms {
    /// Makes the groups along the axes of a mesh. Collective.
    ///
    /// # Panics
    /// If the mesh has another number of ranks than the job.
    pub fn new(mut job: Comm, mesh: &Mesh) -> Result<Comms, Report> {
        assert_eq!(mesh.ranks(), job.size(), "a place in the mesh for each rank");
        if mesh.replica_ranks() == 1 {
            return Ok(job.into());
        }
        let mut axes = [const { None }; 4];
        for axis in Axis::ALL {
            axes[axis as usize] = match mesh.len(axis) {
                // That group is there already, unless messages have to go beside its operations.
                all if all == mesh.ranks() && !(passes_messages(axis) && job.orders_messages()) => None,
                1 => Some(Comm::alone()),
                _ => Some(job.split(&mesh.groups(axis))?),
            };
        }
        let replica = match mesh.data {
            1 => Replica::Job,
            _ => Replica::Group(job.split(&mesh.replicas())?),
        };
        Ok(Comms { job, axes, replica })
    }

    /// What a rank's groups take where they share memory, for data on their way.
    pub fn staging_bytes(mesh: &Mesh) -> usize {
        let alone = |n: usize| if n > 1 { staging_bytes(n) } else { 0 };
        let part = |n: usize| if n < mesh.ranks() { alone(n) } else { 0 };
        let axes: usize = Axis::ALL.iter().map(|axis| part(mesh.len(*axis))).sum();
        alone(mesh.ranks()) + axes + part(mesh.replica_ranks())
    }

    /// The group of all ranks.
    pub fn job(&mut self) -> &mut Comm {
        &mut self.job
    }

    /// Gives up the groups along the axes.
    pub fn into_job(self) -> Comm {
        self.job
    }

    /// The group along an axis.
    pub fn along(&mut self, axis: Axis) -> &mut Comm {
        self.axes[axis as usize].as_mut().unwrap_or(&mut self.job)
    }

    /// The ranks that have the whole model together.
    pub fn replica(&mut self) -> &mut Comm {
        match &mut self.replica {
            Replica::Job => &mut self.job,
            Replica::Lone(lone) => lone.get_or_insert_with(Comm::alone),
            Replica::Group(group) => group,
        }
    }

    /// Those that have the whole model once: one replica, or all ranks where they have shards of it.
    pub(crate) fn writers(&mut self, sharded: bool) -> &mut Comm {
        if sharded { self.job() } else { self.replica() }
    }

    /// The groups beside that of the job.
    fn others(&mut self) -> impl Iterator<Item = &mut Comm> {
        let replica = match &mut self.replica {
            Replica::Group(group) => Some(group),
            Replica::Job | Replica::Lone(_) => None,
        };
        self.axes.iter_mut().flatten().chain(replica)
    }

    /// How many operations this rank has called.
    pub(crate) fn n_calls(&self) -> u64 {
        let of_replica = match &self.replica {
            Replica::Group(group) => group.n_calls(),
            Replica::Job | Replica::Lone(_) => 0,
        };
        self.job.n_calls() + self.axes.iter().flatten().map(Comm::n_calls).sum::<u64>() + of_replica
    }

    /// Bytes that this rank has sent in all groups, as far as they say.
    pub(crate) fn sent_bytes(&self) -> u64 {
        let of_replica = match &self.replica {
            Replica::Group(group) => group.sent_bytes(),
            Replica::Job | Replica::Lone(_) => None,
        };
        let of_axes = self.axes.iter().flatten().filter_map(Comm::sent_bytes);
        self.job.sent_bytes().into_iter().chain(of_axes).chain(of_replica).sum()
    }

    /// Sets the step that reports name.
    pub fn set_step(&mut self, step: u64) {
        self.job.set_step(step);
        self.others().for_each(|comm| comm.set_step(step));
    }
}

/// Whether ranks along an axis send each other messages.
fn passes_messages(axis: Axis) -> bool {
    match axis {
        Axis::Stage | Axis::Sequence => true,
        Axis::Data | Axis::Tensor => false,
    }
}
