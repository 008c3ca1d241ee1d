//! Routes of a ServiceProfile: which requests they are for, their retries, timeouts and classes of responses.
//!
//! They become the same [`Action`]s as a policy's, so that nothing below knows the difference.

use std::sync::Arc;

use weft_proto::linkerd::destination::{self, RetryBudget, request_match, response_match};

use super::Profile;
use crate::{
    discover::route::{Action, Distribution, HttpRoutes, ProfileLabels, ProfileRoute},
    metrics::{Labels, is_label_key, label},
    request::{
        classify::{Class, Classes, Condition},
        terms::{Budget, BudgetSettings, MAX_REPLAY_BYTES, Retry, RetryWhen, Terms, Timeouts},
    },
    route::{
        condition::RequestCondition,
        expression::{ExpressionError, Expressions},
        proto::duration,
    },
};

/// The deepest nesting of conditions. What the API server takes in one object nests less.
pub(crate) const MAX_DEPTH: usize = 32;

/// A ServiceProfile's routes in their order; the first that matches a request is its route.
#[derive(Clone, Debug, Default)]
pub(crate) struct ProfileRoutes(Vec<OneRoute>);

#[derive(Clone, Debug)]
struct OneRoute {
    condition: RequestCondition,
    terms: Terms,
    labels: Labels,
}

/// Why routes cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RoutesError {
    /// A condition is empty.
    #[error("a condition of a route is empty")]
    Empty,
    /// Conditions nest too deeply.
    #[error("conditions of a route nest more than {MAX_DEPTH} times")]
    TooDeep,
    /// A regular expression is unusable.
    #[error("read a route's regular expression")]
    Expression(#[from] ExpressionError),
    /// A method is malformed.
    #[error("read a route's method")]
    Method(#[from] weft_proto::linkerd::http_types::InvalidMethod),
    /// A timeout is not a duration.
    #[error("read a route's timeout")]
    Timeout(#[from] crate::route::proto::ReadRouteError),
    /// A status is not one.
    #[error("a response class has the status {0}")]
    Status(u32),
}

/// A route, as the server's side uses it.
pub(crate) struct ServerRoute<'a> {
    /// The labels `rt_*`.
    pub(crate) labels: &'a Labels,
    /// Which responses are failures.
    pub(crate) classes: &'a Classes,
}

impl Profile {
    /// The position of the route that a request matches, and the route.
    pub(crate) fn route<B>(&self, request: &http::Request<B>) -> Option<(usize, ServerRoute<'_>)> {
        let (index, route) = self.routes.0.iter().enumerate().find(|(_, route)| route.condition.holds(request))?;
        Some((index, ServerRoute { labels: &route.labels, classes: &route.terms.classes }))
    }

    /// How many routes there are.
    pub(crate) fn number_of_routes(&self) -> usize {
        self.routes.0.len()
    }

    /// Whether requests follow the profile instead of the policy.
    pub(crate) fn takes_requests(&self) -> bool {
        !self.routes.0.is_empty() || !self.overrides.is_empty()
    }

    /// The routes of requests to a port; those that no route matches are sent to `backends` as well.
    pub(crate) fn http_routes(&self, backends: &Distribution, port: u16) -> HttpRoutes {
        let dst = self.name.as_ref().map(|name| format!("{name}:{port}"));
        let labels =
            |route: &Labels| dst.as_ref().map(|dst| Arc::new(ProfileLabels { dst: dst.clone(), route: route.clone() }));
        let of_profile = self.routes.0.iter().map(|route| ProfileRoute {
            condition: route.condition.clone(),
            action: Action {
                terms: route.terms.clone(),
                profile: labels(&route.labels),
                ..Action::plain(backends.clone())
            },
        });
        let others = ProfileRoute {
            condition: RequestCondition::All(Vec::new()),
            action: Action { profile: labels(&Labels::new()), ..Action::plain(backends.clone()) },
        };
        HttpRoutes::Profile(of_profile.chain([others]).collect())
    }
}

impl ProfileRoutes {
    /// Parses routes and the budget that they share.
    ///
    /// # Errors
    /// When a part cannot be parsed: the routes after it would get its requests.
    pub(super) fn read(messages: Vec<destination::Route>, budget: Option<RetryBudget>) -> Result<Self, RoutesError> {
        let budget = budget.and_then(read_budget);
        let mut expressions = Expressions::new();
        let routes = messages.into_iter().map(|message| OneRoute::read(message, budget.as_ref(), &mut expressions));
        routes.collect::<Result<_, _>>().map(Self)
    }
}

impl OneRoute {
    fn read(
        message: destination::Route,
        budget: Option<&Budget>,
        expressions: &mut Expressions,
    ) -> Result<Self, RoutesError> {
        let condition = read_request(message.condition.ok_or(RoutesError::Empty)?, 0, expressions)?;
        let classes = message.response_classes.into_iter().map(|class| {
            let condition = read_response(class.condition.ok_or(RoutesError::Empty)?, 0)?;
            Ok(Class { condition, is_failure: class.is_failure })
        });
        let classes = Classes::of_profile(classes.collect::<Result<_, RoutesError>>()?);
        let retry = budget.filter(|_| message.is_retryable).map(|budget| {
            Arc::new(Retry {
                when: RetryWhen::Failure(classes.clone()),
                limit: u32::MAX,
                max_bytes: MAX_REPLAY_BYTES,
                timeout: None,
                backoff: None,
                budget: Some(budget.clone()),
            })
        });
        let head = duration(message.timeout, "timeout")?.filter(|timeout| !timeout.is_zero());
        let timeouts = Timeouts { head, ..Timeouts::default() };
        let named = message.metrics_labels.into_iter().filter(|(key, _)| is_label_key(key));
        let mut labels: Labels = named.map(|(key, value)| label(format!("rt_{key}"), value)).collect();
        labels.sort();
        Ok(Self { condition, terms: Terms { timeouts, retry, allow_headers: false, classes }, labels })
    }
}

fn read_request(
    message: destination::RequestMatch,
    depth: usize,
    expressions: &mut Expressions,
) -> Result<RequestCondition, RoutesError> {
    if depth > MAX_DEPTH {
        return Err(RoutesError::TooDeep);
    }
    let mut read = |one| read_request(one, depth + 1, expressions);
    Ok(match message.r#match.ok_or(RoutesError::Empty)? {
        request_match::Match::All(all) => {
            RequestCondition::All(all.matches.into_iter().map(read).collect::<Result<_, _>>()?)
        }
        request_match::Match::Any(any) => {
            RequestCondition::Any(any.matches.into_iter().map(read).collect::<Result<_, _>>()?)
        }
        request_match::Match::Not(one) => RequestCondition::Not(Box::new(read(*one)?)),
        request_match::Match::Path(path) => RequestCondition::Path(expressions.whole(&path.regex)?),
        request_match::Match::Method(method) => RequestCondition::Method(method.try_into()?),
    })
}

