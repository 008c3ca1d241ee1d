//! Routes of ServiceProfiles.

use weft_proto::linkerd::destination::{
    HttpStatusRange, PathMatch, RequestMatch, ResponseClass, ResponseMatch, RetryBudget, Route, WeightedDst,
    request_match, response_match,
};

use super::{
    resilience::{Act, Script, duration, metric},
    *,
};

const NAME: &str = "server.demo.svc.cluster.local";

fn route(name: &str, path: &str) -> Route {
    let condition = request_match::Match::Path(PathMatch { regex: path.to_owned() });
    Route {
        condition: Some(RequestMatch { r#match: Some(condition) }),
        metrics_labels: [("route".to_owned(), name.to_owned())].into(),
        ..Route::default()
    }
}

async fn proxy(routes: Vec<Route>, script: &Script) -> Proxy {
    let control = Control::default();
    let service: SocketAddr = "10.1.3.1:80".parse().unwrap();
    let retry_budget =
        Some(RetryBudget { retry_ratio: 0.0, min_retries_per_second: 1, ttl: duration(Duration::from_secs(2)) });
    let profile =
        DestinationProfile { fully_qualified_name: NAME.into(), routes, retry_budget, ..DestinationProfile::default() };
    control.profiles.lock().insert(service.to_string(), profile);
    control.policies.lock().insert(service, policy("another.demo:80", vec![]));
    control.update(SERVICE, add(vec![endpoint(script.listen().await, None)]));
    Proxy::start(service, control).await
}

#[tokio::test]
async fn a_profile_with_routes_takes_requests_from_the_policy() {
    let script = Script::default();
    let proxy = proxy(vec![route("books", "/books.*")], &script).await;
    for path in ["/books/1", "/other"] {
        let mut request = get(path);
        request.headers_mut().insert("l5d-dst-canonical", "forged".parse().unwrap());
        assert_eq!(proxy.http1().await.send_request(request).await.unwrap().status(), StatusCode::OK);
    }
    assert_eq!(script.received(), [format!("/books/1  {SERVICE}"), format!("/other  {SERVICE}")]);
    let text = proxy.scrape();
    let books = format!(r#"route_request_total{{direction="outbound",dst="{SERVICE}",rt_route="books"}} 1"#);
    assert!(text.contains(&books), "{text}");
    assert!(text.contains(&format!(r#"route_request_total{{direction="outbound",dst="{SERVICE}"}} 1"#)), "{text}");
}

#[tokio::test]
async fn retryable_routes_are_repeated_while_the_budget_lasts() {
    let script = Script::new([Act::Answer(500), Act::Answer(500), Act::Answer(500), Act::Answer(500)]);
    let proxy = proxy(vec![Route { is_retryable: true, ..route("all", "/.*") }], &script).await;
    assert_eq!(proxy.get("/").await.status(), StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(script.received().len(), 3, "one and the two that the budget has");
    assert_eq!(metric(&proxy, "route_actual_request_total"), 3);
    assert_eq!(metric(&proxy, "route_request_total"), 1);
    assert_eq!(metric(&proxy, "route_retryable_total"), 3, "two retried, one skipped");
}

#[tokio::test]
async fn classes_and_timeouts_are_the_routes() {
    let range = response_match::Match::Status(HttpStatusRange { min: 404, max: 404 });
    let class = ResponseClass { condition: Some(ResponseMatch { r#match: Some(range) }), is_failure: true };
    let script = Script::new([Act::Answer(404), Act::Late(Duration::from_secs(3600), 200), Act::Stall]);
    let timeout = duration(Duration::from_millis(100));
    let proxy = proxy(vec![Route { response_classes: vec![class], timeout, ..route("all", "/.*") }], &script).await;
    let missing = proxy.get("/").await;
    assert_eq!(missing.status(), StatusCode::NOT_FOUND);
    missing.into_body().collect().await.unwrap();
    let failed = r#"rt_route="all",status_code="404",classification="failure"} 1"#;
    assert!(proxy.scrape().contains(failed), "{}", proxy.scrape());
    assert_eq!(proxy.get("/").await.status(), StatusCode::GATEWAY_TIMEOUT);
    let mut stream = proxy.get("/").await.into_body();
    assert_eq!(stream.frame().await.unwrap().unwrap().into_data().unwrap(), "begin");
    let more = tokio::time::timeout(Duration::from_millis(300), stream.frame()).await;
    assert!(more.is_err(), "the timeout of a profile's route ends with the head");
}

#[tokio::test]
async fn traffic_is_split_by_weight() {
    let (first, second) = (Script::default(), Script::default());
    let control = Control::default();
    let service: SocketAddr = "10.1.3.2:80".parse().unwrap();
    let split = |authority: &str, weight| WeightedDst { authority: authority.into(), weight, backend_ref: None };
    let profile = DestinationProfile {
        fully_qualified_name: NAME.into(),
        dst_overrides: vec![split("first.demo:80", 900), split("second.demo:80", 100)],
        ..DestinationProfile::default()
    };
    control.profiles.lock().insert(service.to_string(), profile);
    control.update("first.demo:80", add(vec![endpoint(first.listen().await, None)]));
    control.update("second.demo:80", add(vec![endpoint(second.listen().await, None)]));
    let proxy = Proxy::start(service, control).await;
    let mut sender = proxy.http1().await;
    for _ in 0..200 {
        sender.ready().await.unwrap();
        sender.send_request(get("/")).await.unwrap().into_body().collect().await.unwrap();
    }
    let (first, second) = (first.received().len(), second.received().len());
    // 200 draws with p = 0.1: 4 to 50 is seven deviations wide.
    assert!(first + second == 200 && (4..50).contains(&second), "{first} and {second}");
}
