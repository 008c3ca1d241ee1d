//! The agent is killed and restarts while requests run. Its mesh is not shared: other tests do not expect this.

use std::time::Duration;

use weft_proto::agent::Direction;
use weft_test_kit::{
    agent::{self, REDIRECT},
    manifests::Manifests,
    mesh::{Mesh, Options, unique_name},
    wait::{eventually, until},
};

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_agent_costs_no_request_and_no_redirection() {
    let options = Options { name: unique_name("t-agent"), ..Options::default() };
    let mesh = Mesh::start(Manifests::example().unwrap(), options).await.unwrap();
    let client = mesh.pod_of("shop", "client").await.unwrap();
    let client_ip = mesh.pod("shop", &client).await.unwrap().ip;
    let before = mesh.agent().await.unwrap().status().await.unwrap();
    let redirected = |status: &_| agent::verdicts(status, Direction::Outbound, REDIRECT);

    let arguments = ["http1", "--target", "web.shop:80", "--concurrency", "4", "--pause", "2ms", "--fresh"];
    // The load has started, or goes on, once the kernel redirects more connections.
    let more_are_redirected = async |than: u64| {
        eventually("load", Duration::from_secs(60), async || {
            let status = mesh.agent().await.map_err(|error| error.to_string())?.status().await;
            let status = status.map_err(|error| error.to_string())?;
            if redirected(&status) >= than + 100 { Ok(()) } else { Err("no load".to_owned()) }
        })
        .await;
    };
    let kill = async {
        more_are_redirected(redirected(&before)).await;
        let old = mesh.kill_agent().await.unwrap();
        let new = until(Duration::from_secs(60), async || mesh.agent_after(old).await).await.unwrap();
        assert_ne!(old, new);
        let then = mesh.agent().await.unwrap().status().await.unwrap();
        more_are_redirected(redirected(&then)).await;
    };
    let (report, ()) = mesh.load_during("shop", &client, &arguments, kill).await.unwrap();

    assert!(report.requests > 100, "{report:?}");
    assert_eq!(report.failures, 0, "{report:?}");
    assert!(!report.seen_peer_ips.contains(&client_ip), "a connection went around the proxies: {report:?}");
    let after = mesh.agent().await.unwrap().status().await.unwrap();
    let count = redirected(&after) - redirected(&before);
    assert!(count >= report.connections, "{count} of {} connections redirected", report.connections);
    assert_eq!(after.flow_misses, 0);
    assert!(after.pods.iter().all(|pod| pod.outbound && pod.inbound), "{after:?}");
    mesh.stop().await.unwrap();
}
