//! NetworkAuthentication: the addresses that a client may have.

use std::{fmt, net::IpAddr, str::FromStr};

use ipnet::IpNet;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Spec of a NetworkAuthentication (`policy.linkerd.io/v1alpha1`).
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[kube(group = "policy.linkerd.io", version = "v1alpha1", kind = "NetworkAuthentication")]
#[kube(plural = "networkauthentications", shortname = "netauthn", namespaced, derive = "PartialEq")]
pub struct NetworkAuthenticationSpec {
    /// Networks; a client matches if one of them contains it.
    pub networks: Vec<Network>,
}

/// A network, with exceptions.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Deserialize, Serialize, JsonSchema)]
pub struct Network {
    /// The network in CIDR notation, or a single address.
    pub cidr: Cidr,
    /// Excluded parts of the network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub except: Option<Vec<Cidr>>,
}

/// An IP network in a resource: `10.0.0.0/8`, or a single address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, Serialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String")]
pub struct Cidr(pub IpNet);

/// The text is neither a network nor an address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("bad network {0:?}, expected a CIDR such as 10.0.0.0/8 or fd00::/8, or one IP address")]
pub struct CidrError(pub String);

impl FromStr for Cidr {
    type Err = CidrError;

    fn from_str(text: &str) -> Result<Self, CidrError> {
        let net = text.parse::<IpNet>().or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
        net.map(|net| Self(net.trunc())).map_err(|_| CidrError(text.to_owned()))
    }
}

impl TryFrom<String> for Cidr {
    type Error = CidrError;

    fn try_from(text: String) -> Result<Self, CidrError> {
        text.parse()
    }
}

impl From<Cidr> for String {
    fn from(cidr: Cidr) -> Self {
        cidr.to_string()
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_networks_and_single_addresses() {
        for (text, expected) in [
            ("10.0.0.0/8", Some("10.0.0.0/8")),
            ("10.1.2.3/8", Some("10.0.0.0/8")),
            ("10.1.2.3", Some("10.1.2.3/32")),
            ("fd00::1", Some("fd00::1/128")),
            ("10.0.0.0/33", None),
            ("10.0.0", None),
            ("", None),
        ] {
            assert_eq!(text.parse::<Cidr>().ok().map(|cidr| cidr.to_string()).as_deref(), expected, "{text:?}");
        }
    }
}
