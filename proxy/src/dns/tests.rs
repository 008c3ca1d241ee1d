//! Answers of a real DNS server.

use super::{
    testing::{DnsServer, Trouble},
    *,
};

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test]
async fn addresses_and_localhost_need_no_lookup() {
    let dns = Dns::new(Counters::default()).unwrap();
    for (host, port, expected) in [("10.0.0.1", 80, "10.0.0.1:80"), ("localhost.", 81, "127.0.0.1:81")] {
        let answer = dns.resolve(host, port).await.unwrap();
        assert_eq!((answer.addrs, answer.valid_until), (vec![expected.parse().unwrap()], None));
    }
}

#[tokio::test]
async fn srv_records_come_first_and_every_lookup_is_counted_for_its_client() {
    let server = DnsServer::start().await;
    server.set_srv("policy.test.", 5, &[8090, 8091]);
    server.set_a("policy.test.", 5, &[Ipv4Addr::new(10, 0, 0, 9)]);
    server.set_a("plain.test.", 5, &[Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2)]);
    let counters = Counters::default();
    let dns = server.resolver(counters.clone(), DnsConfig::default()).client("policy");
    let resolve = async |name: &str| {
        let mut addrs = dns.resolve(name, 80).await.map(|answer| answer.addrs)?;
        addrs.sort_unstable();
        Ok::<_, ResolveError>(addrs.iter().map(ToString::to_string).collect::<Vec<_>>())
    };
    assert_eq!(resolve("policy.test.").await.unwrap(), ["127.0.0.1:8090", "127.0.0.1:8091"]);
    assert_eq!(resolve("plain.test.").await.unwrap(), ["10.0.0.1:80", "10.0.0.2:80"]);
    assert!(matches!(resolve("unknown.test.").await, Err(ResolveError::Lookup { .. })));
    let count = |record_type: &'static str, result: &'static str| {
        let labels = vec![label("client", "policy"), label("record_type", record_type), label("result", result)];
        counters.get_or_create(&labels).get()
    };
    // Those of the two targets of the SRV records are counted, too.
    assert_eq!((count("SRV", "ok"), count("SRV", "not_found")), (1, 2));
    assert_eq!((count("A/AAAA", "ok"), count("A/AAAA", "not_found")), (3, 1));
}

#[tokio::test]
async fn the_settings_bound_the_ttl_of_records() {
    let server = DnsServer::start().await;
    server.set_a("short.test.", 1, &[Ipv4Addr::LOCALHOST]);
    server.set_a("long.test.", 3600, &[Ipv4Addr::LOCALHOST]);
    for (min, max, name, least, most) in [
        (None, None, "short.test.", 0, 1),
        (None, None, "long.test.", 3590, 3600),
        (Some(60 * SECOND), None, "short.test.", 59, 60),
        (None, Some(20 * SECOND), "long.test.", 19, 20),
        (Some(60 * SECOND), Some(120 * SECOND), "long.test.", 119, 120),
    ] {
        let dns = server.resolver(Counters::default(), DnsConfig { min, max });
        let valid_until = dns.resolve(name, 80).await.unwrap().valid_until.unwrap();
        let left = valid_until.duration_since(Instant::now());
        assert!(least * SECOND <= left && left <= most * SECOND, "{name} {min:?} {max:?}: {left:?}");
    }
}

#[tokio::test]
async fn faults_to_the_resolver_are_errors_in_time_and_end() {
    for trouble in
        [Trouble::Silence, Trouble::Garbage, Trouble::Foreign, Trouble::Failure, Trouble::Truncation].map(Some)
    {
        let server = DnsServer::start().await;
        server.set_a("policy.test.", 5, &[Ipv4Addr::LOCALHOST]);
        let dns = server.resolver(Counters::default(), DnsConfig::default());
        server.trouble(trouble);
        // Seldom more than a second: SRV, then A and AAAA, each asked three times.
        let first = tokio::time::timeout(10 * SECOND, dns.resolve("policy.test.", 80)).await;
        let first = first.unwrap_or_else(|_| panic!("{trouble:?} hangs"));
        assert!(first.is_err(), "{trouble:?}: {first:?}");
        server.trouble(None);
        // What was answered meanwhile is cached for up to a second.
        dns.forget();
        let answer = dns.resolve("policy.test.", 80).await.unwrap_or_else(|error| panic!("{trouble:?} stays: {error}"));
        assert_eq!(answer.addrs, ["127.0.0.1:80".parse().unwrap()]);
    }
}
