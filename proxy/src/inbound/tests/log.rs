//! What the log says about requests.

use super::*;
use crate::testing::Lines;

#[tokio::test]
async fn what_is_admitted_for_an_audit_alone_is_logged() {
    for (authorization, expected) in [("all", 0), ("audit", 1)] {
        let lines = Lines::default();
        let _guard = lines.of_this_thread();
        let world = World::new(http_app().await).await;
        world.policies.publish(world.app.port(), detecting(vec![authz(authorization, anybody())]));
        assert_eq!(world.get(Via::Tls, Some(ELSEWHERE), "/").await.0, StatusCode::OK);
        assert_eq!(lines.text().matches("Request allowed").count(), expected, "{authorization}: {}", lines.text());
        let world = World::new(banner_app().await).await;
        world.policies.publish(world.app.port(), opaque(vec![authz(authorization, anybody())]));
        expect_banner(&mut world.connect(Via::Direct(None), Some(ELSEWHERE)).await).await;
        assert_eq!(lines.text().matches("Connection allowed").count(), expected, "{authorization}: {}", lines.text());
    }
}

#[tokio::test]
async fn headers_are_logged_only_where_the_settings_allow_it() {
    for is_allowed in [false, true] {
        let lines = Lines::default();
        let _guard = lines.of_this_thread();
        let world = World::with(http_app().await, |config| config.log_headers = is_allowed).await;
        assert_eq!(world.get(Via::Tls, Some(ELSEWHERE), "/").await.0, StatusCode::OK);
        let text = lines.text();
        // What the application gets, and what it answers.
        let of_proxy = |line: &&str| line.contains("weft_proxy") && line.contains("headers=");
        let logged: Vec<_> = text.lines().filter(of_proxy).collect();
        assert_eq!(logged.len(), if is_allowed { 2 } else { 0 }, "{text}");
        assert_eq!(logged.iter().any(|line| line.contains(CLIENT)), is_allowed, "{text}");
    }
}
