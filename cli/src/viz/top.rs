//! `weft top`: live requests, aggregated by source, destination, method and path.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use anyhow::Result;
use clap::{Args, ValueEnum};
use futures::StreamExt as _;
use weft_proto::viz::{Direction, TapEvent, tap_end, tap_event};

use super::{
    render::{percent, problem, short_duration},
    scope::{ScopeArgs, WindowArgs},
    screen::{FRAME, Screen, Wish, is_terminal},
    tap::FilterArgs,
};
use crate::{
    kind,
    output::{self, note},
};

/// The most rows that are kept: beyond, the one with the fewest requests goes.
const ROWS: usize = 1000;
/// The most requests that have begun and not ended.
const OPEN: usize = 10_000;
/// How often a table is printed where there is no terminal.
const EVERY: Duration = Duration::from_secs(2);

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft top deploy/web -n shop
  weft top ns/shop --hide-sources                all sources in one row
  weft top deploy/web -n shop --routes           rows are routes instead of paths
  weft top deploy/client -n shop --to svc/web --sort worst

Ends with q. Without a terminal a table is printed every two seconds. Requests beyond --max-rps are not counted.")]
pub(crate) struct TopArgs {
    #[arg(required = true, num_args = 1..=2, value_name = "RESOURCE", help = kind::help("KIND/NAME, KIND NAME or KIND"))]
    resource: Vec<String>,
    #[command(flatten)]
    filter: FilterArgs,
    /// One row for all sources
    #[arg(long)]
    hide_sources: bool,
    /// Rows by route instead of by path
    #[arg(long)]
    routes: bool,
    /// The order of rows
    #[arg(long, value_enum, default_value = "count")]
    sort: Sort,
    #[command(flatten)]
    scope: ScopeArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Sort {
    /// Most requests first
    Count,
    /// Fastest best time first
    Best,
    /// Slowest worst time first
    Worst,
    /// Slowest last time first
    Last,
    /// Fewest successes first
    Success,
}

/// What rows tell apart.
type Key = (String, String, String, String);

#[derive(Clone, Debug, Default, PartialEq)]
struct Row {
    count: u64,
    successes: u64,
    best: Duration,
    worst: Duration,
    last: Duration,
}

/// A request that has not ended.
#[derive(Clone, Debug)]
struct Begun {
    key: Key,
    status: u32,
}

struct Top {
    hide_sources: bool,
    routes: bool,
    sort: Sort,
    rows: BTreeMap<Key, Row>,
    open: HashMap<(String, String, String, bool), Begun>,
    left_out: u64,
    said: Vec<String>,
}

pub(super) async fn execute(args: TopArgs) -> Result<()> {
    let scope = args.scope.once(&WindowArgs { time_window: None }).await?;
    let request = args.filter.request(&args.resource, &scope.namespace, false)?;
    let mut events = scope.source.tap(request).await?;
    let mut top = Top { hide_sources: args.hide_sources, routes: args.routes, ..Top::new(args.sort) };
    let mut screen = if is_terminal() { Some(Screen::open()?) } else { None };
    let mut ticks = tokio::time::interval(if screen.is_some() { FRAME } else { EVERY });
    // The first tick is now, where there is nothing yet.
    ticks.tick().await;
    loop {
        tokio::select! {
            event = events.next() => match event.transpose()? {
                Some(event) => top.event(&event),
                None => return Ok(()),
            },
            wish = async { match &mut screen { Some(screen) => screen.wish().await, None => std::future::pending().await } } => {
                if wish? == Wish::End {
                    return Ok(());
                }
            }
            _ = tokio::signal::ctrl_c() => return Ok(()),
            _ = ticks.tick() => match &mut screen {
                Some(screen) => screen.draw(&format!("{}\n\n{}q ends", top.text(), top.remarks()))?,
                None => {
                    output::styled(&top.text())?;
                    top.said.drain(..).for_each(|line| note(&line));
                }
            },
        }
    }
}

impl Top {
    /// Starts without rows, with one for each source and path.
    fn new(sort: Sort) -> Self {
        Self {
            hide_sources: false,
            routes: false,
            sort,
            rows: BTreeMap::new(),
            open: HashMap::new(),
            left_out: 0,
            said: Vec::new(),
        }
    }

