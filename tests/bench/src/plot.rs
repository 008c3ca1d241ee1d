//! Pictures of what the benches measured, drawn from their own JSON.
//!
//! ```text
//! docs/benchmarks/interception.json, proxy.json, control-plane.json, scale-*.json ──> docs/benchmarks/*.svg
//! ```
//!
//! A picture is drawn if its data are there. The data are what the benches print with `--json`. Pictures have no
//! background and colours that can be read on white and on black.

mod chart;

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use chart::{Bars, Lines};
use serde_json::Value;

use crate::result::median;

/// Options of `weft-bench plot`.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:
  weft-bench plot
  weft-bench proxy --json | tail -n 1 > docs/benchmarks/proxy.json && weft-bench plot")]
pub struct Args {
    /// Directory of the data: interception.json, proxy.json, control-plane.json, scale-*.json
    #[arg(long, value_name = "DIR", default_value = "docs/benchmarks")]
    pub data: PathBuf,
    /// Directory of the pictures [default: that of the data]
    #[arg(long, value_name = "DIR")]
    pub output: Option<PathBuf>,
}

/// Ways of a connection in the picture of the interception, in the order of their colours.
const WAYS: [&str; 4] = ["direct", "iptables", "ebpf", "unmeshed"];
/// Contenders in pictures of the proxy, in the order of their colours.
const CONTENDERS: [&str; 4] = ["weft", "haproxy-http1", "haproxy-http2", "haproxy-tcp"];
/// Rows whose CPU counts for a request.
const REQUESTS: [&str; 11] = [
    "http1-1",
    "http1-16",
    "http1-64",
    "http1-256",
    "http2-1x64",
    "http2-16x4",
    "connection",
    "open-1000",
    "open-5000",
    "grpc-unary",
    "grpc-stream",
];
const MIB: f64 = (1 << 20) as f64;

/// A drawn picture: its file and its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    /// Name of the file.
    pub name: &'static str,
    /// SVG.
    pub svg: String,
}

/// Draws every picture whose data are there, and returns the files that it wrote.
///
/// # Errors
/// A file cannot be read or written, or is not what a bench printed.
pub fn run(args: &Args) -> anyhow::Result<Vec<PathBuf>> {
    let pictures = draw(&args.data)?;
    anyhow::ensure!(!pictures.is_empty(), "no data of a bench in {}", args.data.display());
    let output = args.output.as_ref().unwrap_or(&args.data);
    let write = |picture: Picture| {
        let path = output.join(picture.name);
        fs::write(&path, picture.svg).with_context(|| format!("write {}", path.display()))?;
        Ok(path)
    };
    pictures.into_iter().map(write).collect()
}

/// The pictures of the data in a directory.
///
/// # Errors
/// A file cannot be read, or is not what a bench printed.
pub fn draw(data: &Path) -> anyhow::Result<Vec<Picture>> {
    let mut pictures = Vec::new();
    if let Some(interception) = read(&data.join("interception.json"))? {
        pictures.extend(connect(&interception)?);
    }
    if let Some(proxy) = read(&data.join("proxy.json"))? {
        pictures.extend(of_proxy(&proxy)?);
    }
    if let Some(control_plane) = read(&data.join("control-plane.json"))? {
        pictures.extend(propagation(&control_plane)?);
    }
    let mut runs = Vec::new();
    for entry in fs::read_dir(data).with_context(|| data.display().to_string())? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.starts_with("scale-") && name.ends_with(".json") {
            runs.extend(read(&path)?);
        }
    }
    pictures.extend(scale(&runs)?);
    Ok(pictures)
}

/// `None` if there is no such file.
fn read(path: &Path) -> anyhow::Result<Option<Value>> {
    match fs::read(path) {
        Ok(text) => serde_json::from_slice(&text).map(Some).with_context(|| format!("read {}", path.display())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("read {}", path.display())),
    }
}

