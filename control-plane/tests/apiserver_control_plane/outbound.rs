//! Routes of outbound traffic.

use serde_json::json;
use tonic::Streaming;
use weft_proto::linkerd::outbound::{
    OutboundPolicy, TrafficSpec, http_route::distribution, outbound_policies_client::OutboundPoliciesClient,
    proxy_protocol, traffic_spec::Target,
};

use crate::{
    process::PATIENCE,
    turn::Uses,
    world::{World, define},
};

/// The weights of the backends of the first rule; none where everything goes to the Service.
async fn next_weights(answers: &mut Streaming<OutboundPolicy>) -> Vec<u32> {
    let answer = tokio::time::timeout(PATIENCE, answers.message()).await.expect("an answer in time").unwrap().unwrap();
    let Some(proxy_protocol::Kind::Detect(detect)) = answer.protocol.unwrap().kind else { panic!("not detected") };
    let rule = detect.http1.unwrap().routes.remove(0).rules.remove(0);
    match rule.backends.unwrap().kind.unwrap() {
        distribution::Kind::RandomAvailable(random) => random.backends.iter().map(|backend| backend.weight).collect(),
        _ => Vec::new(),
    }
}

#[tokio::test]
async fn a_route_of_a_service_reaches_open_watches_and_leaves_them() {
    let world = World::using(Uses::Statuses).await;
    define(&world.client, "httproutes.policy.linkerd.io").await;
    let policy = world.policy().await;
    policy.ready().await;
    let url = format!("http://{}", policy.bound("policy").await);
    let mut client = OutboundPoliciesClient::connect(url).await.unwrap();
    let request = TrafficSpec {
        source_workload: json!({"ns": world.namespace, "pod": "client"}).to_string(),
        target: Some(Target::Authority(format!("web.{}.svc.cluster.local:80", world.namespace))),
    };
    let mut answers = client.watch(request).await.unwrap().into_inner();
    assert_eq!(next_weights(&mut answers).await, Vec::<u32>::new());
    let spec = json!({"parentRefs": [{"group": "core", "kind": "Service", "name": "web", "port": 80}],
        "rules": [{"backendRefs": [{"name": "web", "port": 80, "weight": 90}, {"name": "gone", "port": 80, "weight": 10}]}]});
    world.apply(world.policy_object("HTTPRoute", "v1beta3", "split", spec)).await;
    assert_eq!(next_weights(&mut answers).await, [90, 10]);
    world.delete("HTTPRoute", "split").await;
    assert_eq!(next_weights(&mut answers).await, Vec::<u32>::new());
    world.done().await;
}
