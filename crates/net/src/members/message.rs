//! What members and the coordinator tell each other, and how it is written.
//!
//! By hand and not by a format crate, as the control messages of a generation: they are few and small, and every length is checked
//! against what has arrived before memory is reserved.

use super::tally::TallySummary;
use crate::control::bytes::{Malformed, Put, Reader, TEXT_BYTES_MAX};
use crate::control::channel::Wire;

/// A member's number, which is never used again.
pub type MemberId = u64;

/// How far a state is: two for each step, and one more if what follows the last step (evaluation, checkpoint) is done.
pub type HeldSteps = u64;

/// The longest message.
pub(crate) const MESSAGE_BYTES_MAX: usize = 1 << 20;
/// The longest note that ranks leave for later ones.
const NOTE_BYTES_MAX: usize = TEXT_BYTES_MAX;

/// What a member trains. Those of one run have the same.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct JobMark {
    /// The job's name.
    pub name: String,
    /// Of everything that ranks must have in common to train together: the model, the data, the settings.
    pub digest: u64,
}

/// Whether the ranks of a generation may exchange their data through memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum MemoryUse {
    /// They use sockets.
    #[default]
    Never,
    /// They do if all of them are on the coordinator's host.
    IfAllHere,
    /// They do: processes of other hosts cannot join.
    Always,
}

/// One rank's share of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OwnShare {
    /// Its samples.
    pub samples: u64,
    /// How long they took, in microseconds, without waiting for data or for other ranks.
    pub busy_us: u64,
}

/// A member is in no generation and can form one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ready {
    /// The last generation that it was in; 0 for none.
    pub generation: u64,
    /// The state that it holds.
    pub held: Option<HeldSteps>,
    /// Whether it had begun a step that it did not finish.
    pub redoes: bool,
    /// Where it would listen as rank 0.
    pub listen: String,
    /// Why its generation ended, if it was not told to end it.
    pub why: String,
}

/// A rank whose coordinator was lost comes to the next one, which knows nothing: what it brings is the journal. A generation takes
/// effect only when all its ranks were told of it, so whoever comes back knows the last one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Returned {
    /// The last generation that it was told to form.
    pub generation: u64,
    /// The members of that generation, by rank.
    pub ranks: Vec<MemberId>,
    /// Whether it trains.
    pub running: bool,
    /// Whether it has trained as this member.
    pub trained: bool,
    /// What changes of ranks had cost when it was told last.
    pub tally: TallySummary,
}

/// A generation, as one of its ranks is told to form it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Formation {
    /// Its number, from 1.
    pub generation: u64,
    /// The receiver's rank.
    pub rank: usize,
    /// Where rank 0 listens.
    pub master: String,
    /// Its members, by rank.
    pub ranks: Vec<MemberId>,
    /// The states that the ranks hold, by rank.
    pub held: Vec<Option<HeldSteps>>,
    /// The rank whose state counts; none if no rank has one.
    pub source: Option<usize>,
    /// Whether it only saves a checkpoint: there are too few ranks to train.
    pub save_only: bool,
    /// Whether they exchange their data through memory, made anew for this generation: all are on the coordinator's host.
    pub memory: bool,
    /// What an earlier rank 0 left for later ones.
    pub note: Vec<u8>,
    /// Why it is formed, in words.
    pub why: String,
}