/// What each way adds to `connect`.
fn connect(report: &Value) -> anyhow::Result<Option<Picture>> {
    let Some(turns) = report.pointer("/hooks/turns") else { return Ok(None) };
    let groups =
        [("from the pod", "/outbound/connect/p50"), ("to the pod", "/inbound/connect/p50")].map(|(name, path)| {
            let of_way = |way: &str| {
                let turns = turns[way].as_array()?;
                let nanoseconds: Option<Vec<f64>> = turns.iter().map(|turn| turn.pointer(path)?.as_f64()).collect();
                nanoseconds.filter(|all| !all.is_empty()).map(|all| median(all) / 1000.0)
            };
            (name.to_owned(), WAYS.map(of_way).to_vec())
        });
    let title = "Median of connect, microseconds, without a proxy's own time".to_owned();
    let bars = Bars { title, series: WAYS.map(str::to_owned).to_vec(), groups: groups.into() };
    Ok(Some(Picture { name: "interception-connect.svg", svg: bars.draw()? }))
}

fn of_proxy(report: &Value) -> anyhow::Result<Vec<Picture>> {
    let rows = report["rows"].as_array().context("proxy.json has no rows")?;
    let value = |row: &str, contender: &str, key: &str| {
        let row = rows.iter().find(|one| one["name"] == row)?;
        row["contenders"][contender]["medians"][key].as_f64()
    };
    let groups = |names: &[&str], keys: &[(&str, &str)]| {
        let each = names.iter().flat_map(|row| keys.iter().map(move |(key, label)| (*row, *key, *label)));
        let all = each.map(|(row, key, label)| {
            let values = CONTENDERS.map(|contender| value(row, contender, key));
            (format!("{row}{label}"), values.to_vec())
        });
        all.filter(|(_, values)| values[0].is_some()).collect::<Vec<_>>()
    };
    let series = CONTENDERS.map(str::to_owned).to_vec();
    let bars = |title: &str, groups| Bars { title: title.to_owned(), series: series.clone(), groups };
    let mut pictures = Vec::new();
    let mut add = |name, bars: Bars| {
        if !bars.groups.is_empty() {
            pictures.push(Picture { name, svg: bars.draw()? });
        }
        anyhow::Ok(())
    };
    let cpu = groups(&REQUESTS, &[("cpu_us", "")]);
    add("proxy-cpu.svg", bars("CPU microseconds per request, both proxies together", cpu))?;
    let latency = groups(&["http1-1", "open-1000", "open-5000"], &[("p50_us", " p50"), ("p99_us", " p99")]);
    add("proxy-latency.svg", bars("Latency, microseconds", latency))?;
    let idle = ["idle-http-1000", "idle-http-10000", "idle-opaque-1000", "idle-opaque-10000"];
    let memory = groups(&idle, &[("outbound_connection_kib", " out"), ("inbound_connection_kib", " in")]);
    add("proxy-memory.svg", bars("KiB per idle connection", memory))?;
    Ok(pictures)
}

/// How long changes took to reach the clients in each part.
fn propagation(report: &Value) -> anyhow::Result<Option<Picture>> {
    let parts = [
        ("changes", "/changes/propagation"),
        ("rollout", "/rollout/propagation"),
        ("stalled", "/stalled/others"),
        ("slow", "/slow/others"),
    ];
    let quantiles = parts.iter().filter_map(|(name, path)| {
        let milliseconds = report.pointer(path)?.get("milliseconds")?;
        let of = |key: &str| milliseconds[key].as_f64();
        Some(((*name).to_owned(), vec![of("p50"), of("p99"), of("max")]))
    });
    let groups: Vec<_> = quantiles.collect();
    if groups.is_empty() {
        return Ok(None);
    }
    let title = "Milliseconds from the API server's answer to a client".to_owned();
    let series = ["p50", "p99", "max"].map(str::to_owned).to_vec();
    Ok(Some(Picture { name: "control-plane-propagation.svg", svg: Bars { title, series, groups }.draw()? }))
}

