//! The HTTP client of `object_store`, made of the one that this crate has: `ureq`, which blocks, on threads of the executor for work
//! that does. So the program has one client, with one kind of TLS.

use std::io::Read;
use std::pin::Pin;
use std::task::{Context, Poll};

use async_trait::async_trait;
use bytes::Bytes;
use http_body::{Body, Frame};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody,
    HttpService,
};
use tokio::sync::{mpsc, oneshot};
use ureq::Agent;
use ureq::http::{Request, Response};

/// What is read of a connection at a time, and how much of it waits to be written.
const CHUNK_BYTES: usize = 256 << 10;
const CHUNKS: usize = 4;

/// Makes requests.
#[derive(Clone, Debug)]
pub(super) struct Requests(pub(super) Agent);

/// A body that comes in chunks.
struct Chunks(mpsc::Receiver<Result<Bytes, HttpError>>);

impl HttpConnector for Requests {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}

#[async_trait]
impl HttpService for Requests {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (head, body) = request.into_parts();
        let request =
            Request::from_parts(head, body.as_bytes().map(|bytes| bytes.to_vec()).unwrap_or_default());
        let (tell, told) = oneshot::channel();
        let (put, chunks) = mpsc::channel(CHUNKS);
        let agent = self.0.clone();
        tokio::task::spawn_blocking(move || answer(&agent, request, tell, &put));
        let gone = |e| HttpError::new(HttpErrorKind::Interrupted, e);
        let head = told.await.map_err(gone)??;
        let (head, ()) = head.into_parts();
        Ok(HttpResponse::from_parts(head, HttpResponseBody::new(Chunks(chunks))))
    }
}

/// Makes a request: tells its head, and puts its body into the channel until the reader is gone.
fn answer(
    agent: &Agent,
    request: Request<Vec<u8>>,
    tell: oneshot::Sender<Result<Response<()>, HttpError>>,
    put: &mpsc::Sender<Result<Bytes, HttpError>>,
) {
    let answer = match request.body().is_empty() {
        true => agent.run(request.map(|_| ())),
        false => agent.run(request),
    };
    let answer = match answer {
        Ok(answer) => answer,
        Err(error) => {
            // Nobody waits for it any more if this fails, here and below.
            let _ = tell.send(Err(fault(error)));
            return;
        }
    };
    let (head, body) = answer.into_parts();
    if tell.send(Ok(Response::from_parts(head, ()))).is_err() {
        return;
    }
    let mut body = body.into_reader();
    loop {
        let mut chunk = vec![0; CHUNK_BYTES];
        let read = match body.read(&mut chunk) {
            Ok(0) => return,
            Ok(n) => {
                chunk.truncate(n);
                Ok(chunk.into())
            }
            Err(error) => Err(HttpError::new(HttpErrorKind::Interrupted, error)),
        };
        let last = read.is_err();
        if put.blocking_send(read).is_err() || last {
            return;
        }
    }
}

/// What kind of error it is: that says whether the request is made again.
fn fault(error: ureq::Error) -> HttpError {
    let kind = match &error {
        ureq::Error::Timeout(_) => HttpErrorKind::Timeout,
        ureq::Error::ConnectionFailed | ureq::Error::HostNotFound => HttpErrorKind::Connect,
        ureq::Error::Io(e) => match e.kind() {
            std::io::ErrorKind::ConnectionRefused => HttpErrorKind::Connect,
            _ => HttpErrorKind::Interrupted,
        },
        _ => HttpErrorKind::Unknown,
    };
    HttpError::new(kind, error)
}

impl Body for Chunks {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        self.0.poll_recv(context).map(|chunk| chunk.map(|chunk| chunk.map(Frame::data)))
    }
}
