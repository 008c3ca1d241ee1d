//! Parses the Prometheus text of proxies, to check what they count.

use std::collections::{BTreeMap, BTreeSet};

/// One line of the exposition.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The metric's name.
    pub name: String,
    /// Values of labels by name.
    pub labels: BTreeMap<String, String>,
    /// The value; counters are whole numbers.
    pub value: f64,
}

/// Connections between meshed pods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Between {
    /// With mutual TLS.
    pub mtls: u64,
    /// Without.
    pub plaintext: u64,
}

/// All samples of one or several expositions.
#[derive(Clone, Debug, Default)]
pub struct Metrics(Vec<Sample>);

impl Metrics {
    /// Parses an exposition; comments and lines that are not samples are skipped.
    pub fn parse(text: &str) -> Self {
        Self(text.lines().filter_map(parse_line).collect())
    }

    /// Adds another exposition's samples.
    pub fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// The sum over all samples of a name whose labels include all of these.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.matching(name, labels).map(|sample| sample.value).sum()
    }

    /// The connections that a client's proxy opened to these addresses, with mutual TLS and without.
    pub fn connections_to(&self, ips: &BTreeSet<String>) -> Between {
        let opened = self.matching("tcp_open_total", &[("direction", "outbound"), ("peer", "dst")]);
        let mut between = Between::default();
        for sample in opened.filter(|sample| sample.labels.get("target_ip").is_some_and(|ip| ips.contains(ip))) {
            let mtls = sample.labels.get("tls").is_some_and(|tls| tls == "true");
            *(if mtls { &mut between.mtls } else { &mut between.plaintext }) += sample.value as u64;
        }
        between
    }

    /// The addresses that applications dialled, as their proxy got them from the kernel.
    pub fn original_destinations(&self) -> BTreeSet<String> {
        let accepted = self.matching("tcp_open_total", &[("direction", "outbound"), ("peer", "src")]);
        accepted.filter_map(|sample| sample.labels.get("target_ip").cloned()).collect()
    }

    /// All samples of a name whose labels include all of these.
    pub fn matching<'a>(&'a self, name: &'a str, labels: &'a [(&'a str, &'a str)]) -> impl Iterator<Item = &'a Sample> {
        self.0.iter().filter(move |sample| {
            sample.name == name
                && labels.iter().all(|(label, value)| sample.labels.get(*label).is_some_and(|have| have == value))
        })
    }
}

fn parse_line(line: &str) -> Option<Sample> {
    let line = line.trim();
    if line.is_empty() || line.starts_with('#') {
        return None;
    }
    let Some((name, rest)) = line.split_once('{') else {
        let (name, value) = line.split_once(' ')?;
        return Some(Sample { name: name.to_owned(), labels: BTreeMap::new(), value: first_number(value)? });
    };
    let (labels, value) = parse_labels(rest)?;
    Some(Sample { name: name.to_owned(), labels, value: first_number(value)? })
}

/// Labels up to the closing brace, and the rest of the line.
fn parse_labels(mut rest: &str) -> Option<(BTreeMap<String, String>, &str)> {
    let mut labels = BTreeMap::new();
    loop {
        rest = rest.trim_start_matches([',', ' ']);
        if let Some(after) = rest.strip_prefix('}') {
            return Some((labels, after));
        }
        let (name, after) = rest.split_once("=\"")?;
        let mut value = String::new();
        let mut characters = after.char_indices();
        let end = loop {
            match characters.next()? {
                (index, '"') => break index,
                (_, '\\') => match characters.next()?.1 {
                    'n' => value.push('\n'),
                    other => value.push(other),
                },
                (_, other) => value.push(other),
            }
        };
        labels.insert(name.to_owned(), value);
        rest = &after[end + 1..];
    }
}

/// The value comes first; a timestamp or an exemplar may follow.
fn first_number(text: &str) -> Option<f64> {
    text.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# HELP tcp_open_total Connections.\n# TYPE tcp_open_total counter\n\
        tcp_open_total{direction=\"outbound\",peer=\"dst\",tls=\"true\"} 3\n\
        tcp_open_total{direction=\"outbound\",peer=\"dst\",tls=\"no_identity\"} 2\n\
        tcp_open_total{direction=\"inbound\",peer=\"src\",note=\"a\\\"b}, c\"} 4 # {} 1.0\n\
        process_start_time_seconds 12.5\nnonsense\n";

    #[test]
    fn sums_what_matches_and_nothing_else() {
        let metrics = Metrics::parse(TEXT);
        assert_eq!(metrics.sum("tcp_open_total", &[("direction", "outbound")]), 5.0);
        assert_eq!(metrics.sum("tcp_open_total", &[("direction", "outbound"), ("tls", "true")]), 3.0);
        assert_eq!(metrics.sum("tcp_open_total", &[("note", "a\"b}, c")]), 4.0);
        assert_eq!(metrics.sum("process_start_time_seconds", &[]), 12.5);
        assert_eq!(metrics.sum("tcp_open_total", &[("tls", "disabled")]), 0.0);
    }
}