/// From a member.
#[derive(Clone, PartialEq, Debug)]
pub enum ToCoordinator {
    /// The first message: it wants to be a rank of this job.
    Enter {
        /// Its host.
        host: String,
        /// Equal for processes that can share memory.
        host_key: String,
        /// Its process.
        pid: u32,
        /// The job.
        job: JobMark,
        /// Which of the coordinator's own children it is.
        child: Option<u64>,
        /// The member that it was before, if it comes back.
        was: Option<MemberId>,
    },
    /// The first message of a rank whose coordinator was lost.
    Return {
        /// Its host.
        host: String,
        /// Equal for processes that can share memory.
        host_key: String,
        /// Its process.
        pid: u32,
        /// The job.
        job: JobMark,
        /// Its number.
        id: MemberId,
        /// What it knows.
        returned: Returned,
    },
    /// It can form a generation.
    Ready(Ready),
    /// It trains.
    Running {
        /// The generation.
        generation: u64,
    },
    /// What rank 0 leaves for later ranks.
    Note(Vec<u8>),
    /// It is alive.
    Beat {
        /// Steps done.
        step: u64,
        /// What it had to do in the last one.
        own: OwnShare,
    },
    /// It wants to leave at the end of a step.
    Leaves,
    /// Training is complete and everything is written.
    Done {
        /// The generation.
        generation: u64,
    },
    /// The first message of somebody who only asks.
    Ask,
}

/// From the coordinator.
#[derive(Clone, PartialEq, Debug)]
pub enum ToMember {
    /// It is a member.
    Welcome {
        /// Its number.
        id: MemberId,
        /// How long silence may last.
        patience_ms: u64,
        /// The member whose process has the coordinator, if it is one.
        runs_on: Option<MemberId>,
        /// Whether a member takes the coordinator's place when it is lost.
        succession: bool,
        /// Whether ranks may share memory. A member needs it if it takes the coordinator's place.
        memory: MemoryUse,
    },
    /// It cannot be one.
    Refused {
        /// Why.
        why: String,
    },
    /// It is a rank of a new generation.
    Form(Box<Formation>),
    /// The generation is over now.
    Cancel {
        /// Which.
        generation: u64,
        /// Why, in words.
        why: String,
    },
    /// The generation is over at the end of a step.
    Change {
        /// Which.
        generation: u64,
    },
    /// The coordinator is alive: its answer to each sign of life.
    Alive,
    /// What has happened so far.
    Tally(TallySummary),
    /// The run is over.
    End {
        /// Why; nothing if it is finished.
        why: Option<String>,
    },
    /// An answer, as JSON.
    Status(String),
}

fn put_held(out: &mut Vec<u8>, held: Option<HeldSteps>) {
    out.put_u64(held.map_or(0, |held| held.saturating_add(1)));
}

fn held(reader: &mut Reader) -> Result<Option<HeldSteps>, Malformed> {
    Ok(reader.u64()?.checked_sub(1))
}

fn put_job(out: &mut Vec<u8>, job: &JobMark) {
    out.put_text(&job.name);
    out.put_u64(job.digest);
}

fn job(reader: &mut Reader) -> Result<JobMark, Malformed> {
    Ok(JobMark { name: reader.text()?, digest: reader.u64()? })
}

fn put_ids(out: &mut Vec<u8>, ids: &[MemberId]) {
    out.put_u32(ids.len() as u32);
    ids.iter().for_each(|id| out.put_u64(*id));
}

fn ids(reader: &mut Reader) -> Result<Vec<MemberId>, Malformed> {
    let n = reader.count(8)?;
    (0..n).map(|_| reader.u64()).collect()
}

fn put_tally(out: &mut Vec<u8>, tally: &TallySummary) {
    let TallySummary { ranks_lost, ranks_joined, steps_redone, .. } = *tally;
    let TallySummary { stall_us_p50, stall_us_p99, stall_us_max, parts_us_p50: [a, b, c], .. } = *tally;
    let all = [ranks_lost, ranks_joined, steps_redone, stall_us_p50, stall_us_p99, stall_us_max, a, b, c];
    all.into_iter().for_each(|n| out.put_u64(n));
}

fn tally(reader: &mut Reader) -> Result<TallySummary, Malformed> {
    let mut next = || reader.u64();
    Ok(TallySummary {
        ranks_lost: next()?,
        ranks_joined: next()?,
        steps_redone: next()?,
        stall_us_p50: next()?,
        stall_us_p99: next()?,
        stall_us_max: next()?,
        parts_us_p50: [next()?, next()?, next()?],
    })
}

