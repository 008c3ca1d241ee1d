//! Connection states of the nodes' agents, so that every change is reported once.

use std::collections::BTreeMap;

use anyhow::{Result, bail};

use super::Source;
use crate::output::note;

/// The state of each node's agent.
#[derive(Default)]
pub(super) struct Nodes {
    /// `None` until the initial agents are known.
    nodes: Option<BTreeMap<String, Node>>,
}

struct Node {
    /// The agent that was connected last.
    pod: String,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Has not answered yet.
    Awaited,
    Connected,
    Lost,
}

impl Nodes {
    pub(super) fn begun(&self) -> bool {
        self.nodes.is_some()
    }

    /// # Errors
    /// When there is no agent.
    pub(super) fn begin(&mut self, agents: Vec<Source>, namespace: &str) -> Result<()> {
        if agents.is_empty() {
            bail!(
                "no agent runs in namespace {namespace}: `weft check` says why, -L names another control plane's namespace"
            );
        }
        let nodes = self.nodes.get_or_insert_default();
        for Source { node, pod } in agents {
            nodes.entry(node).or_insert(Node { pod, state: State::Awaited });
        }
        Ok(())
    }

    pub(super) fn connected(&mut self, source: &Source) {
        note(&self.connection_note(source));
    }

    pub(super) fn gone(&mut self, source: &Source, why: &str) {
        if let Some(text) = self.loss_note(source, why) {
            note(&text);
        }
    }

    fn connection_note(&mut self, source: &Source) -> String {
        let nodes = self.nodes.get_or_insert_default();
        let before = nodes.insert(source.node.clone(), Node { pod: source.pod.clone(), state: State::Connected });
        match before.map(|before| before.state) {
            Some(State::Lost | State::Connected) => {
                format!("an agent on {} answers again; what happened between is not shown", source.node)
            }
            Some(State::Awaited) | None => {
                let connected = nodes.values().filter(|node| node.state == State::Connected).count();
                format!("listening on {} ({connected} of {} nodes)", source.node, nodes.len())
            }
        }
    }

    /// `None` if the loss was reported already, or if the successor already answers.
    fn loss_note(&mut self, source: &Source, why: &str) -> Option<String> {
        let nodes = self.nodes.get_or_insert_default();
        let lost = Node { pod: source.pod.clone(), state: State::Lost };
        let node = &source.node;
        match nodes.get_mut(node) {
            Some(known) if known.pod != source.pod && known.state == State::Connected => None,
            Some(known) => match std::mem::replace(known, lost).state {
                State::Connected => Some(format!("the agent on {node} went away ({why}); waiting for the next")),
                State::Awaited => Some(format!("the agent on {node} does not answer: {why}; trying again")),
                State::Lost => None,
            },
            None => {
                nodes.insert(node.clone(), lost);
                Some(format!("the agent on {node} does not answer: {why}; trying again"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(pod: &str) -> Source {
        Source { node: "a".to_owned(), pod: pod.to_owned() }
    }

    fn nodes() -> Nodes {
        let mut nodes = Nodes::default();
        nodes.begin(vec![source("1"), Source { node: "b".to_owned(), pod: "2".to_owned() }], "linkerd").unwrap();
        nodes
    }

    #[test]
    fn a_cluster_without_agents_is_an_error_that_names_the_namespace() {
        let error = Nodes::default().begin(Vec::new(), "mesh").unwrap_err().to_string();
        assert!(error.contains("namespace mesh") && error.contains("weft check"), "{error}");
    }

    #[test]
    fn a_loss_is_reported_once_and_so_is_the_return() {
        let mut nodes = nodes();
        assert_eq!(nodes.connection_note(&source("1")), "listening on a (1 of 2 nodes)");
        assert!(nodes.loss_note(&source("1"), "it ended").unwrap().contains("went away (it ended)"));
        assert_eq!(nodes.loss_note(&source("1"), "connection refused"), None);
        assert!(nodes.connection_note(&source("3")).contains("answers again"));
    }

    #[test]
    fn the_end_of_an_agent_is_no_loss_once_its_successor_answers() {
        let mut nodes = nodes();
        nodes.connection_note(&source("1"));
        assert!(nodes.connection_note(&source("3")).contains("answers again"));
        assert_eq!(nodes.loss_note(&source("1"), "its pod is gone"), None);
    }
}