    fn event(&mut self, event: &TapEvent) {
        self.left_out += event.skipped;
        let is_inbound = event.direction() == Direction::Inbound;
        let id = (event.namespace.clone(), event.pod.clone(), event.id.clone(), is_inbound);
        match &event.event {
            Some(tap_event::Event::Request(request)) => {
                let what = if self.routes {
                    let route = event.route_labels.get("route").or_else(|| event.route_labels.get("name"));
                    route.map_or("[DEFAULT]", String::as_str).to_owned()
                } else {
                    request.path.clone()
                };
                let source = if self.hide_sources { String::new() } else { source(event) };
                let key = (source, destination(event), request.method.clone(), what);
                if self.open.len() < OPEN {
                    self.open.insert(id, Begun { key, status: 0 });
                }
            }
            Some(tap_event::Event::Response(response)) => {
                if let Some(begun) = self.open.get_mut(&id) {
                    begun.status = response.status;
                }
            }
            Some(tap_event::Event::End(end)) => {
                let Some(begun) = self.open.remove(&id) else { return };
                let is_success = match end.outcome {
                    Some(tap_end::Outcome::GrpcStatus(code)) => !matches!(code, 2 | 4 | 7 | 13 | 14 | 15),
                    Some(tap_end::Outcome::ResetCode(_)) => false,
                    None => begun.status < 500,
                };
                self.ended(begun.key, Duration::from_micros(end.since_request_us), is_success);
            }
            Some(tap_event::Event::Problem(why)) => self.said.push(problem(&event.namespace, &event.pod, why)),
            None => {}
        }
    }

    fn ended(&mut self, key: Key, took: Duration, is_success: bool) {
        if self.rows.len() >= ROWS
            && !self.rows.contains_key(&key)
            && let Some(fewest) = self.rows.iter().min_by_key(|(_, row)| row.count).map(|(key, _)| key.clone())
        {
            self.rows.remove(&fewest);
        }
        let row = self.rows.entry(key).or_default();
        row.best = if row.count == 0 { took } else { row.best.min(took) };
        row.worst = row.worst.max(took);
        row.last = took;
        row.count += 1;
        row.successes += u64::from(is_success);
    }

    fn text(&self) -> String {
        let mut columns = vec!["SOURCE", "DESTINATION", "METHOD", if self.routes { "ROUTE" } else { "PATH" }];
        if self.hide_sources {
            columns.remove(0);
        }
        columns.extend(["COUNT", "BEST", "WORST", "LAST", "SUCCESS_RATE"]);
        let mut table = output::columns(&columns);
        let mut rows: Vec<_> = self.rows.iter().collect();
        let rate = |row: &Row| row.successes as f64 / row.count.max(1) as f64;
        match self.sort {
            Sort::Count => rows.sort_by_key(|(_, row)| std::cmp::Reverse(row.count)),
            Sort::Best => rows.sort_by_key(|(_, row)| row.best),
            Sort::Worst => rows.sort_by_key(|(_, row)| std::cmp::Reverse(row.worst)),
            Sort::Last => rows.sort_by_key(|(_, row)| std::cmp::Reverse(row.last)),
            Sort::Success => rows.sort_by(|(_, a), (_, b)| rate(a).total_cmp(&rate(b))),
        }
        for ((source, destination, method, what), row) in rows {
            let mut cells = vec![destination.clone(), method.clone(), what.clone()];
            if !self.hide_sources {
                cells.insert(0, source.clone());
            }
            cells.push(row.count.to_string());
            cells.extend([row.best, row.worst, row.last].map(short_duration));
            cells.push(percent(Some(rate(row))));
            table.add_row(cells);
        }
        output::plain(&table)
    }

