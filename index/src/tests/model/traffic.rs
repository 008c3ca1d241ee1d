//! Timeouts, retries, failure accrual, load bias and filters, by section 3.4 of the contract with Linkerd, and the
//! annotations and rules from which histories are made.

use super::{objects::Dice, reading::*, *};

/// Durations as they are written, and their milliseconds; none of what is no duration.
const DURATIONS: [(&str, Option<u64>); 7] = [
    ("500ms", Some(500)),
    ("2s", Some(2000)),
    ("3m", Some(180_000)),
    ("1h", Some(3_600_000)),
    ("1.5s", None),
    ("10", None),
    ("soon", None),
];
const HTTP_CONDITIONS: [(&str, Option<&[&str]>); 4] = [
    ("5xx", Some(&["500-599"])),
    ("gateway-error", Some(&["502-504"])),
    ("429,500-503", Some(&["429-429", "500-503"])),
    ("4xx", None),
];
const GRPC_CONDITIONS: [(&str, Option<&[&str]>); 4] = [
    ("unavailable,internal", Some(&["Unavailable", "Internal"])),
    ("cancelled", Some(&["Cancelled"])),
    ("deadline-exceeded,resource-exhausted", Some(&["DeadlineExceeded", "ResourceExhausted"])),
    ("ok", None),
];

/// Annotations that routes and their parents may have.
pub(super) fn annotations(dice: &mut Dice) -> Value {
    let texts = |all: &[&str]| all.iter().map(|text| json!(text)).collect::<Vec<_>>();
    // What cannot be read is the exception, so that families are in force.
    let duration = |dice: &mut Dice, percent| {
        let known = texts(&["500ms", "2s", "3m", "1h"]);
        let all = DURATIONS.map(|(text, _)| json!(text));
        if dice.chance(90) { dice.maybe(percent, &known) } else { dice.maybe(percent, &all) }
    };
    json!({
        "timeout.linkerd.io/request": duration(dice, 20),
        "timeout.linkerd.io/response": duration(dice, 12),
        "timeout.linkerd.io/idle": duration(dice, 12),
        "retry.linkerd.io/limit": dice.maybe(20, &texts(&["0", "3", "9", "many"])),
        "retry.linkerd.io/timeout": duration(dice, 12),
        "retry.linkerd.io/http": dice.maybe(20, &HTTP_CONDITIONS.map(|(text, _)| json!(text))),
        "retry.linkerd.io/grpc": dice.maybe(20, &GRPC_CONDITIONS.map(|(text, _)| json!(text))),
    })
}

/// Annotations that Services and EgressNetworks may have besides.
pub(super) fn balancing(dice: &mut Dice) -> Value {
    let texts = |all: &[&str]| all.iter().map(|text| json!(text)).collect::<Vec<_>>();
    let (accrual, alpha) = ("balancer.linkerd.io/failure-accrual", "balancer.alpha.linkerd.io");
    json!({
        accrual: dice.maybe(30, &texts(&["consecutive", "consecutive", "unified", "unified", "odd"])),
        format!("{accrual}-consecutive-max-failures"): dice.maybe(30, &texts(&["3", "5", "x"])),
        format!("{accrual}-consecutive-min-penalty"): dice.maybe(20, &texts(&["2s", "500ms", "3m"])),
        format!("{alpha}/failure-accrual-success-rate-threshold"): dice.maybe(30, &texts(&["0.5", "0.25", "2"])),
        format!("{alpha}/failure-accrual-success-rate-window"): dice.maybe(20, &texts(&["2s", "3m", "1ms"])),
        format!("{alpha}/failure-accrual-honor-retry-after"): dice.maybe(20, &texts(&["true", "false", "maybe"])),
        format!("{alpha}/penalize-failures"): dice.maybe(30, &texts(&["true", "true", "false"])),
        format!("{alpha}/load-biaser-penalty"): dice.maybe(30, &texts(&["2s", "soon"])),
    })
}