fn flag(reader: &mut Reader) -> Result<bool, Malformed> {
    match reader.u8()? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(Malformed),
    }
}

fn memory_use(reader: &mut Reader) -> Result<MemoryUse, Malformed> {
    match reader.u8()? {
        0 => Ok(MemoryUse::Never),
        1 => Ok(MemoryUse::IfAllHere),
        2 => Ok(MemoryUse::Always),
        _ => Err(Malformed),
    }
}

impl Wire for ToCoordinator {
    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        match self {
            ToCoordinator::Enter { host, host_key, pid, job, child, was } => {
                out.push(1);
                out.put_text(host);
                out.put_text(host_key);
                out.put_u32(*pid);
                put_job(&mut out, job);
                put_held(&mut out, *child);
                put_held(&mut out, *was);
            }
            ToCoordinator::Return { host, host_key, pid, job, id, returned } => {
                out.push(9);
                out.put_text(host);
                out.put_text(host_key);
                out.put_u32(*pid);
                put_job(&mut out, job);
                out.put_u64(*id);
                out.put_u64(returned.generation);
                out.push(u8::from(returned.running));
                out.push(u8::from(returned.trained));
                put_tally(&mut out, &returned.tally);
                put_ids(&mut out, &returned.ranks);
            }
            ToCoordinator::Ready(ready) => {
                out.push(2);
                out.put_u64(ready.generation);
                put_held(&mut out, ready.held);
                out.push(u8::from(ready.redoes));
                out.put_text(&ready.listen);
                out.put_text(&ready.why);
            }
            ToCoordinator::Running { generation } => {
                out.push(3);
                out.put_u64(*generation);
            }
            ToCoordinator::Note(note) => {
                out.push(8);
                out.put_bytes(&note[..note.len().min(NOTE_BYTES_MAX)]);
            }
            ToCoordinator::Beat { step, own } => {
                out.push(4);
                out.put_u64(*step);
                out.put_u64(own.samples);
                out.put_u64(own.busy_us);
            }
            ToCoordinator::Leaves => out.push(5),
            ToCoordinator::Done { generation } => {
                out.push(6);
                out.put_u64(*generation);
            }
            ToCoordinator::Ask => out.push(7),
        }
        out
    }

    fn decode(bytes: &[u8]) -> Result<ToCoordinator, Malformed> {
        let mut r = Reader(bytes);
        let message = match r.u8()? {
            1 => {
                let (host, host_key, pid, job) = (r.text()?, r.text()?, r.u32()?, job(&mut r)?);
                ToCoordinator::Enter { host, host_key, pid, job, child: held(&mut r)?, was: held(&mut r)? }
            }
            9 => {
                let (host, host_key, pid) = (r.text()?, r.text()?, r.u32()?);
                let (job, id) = (job(&mut r)?, r.u64()?);
                let (generation, running, trained) = (r.u64()?, flag(&mut r)?, flag(&mut r)?);
                let (tally, ranks) = (tally(&mut r)?, ids(&mut r)?);
                let returned = Returned { generation, ranks, running, trained, tally };
                ToCoordinator::Return { host, host_key, pid, job, id, returned }
            }
            2 => ToCoordinator::Ready(Ready {
                generation: r.u64()?,
                held: held(&mut r)?,
                redoes: flag(&mut r)?,
                listen: r.text()?,
                why: r.text()?,
            }),
            3 => ToCoordinator::Running { generation: r.u64()? },
            8 => ToCoordinator::Note(r.bytes(NOTE_BYTES_MAX)?.to_vec()),
            4 => {
                let (step, samples, busy_us) = (r.u64()?, r.u64()?, r.u64()?);
                ToCoordinator::Beat { step, own: OwnShare { samples, busy_us } }
            }
            5 => ToCoordinator::Leaves,
            6 => ToCoordinator::Done { generation: r.u64()? },
            7 => ToCoordinator::Ask,
            _ => return Err(Malformed),
        };
        r.end()?;
        Ok(message)
    }
}

