//! The component against a real API server: who may ask what, and what it collects from the proxies of many pods.
//!
//! Pods are objects without a kubelet. Their addresses are loopback addresses, on which this process answers as their
//! proxies.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::disallowed_methods, reason = "starts what it ends with, and waits for other processes")]
#![expect(clippy::print_stdout, reason = "a test that measures says what it measured")]
mod proxies;
mod world;

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use futures::future::join_all;
use nix::sys::signal::Signal;
use tonic::{Code, Request, metadata::AsciiMetadataValue};
use weft_proto::viz::{StatRequest, TapRequest, viz_server::Viz as _};
use weft_test_kit::wait::eventually;
use weft_viz_core::relay::{Credentials, Relay};

use proxies::{Proxies, REQUESTS};
use world::{AUDIENCE, World, resource};

#[tokio::test]
async fn callers_get_what_kubernetes_allows_them() {
    let world = World::new("allowed").await;
    let own = world.namespace.as_str();
    for (account, rules) in [
        ("nobody", &[][..]),
        ("viewer", &[("get", "stats")]),
        ("tapper", &[("create", "taps")]),
        // Other verbs of the resources are no rights.
        ("wrong", &[("list", "stats"), ("get", "taps")]),
    ] {
        world.account(account, rules).await;
    }
    let viz = world.start().await;

    // Who is it?
    for (token, expected) in [
        (None, "authorization: Bearer"),
        (Some("abc".to_owned()), "audience viz.weft.io"),
        (Some(world.token("viewer", "other").await), "audience viz.weft.io"),
        (Some(world.token("viewer", "identity.l5d.io").await), "audience viz.weft.io"),
    ] {
        let refused = viz.stat(token.as_deref(), own).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unauthenticated, "{refused:?}");
        assert!(refused.message().contains(expected), "{refused:?}");
        assert_eq!(viz.tap(token.as_deref(), TapRequest::default()).await.unwrap_err().code(), Code::Unauthenticated);
    }

    // What may it?
    for audience in ["", AUDIENCE] {
        for (account, stats, taps) in
            [("nobody", false, false), ("viewer", true, false), ("tapper", false, true), ("wrong", false, false)]
        {
            let token = world.token(account, audience).await;
            let stat = viz.stat(Some(&token), own).await;
            let tap =
                viz.tap(Some(&token), TapRequest { resource: resource("pod", own, ""), ..TapRequest::default() }).await;
            for (answer, allowed, right) in
                [(stat.map(drop), stats, "get stats.viz.weft.io"), (tap.map(drop), taps, "create taps.viz.weft.io")]
            {
                match answer {
                    Ok(()) => assert!(allowed, "{account} {audience:?}: {right}"),
                    Err(status) => {
                        assert!(
                            !allowed && status.code() == Code::PermissionDenied,
                            "{account} {audience:?}: {status:?}"
                        );
                        let sentence =
                            format!("system:serviceaccount:{own}:{account} may not {right} in namespace {own}");
                        assert!(status.message().contains(&sentence), "{status:?}");
                    }
                }
            }
            // Nobody has rights in other namespaces, or in all.
            for namespace in ["", "default"] {
                let refused = viz.stat(Some(&token), namespace).await.unwrap_err();
                assert_eq!(refused.code(), Code::PermissionDenied, "{account} {namespace:?}: {refused:?}");
            }
        }
    }

    // A token of an account that is gone is worth nothing, as is an expired one.
    let token = world.token("viewer", "").await;
    world.delete_account("viewer").await;
    assert_eq!(viz.stat(Some(&token), own).await.unwrap_err().code(), Code::Unauthenticated);

    for line in [
        "weft_viz_requests_total{method=\"Stat\",code=\"PermissionDenied\"}",
        "weft_viz_reviews_total{kind=\"access\",",
    ] {
        viz.counts(line).await;
    }
    viz.process.end(Signal::SIGTERM).await;
    world.done().await;
}

