//! When stages hand on what they have of each microbatch's gradient of a tied parameter, so that the parts of one microbatch are
//! added up before those of others.
//!
//! The stages that have the parameter form a chain, from the one that sends first to the one that ends up with the sum. A stage
//! receives what the stages before it have added up, adds its own part, and sends it on. Its own part is there when the last
//! pass of the microbatch is done, which zero-bubble schedules put off: a stage that waited for a message at a fixed place
//! of its list could wait for one that cannot be sent before it goes on itself.
//!
//! So the places are taken from a simulation in which all passes cost the same. An event is put before the first action of its
//! stage that starts no earlier, in virtual time, than all that the event needs; or behind the last action. Every wait is then for
//! something that happens earlier in virtual time, or at the same time and for an earlier microbatch or stage of the chain, and no
//! stage waits for ever, whatever passes cost in fact. Where they cost what the simulation says, none waits at all.
//!
//! At one place the order is: receives and sends by microbatch, and then waits for sends.

use super::simulate::{Costs, Stuck, simulate};
use super::timetable::Timetable;

/// What a stage does with its part of one microbatch's gradient. Places are numbers of actions before which it is done; one past the
/// last is the end of the list.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HandOver {
    /// Where it receives from the stage before it in the chain, and adds its own.
    pub receive: Option<usize>,
    /// Where it starts to send to the stage behind it.
    pub send: Option<usize>,
    /// Where everything is over: what was sent has been received.
    pub done: usize,
}

/// By stage of the chain and microbatch: what is handed on, and where.
pub fn hand_overs(timetable: &Timetable, chain: &[usize]) -> Result<Vec<Vec<HandOver>>, Stuck> {
    let times = simulate(timetable, &Costs::even(timetable.place.len(), 1.0, 1.0, 1.0))?.starts;
    let time = |stage: usize, place: usize| times[stage].get(place).copied().unwrap_or(f64::INFINITY);
    // The first place of a stage that is at least `from`, and not before `at`.
    let place = |stage: usize, from: usize, at: f64| {
        (from..times[stage].len()).find(|place| time(stage, *place) >= at).unwrap_or(times[stage].len())
    };
    let mut plans = vec![Vec::new(); chain.len()];
    for microbatch in 0..timetable.microbatches {
        // Where and when each stage has all that it sends.
        let mut there: Vec<(usize, f64)> = Vec::new();
        for (k, &stage) in chain.iter().enumerate() {
            let actions = &timetable.by_stage[stage];
            let last = actions.iter().rposition(|a| a.microbatch == microbatch).map_or(0, |at| at + 1);
            let needed = there.last().map_or(0.0, |(_, at)| *at);
            let at = if k == 0 { last } else { place(stage, last, needed) };
            there.push((at, time(stage, at)));
        }
        for (k, &stage) in chain.iter().enumerate() {
            let at = there[k].0;
            let next = there.get(k + 1).map(|(_, time)| *time);
            let done = next.map_or(at, |next| place(stage, at, next));
            plans[k].push(HandOver { receive: (k > 0).then_some(at), send: next.map(|_| at), done });
        }
    }
    Ok(plans)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::{PipelineKind, timetable};

    /// Runs a timetable with what is handed over, as stages that wait for each other; panics if all wait.
    fn check(timetable: &Timetable, chain: &[usize]) {
        let plans = hand_overs(timetable, chain).unwrap();
        // Each stage's list: what it waits for, and what it does then.
        #[derive(Clone, Copy, PartialEq, Debug)]
        enum Event {
            Act(usize),
            Send(usize, usize),
            Receive(usize, usize),
            Sent(usize, usize),
        }
        let list = |stage: usize| -> Vec<Event> {
            let n = timetable.by_stage[stage].len();
            let mut list = Vec::new();
            for place in 0..=n {
                let Some(k) = chain.iter().position(|s| *s == stage) else {
                    list.extend((place < n).then_some(Event::Act(place)));
                    continue;
                };
                for (m, plan) in plans[k].iter().enumerate() {
                    list.extend((plan.receive == Some(place)).then_some(Event::Receive(k, m)));
                    list.extend((plan.send == Some(place)).then_some(Event::Send(k, m)));
                }
                for (m, plan) in plans[k].iter().enumerate() {
                    list.extend((plan.send.is_some() && plan.done == place).then_some(Event::Sent(k, m)));
                }
                list.extend((place < n).then_some(Event::Act(place)));
            }
            list
        };
        let lists: Vec<Vec<Event>> = (0..timetable.stages).map(list).collect();
        let mut at = vec![0; timetable.stages];
        let mut happened: Vec<(usize, Event)> = Vec::new();
        let mut results = Vec::new();
        loop {
            let mut moved = false;
            for stage in 0..timetable.stages {
                while let Some(event) = lists[stage].get(at[stage]) {
                    let can = match *event {
                        Event::Act(i) => {
                            let action = timetable.by_stage[stage][i];
                            timetable.receives(&action).is_none_or(|m| results.contains(&m))
                        }
                        Event::Send(..) => true,
                        Event::Receive(k, m) => happened.contains(&(chain[k - 1], Event::Send(k - 1, m))),
                        Event::Sent(k, m) => happened.contains(&(chain[k + 1], Event::Receive(k + 1, m))),
                    };
                    if !can {
                        break;
                    }
                    if let Event::Act(i) = *event {
                        results.extend(timetable.sends(&timetable.by_stage[stage][i]));
                    } else {
                        happened.push((stage, *event));
                    }
                    at[stage] += 1;
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        for (stage, list) in lists.iter().enumerate() {
            assert_eq!(at[stage], list.len(), "stage {stage} of {chain:?} is stuck in {list:?}");
        }
        let (n, links) = (timetable.microbatches, chain.len() - 1);
        assert_eq!(happened.len(), 3 * n * links, "sent, received and known to be received");
    }

    #[test]
    fn no_stage_waits_for_ever() {
        for kind in PipelineKind::ALL {
            for stages in 2..=5 {
                for microbatches in [1, 2, 3, 5, 8] {
                    let Ok(timetable) = timetable(kind, stages, microbatches) else { continue };
                    let all: Vec<usize> = (0..stages).collect();
                    let back: Vec<usize> = all.iter().rev().copied().collect();
                    let ends = [0, stages - 1];
                    for chain in [&all[..], &back, &ends, &[stages - 1, 0]] {
                        check(&timetable, chain);
                    }
                }
            }
        }
    }

    #[test]
    fn little_is_held_where_stages_keep_pace() {
        let timetable = timetable(PipelineKind::OneFOneB, 2, 8).unwrap();
        let plans = hand_overs(&timetable, &[1, 0]).unwrap();
        // The first stage has its own part two passes after the last stage's, which is there by then.
        for (m, plan) in plans[1].iter().enumerate() {
            let own = timetable.by_stage[0].iter().rposition(|a| a.microbatch == m).unwrap();
            assert_eq!((plan.receive, plan.send), (Some(own + 1), None));
        }
        for (m, plan) in plans[0].iter().enumerate() {
            let own = timetable.by_stage[1].iter().rposition(|a| a.microbatch == m).unwrap();
            assert!(plan.send == Some(own + 1) && plan.done <= own + 5, "{plan:?}");
        }
    }
}
