//! The mesh behind linkerd-init's rules in place of the agent's programs: the same proxies and the same result, for
//! comparison and for hosts where the agent cannot run.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;

use weft_test_kit::{
    manifests::Manifests,
    mesh::{Interception, Mesh, Options, unique_name},
    observe,
};

async fn rules_of(netns: &Path) -> observe::Netfilter {
    observe::netfilter(netns).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_example_mesh_works_behind_iptables_rules() {
    let options = Options { name: unique_name("t-modes"), interception: Interception::Iptables, ..Options::default() };
    let mesh = Mesh::start(Manifests::example().unwrap(), options).await.unwrap();
    let client = mesh.pod_of("shop", "client").await.unwrap();
    for (command, target) in
        [("http1", "web.shop:80"), ("http2", "web.shop:80"), ("grpc", "web.shop:80"), ("banner", "banner.shop:9000")]
    {
        let report = mesh.load("shop", &client, &[command, "--target", target, "--count", "6"]).await.unwrap();
        assert_eq!(report.failures, 0, "{report:?}");
    }
    let stranger = mesh.pod_of("shop", "stranger").await.unwrap();
    let report =
        mesh.load("shop", &stranger, &["http1", "--target", "payments.shop:80", "--count", "3"]).await.unwrap();
    assert_eq!(report.errors.get("status 403"), Some(&3), "{report:?}");

    let meshed = mesh.pod("shop", &client).await.unwrap();
    assert!(rules_of(&meshed.netns).await.rules > 0);
    let unmeshed = mesh.pod("legacy", "legacy").await.unwrap();
    assert_eq!(rules_of(&unmeshed.netns).await.rules, 0, "a pod outside the mesh has no rules");
    mesh.stop().await.unwrap();
}
