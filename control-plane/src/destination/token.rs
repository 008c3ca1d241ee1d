//! The context token: what a proxy says about itself in a request.

use serde::Deserialize;

/// The longest name of a namespace or a node (RFC 1123).
const MAX_NAME: usize = 253;
/// The longest token that is parsed: three names and the JSON around them.
const MAX_TOKEN: usize = 1024;

/// The context token, which the injector configures.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct Token {
    /// The namespace of the client's pod.
    #[serde(rename = "ns")]
    pub(crate) namespace: Option<String>,
    /// The node of the client's pod.
    #[serde(rename = "nodeName")]
    pub(crate) node_name: Option<String>,
}

impl Token {
    /// Parses the JSON form, and `ns:<namespace>` of old proxies, which does not name the node. Anything else
    /// counts as empty: a bad token costs locality, never discovery.
    pub(crate) fn parse(text: &str) -> Self {
        if text.is_empty() {
            return Self::default();
        }
        let token = match text.strip_prefix("ns:") {
            Some(namespace) => Some(Self { namespace: Some(namespace.to_owned()), node_name: None }),
            None if text.len() > MAX_TOKEN => None,
            None => serde_json::from_str(text).ok(),
        };
        let short = |name: &Option<String>| name.as_ref().is_none_or(|name| name.len() <= MAX_NAME);
        token.filter(|token| short(&token.namespace) && short(&token.node_name)).unwrap_or_else(|| {
            // Debug only: a client decides how often this happens, and what its token contains.
            tracing::debug!(bytes = text.len(), "unreadable context token is ignored");
            Self::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_never_an_error() {
        let token = Token::parse(r#"{"ns":"shop", "nodeName":"n1", "pod":"p"}"#);
        assert_eq!((token.node_name.as_deref(), token.namespace.as_deref()), (Some("n1"), Some("shop")));
        assert_eq!(Token::parse("ns:shop").namespace.as_deref(), Some("shop"));
        for text in ["", "{", "[]", "other"] {
            assert_eq!(Token::parse(text), Token::default(), "{text:?}");
        }
    }

    #[test]
    fn long_names_are_not_kept() {
        let name = "n".repeat(254);
        for text in [format!("ns:{name}"), format!(r#"{{"ns":"shop", "nodeName":"{name}"}}"#), "{".repeat(1 << 20)] {
            assert_eq!(Token::parse(&text), Token::default());
        }
    }
}