/// Memory of the control plane by number of proxies.
fn scale(runs: &[Value]) -> anyhow::Result<Option<Picture>> {
    let mut lines: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
    for run in runs {
        let clients =
            run.pointer("/setup/clients").and_then(Value::as_f64).context("a scale-*.json without clients")?;
        // After the changes if there were some, which is when everything has grown.
        let load = ["/changes/load/processes", "/start/load/processes"].iter().find_map(|path| run.pointer(path));
        for process in load.and_then(Value::as_array).context("a scale-*.json without processes")? {
            let name = process["process"].as_str().context("a process without a name")?;
            let resident = process["resident_bytes_after"].as_f64().context("a process without memory")? / MIB;
            match lines.iter_mut().find(|(line, _)| line == name) {
                Some((_, points)) => points.push((clients, resident)),
                None => lines.push((name.to_owned(), vec![(clients, resident)])),
            }
        }
    }
    if lines.is_empty() {
        return Ok(None);
    }
    lines.iter_mut().for_each(|(_, points)| points.sort_by(|one, other| one.0.total_cmp(&other.0)));
    let (title, across) = ("Resident memory, MiB".to_owned(), "proxies with 10 targets each".to_owned());
    Ok(Some(Picture { name: "control-plane-scale.svg", svg: Lines { title, across, lines }.draw()? }))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn committed() -> PathBuf {
        let here = std::env::current_dir().unwrap();
        here.ancestors().map(|root| root.join("docs/benchmarks")).find(|found| found.is_dir()).unwrap()
    }

    #[test]
    fn the_committed_pictures_are_those_of_the_committed_data() {
        let directory = committed();
        let pictures = draw(&directory).unwrap();
        assert!(!pictures.is_empty());
        for picture in pictures {
            let found = fs::read_to_string(directory.join(picture.name)).unwrap_or_default();
            assert!(found == picture.svg, "{}: run `cargo xtask bench plot`", picture.name);
        }
    }

    #[test]
    fn a_picture_shows_every_contender_and_row_that_was_measured_and_no_other() {
        let medians = |cpu: f64| json!({"medians": {"cpu_us": cpu}});
        let rows = json!({"rows": [
            {"name": "http1-64", "contenders": {"weft": medians(20.0), "haproxy-http2": medians(40.0)}},
            {"name": "bulk", "contenders": {"weft": medians(1.0)}},
        ]});
        let pictures = of_proxy(&rows).unwrap();
        assert_eq!(pictures.iter().map(|picture| picture.name).collect::<Vec<_>>(), ["proxy-cpu.svg"]);
        let svg = &pictures[0].svg;
        assert!(svg.contains("http1-64") && svg.contains("weft") && svg.contains("haproxy-http2"), "{svg}");
        assert!(!svg.contains("bulk") && !svg.contains("haproxy-tcp"), "{svg}");
    }

    #[test]
    fn each_way_of_a_connection_is_a_bar() {
        let turn = |outbound: f64| {
            let connect = |p50: f64| json!({"connect": {"p50": p50}});
            json!({"outbound": connect(outbound), "inbound": connect(17_000.0)})
        };
        let ways = json!({"direct": [turn(13_000.0)], "ebpf": [turn(14_000.0), turn(16_000.0)], "unmeshed": []});
        let svg = connect(&json!({"hooks": {"turns": ways}})).unwrap().unwrap().svg;
        assert!(svg.contains("from the pod") && svg.contains("direct") && svg.contains("ebpf"), "{svg}");
        assert!(!svg.contains("iptables") && !svg.contains("unmeshed"), "a way that was not measured: {svg}");
        assert!(connect(&json!({"hooks": null})).unwrap().is_none());
    }

    #[test]
    fn memory_is_a_line_for_each_process_over_the_number_of_proxies() {
        let run = |clients: u32, bytes: u64| {
            let process = json!([{"process": "destination", "resident_bytes_after": bytes}]);
            json!({"setup": {"clients": clients}, "start": {"load": {"processes": process}}})
        };
        let svg = scale(&[run(25_000, 1 << 30), run(2000, 1 << 28)]).unwrap().unwrap().svg;
        assert!(svg.contains("destination") && svg.contains("25000") && svg.contains("polyline"), "{svg}");
        assert!(scale(&[]).unwrap().is_none());
        assert!(scale(&[json!({})]).is_err());
    }
}
