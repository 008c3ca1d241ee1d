//! What the log says about requests.

use std::io;

use parking_lot::Mutex;
use tracing_subscriber::fmt::MakeWriter;

use super::*;

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

#[tokio::test]
async fn headers_are_logged_only_where_the_settings_allow_it() {
    for is_allowed in [false, true] {
        let lines = Lines::default();
        let log = tracing_subscriber::fmt().with_writer(lines.clone()).with_ansi(false);
        let log = log.with_max_level(tracing::Level::TRACE);
        let _guard = tracing::subscriber::set_default(log.finish());
        let world = World::with(http_app().await, |config| config.log_headers = is_allowed).await;
        assert_eq!(world.get(Via::Tls, Some(ELSEWHERE), "/").await.0, StatusCode::OK);
        let text = String::from_utf8(lines.0.lock().clone()).unwrap();
        // What the application gets, and what it answers.
        let of_proxy = |line: &&str| line.contains("weft_proxy") && line.contains("headers=");
        let logged: Vec<_> = text.lines().filter(of_proxy).collect();
        assert_eq!(logged.len(), if is_allowed { 2 } else { 0 }, "{text}");
        assert_eq!(logged.iter().any(|line| line.contains(CLIENT)), is_allowed, "{text}");
    }
}
