//! Windows against a naive specification: counters that fall, lines that go, samples that age.

use std::{collections::BTreeMap, fmt::Write as _};

use parking_lot::Mutex;
use proptest::prelude::*;

use super::*;
use crate::{
    exposition::{Exposition, MOST_LINES},
    family::Name,
    intern::Interner,
};

fn at(start: Instant, seconds: u64) -> Instant {
    start + Duration::from_secs(seconds)
}

fn add(history: &mut History, text: &[u8], at: Instant, interner: &Mutex<Interner>) {
    let mut exposition = Exposition::new(Arc::clone(history.lines()), interner);
    exposition.read(text).unwrap();
    history.add(exposition.end(), at, interner.lock().bounds());
}

fn counted(history: &History, end: Instant, window: u64) -> BTreeMap<(Family, String), Counted> {
    let mut all = BTreeMap::new();
    if let Some(span) = history.span(end, Duration::from_secs(window)) {
        history.counted(span, |series, counted| {
            let name = format!("{}{}", series.label(Name::Outcome), series.label(Name::RouteName));
            all.insert((series.family, name), counted);
        });
    }
    all
}

/// Adds scrapes a second apart, and returns what was counted over all of them.
fn total(texts: &[&str]) -> BTreeMap<(Family, String), Counted> {
    let (mut history, interner, start) = (History::default(), Mutex::default(), Instant::now());
    for (second, text) in texts.iter().enumerate() {
        add(&mut history, text.as_bytes(), at(start, second as u64), &interner);
    }
    counted(&history, at(start, texts.len() as u64 - 1), 900)
}

fn successes(texts: &[&str]) -> u64 {
    total(texts).get(&(Family::Responses, "success".to_owned())).map_or(0, |counted| counted.total)
}

fn line(port: u16, value: u64) -> String {
    format!("response_total{{direction=\"inbound\",target_port=\"{port}\",classification=\"success\"}} {value}\n")
}

#[test]
fn what_was_counted_is_the_difference() {
    assert_eq!(successes(&[&line(80, 100), &line(80, 105), &line(80, 105), &line(80, 112)]), 12);
    assert_eq!(successes(&[&line(80, 100)]), 0);
}

#[test]
fn lines_that_differ_in_what_no_answer_shows_are_one_series() {
    let first = line(80, 10) + &line(81, 20);
    let second = line(80, 11) + &line(81, 22);
    assert_eq!(successes(&[&first, &second]), 3);
}

#[test]
fn a_line_that_the_proxy_evicts_takes_nothing_away() {
    let both = line(80, 10) + &line(81, 20_000);
    assert_eq!(successes(&[&both, &line(80, 11), &line(80, 12)]), 2);
    // It comes back from zero.
    let back = line(80, 13) + &line(81, 4);
    assert_eq!(successes(&[&both, &line(80, 11), &line(80, 12), &back]), 7);
}

#[test]
fn a_line_that_comes_later_counts_from_zero() {
    let later = line(80, 11) + &line(81, 5);
    assert_eq!(successes(&[&line(80, 10), &later]), 6);
}

#[test]
fn a_counter_that_falls_began_again() {
    assert_eq!(successes(&[&line(80, 100), &line(80, 3)]), 3);
}

#[test]
fn a_restarted_proxy_counts_from_zero_even_if_it_is_ahead_already() {
    let with_start = |start: f64, value: u64| format!("process_start_time_seconds {start}\n{}", line(80, value));
    assert_eq!(successes(&[&with_start(1.0, 5), &with_start(2.0, 9)]), 9);
    assert_eq!(successes(&[&with_start(1.0, 5), &with_start(1.0, 9)]), 4);
}

fn buckets(values: &[(&str, u64)]) -> String {
    let mut text = String::new();
    for (bound, value) in values {
        let _ = writeln!(
            text,
            "response_latency_ms_bucket{{direction=\"inbound\",status_code=\"200\",le=\"{bound}\"}} {value}"
        );
    }
    text
}

