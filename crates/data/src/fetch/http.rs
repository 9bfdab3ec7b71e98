//! Downloads one file over HTTP into its `.part`.
//!
//! An existing part is resumed (`Range`), if the server really does so: status 206 and a `Content-Range` that
//! begins where the part ends. Otherwise the file is fetched from its first byte. A broken connection is made again
//! and the download resumed, as long as each connection brings something. Every wait has a timeout.

use std::time::Duration;

use ureq::Agent;
use ureq::http::{HeaderMap, StatusCode};

use super::part::{PartFile, Trouble};

/// Settings of connections.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    /// The timeout of name resolution, and of connecting.
    pub(crate) connect: Duration,
    /// The timeout of the start of a response, and of each read.
    pub(crate) read: Duration,
    /// Whether to go through the proxy that the environment names (`HTTPS_PROXY` and its like), as every client does.
    pub(crate) proxy: bool,
}

pub(crate) const SETTINGS: Settings =
    Settings { connect: Duration::from_secs(20), read: Duration::from_secs(30), proxy: true };

/// The most connections to one address for one file: enough for a bad line, but bounded.
const CONNECTIONS_MAX: usize = 40;

/// An HTTP client.
pub(crate) fn agent(settings: Settings) -> Agent {
    let proxy = if settings.proxy { ureq::Proxy::try_from_env() } else { None };
    Agent::config_builder()
        .proxy(proxy)
        .http_status_as_error(false)
        .timeout_resolve(Some(settings.connect))
        .timeout_connect(Some(settings.connect))
        .timeout_send_request(Some(settings.read))
        .timeout_recv_response(Some(settings.read))
        .timeout_per_read(Some(settings.read))
        .max_redirects(5)
        .user_agent(concat!("polyreme/", env!("CARGO_PKG_VERSION")))
        // A file is checked as it was published, so it must not be compressed in transit.
        .accept_encoding("identity")
        // Folders of a web server are listed by PROPFIND.
        .allow_non_standard_methods(true)
        .build()
        .new_agent()
}

/// Fetches `url` until `part` has all of its `bytes`.
pub(super) fn fetch(
    agent: &Agent,
    url: &str,
    bytes: u64,
    part: &mut PartFile,
    progress: &mut dyn FnMut(u64),
) -> Result<(), Trouble> {
    if part.have() > bytes {
        part.restart().map_err(Trouble::Disk)?;
    }
    progress(part.have());
    for _ in 0..CONNECTIONS_MAX {
        let before = part.have();
        if before == bytes {
            return Ok(());
        }
        match connect(agent, url, bytes, part, progress) {
            Err(Trouble::Source(why)) if part.have() <= before => return Err(Trouble::Source(why)),
            Err(Trouble::Disk(err)) => return Err(Trouble::Disk(err)),
            Ok(()) if part.have() <= before => {
                return Err(Trouble::Source(format!("the response ended at byte {before} of {bytes}")));
            }
            // Some bytes came: the next connection resumes from there.
            Err(Trouble::Source(_)) | Ok(()) => {}
        }
    }
    let have = part.have();
    if have == bytes {
        return Ok(());
    }
    Err(Trouble::Source(format!("{CONNECTIONS_MAX} connections broke, the last at byte {have} of {bytes}")))
}

/// Fetches over one connection.
fn connect(
    agent: &Agent,
    url: &str,
    bytes: u64,
    part: &mut PartFile,
    progress: &mut dyn FnMut(u64),
) -> Result<(), Trouble> {
    let source = |err: ureq::Error| Trouble::Source(err.to_string());
    let have = part.have();
    let mut answer = if have > 0 {
        agent.get(url).header("Range", format!("bytes={have}-")).call().map_err(source)?
    } else {
        agent.get(url).call().map_err(source)?
    };
    let goes_on =
        answer.status() == StatusCode::PARTIAL_CONTENT && range_start(answer.headers()) == Some(have);
    // A range other than ours, or one that the server refuses: the file is requested without one.
    let other_range =
        matches!(answer.status(), StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE);
    if have > 0 && other_range && !goes_on {
        answer = agent.get(url).call().map_err(source)?;
    }
    if !goes_on && answer.status() != StatusCode::OK {
        return Err(Trouble::Source(format!("the server responds {}", answer.status())));
    }
    // The existing part is dropped only for a response of the right length.
    let start = if goes_on { have } else { 0 };
    let offered = answer.body().content_length().map(|n| n.saturating_add(start));
    if let Some(offered) = offered
        && offered != bytes
    {
        return Err(Trouble::Source(format!("the server has {offered} bytes, but the file has {bytes}")));
    }
    if start < have {
        part.restart().map_err(Trouble::Disk)?;
    }
    part.append(&mut answer.into_body().into_reader(), bytes, progress)
}

/// Where the response to a range begins: 5 of `bytes 5-9/10`.
fn range_start(headers: &HeaderMap) -> Option<u64> {
    let range = headers.get("content-range")?.to_str().ok()?;
    range.strip_prefix("bytes ")?.split_once('-')?.0.trim().parse().ok()
}
