//! What is asked of stores: whether an object is there, what a folder has, the content of objects. Callers block; behind them one
//! thread runs the executor that `object_store` needs, and nothing else of this program is asynchronous.

use std::collections::HashMap;
use std::fs::File;
use std::future::Future;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use futures_util::{FutureExt, StreamExt, TryStreamExt, stream};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::http::HttpBuilder;
use object_store::path::Path as Key;
use object_store::{Error, GetOptions, GetRange, ObjectMeta, ObjectStore, RetryConfig};
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

use super::http::Requests;
use super::url::{ObjectUrl, Scheme};
use super::{ObjectFacts, RemoteEnv, Wanted};
use crate::error::DataError;
use crate::fetch::http::{SETTINGS, agent};

/// Objects that are fetched, or asked about, at a time; and ranges of one.
const OBJECTS: usize = 8;
const ASKED: usize = 32;
const RANGES: usize = 4;
/// The bytes of a range.
const RANGE_BYTES: u64 = 16 << 20;
/// How often a range is asked for again without a byte having come; the client tries each of these `RETRIES` times by itself.
const TRIES: usize = 3;
const RETRIES: usize = 5;
/// Threads that make requests.
const THREADS: usize = OBJECTS * RANGES;

/// The settings of S3 that say who asks, any of them.
const S3_WHO: [AmazonS3ConfigKey; 6] = [
    AmazonS3ConfigKey::AccessKeyId,
    AmazonS3ConfigKey::WebIdentityTokenFile,
    AmazonS3ConfigKey::ContainerCredentialsRelativeUri,
    AmazonS3ConfigKey::ContainerCredentialsFullUri,
    AmazonS3ConfigKey::MetadataEndpoint,
    AmazonS3ConfigKey::SkipSignature,
];
/// Those of Google.
const GS_WHO: [GoogleConfigKey; 4] = [
    GoogleConfigKey::ServiceAccount,
    GoogleConfigKey::ServiceAccountKey,
    GoogleConfigKey::ApplicationCredentials,
    GoogleConfigKey::SkipSignature,
];

/// A thread that asks stores.
pub(super) struct Client {
    handle: Handle,
    env: RemoteEnv,
    requests: Requests,
    stores: Mutex<HashMap<(Scheme, String), Arc<dyn ObjectStore>>>,
    /// Dropped, it ends the thread.
    _stop: oneshot::Sender<()>,
}

/// Why an object was not fetched.
enum FetchFault {
    Store(Error),
    Disk(io::Error),
    Changed,
}

impl From<Error> for FetchFault {
    fn from(error: Error) -> FetchFault {
        FetchFault::Store(error)
    }
}

impl Client {
    /// Starts the thread; nothing is asked yet.
    pub(super) fn start(env: &RemoteEnv) -> Result<Client, DataError> {
        let failed =
            |e: io::Error| DataError::Setting { why: format!("the thread that reads from stores: {e}") };
        let runtime = Builder::new_current_thread().enable_time().max_blocking_threads(THREADS).build();
        let runtime = runtime.map_err(failed)?;
        let handle = runtime.handle().clone();
        let (_stop, stopped) = oneshot::channel::<()>();
        let run = move || {
            // Either way the client is gone.
            let _ = runtime.block_on(stopped);
            runtime.shutdown_background();
        };
        thread::Builder::new().name("remote".into()).spawn(run).map_err(failed)?;
        let requests = Requests(agent(SETTINGS));
        Ok(Client { handle, env: env.clone(), requests, stores: Mutex::default(), _stop })
    }

    /// What is known of objects, in their order.
    pub(super) fn heads(&self, urls: &[ObjectUrl]) -> Result<Vec<Result<ObjectFacts, DataError>>, DataError> {
        let ask = |url: &ObjectUrl| Ok(head(url.clone(), self.store(url)?).boxed());
        let asked = urls.iter().map(ask).collect::<Result<Vec<_>, DataError>>()?;
        self.wait(stream::iter(asked).buffered(ASKED).collect())
    }

