//! Routes of HTTP requests: parsed policy messages, and their application to requests, in both directions.
//!
//! ```text
//! message -> proto -> Route { hosts, rules { matches, R } }      matching::find(request) -> Found
//!                     Filter                                     filter::apply_to_request(Found, request)
//! ```
//!
//! Inbound and outbound policy differ in the action of a rule (`R`): authorizations there, backends here. This folder
//! holds everything else once. Refuses to know authorizations, backends and connections.

pub(crate) mod condition;
pub(crate) mod expression;
pub(crate) mod filter;
pub(crate) mod matching;
pub(crate) mod proto;
pub(crate) mod readings;
pub(crate) mod redirect;

use std::sync::Arc;

use crate::metrics::{Labels, label};
use matching::{HostMatch, RequestMatch};
use readings::Reading;

/// A route: the hosts it is for, and its rules.
#[derive(Clone, Debug)]
pub(crate) struct Route<R> {
    /// Hosts; an empty list matches every request.
    pub(crate) hosts: Vec<HostMatch>,
    /// Rules in the order of the policy.
    pub(crate) rules: Vec<Rule<R>>,
}

/// A rule of a route.
#[derive(Clone, Debug)]
pub(crate) struct Rule<R> {
    /// Alternatives, one of which must match. An empty list matches every request, as a path prefix `/` does.
    pub(crate) matches: Vec<RequestMatch>,
    /// The action for requests that match.
    pub(crate) action: R,
}

impl<R> Route<R> {
    /// A route of one rule that takes every request.
    pub(crate) fn catch_all(action: R) -> Self {
        Self { hosts: Vec::new(), rules: vec![Rule { matches: Vec::new(), action }] }
    }

    /// The route for paths as this reading has them.
    pub(crate) fn read(&self, reading: Reading) -> Route<()> {
        let read = |rule: &Rule<R>| {
            let matches = rule.matches.iter().map(|one| one.read(reading)).collect();
            Rule { matches, action: () }
        };
        Route { hosts: self.hosts.clone(), rules: self.rules.iter().map(read).collect() }
    }

    /// Whether its paths are the same in all readings.
    pub(crate) fn is_read_alike(&self) -> bool {
        self.rules.iter().flat_map(|rule| &rule.matches).all(RequestMatch::is_read_alike)
    }
}

/// The resource of a policy, route, authorization or backend, for metric labels and logs. Clones share the text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Meta {
    /// API group: `core`, `policy.linkerd.io`, ...; empty for defaults.
    pub(crate) group: Arc<str>,
    /// Kind: `Service`, `HTTPRoute`, ...; `default` for those that the control plane or the proxy generated.
    pub(crate) kind: Arc<str>,
    /// Namespace; empty for defaults.
    pub(crate) namespace: Arc<str>,
    /// Name.
    pub(crate) name: Arc<str>,
    /// Port of a Service; 0 if there is none.
    pub(crate) port: u16,
    /// Section of a route.
    pub(crate) section: Arc<str>,
}

impl Meta {
    /// A default without a resource.
    pub(crate) fn built_in(name: &str) -> Self {
        Self { kind: "default".into(), name: name.into(), ..Self::default() }
    }

    /// Whether no resource stands behind it.
    pub(crate) fn is_default(&self) -> bool {
        *self.kind == *"default"
    }

    /// Whether it allows clients that another policy would deny, so that its decisions are logged.
    pub(crate) fn is_audit(&self) -> bool {
        self.is_default() && *self.name == *"audit"
    }

    /// Appends the labels `<role>_group`, `<role>_kind` and `<role>_name`.
    pub(crate) fn append_labels(&self, role: &str, labels: &mut Labels) {
        labels.push(label(format!("{role}_group"), self.group.to_string()));
        labels.push(label(format!("{role}_kind"), self.kind.to_string()));
        labels.push(label(format!("{role}_name"), self.name.to_string()));
    }

    /// Labels of outbound families: `<role>_group`, `_kind`, `_namespace`, `_name`.
    pub(crate) fn labels(&self, role: &str) -> Labels {
        vec![
            label(format!("{role}_group"), self.group.to_string()),
            label(format!("{role}_kind"), self.kind.to_string()),
            label(format!("{role}_namespace"), self.namespace.to_string()),
            label(format!("{role}_name"), self.name.to_string()),
        ]
    }

    /// [`Self::labels`] and `<role>_port`, `<role>_section_name`.
    pub(crate) fn labels_with_port(&self, role: &str) -> Labels {
        let mut labels = self.labels(role);
        let port = if self.port == 0 { String::new() } else { self.port.to_string() };
        labels.push(label(format!("{role}_port"), port));
        labels.push(label(format!("{role}_section_name"), self.section.to_string()));
        labels
    }
}
