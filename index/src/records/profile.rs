//! ServiceProfiles: routes, retry budget, alternate destinations.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use weft_k8s_api::{
    duration,
    profile::{self, Route, ServiceProfile},
};

use super::Key;

/// A ServiceProfile.
#[derive(Debug, PartialEq)]
pub struct ProfileRecord {
    pub key: Key,
    /// Routes, unparsed; each of their conditions has a clause.
    pub routes: Vec<Route>,
    pub retry_budget: Option<RetryBudget>,
    /// Destinations that requests go to instead.
    pub overrides: Vec<DstOverride>,
}

/// Limit on retries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RetryBudget {
    /// Retries per request.
    pub ratio: f32,
    /// Retries per second that are always allowed.
    pub min_per_second: u32,
    /// The window over which requests are counted.
    pub ttl: Duration,
}

/// An alternate destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DstOverride {
    /// Host, or host and port.
    pub authority: String,
    /// Weight in ten thousandths.
    pub weight: u32,
}

impl ProfileRecord {
    /// Parses a ServiceProfile.
    ///
    /// # Errors
    /// When a condition, a weight or the retry budget cannot be read; as in Linkerd, the last state then stays in
    /// force.
    pub fn new(profile: ServiceProfile) -> Result<Self, String> {
        let spec = profile.spec;
        if let Some(invalid) = profile::conditions(&spec).first() {
            return Err(invalid.to_string());
        }
        let overrides = spec.dst_overrides.iter().flatten().enumerate().map(|(index, destination)| {
            let weight = weight(&destination.weight).ok_or_else(|| {
                let found = &destination.weight;
                format!(
                    "spec.dstOverrides[{index}].weight: bad weight {found:?}, expected a quantity such as 1 or 500m"
                )
            })?;
            Ok(DstOverride { authority: destination.authority.clone(), weight })
        });
        Ok(Self {
            key: Key::of(&profile.metadata),
            overrides: overrides.collect::<Result<_, String>>()?,
            retry_budget: spec.retry_budget.as_ref().map(retry_budget).transpose()?,
            routes: spec.routes.unwrap_or_default(),
        })
    }
}

fn retry_budget(budget: &profile::RetryBudget) -> Result<RetryBudget, String> {
    let ttl = duration::parse(&budget.ttl).ok_or_else(|| {
        format!("spec.retryBudget.ttl: bad duration {:?}, expected one such as 10s or 1m30s", budget.ttl)
    })?;
    Ok(RetryBudget { ratio: budget.retry_ratio, min_per_second: budget.min_retries_per_second, ttl })
}

/// A quantity in ten thousandths, as Linkerd sends it.
fn weight(quantity: &IntOrString) -> Option<u32> {
    const UNIT: f64 = 10_000.0;
    let units = match quantity {
        IntOrString::Int(number) => f64::from(*number),
        IntOrString::String(text) => amount(text)?,
    };
    let scaled = (units * UNIT).round();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the range is checked")]
    (0.0..=f64::from(u32::MAX)).contains(&scaled).then_some(scaled as u32)
}

/// A number with one of Kubernetes' suffixes, up to the largest weight
/// (<https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/>).
fn amount(text: &str) -> Option<f64> {
    const SUFFIXES: [(&str, f64); 8] = [
        ("Ki", 1024.0),
        ("Mi", 1024.0 * 1024.0),
        ("n", 1e-9),
        ("u", 1e-6),
        ("m", 1e-3),
        ("k", 1e3),
        ("M", 1e6),
        ("", 1.0),
    ];
    let (number, scale) = SUFFIXES.iter().find_map(|(suffix, scale)| Some((text.strip_suffix(suffix)?, scale)))?;
    Some(number.parse::<f64>().ok()? * scale)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A condition without a clause would be one on every request or response. As with Linkerd, a regular expression
    /// that cannot be read concerns its route alone.
    #[test]
    fn a_profile_with_an_empty_condition_or_an_impossible_range_is_refused() {
        let read = |route: Value| {
            let mut whole = json!({"name": "r", "condition": {"method": "GET"}, "isRetryable": true});
            whole.as_object_mut().unwrap().extend(route.as_object().unwrap().clone());
            let profile = json!({"apiVersion": "linkerd.io/v1alpha2", "kind": "ServiceProfile",
                "metadata": {"name": "web.shop.svc.cluster.local", "namespace": "shop"}, "spec": {"routes": [whole]}});
            ProfileRecord::new(serde_json::from_value(profile).unwrap()).map(|record| record.routes.len())
        };
        let class = |condition: Value| json!({"responseClasses": [{"condition": condition, "isFailure": true}]});
        for (route, field) in [
            (json!({"condition": {}}), "condition: "),
            (json!({"condition": {"method": "", "pathRegex": ""}}), "condition: "),
            (json!({"condition": {"any": [{}]}}), "condition.any[0]: "),
            (json!({"condition": {"not": {}}}), "condition.not: "),
            (class(json!({})), "responseClasses[0].condition: "),
            (class(json!({"status": {"min": 99}})), "responseClasses[0].condition.status.min: "),
            (class(json!({"status": {"min": 500, "max": 400}})), "responseClasses[0].condition.status.max: "),
        ] {
            let problem = read(route).unwrap_err();
            assert!(problem.starts_with(&format!("spec.routes[0].{field}")), "{problem}");
        }
        for route in [
            json!({}),
            json!({"condition": {"pathRegex": "/a("}}),
            json!({"timeout": "soon"}),
            class(json!({"status": {"min": 500}})),
        ] {
            assert_eq!(read(route), Ok(1));
        }
    }

    #[test]
    fn weights_are_quantities() {
        for (text, expected) in [
            ("1", Some(10_000)),
            ("500m", Some(5_000)),
            ("0.25", Some(2_500)),
            ("1k", Some(10_000_000)),
            ("2Ki", Some(20_480_000)),
            ("1e2", Some(1_000_000)),
            ("0", Some(0)),
            ("-1", None),
            ("1G", None),
            ("1M", None),
            ("much", None),
            ("NaN", None),
            ("", None),
        ] {
            assert_eq!(weight(&IntOrString::String(text.to_owned())), expected, "{text:?}");
        }
    }

    #[test]
    fn durations_are_those_of_go() {
        for (text, expected) in [
            ("10s", Some(10_000)),
            ("1m30s", Some(90_000)),
            ("5ms", Some(5)),
            ("", None),
            ("-1s", None),
            ("1h-5m", None),
            ("soon", None),
        ] {
            assert_eq!(duration::parse(text), expected.map(Duration::from_millis), "{text:?}");
        }
    }
}