#[test]
fn a_bucket_has_its_own_observations_alone() {
    let texts = [
        buckets(&[("1", 5), ("10", 6), ("2.0", 5), ("+Inf", 8)]),
        buckets(&[("1", 6), ("10", 9), ("2.0", 8), ("+Inf", 12)]),
    ];
    let (mut history, interner, start) = (History::default(), Mutex::default(), Instant::now());
    add(&mut history, texts[0].as_bytes(), start, &interner);
    add(&mut history, texts[1].as_bytes(), at(start, 1), &interner);
    let counted = counted(&history, at(start, 1), 60);
    let mut found: Vec<(f64, u64)> = counted[&(Family::Latency, String::new())]
        .buckets
        .iter()
        .map(|(bound, count)| (interner.lock().bounds()[usize::from(*bound)], *count))
        .collect();
    found.sort_by(|a, b| a.0.total_cmp(&b.0));
    // Cumulative: 1, 3, 3, 4.
    assert_eq!(found, [(1.0, 1), (2.0, 2), (f64::INFINITY, 1)]);
}

#[test]
fn a_gauge_has_the_value_of_the_windows_end() {
    let open = |value: u64| format!("tcp_open_connections{{direction=\"inbound\",peer=\"src\"}} {value}\n");
    let found = total(&[&open(7), &open(2), &open(3)]);
    assert_eq!(found[&(Family::Open, String::new())].total, 3);
    assert!(total(&[&open(7), &open(0)]).is_empty());
}

#[test]
fn the_window_is_the_nearest_that_the_scrapes_make() {
    let (mut history, interner, start) = (History::default(), Mutex::default(), Instant::now());
    for index in 0..10 {
        add(&mut history, line(80, index).as_bytes(), at(start, index * 10), &interner);
    }
    let now = at(start, 95);
    for (asked, expected) in [(60, 60), (1, 10), (34, 30), (36, 40), (900, 90)] {
        let span = history.span(now, Duration::from_secs(asked)).unwrap();
        assert_eq!(span.length, Duration::from_secs(expected), "{asked}");
    }
    // A proxy that has been silent for longer than the window has not counted in it.
    assert!(history.span(at(start, 90 + 61), Duration::from_secs(60)).is_none());
    assert!(history.span(at(start, 90 + 61), Duration::from_secs(120)).is_some());
    let point = history.interval(at(start, 50), Duration::from_secs(10)).unwrap();
    let mut sum = 0;
    history.counted(point, |_, counted| sum += counted.total);
    assert_eq!((point.length, sum), (Duration::from_secs(10), 1));
}

#[test]
fn what_is_older_than_the_window_is_forgotten() {
    let (mut history, interner, start) = (History::default(), Mutex::default(), Instant::now());
    for index in 0..200 {
        add(&mut history, line(80, index).as_bytes(), at(start, index * 10), &interner);
    }
    assert_eq!(history.len(), 91);
    let span = history.span(at(start, 1990), WINDOW).unwrap();
    assert_eq!(span.length, WINDOW);
    for second in 0..2000 {
        add(&mut history, line(80, second).as_bytes(), at(start, 2000 + second / 4), &interner);
    }
    assert_eq!(history.len(), MOST_SAMPLES);
}

#[test]
fn too_many_lines_are_counted_and_said() {
    let (mut history, interner, start) = (History::default(), Mutex::default(), Instant::now());
    let many = |value: u64| {
        (0..MOST_LINES as u64 + 100)
            .map(|port| format!("response_total{{target_port=\"{port}\",classification=\"success\"}} {value}\n"))
            .collect::<String>()
    };
    add(&mut history, many(1).as_bytes(), start, &interner);
    add(&mut history, many(2).as_bytes(), at(start, 1), &interner);
    assert_eq!(history.excess(), 100);
    let counted = counted(&history, at(start, 1), 60);
    assert_eq!(counted[&(Family::Responses, "success".to_owned())].total, MOST_LINES as u64);
    // One that finds room now had been counted by nobody knows how much.
    add(&mut history, many(9).replace("target_port=\"0\"", "gone=\"0\"").as_bytes(), at(start, 2), &interner);
    assert!(history.lines.len() <= MOST_LINES);
}