#[tokio::test]
async fn what_kubernetes_said_is_asked_again_only_later() {
    let world = World::new("kept").await;
    world.account("viewer", &[("get", "stats")]).await;
    let viz = world.start().await;
    let token = world.token("viewer", "").await;
    for _ in 0..20 {
        viz.stat(Some(&token), &world.namespace).await.unwrap();
    }
    for kind in ["token", "access"] {
        viz.counts(&format!("weft_viz_reviews_total{{kind=\"{kind}\",result=\"answered\"}} 1\n")).await;
    }
    world.done().await;
}

#[tokio::test]
async fn one_caller_cannot_have_all_taps() {
    let world = World::new("taps").await;
    world.account("tapper", &[("create", "taps")]).await;
    world.account("other", &[("create", "taps")]).await;
    let viz = world.start().await;
    let (token, other) = (world.token("tapper", "").await, world.token("other", "").await);
    let request = || TapRequest { resource: resource("pod", &world.namespace, ""), ..TapRequest::default() };
    let mut open = Vec::new();
    let refused = loop {
        match viz.tap(Some(&token), request()).await {
            Ok(stream) => open.push(stream),
            Err(refused) => break refused,
        }
        assert!(open.len() < 100);
    };
    assert_eq!((refused.code(), open.len()), (Code::ResourceExhausted, 4), "{refused:?}");
    open.push(viz.tap(Some(&other), request()).await.unwrap());
    viz.counts("weft_viz_taps 5\n").await;
    // At its end, the component ends them and does not wait for their callers.
    viz.process.signal(Signal::SIGTERM);
    for stream in &mut open {
        let ended = async { while let Ok(Some(_)) = stream.message().await {} };
        tokio::time::timeout(world::PATIENCE, ended).await.unwrap();
    }
    let (code, output) = viz.process.ended().await;
    assert_eq!(code, Some(0), "{output}");
    world.done().await;
}

#[tokio::test]
async fn both_transports_give_one_answer() {
    let world = World::new("transports").await;
    world.account("viewer", &[("get", "stats")]).await;
    world.account("nobody", &[]).await;
    let proxies = Proxies::serve(3, 0).await;
    proxies.create(&world).await;
    let viz = world.start().await;
    let token = world.token("viewer", "").await;
    let question = serde_json::json!({"resource": {"namespace": world.namespace, "kind": "deployment"}});
    // Between two equal answers there was no scrape.
    eventually("three answers of one window", world::PATIENCE, async || {
        let before = viz.stat(Some(&token), &world.namespace).await.unwrap();
        let (status, json) = viz.ask_as_page(&token, "stat", &question).await;
        let after = viz.stat(Some(&token), &world.namespace).await.unwrap();
        if before != after || after.rows.is_empty() {
            return Err(format!("{before:?}, {after:?}"));
        }
        assert_eq!((status, json), (200, serde_json::to_value(&after).unwrap()));
        assert!(after.rows[0].http.as_ref().is_some_and(|http| http.success >= 9 * 3 * REQUESTS / 10), "{after:?}");
        Ok(())
    })
    .await;
    // And one refusal.
    let nobody = world.token("nobody", "").await;
    let refused = viz.stat(Some(&nobody), &world.namespace).await.unwrap_err();
    let (status, json) = viz.ask_as_page(&nobody, "stat", &question).await;
    assert_eq!((status, json["error"].as_str()), (403, Some(refused.message())), "{refused:?}");
    world.done().await;
}

/// The tokens of an account, and how many there were.
#[derive(Clone)]
struct Tokens {
    world: World,
    issued: Arc<AtomicUsize>,
}

impl Credentials for Tokens {
    async fn renew(&self) -> Result<AsciiMetadataValue, String> {
        if self.issued.fetch_add(1, Ordering::Relaxed) > 0 {
            return Err("one was enough".to_owned());
        }
        Ok(format!("Bearer {}", self.world.token("viewer", AUDIENCE).await).parse().unwrap())
    }
}

