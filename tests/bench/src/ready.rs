//! How long real proxies wait for their pods' enrolment when many pods start at once: from the request to the agent
//! until the proxy opens the gate of its `/ready`.
//!
//! The proxies run and listen before any pod is enrolled, because the start of a hundred processes is another
//! measurement. They have no identity service, and only for that reason `/ready` stays unready, which is checked for
//! each.

use std::{collections::BTreeMap, fs, os::unix::fs::PermissionsExt as _, time::Duration};

use anyhow::{Context as _, anyhow, bail};
use tempfile::TempDir;
use tokio::task::JoinSet;
use weft_test_kit::{binaries, wait::until};
use weft_tls::ca::Root;

use super::{
    actor::{Actor, Order, Reply, now},
    enrolment::Quantiles,
    node::{Node, PROXY_UID},
    target::Target,
};

const PROXY_STARTS_WITHIN: Duration = Duration::from_secs(60);
const ADMIN_PORT: u16 = 4191;
/// The proxy's log message when it opens the gate.
const ATTESTED: &str = "kernel redirects both directions";

/// Starts this many pods with a real proxy each, then enrols all of them at once. Returns milliseconds from the
/// enrolment's request to the open gate.
///
/// # Errors
/// A proxy does not start or is not attested, or `/ready` does not say what it should.
pub async fn burst(node: &mut Node, pods: u32) -> anyhow::Result<Quantiles> {
    let files = tempfile::tempdir().context("make a directory")?;
    let mut environment = environment(&files)?;
    // A directory that the proxy's user may read, too.
    let program = files.path().join("weft-proxy");
    fs::copy(binaries::directory()?.join("weft-proxy"), &program).context("copy weft-proxy")?;
    let mut starting = Vec::new();
    for number in 0..pods {
        // Each has its own key.
        let identity = files.path().join(format!("identity-{number}"));
        fs::create_dir(&identity)?;
        fs::set_permissions(&identity, fs::Permissions::from_mode(0o777))?;
        environment.insert("LINKERD2_PROXY_IDENTITY_DIR".to_owned(), identity.display().to_string());
        let pod = node.add_pod().await?;
        let mut actor = node.meshed_actor(&pod).await?;
        actor.order(&Order::Run(program.clone(), PROXY_UID, environment.clone())).await?;
        starting.push((pod, actor));
    }
    for (_, actor) in &mut starting {
        // A proxy that ended reports the reason only once.
        let started = until(PROXY_STARTS_WITHIN, async || match ready(actor).await {
            Ok(None) => Err(anyhow!("a proxy does not start")),
            answer => Ok(answer),
        });
        let answer = started.await??.unwrap_or_default();
        anyhow::ensure!(answer.contains("redirect"), "a proxy does not wait for its enrolment: {answer}");
    }
    node.at_rest().await?;
    let (mut waiting, mut pods) = (JoinSet::new(), Vec::new());
    for (pod, mut actor) in starting {
        let api = node.pods()?;
        pods.push(pod.clone());
        waiting.spawn(async move {
            let begin = now();
            let says = Order::Says(ATTESTED.to_owned());
            let (enrolled, said) = tokio::join!(api.enrol(&pod), actor.tell(&says));
            enrolled?;
            let Reply::Said(end) = said? else { bail!("the actor told something else") };
            Ok((end.saturating_sub(begin) as f64 / 1e3, actor))
        });
    }
    let (mut milliseconds, mut actors) = (Vec::new(), Vec::new());
    while let Some(done) = waiting.join_next().await {
        let (elapsed, actor) = done??;
        milliseconds.push(elapsed);
        actors.push(actor);
    }
    for mut actor in actors {
        let answer = ready(&mut actor).await?.context("nobody listens any more")?;
        anyhow::ensure!(!answer.contains("redirect"), "/ready still waits for it: {answer}");
        actor.end().await?;
    }
    for pod in pods {
        node.pods()?.withdraw(&pod).await?;
        node.remove_pod(&pod).await?;
    }
    Ok(Quantiles::of(milliseconds))
}

async fn ready(actor: &mut Actor) -> anyhow::Result<Option<String>> {
    match actor.tell(&Order::Get(ADMIN_PORT, "/ready".to_owned())).await? {
        Reply::Got(answer) => Ok(answer),
        other => bail!("unexpected {other:?}"),
    }
}

/// A proxy's settings in a pod without a control plane, except its directory for keys.
fn environment(files: &TempDir) -> anyhow::Result<BTreeMap<String, String>> {
    let token = files.path().join("token");
    fs::write(&token, "a token")?;
    fs::set_permissions(&token, fs::Permissions::from_mode(0o644))?;
    fs::set_permissions(files.path(), fs::Permissions::from_mode(0o755))?;
    let nobody = "127.0.0.1:1".to_owned();
    let variables = [
        ("LINKERD2_PROXY_DESTINATION_SVC_ADDR", nobody.clone()),
        ("LINKERD2_PROXY_POLICY_SVC_ADDR", nobody.clone()),
        ("LINKERD2_PROXY_IDENTITY_SVC_ADDR", nobody),
        ("LINKERD2_PROXY_POLICY_WORKLOAD", "bench:pod".to_owned()),
        ("LINKERD2_PROXY_OUTBOUND_LISTEN_ADDRS", "127.0.0.1:4140,[::1]:4140".to_owned()),
        ("LINKERD2_PROXY_INBOUND_LISTEN_ADDR", "[::]:4143".to_owned()),
        ("LINKERD2_PROXY_ADMIN_LISTEN_ADDR", format!("0.0.0.0:{ADMIN_PORT}")),
        ("LINKERD2_PROXY_CONTROL_LISTEN_ADDR", "127.0.0.1:4190".to_owned()),
        ("LINKERD2_PROXY_IDENTITY_TOKEN_FILE", token.display().to_string()),
        ("LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS", Root::generate("root")?.certificate_pem().to_owned()),
        ("LINKERD2_PROXY_IDENTITY_LOCAL_NAME", "pod.bench.serviceaccount.identity.linkerd.cluster.local".to_owned()),
        ("LINKERD2_PROXY_LOG", "info".to_owned()),
        ("WEFT_PROXY_REQUIRE_REDIRECT", "true".to_owned()),
    ];
    Ok(variables.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
}

/// The target for starting pods, applied to the proxies themselves.
#[must_use]
pub fn targets(bursts: &[Quantiles]) -> Vec<Target> {
    let p99 = bursts.iter().map(|burst| burst.p99).collect();
    vec![Target::at_most("enrolment to weft-proxy's gate p99, pods at once", "ms", 50.0, p99)]
}
