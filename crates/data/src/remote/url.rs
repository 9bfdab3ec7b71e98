//! Addresses of objects: `s3://BUCKET/KEY`, `gs://BUCKET/KEY`, `http://HOST/PATH`, `https://HOST/PATH`.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::error::DataError;

/// Who keeps an object.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Scheme {
    /// S3, or whatever speaks as it does.
    S3,
    /// Google Cloud Storage.
    Gs,
    /// A web server.
    Http,
    /// A web server, encrypted.
    Https,
}

/// The address of an object, of a folder of objects, or a pattern of them.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct ObjectUrl {
    pub(super) scheme: Scheme,
    /// The bucket, or the host with its port.
    pub(super) store: String,
    /// What it is called there, without a slash before it.
    pub(super) key: String,
}

impl Scheme {
    const ALL: [Scheme; 4] = [Scheme::S3, Scheme::Gs, Scheme::Http, Scheme::Https];

    /// As it is written.
    pub(super) fn name(self) -> &'static str {
        match self {
            Scheme::S3 => "s3",
            Scheme::Gs => "gs",
            Scheme::Http => "http",
            Scheme::Https => "https",
        }
    }

    /// What the part after it names.
    fn store(self) -> &'static str {
        match self {
            Scheme::S3 | Scheme::Gs => "bucket",
            Scheme::Http | Scheme::Https => "host",
        }
    }
}

/// Whether a path is the address of something that is not in this host's files.
pub fn is_url(path: &Path) -> bool {
    let Some((scheme, _)) = path.to_str().and_then(|text| text.split_once("://")) else { return false };
    !scheme.is_empty() && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

impl ObjectUrl {
    pub(super) fn parse(path: &Path) -> Result<ObjectUrl, DataError> {
        let text = path.to_string_lossy();
        let wrong = |why: String| DataError::Setting { why: format!("{text}: {why}") };
        let (scheme, rest) = text.split_once("://").ok_or_else(|| wrong("not an address".into()))?;
        let Some(scheme) = Scheme::ALL.into_iter().find(|known| known.name() == scheme) else {
            return Err(wrong(format!(
                "{scheme}:// is not read; data come from s3://, gs://, http:// and https://"
            )));
        };
        let (store, key) = rest.split_once('/').unwrap_or((rest, ""));
        if store.is_empty() {
            let why = format!(
                "no {0}; write {1}://{2}/NAME",
                scheme.store(),
                scheme.name(),
                scheme.store().to_uppercase()
            );
            return Err(wrong(why));
        }
        if let (Scheme::Http | Scheme::Https, Some(_)) = (scheme, key.find(['?', '#'])) {
            return Err(wrong(
                "an address with `?` or `#` is not read; give one that ends with the name of the file".into(),
            ));
        }
        Ok(ObjectUrl { scheme, store: store.into(), key: key.into() })
    }

    /// Another object of the same store.
    pub(super) fn with_key(&self, key: impl Into<String>) -> ObjectUrl {
        ObjectUrl { key: key.into(), ..self.clone() }
    }

    /// As a path, which errors show and which is read back as this.
    pub(super) fn path(&self) -> PathBuf {
        self.to_string().into()
    }

    /// The folder that it is in, without a slash at the end; empty for the top.
    pub(super) fn parent(&self) -> &str {
        self.key.rsplit_once('/').map_or("", |(folder, _)| folder)
    }

    /// The last part of its name.
    pub(super) fn name(&self) -> &str {
        self.key.rsplit_once('/').map_or(&self.key, |(_, name)| name)
    }
}

impl fmt::Display for ObjectUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}/{}", self.scheme.name(), self.store, self.key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_taken_apart() {
        for (text, scheme, store, key, parent, name) in [
            ("s3://b/k", Scheme::S3, "b", "k", "", "k"),
            ("gs://b/a/k-{0..3}.tar", Scheme::Gs, "b", "a/k-{0..3}.tar", "a", "k-{0..3}.tar"),
            ("http://127.0.0.1:80/a/b/", Scheme::Http, "127.0.0.1:80", "a/b/", "a/b", ""),
            ("https://h/x", Scheme::Https, "h", "x", "", "x"),
        ] {
            let url = ObjectUrl::parse(Path::new(text)).unwrap();
            assert_eq!((url.scheme, &*url.store, &*url.key), (scheme, store, key));
            assert_eq!((url.parent(), url.name(), &*url.to_string()), (parent, name, text));
            assert!(is_url(Path::new(text)));
        }
        assert_eq!(ObjectUrl::parse(Path::new("s3://b")).unwrap().key, "");
        for path in ["data/x.csv", "/a://b", "://x", "a b://x", "s3:/b/k"] {
            assert!(!is_url(Path::new(path)), "{path}");
        }
        for (text, part) in [
            ("az://b/k", "az:// is not read; data come from s3://"),
            ("s3:///k", "no bucket; write s3://BUCKET/NAME"),
            ("https://h/x?token=1", "ends with the name of the file"),
        ] {
            let error = ObjectUrl::parse(Path::new(text)).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