impl Wire for ToMember {
    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        match self {
            ToMember::Welcome { id, patience_ms, runs_on, succession, memory } => {
                out.push(1);
                out.put_u64(*id);
                out.put_u64(*patience_ms);
                put_held(&mut out, *runs_on);
                out.push(u8::from(*succession));
                out.push(*memory as u8);
            }
            ToMember::Refused { why } => {
                out.push(2);
                out.put_text(why);
            }
            ToMember::Form(form) => {
                out.push(3);
                out.put_u64(form.generation);
                out.put_u32(form.rank as u32);
                out.put_text(&form.master);
                put_held(&mut out, form.source.map(|rank| rank as u64));
                out.push(u8::from(form.save_only));
                out.push(u8::from(form.memory));
                out.put_bytes(&form.note[..form.note.len().min(NOTE_BYTES_MAX)]);
                out.put_text(&form.why);
                out.put_u32(form.held.len() as u32);
                form.held.iter().for_each(|held| put_held(&mut out, *held));
                put_ids(&mut out, &form.ranks);
            }
            ToMember::Cancel { generation, why } => {
                out.push(4);
                out.put_u64(*generation);
                out.put_text(why);
            }
            ToMember::Change { generation } => {
                out.push(5);
                out.put_u64(*generation);
            }
            ToMember::Alive => out.push(9),
            ToMember::Tally(tally) => {
                out.push(6);
                put_tally(&mut out, tally);
            }
            ToMember::End { why } => {
                out.push(7);
                out.push(u8::from(why.is_some()));
                out.put_text(why.as_deref().unwrap_or_default());
            }
            ToMember::Status(text) => {
                out.push(8);
                out.put_bytes(text.as_bytes());
            }
        }
        out
    }

    fn decode(bytes: &[u8]) -> Result<ToMember, Malformed> {
        let mut r = Reader(bytes);
        let message = match r.u8()? {
            1 => ToMember::Welcome {
                id: r.u64()?,
                patience_ms: r.u64()?,
                runs_on: held(&mut r)?,
                succession: flag(&mut r)?,
                memory: memory_use(&mut r)?,
            },
            2 => ToMember::Refused { why: r.text()? },
            3 => {
                let (generation, rank, master) = (r.u64()?, r.u32()? as usize, r.text()?);
                let (source, save_only) = (held(&mut r)?.map(|rank| rank as usize), flag(&mut r)?);
                let memory = flag(&mut r)?;
                let (note, why) = (r.bytes(NOTE_BYTES_MAX)?.to_vec(), r.text()?);
                let n = r.count(8)?;
                let held = (0..n).map(|_| held(&mut r)).collect::<Result<Vec<_>, _>>()?;
                let ranks = ids(&mut r)?;
                if rank >= n || source.is_some_and(|rank| rank >= n) || ranks.len() != n {
                    return Err(Malformed);
                }
                ToMember::Form(Box::new(Formation {
                    generation,
                    rank,
                    master,
                    ranks,
                    held,
                    source,
                    save_only,
                    memory,
                    note,
                    why,
                }))
            }
            4 => ToMember::Cancel { generation: r.u64()?, why: r.text()? },
            5 => ToMember::Change { generation: r.u64()? },
            9 => ToMember::Alive,
            6 => ToMember::Tally(tally(&mut r)?),
            7 => {
                let (failed, why) = (flag(&mut r)?, r.text()?);
                ToMember::End { why: failed.then_some(why) }
            }
            8 => {
                let text = r.bytes(MESSAGE_BYTES_MAX)?;
                ToMember::Status(std::str::from_utf8(text).map_err(|_| Malformed)?.to_owned())
            }
            _ => return Err(Malformed),
        };
        r.end()?;
        Ok(message)
    }
}
