//! etcd as the store that says who coordinates, through its JSON gateway (`/v3/kv`, `/v3/lease`): plain HTTP, no client of gRPC.
//!
//! Two keys under the run's prefix. `coordinator` has a lease of the length of patience: the post. `generation` has none: the record. Everything
//! that depends on who has the post is one transaction that compares the revision of `coordinator`, so etcd decides.
//!
//! Servers are asked in turn, beginning with the one that answered last. What etcd says is trusted only as far as who coordinates: ranks
//! prove the job's secret to whoever listens at the address that stands there.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use polyreme_net::members::store::{Begins, GenerationRecord, MemberStore, Post, Revision, Term};
use polyreme_train::job::StoreAddress;
use serde_json::{Value, json};
use ureq::Agent;

/// How long one server may take to connect, and to answer. A server without a leader does not answer.
const CONNECT: Duration = Duration::from_millis(500);
const ANSWER: Duration = Duration::from_millis(1500);
/// The most bytes of an answer.
const ANSWER_BYTES_MAX: u64 = 1 << 20;
/// The shortest lease that etcd gives.
const LEASE_MIN: Duration = Duration::from_secs(2);

/// A run's keys in etcd.
pub(super) struct Etcd {
    agent: Agent,
    servers: Vec<String>,
    /// Which of them answered last.
    answered: AtomicUsize,
    post_key: String,
    record_key: String,
    lapses_after: Duration,
}

impl Etcd {
    /// The keys of a run at this address. Who coordinates it loses its place when it was silent for as long as `patience`.
    pub(super) fn new(address: &StoreAddress, patience: Duration) -> Etcd {
        let agent = Agent::config_builder()
            .proxy(None)
            .http_status_as_error(false)
            .timeout_connect(Some(CONNECT))
            .timeout_global(Some(ANSWER))
            .build()
            .new_agent();
        let key = |name: &str| STANDARD.encode(format!("{}/{name}", address.prefix));
        Etcd {
            agent,
            servers: address.servers.clone(),
            answered: AtomicUsize::new(0),
            post_key: key("coordinator"),
            record_key: key("generation"),
            lapses_after: Duration::from_secs(patience.max(LEASE_MIN).as_secs_f64().ceil() as u64),
        }
    }

