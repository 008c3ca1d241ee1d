//! `weft sandbox ps` and `list`, and the tables that `run` shares with them.

use anyhow::Result;
use comfy_table::Table;
use weft_sandbox::{
    client::{self, Sandbox},
    config::DEFAULT_NAME,
    state::{PodState, ServiceState, State},
};

use super::{ListArgs, PsArgs};
use crate::output::{self, NOTHING, WideFormat, or_nothing, yes};

pub(super) fn ps(args: &PsArgs) -> Result<()> {
    let state = Sandbox::open(&args.sandbox.name)?.state()?;
    if let Some(data) = args.output.data() {
        return data.print(&state);
    }
    output::print(&pods(&state.pods, args.output == WideFormat::Wide))?;
    if let Some(faults) = faults_below(&state) {
        output::line(&faults)?;
    }
    Ok(())
}

/// What in the manifests does not run, a line each: errors, then objects of kinds that are not used.
pub(super) fn faults(state: &State) -> Vec<String> {
    let errors = state.manifest_errors.iter().map(|error| format!("manifest {error}"));
    let ignored = state.ignored_manifests.iter().map(|ignored| format!("ignored  {ignored}"));
    errors.chain(ignored).collect()
}

/// [`faults`] as a paragraph of its own, if there are any.
pub(super) fn faults_below(state: &State) -> Option<String> {
    let faults = faults(state);
    (!faults.is_empty()).then(|| format!("\n{}", faults.join("\n")))
}

pub(super) fn list(args: &ListArgs) -> Result<()> {
    let states = client::list()?;
    if let Some(data) = args.output.data() {
        return data.print(&states);
    }
    if states.is_empty() {
        output::note("no sandbox runs here; start one with `weft sandbox run DIR`");
        return Ok(());
    }
    let mut table = output::table(["NAME", "PODS", "INTERCEPTION", "PID", "MANIFESTS"]);
    for state in &states {
        table.add_row([
            state.config.name.clone(),
            format!("{}/{}", state.pods.iter().filter(|pod| pod.ready).count(), state.pods.len()),
            state.config.interception.to_string(),
            state.daemon_pid.to_string(),
            state.config.manifests.display().to_string(),
        ]);
    }
    output::print(&table)?;
    Ok(())
}

/// The output when a sandbox becomes ready: its parts, and commands to use it.
pub(super) fn overview(state: &State) -> Result<()> {
    output::print(&pods(&state.pods, false))?;
    if !state.services.is_empty() {
        output::line("")?;
        output::print(&services(&state.services))?;
    }
    output::line(&format!("\n{}", hints(state)))?;
    Ok(())
}

/// `wide`: also every address, and what a pod belongs to and consists of.
fn pods(pods: &[PodState], wide: bool) -> Table {
    let mut names = vec!["NAMESPACE", "NAME", "READY", "MESHED", "RESTARTS", "IP", "STATUS"];
    if wide {
        names.splice(6..6, ["OTHER-IPS", "OWNER", "SERVICE-ACCOUNT", "CONTAINERS"]);
    }
    let mut table = output::columns(&names);
    for pod in pods {
        let restarts: u32 = pod.containers.iter().map(|container| container.restarts).sum();
        let mut cells = vec![
            pod.namespace.clone(),
            pod.name.clone(),
            yes(pod.ready),
            yes(pod.meshed),
            restarts.to_string(),
            pod.ips.first().map_or_else(|| NOTHING.to_owned(), ToString::to_string),
        ];
        if wide {
            let ips: Vec<_> = pod.ips.iter().skip(1).map(ToString::to_string).collect();
            let owner = pod.owners.first().map(|(kind, name)| format!("{kind}/{name}"));
            let containers: Vec<_> = pod.containers.iter().map(|container| container.name.as_str()).collect();
            cells.extend([
                or_nothing(&ips.join(",")),
                owner.unwrap_or_else(|| NOTHING.to_owned()),
                pod.service_account.clone(),
                or_nothing(&containers.join(",")),
            ]);
        }
        cells.push(status(pod));
        table.add_row(cells);
    }
    table
}

fn services(services: &[ServiceState]) -> Table {
    let mut table = output::table(["NAMESPACE", "SERVICE", "CLUSTER-IP", "PORTS", "ENDPOINTS"]);
    for service in services {
        table.add_row([
            service.namespace.clone(),
            service.name.clone(),
            service.cluster_ip.map_or_else(|| "None".to_owned(), |ip| ip.to_string()),
            or_nothing(&service.ports.join(",")),
            service.endpoints.to_string(),
        ]);
    }
    table
}