#[test]
fn series_come_and_go_without_end() {
    let (mut history, interner, start) = (History::default(), Mutex::default(), Instant::now());
    for index in 0..3 * MOST_SERIES as u64 {
        let text =
            format!("response_total{{direction=\"outbound\",dst_pod=\"pod-{index}\",classification=\"success\"}} 1\n");
        add(&mut history, text.as_bytes(), at(start, index * 10), &interner);
    }
    assert_eq!(history.excess(), 0);
    assert!(history.series.len() <= MOST_SERIES);
    let mut found = 0;
    let end = at(start, (3 * MOST_SERIES as u64 - 1) * 10);
    let span = history.span(end, WINDOW).unwrap();
    history.counted(span, |_, counted| found += counted.total);
    assert_eq!(found, 90);
    assert!(interner.lock().len() < 2 * MOST_SERIES + 4096, "{}", interner.lock().len());
}

proptest! {
    /// Random counters that rise, restart and disappear: every window has what a naive count has.
    #[test]
    fn windows_equal_naive_differences(
        steps in prop::collection::vec(prop::collection::vec((0..4_u8, 0..300_u64, any::<bool>()), 3), 2..30),
        window in 1..40_u64,
    ) {
        let (mut history, interner, start) = (History::default(), Mutex::default(), Instant::now());
        let mut values: [Option<u64>; 3] = [Some(1000), Some(5), None];
        let mut naive: Vec<[u64; 3]> = Vec::new();
        for (second, step) in steps.iter().enumerate() {
            let mut text = String::new();
            let mut gained = [0; 3];
            for (index, (what, by, _)) in step.iter().enumerate() {
                let (value, gain) = match (*what, values[index]) {
                    // The proxy drops the line.
                    (0, _) => (None, 0),
                    // It begins again; seen as such only if it is lower than before.
                    (1, Some(before)) if *by < before => (Some(*by), *by),
                    (_, Some(before)) => (Some(before + by), *by),
                    (_, None) => (Some(*by), *by),
                };
                values[index] = value;
                gained[index] = gain;
                if let Some(value) = value {
                    let _ = writeln!(text, "response_total{{a=\"{index}\",route_name=\"{}\",classification=\"success\"}} {value}", index % 2);
                }
            }
            if second == 0 {
                gained = [0; 3];
            }
            naive.push(gained);
            add(&mut history, text.as_bytes(), at(start, second as u64), &interner);
        }
        let end = steps.len() as u64 - 1;
        let first = (end + 1).saturating_sub(window).max(1) as usize;
        let sum = |indices: &[usize]| naive[first..].iter().flat_map(|gained| indices.iter().map(|index| gained[*index])).sum::<u64>();
        let found = counted(&history, at(start, end), window.min(end));
        let of = |route: &str| found.get(&(Family::Responses, format!("success{route}"))).map_or(0, |counted| counted.total);
        prop_assert_eq!(of("0"), sum(&[0, 2]));
        prop_assert_eq!(of("1"), sum(&[1]));
    }

    #[test]
    fn numbers_are_read_as_they_were_written(numbers: Vec<u64>) {
        let mut bytes = Vec::new();
        for number in &numbers {
            put(&mut bytes, *number);
        }
        let mut rest = bytes.as_slice();
        for number in &numbers {
            prop_assert_eq!(take(&mut rest), Some(*number));
        }
        prop_assert_eq!(take(&mut rest), None);
    }
}

