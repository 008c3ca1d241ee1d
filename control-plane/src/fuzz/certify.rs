//! Requests for certificates.

use std::{sync::LazyLock, time::Duration};

use http::Request;
use prost::Message;
use tokio::runtime::Runtime;
use tonic::{Code, Status};
use tower::Service;
use weft_proto::linkerd::identity::{CertifyRequest, CertifyResponse, identity_server::IdentityServer};
use weft_tls::{
    anchors::TrustAnchors,
    ca::{Issuer, Root},
    keys::IdentityKey,
    tokens::{ServiceAccount, TokenSigner, TokenVerifier},
};

use super::{
    UNREADABLE,
    world::{self, Wire},
};
use crate::{
    api::events::Events,
    grpc,
    identity::{
        Certifier, MAX_MESSAGE_BYTES, Tokens,
        callers::{CallerMetrics, Callers},
        issuer::{CurrentIssuer, Place},
    },
};

const PATH: &str = "/io.linkerd.proxy.identity.Identity/Certify";
const WEB: &str = "web.shop.serviceaccount.identity.linkerd.cluster.local";
/// Longer than any run.
const LIFETIME: Duration = Duration::from_secs(3600 * 24 * 365);

/// The service, and a request that it grants.
struct World {
    runtime: Runtime,
    server: IdentityServer<Certifier>,
    good: CertifyRequest,
}

/// Answers a request. The first byte says which parts of the message are replaced by good ones.
pub(super) fn request(bytes: &[u8]) {
    static WORLD: LazyLock<World> = LazyLock::new(World::new);
    let World { runtime, server, good } = &*WORLD;
    let Some((choice, rest)) = bytes.split_first() else { return };
    let mut request = CertifyRequest::decode(rest).unwrap_or_default();
    for (bit, (part, good)) in [
        (&mut request.token, &good.token),
        (&mut request.certificate_signing_request, &good.certificate_signing_request),
    ]
    .into_iter()
    .enumerate()
    {
        if choice & (1 << bit) != 0 {
            part.clone_from(good);
        }
    }
    if choice & 4 != 0 {
        request.identity.clone_from(&good.identity);
    }
    // Without a good part, the bytes are sent as they came.
    let sent = if choice & 7 == 0 { rest.to_vec() } else { request.encode_to_vec() };
    let wire = [&[0][..], &sent].concat();
    let body = Wire::new(&wire).expect("it has a first byte").body();
    let (code, answer) = runtime.block_on(async {
        let request = Request::post(PATH).body(tonic::body::Body::new(body)).expect("a valid path");
        let response = server.clone().call(request).await.unwrap_or_else(|never| match never {});
        if let Some(status) = Status::from_header_map(response.headers()) {
            return (status.code(), None);
        }
        let body = http_body_util::BodyExt::collect(response.into_body()).await.expect("answers do not fail");
        (Code::Ok, Some(body.to_bytes()))
    });
    let refused = [Code::InvalidArgument, Code::FailedPrecondition, Code::ResourceExhausted];
    assert!(code == Code::Ok || refused.contains(&code) || UNREADABLE.contains(&code), "{code:?}");
    if sent.len() > MAX_MESSAGE_BYTES {
        assert_eq!(code, Code::OutOfRange, "a message of more than {MAX_MESSAGE_BYTES} bytes");
    }
    if let Some(answer) = answer {
        // The only key that signs tokens made one, for one ServiceAccount.
        assert_eq!((&request.identity, request.token.trim_ascii_end()), (&good.identity, &good.token[..]));
        let answer = CertifyResponse::decode(answer.slice(grpc::HEADER_BYTES..)).expect("an answer is a message");
        assert!(!answer.leaf_certificate.is_empty() && answer.valid_until.is_some());
    }
    if request == *good {
        // Requests of an identity with refused tokens wait for each other, one at a time here: none is locked out.
        assert_eq!(code, Code::Ok);
    }
}

impl World {
    fn new() -> Self {
        weft_tls::install_crypto_provider();
        let root = Root::generate("root").expect("a root");
        let anchors = TrustAnchors::from_pem(root.certificate_pem()).expect("anchors");
        let issuer = root.issue_issuer("issuer").expect("an issuer");
        let issuer = Issuer::from_pem(&issuer.certificate, &issuer.key, &anchors).expect("an issuer");
        let signer = TokenSigner::generate().expect("a key");
        let account = ServiceAccount { namespace: "shop".to_owned(), name: "web".to_owned() };
        let token = signer.sign(&account, weft_k8s_api::labels::IDENTITY_AUDIENCE, LIFETIME).expect("a token");
        let csr = IdentityKey::generate().expect("a key").csr_der(&WEB.parse().expect("a name")).expect("a request");
        let certifier = Certifier {
            issuer: CurrentIssuer::new(issuer),
            tokens: Tokens::LocalKey(TokenVerifier::from_pem(signer.public_pem()).expect("a key")),
            callers: Callers::new(CallerMetrics::default()),
            control_namespace: "linkerd".to_owned(),
            trust_domain: "cluster.local".to_owned(),
            lifetime: Duration::from_secs(3600),
            clock_skew: Duration::from_secs(10),
            metrics: world::metrics(),
            place: Place::Files("ca.pem".into()),
            events: Events::none(),
        };
        Self {
            runtime: tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime"),
            server: IdentityServer::new(certifier).max_decoding_message_size(MAX_MESSAGE_BYTES),
            good: CertifyRequest {
                identity: WEB.to_owned(),
                token: token.into_bytes(),
                certificate_signing_request: csr,
            },
        }
    }
}
