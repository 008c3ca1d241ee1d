//! What a watch asks of the API server, where that differs from what kube's watcher asks.
//!
//! - A streamed list is of the newest state, as client-go asks for it. kube asks for any (`resourceVersion=0`): an API
//!   server whose cache lags behind would show a new process a state that others have left behind, as long as it lags.
//! - A watch that ends as soon as it has begun is begun again at a bounded rate. kube does so without a wait.
//! - That a watch was resumed is reported. A kind without changes says nothing.

use std::{sync::Arc, time::Duration};

use http::{Request, Uri};
use kube::{Client, client::Body};
use parking_lot::Mutex;
use tokio::{sync::watch, time::Instant};

use crate::allowance::{Allowance, Rate};

/// How often the watch of one kind may begin.
const STARTS: Rate = Rate { burst: 5.0, per_second: 1.0 };
/// Wait when the allowance is used up.
const PAUSE: Duration = Duration::from_millis(100);

/// A client for the watch of one kind. The receiver changes when the API server has accepted to resume the watch.
pub(super) fn of_watch(client: &Client) -> (Client, watch::Receiver<()>) {
    let (resumed_tx, resumed_rx) = watch::channel(());
    let resumed_tx = Arc::new(resumed_tx);
    let starts = Arc::new(Mutex::new(Allowance::new(STARTS, Instant::now())));
    let inner = client.clone();
    let service = tower::service_fn(move |request: Request<Body>| {
        let (client, starts, resumed) = (inner.clone(), Arc::clone(&starts), Arc::clone(&resumed_tx));
        async move {
            if !has(request.uri(), "watch=true") {
                return client.send(request).await;
            }
            while !starts.lock().take(Instant::now()) {
                tokio::time::sleep(PAUSE).await;
            }
            if has(request.uri(), "sendInitialEvents=true") {
                return client.send(of_newest(request)).await;
            }
            let response = client.send(request).await?;
            if response.status().is_success() {
                resumed.send_replace(());
            }
            Ok(response)
        }
    });
    (Client::new(service, client.default_namespace()), resumed_rx)
}

fn has(uri: &Uri, pair: &str) -> bool {
    uri.query().is_some_and(|query| query.split('&').any(|found| found == pair))
}

/// The request without the version from which any state would do.
fn of_newest(mut request: Request<Body>) -> Request<Body> {
    let query = request.uri().query().unwrap_or_default();
    let pairs: Vec<_> = query.split('&').filter(|pair| *pair != "resourceVersion=0").collect();
    let target = format!("{}?{}", request.uri().path(), pairs.join("&"));
    let mut parts = request.uri().clone().into_parts();
    parts.path_and_query = target.parse().ok();
    // What is left of a valid address is one; otherwise the request stays as it is.
    if let Ok(uri) = Uri::from_parts(parts) {
        *request.uri_mut() = uri;
    }
    request
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        sync::atomic::{AtomicU32, Ordering},
    };

    use super::*;

    fn request(uri: &str) -> Request<Body> {
        Request::get(uri).body(Body::empty()).unwrap()
    }

    #[test]
    fn a_streamed_list_is_of_the_newest_state() {
        for (asked, sent) in [
            (
                "/api/v1/pods?&watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&resourceVersion=0",
                "/api/v1/pods?&watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan",
            ),
            ("https://k/a/pods?resourceVersion=0&labelSelector=a%3Db", "https://k/a/pods?labelSelector=a%3Db"),
        ] {
            assert_eq!(of_newest(request(asked)).uri(), sent);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_that_ends_at_once_begins_again_at_a_bounded_rate_and_lists_do_not_wait() {
        let asked = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&asked);
        let api = tower::service_fn(move |_: Request<Body>| {
            counted.fetch_add(1, Ordering::Relaxed);
            async { Ok::<_, Infallible>(http::Response::new(Body::empty())) }
        });
        let (client, mut resumed) = of_watch(&Client::new(api, "default"));
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(60) {
            client.send(request("/api/v1/pods?watch=true&resourceVersion=7")).await.unwrap();
        }
        let watches = asked.swap(0, Ordering::Relaxed);
        assert!((60..=67).contains(&watches), "{watches} in a minute");
        assert!(resumed.has_changed().unwrap());
        resumed.mark_unchanged();
        let began = Instant::now();
        for _ in 0..1000 {
            client.send(request("/api/v1/pods?limit=500")).await.unwrap();
        }
        assert_eq!((asked.load(Ordering::Relaxed), began.elapsed()), (1000, Duration::ZERO));
        assert!(!resumed.has_changed().unwrap(), "a list resumes nothing");
    }
}
