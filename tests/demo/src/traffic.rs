//! Points 1 to 3: every protocol through the mesh, policy for clients without permission, and the kernel's trace.

use std::time::Duration;

use super::{Stage, Trace};

/// A Service's port with a protocol that it speaks.
struct Conversation {
    /// The name in the summary.
    name: &'static str,
    /// The client's command.
    command: &'static str,
    target: &'static str,
    /// How many pods are behind the target.
    replicas: usize,
    /// Protocols that are balanced by connection need several connections.
    fresh: bool,
}

const CONVERSATIONS: [Conversation; 5] = [
    Conversation { name: "http1", command: "http1", target: WEB, replicas: 3, fresh: false },
    Conversation { name: "http2", command: "http2", target: WEB, replicas: 3, fresh: false },
    Conversation { name: "grpc", command: "grpc", target: WEB, replicas: 3, fresh: false },
    Conversation { name: "websocket", command: "ws", target: WEB, replicas: 3, fresh: true },
    Conversation { name: "tcp_server_first", command: "banner", target: "banner.shop:9000", replicas: 2, fresh: true },
];

const WEB: &str = "web.shop:80";
const PAYMENTS: &str = "payments.shop:80";
const LEDGER: &str = "payments.shop:9000";

/// Requests by protocol, at least.
const REQUESTS: &str = "60";
/// Every replica answers within this: after one slow answer, a balancer avoids a replica for some seconds.
const ALL_ANSWER_WITHIN: Duration = Duration::from_secs(30);
/// Number of requests for each policy check.
const QUESTIONS: &str = "10";

impl Stage<'_> {
    /// Point 1: a meshed client speaks every protocol to Services.
    pub(super) async fn protocols(&mut self, trace: &Trace) -> anyhow::Result<()> {
        println!(
            "\n1. a meshed client to Services, over mutual TLS, balanced; and 3. what the kernel decides meanwhile"
        );
        for conversation in &CONVERSATIONS {
            let mut arguments =
                vec![conversation.command, "--target", conversation.target, "--count", REQUESTS, "--concurrency", "2"];
            if conversation.fresh {
                arguments.push("--fresh");
            }
            let report =
                self.mesh.load_all("shop", &self.client, &arguments, conversation.replicas, ALL_ANSWER_WITHIN).await?;
            trace.end_step();
            self.allow(&format!("{} to {}", conversation.name, conversation.target), &report);
            self.summary.protocols.insert(conversation.name, report.requests - report.failures);
            self.summary
                .backends
                .insert(format!("{} over {}", conversation.target, conversation.name), report.by_backend.len());
        }
        Ok(())
    }

    /// Point 2: allowed and refused clients, each with its opposite.
    pub(super) async fn policy(&mut self, trace: &Trace) -> anyhow::Result<()> {
        println!("\n2. policy: payments wants the identity of `client`, web lets everybody in");
        let (client, stranger, legacy) = (self.client.clone(), self.stranger.clone(), self.legacy.clone());
        let report = self.ask("shop", &client, "http1", PAYMENTS).await?;
        self.allow("the named client to payments", &report);
        let report = self.ask("shop", &client, "banner", LEDGER).await?;
        self.allow("the named client to payments' TCP port", &report);
        let report = self.ask("legacy", &legacy, "http1", WEB).await?;
        self.allow("the unmeshed client to web", &report);

        let report = self.ask("shop", &stranger, "http1", PAYMENTS).await?;
        self.refuse("another meshed client to payments", &report);
        let report = self.ask("legacy", &legacy, "http1", PAYMENTS).await?;
        self.refuse("the unmeshed client to payments", &report);
        let report = self.ask("legacy", &legacy, "banner", LEDGER).await?;
        self.refuse("the unmeshed client to payments' TCP port", &report);
        trace.end_step();
        Ok(())
    }

    async fn ask(
        &self,
        namespace: &str,
        pod: &str,
        command: &str,
        target: &str,
    ) -> anyhow::Result<weft_examples::client::Report> {
        let arguments = [command, "--target", target, "--count", QUESTIONS, "--fresh"];
        self.mesh.load(namespace, pod, &arguments).await
    }
}
