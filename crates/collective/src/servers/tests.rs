//! Workers and servers on threads of one process: every gradient counts once, and a stranger's does not.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::*;

/// Weights from which gradients are subtracted.
struct Plain(Vec<Vec<f32>>);

impl RangeStore for Plain {
    fn len_of(&self, range: usize) -> usize {
        self.0[range].len()
    }

    fn sums_of(&self, _: usize) -> usize {
        1
    }

    fn apply(&mut self, range: usize, _: u64, gradients: &[PushedGradient]) {
        let mut sum = vec![0.0; self.0[range].len()];
        gradients.iter().for_each(|gradient| gradient.add_to(&mut sum));
        self.0[range].iter_mut().zip(sum).for_each(|(w, g)| *w -= g);
    }

    fn weights(&self, range: usize) -> &[f32] {
        &self.0[range]
    }

    fn state(&self, _: usize, _: usize) -> Option<&[f32]> {
        None
    }
}

fn on_ranks<T: Send>(
    ranks: usize,
    discipline: Discipline,
    act: impl Fn(&mut ServerClient, &mut Comm) -> T + Sync,
) -> Vec<T> {
    let act = &act;
    std::thread::scope(|scope| {
        let rank = |mut comm: Comm| {
            scope.spawn(move || {
                let mail = ServerMail::new(&mut comm).unwrap();
                let host = (comm.rank() < 2).then(|| {
                    let store = Arc::new(Mutex::new(Plain(vec![vec![0.0; 5], vec![0.0; 300]])));
                    let options = HostOptions { discipline, n_ranges: 2, done: 0, leases: comm.rank() == 0 };
                    ServerHost::start(mail.clone(), store, options).unwrap()
                });
                let mut client = ServerClient::new(mail, 2);
                let out = act(&mut client, &mut comm);
                comm.barrier().unwrap();
                drop(host);
                comm.barrier().unwrap();
                client.into_mail().close().unwrap();
                comm.finish().unwrap();
                out
            })
        };
        let ranks: Vec<_> = Comm::local(ranks).into_iter().map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

const ALL: [(usize, usize); 4] = [(0, 0), (0, 1), (1, 0), (1, 1)];

fn len_of((_, range): (usize, usize)) -> usize {
    [5, 300][range]
}

fn exchange(client: &mut ServerClient, block: u64, value: f32) -> Vec<f32> {
    client.begin(block);
    for at in ALL {
        client.push(at, (1.0, 1.0), &vec![value; len_of(at)]).unwrap();
    }
    ALL.into_iter().for_each(|at| client.pull(at).unwrap());
    let weights = receive(client);
    client.end();
    weights
}

fn receive(client: &mut ServerClient) -> Vec<f32> {
    let weights = ALL.into_iter().flat_map(|at| {
        let mut weights = vec![0.0; len_of(at)];
        client.receive(at, &mut weights).unwrap();
        weights
    });
    weights.collect()
}

#[test]
fn in_lockstep_all_get_the_sum_of_each_step() {
    let got = on_ranks(3, Discipline::Lockstep { workers: 3 }, |client, comm| {
        client.join().unwrap();
        (0..4).map(|step| exchange(client, step, (comm.rank() + 1) as f32)).collect::<Vec<_>>()
    });
    for steps in got {
        for (step, weights) in steps.iter().enumerate() {
            let want = -6.0 * (step + 1) as f32;
            assert!(weights.iter().all(|w| *w == want), "step {step}: {:?}, want {want}", &weights[..6]);
        }
    }
}

#[test]
fn every_block_of_a_segment_is_in_all_ranges_once() {
    for discipline in [Discipline::Free, Discipline::Bounded { staleness: 1 }] {
        let got = on_ranks(4, discipline, |client, comm| {
            let mut blocks = Vec::new();
            let mut weights = Vec::new();
            for segment in 1..=2 {
                if comm.rank() == 0 {
                    let blocks = (segment - 1) * 20..segment * 20;
                    client.open(segment, blocks, Duration::from_secs(5)).unwrap();
                }
                let mut done = None;
                client.join().unwrap();
                client.ask(segment, done, false).unwrap();
                loop {
                    match client.answer().unwrap() {
                        LeaseAnswer::Block(block) => {
                            client.join().unwrap();
                            exchange(client, block, 1.0);
                            (done, blocks) = (Some(block), [blocks, vec![block]].concat());
                            client.ask(segment, done, false).unwrap();
                        }
                        LeaseAnswer::Rest => client.leave().unwrap(),
                        LeaseAnswer::Over { end } => {
                            assert_eq!(end, segment * 20);
                            break;
                        }
                    }
                }
                client.leave().unwrap();
                client.join().unwrap();
                ALL.into_iter().for_each(|at| client.pull_now(at).unwrap());
                weights = receive(client);
                client.leave().unwrap();
                comm.barrier().unwrap();
            }
            (blocks, weights)
        });
        let mut blocks: Vec<u64> = got.iter().flat_map(|(blocks, _)| blocks.clone()).collect();
        blocks.sort_unstable();
        assert_eq!(blocks, (0..40).collect::<Vec<_>>(), "{discipline:?}");
        for (_, weights) in got {
            assert!(weights.iter().all(|w| *w == -40.0), "{discipline:?}: {:?}", &weights[..6]);
        }
    }
}

/// Every message that is refused says why, and no weight is another one than before.
#[test]
fn what_breaks_the_protocol_is_refused_in_words_and_changes_nothing() {
    let got = on_ranks(2, Discipline::Free, |client, comm| {
        let mut said = Vec::new();
        if comm.rank() == 1 {
            let mut refused = |client: &mut ServerClient| said.push(client.answer().unwrap_err().to_string());
            client.push((1, 0), (1.0, 1.0), &[1.0; 5]).unwrap();
            refused(client);
            client.join().unwrap();
            client.push((1, 0), (1.0, 1.0), &[1.0; 6]).unwrap();
            refused(client);
            client.push((1, 7), (1.0, 1.0), &[1.0; 5]).unwrap();
            refused(client);
            client.pull_now((1, 7)).unwrap();
            refused(client);
            client.pull_state((1, 0), 3).unwrap();
            refused(client);
            client.end();
            client.push((1, 0), (1.0, 1.0), &[1.0; 5]).unwrap();
            refused(client);
            client.leave().unwrap();
        }
        comm.barrier().unwrap();
        client.leave().unwrap();
        client.join().unwrap();
        ALL.into_iter().for_each(|at| client.pull_now(at).unwrap());
        let weights = receive(client);
        client.leave().unwrap();
        assert!(weights.iter().all(|w| *w == 0.0), "{weights:?}");
        said
    });
    let want = [
        "it has not joined",
        "a gradient of 40 bytes for range 0",
        "there is no range 7 at this server",
        "there is no range 7 at this server",
        "there is no state 3 of range 0 at this server",
        "its pull at clock 1 is not answered",
    ];
    assert_eq!(got[1].len(), want.len());
    for (said, want) in got[1].iter().zip(want) {
        assert!(said.contains(want), "{said:?}, and not {want:?}");
    }
}