/// A filter of a route of requests.
pub(super) fn filter(dice: &mut Dice, kind: &str) -> Value {
    let changes =
        json!({"set": [{"name": "x-a", "value": "1"}], "add": [{"name": "x-b", "value": "2"}], "remove": ["x-c"]});
    let request = json!({"type": "RequestHeaderModifier", "requestHeaderModifier": changes});
    let response = json!({"type": "ResponseHeaderModifier", "responseHeaderModifier": changes});
    let redirect = json!({"type": "RequestRedirect",
        "requestRedirect": {"hostname": "other.example.org", "statusCode": dice.maybe(60, &[json!(301)])}});
    let unknown = json!({"type": "ExtensionRef"});
    match kind {
        // The API server refuses redirections in GRPCRoutes.
        "GRPCRoute" => dice.pick(&[request.clone(), request, response, unknown]),
        _ => dice.pick(&[request, response.clone(), response, redirect, unknown]),
    }
}

fn millis(text: &str) -> Option<u64> {
    DURATIONS.iter().find(|(written, _)| *written == text).and_then(|(_, millis)| *millis)
}

/// The value of an annotation: absent, or whether it can be read.
fn read<T>(object: &Value, name: &str, parse: impl Fn(&str) -> Option<T>) -> Option<Option<T>> {
    annotation(object, name).map(parse)
}

/// Timeouts by annotations. Where one cannot be read, there are none: a family counts as a whole.
fn timeouts(object: &Value) -> Value {
    let read = ["request", "response", "idle"].map(|name| read(object, &format!("timeout.linkerd.io/{name}"), millis));
    if read.iter().all(Option::is_none) || read.contains(&Some(None)) {
        return Value::Null;
    }
    let [request, response, idle] = read.map(Option::flatten);
    json!({"request": request, "response": response, "idle": idle})
}

/// The timeouts of a rule: the route's own, where a rule's counts if no annotation does, or else those of the parent.
pub(super) fn rule_timeouts(route: &Value, rule: &Value, parent: &Value) -> Value {
    let mut own = timeouts(route);
    // The Gateway API: zero means none.
    let of_rule = rule["timeouts"]["request"].as_str().filter(|text| *text != "0s").and_then(millis);
    if let (Some(of_rule), true) = (of_rule, own["request"].is_null()) {
        let (response, idle) = (own["response"].take(), own["idle"].take());
        own = json!({"request": of_rule, "response": response, "idle": idle});
    }
    if own.is_null() { timeouts(parent) } else { own }
}

/// Retries by annotations, of HTTP or of gRPC requests.
fn retry(object: &Value, protocol: &str) -> Value {
    let listed = |all: &[(&str, Option<&[&str]>)], text: &str| {
        let found = all.iter().find(|(written, _)| *written == text).and_then(|(_, conditions)| *conditions);
        found.map(|conditions| conditions.iter().map(|one| (*one).to_owned()).collect::<Vec<_>>())
    };
    let conditions = if protocol == "http" { &HTTP_CONDITIONS } else { &GRPC_CONDITIONS };
    let limit = read(object, "retry.linkerd.io/limit", |text| text.parse::<u16>().ok());
    let timeout = read(object, "retry.linkerd.io/timeout", millis);
    let on = read(object, &format!("retry.linkerd.io/{protocol}"), |text| listed(conditions, text));
    if limit == Some(None) || timeout == Some(None) || on == Some(None) {
        return Value::Null;
    }
    // Zero means that there is none.
    let limit = limit.flatten().filter(|limit| *limit > 0);
    if limit.is_none() && timeout.is_none() && on.is_none() {
        return Value::Null;
    }
    json!({"limit": limit.unwrap_or(1), "timeout": timeout, "on": on})
}

/// The retries of a route, or else those of the parent.
pub(super) fn rule_retry(route: &Value, parent: &Value) -> Value {
    let protocol = if route["kind"] == "GRPCRoute" { "grpc" } else { "http" };
    let own = retry(route, protocol);
    if own.is_null() { retry(parent, protocol) } else { own }
}

