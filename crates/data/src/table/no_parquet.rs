//! Parquet in a build without the feature `parquet`: an error that says so.

use super::text::{Heading, Row, Text};
use crate::error::DataError;

impl Text {
    /// Fails: this build cannot read Parquet.
    pub(super) fn parquet_columns(&self) -> Result<Heading, DataError> {
        let why = "this build does not read Parquet; build it with the feature `parquet`, or convert the file to CSV";
        Err(self.error(0, 0, why))
    }

    /// Fails: this build cannot read Parquet.
    pub(super) fn parquet_rows(
        &self,
        _: &Heading,
        _: impl FnMut(&Row) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        self.parquet_columns().map(drop)
    }
}
