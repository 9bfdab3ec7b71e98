//! Ranks over real sockets on loopback, with strangers among them, and processes that are killed.

#![allow(clippy::unwrap_used, reason = "a test says by it what must hold")]

#[allow(dead_code, reason = "its main is for the example; its run is a rank of these tests")]
#[path = "../examples/join.rs"]
mod example;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use polyreme_net::control::SHARE_BYTES_MAX;
use polyreme_net::frame::{FrameOp, Tag, Terms};
use polyreme_net::{
    Cause, Connection, Doing, First, JoinError, JoinOptions, Joined, Links, Member, Move, Moves, Report,
    Secret, join,
};

const SECRET: &str = "8f3a61c0d94e27b5508c1f7ae2639db47016ce8f25a3d0b9614f7c82ee5d930a";
/// All ranks have learnt of a loss by then.
const LIMIT: Duration = Duration::from_secs(5);

fn secret() -> Secret {
    Secret::from_text(SECRET).unwrap()
}

fn listener() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    (listener, addr)
}

type Tweak<'a> = &'a (dyn Fn(usize, &mut JoinOptions) + Sync);

/// Starts those ranks as threads of this process, with options changed by `tweak`.
fn start(ranks: &[usize], size: usize, tweak: Tweak) -> Vec<Result<Joined, JoinError>> {
    let (listener, master) = listener();
    start_at(ranks, size, listener, &master, tweak)
}

