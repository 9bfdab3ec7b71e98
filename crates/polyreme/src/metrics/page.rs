//! The listener of a run's page: as much of HTTP/1.1 as Prometheus, curl and `polyreme status` need.
//!
//! One connection at a time, a request of at most [`REQUEST_MAX`] bytes, and [`PATIENCE`] for all of it: a client that dawdles
//! keeps others waiting for that long and the run not at all. Nothing that a client sends changes anything.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::figures::RunFigures;
use super::{status, text};

/// The longest request.
const REQUEST_MAX: usize = 8192;
/// How long a client may take to ask and to read.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long the thread rests when the system lends it no connection, such as when all files are in use.
const REST: Duration = Duration::from_millis(100);

/// A page that is served until this is dropped.
pub(crate) struct MetricsPage {
    figures: Arc<Mutex<RunFigures>>,
    addr: SocketAddr,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl MetricsPage {
    /// Listens at an address of this host.
    pub(crate) fn open(addr: SocketAddr) -> io::Result<MetricsPage> {
        let listener = TcpListener::bind(addr)?;
        let addr = listener.local_addr()?;
        let (figures, over) = (Arc::<Mutex<RunFigures>>::default(), Arc::new(AtomicBool::new(false)));
        let (shown, ends) = (figures.clone(), over.clone());
        let serve = move || {
            while !ends.load(Ordering::Relaxed) {
                match listener.accept() {
                    // What goes wrong with a client is the client's.
                    Ok((client, _)) => drop(answer(client, &shown)),
                    Err(_) => thread::sleep(REST),
                }
            }
        };
        let thread = thread::Builder::new().name("metrics".into()).spawn(serve)?;
        Ok(MetricsPage { figures, addr, over, thread: Some(thread) })
    }

    /// Where it listens.
    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The figures, to be changed.
    pub(crate) fn figures(&self) -> MutexGuard<'_, RunFigures> {
        lock(&self.figures)
    }
}

impl Drop for MetricsPage {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        // Ends its wait for a client.
        let woken = TcpStream::connect_timeout(&self.addr, PATIENCE).is_ok();
        if let Some(thread) = self.thread.take().filter(|_| woken) {
            drop(thread.join());
        }
    }
}

fn lock(figures: &Mutex<RunFigures>) -> MutexGuard<'_, RunFigures> {
    figures.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Answers one request.
fn answer(mut client: TcpStream, figures: &Mutex<RunFigures>) -> io::Result<()> {
    let until = Instant::now() + PATIENCE;
    client.set_write_timeout(Some(PATIENCE))?;
    let (code, kind, body) = match ask_of(&mut client, until)? {
        Ask::Page(path) => {
            // A copy, so that the run does not wait until it is written.
            let run = lock(figures).clone();
            match path.as_str() {
                "/metrics" => ("200 OK", text::CONTENT_TYPE, text::page(&run)),
                "/status" => ("200 OK", "application/json", status::of(&run).to_string()),
                _ => ("404 Not Found", "text/plain", "there is /metrics, and /status\n".into()),
            }
        }
        Ask::Other => ("405 Method Not Allowed", "text/plain", "only GET\n".into()),
        Ask::Garbled => ("400 Bad Request", "text/plain", "that is not a request of HTTP\n".into()),
    };
    let head = format!(
        "HTTP/1.1 {code}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    client.write_all(head.as_bytes())?;
    client.write_all(body.as_bytes())
}

/// What a client asks for.
enum Ask {
    Page(String),
    Other,
    Garbled,
}

/// Reads a request up to the empty line behind its head.
fn ask_of(client: &mut TcpStream, until: Instant) -> io::Result<Ask> {
    let mut bytes = Vec::new();
    while !bytes.windows(4).any(|end| end == b"\r\n\r\n") {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() || bytes.len() > REQUEST_MAX {
            return Ok(Ask::Garbled);
        }
        client.set_read_timeout(Some(left))?;
        let mut some = [0; 1024];
        match client.read(&mut some)? {
            0 => return Ok(Ask::Garbled),
            n => bytes.extend_from_slice(&some[..n]),
        }
    }
    let text = String::from_utf8_lossy(&bytes);
    let mut words = text.lines().next().unwrap_or_default().split(' ');
    Ok(match (words.next(), words.next(), words.next()) {
        (Some("GET"), Some(path), Some(version)) if version.starts_with("HTTP/1.") => {
            Ask::Page(path.split('?').next().unwrap_or_default().to_string())
        }
        (Some(_), Some(_), Some(version)) if version.starts_with("HTTP/") => Ask::Other,
        _ => Ask::Garbled,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page() -> MetricsPage {
        MetricsPage::open(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap()
    }

    fn ask(page: &MetricsPage, request: &[u8]) -> String {
        let mut client = TcpStream::connect(page.addr()).unwrap();
        client.write_all(request).unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn requests_are_answered_and_what_is_none_is_refused() {
        let page = page();
        page.figures().ranks = 5;
        for (request, part) in [
            ("GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n", "HTTP/1.1 200 OK\r\n"),
            ("GET /metrics?a=b HTTP/1.0\r\n\r\n", "\npolyreme_ranks 5\n"),
            ("GET /status HTTP/1.1\r\n\r\n", "\"ranks\":5"),
            ("GET / HTTP/1.1\r\n\r\n", "HTTP/1.1 404"),
            ("POST /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 405"),
            ("hello\r\n\r\n", "HTTP/1.1 400"),
            ("GET /metrics HTTP/1.1\r\n", "HTTP/1.1 400"),
            ("", "HTTP/1.1 400"),
        ] {
            let answer = ask(&page, request.as_bytes());
            assert!(answer.contains(part), "{request:?}: {answer}");
        }
    }

    /// More than a request may be is not read to its end, and the next client is served.
    #[test]
    fn a_request_without_an_end_is_given_up() {
        let page = page();
        let mut client = TcpStream::connect(page.addr()).unwrap();
        let long = vec![b'a'; 1 << 20];
        // The connection is closed while this is sent, or before the answer is read.
        drop(client.write_all(&long));
        let mut answer = Vec::new();
        drop(client.read_to_end(&mut answer));
        assert!(ask(&page, b"GET /metrics HTTP/1.1\r\n\r\n").contains("200 OK"));
    }

    #[test]
    fn a_page_is_gone_when_it_is_dropped() {
        let page = page();
        let addr = page.addr();
        drop(page);
        assert!(TcpStream::connect(addr).is_err());
    }
}
