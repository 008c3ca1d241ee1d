//! A report as tables, with the problems first.

use std::io;

use comfy_table::Table;
use k8s_openapi::jiff::Timestamp;
use weft_k8s_api::printable;

use super::{
    report::{ControlPlane, Report},
    rows::{AgentRow, PodRow},
};
use crate::output::{self, NOTHING, Tone, columns, line, or_nothing, paint, styled, table, yes};

const DIGEST: usize = 12;

/// `wide` also prints what tables leave out.
pub(super) fn print(report: &Report, wide: bool) -> io::Result<()> {
    for problem in &report.problems {
        let what = format!("{}: {}", problem.object, problem.problem);
        let what: Vec<_> = what.lines().map(|line| paint(Tone::Bad, line)).collect();
        styled(&format!("{}\n  remedy: {}", what.join("\n"), printable::lines(&problem.remedy)))?;
    }
    if !report.problems.is_empty() {
        line("")?;
    }
    if let Some(plane) = &report.control_plane {
        output::print(&components(plane))?;
        let expired = plane.lease.as_ref().is_none_or(|lease| lease.expired).then_some(Tone::Bad);
        styled(&format!("\n{}\n", paint(expired, &lease(plane))))?;
    }
    output::print(&agents(&report.agents, wide))?;
    line("")?;
    if report.agents.iter().any(|agent| !agent.last_errors.is_empty()) {
        output::print(&errors(&report.agents, Timestamp::now()))?;
        line("")?;
    }
    if report.pods.is_empty() {
        return line("no meshed pods: annotate a namespace with linkerd.io/inject=enabled, and recreate its pods");
    }
    output::print(&pods(&report.pods, wide))
}

fn components(plane: &ControlPlane) -> Table {
    let mut rows = table(["COMPONENT", "READY", "VERSION"]);
    for component in &plane.components {
        rows.add_row([
            component.name.clone(),
            format!("{}/{}", component.ready, component.total),
            or_nothing(&component.versions.join(",")),
        ]);
    }
    rows
}

fn lease(plane: &ControlPlane) -> String {
    let Some(lease) = &plane.lease else { return format!("no lease in namespace {}", plane.namespace) };
    let age = lease.renewed_seconds_ago.map_or_else(String::new, |seconds| format!(", renewed {seconds}s ago"));
    let expired = if lease.expired { ", expired" } else { "" };
    let holder = lease.holder.as_deref().unwrap_or("nobody");
    format!("lease {}: {holder}{age}{expired}", lease.name)
}

fn agents(agents: &[AgentRow], wide: bool) -> Table {
    let mut names = vec!["NODE", "AGENT", "PROGRAMS", "ENROLLED", "PENDING", "REFUSED", "ATTACHED-TO"];
    if wide {
        names.extend(["POD", "EVENTS-DROPPED", "FLOW-MISSES", "BIND-FAILURES", "LISTENERS-LOST", "ADMISSIONS-REFUSED"]);
    }
    let mut rows = columns(&names);
    for agent in agents {
        let node = or_nothing(&agent.node);
        let counts = [agent.enrolled, agent.pending, agent.refused].map(|count| count.to_string());
        let [enrolled, pending, refused] =
            if agent.error.is_some() { [(); 3].map(|()| NOTHING.to_owned()) } else { counts };
        let version = if agent.error.is_some() { "no answer" } else { agent.version.as_str() };
        let programs: String = agent.programs.chars().take(DIGEST).collect();
        let attached = or_nothing(&agent.attached_to);
        let mut cells = vec![node, or_nothing(version), or_nothing(&programs), enrolled, pending, refused, attached];
        if wide {
            cells.push(or_nothing(&agent.pod));
            let counts = [
                agent.events_dropped,
                agent.flow_misses,
                agent.bind_failures,
                agent.listeners_lost,
                agent.admissions_refused,
            ];
            let known = agent.error.is_none();
            cells.extend(counts.map(|count| if known { count.to_string() } else { NOTHING.to_owned() }));
        }
        rows.add_row(cells);
    }
    rows
}

