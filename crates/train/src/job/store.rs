//! The address of a store that keeps who coordinates an elastic run: `etcd://HOST:PORT,HOST:PORT/PREFIX`.

use std::fmt;
use std::str::FromStr;

use super::cursor::At;
use super::shape::Shape;
use super::tree::Value;
use super::types::Type;

const SCHEME: &str = "etcd://";
const HINT: &str = "write store = \"etcd://HOST:2379/PREFIX\", with a prefix for this run alone";

/// Where the store is, and under which prefix it keeps this run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoreAddress {
    /// `host:port` of each of its servers.
    pub servers: Vec<String>,
    /// What the names of the run's values begin with.
    pub prefix: String,
}

impl StoreAddress {
    /// Whether a text is meant to be one.
    pub fn is_meant(text: &str) -> bool {
        text.contains("://")
    }
}

impl FromStr for StoreAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<StoreAddress, String> {
        let rest = text.strip_prefix(SCHEME).ok_or(format!("does not begin with {SCHEME}"))?;
        let (servers, prefix) = rest.split_once('/').ok_or("has no prefix")?;
        let prefix = prefix.trim_matches('/');
        if prefix.is_empty() || prefix.chars().any(|c| c.is_whitespace() || c.is_control()) {
            return Err("has no prefix".into());
        }
        let servers: Vec<String> = servers.split(',').map(String::from).collect();
        let is_server = |server: &String| {
            let parts = server.rsplit_once(':');
            parts.is_some_and(|(host, port)| {
                let plain = |c: char| c.is_ascii_alphanumeric() || "-._[]:".contains(c);
                !host.is_empty() && host.chars().all(plain) && port.parse::<u16>().is_ok_and(|port| port > 0)
            })
        };
        match servers.iter().find(|server| !is_server(server)) {
            Some(server) => Err(format!("has {server:?} where HOST:PORT is expected")),
            None => Ok(StoreAddress { servers, prefix: prefix.into() }),
        }
    }
}

impl fmt::Display for StoreAddress {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{SCHEME}{}/{}", self.servers.join(","), self.prefix)
    }
}

/// The address of a store.
pub(super) fn address() -> Type<StoreAddress> {
    let read = |at: &At| {
        let read = at.string()?.parse();
        read.map_err(|why: String| at.fault(format!("`{}` {why}", at.path), HINT)).ok()
    };
    Type::new(Shape::Text, read, |address: &StoreAddress| Some(Value::String(address.to_string())))
}