fn start_at(
    ranks: &[usize],
    size: usize,
    listener: TcpListener,
    master: &str,
    tweak: Tweak,
) -> Vec<Result<Joined, JoinError>> {
    let mut listener = Some(listener);
    std::thread::scope(|s| {
        let mut threads = Vec::new();
        for (i, &rank) in ranks.iter().enumerate() {
            let mut options = JoinOptions::new(rank, size, master, secret());
            options.timeout = Duration::from_secs(20);
            options.listener = if rank == 0 { listener.take().map(Into::into) } else { None };
            threads.push(s.spawn(move || {
                tweak(i, &mut options);
                join(options)
            }));
        }
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn joined(size: usize) -> Vec<Joined> {
    let ranks: Vec<usize> = (0..size).collect();
    start(&ranks, size, &|_, _| {}).into_iter().map(Result::unwrap).collect()
}

/// All ranks at once, each in a thread.
fn all<T: Send>(ranks: Vec<Joined>, act: impl Fn(Joined) -> T + Sync) -> Vec<T> {
    let act = &act;
    std::thread::scope(|s| {
        let threads: Vec<_> = ranks.into_iter().map(|rank| s.spawn(move || act(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn ranks_join_talk_and_end() {
    for size in [1, 2, 3, 5, 9] {
        all(joined(size), |me| {
            let streams = me.streams().unwrap();
            assert_eq!((me.size, me.members.len(), streams.len()), (size, size, size));
            assert!(me.members.iter().all(|m| m.pid == std::process::id() && m.addr.ip().is_loopback()));
            assert!(me.members.iter().all(|m| m.host_key == me.members[0].host_key && !m.host.is_empty()));
            for peer in 0..size {
                let Some(stream) = streams[peer].as_ref().map(Connection::stream) else {
                    assert_eq!(peer, me.rank);
                    continue;
                };
                assert!(rustix::net::sockopt::tcp_nodelay(stream).unwrap());
                (&*stream).write_all(&[me.rank as u8, peer as u8]).unwrap();
                let mut heard = [0; 2];
                (&*stream).read_exact(&mut heard).unwrap();
                assert_eq!(heard, [peer as u8, me.rank as u8]);
            }
            for round in 0..3u8 {
                let blob = vec![round; me.rank * 7];
                let expected: Vec<_> = (0..size).map(|rank| vec![round; rank * 7]).collect();
                assert_eq!(me.control.share(&blob).unwrap(), expected);
            }
            let largest = me.control.share(&vec![me.rank as u8; SHARE_BYTES_MAX]).unwrap();
            assert_eq!(largest[size - 1], vec![size as u8 - 1; SHARE_BYTES_MAX]);
            me.control.goodbye().unwrap();
            assert_eq!(me.control.alarm().raised(), None);
        });
    }
}

#[test]
fn only_pairs_that_talk_first_are_connected_while_ranks_join() {
    let hosts = ["a", "b", "a", "b"];
    let ranks = start(&[0, 1, 2, 3], 4, &|i, options| {
        let talks = |members: &[Member], rank: usize| {
            let elsewhere = |peer: &usize| members[*peer].host_key != members[rank].host_key;
            (0..members.len()).filter(elsewhere).map(|peer| (0, peer)).collect()
        };
        options.first = First::Some(Arc::new(talks));
        options.host_key = Some(hosts[i].into());
    });
    all(ranks.into_iter().map(Result::unwrap).collect(), |me| {
        let streams = me.streams().unwrap();
        let open: Vec<usize> = (0..4).filter(|&peer| streams[peer].is_some()).collect();
        assert_eq!(open, [[1, 3], [0, 2]][me.rank % 2]);
        me.control.goodbye().unwrap();
    });
}

/// What is wrong, who starts, and what each of them says.
#[test]
fn who_is_started_wrongly_is_told_so() {
    let check = |ranks: &[usize], size, tweak: Tweak, says: &[&str]| {
        let begun = Instant::now();
        for (got, says) in start(ranks, size, tweak).into_iter().zip(says) {
            let e = got.expect_err(says).to_string();
            assert!(says.split(" .. ").all(|part| e.contains(part)), "expected {says:?}, got {e:?}");
        }
        assert!(begun.elapsed() < LIMIT, "{says:?} took {:?}", begun.elapsed());
    };
    let second = Duration::from_secs(1);
    let short = |options: &mut JoinOptions| options.timeout = second;
    let missing = "ranks 2, 4 did not join within 1 s (rank 0 listens on 127.0.0.1";
    check(&[0, 1, 3], 5, &|_, o| short(o), &[missing; 3]);
    let twice = "rank 1 came twice";
    check(&[0, 1, 1], 3, &|_, _| {}, &[twice; 3]);
    let sizes = "was started as one of 4 ranks and rank 0 as one of 3";
    check(&[0, 2], 3, &|i, o| o.size += i, &[sizes; 2]);
    let wrong = Secret::random().unwrap();
    let wrongly = |i: usize, o: &mut JoinOptions| {
        short(o);
        if i == 1 {
            o.secret = wrong.clone();
        }
    };
    check(&[0, 1], 2, &wrongly, &["as rank 1: wrong secret", "rank 1 and rank 0 at 127.0.0.1"]);
    let job = |i: usize, o: &mut JoinOptions| {
        short(o);
        o.job = ["night", "day"][i].into();
    };
    let other = "belongs to job \"night\" and rank 1 to another one";
    check(&[0, 1], 2, &job, &["rank 1 did not join .. as rank 1: of another job", other]);
    let generation = |i: usize, o: &mut JoinOptions| {
        short(o);
        o.generation = [8, 7][i];
    };
    check(&[0, 1], 2, &generation, &["of start 7 of the job", "start 8 of the job and rank 1 is of start 7"]);
    check(&[2], 2, &|_, _| {}, &["rank 2 does not exist: the 2 ranks are 0 to 1"]);
    check(&[0], 0, &|_, _| {}, &["a job has 1 to"]);
    check(&[0], usize::MAX, &|_, _| {}, &["a job has 1 to"]);
    let everywhere = |_: usize, o: &mut JoinOptions| o.bind = Some("0.0.0.0".parse::<IpAddr>().unwrap());
    check(&[0], 2, &everywhere, &["listens on one interface"]);
    let all = |_: usize, o: &mut JoinOptions| {
        o.listener = Some(TcpListener::bind("0.0.0.0:0").unwrap().into());
    };
    check(&[0], 2, &all, &["a listener on all interfaces"]);
    let nameless = |_: usize, o: &mut JoinOptions| (o.listener, o.master) = (None, "0.0.0.0:0".into());
    check(&[0], 2, &nameless, &["give the address of one interface"]);
    let portless = |_: usize, o: &mut JoinOptions| (o.listener, o.master) = (None, "localhost".into());
    check(&[0], 2, &portless, &["rank 0 cannot listen on localhost"]);
    check(&[1], 2, &portless, &["\"localhost\" is not host:port"]);
    let elsewhere = |_: usize, o: &mut JoinOptions| (o.listener, o.master) = (None, "192.0.2.1:0".into());
    check(&[0], 2, &elsewhere, &["this host has no such address"]);
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = |_: usize, o: &mut JoinOptions| {
        (o.listener, o.master) = (None, taken.local_addr().unwrap().to_string());
    };
    check(&[0], 2, &taken, &["another rank 0 or another job is there"]);
    let no_listener = |_: usize, o: &mut JoinOptions| {
        short(o);
        // This port had a listener, and has none now.
        o.master = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    };
    check(&[1], 2, &no_listener, &["rank 1 did not reach rank 0 at 127.0.0.1"]);
    let elsewhere = |i: usize, o: &mut JoinOptions| {
        o.advertise = (i == 0).then(|| "127.0.0.2".parse().unwrap());
    };
    let unreachable =
        "rank 1 ( .. cannot reach rank 0 ( .. , 127.0.0.2: .. ): connection refused .. rank 2 (";
    check(&[0, 1, 2], 3, &elsewhere, &[unreachable; 3]);
}

/// A program that answers a rank with something else.
#[test]
fn who_answers_wrongly_at_rank_0s_address_is_named() {
    let check = |answer: &dyn Fn(&mut TcpStream), says: &str| {
        let (listener, master) = listener();
        std::thread::scope(|s| {
            let rank = s.spawn(move || {
                let mut options = JoinOptions::new(1, 2, master, secret());
                options.timeout = Duration::from_millis(700);
                join(options).unwrap_err().to_string()
            });
            let (mut stream, _) = listener.accept().unwrap();
            answer(&mut stream);
            drop((stream, listener));
            let e = rank.join().unwrap();
            assert!(e.contains(says), "expected {says:?}, got {e:?}");
        });
    };
    let hello = |stream: &mut TcpStream| {
        let mut hello = [0; 72];
        stream.read_exact(&mut hello).unwrap();
        hello
    };
    check(&|stream| stream.write_all(&[b'H'; 200]).unwrap(), "is not a rank of a job");
    let newer = |stream: &mut TcpStream| {
        let mut hello = hello(stream);
        hello[8] = 77;
        stream.write_all(&hello).unwrap();
    };
    check(&newer, "speaks version 77 of the protocol and this rank version 4");
    let mirror = |stream: &mut TcpStream| {
        let hello = hello(stream);
        stream.write_all(&hello).unwrap();
        let mut proof = [0; 33];
        stream.read_exact(&mut proof[1..]).unwrap();
        stream.write_all(&proof).unwrap();
    };
    check(&mirror, "have different secrets");
    check(&|_| {}, "rank 1 did not reach rank 0");
}

/// Strangers of all kinds come before, between and after the ranks.
#[test]
fn strangers_are_turned_away_and_the_ranks_do_not_notice() {
    let (listener, master) = listener();
    let addr: SocketAddr = master.parse().unwrap();
    let huge = [(1u64 << 60).to_le_bytes(), (1u64 << 60).to_be_bytes()].concat();
    let mut claims = b"POLYREME".to_vec();
    claims.extend([3, 0, 1, 0]);
    claims.resize(200, 0xff);
    let mut old = claims.clone();
    old[8] = 0;
    let says: [&[u8]; 6] =
        [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", &huge.repeat(20), &claims, &claims[..71], &old];
    // More at once than there is room for, and all of them stay.
    let mut strangers = Vec::new();
    for i in 0..120 {
        let mut stream = TcpStream::connect(addr).unwrap();
        stream.write_all(says[i % says.len()]).unwrap();
        strangers.push(stream);
    }
    let begun = Instant::now();
    let ranks = start_at(&[0, 1, 2], 3, listener, &master, &|_, _| {});
    assert!(begun.elapsed() < LIMIT, "strangers held the ranks up for {:?}", begun.elapsed());
    let mut answer = Vec::new();
    for mut stream in strangers {
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        answer.clear();
        // Closed or reset, with at most a hello and a refusal.
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.len() <= 72 + 33, "a stranger was told {} bytes", answer.len());
    }
    all(ranks.into_iter().map(Result::unwrap).collect(), |me| {
        // Joining is over.
        TcpStream::connect(addr).unwrap_err();
        assert_eq!(me.control.share(b"x").unwrap().len(), 3);
        me.control.goodbye().unwrap();
        // Once its links are gone, a rank takes no connections.
        let addr = me.members[me.rank].addr;
        drop(me);
        TcpStream::connect(addr).unwrap_err();
    });
}

#[test]
fn a_rank_that_came_and_went_may_come_again() {
    let (listener, master) = listener();
    std::thread::scope(|s| {
        let early = {
            let mut options = JoinOptions::new(1, 3, &master, secret());
            options.timeout = Duration::from_secs(20);
            // It fails after rank 0 took it in: no such interface.
            options.bind = Some("192.0.2.1".parse().unwrap());
            s.spawn(move || join(options).unwrap_err().to_string())
        };
        let others = s.spawn(|| start_at(&[0, 2], 3, listener, &master, &|_, _| {}));
        assert!(early.join().unwrap().contains("rank 1 cannot listen on 192.0.2.1"));
        let mut options = JoinOptions::new(1, 3, &master, secret());
        options.timeout = Duration::from_secs(20);
        let again = join(options).unwrap();
        let mut ranks: Vec<Joined> = others.join().unwrap().into_iter().map(Result::unwrap).collect();
        ranks.push(again);
        all(ranks, |me| me.control.goodbye().unwrap());
    });
}

/// One rank of three misbehaves; all get the same report.
#[test]
fn all_ranks_get_the_same_report() {
    let check = |actor: usize, act: &(dyn Fn(Joined) + Sync), says: &str| {
        let reports = all(joined(3), |me| {
            let begun = Instant::now();
            let (rank, alarm) = (me.rank, me.control.alarm());
            me.control.pulse().at(40 + rank as u64, Doing::AllGather);
            me.control.share(b"all are here").unwrap();
            let stays = if rank == actor {
                act(me);
                None
            } else {
                Some(me)
            };
            while alarm.raised().is_none() && rank != actor {
                assert!(begun.elapsed() < LIMIT, "rank {rank} did not hear of {says:?}");
                std::thread::sleep(Duration::from_millis(5));
            }
            if let Some(me) = &stays {
                assert_eq!(me.control.share(b"").unwrap_err(), alarm.raised().unwrap());
                assert_eq!(me.control.goodbye().unwrap_err(), alarm.raised().unwrap());
            }
            alarm.raised()
        });
        let mut said: Vec<String> = reports.iter().flatten().map(|report| report.to_string()).collect();
        assert!(said.len() >= 2);
        said.dedup();
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].contains(says), "{said:?}");
    };
    for rank in 0..3 {
        let step = 40 + rank;
        let disk = |me: Joined| drop(me.control.fail("disk full"));
        check(rank, &disk, &format!("failed: disk full (at step {step}, in all-gather)"));
        check(rank, &|me| drop(me), &format!("is gone (at step {step}, in all-gather)"));
        let local = |me: Joined| {
            // Another thread of this process notices, and the process goes on.
            let cause = Cause::Disagrees { what: "op 7".into() };
            me.control.alarm().raise(polyreme_net::Report {
                rank: 1,
                host: String::new(),
                step: 3,
                op: "x".into(),
                cause,
            });
            std::mem::forget(me);
        };
        check(rank, &local, "rank 1 disagrees with the others: op 7 (at step 3, in x)");
        let large = |me: Joined| drop(me.control.share(&vec![0; SHARE_BYTES_MAX + 1]).unwrap_err());
        check(rank, &large, "65537 bytes to share between ranks; at most 65536 are allowed");
    }
    // One ends, and the others go on to share.
    all(joined(3), |me| match me.rank {
        1 => me.control.goodbye().unwrap(),
        _ => assert_eq!(me.control.share(b"").unwrap_err().rank, 1),
    });
}

fn all_links(me: &Joined) -> Links {
    me.links(0, &(0..me.size).collect::<Vec<_>>()).unwrap()
}

fn no_pairs_first(_: usize, options: &mut JoinOptions) {
    options.first = First::NoPairs;
}

/// One byte to the next rank, and one from the one before.
fn around(links: &mut Links, step: u64) -> Result<(), Report> {
    let (rank, size) = (links.rank(), links.size());
    let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
    let moves = Moves::new(vec![Move::send_from(next, 0..1), Move::recv(before, 0..1)]);
    let tag = Tag { step, op: FrameOp::AllGather, dtype: 0, count: 1, terms: Terms::default() };
    let mut heard = [0];
    links.run(&tag, &moves, &[rank as u8], &mut heard, &mut |_, _, _| {})?;
    assert_eq!(usize::from(heard[0]), before);
    Ok(())
}

#[test]
fn a_ring_of_sixteen_ranks_needs_two_connections_a_rank() {
    let ranks: Vec<usize> = (0..16).collect();
    let ranks = start(&ranks, 16, &no_pairs_first).into_iter().map(Result::unwrap).collect();
    all(ranks, |me| {
        let mut links = all_links(&me);
        assert_eq!(links.linked(), []);
        // Who has looked may be called on by a neighbour.
        me.control.share(b"all have looked").unwrap();
        for step in 0..10 {
            around(&mut links, step).unwrap();
        }
        let mut neighbours = [(me.rank + 15) % 16, (me.rank + 1) % 16];
        neighbours.sort_unstable();
        assert_eq!(links.linked(), neighbours);
        me.control.share(b"all are done").unwrap();
        me.control.goodbye().unwrap();
    });
}

/// Two ranks first talk in the middle of a job. The one that receives is busy and has strangers at its door; the one that
/// sends, the lower as well as the higher of the two, does not wait for it to receive.
#[test]
fn two_ranks_first_talk_while_the_other_one_is_busy() {
    let tag = Tag { step: 7, op: FrameOp::Send, dtype: 0, count: 5, terms: Terms::default() };
    let send = Moves::new(vec![Move::send_from(2, 0..5)]);
    let back = Moves::new(vec![Move::send_from(0, 0..5)]);
    for (from, to, moves) in [(0, 2, send), (2, 0, back)] {
        // Four around a ring: these two are not neighbours.
        let ranks = start(&[0, 1, 2, 3], 4, &no_pairs_first).into_iter().map(Result::unwrap).collect();
        all(ranks, |me| {
            let mut links = all_links(&me);
            around(&mut links, 0).unwrap();
            assert!(me.rank != from || !links.linked().contains(&to));
            let mut strangers = Vec::new();
            if me.rank == from {
                for _ in 0..100 {
                    let mut stranger = TcpStream::connect(me.members[to].addr).unwrap();
                    stranger.write_all(b"GET / HTTP/1.1").unwrap();
                    strangers.push(stranger);
                }
                links.run(&tag, &moves, b"hello", &mut [], &mut |_, _, _| {}).unwrap();
            }
            // Only now does the other one turn to it.
            me.control.share(b"it is sent").unwrap();
            if me.rank == to {
                let mut heard = [0; 5];
                let moves = Moves::new(vec![Move::recv(from, 0..5)]);
                links.run(&tag, &moves, &[], &mut heard, &mut |_, _, _| {}).unwrap();
                assert_eq!(&heard, b"hello");
            }
            me.control.share(b"it is heard").unwrap();
            me.control.goodbye().unwrap();
        });
    }
}

/// Rank 1 advertised an address where it does not listen: found when rank 2 first talks with it.
#[test]
fn a_pair_that_cannot_connect_is_reported_alike_by_all_ranks() {
    let ranks = start(&[0, 1, 2], 3, &|i, options| {
        no_pairs_first(i, options);
        options.advertise = (i == 1).then(|| "127.0.0.2".parse().unwrap());
    });
    let reports = all(ranks.into_iter().map(Result::unwrap).collect(), |me| {
        let begun = Instant::now();
        let mut links = all_links(&me);
        me.control.pulse().at(5, Doing::AllGather);
        // The first turn around reaches rank 0 without the two.
        let report = (0..3).find_map(|_| around(&mut links, 5).err()).unwrap();
        assert!(begun.elapsed() < 4 * LIMIT, "it took {:?}", begun.elapsed());
        report
    });
    assert!(reports.iter().all(|report| *report == reports[0]), "{reports:?}");
    let said = reports[0].to_string();
    let names = ["rank 1 on ", "cannot be reached: rank 2 on ", "cannot connect to it at 127.0.0.2:"];
    assert!(names.iter().all(|name| said.contains(name)), "{said}");
    assert!(said.ends_with("connection refused (at step 5, in all-gather)"), "{said}");
}

const RING: &str = "POLYREME_TEST_RING";

/// Not a test by itself: one process of a ring. It prints how many sockets and threads it has.
#[test]
fn ring_process() {
    let Ok(args) = std::env::var(RING) else { return };
    let args: Vec<&str> = args.split('\n').collect();
    let mut options = JoinOptions::new(args[0].parse().unwrap(), args[1].parse().unwrap(), args[2], secret());
    options.first = First::NoPairs;
    let me = join(options).unwrap();
    let mut links = all_links(&me);
    (0..3).for_each(|step| around(&mut links, step).unwrap());
    let files = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let kinds = files.filter_map(|file| std::fs::read_link(file.path()).ok());
    let sockets = kinds.filter(|kind| kind.to_string_lossy().starts_with("socket:")).count();
    let threads = std::fs::read_dir("/proc/self/task").unwrap().count();
    println!("{sockets} sockets, {threads} threads, ring");
    me.control.share(b"all have said it").unwrap();
    me.control.goodbye().unwrap();
}

/// A process's open sockets and threads depend on the ranks that it talks with, not on the number of ranks.
#[test]
fn sixty_four_processes_form_a_group() {
    let (size, master) = (64, listener().1);
    let begun = Instant::now();
    let start = |rank: usize| {
        let args = [&rank.to_string(), &size.to_string(), &master[..]].join("\n");
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["ring_process", "--exact", "--nocapture"])
            .env(RING, args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn();
        let mut child = child.unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        Process { child, said }
    };
    let mut ranks: Vec<Process> = (0..size).map(start).collect();
    for (rank, process) in ranks.iter_mut().enumerate() {
        let line = process.line("ring");
        // Two neighbours, a listener, and the connection to rank 0; which has as many of those as there are others.
        let sockets = if rank == 0 { 2 + 1 + size - 1 } else { 4 };
        // Two of the test, and two for the others: control and door.
        assert!(line.contains(&format!("{sockets} sockets, 4 threads")), "rank {rank}: {line}");
    }
    println!("64 processes formed a group and went three times around it in {:?}", begun.elapsed());
    assert!(ranks.iter_mut().all(|process| process.child.wait().unwrap().success()));
}

/// A process of the example, run by this test binary.
struct Process {
    child: Child,
    said: BufReader<std::process::ChildStdout>,
}

const CHILD: &str = "POLYREME_TEST_RANK";

/// Not a test by itself: what a [`Process`] runs.
#[test]
fn rank_process() {
    let Ok(args) = std::env::var(CHILD) else { return };
    let args: Vec<String> = args.split('\n').map(str::to_owned).collect();
    if let Err(e) = example::run(&args) {
        println!("error: {e}");
    }
}

impl Process {
    fn start(rank: usize, size: usize, master: &str) -> Process {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["rank_process", "--exact", "--nocapture"])
            .env(CHILD, [&rank.to_string(), &size.to_string(), master, SECRET].join("\n"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        Process { child, said }
    }

    /// The next line that contains that.
    fn line(&mut self, contains: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.said.read_line(&mut line).unwrap() > 0, "it ended without {contains:?}");
            if line.contains(contains) {
                return line;
            }
        }
    }

    fn signal(&self, signal: &str) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn processes(size: usize) -> Vec<Process> {
    // No other process gets this port so soon: the system hands out others first.
    let master = listener().1;
    let mut ranks: Vec<_> = (0..size).map(|rank| Process::start(rank, size, &master)).collect();
    for (rank, process) in ranks.iter_mut().enumerate() {
        let line = process.line("joined");
        assert!(line.contains(&format!("rank {rank} of {size} joined: blob 0, blob 1")), "{line}");
    }
    ranks
}

/// A process is lost; the others say so, in the same words, in time.
fn check_lost(lost: usize, signal: &str, says: &str) {
    let mut ranks = processes(4);
    let begun = Instant::now();
    ranks[lost].signal(signal);
    let mut reports = Vec::new();
    for (rank, process) in ranks.iter_mut().enumerate() {
        if rank != lost {
            reports.push(process.line("error: "));
        }
    }
    assert!(begun.elapsed() < LIMIT, "it took {:?}", begun.elapsed());
    reports.dedup();
    assert_eq!(reports.len(), 1, "{reports:?}");
    let step = "(at step 7, in all-reduce)";
    let named = format!("rank {lost} on ");
    assert!([says, step, &named].iter().all(|part| reports[0].contains(part)), "{reports:?}");
    if signal == "-STOP" {
        // It wakes up, and learns that the others went on without it.
        ranks[lost].signal("-CONT");
        let line = ranks[lost].line("error: ");
        assert!(lost == 0 || line == reports[0], "{line}");
    }
}

#[test]
fn a_killed_rank_is_reported_by_all_others() {
    check_lost(2, "-KILL", "is gone");
}

#[test]
fn killing_rank_0_is_reported_by_all_others() {
    check_lost(0, "-KILL", "is gone");
}

#[test]
fn a_stopped_rank_is_reported_by_all_others() {
    check_lost(3, "-STOP", "has been silent for 4.0 s");
}

#[test]
fn stopping_rank_0_is_reported_by_all_others() {
    check_lost(0, "-STOP", "has been silent for 4.0 s");
}

#[test]
fn processes_end_when_they_are_done() {
    let mut ranks = processes(3);
    for (rank, process) in ranks.iter_mut().enumerate().rev() {
        process.child.stdin.take().unwrap().write_all(b"\n").unwrap();
        process.line(&format!("rank {rank} ended"));
    }
}
