//! `--processes N`: copies of this program on this host, a rank each.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::crew::CrewMember;
use super::{LAUNCHED, TRANSPORT, Transport};

/// `n` copies of `program` with the same arguments; the environment says which rank each is.
pub fn members(program: &Path, args: &[OsString], n: usize, transport: Transport) -> Vec<CrewMember> {
    let member = |rank: usize| {
        let mut command = Command::new(program);
        command.args(args);
        for (key, value) in place(rank, n, rank, n) {
            command.env(key, value);
        }
        command.env(TRANSPORT, transport.name());
        // An outer launcher's variables about this process do not apply to its children.
        for key in ["MASTER_ADDR", "MASTER_PORT", "SSH_CONNECTION"] {
            command.env_remove(key);
        }
        CrewMember { rank, host: String::new(), command, pause: Duration::ZERO }
    };
    (0..n).map(member).collect()
}

/// The environment of a rank that a launcher starts.
pub fn place(rank: usize, size: usize, local_rank: usize, local_size: usize) -> Vec<(&'static str, String)> {
    vec![
        (LAUNCHED, "1".into()),
        ("RANK", rank.to_string()),
        ("WORLD_SIZE", size.to_string()),
        ("LOCAL_RANK", local_rank.to_string()),
        ("LOCAL_WORLD_SIZE", local_size.to_string()),
    ]
}

/// 256 random bits, as hexadecimal digits.
pub fn random_secret() -> io::Result<String> {
    let mut bytes = [0; 32];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|b| format!("{b:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_know_their_place_and_not_the_secret() {
        let args = [OsString::from("train"), OsString::from("a b.toml")];
        let members = members(Path::new("/bin/polyreme"), &args, 3, Transport::Shm);
        assert_eq!(members.len(), 3);
        let last = &members[2].command;
        assert_eq!(last.get_args().collect::<Vec<_>>(), ["train", "a b.toml"]);
        let env: Vec<_> =
            last.get_envs().map(|(k, v)| (k.to_str().unwrap(), v.map(|v| v.to_str().unwrap()))).collect();
        assert!(env.contains(&("RANK", Some("2"))) && env.contains(&("WORLD_SIZE", Some("3"))), "{env:?}");
        assert!(env.contains(&("MASTER_PORT", None)), "{env:?}");
        assert!(env.iter().all(|(k, _)| !k.contains("SECRET")), "{env:?}");
        let (a, b) = (random_secret().unwrap(), random_secret().unwrap());
        assert!(a.len() == 64 && a != b);
    }
}
