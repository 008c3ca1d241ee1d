//! Servers of one namespace, by name and by what they select.

use std::{collections::HashMap, sync::Arc};

use super::{pairs::Selectors, records::ServerRecord, selectable::Selectable};

/// Servers of one namespace.
#[derive(Default)]
pub(super) struct Servers {
    by_name: HashMap<String, Arc<ServerRecord>>,
    of_pods: Selectors,
    of_externals: Selectors,
}

impl Servers {
    /// Adds or replaces a Server; returns the one that it replaces.
    pub(super) fn insert(&mut self, server: Arc<ServerRecord>) -> Option<Arc<ServerRecord>> {
        let (name, spec) = (&server.key.name, &server.spec);
        self.of_pods.insert(name, spec.pod_selector.as_ref());
        self.of_externals.insert(name, spec.external_workload_selector.as_ref());
        self.by_name.insert(name.clone(), server)
    }

    pub(super) fn get(&self, name: &str) -> Option<&Arc<ServerRecord>> {
        self.by_name.get(name)
    }

    /// All of them, in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Arc<ServerRecord>> {
        self.by_name.values()
    }

    pub(super) fn remove(&mut self, name: &str) -> Option<Arc<ServerRecord>> {
        self.of_pods.remove(name);
        self.of_externals.remove(name);
        self.by_name.remove(name)
    }

    /// Servers that select a workload, whatever the port.
    pub(super) fn selecting<'a>(&'a self, selectable: Selectable<'a>) -> impl Iterator<Item = &'a Arc<ServerRecord>> {
        let selectors = match selectable {
            Selectable::Pod(_) => &self.of_pods,
            Selectable::External(_) => &self.of_externals,
        };
        let candidates = selectors.candidates(selectable.labels()).filter_map(|name| self.by_name.get(name));
        candidates.filter(move |server| selectable.is_selected_by(server))
    }
}
