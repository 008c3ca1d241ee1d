//! Ingress mode: each request names its destination in `l5d-dst-override`, because the ingress has balanced it already
//! and its connection goes to a pod.
//!
//! ```text
//! accept -> detect -> HTTP: by the request's header, else by the original destination
//!                \--> not HTTP: by the original destination
//! ```

use std::{num::NonZeroU16, sync::Arc};

use http::{HeaderMap, HeaderValue, Request};
use tokio::net::TcpStream;

use super::{
    Connection, ConnectionError, Serving,
    target::{OutboundTarget, accepted},
};
use crate::{
    destination::{Destination, Name},
    http::{headers::DST_OVERRIDE, respond::Failure},
    route::Meta,
};

/// The port of a name without one.
const DEFAULT_PORT: NonZeroU16 = NonZeroU16::new(80).unwrap();

impl Connection {
    /// Finds out how to serve a connection in ingress mode. What is known about its original destination does not
    /// matter before a request needs it.
    pub(super) async fn ingress(self, stream: TcpStream) -> Result<Serving, ConnectionError> {
        let shared = &self.worker.shared;
        accepted(shared, &Meta::default(), "detect").1.inc();
        let timeout = shared.config.outbound.detect_timeout;
        self.detect(stream, timeout, None).await
    }

    /// The destination that a request names; the header is taken off.
    pub(super) fn named_by<B>(&self, request: &mut Request<B>) -> Result<Option<Arc<OutboundTarget>>, Failure> {
        if !self.requests_choose {
            return Ok(None);
        }
        let Some(name) = take_override(request.headers_mut())? else { return Ok(None) };
        self.worker.named(&name).map(Some).ok_or(Failure::LoadShed)
    }

    /// The failure of a request for a destination whose policy has no routes for HTTP.
    pub(super) fn not_for_http(&self) -> Failure {
        match &self.target.destination {
            Destination::Addr(_) if !self.requests_choose => Failure::Internal("the destination is no longer HTTP"),
            _ => Failure::Unusable { reason: "the destination is not HTTP".to_owned(), label: "not http" },
        }
    }
}

/// Takes the header off. Several, or one that is no `host[:port]`, are refused: guessing would send the request
/// somewhere else.
fn take_override(headers: &mut HeaderMap) -> Result<Option<Name>, Failure> {
    let mut values = headers.get_all(DST_OVERRIDE).iter();
    let name = match (values.next(), values.next()) {
        (None, _) => return Ok(None),
        (Some(value), None) => read(value),
        (Some(_), Some(_)) => None,
    };
    headers.remove(DST_OVERRIDE);
    name.map(Some).ok_or(Failure::BadRequest)
}

fn read(value: &HeaderValue) -> Option<Name> {
    Name::parse(value.to_str().ok()?.trim(), DEFAULT_PORT)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(values: &[&str]) -> Result<Option<String>, Failure> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append("l5d-dst-override", value.parse().unwrap());
        }
        let name = take_override(&mut headers).map(|name| name.map(|name| name.to_string()));
        assert!(headers.is_empty());
        name
    }

    #[test]
    fn one_name_counts_and_malformed_ones_are_refused() {
        assert_eq!(taken(&[]), Ok(None));
        assert_eq!(taken(&["web.demo"]), Ok(Some("web.demo:80".to_owned())));
        assert_eq!(taken(&[" web.demo:8080 "]), Ok(Some("web.demo:8080".to_owned())));
        for malformed in [&["10.0.0.1:80"][..], &[""], &["web:http"], &["a", "b"], &["a", "a"], &["a, b"]] {
            assert_eq!(taken(malformed), Err(Failure::BadRequest), "{malformed:?}");
        }
    }
}
