//! Rules on ServiceProfiles beyond their types, Linkerd's (`linkerd2:pkg/profiles/profiles.go`).
//!
//! One rule is Weft's own: a regular expression that the proxies cannot read is refused. Linkerd stores it, and its
//! proxies ignore the route. They use the same library, so the same expressions are accepted.

use serde_json::Value;

use super::{RequestMatch, ResponseMatch, RetryBudget, Route, ServiceProfile, ServiceProfileSpec, StatusRange};
use crate::{
    duration, expression,
    field::{FieldPath, Invalid, Step},
    names,
};

/// Status codes that a range may name.
const STATUSES: std::ops::RangeInclusive<u32> = 100..=599;

const NO_CLAUSE: &str = "matches nothing in particular, expected at least one of";

/// Parses a ServiceProfile strictly: unknown fields are refused. An absent spec is an empty one, as in Linkerd.
///
/// # Errors
/// When a type or a field's name is wrong; the error names the field.
pub fn read(object: &Value) -> Result<ServiceProfile, Invalid> {
    let mut object = object.clone();
    if let Some(fields) = object.as_object_mut()
        && fields.get("spec").is_none_or(Value::is_null)
    {
        fields.insert("spec".to_owned(), Value::Object(serde_json::Map::default()));
    }
    serde_path_to_error::deserialize(object).map_err(|error| {
        let problem = error.inner().to_string();
        field_of(error.path()).invalid(problem)
    })
}

/// The problems of a ServiceProfile whose types are right.
pub fn validate(profile: &ServiceProfile) -> Vec<Invalid> {
    let mut found = Vec::new();
    let name = profile.metadata.name.as_deref().unwrap_or_default();
    if !names::is_subdomain(name) {
        found.push(FieldPath::of("metadata.name").invalid(format!(
            "bad name {name:?}, expected the service's DNS name in lower case, such as web.shop.svc.cluster.local"
        )));
    }
    for (index, route) in profile.spec.routes.iter().flatten().enumerate() {
        check_route(FieldPath::of("spec.routes").index(index), route, &mut found);
    }
    if let Some(budget) = &profile.spec.retry_budget {
        check_budget(FieldPath::of("spec.retryBudget"), budget, &mut found);
    }
    found
}

/// The conditions of routes that have no clause or no status. Linkerd's destination service does not send a profile
/// with one (`toRequestMatch` and `toResponseMatch` in `linkerd2:controller/api/destination/profile_translator.go`);
/// what else [`validate`] finds does not keep it from that.
pub fn conditions(profile: &ServiceProfileSpec) -> Vec<Invalid> {
    let mut found = Vec::new();
    for (index, route) in profile.routes.iter().flatten().enumerate() {
        check_conditions(FieldPath::of("spec.routes").index(index), route, &mut found);
    }
    found
}

fn check_route(at: FieldPath, route: &Route, found: &mut Vec<Invalid>) {
    if route.name.is_empty() {
        found.push(at.clone().key("name").invalid("empty, expected a name"));
    }
    if let Some(timeout) = route.timeout.as_ref().filter(|timeout| !timeout.is_empty()) {
        check_duration(at.clone().key("timeout"), timeout, found);
    }
    check_expressions(at.clone().key("condition"), &route.condition, found);
    check_conditions(at, route, found);
}

fn check_conditions(at: FieldPath, route: &Route, found: &mut Vec<Invalid>) {
    check_request(at.clone().key("condition"), &route.condition, found);
    for (index, class) in route.response_classes.iter().flatten().enumerate() {
        check_response(at.clone().key("responseClasses").index(index).key("condition"), &class.condition, found);
    }
}

fn check_request(at: FieldPath, wanted: &RequestMatch, found: &mut Vec<Invalid>) {
    let RequestMatch { all, any, not, path_regex, method } = wanted;
    let said = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
    if all.is_none() && any.is_none() && not.is_none() && !said(path_regex) && !said(method) {
        found.push(at.clone().invalid(format!("{NO_CLAUSE} pathRegex, method, all, any and not")));
    }
    for (key, children) in [("all", all), ("any", any)] {
        for (index, child) in children.iter().flatten().enumerate() {
            check_request(at.clone().key(key).index(index), child, found);
        }
    }
    if let Some(child) = not {
        check_request(at.key("not"), child, found);
    }
}

fn check_expressions(at: FieldPath, wanted: &RequestMatch, found: &mut Vec<Invalid>) {
    if let Some(problem) = wanted.path_regex.as_deref().and_then(|regex| expression::check(regex).err()) {
        found.push(at.clone().key("pathRegex").invalid(problem));
    }
    for (key, children) in [("all", &wanted.all), ("any", &wanted.any)] {
        for (index, child) in children.iter().flatten().enumerate() {
            check_expressions(at.clone().key(key).index(index), child, found);
        }
    }
    if let Some(child) = &wanted.not {
        check_expressions(at.key("not"), child, found);
    }
}

