//! Fetching, against a local server, and archives made here.

use std::fs;
use std::net::TcpListener;
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use md5::{Digest, Md5};
use tar::{Builder, EntryType, Header};

use super::server::{Reply, Server};
use super::*;

const BYTES: usize = 700_001;

fn content() -> Vec<u8> {
    (0..BYTES as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

fn leak(text: impl Into<String>) -> &'static str {
    Box::leak(text.into().into_boxed_str())
}

fn md5(bytes: &[u8]) -> &'static str {
    leak(Md5::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect::<String>())
}

fn set(content: &[u8], bases: &[String], members: &'static [Member]) -> KnownSet {
    let file = SetFile {
        name: "x.gz",
        bytes: content.len() as u64,
        md5: md5(content),
        md5_installed: None,
        members,
    };
    let bases: Vec<&'static str> = bases.iter().map(leak).collect();
    KnownSet { name: "x", about: "", files: vec![file].leak(), bases: bases.leak(), installed: None }
}

/// Fetches into `folder`; also returns the events, a line each, except those about bytes.
fn run(set: &KnownSet, folder: &Path, mirror: Option<&str>) -> (Result<PathBuf, DataError>, Vec<String>) {
    run_within(set, folder, mirror, Duration::from_secs(20))
}

fn run_within(
    set: &KnownSet,
    folder: &Path,
    mirror: Option<&str>,
    timeout: Duration,
) -> (Result<PathBuf, DataError>, Vec<String>) {
    let settings = Settings { connect: timeout, read: timeout, proxy: false };
    let mut said = Vec::new();
    let mut last = (0, 0);
    let mut progress = |event: FetchProgress<'_>| match event {
        FetchProgress::Bytes { have, total, .. } => {
            assert!(have <= total);
            last = (have, total);
        }
        FetchProgress::Present { file } => said.push(format!("present {file}")),
        FetchProgress::Begin { file, .. } => said.push(format!("begin {file}")),
        FetchProgress::Failed { file, why, .. } => said.push(format!("failed {file} {why}")),
        FetchProgress::Unpack { file } => said.push(format!("unpack {file}")),
    };
    let options = GetOptions { into: folder, mirror, progress: &mut progress };
    let result = get_within(set, options, settings);
    if result.is_ok() && said == ["begin x.gz"] {
        assert_eq!(last.0, last.1);
    }
    (result, said)
}

/// A server with `script`, and `part` of the file on disk: what is requested, and how it ends. An error must contain
/// `expected`, and leave `kept` bytes.
fn check(script: &[Reply], part: &[u8], log: &[&str], end: Result<(), (&str, Option<u64>)>) {
    let content = content();
    let server = Server::start(&content, script);
    let set = set(&content, &[server.base()], &[]);
    let folder = tempfile::tempdir().unwrap();
    let into = folder.path().join("data/x");
    let (target, kept) = (into.join("x.gz"), into.join("x.gz.part"));
    if !part.is_empty() {
        fs::create_dir_all(&into).unwrap();
        fs::write(&kept, part).unwrap();
    }
    // A short timeout only where the test needs it: a busy machine may be slow to respond.
    let timeout = Duration::from_millis(if matches!(script, [Reply::Silence]) { 300 } else { 20_000 });
    let (result, _) = run_within(&set, &into, None, timeout);
    assert_eq!(server.log(), log, "{script:?}: {result:?}");
    match end {
        Ok(()) => {
            assert_eq!(result.unwrap(), into, "{script:?}");
            assert!(fs::read(&target).unwrap() == content && !kept.exists(), "{script:?}");
            let (result, said) = run(&set, &into, None);
            assert!(
                result.is_ok() && said == ["present x.gz"] && server.log().len() == log.len(),
                "{script:?}"
            );
        }
        Err((expected, n_kept)) => {
            let found = result.unwrap_err().to_string();
            assert!(found.contains(expected) && found.contains("x.gz"), "{script:?}: {found}");
            assert_eq!(fs::metadata(&kept).ok().map(|part| part.len()), n_kept, "{script:?}: {found}");
            assert!(!target.exists());
        }
    }
}

