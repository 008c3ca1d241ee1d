//! Label selectors, in the syntax of Kubernetes: `app=web,tier in (a, b),!canary`.

use std::collections::BTreeMap;

/// What labels have to be like. The empty one selects everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Selector(Vec<Requirement>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Requirement {
    In(String, Vec<String>),
    NotIn(String, Vec<String>),
    Exists(String),
    Missing(String),
}

/// The most requirements.
const MOST: usize = 32;

impl Selector {
    /// Reads a selector.
    pub(crate) fn read(text: &str) -> Result<Self, String> {
        let mut requirements = Vec::new();
        let mut rest = text.trim();
        while !rest.is_empty() {
            // A comma in parentheses separates values.
            let open = rest.find('(').unwrap_or(rest.len());
            let end = match rest.find(',') {
                Some(comma) if comma < open => comma,
                Some(_) => {
                    let close = rest.find(')').ok_or_else(|| format!("{rest:?} has no closing parenthesis"))?;
                    rest[close..].find(',').map_or(rest.len(), |comma| close + comma)
                }
                None => rest.len(),
            };
            requirements.push(Requirement::read(rest[..end].trim())?);
            rest = rest.get(end + 1..).unwrap_or_default().trim_start();
            if requirements.len() > MOST {
                return Err(format!("it has more than {MOST} requirements"));
            }
        }
        Ok(Self(requirements))
    }

    /// Whether it selects what has these labels.
    pub(crate) fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.0.iter().all(|requirement| match requirement {
            Requirement::In(key, values) => labels.get(key).is_some_and(|value| values.contains(value)),
            Requirement::NotIn(key, values) => labels.get(key).is_none_or(|value| !values.contains(value)),
            Requirement::Exists(key) => labels.contains_key(key),
            Requirement::Missing(key) => !labels.contains_key(key),
        })
    }
}

impl Requirement {
    fn read(text: &str) -> Result<Self, String> {
        let key = |key: &str| {
            let key = key.trim();
            let is_key = !key.is_empty()
                && key.chars().all(|character| character.is_ascii_alphanumeric() || "-_./".contains(character));
            if is_key {
                Ok(key.to_owned())
            } else {
                Err(format!("{text:?} is no requirement such as app=web or !canary"))
            }
        };
        if let Some((name, value)) = text.split_once("!=") {
            return Ok(Self::NotIn(key(name)?, vec![value.trim().to_owned()]));
        }
        if let Some((name, value)) = text.split_once('=') {
            return Ok(Self::In(key(name)?, vec![value.trim_start_matches('=').trim().to_owned()]));
        }
        if let Some((head, values)) = text.split_once('(') {
            let values = values.strip_suffix(')').ok_or_else(|| format!("{text:?} has no closing parenthesis"))?;
            let values = values.split(',').map(|value| value.trim().to_owned()).collect();
            let mut words = head.split_whitespace();
            return match (words.next(), words.next(), words.next()) {
                (Some(name), Some("in"), None) => Ok(Self::In(key(name)?, values)),
                (Some(name), Some("notin"), None) => Ok(Self::NotIn(key(name)?, values)),
                _ => Err(format!("{text:?} has neither in nor notin before its values")),
            };
        }
        match text.strip_prefix('!') {
            Some(name) => Ok(Self::Missing(key(name)?)),
            None => Ok(Self::Exists(key(text)?)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selects(text: &str) -> bool {
        let labels = [("app", "web"), ("tier", "front"), ("linkerd.io/x", "1")];
        let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        Selector::read(text).unwrap().matches(&labels)
    }

    #[test]
    fn the_syntax_is_kubernetes() {
        for text in [
            "",
            "app=web",
            "app==web",
            "app",
            "!old",
            "app!=api",
            "old!=1",
            "app in (api, web)",
            "tier notin (back),app=web",
            "app in (web,api), tier in (front)",
            "linkerd.io/x=1",
        ] {
            assert!(selects(text), "{text}");
        }
        for text in ["app=api", "old", "!app", "app!=web", "app notin (web)", "app in (api)", "app=web,old"] {
            assert!(!selects(text), "{text}");
        }
    }

    #[test]
    fn what_cannot_be_read_selects_nothing() {
        for text in ["=", "a b", "app in (web", "app is (web)", "app in in (web)", "a=b,,c=d", "!"] {
            assert!(Selector::read(text).is_err(), "{text}");
        }
    }
}