    /// Asks one server after the other until one answers.
    fn ask(&self, path: &str, body: &Value) -> io::Result<Value> {
        let (first, n) = (self.answered.load(Ordering::Relaxed), self.servers.len());
        let mut last = io::Error::other("etcd has no servers");
        for at in (0..n).map(|k| (first + k) % n) {
            match self.ask_one(&self.servers[at], path, body) {
                Ok(answer) => {
                    self.answered.store(at, Ordering::Relaxed);
                    return Ok(answer);
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn ask_one(&self, server: &str, path: &str, body: &Value) -> io::Result<Value> {
        let said = |why: String| io::Error::other(format!("etcd at {server}: {why}"));
        let sent = self.agent.post(format!("http://{server}/v3/{path}")).send(body.to_string());
        let mut answer = sent.map_err(|e| said(e.to_string()))?;
        let text = answer.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_string();
        let text = text.map_err(|e| said(e.to_string()))?;
        let value: Value = serde_json::from_str(&text).map_err(|e| said(e.to_string()))?;
        match answer.status().is_success() {
            true => Ok(value),
            false => Err(said(value["message"].as_str().unwrap_or("it refuses").to_string())),
        }
    }

    /// A transaction that happens if the post has this revision; nothing if it has not.
    fn if_post_is(&self, revision: Revision, then: Value) -> io::Result<Option<Value>> {
        let compare = json!({
            "key": self.post_key, "target": "MOD", "result": "EQUAL", "mod_revision": revision.to_string(),
        });
        let answer = self.ask("kv/txn", &json!({"compare": [compare], "success": then}))?;
        Ok((answer["succeeded"] == true).then_some(answer))
    }
}

impl MemberStore for Etcd {
    fn look(&self) -> io::Result<Option<(Post, Revision)>> {
        let answer = self.ask("kv/range", &json!({"key": self.post_key}))?;
        let found = &answer["kvs"][0];
        if found.is_null() {
            return Ok(None);
        }
        let value = value_of(found)?;
        let at = value["at"].as_str().ok_or_else(|| unreadable(&value))?.to_string();
        Ok(Some((Post { at, member: value["member"].as_u64() }, number(&found["mod_revision"])?)))
    }

    fn claim(&self, post: &Post, over: Revision, begins: Begins) -> io::Result<Option<Term>> {
        let granted = self.ask("lease/grant", &json!({"TTL": self.lapses_after.as_secs().to_string()}))?;
        let lease = number(&granted["ID"])? as i64;
        let value = json!({"at": post.at, "member": post.member, "process": std::process::id()});
        let put = json!({"request_put": put(&self.post_key, &value, Some(lease))});
        let record = match begins {
            Begins::New => json!({"request_delete_range": {"key": self.record_key}}),
            Begins::GoesOn => json!({"request_range": {"key": self.record_key}}),
        };
        let Some(answer) = self.if_post_is(over, json!([put, record]))? else {
            // If it fails, it lapses.
            let _ = self.ask("lease/revoke", &json!({"ID": lease.to_string()}));
            return Ok(None);
        };
        let found = &answer["responses"][1]["response_range"]["kvs"][0];
        let record = if found.is_null() { None } else { Some(record_of(&value_of(found)?)?) };
        Ok(Some(Term { revision: number(&answer["header"]["revision"])?, lease, record }))
    }

    fn renew(&self, term: &Term) -> io::Result<bool> {
        let answer = self.ask("lease/keepalive", &json!({"ID": term.lease.to_string()}))?;
        // Without a time to live there is no such lease.
        let lives = !answer["result"]["TTL"].is_null();
        Ok(lives && self.look()?.is_some_and(|(_, revision)| revision == term.revision))
    }

    fn commit(&self, term: &Term, record: &GenerationRecord) -> io::Result<bool> {
        let value = json!({"generation": record.generation, "ranks": record.ranks});
        let put = json!([{"request_put": put(&self.record_key, &value, None)}]);
        Ok(self.if_post_is(term.revision, put)?.is_some())
    }

    fn resign(&self, term: &Term, over: bool) -> io::Result<()> {
        let delete = |key: &str| json!({"request_delete_range": {"key": key}});
        let keys = [&self.post_key, &self.record_key];
        let deleted: Vec<Value> = keys[..1 + usize::from(over)].iter().map(|key| delete(key)).collect();
        self.if_post_is(term.revision, json!(deleted))?;
        self.ask("lease/revoke", &json!({"ID": term.lease.to_string()})).map(drop)
    }

    fn lapses_after(&self) -> Duration {
        self.lapses_after
    }
}

fn put(key: &str, value: &Value, lease: Option<i64>) -> Value {
    let lease = lease.unwrap_or(0).to_string();
    json!({"key": key, "value": STANDARD.encode(value.to_string()), "lease": lease})
}

/// What a key has, which is JSON.
fn value_of(found: &Value) -> io::Result<Value> {
    let bytes = found["value"].as_str().and_then(|text| STANDARD.decode(text).ok());
    let value = bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    value.ok_or_else(|| unreadable(found))
}

fn record_of(value: &Value) -> io::Result<GenerationRecord> {
    let generation = value["generation"].as_u64().ok_or_else(|| unreadable(value))?;
    let ranks = value["ranks"].as_array().ok_or_else(|| unreadable(value))?;
    let ranks: Option<Vec<u64>> = ranks.iter().map(Value::as_u64).collect();
    Ok(GenerationRecord { generation, ranks: ranks.ok_or_else(|| unreadable(value))? })
}

/// Numbers of 64 bits are texts in etcd's JSON.
fn number(value: &Value) -> io::Result<u64> {
    value.as_str().and_then(|text| text.parse().ok()).ok_or_else(|| unreadable(value))
}

fn unreadable(value: &Value) -> io::Error {
    io::Error::other(format!(
        "etcd has {value} under this prefix, which is not of a run; choose another prefix"
    ))
}
