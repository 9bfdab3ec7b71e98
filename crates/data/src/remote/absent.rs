//! A build without the feature `remote`: an error that says so.

use super::url::ObjectUrl;
use super::{ObjectFacts, RemoteEnv, Wanted};
use crate::error::DataError;

/// There is none.
pub(super) enum Client {}

impl Client {
    /// Fails: this build reads files alone.
    pub(super) fn start(_: &RemoteEnv) -> Result<Client, DataError> {
        let why = "this build reads no s3://, gs:// or http(s)://; build it with `cargo build --release --features remote`, or copy the files";
        Err(DataError::Setting { why: why.into() })
    }

    pub(super) fn heads(&self, _: &[ObjectUrl]) -> Result<Vec<Result<ObjectFacts, DataError>>, DataError> {
        match *self {}
    }

    pub(super) fn list(&self, _: &ObjectUrl, _: bool) -> Result<Vec<(String, ObjectFacts)>, DataError> {
        match *self {}
    }

    pub(super) fn fetch(&self, _: Vec<Wanted>) -> Result<(), DataError> {
        match *self {}
    }
}
