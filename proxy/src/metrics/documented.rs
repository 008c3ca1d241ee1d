//! The families that the proxy registers, compared with the table of its metrics in docs/compatibility.md.

use std::collections::BTreeSet;

use weft_runtime::metrics::Metrics;

use crate::{build_info, control::metrics::ControlMetrics, metrics::ProxyMetrics, trace::TraceMetrics};

/// Registered with parts of the proxy that need a pod.
const ELSEWHERE: [&str; 3] = [
    "control_identity_cert_expiration_timestamp_seconds",
    "control_identity_cert_refresh_timestamp_seconds",
    "control_identity_cert_refreshes_total",
];

/// The names of a registry's families, also of those without series, which no scrape has. The registry names them in
/// its debug representation alone, without the `_total` of counters.
fn registered(registry: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for part in registry.split("prefix: ").skip(1) {
        let quoted = part.strip_prefix("Some(Prefix(\"").and_then(|rest| rest.split('"').next());
        let prefix = quoted.map(|prefix| format!("{prefix}_")).unwrap_or_default();
        for descriptor in part.split("Descriptor { name: \"").skip(1) {
            let (name, rest) = descriptor.split_once('"').unwrap();
            let unit = rest.split("unit: ").nth(1).unwrap();
            let unit = unit.strip_prefix("Some(").and_then(|unit| unit.split(')').next());
            let unit = unit.map(|unit| format!("_{}", unit.to_lowercase())).unwrap_or_default();
            names.insert(format!("{prefix}{name}{unit}"));
        }
    }
    names
}

#[test]
fn every_family_is_in_the_table_and_every_row_that_works_is_a_family() {
    weft_tls::install_crypto_provider();
    let metrics = Metrics::new();
    let families = metrics.register(|registry| {
        ProxyMetrics::register(registry);
        ControlMetrics::register(registry);
        TraceMetrics::register(registry);
        build_info::register(registry);
        registered(&format!("{registry:?}"))
    });
    let path = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it") + "/../docs/compatibility.md";
    let document = std::fs::read_to_string(path).unwrap();
    let (_, table) = document.split_once("## Metrics of the proxy\n").expect("the document has the table");
    let table = table.split("\n## ").next().unwrap();
    let rows: BTreeSet<String> = table
        .lines()
        .filter(|line| line.contains("| works |"))
        .filter_map(|line| line.split('`').nth(1).map(str::to_owned))
        .filter(|name| !ELSEWHERE.contains(&name.as_str()) && name != "process_*")
        .map(|name| name.strip_suffix("_total").map_or(name.clone(), str::to_owned))
        .collect();
    let families: BTreeSet<String> = families
        .into_iter()
        // The table is of Linkerd's: Weft's own are in docs/configuration.md.
        .filter(|name| !name.starts_with("process_") && !name.starts_with("weft_"))
        .collect();
    assert_eq!(families.difference(&rows).collect::<Vec<_>>(), Vec::<&String>::new(), "families without a row");
    assert_eq!(rows.difference(&families).collect::<Vec<_>>(), Vec::<&String>::new(), "rows without a family");
    assert!(rows.len() > 100, "{}", rows.len());
}