fn check_response(at: FieldPath, wanted: &ResponseMatch, found: &mut Vec<Invalid>) {
    let ResponseMatch { all, any, not, status } = wanted;
    if all.is_none() && any.is_none() && not.is_none() && status.is_none() {
        found.push(at.clone().invalid(format!("{NO_CLAUSE} status, all, any and not")));
    }
    if let Some(range) = status {
        check_range(at.clone().key("status"), *range, found);
    }
    for (key, children) in [("all", all), ("any", any)] {
        for (index, child) in children.iter().flatten().enumerate() {
            check_response(at.clone().key(key).index(index), child, found);
        }
    }
    if let Some(child) = not {
        check_response(at.key("not"), child, found);
    }
}

fn check_range(at: FieldPath, range: StatusRange, found: &mut Vec<Invalid>) {
    // Linkerd treats 0 as absent.
    let set = |end: Option<u32>| end.filter(|status| *status != 0);
    let (min, max) = (set(range.min), set(range.max));
    for (key, end) in [("min", min), ("max", max)] {
        if let Some(status) = end.filter(|status| !STATUSES.contains(status)) {
            found.push(at.clone().key(key).invalid(format!("bad status {status}, expected 100-599")));
        }
    }
    if let (Some(min), Some(max)) = (min, max)
        && max < min
    {
        found.push(at.key("max").invalid(format!("{max} is below the minimum {min}")));
    }
}

fn check_budget(at: FieldPath, budget: &RetryBudget, found: &mut Vec<Invalid>) {
    if budget.retry_ratio < 0.0 || budget.retry_ratio.is_nan() {
        found.push(
            at.clone().key("retryRatio").invalid(format!("bad ratio {}, expected 0 or above", budget.retry_ratio)),
        );
    }
    check_duration(at.key("ttl"), &budget.ttl, found);
}

fn check_duration(at: FieldPath, text: &str, found: &mut Vec<Invalid>) {
    if duration::parse(text).is_none() {
        found.push(at.invalid(format!("bad duration {text:?}, expected numbers with units, such as 300ms or 1m30s")));
    }
}

