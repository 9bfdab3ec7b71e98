//! A small HTTP server for tests, on 127.0.0.1: it follows a script, one reply per request.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

/// How the server replies to a request. The last reply of a script repeats.
#[derive(Clone, Copy, Debug)]
pub(super) enum Reply {
    /// Sends what was requested, a range or all.
    Right,
    /// Sends that, but closes the connection after this many bytes.
    Cut(usize),
    /// The same, without a length.
    CutWithoutLength(usize),
    /// Sends everything, whatever was requested.
    IgnoreRange,
    /// Sends another range than was requested.
    OtherRange,
    /// Replies that there is no such range.
    RefuseRange,
    /// Redirects to another path on this server.
    Redirect,
    /// Replies with an error status.
    Status(&'static str),
    /// Sends an unrelated page.
    Page,
    /// Sends nothing and keeps the connection open.
    Silence,
}

/// A running server; it stops when dropped.
pub(super) struct Server {
    address: SocketAddr,
    /// The path of each request, and its range.
    log: Arc<Mutex<Vec<String>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves `content` under every path.
    pub(super) fn start(content: &[u8], script: &[Reply]) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let log = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let (content, script) = (content.to_vec(), script.to_vec());
        let (their_log, their_stop) = (log.clone(), stop.clone());
        let thread = thread::spawn(move || {
            let mut held = Vec::new();
            let mut n_requests = 0;
            for stream in listener.incoming().map_while(Result::ok) {
                if their_stop.load(Ordering::SeqCst) {
                    return;
                }
                let Some((path, range)) = read_request(&stream) else { continue };
                their_log.lock().unwrap().push(match range {
                    None => path,
                    Some(start) => format!("{path} from {start}"),
                });
                let reply = script[n_requests.min(script.len() - 1)];
                n_requests += 1;
                if matches!(reply, Reply::Silence) {
                    held.push(stream);
                } else {
                    answer(&stream, reply, &content, range);
                }
            }
        });
        Server { address, log, stop, thread: Some(thread) }
    }

    /// The address of its root.
    pub(super) fn base(&self) -> String {
        format!("http://{}/", self.address)
    }

    /// The requests so far.
    pub(super) fn log(&self) -> Vec<String> {
        self.log.lock().unwrap().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        // The thread waits for a connection, so this makes one.
        drop(TcpStream::connect(self.address));
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

fn read_request(stream: &TcpStream) -> Option<(String, Option<usize>)> {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let path = lines.next()?.split(' ').nth(1)?.to_string();
    let mut range = None;
    for line in lines.take_while(|line| !line.is_empty()) {
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("range: bytes=") {
            range = value.trim_end_matches('-').parse().ok();
        }
    }
    Some((path, range))
}

/// Writes an answer; errors are ignored, since the client may be gone.
fn answer(mut stream: &TcpStream, reply: Reply, content: &[u8], range: Option<usize>) {
    let n = content.len();
    let start = range.unwrap_or(0).min(n);
    let part = |status: &str, start: usize| format!("{status}\r\nContent-Range: bytes {start}-{}/{n}", n - 1);
    let right = if range.is_some() { part("206 Partial Content", start) } else { "200 OK".to_string() };
    let rest = &content[start..];
    let (head, length, body): (String, Option<usize>, &[u8]) = match reply {
        Reply::Right => (right, Some(rest.len()), rest),
        Reply::Cut(at) => (right, Some(rest.len()), &rest[..at.min(rest.len())]),
        Reply::CutWithoutLength(at) => (right, None, &rest[..at.min(rest.len())]),
        Reply::IgnoreRange => ("200 OK".into(), Some(n), content),
        Reply::OtherRange if range.is_some() => (part("206 Partial Content", start / 2), Some(n), content),
        Reply::OtherRange => ("200 OK".into(), Some(n), content),
        Reply::RefuseRange if range.is_some() => ("416 Range Not Satisfiable".into(), Some(0), &[]),
        Reply::RefuseRange => ("200 OK".into(), Some(n), content),
        Reply::Redirect => ("302 Found\r\nLocation: /elsewhere".into(), Some(0), &[]),
        Reply::Status(status) => (status.into(), Some(0), &[]),
        Reply::Page => ("200 OK".into(), Some(15), b"<p>sign in!</p>"),
        Reply::Silence => return,
    };
    let length = length.map_or(String::new(), |n| format!("Content-Length: {n}\r\n"));
    let _ = write!(stream, "HTTP/1.1 {head}\r\n{length}Connection: close\r\n\r\n")
        .and_then(|()| stream.write_all(body));
}