/// What a parent's annotations say of its traffic; null is a parent that does not exist. `biased` is whether the load
/// of its endpoints may be biased.
pub(super) fn of_parent(parent: &Value, biased: bool) -> Value {
    let alpha = |name: &str| format!("balancer.alpha.linkerd.io/{name}");
    let honor = annotation(parent, &alpha("failure-accrual-honor-retry-after")) == Some("true");
    let is_biased = biased && annotation(parent, &alpha("penalize-failures")) == Some("true");
    let penalty = read(parent, &alpha("load-biaser-penalty"), millis).unwrap_or(Some(5000));
    let bias = penalty.filter(|_| is_biased).map(|penalty| json!({"penalty": penalty, "longest": 300_000}));
    json!({"timeouts": timeouts(parent), "http": retry(parent, "http"), "grpc": retry(parent, "grpc"),
        "accrual": accrual(parent), "honor": honor, "bias": bias})
}

/// Failure accrual; none where a value of the mode cannot be read.
fn accrual(parent: &Value) -> Option<Value> {
    let name = "balancer.linkerd.io/failure-accrual";
    let mode = annotation(parent, name)?;
    let number = |text: &str| text.parse::<u32>().ok();
    let failures = read(parent, &format!("{name}-consecutive-max-failures"), number).unwrap_or(Some(7))?;
    let shortest = read(parent, &format!("{name}-consecutive-min-penalty"), millis).unwrap_or(Some(1000))?;
    if !["consecutive", "unified"].contains(&mode) || shortest > 60_000 {
        return None;
    }
    let rate = |name: &str| format!("balancer.alpha.linkerd.io/failure-accrual-success-rate-{name}");
    let ratio = |text: &str| text.parse::<f64>().ok().filter(|ratio| *ratio <= 1.0);
    let of_rate = if mode == "unified" {
        let threshold = read(parent, &rate("threshold"), ratio).unwrap_or(Some(0.8))?;
        // A window of 1 ms is shorter than 10 ms, and not among the durations above.
        let window = read(parent, &rate("window"), millis).unwrap_or(Some(10_000))?;
        json!({"threshold": threshold, "window": window, "least": 5})
    } else {
        Value::Null
    };
    Some(json!({"failures": failures, "shortest": shortest, "longest": 60_000, "jitter": 0.5, "rate": of_rate}))
}

/// Filters outbound, of a rule or of a backend: none if one of them is not supported there.
pub(super) fn outbound_filters(route: &Value, filters: &Value, of_rule: bool) -> Option<Vec<String>> {
    let is_grpc = route["kind"] == "GRPCRoute";
    // 3.4, a quirk: the response's headers of Linkerd's own HTTPRoute become the request's.
    let is_quirky = of_rule && group(route) == "policy.linkerd.io";
    let one = |filter: &Value| match text(&filter["type"]) {
        "RequestHeaderModifier" => Some(changes("request", &filter["requestHeaderModifier"])),
        // Not in Linkerd's API of gRPC requests.
        "ResponseHeaderModifier" if is_grpc => None,
        "ResponseHeaderModifier" => {
            Some(changes(if is_quirky { "request" } else { "response" }, &filter["responseHeaderModifier"]))
        }
        "RequestRedirect" => Some(redirect(&filter["requestRedirect"])),
        _ => None,
    };
    list(filters).iter().map(one).collect()
}

/// Filters inbound: those of responses have no effect (3.3), and one that is not supported stands for all.
pub(super) fn inbound_filters(filters: &Value) -> Vec<String> {
    let one = |filter: &Value| match text(&filter["type"]) {
        "RequestHeaderModifier" => Some(changes("request", &filter["requestHeaderModifier"])),
        "RequestRedirect" => Some(redirect(&filter["requestRedirect"])),
        "ResponseHeaderModifier" => None,
        other => Some(format!("unsupported {other}")),
    };
    let all: Vec<_> = list(filters).iter().filter_map(one).collect();
    let unsupported = all.iter().find(|one| one.starts_with("unsupported")).cloned();
    unsupported.map_or(all, |one| vec![one])
}

fn changes(of: &str, changes: &Value) -> String {
    let pairs = |all: &Value| {
        let pair = |header: &Value| format!("{}={}", text(&header["name"]), text(&header["value"]));
        list(all).iter().map(pair).collect::<Vec<_>>().join(",")
    };
    let removed: Vec<_> = list(&changes["remove"]).iter().map(text).collect();
    format!("{of} set {} add {} remove {}", pairs(&changes["set"]), pairs(&changes["add"]), removed.join(","))
}

fn redirect(redirect: &Value) -> String {
    format!("redirect {} {:?}", text(&redirect["hostname"]), number(&redirect["statusCode"]))
}