/// The agents' latest warnings and errors, and their age.
fn errors(agents: &[AgentRow], now: Timestamp) -> Table {
    let mut rows = table(["NODE", "LAST-ERRORS", "LEVEL", "TIMES", "MESSAGE"]);
    for agent in agents {
        for line in &agent.last_errors {
            let ago = u64::try_from(now.as_millisecond()).unwrap_or_default().saturating_sub(line.at_unix_ms) / 1000;
            let (node, times) = (or_nothing(&agent.node), line.times.to_string());
            rows.add_row([node, format!("{ago}s ago"), line.level.clone(), times, line.message.clone()]);
        }
    }
    rows
}

fn pods(pods: &[PodRow], wide: bool) -> Table {
    let mut names = vec!["NAMESPACE", "POD", "STATE", "OUTBOUND", "INBOUND", "RULES", "PROXY", "VERSION", "NODE"];
    if wide {
        names.extend(["STRICT", "LISTENING", "REASON"]);
    }
    let mut rows = columns(&names);
    for pod in pods {
        let mut cells = vec![
            pod.namespace.clone(),
            pod.name.clone(),
            pod.state.label().to_owned(),
            direction(pod, pod.outbound),
            direction(pod, pod.inbound),
            pod.rules_generation.to_string(),
            if pod.proxy_ready { "ready" } else { "not-ready" }.to_owned(),
            or_nothing(&pod.proxy_version),
            or_nothing(&pod.node),
        ];
        if wide {
            cells.extend([yes(pod.strict), yes(pod.listening), or_nothing(&pod.reason)]);
        }
        rows.add_row(cells);
    }
    rows
}

/// A direction of a pod: whether it is redirected, or would be.
fn direction(pod: &PodRow, in_force: bool) -> String {
    if in_force && pod.bypassed { "bypassed".to_owned() } else { yes(in_force) }
}

#[cfg(test)]
mod tests {
    use weft_proto::agent::PodState;

    use super::{
        super::{
            report::tests::{agent, enrolled, mesh, meshed, now, status},
            rows::LogRow,
        },
        *,
    };

    #[test]
    fn every_row_has_every_cell() {
        let agents_of_mesh = vec![
            agent("a", Ok(status(vec![enrolled("web-0", PodState::Enrolled, "")]))),
            agent("b", Err("refused".into())),
        ];
        let report = Report::of_cluster(&mesh(agents_of_mesh, vec![meshed("web-0", "a", true)]), &[], now());
        let text = agents(&report.agents, false).trim_fmt();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[1].split_whitespace().collect::<Vec<_>>(), ["a", "0.1.0", "abc", "1", "0", "0", "-"]);
        assert!(lines[2].starts_with("b     no answer"), "{text}");
        let complaint = LogRow { at_unix_ms: 4_000, level: "warn".into(), message: "no pins".into(), times: 3 };
        let complaining = AgentRow { node: "a".into(), last_errors: vec![complaint], ..AgentRow::default() };
        let text = errors(&[complaining], Timestamp::from_second(64).unwrap()).trim_fmt();
        let cells: Vec<_> = text.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(cells, ["a", "60s", "ago", "warn", "3", "no", "pins"]);
        let text = pods(&report.pods, false).trim_fmt();
        let cells: Vec<_> = text.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(cells, ["shop", "web-0", "enrolled", "yes", "yes", "1", "ready", "0.1.0", "a"]);
        assert!(lease(&report.control_plane.unwrap()).ends_with("linkerd-destination-1, renewed 2s ago"));
    }
    #[test]
    fn wide_adds_what_the_agents_know() {
        let row = enrolled("web-0", PodState::Refused, "skip-outbound-ports: not a port");
        let agents_of_mesh = vec![agent("a", Ok(status(vec![row]))), agent("b", Err("refused".into()))];
        let mut report = Report::of_cluster(&mesh(agents_of_mesh, vec![meshed("web-0", "a", true)]), &[], now());
        report.agents[0].flow_misses = 7;
        let text = agents(&report.agents, true).trim_fmt();
        let cells = |line: usize| text.lines().nth(line).unwrap().split_whitespace().rev().take(5).collect::<Vec<_>>();
        assert_eq!((cells(1), cells(2)), (vec!["0", "0", "0", "7", "0"], vec!["-"; 5]), "{text}");
        let text = pods(&report.pods, true).trim_fmt();
        assert!(text.lines().next().unwrap().ends_with("STRICT  LISTENING  REASON"), "{text}");
        assert!(text.lines().nth(1).unwrap().ends_with("  skip-outbound-ports: not a port"), "{text}");
        assert!(!pods(&report.pods, false).trim_fmt().contains("not a port"));
    }
}
