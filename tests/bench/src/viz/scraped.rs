//! What a scrape costs a real proxy: that of a client's pod in a sandbox, whose Service has enough endpoints that its
//! page is as long as those of the other parts.

use std::time::Duration;

use anyhow::{Context as _, ensure};

use super::report::Scraped;
use crate::{
    control_plane::process::usage,
    load::Shape,
    proxy::{
        endpoints::ManyEndpoints,
        rows::Contender,
        site::{self, Site},
    },
};

/// Requests per second that the scrapes are compared with.
const RATE: u32 = 100;
const CONNECTIONS: u32 = 16;
/// Time for every endpoint to have had a request.
const WARM_UP: Duration = Duration::from_secs(5);
const TIME: Duration = Duration::from_secs(15);
/// CPU time is counted in steps of 10 ms.
const SCRAPES: u32 = 500;

/// Measures it in a sandbox, which is added to `sites` as soon as it is to be stopped.
///
/// # Errors
/// It does not start, or its proxy does not answer.
pub(super) async fn measure(sites: &mut Vec<Site>, endpoints: u32) -> anyhow::Result<Scraped> {
    site::start(sites, &[Contender::Weft], None).await?;
    let site = site::find(sites, Contender::Weft)?;
    site.publish_endpoints(Contender::Weft, endpoints).await?;
    let shape = Shape::Open { rate: RATE, connections: CONNECTIONS };
    let load = site.measure(Contender::Weft, ManyEndpoints::target(), shape, WARM_UP, TIME).await?;
    let problem = load.problem.unwrap_or_default();
    ensure!(load.failures == 0 && load.count > 0, "{} requests failed: {problem}", load.failures);
    let outbound_ns = *load.cpu_ns.get(1).context("no CPU time of the client's proxy")?;
    let pid = site.proxies(Contender::Weft)?.context("no proxy")?.outbound;
    let page = site.scrape().await?;
    let before = usage(pid)?;
    for _ in 0..SCRAPES {
        site.scrape().await?;
    }
    let cpu_seconds = usage(pid)?.cpu_seconds - before.cpu_seconds;
    Ok(Scraped {
        lines: page.lines().filter(|line| !line.starts_with('#')).count(),
        bytes: page.len(),
        cpu_ms: cpu_seconds * 1e3 / f64::from(SCRAPES),
        requests_per_second: RATE,
        cpu_seconds_per_minute: outbound_ns as f64 / 1e9 * 60.0 / load.seconds,
    })
}
