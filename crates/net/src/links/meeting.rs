//! Links that are made when two ranks first talk.
//!
//! A run that finds no link to the peer of a move asks this process's door for one ([`crate::rendezvous`]) and goes on
//! with its other moves; when the door has made the connection, or the other rank has, the run takes it over. So a run
//! whose peers are all linked pays nothing for this. If the pair cannot be connected, the alarm says so.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::epoll;

use super::Links;
use crate::alarm::Alarm;
use crate::moves::Moves;
use crate::rendezvous::door::Door;
use crate::rendezvous::mesh::Edge;
use crate::system::System;

/// Where links of a group come from: the door, with the numbers by which it knows the group and its ranks.
pub(crate) struct Meeting {
    door: Door,
    group: u16,
    /// The job's ranks, by rank in the group.
    ranks: Vec<usize>,
    /// Signalled when a connection of the group has been made.
    bell: Arc<OwnedFd>,
    /// Which peers the door was asked for.
    asked: Vec<bool>,
}

impl Meeting {
    /// The meeting of a group of these ranks of the job.
    pub(crate) fn new(door: Door, group: u16, ranks: &[usize]) -> io::Result<Meeting> {
        let bell = door.bell(group)?;
        Ok(Meeting { door, group, ranks: ranks.to_vec(), bell, asked: vec![false; ranks.len()] })
    }

    fn edge(&self, peer: usize) -> Edge {
        Edge { group: self.group, peer: self.ranks[peer] }
    }
}

impl Links {
    /// Links over the connections made so far; others are made when this rank first talks with a peer.
    pub(crate) fn meeting(
        system: Arc<dyn System>,
        rank: usize,
        hosts: Vec<String>,
        meeting: Meeting,
        generation: u64,
        alarm: Alarm,
    ) -> io::Result<Links> {
        let streams: Vec<_> = (0..hosts.len()).map(|peer| meeting.door.take(meeting.edge(peer))).collect();
        let mut links = Links::in_system(system, rank, hosts, streams, generation, alarm)?;
        links.set_names(meeting.ranks.clone());
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&links.epoll, &meeting.bell, epoll::EventData::new_u64(0), flags)?;
        links.meeting = Some(meeting);
        Ok(links)
    }

    /// Asks for links that moves lack, each once, and takes over those that have been made. Returns whether there was one.
    pub(super) fn meet(&mut self, moves: &Moves) -> io::Result<bool> {
        let mut met = false;
        for queue in &moves.queues {
            assert_ne!(queue.peer, self.rank, "a move to another rank");
            if self.peers[queue.peer].is_some() {
                continue;
            }
            let meeting = self.meeting.as_mut().expect("a link to the peer of a move");
            let edge = meeting.edge(queue.peer);
            if let Some(connection) = meeting.door.take(edge) {
                self.link(queue.peer, connection)?;
                met = true;
            } else if !std::mem::replace(&mut meeting.asked[queue.peer], true) {
                meeting.door.want(edge);
            }
        }
        Ok(met)
    }

    /// The ranks of the group that this rank has links to.
    pub fn linked(&self) -> Vec<usize> {
        (0..self.peers.len()).filter(|&peer| self.peers[peer].is_some()).collect()
    }
}
