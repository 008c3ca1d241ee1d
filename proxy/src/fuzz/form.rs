//! The host of a request, and its way through a gateway.

use http::{
    HeaderMap, Request, Version,
    header::{FORWARDED, HOST},
    uri::{Authority, Scheme},
};
use weft_tls::identity::Identity;

use crate::{
    destination::Name,
    http::form::normalize,
    inbound::gateway::{Target, has_been_here},
};

/// The gateway's identity.
const OWN: &str = "gateway.linkerd-multicluster.serviceaccount.identity.linkerd.cluster.local";
const CLIENT: &str = "web.demo.serviceaccount.identity.linkerd.remote.local";
/// The Service that the gateway sends requests to.
const SERVICE: &str = "web.demo.svc.cluster.local";

/// Over either version of HTTP, a request is refused or names one host.
pub(super) fn check(request: &Request<()>) {
    for version in [request.version(), Version::HTTP_2] {
        let mut request = request.clone();
        *request.version_mut() = version;
        if normalize(&mut request).is_err() {
            continue;
        }
        check_host(&request);
        let mut again = request.clone();
        assert!(normalize(&mut again).is_ok(), "{again:?}");
        assert_eq!((again.uri(), again.headers()), (request.uri(), request.headers()));
        check_gateway(request);
    }
}

/// There is one `Host` at most, the target has the same, and over HTTP/1 what an application finds in the one it finds
/// in the other.
fn check_host(request: &Request<()>) {
    let hosts: Vec<_> = request.headers().get_all(HOST).iter().collect();
    assert!(hosts.len() <= 1, "{hosts:?}");
    let Some(named) = request.uri().authority() else { return };
    assert!(!named.as_str().contains('@'), "{named}");
    let Some(host) = hosts.first() else { return assert_eq!(request.version(), Version::HTTP_2, "{named}") };
    let host = Authority::try_from(host.as_bytes()).expect("the host of a target");
    let default = if request.uri().scheme() == Some(&Scheme::HTTPS) { 443 } else { 80 };
    let parts = |of: &Authority| (of.host().to_ascii_lowercase(), of.port_u16().unwrap_or(default));
    assert_eq!(parts(&host), parts(named));
}

/// Whatever a client says about the way of its request: where it passed a gateway, that one notices it when it comes
/// back, and the Service gets its own name. No other request counts as one that came back.
fn check_gateway(mut request: Request<()>) {
    let own: Identity = OWN.parse().expect("an identity");
    let names_own = |headers: &HeaderMap| {
        headers.get_all(FORWARDED).iter().any(|field| field.to_str().is_ok_and(|field| field.contains(OWN)))
    };
    assert!(names_own(request.headers()) || !has_been_here(request.headers(), &own));
    let name = Name::new(SERVICE, 80.try_into().expect("a port")).expect("a name");
    let target = Target::new(name, &own, &CLIENT.parse().expect("an identity")).expect("names that headers can have");
    target.prepare(&mut request);
    assert!(has_been_here(request.headers(), &own), "{:?}", request.headers());
    let named = request.uri().authority().map(|named| named.host().to_ascii_lowercase());
    assert!(named.as_deref().is_none_or(|named| named == SERVICE), "{}", request.uri());
    let hosts: Vec<_> = request.headers().get_all(HOST).iter().collect();
    if request.version() == Version::HTTP_2 {
        assert!(named.is_some() && hosts.is_empty(), "{} {hosts:?}", request.uri());
    } else {
        assert_eq!(hosts, [SERVICE]);
    }
}
