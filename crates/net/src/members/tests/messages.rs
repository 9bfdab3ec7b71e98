//! Messages come back as they were written, and no bytes do harm.

use polyreme_fuzz::{ReadResult, Target};

use super::super::message::{
    Formation, JobMark, MemoryUse, OwnShare, Ready, Returned, ToCoordinator, ToMember,
};
use super::super::tally::TallySummary;
use crate::control::bytes::Malformed;
use crate::control::channel::Wire;

fn to_coordinator() -> Vec<ToCoordinator> {
    let ready =
        Ready { generation: 3, held: Some(17), redoes: true, listen: "127.0.0.1:9".into(), why: "x".into() };
    vec![
        ToCoordinator::Enter {
            host: "höst".into(),
            host_key: "k 1".into(),
            pid: 7,
            job: JobMark { name: "digits".into(), digest: 11 },
            child: Some(0),
            was: Some(4),
        },
        ToCoordinator::Return {
            host: "höst".into(),
            host_key: String::new(),
            pid: 7,
            job: JobMark { name: "digits".into(), digest: u64::MAX },
            id: 5,
            returned: Returned {
                generation: 4,
                ranks: vec![5, 9],
                running: true,
                trained: false,
                tally: TallySummary { steps_redone: 1, ..Default::default() },
            },
        },
        ToCoordinator::Ready(Ready { held: None, redoes: false, ..ready.clone() }),
        ToCoordinator::Ready(ready),
        ToCoordinator::Running { generation: 2 },
        ToCoordinator::Note(b"runs/a".to_vec()),
        ToCoordinator::Beat { step: u64::MAX, own: OwnShare { samples: 16, busy_us: 2500 } },
        ToCoordinator::Leaves,
        ToCoordinator::Done { generation: 9 },
        ToCoordinator::Ask,
    ]
}

fn to_member() -> Vec<ToMember> {
    let form = Formation {
        generation: 4,
        rank: 1,
        master: "[::1]:80".into(),
        ranks: vec![3, 1, 8],
        held: vec![Some(6), None, Some(7)],
        source: Some(2),
        save_only: true,
        memory: false,
        note: b"runs/a".to_vec(),
        why: "a rank joins".into(),
    };
    let welcome = |runs_on, succession, memory| ToMember::Welcome {
        id: 1,
        patience_ms: 3000,
        runs_on,
        succession,
        memory,
    };
    vec![
        welcome(None, false, MemoryUse::Never),
        welcome(Some(7), true, MemoryUse::IfAllHere),
        welcome(None, true, MemoryUse::Always),
        ToMember::Refused { why: "no".into() },
        ToMember::Form(Box::new(Formation { source: None, memory: true, ..form.clone() })),
        ToMember::Form(Box::new(form)),
        ToMember::Cancel { generation: 1, why: "lost".into() },
        ToMember::Change { generation: 1 },
        ToMember::Alive,
        ToMember::Tally(TallySummary { ranks_lost: 3, parts_us_p50: [1, 2, 3], ..Default::default() }),
        ToMember::End { why: None },
        ToMember::End { why: Some(String::new()) },
        ToMember::Status("{}".into()),
    ]
}

fn check<M: Wire + PartialEq + std::fmt::Debug>(messages: Vec<M>, name: &str) {
    for message in &messages {
        let bytes = message.encode();
        assert_eq!(M::decode(&bytes).as_ref(), Ok(message));
        for cut in 0..bytes.len() {
            assert_eq!(M::decode(&bytes[..cut]), Err(Malformed), "{message:?} cut at {cut}");
        }
    }
    let target = Target {
        name,
        corpus: messages.iter().map(Wire::encode).collect(),
        words: &[b"\0\0\0\0", b"\x04\0\0\0", b"\xff"],
        mend: &|_, _| {},
        memory: &|len| 4096 + 64 * len,
    };
    target.run(|input| -> ReadResult {
        let message = M::decode(input).map_err(|Malformed| "malformed")?;
        assert_eq!(M::decode(&message.encode()).as_ref(), Ok(&message));
        Ok(format!("{message:?}").chars().filter(|c| c.is_alphabetic()).take(20).collect())
    });
}

#[test]
fn messages_of_members_survive_any_bytes() {
    check(to_coordinator(), "membership, to the coordinator");
}

#[test]
fn messages_of_the_coordinator_survive_any_bytes() {
    check(to_member(), "membership, to a member");
}