    /// The objects under a folder: their keys and what is known of them. With `deep` also those in folders of it.
    pub(super) fn list(
        &self,
        folder: &ObjectUrl,
        deep: bool,
    ) -> Result<Vec<(String, ObjectFacts)>, DataError> {
        let store = self.store(folder)?;
        let prefix = key(&folder.with_key(folder.key.trim_end_matches('/')))?;
        let prefix = (!prefix.as_ref().is_empty()).then_some(prefix);
        let found = self.wait(async move {
            match deep {
                true => store.list(prefix.as_ref()).try_collect::<Vec<ObjectMeta>>().await,
                false => store.list_with_delimiter(prefix.as_ref()).await.map(|listed| listed.objects),
            }
        })?;
        let found = found.map_err(|error| match error {
            error if lacks_store(&error) => missing_store(folder),
            error if matches!(folder.scheme, Scheme::Http | Scheme::Https) => DataError::Remote {
                url: folder.to_string(),
                why: format!("this web server does not list its files; name them, as in part-{{000..031}}.tar ({error})"),
            },
            error => said(folder, &error),
        })?;
        Ok(found.into_iter().map(|meta| (meta.location.to_string(), facts(&meta))).collect())
    }

    /// Fetches objects into files.
    pub(super) fn fetch(&self, wanted: Vec<Wanted>) -> Result<(), DataError> {
        let ask = |one: Wanted| {
            let store = self.store(&one.url)?;
            let fetched = async move { object(&one, &store).await.map_err(|fault| fetch_fault(&one, fault)) };
            Ok(fetched.boxed())
        };
        let asked = wanted.into_iter().map(ask).collect::<Result<Vec<_>, DataError>>()?;
        self.wait(stream::iter(asked).buffer_unordered(OBJECTS).try_collect::<()>())?
    }

    /// Runs this on the thread and waits for it.
    fn wait<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, DataError> {
        let (tell, told) = mpsc::channel();
        self.handle.spawn(async move {
            // The receiver waits below.
            let _ = tell.send(work.await);
        });
        told.recv().map_err(|_| DataError::Setting { why: "the thread that reads from stores ended".into() })
    }

    /// What is asked for an object of this store.
    fn store(&self, url: &ObjectUrl) -> Result<Arc<dyn ObjectStore>, DataError> {
        let mut stores = self.stores.lock().unwrap_or_else(PoisonError::into_inner);
        let place = (url.scheme, url.store.clone());
        if let Some(store) = stores.get(&place) {
            return Ok(store.clone());
        }
        let store = self.connect(url)?;
        stores.insert(place, store.clone());
        Ok(store)
    }

    fn connect(&self, url: &ObjectUrl) -> Result<Arc<dyn ObjectStore>, DataError> {
        let retry = RetryConfig {
            max_retries: RETRIES,
            retry_timeout: Duration::from_secs(60),
            ..RetryConfig::default()
        };
        let wrong = |error: Error| DataError::Remote { url: url.to_string(), why: error.to_string() };
        let settings = || self.env.settings.iter().filter(|(_, value)| !value.is_empty());
        match url.scheme {
            Scheme::S3 => {
                let mut builder = AmazonS3Builder::new();
                for (name, value) in settings() {
                    if let Ok(key) = name.to_ascii_lowercase().parse::<AmazonS3ConfigKey>() {
                        let plain = key == AmazonS3ConfigKey::Endpoint && value.starts_with("http://");
                        builder = builder.with_config(key, value);
                        builder = if plain { builder.with_allow_http(true) } else { builder };
                    }
                }
                if S3_WHO.iter().all(|key| builder.get_config_value(key).is_none_or(|value| value == "false"))
                {
                    let why = "no credentials for S3: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or write them to \
                               ~/.aws/credentials; for a bucket that everybody may read set AWS_SKIP_SIGNATURE=true, and on a \
                               machine with a role of its own AWS_METADATA_ENDPOINT=http://169.254.169.254";
                    return Err(DataError::Remote { url: url.to_string(), why: why.into() });
                }
                Ok(Arc::new(
                    builder
                        .with_bucket_name(&url.store)
                        .with_retry(retry)
                        .with_http_connector(self.requests.clone())
                        .build()
                        .map_err(wrong)?,
                ))
            }
            Scheme::Gs => {
                let mut builder = GoogleCloudStorageBuilder::new();
                for (name, value) in settings() {
                    if let Ok(key) = name.to_ascii_lowercase().parse::<GoogleConfigKey>() {
                        builder = builder.with_config(key, value);
                    }
                }
                if GS_WHO.iter().all(|key| builder.get_config_value(key).is_none_or(|value| value == "false"))
                {
                    let why = "no credentials for Google Cloud Storage: set GOOGLE_APPLICATION_CREDENTIALS to the file of a \
                               service account, or GOOGLE_SKIP_SIGNATURE=true for a bucket that everybody may read";
                    return Err(DataError::Remote { url: url.to_string(), why: why.into() });
                }
                Ok(Arc::new(
                    builder
                        .with_bucket_name(&url.store)
                        .with_retry(retry)
                        .with_http_connector(self.requests.clone())
                        .build()
                        .map_err(wrong)?,
                ))
            }
            Scheme::Http | Scheme::Https => {
                let base = format!("{}://{}/", url.scheme.name(), url.store);
                let builder = HttpBuilder::new().with_url(base).with_retry(retry);
                Ok(Arc::new(builder.with_http_connector(self.requests.clone()).build().map_err(wrong)?))
            }
        }
    }
}

