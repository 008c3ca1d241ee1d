//! Metrics by host name: clients choose host names, so that few have series of their own.

use std::{
    collections::HashMap,
    sync::{Arc, OnceLock},
};

use parking_lot::Mutex;

/// Host names of one rule or route that have their own series; the others share one. A host name has at most 253 bytes.
pub(super) const HOSTNAMES: usize = 64;

/// The metrics of one rule or route.
#[derive(Debug)]
pub(crate) struct ByHost<M> {
    /// Those without a host name of their own.
    unnamed: OnceLock<Arc<M>>,
    /// By host name, if hosts have series of their own.
    named: Option<Mutex<HashMap<Box<str>, Arc<M>>>>,
}

impl<M> ByHost<M> {
    /// No metrics yet. With `is_on`, each host has its own.
    pub(crate) fn new(is_on: bool) -> Self {
        Self { unnamed: OnceLock::new(), named: is_on.then(Mutex::default) }
    }

    /// The metrics of a host, made with the value of the label `hostname` if there are none yet.
    pub(crate) fn of(&self, host: Option<&str>, make: impl FnOnce(&str) -> M) -> Arc<M> {
        if let (Some(named), Some(host)) = (&self.named, host.filter(|host| is_name(host))) {
            let mut named = named.lock();
            if let Some(known) = named.get(host) {
                return Arc::clone(known);
            }
            if named.len() < HOSTNAMES {
                let metrics = Arc::new(make(host));
                named.insert(host.into(), Arc::clone(&metrics));
                return metrics;
            }
        }
        Arc::clone(self.unnamed.get_or_init(|| Arc::new(make(""))))
    }
}

fn is_name(host: &str) -> bool {
    rustls::pki_types::DnsName::try_from(host).is_ok()
}
