//! Point 4: the agent is killed with SIGKILL and restarts while requests run, each on a new connection.

use std::time::Duration;

use weft_proto::agent::Direction;
use weft_test_kit::{agent, wait::until};

use super::Stage;

/// Duration of the requests; the agent is killed after a third of it, and is back long before the end.
const LOAD: &str = "6s";
const BEFORE_THE_KILL: Duration = Duration::from_secs(2);
/// Maximum time until the agent serves again: the sandbox restarts it at once, and loading its programs takes a moment.
const BACK_WITHIN: Duration = Duration::from_secs(20);

impl Stage<'_> {
    pub(super) async fn agent_restart(&mut self) -> anyhow::Result<()> {
        println!("\n4. the agent is killed and restarted under load");
        let mesh = self.mesh;
        let before = mesh.agent().await?.status().await?;
        let http =
            ["http1", "--target", "web.shop:80", "--duration", LOAD, "--concurrency", "4", "--pause", "5ms", "--fresh"];
        let tcp = ["banner", "--target", "banner.shop:9000", "--duration", LOAD, "--pause", "5ms", "--fresh"];
        let kill = async {
            tokio::time::sleep(BEFORE_THE_KILL).await;
            let old = mesh.kill_agent().await?;
            let new = until(BACK_WITHIN, async || mesh.agent_after(old).await).await?;
            println!("  agent {old} killed, agent {new} took over");
            anyhow::Ok(())
        };
        let (http, tcp, killed) =
            tokio::join!(mesh.load("shop", &self.client, &http), mesh.load("shop", &self.client, &tcp), kill);
        killed?;
        let after = mesh.agent().await?.status().await?;
        let client_ip = mesh.pod("shop", &self.client).await?.ip;
        let mut connections = 0;
        for (what, report) in [("http1", http?), ("tcp_server_first", tcp?)] {
            self.allow(&format!("{what} meanwhile"), &report);
            self.summary.agent_restart_requests += report.requests;
            self.summary.agent_restart_failures += report.failures;
            connections += report.connections;
            // A connection that bypasses the proxies would reach the server from the client's own address.
            if report.seen_peer_ips.contains(&client_ip) {
                self.summary.agent_restart_unredirected += 1;
            }
        }
        let count = |status| agent::verdicts(status, Direction::Outbound, agent::REDIRECT);
        let redirected = count(&after).saturating_sub(count(&before));
        self.summary.agent_restart_unredirected += connections.saturating_sub(redirected);
        println!("  {connections} connections opened, {redirected} redirected by the kernel meanwhile");
        Ok(())
    }
}
