//! `weft-agent status`: queries a running agent and prints its answer. The only file of the agent that writes to
//! standard output.

use std::{
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, anyhow};
use comfy_table::{Table, presets};
use serde_json::{Value, json};
use tonic::transport::Endpoint;
use weft_k8s_api::printable;
use weft_proto::agent::{Direction, PodState, PodStatus, StatusRequest, StatusResponse, status_client::StatusClient};

use crate::features;

/// How to print.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Output {
    /// For people.
    Table,
    /// One JSON object.
    Json,
}

/// Queries the agent and prints its answer.
pub(crate) async fn run(socket: &Path, output: Output) -> Result<String> {
    let channel = Endpoint::from_shared(format!("unix://{}", socket.display()))?
        .connect()
        .await
        .map_err(|_| anyhow!("no agent answers on {}: is `weft-agent run` running there?", socket.display()))?;
    let status = StatusClient::new(channel).get(StatusRequest {}).await.context("the agent refused")?.into_inner();
    Ok(text(&status, output))
}

/// Reasons and log lines quote annotations, which pods' authors choose.
fn text(status: &StatusResponse, output: Output) -> String {
    match output {
        Output::Json => printable::json(&format!("{}\n", json(status))).into_owned(),
        Output::Table => printable::lines(&table(status)).into_owned(),
    }
}

/// Prints the features of the kernel and the host, without an agent. False when a required one is missing.
pub(crate) fn features(output: Output, as_on: Option<features::Linux>) -> (String, bool) {
    let found = features::examine(as_on);
    let features: Vec<_> = found.iter().map(Into::into).collect();
    let text = match output {
        Output::Json => format!("{}\n", features::json(&features)),
        Output::Table => format!("{}\n", features::table(&features)),
    };
    (text, !found.iter().any(features::Feature::is_missing))
}

fn name(pod: &PodStatus) -> String {
    pod.pod.as_ref().map_or_else(|| "-".to_owned(), |pod| format!("{}/{}", pod.namespace, pod.name))
}

fn direction(number: i32) -> &'static str {
    match Direction::try_from(number) {
        Ok(Direction::Outbound) => "outbound",
        Ok(Direction::Inbound) => "inbound",
        _ => "unknown",
    }
}

fn state(pod: &PodStatus) -> &'static str {
    match pod.state() {
        PodState::Enrolled => "enrolled",
        PodState::Pending if pod.self_enrolled => "self-enrolled",
        PodState::Pending => "pending",
        PodState::Refused => "refused",
        PodState::Leaving => "leaving",
        PodState::Unspecified => "unknown",
    }
}

fn json(status: &StatusResponse) -> Value {
    let pods: Vec<_> = status
        .pods
        .iter()
        .map(|pod| {
            json!({
                "pod": name(pod), "netns_cookie": pod.netns_cookie, "outbound": pod.outbound, "inbound": pod.inbound,
                "generation": pod.generation, "ips": pod.ips, "uid": pod.uid, "state": state(pod),
                "reason": pod.reason, "enrolled_after_ms": pod.enrolled_after_ms, "bypassed": pod.bypassed,
                "self_enrolled": pod.self_enrolled, "strict": pod.strict, "listening": pod.listening,
            })
        })
        .collect();
    let verdicts: Vec<_> = status
        .verdicts
        .iter()
        .map(|count| json!({"direction": direction(count.direction), "verdict": count.verdict, "count": count.count}))
        .collect();
    json!({
        "version": status.version, "programs": status.programs, "cgroup": status.cgroup, "pin_dir": status.pin_dir,
        "pods": pods, "verdicts": verdicts, "events_dropped": status.events_dropped,
        "flow_misses": status.flow_misses, "node": status.node, "mode": status.mode,
        "bypassed": status.bypassed, "bind_failures": status.bind_failures, "listeners_lost": status.listeners_lost,
        "admissions_refused": status.admissions_refused,
        "cgroup_reason": status.cgroup_reason, "cgroup_is_root": status.cgroup_is_root,
        "last_errors": status.last_errors.iter().map(|line| json!({
            "at_unix_ms": line.at_unix_ms, "level": line.level, "message": line.text, "times": line.times,
        })).collect::<Vec<_>>(),
        "features": features::json(&status.features),
        "host": status.host.as_ref().map(|host| json!({
            "kernel": host.kernel, "cgroups": host.cgroups, "btf": host.btf,
        })),
    })
}

fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

fn table(status: &StatusResponse) -> String {
    let new_table = |header: &[&str]| {
        let mut table = Table::new();
        table.load_preset(presets::NOTHING).set_header(header);
        table
    };
    let mut pods = new_table(&["POD", "STATE", "OUTBOUND", "INBOUND", "GENERATION", "COOKIE", "ADDRESSES", "REASON"]);
    let word = |pod: &PodStatus, in_force: bool| match (in_force, pod.bypassed || status.bypassed) {
        (true, true) => "bypassed",
        (true, false) => "yes",
        (false, _) => "no",
    };
    for pod in &status.pods {
        pods.add_row([
            name(pod),
            state(pod).to_owned(),
            word(pod, pod.outbound).into(),
            word(pod, pod.inbound).into(),
            pod.generation.to_string(),
            pod.netns_cookie.to_string(),
            pod.ips.join(" "),
            pod.reason.clone(),
        ]);
    }
    let mut verdicts = new_table(&["DIRECTION", "VERDICT", "COUNT"]);
    for count in status.verdicts.iter().filter(|count| count.count > 0) {
        verdicts.add_row([direction(count.direction).to_owned(), count.verdict.clone(), count.count.to_string()]);
    }
    let features = features::table(&status.features);
    let mut errors = new_table(&["LAST-ERRORS", "LEVEL", "TIMES", "MESSAGE"]);
    for line in &status.last_errors {
        let age = Duration::from_millis(now_ms().saturating_sub(line.at_unix_ms));
        let age = format!("{}s ago", age.as_secs());
        errors.add_row([age, line.level.clone(), line.times.to_string(), line.text.clone()]);
    }
    let errors = if status.last_errors.is_empty() { String::new() } else { format!("\n\n{errors}") };
    let node = if status.node.is_empty() { String::new() } else { format!(", node {}", status.node) };
    let bypassed = if status.bypassed {
        "ALL REDIRECTION OF THIS NODE IS SWITCHED OFF: `weft-agent bypass off` ends it\n"
    } else {
        ""
    };
    format!(
        "{bypassed}version {}, programs {}{node}\ncgroup {} ({})\npins {}\nevents dropped {}, flow misses {}, listeners lost {}, admissions refused {}\n\n{pods}\n\n{verdicts}{errors}\n\n{features}\n",
        status.version,
        status.programs,
        status.cgroup,
        status.cgroup_reason,
        status.pin_dir,
        status.events_dropped,
        status.flow_misses,
        status.listeners_lost,
        status.admissions_refused
    )
}

#[cfg(test)]
mod tests {
    use weft_proto::agent::LogLine;

    use super::*;

    #[test]
    fn nothing_that_is_quoted_reaches_the_terminal_raw() {
        let quoted = "\x1b]0;forged\x07\u{9b}31m";
        let status = StatusResponse {
            pods: vec![PodStatus { reason: quoted.into(), ..PodStatus::default() }],
            last_errors: vec![LogLine { text: quoted.into(), ..LogLine::default() }],
            ..StatusResponse::default()
        };
        for output in [Output::Table, Output::Json] {
            let text = text(&status, output);
            assert!(!text.contains(|character: char| character.is_control() && character != '\n'), "{text:?}");
            assert!(text.contains("forged"), "{text:?}");
        }
    }
}