#[test]
fn a_file_comes_whole_or_is_gone_on_with() {
    use Reply::*;
    let content = content();
    let half = &content[..BYTES / 2];
    check(&[Right], &[], &["/x.gz"], Ok(()));
    check(&[Right], half, &["/x.gz from 350000"], Ok(()));
    check(&[Right], &content, &[], Ok(()));
    check(&[Cut(1000), Right], &[], &["/x.gz", "/x.gz from 1000"], Ok(()));
    check(
        &[Cut(1000), Cut(500), Right],
        half,
        &["/x.gz from 350000", "/x.gz from 351000", "/x.gz from 351500"],
        Ok(()),
    );
    check(&[CutWithoutLength(1000), Right], &[], &["/x.gz", "/x.gz from 1000"], Ok(()));
    check(&[Redirect, Right], &[], &["/x.gz", "/elsewhere"], Ok(()));
    check(&[IgnoreRange], half, &["/x.gz from 350000"], Ok(()));
    check(&[OtherRange], half, &["/x.gz from 350000", "/x.gz"], Ok(()));
    check(&[RefuseRange], half, &["/x.gz from 350000", "/x.gz"], Ok(()));
    // Longer than the file, so useless.
    check(&[Right], &[0; BYTES + 1], &["/x.gz"], Ok(()));
}

#[test]
fn what_fails_says_so_and_keeps_what_is_of_use() {
    use Reply::*;
    let half = &content()[..BYTES / 2];
    let resumed = "/x.gz from 350000";
    check(&[Status("404 Not Found")], &[], &["/x.gz"], Err(("404", None)));
    check(&[Status("404 Not Found")], half, &[resumed], Err(("350000 bytes are kept", Some(350_000))));
    check(&[Status("503 Busy")], half, &[resumed], Err(("503", Some(350_000))));
    check(
        &[Page],
        half,
        &[resumed],
        Err(("the server has 15 bytes, but the file has 700001", Some(350_000))),
    );
    check(&[Silence], half, &[resumed], Err(("timeout", Some(350_000))));
    check(
        &[Redirect],
        &[],
        &["/x.gz"; 1].iter().chain(&["/elsewhere"; 5]).copied().collect::<Vec<_>>(),
        Err(("redirect", None)),
    );
    check(&[Cut(0)], &[], &["/x.gz"], Err(("x.gz: ", None)));
    check(
        &[CutWithoutLength(1000), CutWithoutLength(0)],
        &[],
        &["/x.gz", "/x.gz from 1000"],
        Err(("at byte 1000 of 700001", Some(1000))),
    );
    check(&[Cut(7), Cut(0)], &[], &["/x.gz", "/x.gz from 7"], Err(("7 bytes are kept", Some(7))));
    // The first half is of another file: only the checksum can tell.
    let expected = format!("should be {}; the download was deleted", md5(&content()));
    check(&[Right], &[7; 350_000], &[resumed], Err((&expected, None)));
}

