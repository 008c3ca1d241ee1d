//! Routes of Servers on a real API server: what proxies receive.

use serde_json::json;
use weft_proto::linkerd::{
    inbound::{PortSpec, Server, inbound_server_policies_client::InboundServerPoliciesClient, proxy_protocol::Kind},
    meta::metadata,
};

use crate::{process::PATIENCE, turn::Uses, world::World};

/// The routes of a detecting server as `name [authorizations]`, then its rate limit.
fn show(server: Server) -> Vec<String> {
    let name = |metadata: Option<weft_proto::linkerd::meta::Metadata>| match metadata.unwrap().kind.unwrap() {
        metadata::Kind::Default(name) => format!("default {name}"),
        metadata::Kind::Resource(resource) => format!("{} {}", resource.kind, resource.name),
    };
    let Some(Kind::Detect(detect)) = server.protocol.unwrap().kind else { panic!("the protocol is detected") };
    let mut all = Vec::new();
    for route in detect.http_routes {
        let authorizations: Vec<_> = route.authorizations.into_iter().map(|authz| name(authz.metadata)).collect();
        all.push(format!("{} [{}]", name(route.metadata), authorizations.join(" ")));
    }
    all.extend(detect.http_local_rate_limit.map(|limit| name(limit.metadata)));
    all
}

#[tokio::test]
async fn a_route_of_a_server_replaces_the_default_until_it_is_deleted() {
    let world = World::using(Uses::Statuses).await;
    world.apply(world.meshed_pod("web-1")).await;
    world.apply(world.policy_object("Server", "v1beta3", "web", json!({"podSelector": {}, "port": 8080}))).await;
    let policy = world.policy().await;
    policy.ready().await;
    let mut client =
        InboundServerPoliciesClient::connect(format!("http://{}", policy.bound("policy").await)).await.unwrap();
    world.port_policy(&policy, "web-1", 8080, &[]).await;
    let workload = json!({"ns": world.namespace, "pod": "web-1"}).to_string();
    let mut stream = client.watch_port(PortSpec { workload, port: 8080 }).await.unwrap().into_inner();
    // The stream ends in the expected state; how many messages lead there is not determined.
    let mut reaches = async |expected: &[&str]| {
        let waiting = tokio::time::timeout(PATIENCE, async {
            let mut last = Vec::new();
            while last != expected {
                last = show(stream.message().await.unwrap().expect("the stream goes on"));
            }
        });
        waiting.await.unwrap_or_else(|_| panic!("no message with {expected:?}"));
    };
    reaches(&["default default []"]).await;

    let server = json!({"group": "policy.linkerd.io", "kind": "Server", "name": "web"});
    let rules = json!([{"matches": [{"path": {"type": "PathPrefix", "value": "/api"}}]}]);
    let spec = json!({"parentRefs": [server], "rules": rules});
    world.apply(world.policy_object("HTTPRoute", "v1beta3", "api", spec)).await;
    reaches(&["HTTPRoute api []"]).await;
    let target = json!({"group": "policy.linkerd.io", "kind": "HTTPRoute", "name": "api"});
    let refs = json!([{"kind": "ServiceAccount", "name": "client"}]);
    let spec = json!({"targetRef": target, "requiredAuthenticationRefs": refs});
    world.apply(world.policy_object("AuthorizationPolicy", "v1alpha1", "authz", spec)).await;
    reaches(&["HTTPRoute api [authorizationpolicy authz]"]).await;
    let spec = json!({"targetRef": server, "total": {"requestsPerSecond": 10}});
    world.apply(world.policy_object("HTTPLocalRateLimitPolicy", "v1alpha1", "limit", spec)).await;
    reaches(&["HTTPRoute api [authorizationpolicy authz]", "HTTPLocalRateLimitPolicy limit"]).await;

    world.delete("HTTPLocalRateLimitPolicy", "limit").await;
    world.delete("AuthorizationPolicy", "authz").await;
    reaches(&["HTTPRoute api []"]).await;
    world.delete("HTTPRoute", "api").await;
    reaches(&["default default []"]).await;
    world.done().await;
}
