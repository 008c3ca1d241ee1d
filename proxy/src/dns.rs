//! Finds the addresses of control-plane services: SRV records first, because headless services have one per pod, then A and AAAA.
//!
//! Refuses to resolve anything for applications: their destinations are addresses already.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use hickory_resolver::{
    TokioResolver,
    net::NetError,
    proto::rr::{Name, RData},
};

use crate::metrics::{Counters, label};

/// Why a name has no addresses.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ResolveError {
    /// The lookup failed.
    #[error("resolve {host}: does the service exist, and is the pod's DNS reachable?")]
    Lookup {
        /// The name.
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
    resolutions: Counters,
}

impl Dns {
    /// Reads the system's configuration.
    ///
    /// # Errors
    /// When `/etc/resolv.conf` cannot be read.
    pub(crate) fn new(resolutions: Counters) -> Result<Self, NetError> {
        let mut builder = TokioResolver::builder_tokio()?;
        // Pods of the control plane come and go; a cached negative answer would only delay the proxy's start.
        builder.options_mut().negative_max_ttl = Some(std::time::Duration::from_secs(1));
        Ok(Self { resolver: builder.build()?, resolutions })
    }

    /// All addresses of a service, in no particular order; `port` applies unless SRV records say otherwise.
    ///
    /// # Errors
    /// When there are none; the caller should retry after a pause.
    pub(crate) async fn resolve(&self, host: &str, port: u16) -> Result<Vec<SocketAddr>, ResolveError> {
        if let Ok(ip) = host.parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(ip, port)]);
        }
        if host.trim_end_matches('.').eq_ignore_ascii_case("localhost") {
            return Ok(vec![SocketAddr::from((Ipv4Addr::LOCALHOST, port))]);
        }
        let from_srv = self.resolve_srv(host).await;
        if !from_srv.is_empty() {
            return Ok(from_srv);
        }
        let addrs = self.resolve_ips(host, port).await?;
        if addrs.is_empty() { Err(ResolveError::Empty(host.to_owned())) } else { Ok(addrs) }
    }

    /// Targets of SRV records; an empty list if there are none, for whatever reason, because A and AAAA are queried
    /// next.
    async fn resolve_srv(&self, host: &str) -> Vec<SocketAddr> {
        let lookup = self.resolver.srv_lookup(host).await;
        self.count("srv", lookup.is_ok());
        let Ok(lookup) = lookup else { return Vec::new() };
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
                Ok(found) => addrs.extend(found),
                Err(error) => tracing::debug!(%error, "SRV target does not resolve"),
            }
        }
        addrs
    }

    async fn resolve_ips(&self, host: &str, port: u16) -> Result<Vec<SocketAddr>, ResolveError> {
        let lookup = self.resolver.lookup_ip(host).await;
        self.count("ip", lookup.is_ok());
        let lookup = lookup.map_err(|source| ResolveError::Lookup { host: host.to_owned(), source })?;
        Ok(lookup.iter().map(|ip| SocketAddr::new(ip, port)).collect())
    }

    fn count(&self, record_type: &'static str, ok: bool) {
        let result = if ok { "ok" } else { "error" };
        self.resolutions.get_or_create(&vec![label("record_type", record_type), label("result", result)]).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn addresses_and_localhost_need_no_lookup() {
        let dns = Dns::new(Counters::default()).unwrap();
        assert_eq!(dns.resolve("10.0.0.1", 80).await.unwrap(), vec!["10.0.0.1:80".parse().unwrap()]);
        assert_eq!(dns.resolve("localhost.", 81).await.unwrap(), vec!["127.0.0.1:81".parse().unwrap()]);
    }
}