fn status(pod: &PodState) -> String {
    match (pod.ready, pod.message.as_str()) {
        (true, "") => "running".to_owned(),
        (false, "") => "starting".to_owned(),
        (_, message) => message.to_owned(),
    }
}

/// Commands to paste: with a pod that exists, and the sandbox's name unless it is the default.
fn hints(state: &State) -> String {
    let name = &state.config.name;
    let named = if name == DEFAULT_NAME { String::new() } else { format!(" --sandbox {name}") };
    let users = state.pods.iter().find(|pod| pod.namespace != weft_sandbox::config::CONTROL_NAMESPACE);
    let pod = users.map_or_else(|| "POD".to_owned(), |pod| format!("{}/{}", pod.namespace, pod.name));
    let mut hints = vec![
        format!("enter a pod  weft sandbox exec{named} {pod} -- sh"),
        format!("its output   weft sandbox logs{named} {pod}"),
    ];
    if state.agent_socket.is_some() {
        hints.push(format!("redirects    weft trace{named}"));
    }
    hints.push(format!("end it       weft sandbox stop{named}"));
    hints.join("\n")
}

#[cfg(test)]
mod tests {
    use super::{
        super::fixture::{pod, state},
        *,
    };

    #[test]
    fn a_pod_that_is_not_ready_says_why() {
        let rows = pods(&[pod(true, ""), pod(false, "waiting for its sidecar")], false).trim_fmt();
        let lines: Vec<&str> = rows.lines().collect();
        assert!(lines[1].ends_with("10.244.0.10  running"), "{rows}");
        assert!(lines[2].ends_with("10.244.0.10  waiting for its sidecar"), "{rows}");
    }

    #[test]
    fn what_does_not_run_is_below_the_tables_and_in_json() {
        let mut state = state("default", vec![pod(true, "")]);
        assert_eq!(faults_below(&state), None);
        state.ignored_manifests.push("b.yaml:1: CronJob j: Weft does not use this kind".to_owned());
        state.manifest_errors.push("a.yaml:3: Deployment shop/web: spec.replicas: expected a number".to_owned());
        let expected = "\nmanifest a.yaml:3: Deployment shop/web: spec.replicas: expected a number\n\
                        ignored  b.yaml:1: CronJob j: Weft does not use this kind";
        assert_eq!(faults_below(&state).as_deref(), Some(expected));
        let json = serde_json::to_value(&state).unwrap();
        assert_eq!(json["ignored_manifests"][0], state.ignored_manifests[0].as_str());
        assert_eq!(json["manifest_errors"][0], state.manifest_errors[0].as_str());
        let mut of_an_older_daemon = json;
        of_an_older_daemon.as_object_mut().unwrap().remove("ignored_manifests");
        assert!(serde_json::from_value::<State>(of_an_older_daemon).unwrap().ignored_manifests.is_empty());
    }

    #[test]
    fn wide_says_what_a_pod_belongs_to() {
        let mut owned = pod(true, "");
        owned.ips.push("fd00:10:244::a".parse().unwrap());
        owned.owners = vec![("replicaset".into(), "web-1".into()), ("deployment".into(), "web".into())];
        let rows = pods(&[owned, pod(true, "")], true).trim_fmt();
        let cells = |line: usize| rows.lines().nth(line).unwrap().split_whitespace().skip(5).collect::<Vec<_>>();
        let heading = ["IP", "OTHER-IPS", "OWNER", "SERVICE-ACCOUNT", "CONTAINERS", "STATUS"];
        assert_eq!(cells(0), heading, "{rows}");
        assert_eq!(cells(1), ["10.244.0.10", "fd00:10:244::a", "replicaset/web-1", "default", "-", "running"]);
        assert_eq!(cells(2), ["10.244.0.10", "-", "-", "default", "-", "running"]);
    }

    #[test]
    fn hints_name_the_sandbox_only_where_needed() {
        let with_agent = |state: State| State { agent_socket: Some("/run/weft/agent.sock".into()), ..state };
        assert!(hints(&with_agent(state("default", vec![pod(true, "")]))).contains("exec shop/web-0 --"));
        let other = hints(&with_agent(state("other", Vec::new())));
        assert!(other.contains("exec --sandbox other POD") && other.contains("trace --sandbox other"), "{other}");
    }
}
