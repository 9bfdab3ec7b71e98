//! Any bytes on a control connection: messages, as they were sent, and then a reason why no more come. A sealed
//! connection lets nothing through that was changed.

use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use polyreme_fuzz::{Random, Target};

use super::*;
use crate::pulse::Position;
use crate::seal;

const BYTES_MAX: usize = 2000;

fn messages() -> [Message; 4] {
    [
        Message::Welcome { wait_ms: 5, patience_ms: 6, stall_ms: 7 },
        Message::Beat(Position::START),
        Message::Share { seq: 3, blob: vec![b'x'; 40] },
        Message::Goodbye,
    ]
}

/// A channel on which all of this has come, and which the other side has closed. A pair of local sockets, which have no
/// delays, stands in for TCP.
fn channel(input: &[u8], seals: Option<Box<Seals>>) -> Channel {
    let (mut give, take) = UnixStream::pair().unwrap();
    give.write_all(input).unwrap();
    let stream = Stream::Tcp(TcpStream::from(OwnedFd::from(take)));
    stream.set_nonblocking(true).unwrap();
    Channel {
        kinds: std::marker::PhantomData,
        stream,
        seals,
        inbox: Vec::new(),
        outbox: Vec::new(),
        message_bytes_max: BYTES_MAX,
        length: None,
        malformed: false,
        ended: None,
    }
}

/// All messages that a channel receives, and why it ended.
fn hear(channel: &mut Channel) -> (Vec<Message>, Ended) {
    let mut heard = Vec::new();
    loop {
        match channel.receive() {
            Ok(Some(message)) => heard.push(message),
            Ok(None) => panic!("it waits on a closed connection"),
            Err(ended) => return (heard, ended),
        }
    }
}

/// Messages as bytes on the wire.
fn wire(messages: &[Message]) -> Vec<u8> {
    messages
        .iter()
        .flat_map(|m| [&(m.encode().len() as u32).to_le_bytes()[..], &m.encode()].concat())
        .collect()
}

/// Repairs the lengths of all messages.
fn mend(input: &mut [u8], random: &mut Random) {
    let mut at = 0;
    while let Some(length) = input.get(at..).and_then(|rest| rest.first_chunk::<4>()) {
        let left = input.len() - at - 4;
        let mut length = (u32::from_le_bytes(*length) as usize).min(left);
        if random.one_in(8) {
            length = random.below(left + 1);
        }
        input[at..at + 4].copy_from_slice(&(length as u32).to_le_bytes());
        at += 4 + length;
    }
}

#[test]
fn control_stream() {
    let target = Target {
        name: "control stream",
        corpus: vec![wire(&messages()), wire(&messages()[2..])],
        words: &[b"\0\0\0\0", b"\x01\0\0\0\x0b", b"\xd0\x07\0\0", b"\xd1\x07\0\0"],
        mend: &|input, random| mend(input, random),
        memory: &|len| (64 << 10) + 64 * len,
    };
    target.run(|input| {
        let mut channel = channel(input, None);
        let (heard, ended) = hear(&mut channel);
        assert!(channel.inbox.len() <= input.len());
        // What was heard is what a channel that says the same would send.
        let again = hear(&mut self::channel(&wire(&heard), None));
        assert_eq!(again, (heard.clone(), Ended::Closed));
        let kinds: String = heard.iter().map(|m| char::from(b'a' + m.encode()[0])).take(6).collect();
        match ended {
            Ended::Closed => Ok(kinds),
            Ended::Malformed { what } => Err(format!("{kinds} {what}")),
        }
    });
}

#[test]
fn sealed_control_stream() {
    // Sealed once: the keys stay, so every input is one that an eavesdropper could have made of this.
    let (mut ours, theirs) = seal::pair().unwrap();
    let mut wire = Vec::new();
    for message in messages() {
        let mut bytes = message.encode();
        let mut head = [0; LENGTH_BYTES + SEAL_BYTES];
        head[..LENGTH_BYTES].copy_from_slice(&(bytes.len() as u32).to_le_bytes());
        ours.out.seal(&mut head, &mut bytes);
        wire.extend([&head[..], &bytes].concat());
    }
    let target = Target {
        name: "sealed control stream",
        corpus: vec![wire.clone()],
        words: &[],
        mend: &|_, _| {},
        memory: &|len| (64 << 10) + 64 * len,
    };
    let mut seals = Some(Box::new(theirs));
    target.run(|input| {
        let mut taken = seals.take().unwrap();
        taken.into.rewind();
        let mut channel = channel(input, Some(taken));
        let (heard, ended) = hear(&mut channel);
        seals = channel.seals.take();
        // Only a prefix of what was sent, and all of it only if nothing before its end was changed.
        assert!(messages().starts_with(&heard), "{heard:?}");
        let same = input.iter().zip(&wire).take_while(|(a, b)| a == b).count();
        assert!(self::wire(&heard).len() + heard.len() * SEAL_BYTES <= same, "{heard:?} of {same} bytes");
        match ended {
            Ended::Closed => Ok(format!("{heard:?}")),
            Ended::Malformed { what } => Err(what),
        }
    });
}