/// A busy proxy's scrape: 3 servers' routes, 30 destinations of 3 pods each, all families, some 2,000 lines of those
/// that are kept.
fn busy(pod: usize, round: u64) -> String {
    let mut text = String::from("process_start_time_seconds 1700000000\n");
    let bounds = [
        "1", "2", "3", "4", "5", "10", "20", "30", "40", "50", "100", "200", "300", "400", "500", "1000", "2000",
        "3000", "4000", "5000", "10000", "20000", "30000", "40000", "50000", "+Inf",
    ];
    let http = |text: &mut String, labels: &str, grows: u64| {
        let count = 1000 + grows * round;
        let _ = writeln!(text, "request_total{{{labels}}} {count}");
        let _ = writeln!(text, "response_total{{{labels},status_code=\"200\",classification=\"success\"}} {count}");
        let _ =
            writeln!(text, "response_total{{{labels},status_code=\"500\",classification=\"failure\"}} {}", count / 50);
        for (index, bound) in bounds.iter().enumerate() {
            let below = count * (index as u64 + 1).min(8) / 8;
            let _ = writeln!(text, "response_latency_ms_bucket{{{labels},status_code=\"200\",le=\"{bound}\"}} {below}");
        }
    };
    for client in 0..6 {
        http(
            &mut text,
            &format!(
                "direction=\"inbound\",target_addr=\"10.0.0.{pod}:8080\",target_ip=\"10.0.0.{pod}\",target_port=\"8080\",tls=\"true\",\
            client_id=\"client-{client}.shop.serviceaccount.identity.linkerd.cluster.local\",srv_group=\"policy.linkerd.io\",srv_kind=\"server\",\
            srv_name=\"web-http\",srv_port=\"8080\",route_group=\"\",route_kind=\"default\",route_name=\"default\",authz_group=\"policy.linkerd.io\",\
            authz_kind=\"authorizationpolicy\",authz_name=\"web\""
            ),
            50 + client,
        );
    }
    for destination in 0..20 {
        for replica in 0..3 {
            let name = format!("service-{destination}");
            let labels = format!(
                "direction=\"outbound\",target_addr=\"10.1.{destination}.{replica}:8080\",target_ip=\"10.1.{destination}.{replica}\",\
                target_port=\"8080\",tls=\"true\",server_id=\"{name}.shop.serviceaccount.identity.linkerd.cluster.local\",dst_control_plane_ns=\"linkerd\",\
                dst_deployment=\"{name}\",dst_namespace=\"shop\",dst_pod=\"{name}-7c9f8d6b5-{replica}\",dst_pod_template_hash=\"7c9f8d6b5\",\
                dst_service=\"{name}\",dst_serviceaccount=\"{name}\",dst_zone=\"a\""
            );
            http(&mut text, &labels, if destination < 5 { 10 } else { 0 });
            let _ = writeln!(text, "tcp_open_connections{{peer=\"dst\",{labels}}} 2");
            let _ = writeln!(text, "tcp_read_bytes_total{{peer=\"dst\",{labels}}} {}", 100_000 * round);
            let _ = writeln!(text, "tcp_write_bytes_total{{peer=\"dst\",{labels}}} {}", 100_000 * round);
        }
    }
    text
}

/// 15 minutes of 1,000 pods in 256 MiB: here 4 pods, of which each may have its thousandth.
#[test]
fn the_window_of_a_thousand_busy_pods_fits_into_256_mib() {
    const PODS: usize = 4;
    let (interner, start) = (Mutex::default(), Instant::now());
    let mut histories: Vec<History> = (0..PODS).map(|_| History::default()).collect();
    for round in 0..=90 {
        for (pod, history) in histories.iter_mut().enumerate() {
            add(history, busy(pod, round).as_bytes(), at(start, round * 10), &interner);
        }
    }
    let lines = histories[0].lines.len();
    assert!(lines > 1_800, "{lines}");
    assert!(histories.iter().all(|history| history.len() == 91 && history.excess() == 0));
    let bytes = histories.iter().map(History::bytes).sum::<usize>() / PODS;
    // The rest is for connections, pods and answers.
    assert!(bytes < (160 << 20) / 1000, "{bytes} bytes a pod");
    // Pods of one workload share their series.
    assert!(interner.lock().len() < 400, "{}", interner.lock().len());
}