fn key(url: &ObjectUrl) -> Result<Key, DataError> {
    let wrong = |e: object_store::path::Error| DataError::Remote { url: url.to_string(), why: e.to_string() };
    match url.scheme {
        Scheme::S3 | Scheme::Gs => Key::parse(&url.key).map_err(wrong),
        Scheme::Http | Scheme::Https => Key::from_url_path(&url.key).map_err(wrong),
    }
}

fn facts(meta: &ObjectMeta) -> ObjectFacts {
    let version = meta.e_tag.clone().unwrap_or_else(|| meta.last_modified.to_rfc3339());
    ObjectFacts { bytes: meta.size, version }
}

async fn head(url: ObjectUrl, store: Arc<dyn ObjectStore>) -> Result<ObjectFacts, DataError> {
    let options = GetOptions { head: true, ..GetOptions::default() };
    match store.get_opts(&key(&url)?, options).await {
        Ok(found) => Ok(facts(&found.meta)),
        Err(Error::NotFound { .. }) => {
            // A response without a body does not say whether the bucket is there.
            if matches!(url.scheme, Scheme::S3 | Scheme::Gs)
                && let Some(Err(error)) = store.list(None).next().await
                && lacks_store(&error)
            {
                return Err(missing_store(&url));
            }
            let hint = match url.scheme {
                Scheme::S3 | Scheme::Gs => "there is no such object in the bucket; check its name",
                Scheme::Http | Scheme::Https => "the server does not have it; check the address",
            };
            Err(DataError::Missing { path: url.path(), hint: hint.into() })
        }
        Err(error) => Err(said(&url, &error)),
    }
}

/// Whether it is the bucket that is not there. The error of a listing says so in its text alone; the word is S3's protocol, and Google's.
fn lacks_store(error: &Error) -> bool {
    matches!(error, Error::NotFound { .. }) || error.to_string().contains("NoSuchBucket")
}

/// Whether the store does not let us; of a listing likewise.
fn is_denied(error: &Error) -> bool {
    let text = error.to_string();
    matches!(error, Error::Unauthenticated { .. } | Error::PermissionDenied { .. })
        || ["401 Unauthorized", "403 Forbidden"].iter().any(|status| text.contains(status))
}

fn missing_store(url: &ObjectUrl) -> DataError {
    let why = match url.scheme {
        Scheme::S3 => format!(
            "there is no bucket {:?}; check its name, and AWS_REGION and AWS_ENDPOINT_URL, which say where it is looked for",
            url.store
        ),
        Scheme::Gs => format!("there is no bucket {:?}; check its name", url.store),
        Scheme::Http | Scheme::Https => "the server has no such folder; check the address".into(),
    };
    DataError::Remote { url: url.to_string(), why }
}

/// What a store's error means for the user.
fn said(url: &ObjectUrl, error: &Error) -> DataError {
    let short = innermost(error);
    let why = match error {
        Error::NotFound { .. } => format!("not there; check the address ({short})"),
        error if is_denied(error) => {
            let who = match url.scheme {
                Scheme::S3 => {
                    "; check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, and that they may read it"
                }
                Scheme::Gs => "; check GOOGLE_APPLICATION_CREDENTIALS, and that the account may read it",
                Scheme::Http | Scheme::Https => "",
            };
            format!("access is denied{who} ({short})")
        }
        other => format!("{}; check the network and the address", shortened(&other.to_string())),
    };
    DataError::Remote { url: url.to_string(), why }
}