fn read_response(message: destination::ResponseMatch, depth: usize) -> Result<Condition, RoutesError> {
    if depth > MAX_DEPTH {
        return Err(RoutesError::TooDeep);
    }
    let several = |seq: response_match::Seq| {
        seq.matches.into_iter().map(|one| read_response(one, depth + 1)).collect::<Result<Vec<_>, _>>()
    };
    Ok(match message.r#match.ok_or(RoutesError::Empty)? {
        response_match::Match::All(all) => Condition::All(several(all)?),
        response_match::Match::Any(any) => Condition::Any(several(any)?),
        response_match::Match::Not(one) => Condition::Not(Box::new(read_response(*one, depth + 1)?)),
        response_match::Match::Status(range) => {
            let status = |code| u16::try_from(code).map_err(|_| RoutesError::Status(code));
            let (min, max) = (status(range.min)?, status(range.max)?);
            // Where one bound is absent, the range is the other one (`linkerd2:cli/profile/template.go`).
            Condition::Status(match (min, max) {
                (min, 0) => min..=min,
                (0, max) => max..=max,
                (min, max) => min..=max,
            })
        }
    })
}

/// A budget that cannot be used leaves the routes without retries, as in Linkerd.
fn read_budget(message: RetryBudget) -> Option<Budget> {
    let settings = BudgetSettings {
        ratio: message.retry_ratio,
        min_per_second: message.min_retries_per_second,
        ttl: duration(message.ttl, "time of the retry budget").ok().flatten()?,
    };
    let budget = Budget::new(settings);
    if budget.is_none() {
        tracing::warn!(?settings, "the retry budget is out of range, nothing is sent again");
    }
    budget
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use destination::{PathMatch, RequestMatch, ResponseClass, ResponseMatch, Route};
    use http::{Method, Request, StatusCode};
    use request_match::Match;

    use super::*;
    use crate::request::classify::Answer;

    fn path(regex: &str) -> RequestMatch {
        RequestMatch { r#match: Some(Match::Path(PathMatch { regex: regex.to_owned() })) }
    }

    fn method(method: Method) -> RequestMatch {
        RequestMatch { r#match: Some(Match::Method(method.into())) }
    }

    fn route(condition: RequestMatch, name: &str) -> Route {
        let metrics_labels = [("route".to_owned(), name.to_owned())].into();
        Route { condition: Some(condition), metrics_labels, ..Route::default() }
    }

    fn budget() -> Option<RetryBudget> {
        let ttl = Duration::from_secs(10).try_into().ok();
        Some(RetryBudget { retry_ratio: 0.2, min_retries_per_second: 10, ttl })
    }

    fn profile(routes: Vec<Route>) -> Profile {
        let routes = ProfileRoutes::read(routes, budget()).unwrap();
        Profile { name: Some("web.demo.svc.cluster.local".into()), routes, ..Profile::default() }
    }

    #[test]
    fn the_first_route_that_matches_wins_and_the_rest_has_a_default() {
        let all = |matches| RequestMatch { r#match: Some(Match::All(request_match::Seq { matches })) };
        let not = |one| RequestMatch { r#match: Some(Match::Not(Box::new(one))) };
        let profile = profile(vec![
            route(all(vec![path("/books/[^/]*"), method(Method::GET)]), "book"),
            route(all(vec![path("/books/.*"), not(method(Method::DELETE))]), "books"),
        ]);
        let routes = profile.http_routes(&Distribution::Empty, 80);
        let found = |method: Method, uri: &str| {
            let request = Request::builder().method(method).uri(uri).body(()).unwrap();
            let labels = routes.find(&request).unwrap().action.profile.clone().unwrap();
            assert_eq!(labels.dst, "web.demo.svc.cluster.local:80");
            labels.route.first().map(|(key, value)| format!("{key}={value}"))
        };
        assert_eq!(found(Method::GET, "/books/1?a=b").as_deref(), Some("rt_route=book"));
        assert_eq!(found(Method::POST, "/books/1").as_deref(), Some("rt_route=books"));
        assert_eq!(found(Method::GET, "/books/1/pages").as_deref(), Some("rt_route=books"));
        assert_eq!(found(Method::DELETE, "/books/1"), None);
        assert_eq!(found(Method::GET, "/x/books/1"), None, "the whole path has to match");
    }

    #[test]
    fn routes_have_timeouts_retries_and_classes() {
        let not_found = response_match::Match::Status(destination::HttpStatusRange { min: 404, max: 0 });
        let class = ResponseClass { condition: Some(ResponseMatch { r#match: Some(not_found) }), is_failure: true };
        let one = Route {
            response_classes: vec![class],
            is_retryable: true,
            timeout: Duration::from_millis(25).try_into().ok(),
            ..route(path("/.*"), "all")
        };
        let terms = ProfileRoutes::read(vec![one.clone()], budget()).unwrap().0[0].terms.clone();
        assert_eq!(terms.timeouts.head, Some(Duration::from_millis(25)));
        let retry = terms.retry.unwrap();
        assert!(retry.budget.is_some());
        for (status, expected) in [(404, true), (405, false), (500, true), (200, false)] {
            let answer = Answer { status: StatusCode::from_u16(status).unwrap(), grpc: None, retry_after: None };
            assert_eq!((terms.classes.is_failure(&answer), retry.when.matches(&answer)), (expected, expected));
        }
        assert!(ProfileRoutes::read(vec![one], None).unwrap().0[0].terms.retry.is_none(), "no budget, no retries");
    }

    #[test]
    fn routes_that_cannot_be_read_are_an_error() {
        let nested =
            (0..=MAX_DEPTH).fold(path("/"), |inner, _| RequestMatch { r#match: Some(Match::Not(Box::new(inner))) });
        for condition in [path("("), RequestMatch::default(), nested] {
            assert!(ProfileRoutes::read(vec![route(condition, "broken")], None).is_err());
        }
        assert!(ProfileRoutes::read(vec![Route::default()], None).is_err());
    }
}
