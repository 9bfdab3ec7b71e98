//! What processes tell each other that open one set together, each with files of its own.
//!
//! How they are reached is not known here: a [`Members`] does it. Everything in it is collective: all members call the same functions
//! in the same order, and a member that cannot go on ends the calls of the others with an error. Who opens a set alone is the only
//! member of [`Alone`], for whom nothing is put into bytes.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::DataError;

/// Processes that open a set together.
pub trait Members {
    /// How many there are.
    fn size(&self) -> usize;

    /// Which this one is.
    fn rank(&self) -> usize;

    /// Every member gets the bytes that member `from` has. Collective.
    fn tell(&mut self, from: usize, bytes: Vec<u8>) -> Result<Vec<u8>, DataError>;
}

/// Where there are no others.
pub struct Alone;

impl Members for Alone {
    fn size(&self) -> usize {
        1
    }

    fn rank(&self) -> usize {
        0
    }

    fn tell(&mut self, _from: usize, bytes: Vec<u8>) -> Result<Vec<u8>, DataError> {
        Ok(bytes)
    }
}

/// Every member gets what member `from` has. Collective.
pub fn share<T: Serialize + DeserializeOwned>(
    members: &mut dyn Members,
    from: usize,
    value: &mut T,
) -> Result<(), DataError> {
    if members.size() == 1 {
        return Ok(());
    }
    let own = members.rank() == from;
    let bytes = if own { written(value)? } else { Vec::new() };
    let told = members.tell(from, bytes)?;
    if !own {
        *value = read(&told)?;
    }
    Ok(())
}

/// Every member gets what each has, in their order. Collective.
pub fn gather<T: Serialize + DeserializeOwned>(
    members: &mut dyn Members,
    mine: T,
) -> Result<Vec<T>, DataError> {
    if members.size() == 1 {
        return Ok(vec![mine]);
    }
    let (bytes, rank) = (written(&mine)?, members.rank());
    let mut all = Vec::with_capacity(members.size());
    for from in 0..members.size() {
        let told = members.tell(from, if from == rank { bytes.clone() } else { Vec::new() })?;
        all.push(read(&told)?);
    }
    Ok(all)
}

fn written<T: Serialize>(value: &T) -> Result<Vec<u8>, DataError> {
    serde_json::to_vec(value).map_err(|error| unreadable(&error))
}

fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, DataError> {
    serde_json::from_slice(bytes).map_err(|error| unreadable(&error))
}

fn unreadable(error: &serde_json::Error) -> DataError {
    let why = format!(
        "what ranks tell each other of their files cannot be read: {error}; give all the same version"
    );
    DataError::Setting { why }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::{Arc, Barrier, Mutex};

    use super::*;

    /// Members that are threads of this process.
    pub(crate) struct Threads {
        rank: usize,
        size: usize,
        told: Arc<(Barrier, Mutex<Vec<u8>>)>,
    }

    impl Members for Threads {
        fn size(&self) -> usize {
            self.size
        }

        fn rank(&self) -> usize {
            self.rank
        }

        fn tell(&mut self, from: usize, bytes: Vec<u8>) -> Result<Vec<u8>, DataError> {
            let (barrier, told) = &*self.told;
            if self.rank == from {
                *told.lock().unwrap() = bytes;
            }
            barrier.wait();
            let heard = told.lock().unwrap().clone();
            barrier.wait();
            Ok(heard)
        }
    }

    /// Runs `act` on each of so many members, and returns what they come to.
    pub(crate) fn on_members<T: Send>(size: usize, act: impl Fn(&mut Threads) -> T + Sync) -> Vec<T> {
        let told = Arc::new((Barrier::new(size), Mutex::new(Vec::new())));
        std::thread::scope(|scope| {
            let member = |rank| {
                let (told, act) = (told.clone(), &act);
                scope.spawn(move || act(&mut Threads { rank, size, told }))
            };
            let all: Vec<_> = (0..size).map(member).collect();
            all.into_iter().map(|member| member.join().unwrap()).collect()
        })
    }

    #[test]
    fn all_hear_the_same() {
        let heard = on_members(3, |members| {
            let mut word = format!("of {}", members.rank());
            share(members, 2, &mut word).unwrap();
            let mine = members.rank() * 10;
            (word, gather(members, mine).unwrap())
        });
        assert_eq!(heard, vec![("of 2".to_string(), vec![0, 10, 20]); 3]);
        assert_eq!(gather(&mut Alone, 7).unwrap(), [7]);
    }
}