#[tokio::test]
async fn a_relay_goes_on_with_a_new_token_where_its_own_is_worth_nothing_any_more() {
    let world = World::new("renewal").await;
    world.account("viewer", &[("get", "stats")]).await;
    let viz = world.start().await;
    let old = format!("Bearer {}", world.token("viewer", AUDIENCE).await).parse().unwrap();
    world.replace_account("viewer").await;

    let tokens = Tokens { world: world.clone(), issued: Arc::default() };
    let relay = Relay::new(viz.channel.clone(), old, tokens.clone());
    let question = || StatRequest { resource: resource("pod", &world.namespace, ""), ..StatRequest::default() };
    // As a page does: several questions at a time.
    let answers = join_all((0..8).map(|_| relay.stat(Request::new(question())))).await;
    for answer in answers {
        answer.unwrap();
    }
    assert_eq!(tokens.issued.load(Ordering::Relaxed), 1);

    // Where there is no other token, both reasons are told.
    let old = "Bearer x".parse().unwrap();
    let refused = Relay::new(viz.channel.clone(), old, tokens).stat(Request::new(question())).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated, "{refused:?}");
    assert!(
        refused.message().contains("audience viz.weft.io") && refused.message().contains("one was enough"),
        "{refused:?}"
    );
    world.done().await;
}

/// Pods that a component has to be able to follow (docs/scale.md).
const PODS: usize = 1000;
/// What it may need for their first scrapes, in bytes.
const MEMORY: u64 = 256 << 20;

#[tokio::test]
async fn a_thousand_proxies_are_read_at_once_and_one_that_hangs_is_named() {
    let world = World::new("crowd").await;
    world.account("viewer", &[("get", "stats")]).await;
    let proxies = Proxies::serve(PODS + 1, 1).await;
    proxies.create(&world).await;
    let viz = world.start().await;
    let token = world.token("viewer", "").await;

    // On a busy machine some proxies do not answer the first scrape in time: they are in this process.
    let answer = eventually("the answers of all but one", world::PATIENCE, async || {
        let answer = viz.stat(Some(&token), &world.namespace).await.unwrap();
        match &answer.coverage {
            Some(coverage) if coverage.answered as usize == PODS => Ok(answer),
            coverage => Err(format!("{coverage:?}")),
        }
    })
    .await;
    let coverage = answer.coverage.unwrap();
    assert_eq!((coverage.proxies as usize, coverage.answered as usize), (PODS + 1, PODS), "{coverage:?}");
    let [problem] = coverage.problems.as_slice() else { panic!("{coverage:?}") };
    assert_eq!(problem.pod, format!("web-7f9-{PODS}"), "{problem:?}");
    let [row] = answer.rows.as_slice() else { panic!("{:?}", answer.rows) };
    assert_eq!(row.resource.as_ref().unwrap().name, "web");
    assert_eq!((row.meshed_pods as usize, row.running_pods as usize), (PODS + 1, PODS + 1));
    let http = row.http.as_ref().unwrap();
    let (counted, pods) = (http.success + http.failure, PODS as u64);
    // Each proxy counts so much between two scrapes; there may have been a third one.
    assert!(
        counted >= REQUESTS * pods && counted % REQUESTS == 0 && counted <= REQUESTS * (proxies.scrapes() - pods),
        "{http:?}"
    );
    assert_eq!(http.success, 9 * http.failure, "{http:?}");
    assert!(http.p99_ms.is_some_and(|p99| p99 > 2.0 && p99 <= 3.0), "{http:?}");

    let metrics = viz.metrics().await;
    let value = |name: &str| -> f64 {
        let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("{name}: {metrics}")).parse().unwrap()
    };
    assert!(value("process_resident_memory_bytes") < MEMORY as f64, "{metrics}");
    let scrapes = value("weft_viz_scrapes_total{result=\"success\"}");
    assert!(value("weft_viz_scrapes_total{result=\"failure\"}") >= 1.0, "{metrics}");
    println!(
        "{scrapes} scrapes of {} bytes, {} s of CPU, {} bytes resident",
        value("weft_viz_scrape_bytes_total") / scrapes,
        value("process_cpu_seconds_total"),
        value("process_resident_memory_bytes"),
    );
    world.done().await;
}
