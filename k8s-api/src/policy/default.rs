//! The policies that exist without any resource, by name.

use std::{fmt, str::FromStr};

/// The policy of a port that no Server selects, and the grant of a Server's `accessPolicy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DefaultPolicy {
    /// Every client from everywhere.
    AllUnauthenticated,
    /// Every mesh identity from everywhere.
    AllAuthenticated,
    /// Every mesh identity from the cluster's networks.
    ClusterAuthenticated,
    /// Every client from the cluster's networks.
    ClusterUnauthenticated,
    /// No client.
    Deny,
    /// Every client; those that no authorization covers are logged.
    Audit,
}

/// A name that is not a default policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown policy {0:?}, expected all-unauthenticated, all-authenticated, cluster-authenticated, \
     cluster-unauthenticated, deny or audit"
)]
pub struct DefaultPolicyError(pub String);

impl DefaultPolicy {
    /// Every policy, for tables and completions.
    pub const ALL: [Self; 6] = [
        Self::AllUnauthenticated,
        Self::AllAuthenticated,
        Self::ClusterAuthenticated,
        Self::ClusterUnauthenticated,
        Self::Deny,
        Self::Audit,
    ];

    /// The name in annotations, flags and labels.
    pub fn label(self) -> &'static str {
        match self {
            Self::AllUnauthenticated => "all-unauthenticated",
            Self::AllAuthenticated => "all-authenticated",
            Self::ClusterAuthenticated => "cluster-authenticated",
            Self::ClusterUnauthenticated => "cluster-unauthenticated",
            Self::Deny => "deny",
            Self::Audit => "audit",
        }
    }
}

impl fmt::Display for DefaultPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

impl FromStr for DefaultPolicy {
    type Err = DefaultPolicyError;

    fn from_str(text: &str) -> Result<Self, DefaultPolicyError> {
        Self::ALL.into_iter().find(|policy| policy.label() == text).ok_or_else(|| DefaultPolicyError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back_and_others_refused() {
        for policy in DefaultPolicy::ALL {
            assert_eq!(policy.label().parse(), Ok(policy));
        }
        for bad in ["", "allow", "Deny", "deny "] {
            assert!(bad.parse::<DefaultPolicy>().is_err(), "{bad:?}");
        }
    }
}
