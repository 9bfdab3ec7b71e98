//! What this process knows of stores of objects: settings from the environment and from the files of Amazon's tools, and where copies
//! may lie.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use polyreme_data::remote::RemoteEnv;

/// What the names of such variables begin with.
const PREFIXES: [&str; 2] = ["AWS_", "GOOGLE_"];

/// Keys of Amazon's files, and the variables that they stand for.
const KEYS: [(&str, &str); 5] = [
    ("aws_access_key_id", "AWS_ACCESS_KEY_ID"),
    ("aws_secret_access_key", "AWS_SECRET_ACCESS_KEY"),
    ("aws_session_token", "AWS_SESSION_TOKEN"),
    ("region", "AWS_REGION"),
    ("endpoint_url", "AWS_ENDPOINT_URL"),
];

/// Of this process.
pub(crate) fn env() -> RemoteEnv {
    let is_setting = |name: &str| PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    let settings = env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let settings: Vec<(String, String)> = settings.filter(|(name, _)| is_setting(name)).collect();
    let home = env::var_os("HOME").map(PathBuf::from);
    let folder = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let caches = folder("XDG_CACHE_HOME").or_else(|| Some(home.as_ref()?.join(".cache")));
    let cache = caches.unwrap_or_else(env::temp_dir).join("polyreme");
    RemoteEnv { settings: with_files(settings, home.as_deref()), cache }
}

/// The same with what the files say that the environment does not.
fn with_files(mut settings: Vec<(String, String)>, home: Option<&Path>) -> Vec<(String, String)> {
    let named = |name: &str| settings.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone());
    let profile = named("AWS_PROFILE").unwrap_or_else(|| "default".into());
    let file = |variable: &str, name: &str| {
        named(variable).map(PathBuf::from).or_else(|| Some(home?.join(".aws").join(name)))
    };
    let files = [file("AWS_SHARED_CREDENTIALS_FILE", "credentials"), file("AWS_CONFIG_FILE", "config")];
    // A key and its secret come from one place.
    let has_who = named("AWS_ACCESS_KEY_ID").is_some();
    let has_region = named("AWS_REGION").or_else(|| named("AWS_DEFAULT_REGION")).is_some();
    for path in files.into_iter().flatten() {
        let Ok(text) = fs::read_to_string(path) else { continue };
        for (key, value) in section(&text, &profile) {
            let Some((_, variable)) = KEYS.iter().find(|(known, _)| *known == key) else { continue };
            let is_who = key.starts_with("aws_");
            let said = settings.iter().any(|(known, _)| known == variable);
            if said || (is_who && has_who) || (*variable == "AWS_REGION" && has_region) {
                continue;
            }
            settings.push(((*variable).into(), value.into()));
        }
    }
    settings
}

/// The keys and values of a profile.
fn section<'a>(text: &'a str, profile: &str) -> Vec<(&'a str, &'a str)> {
    let mut here = false;
    let mut found = Vec::new();
    for line in text.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            here = name.trim().strip_prefix("profile ").unwrap_or(name.trim()).trim() == profile;
        } else if let (true, Some((key, value))) =
            (here && !line.starts_with(['#', ';']), line.split_once('='))
        {
            found.push((key.trim(), value.trim()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_say_what_the_environment_does_not() {
        let home = tempfile::tempdir().unwrap();
        fs::create_dir(home.path().join(".aws")).unwrap();
        let credentials = "# mine\n[default]\naws_access_key_id = A\naws_secret_access_key=S\n[other]\naws_access_key_id = B\n";
        fs::write(home.path().join(".aws/credentials"), credentials).unwrap();
        let config = "[default]\nregion = eu-west-1\noutput = json\n[profile other]\nregion = us-west-2\n";
        fs::write(home.path().join(".aws/config"), config).unwrap();
        let found = |settings: &[(&str, &str)]| {
            let settings =
                settings.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
            let mut all = with_files(settings, Some(home.path()));
            all.sort();
            all.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(found(&[]), "AWS_ACCESS_KEY_ID=A AWS_REGION=eu-west-1 AWS_SECRET_ACCESS_KEY=S");
        let other = [("AWS_PROFILE", "other")];
        assert_eq!(found(&other), "AWS_ACCESS_KEY_ID=B AWS_PROFILE=other AWS_REGION=us-west-2");
        // The secret of a file does not belong to the key of the environment.
        assert_eq!(
            found(&[("AWS_ACCESS_KEY_ID", "C"), ("AWS_DEFAULT_REGION", "r")]),
            "AWS_ACCESS_KEY_ID=C AWS_DEFAULT_REGION=r"
        );
        assert_eq!(with_files(Vec::new(), None), []);
    }
}
