//! Finds the addresses of control-plane services: SRV records first, because headless services have one per pod, then A
//! and AAAA.
//!
//! Refuses to resolve anything for applications: their destinations are addresses already.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use hickory_resolver::{
    TokioResolver,
    net::NetError,
    proto::rr::{Name, RData},
};
use tokio::time::Instant;

use crate::{
    config::DnsConfig,
    metrics::{Counters, label},
};

/// Why a name has no addresses.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ResolveError {
    /// The lookup failed.
    #[error("resolve {host}: does the service exist, and is the pod's DNS reachable?")]
    Lookup {
        host: String,
        /// The error of the resolver.
        #[source]
        source: NetError,
    },
    /// The name exists without addresses.
    #[error("resolve {0}: it has no addresses, is the service without ready pods?")]
    Empty(String),
}

/// The process's resolver, configured by `/etc/resolv.conf`.
#[derive(Clone)]
pub(crate) struct Dns {
    resolver: TokioResolver,
    ttl: DnsConfig,
    resolutions: Counters,
    client: &'static str,
}

/// The addresses of a service.
#[derive(Debug)]
pub(crate) struct Answer {
    /// In no particular order.
    pub(crate) addrs: Vec<SocketAddr>,
    /// When to ask again: by the TTLs of the records, within the bounds of the settings. `None` means never.
    pub(crate) valid_until: Option<Instant>,
}

impl Dns {
    /// The same without bounds of TTLs.
    ///
    /// # Errors
    /// When `/etc/resolv.conf` cannot be read.
    #[cfg(test)]
    pub(crate) fn new(resolutions: Counters) -> Result<Self, NetError> {
        Self::with_ttl(resolutions, DnsConfig::default())
    }

    /// Reads the system's configuration.
    ///
    /// # Errors
    /// When `/etc/resolv.conf` cannot be read.
    pub(crate) fn with_ttl(resolutions: Counters, ttl: DnsConfig) -> Result<Self, NetError> {
        Self::build(TokioResolver::builder_tokio()?, resolutions, ttl)
    }

    fn build(
        mut builder: hickory_resolver::ResolverBuilder<hickory_resolver::net::runtime::TokioRuntimeProvider>,
        resolutions: Counters,
        ttl: DnsConfig,
    ) -> Result<Self, NetError> {
        let options = builder.options_mut();
        options.positive_min_ttl = ttl.min;
        options.positive_max_ttl = ttl.max;
        // Pods of the control plane come and go; a cached negative answer would only delay the proxy's start.
        options.negative_max_ttl = Some(Duration::from_secs(1));
        Ok(Self { resolver: builder.build()?, ttl, resolutions, client: "" })
    }

    /// The resolver of one client, for the label `client` of its metrics.
    pub(crate) fn client(&self, client: &'static str) -> Self {
        Self { client, ..self.clone() }
    }

    /// All addresses of a service; `port` applies unless SRV records say otherwise.
    ///
    /// # Errors
    /// When there are none; the caller should retry after a pause.
    pub(crate) async fn resolve(&self, host: &str, port: u16) -> Result<Answer, ResolveError> {
        if let Ok(ip) = host.parse::<IpAddr>() {
            return Ok(Answer { addrs: vec![SocketAddr::new(ip, port)], valid_until: None });
        }
        if host.trim_end_matches('.').eq_ignore_ascii_case("localhost") {
            let addrs = vec![SocketAddr::from((Ipv4Addr::LOCALHOST, port))];
            return Ok(Answer { addrs, valid_until: None });
        }
        let (mut addrs, mut valid_until) = self.resolve_srv(host).await;
        if addrs.is_empty() {
            (addrs, valid_until) = self.resolve_ips(host, port).await?;
        }
        if addrs.is_empty() {
            return Err(ResolveError::Empty(host.to_owned()));
        }
        Ok(Answer { addrs, valid_until: Some(self.bounded(valid_until)) })
    }

    /// Empties the cache: an answer that is not out of date can still be wrong.
    pub(crate) fn forget(&self) {
        self.resolver.clear_cache();
    }

    fn bounded(&self, valid_until: Instant) -> Instant {
        let now = Instant::now();
        let latest = self.ttl.max.map_or(valid_until, |max| valid_until.min(now + max));
        self.ttl.min.map_or(latest, |min| latest.max(now + min))
    }

    /// Targets of SRV records; an empty list if there are none, for whatever reason, because A and AAAA are queried
    /// next.
    async fn resolve_srv(&self, host: &str) -> (Vec<SocketAddr>, Instant) {
        let lookup = self.resolver.srv_lookup(host).await;
        self.count("SRV", lookup.is_ok());
        let Ok(lookup) = lookup else { return (Vec::new(), Instant::now()) };
        let mut valid_until = Instant::from_std(lookup.valid_until());
        let targets: Vec<(Name, u16)> = lookup
            .answers()
            .iter()
            .filter_map(|record| match &record.data {
                RData::SRV(srv) => Some((srv.target.clone(), srv.port)),
                _ => None,
            })
            .collect();
        let mut addrs = Vec::new();
        for (target, port) in targets {
            match self.resolve_ips(&target.to_utf8(), port).await {
                Ok((found, until)) => {
                    addrs.extend(found);
                    valid_until = valid_until.min(until);
                }
                Err(error) => tracing::debug!(%error, "SRV target does not resolve"),
            }
        }
        (addrs, valid_until)
    }

    async fn resolve_ips(&self, host: &str, port: u16) -> Result<(Vec<SocketAddr>, Instant), ResolveError> {
        let lookup = self.resolver.lookup_ip(host).await;
        self.count("A/AAAA", lookup.is_ok());
        let lookup = lookup.map_err(|source| ResolveError::Lookup { host: host.to_owned(), source })?;
        let addrs = lookup.iter().map(|ip| SocketAddr::new(ip, port)).collect();
        Ok((addrs, Instant::from_std(lookup.as_lookup().valid_until())))
    }

    fn count(&self, record_type: &'static str, ok: bool) {
        let result = if ok { "ok" } else { "not_found" };
        let labels = vec![label("client", self.client), label("record_type", record_type), label("result", result)];
        self.resolutions.get_or_create(&labels).inc();
    }
}

#[cfg(test)]
pub(crate) mod testing;

#[cfg(test)]
mod tests;