#[test]
fn a_wrong_checksum_names_the_file_and_both_sums() {
    let mut damaged = content();
    damaged[BYTES - 1] ^= 1;
    let server = Server::start(&damaged, &[Reply::Right]);
    let set = set(&content(), &[server.base()], &[]);
    let folder = tempfile::tempdir().unwrap();
    let (result, _) = run(&set, folder.path(), None);
    let found = result.unwrap_err().to_string();
    for expected in ["x.gz", md5(&content()), md5(&damaged)] {
        assert!(found.contains(expected), "{found}");
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn the_next_source_is_asked_and_goes_on() {
    let content = content();
    let closed = TcpListener::bind("127.0.0.1:0").unwrap();
    let nobody = format!("http://{}", closed.local_addr().unwrap());
    drop(closed);
    let breaks = Server::start(&content, &[Reply::Cut(1000), Reply::Cut(0)]);
    let right = Server::start(&content, &[Reply::Right]);
    let folder = tempfile::tempdir().unwrap();

    let unreachable = set(&content, std::slice::from_ref(&nobody), &[]);
    let found = run(&unreachable, folder.path(), None).0.unwrap_err().to_string();
    assert!(found.contains(&nobody) && found.contains("refused"), "{found}");

    let set = set(&content, &[nobody, breaks.base(), right.base()], &[]);
    let (result, said) = run(&set, folder.path(), None);
    assert!(result.is_ok(), "{result:?}");
    assert_eq!(said.iter().filter(|line| line.starts_with("failed")).count(), 2, "{said:?}");
    assert_eq!(right.log(), ["/x.gz from 1000"]);
    assert!(fs::read(folder.path().join("x.gz")).unwrap() == content);

    // An existing file with a wrong checksum is fetched again.
    fs::write(folder.path().join("x.gz"), b"short").unwrap();
    assert!(run(&set, folder.path(), Some(&format!("{}under", right.base()))).0.is_ok());
    assert_eq!(right.log()[1..], ["/under/x.gz"]);
    assert!(fs::read(folder.path().join("x.gz")).unwrap() == content);
}

#[test]
fn mirrors_and_installed_files_are_copied() {
    let content = content();
    let source = tempfile::tempdir().unwrap();
    fs::write(source.path().join("x.gz"), &content).unwrap();
    let path = source.path().to_str().unwrap();
    let nowhere = ["http://127.0.0.1:1/".to_string()];
    let plain = set(&content, &nowhere, &[]);
    for mirror in [path.to_string(), format!("file://{path}"), format!("file://localhost{path}/")] {
        let folder = tempfile::tempdir().unwrap();
        assert!(run(&plain, folder.path(), Some(&mirror)).0.is_ok(), "{mirror}");
        assert!(fs::read(folder.path().join("x.gz")).unwrap() == content);
    }
    let empty = tempfile::tempdir().unwrap();
    for (mirror, expected) in [
        ("/nowhere/at/all", "/nowhere/at/all: not found; a mirror is a folder"),
        ("ftp://x/y", "the mirror \"ftp://x/y\" is ftp; use http"),
        (empty.path().to_str().unwrap(), "No such file"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let found = run(&plain, folder.path(), Some(mirror)).0.unwrap_err().to_string();
        assert!(found.contains(expected), "{found}");
    }

    // The package has the file recompressed: another length, another checksum.
    fs::write(source.path().join("x.gz"), b"the same, compressed anew").unwrap();
    let file = SetFile { md5_installed: Some(md5(b"the same, compressed anew")), ..plain.files[0] };
    let files: &'static [SetFile] = vec![file].leak();
    let installed = KnownSet { files, installed: Some(leak(path)), ..plain };
    let folder = tempfile::tempdir().unwrap();
    assert!(run(&installed, folder.path(), None).0.is_ok());
    assert_eq!(fs::read(folder.path().join("x.gz")).unwrap(), b"the same, compressed anew");
    assert_eq!(run(&installed, folder.path(), None).1, ["present x.gz"]);
    // An unknown one is skipped.
    fs::write(source.path().join("x.gz"), b"something else").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&content, &[Reply::Right]);
    let installed = KnownSet { bases: vec![leak(server.base())].leak(), ..installed };
    let (result, said) = run(&installed, folder.path(), None);
    assert!(result.is_ok() && said.len() == 3, "{said:?}");
}

const MEMBERS: &[Member] =
    &[Member { path: "set/a.bin", bytes_max: 100 }, Member { path: "set/b.txt", bytes_max: 10 }];

/// An archive of entries: path, type, content.
fn archive(entries: &[(&str, EntryType, &[u8])]) -> Vec<u8> {
    let mut tar = Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
    for (path, kind, content) in entries {
        let mut header = Header::new_gnu();
        // Written by hand: the library refuses to write paths with `..`.
        header.as_old_mut().name[..path.len()].copy_from_slice(path.as_bytes());
        header.set_entry_type(*kind);
        header.set_size(content.len() as u64);
        if kind.is_symlink() {
            header.set_link_name("/etc/passwd").unwrap();
        }
        header.set_cksum();
        tar.append(&header, *content).unwrap();
    }
    tar.into_inner().unwrap().finish().unwrap()
}

fn unpacked(packed: &[u8], folder: &Path) -> (Result<PathBuf, DataError>, Vec<String>) {
    let source = tempfile::tempdir().unwrap();
    fs::write(source.path().join("x.gz"), packed).unwrap();
    run(&set(packed, &[], MEMBERS), folder, Some(source.path().to_str().unwrap()))
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn an_archive_gives_its_listed_files_and_nothing_else() {
    use EntryType::{Directory, Regular, Symlink};
    let packed = archive(&[
        ("set/", Directory, b""),
        ("../evil", Regular, b"x"),
        ("/tmp/evil", Regular, b"x"),
        ("set/../../evil", Regular, b"x"),
        ("set/link", Symlink, b""),
        ("./set/b.txt", Regular, b"names"),
        ("set/readme", Regular, b"x"),
        ("set/a.bin", Regular, &[7; 100]),
    ]);
    let folder = tempfile::tempdir().unwrap();
    let into = folder.path().join("x");
    let (result, said) = unpacked(&packed, &into);
    assert!(result.is_ok(), "{result:?}");
    assert_eq!(said, ["begin x.gz", "unpack x.gz"]);
    assert_eq!(names(&into), ["a.bin", "b.txt", "x.gz.unpacked"]);
    assert_eq!(names(folder.path()), ["x"]);
    assert_eq!(fs::read(into.join("a.bin")).unwrap(), [7; 100]);
    assert_eq!(unpacked(&packed, &into).1, ["present x.gz"]);

    // Later damage is noticed.
    fs::write(into.join("a.bin"), [7; 99]).unwrap();
    assert_eq!(unpacked(&packed, &into).1, ["begin x.gz", "unpack x.gz"]);
    assert_eq!(fs::read(into.join("a.bin")).unwrap(), [7; 100]);
    fs::remove_file(into.join("b.txt")).unwrap();
    assert_eq!(unpacked(&packed, &into).1.len(), 2);
    // An archive that exists already is unpacked without being fetched.
    fs::remove_file(into.join("b.txt")).unwrap();
    fs::write(into.join("x.gz"), &packed).unwrap();
    assert_eq!(unpacked(&packed, &into).1, ["present x.gz", "unpack x.gz"]);
    assert_eq!(names(&into), ["a.bin", "b.txt", "x.gz.unpacked"]);
}

#[test]
fn an_archive_that_is_not_as_listed_is_refused() {
    use EntryType::{Link, Regular, Symlink};
    let a: (&str, EntryType, &[u8]) = ("set/a.bin", Regular, b"a");
    let whole = archive(&[a, ("set/b.txt", Regular, &[1; 10])]);
    for (packed, expected) in [
        (archive(&[a]), "set/b.txt is not in the archive"),
        (archive(&[a, ("set/b.txt", Symlink, b"")]), "at byte 1024: set/b.txt is not a regular file"),
        (archive(&[a, ("set/b.txt", Link, b"")]), "set/b.txt is not a regular file"),
        (
            archive(&[a, ("set/b.txt", Regular, &[0; 11])]),
            "set/b.txt has 11 bytes, more than the 10 expected at most",
        ),
        (archive(&[a, a]), "set/a.bin is in the archive twice"),
        (archive(&[]), "set/a.bin is not in the archive"),
        (whole[..whole.len() / 2].to_vec(), "x.gz"),
        (b"not packed at all".to_vec(), "x.gz"),
        // A decompression bomb: unlisted content is bounded too.
        (archive(&[("big", Regular, &vec![0; 1 << 22]), a, ("set/b.txt", Regular, b"")]), "x.gz"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let found = unpacked(&packed, folder.path()).0.unwrap_err().to_string();
        assert!(found.contains(expected), "{found}\nand not {expected}");
        assert_eq!(names(folder.path()), ["x.gz"]);
    }
}

#[test]
fn unknown_names_are_answered_with_the_known_ones() {
    let options = GetOptions { into: Path::new("/nowhere"), mirror: None, progress: &mut |_| () };
    let found = get("minst", options).unwrap_err().to_string();
    assert_eq!(found, "unknown set \"minst\"; known are cifar10, cifar100, fashion-mnist, mnist");
    assert_eq!(default_folder("mnist"), Path::new("data/mnist"));
}