    /// What is said below the table.
    fn remarks(&self) -> String {
        let mut remarks = String::new();
        if self.left_out > 0 {
            remarks = format!("{} requests were left out: see --max-rps\n", self.left_out);
        }
        for line in &self.said {
            remarks = format!("{remarks}! {line}\n");
        }
        remarks
    }
}

/// The client: the pod itself, its peer's ServiceAccount, or an address.
fn source(event: &TapEvent) -> String {
    if event.direction() == Direction::Outbound {
        return event.pod.clone();
    }
    let identity = event.source_labels.get("client_id").and_then(|id| id.split_once(".serviceaccount."));
    identity.map_or_else(|| host(&event.source), |(account, _)| account.to_owned())
}

/// The server: the pod itself, the pod that its peer is, or an address.
fn destination(event: &TapEvent) -> String {
    if event.direction() == Direction::Inbound {
        return event.pod.clone();
    }
    event.destination_labels.get("pod").cloned().unwrap_or_else(|| host(&event.destination))
}

fn host(address: &str) -> String {
    address.rsplit_once(':').map_or(address, |(host, _)| host).to_owned()
}

#[cfg(test)]
mod tests {
    use weft_proto::viz::{TapEnd, TapRequestInit, TapResponseInit};

    use super::*;

    fn event(id: &str, event: tap_event::Event) -> TapEvent {
        TapEvent {
            namespace: "shop".to_owned(),
            pod: "web-0".to_owned(),
            direction: Direction::Inbound.into(),
            id: id.to_owned(),
            source: "10.0.0.1:4000".to_owned(),
            source_labels: [(
                "client_id".to_owned(),
                "client.shop.serviceaccount.identity.linkerd.cluster.local".to_owned(),
            )]
            .into(),
            event: Some(event),
            ..TapEvent::default()
        }
    }

    fn request(top: &mut Top, id: &str, path: &str, status: u32, ms: u64) {
        let begin = TapRequestInit { method: "GET".to_owned(), path: path.to_owned(), ..TapRequestInit::default() };
        top.event(&event(id, tap_event::Event::Request(begin)));
        top.event(&event(id, tap_event::Event::Response(TapResponseInit { status, ..TapResponseInit::default() })));
        top.event(&event(id, tap_event::Event::End(TapEnd { since_request_us: ms * 1000, ..TapEnd::default() })));
    }

    #[test]
    fn requests_are_added_up() {
        let mut top = Top::new(Sort::Count);
        request(&mut top, "0:1", "/a", 200, 5);
        request(&mut top, "0:2", "/a", 503, 20);
        request(&mut top, "0:3", "/b", 200, 7);
        request(&mut top, "0:4", "/a", 404, 3);
        let text = top.text();
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(
            lines[0],
            ["SOURCE", "DESTINATION", "METHOD", "PATH", "COUNT", "BEST", "WORST", "LAST", "SUCCESS_RATE"]
        );
        assert_eq!(lines[1], ["client.shop", "web-0", "GET", "/a", "3", "3ms", "20ms", "3ms", "66.67%"]);
        assert_eq!(lines[2], ["client.shop", "web-0", "GET", "/b", "1", "7ms", "7ms", "7ms", "100.00%"]);
        top.sort = Sort::Success;
        assert!(top.text().lines().nth(1).unwrap().contains("/a"));
        top.sort = Sort::Best;
        assert!(top.text().lines().nth(1).unwrap().contains("/a"));
        assert!(top.open.is_empty());
    }

    #[test]
    fn a_problem_of_no_pod_is_said_without_one() {
        let mut top = Top::new(Sort::Count);
        let problem = |why: &str| tap_event::Event::Problem(why.to_owned());
        top.event(&TapEvent { event: Some(problem("no pod runs yet")), ..TapEvent::default() });
        top.event(&event("", problem("has no proxy")));
        assert_eq!(top.said, ["no pod runs yet", "shop/web-0: has no proxy"]);
    }

    #[test]
    fn rows_are_bounded() {
        let mut top = Top { hide_sources: true, ..Top::new(Sort::Count) };
        request(&mut top, "0:0", "/often", 200, 1);
        request(&mut top, "0:0", "/often", 200, 1);
        for index in 0..ROWS + 50 {
            request(&mut top, "0:1", &format!("/{index}"), 200, 1);
        }
        assert_eq!(top.rows.len(), ROWS);
        assert!(top.text().lines().nth(1).unwrap().contains("/often"));
    }
}