/// What the index says, in the same words.
pub(super) mod found {
    use weft_k8s_api::policy::{
        route::{Filter, HeaderModifier, Redirect},
        traffic::{FailureAccrual, GrpcCode, LoadBias, Retry, StatusRange, Timeouts},
    };

    use super::*;

    pub(in super::super) trait Condition {
        fn written(&self) -> String;
    }

    impl Condition for StatusRange {
        fn written(&self) -> String {
            format!("{}-{}", self.min, self.max)
        }
    }

    impl Condition for GrpcCode {
        fn written(&self) -> String {
            format!("{self:?}")
        }
    }

    fn millis(duration: std::time::Duration) -> u64 {
        u64::try_from(duration.as_millis()).unwrap()
    }

    pub(in super::super) fn timeouts(timeouts: Timeouts) -> Value {
        let Timeouts { request, response, idle } = timeouts;
        if timeouts == Timeouts::default() {
            return Value::Null;
        }
        json!({"request": request.map(millis), "response": response.map(millis), "idle": idle.map(millis)})
    }

    pub(in super::super) fn retry<C: Condition>(retry: Option<&Retry<C>>) -> Value {
        json!(retry.map(|Retry { limit, timeout, conditions }| {
            let on = conditions.as_ref().map(|all| all.iter().map(Condition::written).collect::<Vec<_>>());
            json!({"limit": limit, "timeout": timeout.map(millis), "on": on})
        }))
    }

    pub(in super::super) fn parent(policy: &ParentPolicy) -> Value {
        let accrual = policy.accrual.map(|FailureAccrual { consecutive, success_rate }| {
            let rate = success_rate.map(
                |rate| json!({"threshold": rate.threshold, "window": millis(rate.window), "least": rate.min_requests}),
            );
            json!({"failures": consecutive.max_failures, "shortest": millis(consecutive.min_penalty),
                "longest": millis(consecutive.max_penalty), "jitter": consecutive.jitter_ratio, "rate": rate})
        });
        let bias = policy.load_bias.map(|LoadBias { penalty, max_retry_after }| {
            json!({"penalty": millis(penalty), "longest": millis(max_retry_after)})
        });
        json!({"timeouts": timeouts(policy.timeouts), "http": retry(policy.http_retry.as_ref()),
            "grpc": retry(policy.grpc_retry.as_ref()), "accrual": accrual, "honor": policy.honor_retry_after, "bias": bias})
    }

    pub(in super::super) fn outbound_filters(filters: &[RequestFilter]) -> Vec<String> {
        let one = |filter: &RequestFilter| match filter {
            RequestFilter::RequestHeaders(of) => changes("request", of),
            RequestFilter::ResponseHeaders(of) => changes("response", of),
            RequestFilter::Redirect(of) => redirect(of),
            RequestFilter::Fail(_) => "fails".to_owned(),
        };
        filters.iter().map(one).collect()
    }

    pub(in super::super) fn inbound_filters(filters: &[Filter]) -> Vec<String> {
        let one = |filter: &Filter| match filter {
            Filter::RequestHeaders(of) => changes("request", of),
            Filter::ResponseHeaders(of) => changes("response", of),
            Filter::Redirect(of) => redirect(of),
            Filter::Unsupported(name) => format!("unsupported {name}"),
        };
        filters.iter().map(one).collect()
    }

    fn changes(of: &str, HeaderModifier { set, add, remove }: &HeaderModifier) -> String {
        let written = |all: Vec<(&str, &[u8])>| {
            let pair = |(name, value): (&str, &[u8])| format!("{name}={}", String::from_utf8_lossy(value));
            all.into_iter().map(pair).collect::<Vec<_>>().join(",")
        };
        let set = written(set.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect());
        let add = written(add.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect());
        let removed: Vec<_> = remove.iter().map(AsRef::<str>::as_ref).collect();
        format!("{of} set {set} add {add} remove {}", removed.join(","))
    }

    fn redirect(redirect: &Redirect) -> String {
        let hostname = redirect.hostname.as_deref().unwrap_or_default();
        format!("redirect {hostname} {:?}", redirect.status.map(|status| status.as_u16()))
    }
}