fn field_of(path: &serde_path_to_error::Path) -> FieldPath {
    use serde_path_to_error::Segment;
    let steps = path.iter().filter_map(|segment| match segment {
        Segment::Seq { index } => Some(Step::Index(*index)),
        Segment::Map { key } => Some(Step::Key(key.clone())),
        Segment::Enum { variant } => Some(Step::Key(variant.clone())),
        Segment::Unknown => None,
    });
    FieldPath(steps.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn problems(name: &str, spec: &Value) -> Vec<String> {
        let object = json!({"apiVersion": "linkerd.io/v1alpha2", "kind": "ServiceProfile",
            "metadata": {"name": name, "namespace": "shop"}, "spec": spec});
        match read(&object) {
            Ok(profile) => validate(&profile).iter().map(ToString::to_string).collect(),
            Err(invalid) => vec![invalid.to_string()],
        }
    }

    #[track_caller]
    fn check(spec: Value, expected: &[&str]) {
        let found = problems("web.shop.svc.cluster.local", &spec);
        assert_eq!(found.len(), expected.len(), "{spec}: {found:?}");
        for (found, expected) in found.iter().zip(expected) {
            assert!(found.contains(expected), "{spec}: {found:?} does not say {expected:?}");
        }
    }

    fn route(route: Value) -> Value {
        let mut whole = json!({"name": "r", "condition": {"method": "GET"}});
        for (key, value) in route.as_object().unwrap() {
            whole[key] = value.clone();
        }
        json!({"routes": [whole]})
    }

    #[test]
    fn accepts_what_linkerd_accepts() {
        check(json!({}), &[]);
        check(Value::Null, &[]);
        let without_spec = json!({"apiVersion": "linkerd.io/v1alpha2", "kind": "ServiceProfile",
            "metadata": {"name": "web.shop.svc.cluster.local"}});
        assert!(validate(&read(&without_spec).unwrap()).is_empty());
        check(
            json!({"routes": [{"name": "GET /books", "isRetryable": true, "timeout": "1m30s",
                "condition": {"all": [{"pathRegex": "/books(/.*)?"}, {"not": {"method": "POST"}}]},
                "responseClasses": [{"condition": {"status": {"min": 500, "max": 599}}, "isFailure": true}]}],
                "retryBudget": {"retryRatio": 0.2, "minRetriesPerSecond": 10, "ttl": "10s"},
                "dstOverrides": [{"authority": "web-v2.shop.svc.cluster.local:80", "weight": "500m"},
                    {"authority": "web.shop.svc.cluster.local:80", "weight": 1}],
                "opaquePorts": ["25"]}),
            &[],
        );
        for regex in ["/a/[^/]+/b", r"/(?i)a\d{2,}", "/caf\u{e9}", ""] {
            check(route(json!({"condition": {"method": "GET", "pathRegex": regex}})), &[]);
        }
        check(route(json!({"responseClasses": [{"condition": {"status": {"min": 0, "max": 0}}}]})), &[]);
        check(route(json!({"timeout": ""})), &[]);
    }

    #[test]
    fn names_fields_that_do_not_exist() {
        check(json!({"rotues": []}), &["spec.rotues: unknown field `rotues`"]);
        check(route(json!({"condition": {"pathRegx": "/"}})), &["spec.routes[0].condition.pathRegx: unknown field"]);
        check(
            route(json!({"condition": {"all": [{"mthod": "GET"}]}})),
            &["spec.routes[0].condition.all[0].mthod: unknown field"],
        );
    }

    #[test]
    fn refuses_bad_names() {
        for name in ["Web.shop", "web_shop", "", "web..shop", "-web"] {
            assert!(problems(name, &json!({}))[0].starts_with("metadata.name: "), "{name:?}");
        }
    }

    #[test]
    fn refuses_bad_routes() {
        check(json!({"routes": [null]}), &["spec.routes[0]"]);
        check(json!({"routes": [{"name": "r"}]}), &["missing field `condition`"]);
        check(json!({"routes": [{"condition": {"method": "GET"}}]}), &["missing field `name`"]);
        check(route(json!({"name": ""})), &["spec.routes[0].name: empty"]);
        for timeout in ["soon", "1h-5m", "9e99h"] {
            let problem = format!("spec.routes[0].timeout: bad duration {timeout:?}");
            check(route(json!({"timeout": timeout})), &[&problem]);
        }
        check(route(json!({"timeout": "5"})), &["spec.routes[0].timeout"]);
        check(route(json!({"condition": {}})), &["spec.routes[0].condition: matches nothing"]);
        check(route(json!({"condition": {"any": [{}]}})), &["spec.routes[0].condition.any[0]: matches nothing"]);
        check(route(json!({"condition": {"all": [null]}})), &["spec.routes[0].condition.all[0]"]);
        check(route(json!({"condition": {"not": {}}})), &["spec.routes[0].condition.not: matches nothing"]);
    }

    #[test]
    fn refuses_bad_regular_expressions_wherever_they_are() {
        let bad = json!({"pathRegex": "/a("});
        let problem = "pathRegex: bad regular expression: unclosed group";
        for (condition, at) in [
            (bad.clone(), ""),
            (json!({"all": [{"method": "GET"}, bad]}), "all[1]."),
            (json!({"any": [bad]}), "any[0]."),
            (json!({"not": bad}), "not."),
        ] {
            check(route(json!({"condition": condition})), &[&format!("spec.routes[0].condition.{at}{problem}")]);
        }
        // Look-around, which other languages have, and a repetition that would take all memory.
        check(route(json!({"condition": {"pathRegex": "/(?!a)"}})), &["look-around"]);
        check(route(json!({"condition": {"pathRegex": "(a{1000}){1000}"}})), &["size limit"]);
    }

    #[test]
    fn refuses_bad_responses_and_budgets() {
        let class = |condition| route(json!({"responseClasses": [{"condition": condition}]}));
        check(class(json!({})), &["responseClasses[0].condition: matches nothing"]);
        check(class(json!({"status": {"min": 99}})), &["condition.status.min: bad status 99"]);
        check(class(json!({"status": {"max": 600}})), &["condition.status.max: bad status 600"]);
        check(class(json!({"status": {"min": 500, "max": 400}})), &["condition.status.max: 400 is below"]);
        check(route(json!({"responseClasses": [{}]})), &["missing field `condition`"]);
        let budget =
            |ratio: f64, ttl: &str| json!({"retryBudget": {"retryRatio": ratio, "minRetriesPerSecond": 1, "ttl": ttl}});
        check(budget(-0.1, "10s"), &["spec.retryBudget.retryRatio: bad ratio -0.1"]);
        check(budget(0.1, ""), &["spec.retryBudget.ttl: bad duration"]);
        check(json!({"retryBudget": {"retryRatio": 0.1, "minRetriesPerSecond": 1}}), &["missing field `ttl`"]);
    }
}
