//! Questions in JSON: the requests of `weft.viz.v1` in camel case, posted to `/api/v1/NAME`.

use futures::{StreamExt as _, future::ready};
use http::{Response, StatusCode};
use serde::{Serialize, de::DeserializeOwned};
use tonic::{Code, Request, Status};
use weft_proto::viz::{TapEvent, tap_event::Event, viz_server::Viz};

use super::{Body, events, failure, json};

/// Answers the question of this name; `None` if it is none of `weft.viz.v1`.
pub async fn question<V: Viz + ?Sized>(viz: &V, name: &str, content: &[u8]) -> Option<Response<Body>> {
    Some(match name {
        "stat" => answer(content, |request| viz.stat(request)).await,
        "stat-inbound" => answer(content, |request| viz.stat_inbound(request)).await,
        "stat-outbound" => answer(content, |request| viz.stat_outbound(request)).await,
        "routes" => answer(content, |request| viz.routes(request)).await,
        "edges" => answer(content, |request| viz.edges(request)).await,
        "series" => answer(content, |request| viz.series(request)).await,
        "tap" => tap(viz, content).await,
        _ => return None,
    })
}

async fn answer<Q, A, F>(content: &[u8], ask: impl FnOnce(Request<Q>) -> F) -> Response<Body>
where
    Q: DeserializeOwned,
    A: Serialize,
    F: Future<Output = Result<tonic::Response<A>, Status>>,
{
    match serde_json::from_slice(content) {
        Err(error) => malformed(&error),
        Ok(request) => match ask(Request::new(request)).await {
            Ok(response) => json(response.get_ref()),
            Err(status) => refusal(&status),
        },
    }
}

async fn tap<V: Viz + ?Sized>(viz: &V, content: &[u8]) -> Response<Body> {
    let request = match serde_json::from_slice(content) {
        Ok(request) => Request::new(request),
        Err(error) => return malformed(&error),
    };
    match viz.tap(request).await {
        Err(status) => refusal(&status),
        // A tap that breaks ends with the reason, as that of a single proxy does.
        Ok(response) => events(response.into_inner().scan(false, |broken, event| {
            let next = (!*broken).then(|| {
                event.unwrap_or_else(|status| {
                    *broken = true;
                    TapEvent { event: Some(Event::Problem(status.message().to_owned())), ..TapEvent::default() }
                })
            });
            ready(next)
        })),
    }
}

fn malformed(error: &serde_json::Error) -> Response<Body> {
    failure(StatusCode::BAD_REQUEST, &format!("the question: {error}"))
}

/// What the engine or a component refused. Its UNAUTHENTICATED is not this page's key, which is a 401.
fn refusal(status: &Status) -> Response<Body> {
    let code = match status.code() {
        Code::InvalidArgument => StatusCode::BAD_REQUEST,
        Code::PermissionDenied | Code::Unauthenticated => StatusCode::FORBIDDEN,
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
        Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        Code::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
        Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
        _ => StatusCode::BAD_GATEWAY,
    };
    failure(code, status.message())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use http::header;
    use weft_proto::linkerd::tap::{ObserveRequest, TapEvent as ProxyEvent};

    use super::*;
    use crate::{
        Config, Engine,
        fleet::{Exposition, Fleet, Pod},
        page::tests::text,
    };

    /// A cluster that cannot be read.
    struct Dark;

    impl Fleet for Dark {
        async fn pods(&self, _namespace: &str) -> Result<Vec<Arc<Pod>>, String> {
            Err("pods is forbidden".to_owned())
        }

        async fn metrics(&self, _pod: &Pod, _metrics: &mut Exposition<'_>) -> Result<(), String> {
            Err("no pods".to_owned())
        }

        async fn tap(&self, _pod: &Pod, _request: ObserveRequest) -> Result<tonic::Streaming<ProxyEvent>, String> {
            Err("no pods".to_owned())
        }
    }

    async fn ask(name: &str, content: &str) -> Option<(StatusCode, String)> {
        let engine = Engine::new(Dark, Config::default());
        let answer = question(&engine, name, content.as_bytes()).await?;
        assert_eq!(answer.headers()[header::CONTENT_TYPE], "application/json");
        Some((answer.status(), text(answer).await))
    }

    #[tokio::test]
    async fn what_cannot_be_answered_says_why() {
        let wanted = r#"{"resource": {"kind": "deployment", "namespace": "shop"}}"#;
        for name in ["stat", "stat-inbound", "stat-outbound", "routes", "edges", "series", "tap"] {
            let (status, _) = ask(name, "[").await.unwrap();
            assert_eq!(status, StatusCode::BAD_REQUEST, "{name}");
            let (status, error) = ask(name, r#"{"windowSeconds": "many", "maxRps": "many"}"#).await.unwrap();
            assert_eq!(status, StatusCode::BAD_REQUEST, "{name}: {error}");
            let (status, error) = ask(name, wanted).await.unwrap();
            assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{name}: {error}");
        }
        assert!(ask("pods", wanted).await.is_none());
    }
}