fn fetch_fault(wanted: &Wanted, fault: FetchFault) -> DataError {
    let changed = "the object is not what it was when the set was opened: another version has taken its name; put the old one back, \
                   or begin a new run (with `resume --changed-data` this one goes on with it)";
    let why = match fault {
        FetchFault::Disk(error) => return DataError::io(&wanted.file, error),
        FetchFault::Store(Error::NotFound { .. }) => {
            "the object is gone since the set was opened; put it back and go on from the last checkpoint"
                .into()
        }
        FetchFault::Changed | FetchFault::Store(Error::Precondition { .. }) => changed.into(),
        FetchFault::Store(error) => return said(&wanted.url, &error),
    };
    DataError::Remote { url: wanted.url.to_string(), why }
}

/// The message of the error that began it.
fn innermost(error: &Error) -> String {
    let mut error: &dyn std::error::Error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    shortened(&error.to_string())
}

/// In one line, and not a whole document.
fn shortened(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(300) {
        Some((end, _)) => format!("{} ..", &line[..end]),
        None => line,
    }
}

/// Fetches an object: its ranges, several at a time.
async fn object(wanted: &Wanted, store: &Arc<dyn ObjectStore>) -> Result<(), FetchFault> {
    let file = File::create(&wanted.file).map_err(FetchFault::Disk)?;
    let bytes = wanted.facts.bytes;
    if bytes > 0 {
        file.set_len(bytes).map_err(FetchFault::Disk)?;
        let ranges = (0..bytes.div_ceil(RANGE_BYTES)).map(|i| i * RANGE_BYTES);
        let file = &file;
        let all: Vec<_> = ranges
            .map(|start| range(wanted, store, file, start, bytes.min(start + RANGE_BYTES)).boxed())
            .collect();
        let mut all = stream::iter(all).buffer_unordered(RANGES);
        while let Some(done) = all.next().await {
            match done {
                // A server that does not know ranges sends all of it.
                Err(FetchFault::Store(Error::NotSupported { .. })) => {
                    return whole(wanted, store, file).await;
                }
                done => done?,
            }
        }
    }
    file.sync_data().map_err(FetchFault::Disk)
}

/// Fetches a range; a connection that breaks is made again, and goes on where it was.
async fn range(
    wanted: &Wanted,
    store: &Arc<dyn ObjectStore>,
    file: &File,
    start: u64,
    end: u64,
) -> Result<(), FetchFault> {
    let (mut at, mut tries) = (start, 0);
    while at < end {
        let before = at;
        match pass(wanted, store, file, &mut at, Some(end)).await {
            Err(FetchFault::Store(error @ Error::Generic { .. })) if at == before && tries == TRIES => {
                return Err(error.into());
            }
            Ok(()) | Err(FetchFault::Store(Error::Generic { .. })) => {}
            Err(fault) => return Err(fault),
        }
        tries = if at == before { tries + 1 } else { 0 };
        if tries > TRIES {
            return Err(FetchFault::Disk(io::ErrorKind::UnexpectedEof.into()));
        }
    }
    Ok(())
}

/// Fetches all of an object over one connection.
async fn whole(wanted: &Wanted, store: &Arc<dyn ObjectStore>, file: &File) -> Result<(), FetchFault> {
    let mut at = 0;
    pass(wanted, store, file, &mut at, None).await?;
    if at != wanted.facts.bytes {
        return Err(FetchFault::Changed);
    }
    file.sync_data().map_err(FetchFault::Disk)
}

/// Reads from `at` on, to `end` or to the end of the object.
async fn pass(
    wanted: &Wanted,
    store: &Arc<dyn ObjectStore>,
    file: &File,
    at: &mut u64,
    end: Option<u64>,
) -> Result<(), FetchFault> {
    let version = &wanted.facts.version;
    // A weak one never matches.
    let is_tag = version.starts_with('"');
    let options = GetOptions {
        range: end.map(|end| GetRange::Bounded(*at..end)),
        if_match: is_tag.then(|| version.clone()),
        ..GetOptions::default()
    };
    let Ok(key) = key(&wanted.url) else { return Err(FetchFault::Changed) };
    let found = store.get_opts(&key, options).await?;
    if facts(&found.meta) != wanted.facts {
        return Err(FetchFault::Changed);
    }
    let most = end.unwrap_or(wanted.facts.bytes);
    let mut chunks = found.into_stream();
    while let Some(chunk) = chunks.try_next().await? {
        let room = (most - *at).min(chunk.len() as u64) as usize;
        file.write_all_at(&chunk[..room], *at).map_err(FetchFault::Disk)?;
        *at += room as u64;
    }
    Ok(())
}
