//! `--metrics`, and what `polyreme status` shows of a run that has such a page.

use std::io::Write;
use std::net::SocketAddr;

use clap::Args;
use serde_json::json;

use super::{CommandResult, Failure};
use crate::metrics::page::MetricsPage;
use crate::metrics::status;
use crate::output;

/// How an address of a page begins.
const SCHEME: &str = "http://";

/// The flag of every command that trains.
#[derive(Args, Clone, Debug, Default)]
pub(super) struct MetricsArgs {
    /// Serve figures of the run at http://ADDR:PORT/metrics while it lasts, for Prometheus, and for `polyreme status
    /// http://ADDR:PORT`: an address of the host of rank 0, such as 127.0.0.1:9400. Everybody who reaches it can read them.
    #[arg(long, value_name = "ADDR:PORT")]
    metrics: Option<SocketAddr>,
}

impl MetricsArgs {
    /// Refuses an address that no page is served at.
    pub(super) fn check(&self) -> CommandResult {
        match self.metrics.filter(|addr| addr.ip().is_unspecified()) {
            Some(_) => Err(Failure::usage("--metrics takes one address of this host, not all of them")),
            None => Ok(()),
        }
    }

    /// The page, if one is asked for and rank 0 is here.
    pub(super) fn open(&self, speaks: bool, as_json: bool) -> Result<Option<MetricsPage>, Failure> {
        self.check()?;
        let Some(addr) = self.metrics.filter(|_| speaks) else { return Ok(None) };
        let page = MetricsPage::open(addr).map_err(|e| Failure::usage(format!("--metrics {addr}: {e}")))?;
        let at = format!("{SCHEME}{}/metrics", page.addr());
        match as_json {
            true => output::out().line(&json!({"event": "metrics", "at": at}).to_string()),
            false => output::err().line(&format!("metrics: {at}")),
        }
        Ok(Some(page))
    }
}

/// The `host:port` of a page, if this is its address.
pub(super) fn page_at(address: &str) -> Option<&str> {
    let rest = address.strip_prefix(SCHEME)?;
    Some(rest.split('/').next().unwrap_or_default())
}

/// Shows the run whose page is at `host:port`.
pub(super) fn show_status(at: &str, as_json: bool) -> CommandResult {
    let status = status::ask(at).map_err(|e| Failure::coded(1, format!("{SCHEME}{at}: {e}")))?;
    let text = if as_json { format!("{status}\n") } else { status::lines(&status) };
    Ok(std::io::stdout().lock().write_all(text.as_bytes())?)
}
