//! Filters of a rule and its backend: changing headers, redirecting, injecting failures.

use http::{HeaderMap, HeaderName, HeaderValue, Request};
use rand::RngExt as _;

use super::redirect::Redirect;
use crate::http::respond::Failure;

/// A change to a request or its response, or an answer instead of the server's.
#[derive(Clone, Debug)]
pub(crate) enum Filter {
    /// Changes the request's headers.
    RequestHeaders(HeaderChange),
    /// Changes the response's headers.
    ResponseHeaders(HeaderChange),
    /// Answers with a redirect.
    Redirect(Redirect),
    /// Answers with a failure, for a share of requests.
    Fail(FailureInjector),
    /// A kind of filter that this proxy does not know: requests fail, because the filter may be there to refuse them.
    Unknown,
}

/// Headers to add, set and remove, in this order.
#[derive(Clone, Debug, Default)]
pub(crate) struct HeaderChange {
    /// Appended headers.
    pub(crate) add: Vec<(HeaderName, HeaderValue)>,
    /// Headers that replace existing ones.
    pub(crate) set: Vec<(HeaderName, HeaderValue)>,
    /// Removed headers.
    pub(crate) remove: Vec<HeaderName>,
}

/// A failure for a share of requests.
#[derive(Clone, Debug)]
pub(crate) struct FailureInjector {
    /// What the client gets instead of the application's response.
    pub(crate) failure: Failure,
    /// Numerator of the share; at most the denominator.
    pub(crate) numerator: u32,
    /// Denominator of the share; never 0.
    pub(crate) denominator: u32,
}

/// Applies filters to a request, which may fail it. `prefix` is the number of bytes of the path that the rule's prefix
/// matched.
///
/// # Errors
/// The failure that a filter injects, a redirect, or an internal failure when a filter cannot be applied.
pub(crate) fn apply_to_request<B>(
    filters: &[Filter],
    prefix: Option<usize>,
    request: &mut Request<B>,
) -> Result<(), Failure> {
    for filter in filters {
        match filter {
            Filter::RequestHeaders(change) => change.apply(request.headers_mut())?,
            Filter::ResponseHeaders(_) => {}
            Filter::Redirect(redirect) => redirect.apply(request, prefix)?,
            Filter::Fail(injector) => injector.apply()?,
            Filter::Unknown => return Err(Failure::Internal("invalid policy")),
        }
    }
    Ok(())
}

/// Applies filters to a response's headers.
///
/// # Errors
/// An internal failure when there would be too many headers.
pub(crate) fn apply_to_response(filters: &[Filter], headers: &mut HeaderMap) -> Result<(), Failure> {
    for filter in filters {
        if let Filter::ResponseHeaders(change) = filter {
            change.apply(headers)?;
        }
    }
    Ok(())
}

impl HeaderChange {
    /// A map holds some ten thousand names, and panics beyond where it is not asked to try.
    fn apply(&self, headers: &mut HeaderMap) -> Result<(), Failure> {
        let too_many = |_| Failure::Internal("too many headers in a policy");
        for (name, value) in &self.add {
            headers.try_append(name, value.clone()).map_err(too_many)?;
        }
        for (name, value) in &self.set {
            headers.try_insert(name, value.clone()).map_err(too_many)?;
        }
        for name in &self.remove {
            headers.remove(name);
        }
        Ok(())
    }
}

impl FailureInjector {
    fn apply(&self) -> Result<(), Failure> {
        let fails = rand::rng().random_range(0..self.denominator) < self.numerator;
        if fails { Err(self.failure.clone()) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> Request<()> {
        Request::builder().uri("/a").header("host", "web.demo").body(()).unwrap()
    }

    #[test]
    fn headers_are_added_set_and_removed_in_this_order() {
        let header = |name, value| (HeaderName::from_static(name), HeaderValue::from_static(value));
        let change = HeaderChange {
            add: vec![header("x-a", "2"), header("x-c", "3")],
            set: vec![header("x-b", "new")],
            remove: vec![HeaderName::from_static("x-c")],
        };
        let mut request = request();
        for (name, value) in [header("x-a", "1"), header("x-b", "old"), header("x-c", "gone")] {
            request.headers_mut().insert(name, value);
        }
        apply_to_request(&[Filter::RequestHeaders(change.clone())], None, &mut request).unwrap();
        assert_eq!(request.headers().get_all("x-a").iter().count(), 2);
        assert_eq!(request.headers()["x-b"], "new");
        assert!(!request.headers().contains_key("x-c"));

        let mut response = HeaderMap::new();
        apply_to_response(&[Filter::RequestHeaders(change.clone())], &mut response).unwrap();
        assert!(response.is_empty());
        apply_to_response(&[Filter::ResponseHeaders(change)], &mut response).unwrap();
        assert_eq!((response.len(), response["x-b"].to_str().unwrap()), (2, "new"));
    }

    #[test]
    fn more_headers_than_a_map_holds_are_a_failure() {
        let many = |count| {
            let header = |number| (HeaderName::try_from(format!("x-{number}")).unwrap(), HeaderValue::from_static("a"));
            (0..count).map(header).collect::<Vec<_>>()
        };
        let applied = |change: HeaderChange| {
            let of_request = apply_to_request(&[Filter::RequestHeaders(change.clone())], None, &mut request());
            let of_response = apply_to_response(&[Filter::ResponseHeaders(change)], &mut HeaderMap::new());
            (of_request.is_ok(), of_response.is_ok())
        };
        for (count, fits) in [(1000, true), (40_000, false)] {
            assert_eq!(applied(HeaderChange { add: many(count), ..HeaderChange::default() }), (fits, fits));
            assert_eq!(applied(HeaderChange { set: many(count), ..HeaderChange::default() }), (fits, fits));
        }
    }

    #[test]
    fn injected_failures_follow_their_ratio() {
        let fail = |numerator| {
            let failure = Failure::Injected { code: 418, grpc: false, message: "tea".into() };
            Filter::Fail(FailureInjector { failure, numerator, denominator: 3 })
        };
        let failed = |filter: Filter| {
            (0..300).filter(|_| apply_to_request(std::slice::from_ref(&filter), None, &mut request()).is_err()).count()
        };
        assert_eq!((failed(fail(0)), failed(fail(3))), (0, 300));
        assert!((30..270).contains(&failed(fail(1))), "a third of them");
    }

    #[test]
    fn an_unknown_filter_fails_the_request() {
        assert_eq!(apply_to_request(&[Filter::Unknown], None, &mut request()).unwrap_err().status(), 500);
    }
}
