//! What a busy proxy exposes, as text whose counters advance from one scrape to the next by what ten seconds bring.
//!
//! Families and labels are those of `weft-proxy` that `weft-viz` keeps. A quarter of the destinations has traffic.

use std::{fmt::Write as _, ops::Range};

/// Upper bounds of the proxies' latency histogram.
const BOUNDS: [&str; 26] = [
    "1.0", "2.0", "3.0", "4.0", "5.0", "10.0", "20.0", "30.0", "40.0", "50.0", "100.0", "200.0", "300.0", "400.0",
    "500.0", "1000.0", "2000.0", "3000.0", "4000.0", "5000.0", "10000.0", "20000.0", "30000.0", "40000.0", "50000.0",
    "+Inf",
];
/// Workloads that send to each.
const CLIENTS: u32 = 6;
/// Pods of each destination.
const REPLICAS: u32 = 3;
/// What every counter has before the first scrape.
const BEFORE: u64 = 1000;

/// The page of every pod of one workload.
#[derive(Debug)]
pub(super) struct Page {
    text: String,
    lines: Vec<Line>,
}

/// A line: its name and labels, and what its value is computed from.
#[derive(Debug)]
struct Line {
    series: Range<usize>,
    /// What a scrape adds.
    grows: u64,
    /// The part of the count, as a fraction.
    part: (u64, u64),
}

impl Page {
    /// The page of a workload's pods; destinations are the workloads after it.
    pub(super) fn new(workload: u32, workloads: u32, destinations: u32) -> Self {
        let mut page = Self { text: String::new(), lines: Vec::new() };
        for client in 0..CLIENTS {
            let labels = format!(
                "direction=\"inbound\",target_addr=\"10.0.{workload}.1:8080\",target_ip=\"10.0.{workload}.1\",target_port=\"8080\",\
                 tls=\"true\",client_id=\"{}.shop.serviceaccount.identity.linkerd.cluster.local\",srv_group=\"policy.linkerd.io\",\
                 srv_kind=\"server\",srv_name=\"{}-http\",srv_port=\"8080\",route_group=\"\",route_kind=\"default\",\
                 route_name=\"default\",authz_group=\"policy.linkerd.io\",authz_kind=\"authorizationpolicy\",authz_name=\"{}\"",
                name((workload + workloads - client - 1) % workloads),
                name(workload),
                name(workload),
            );
            page.http(&labels, 50 + u64::from(client));
        }
        for destination in 0..destinations {
            let other = name((workload + destination + 1) % workloads);
            for replica in 0..REPLICAS {
                let address = format!("10.1.{destination}.{replica}");
                let labels = format!(
                    "direction=\"outbound\",authority=\"{other}.shop.svc.cluster.local:80\",target_addr=\"{address}:8080\",\
                     target_ip=\"{address}\",target_port=\"8080\",tls=\"true\",\
                     server_id=\"{other}.shop.serviceaccount.identity.linkerd.cluster.local\",dst_control_plane_ns=\"linkerd\",\
                     dst_deployment=\"{other}\",dst_namespace=\"shop\",dst_pod=\"{other}-7c9f8d6b5-{replica}\",\
                     dst_pod_template_hash=\"7c9f8d6b5\",dst_service=\"{other}\",dst_serviceaccount=\"{other}\",dst_zone=\"a\""
                );
                let is_busy = destination < destinations.div_ceil(4);
                page.http(&labels, if is_busy { 10 } else { 0 });
                page.line(&format!("tcp_open_connections{{peer=\"dst\",{labels}}}"), 0, (2, BEFORE));
                for name in ["tcp_read_bytes_total", "tcp_write_bytes_total"] {
                    page.line(&format!("{name}{{peer=\"dst\",{labels}}}"), if is_busy { 100_000 } else { 0 }, (1, 1));
                }
            }
        }
        page.line("process_start_time_seconds", 0, (1_700_000_000, BEFORE));
        page
    }

    /// Requests, responses and latencies of one kind of request.
    fn http(&mut self, labels: &str, grows: u64) {
        self.line(&format!("request_total{{{labels}}}"), grows, (1, 1));
        for (class, status, part) in [("success", 200, (49, 50)), ("failure", 500, (1, 50))] {
            let labels = format!("{labels},status_code=\"{status}\",classification=\"{class}\"");
            self.line(&format!("response_total{{{labels}}}"), grows, part);
        }
        for (bound, below) in BOUNDS.iter().zip(1..) {
            let series = format!("response_latency_ms_bucket{{le=\"{bound}\",{labels},status_code=\"200\"}}");
            self.line(&series, grows, (8.min(below), 8));
        }
    }

    fn line(&mut self, series: &str, grows: u64, part: (u64, u64)) {
        let begin = self.text.len();
        self.text.push_str(series);
        self.text.push(' ');
        self.lines.push(Line { series: begin..self.text.len(), grows, part });
    }

    /// How many lines it has.
    pub(super) fn lines(&self) -> usize {
        self.lines.len()
    }

    /// The page at a pod's scrape with this number.
    pub(super) fn at(&self, scrape: u64) -> String {
        let mut text = String::with_capacity(self.text.len() + 12 * self.lines.len());
        for Line { series, grows, part } in &self.lines {
            text.push_str(&self.text[series.clone()]);
            // Writing to a string does not fail.
            let _ = writeln!(text, "{}", (BEFORE + grows * scrape) * part.0 / part.1);
        }
        text
    }
}

/// The name of a workload.
pub(super) fn name(workload: u32) -> String {
    format!("service-{workload}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(text: &str) -> Vec<u64> {
        text.lines().map(|line| line.rsplit_once(' ').unwrap().1.parse().unwrap()).collect()
    }

    #[test]
    fn counters_advance_and_the_number_of_lines_is_that_of_the_options_help() {
        let page = Page::new(49, 50, 20);
        let (first, second) = (page.at(0), page.at(1));
        assert_eq!(first.lines().count(), page.lines());
        // 96 for each destination, 29 for each client, and the start of the process.
        assert_eq!(page.lines(), 20 * 96 + 6 * 29 + 1);
        let (first, second) = (values(&first), values(&second));
        assert!(first.iter().zip(&second).all(|(before, after)| before <= after));
        let grown = first.iter().zip(&second).filter(|(before, after)| before < after).count();
        assert!(grown > first.len() / 5 && grown < first.len() / 2, "{grown}");
    }

    #[test]
    fn buckets_are_cumulative_up_to_all_successes_and_failures() {
        let text = Page::new(0, 50, 1).at(7);
        let buckets: Vec<_> = text.lines().filter(|line| line.starts_with("response_latency_ms_bucket")).collect();
        let first = values(&buckets[..BOUNDS.len()].join("\n"));
        assert!(first.is_sorted() && first[0] * 8 <= first[25] && first[25] == BEFORE + 7 * 50, "{first:?}");
    }
}
