//! The admin port as a port of the pod: mesh TLS for clients that ask for this proxy, and the port's policy for every
//! request.
//!
//! Connections to it are not redirected; they arrive at the admin server itself. `/live` and `/ready` are answered
//! regardless of policy: the kubelet asks for them before there can be a policy. Everything else waits for one, but for
//! the pod itself, so that a proxy without a control plane can be looked at.

use std::{io, net::SocketAddr, sync::Arc};

use ::http::{Extensions, Method, Request, StatusCode};
use tokio::{net::TcpStream, sync::watch};
use weft_runtime::admin::{AdminRequest, AdminResponse, text};

use super::tls::{OwnPortStream, TlsServer};
use crate::{
    failure_log::LineLimit,
    metrics::{Counters, target_labels},
    policy::{
        Policies, PortPolicy,
        authz::{Authorization, Client, authorize},
        server::ServerPolicy,
    },
    route::Meta,
    shared::Shared,
};

/// Accepts connections to the admin port and checks their requests.
pub(crate) struct AdminPort {
    shared: Arc<Shared>,
    tls: TlsServer,
    policy: PortPolicy,
    /// Whether the policy controller has answered, or its deadline has passed.
    settled: watch::Receiver<bool>,
    /// Lines about what policy denies.
    denials: LineLimit,
}

impl AdminPort {
    /// Follows the policy of the admin port.
    pub(crate) fn new(shared: Arc<Shared>, policies: &Policies) -> Self {
        let (policy, settled) = policies.follow(shared.config.admin.listen.port());
        let tls = TlsServer::new(shared.credentials.clone());
        Self { tls, policy, settled, denials: LineLimit::default(), shared }
    }

    /// Accepts a client; every request of the connection gets the [`Client`] as an extension.
    ///
    /// # Errors
    /// When the client asks for another server, or does not finish TLS.
    pub(crate) async fn accept(&self, stream: TcpStream) -> io::Result<(Box<dyn OwnPortStream>, Extensions)> {
        self.tls.accept_own_port(stream, &self.shared.config.identity.server_name).await
    }

    /// The response to a request that the port's policy does not allow.
    pub(crate) fn check(&self, request: &AdminRequest) -> Option<AdminResponse> {
        let is_read = matches!(request.head.method, Method::GET | Method::HEAD);
        if is_read && matches!(request.head.uri.path(), "/live" | "/ready") {
            return None;
        }
        let denied = || text(StatusCode::FORBIDDEN, "denied by the policy of this port\n");
        let Some(client) = request.head.extensions.get::<Client>() else { return Some(denied()) };
        if !*self.settled.borrow() && authorize(&[Authorization::localhost()], client).is_none() {
            return Some(text(StatusCode::SERVICE_UNAVAILABLE, "the policy of this port is not known yet\n"));
        }
        let policy = self.policy.borrow().clone();
        let head = Request::from_parts(request.head.clone(), ());
        let (allowed, route) = match policy.http() {
            None => (authorize(&policy.authorizations, client), None),
            Some(http) => match http.find(&head) {
                Some(matched) => (matched.details.authorize(client), Some(&matched.details.meta)),
                None => return Some(text(StatusCode::NOT_FOUND, "no route of this port's policy\n")),
            },
        };
        let metrics = &self.shared.metrics;
        match allowed {
            Some(authz) => {
                self.count(&metrics.inbound_http_allow, &policy, route, Some(authz), client);
                None
            }
            None => {
                self.denials.write(|suppressed| {
                    tracing::info!(client.addr = %client.addr, client.id = client.identity().map(weft_tls::identity::Identity::as_str),
                        server = &*policy.meta.name, suppressed, "request to the admin port denied");
                });
                self.count(&metrics.inbound_http_deny, &policy, route, None, client);
                Some(denied())
            }
        }
    }

    fn count(
        &self,
        family: &Counters,
        policy: &ServerPolicy,
        route: Option<&Arc<Meta>>,
        authz: Option<&Arc<Meta>>,
        client: &Client,
    ) {
        let target: SocketAddr = self.shared.config.admin.listen;
        let mut labels = target_labels(target);
        policy.meta.append_labels("srv", &mut labels);
        labels.push(crate::metrics::label("srv_port", target.port().to_string()));
        if let Some(route) = route {
            route.append_labels("route", &mut labels);
        }
        if let Some(authz) = authz {
            authz.append_labels("authz", &mut labels);
        }
        client.tls.append_labels(&self.shared.metrics.client_ids, &mut labels);
        self.shared.metrics.count(family, &labels);
    }
}
