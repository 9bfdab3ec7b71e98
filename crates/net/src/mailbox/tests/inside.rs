//! Mailboxes of threads of one process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::{Class, ClassBounds, Label, Limits, PostError, within};
use super::{label, text};
use crate::alarm::Alarm;
use crate::report::Cause;

const SMALL: ClassBounds =
    ClassBounds { letter_bytes_max: 5000, inbox_bytes_max: 4096, outbox_bytes_max: 4096 };
const LIMITS: Limits = Limits { urgent: SMALL, data: SMALL };

/// Each posts to each, itself included, while each takes slowly: order, contents and bounds.
#[test]
fn letters_come_in_order_and_bounds_hold() {
    const RANKS: usize = 4;
    const LETTERS: u64 = 200;
    let ranks = within(RANKS, LIMITS, Alarm::default());
    std::thread::scope(|s| {
        for mailbox in &ranks {
            let me = mailbox.rank();
            s.spawn(move || {
                for n in 0..LETTERS {
                    for (to, class) in (0..RANKS).flat_map(|to| Class::ALL.map(|class| (to, class))) {
                        let bytes = (n as usize * 37) % 1500;
                        mailbox.post(to, class, label(1, n), text(me, to, class, n, bytes)).unwrap();
                    }
                }
            });
            s.spawn(move || {
                let mut next = [[0; 2]; RANKS];
                for _ in 0..LETTERS * 2 * RANKS as u64 {
                    for class in Class::ALL {
                        let held = mailbox.held_bytes(class);
                        assert!(held.0 <= RANKS * SMALL.inbox_bytes_max && held.1 == 0, "{held:?}");
                    }
                    let letter = mailbox.take().unwrap().unwrap();
                    let n = &mut next[letter.from][letter.class as usize];
                    let expected = text(letter.from, me, letter.class, *n, (*n as usize * 37) % 1500);
                    assert!(letter.label == label(1, *n) && letter[..] == expected[..]);
                    *n += 1;
                }
                assert!(mailbox.held_bytes(Class::Data) == (0, 0));
            });
        }
    });
    ranks.iter().for_each(|mailbox| mailbox.close().unwrap());
}

#[test]
fn a_full_inbox_refuses_data_and_takes_what_is_urgent() {
    let ranks = within(2, LIMITS, Alarm::default());
    let now = Instant::now();
    let post = |class| ranks[0].post_until(1, class, Label::default(), vec![0; 1500], now);
    assert_eq!([post(Class::Data), post(Class::Data)], [Ok(()), Ok(())]);
    assert_eq!(post(Class::Data), Err(PostError::Full { rank: 1 }));
    assert_eq!(post(Class::Urgent), Ok(()));
    // The other way, and from another sender, nothing is full.
    assert_eq!(ranks[1].post_until(1, Class::Data, Label::default(), vec![0; 1500], now), Ok(()));
    assert_eq!(ranks[1].take().unwrap().unwrap().class, Class::Urgent);
    assert_eq!(ranks[1].take_of(&[Class::Urgent], now).unwrap().map(|letter| letter.from), None);
    assert_eq!(ranks[1].take().unwrap().unwrap().class, Class::Data);
    assert_eq!(post(Class::Data), Ok(()));
    let (bytes, max) = (5001, 5000);
    let long = ranks[0].post(1, Class::Data, Label::default(), vec![0; bytes]);
    assert_eq!(long, Err(PostError::TooLong { bytes, max }));
}

/// A letter that is longer than the bound goes alone, and its bytes are the sender's.
#[test]
fn letters_are_shared_and_not_copied() {
    let ranks = within(2, LIMITS, Alarm::default());
    let bytes: Arc<Vec<u8>> = Arc::new(vec![7; 5000]);
    ranks[0].post(1, Class::Data, Label::default(), bytes.clone()).unwrap();
    assert_eq!(ranks[1].take().unwrap().unwrap().as_ptr(), bytes.as_ptr());
    assert_eq!(Arc::strong_count(&bytes), 1, "a taken letter shares no memory");
}

#[test]
fn waits_end_with_time_with_close_and_with_a_loss() {
    let ranks = within(3, LIMITS, Alarm::default());
    let soon = Instant::now() + Duration::from_millis(20);
    assert!(ranks[0].take_until(soon).unwrap().is_none() && Instant::now() >= soon);
    std::thread::scope(|s| {
        let taker = s.spawn(|| ranks[1].take());
        ranks[1].post(2, Class::Data, Label::default(), vec![1]).unwrap();
        ranks[1].close().unwrap();
        assert!(taker.join().unwrap().unwrap().is_none());
    });
    let closed = ranks[0].post(1, Class::Urgent, Label::default(), vec![]);
    assert_eq!(closed, Err(PostError::Closed { rank: 1 }));
    assert_eq!(ranks[2].take().unwrap().unwrap()[..], [1]);
    let mut ranks = ranks.into_iter();
    let [zero, _one, two] = [(); 3].map(|()| ranks.next().unwrap());
    std::thread::scope(|s| {
        let taker = s.spawn(|| two.take());
        let poster = s.spawn(|| {
            loop {
                if let Err(e) = two.post(0, Class::Data, Label::default(), vec![0; 1000]) {
                    return e;
                }
            }
        });
        s.spawn(move || drop(zero));
        let report = taker.join().unwrap().unwrap_err();
        assert_eq!((report.rank, &report.cause), (0, &Cause::Gone));
        assert_eq!(poster.join().unwrap(), PostError::Lost(report));
    });
}
