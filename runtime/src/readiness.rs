//! Readiness of the process: it is ready when every gate is open.
//!
//! A component takes a gate by name at start and opens it when it can serve; `/ready` lists the gates that are still
//! shut.

use std::sync::Arc;

use parking_lot::Mutex;

/// The process's readiness. Clones share the gates.
#[derive(Clone, Debug, Default)]
pub struct Readiness {
    gates: Arc<Mutex<Vec<State>>>,
}

#[derive(Debug)]
struct State {
    name: &'static str,
    open: bool,
    reason: Option<String>,
}

/// The gate of one component. Clones are the same gate.
#[derive(Clone, Debug)]
pub struct Gate {
    readiness: Readiness,
    index: usize,
}

impl Readiness {
    /// Creates a readiness without gates, which is ready until a gate is added.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a gate, shut. Take all gates before the admin server starts, or the process is ready too early.
    #[must_use]
    pub fn gate(&self, name: &'static str) -> Gate {
        let mut gates = self.gates.lock();
        gates.push(State { name, open: false, reason: None });
        Gate { readiness: self.clone(), index: gates.len() - 1 }
    }

    /// The gates that are shut, each with its component's reason; empty means ready.
    #[must_use]
    pub fn reasons(&self) -> Vec<String> {
        let reason = |gate: &State| match &gate.reason {
            Some(reason) => format!("{}: {reason}", gate.name),
            None => gate.name.to_owned(),
        };
        self.gates.lock().iter().filter(|gate| !gate.open).map(reason).collect()
    }
}

impl Gate {
    /// Declares that the component can serve.
    pub fn open(&self) {
        self.set(true);
    }

    /// Declares that the component can no longer serve.
    pub fn close(&self) {
        self.set(false);
    }

    /// Whether the component can serve.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.readiness.gates.lock()[self.index].open
    }

    /// Sets the reason why the component cannot serve, for `/ready`. Opening the gate clears it.
    pub fn explain(&self, reason: impl Into<String>) {
        self.readiness.gates.lock()[self.index].reason = Some(reason.into());
    }

    fn set(&self, open: bool) {
        let gate = &mut self.readiness.gates.lock()[self.index];
        gate.open = open;
        if open {
            gate.reason = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_only_when_every_gate_is_open() {
        let readiness = Readiness::new();
        assert!(readiness.reasons().is_empty());
        let (identity, redirect) = (readiness.gate("identity"), readiness.gate("redirect"));
        identity.open();
        assert_eq!(readiness.reasons(), ["redirect"]);
        redirect.open();
        assert!(readiness.reasons().is_empty());
        identity.close();
        assert!(redirect.is_open() && !identity.is_open());
        assert_eq!(readiness.reasons(), ["identity"]);
        identity.explain("no issuer");
        assert_eq!(readiness.reasons(), ["identity: no issuer"]);
        identity.open();
        identity.close();
        assert_eq!(readiness.reasons(), ["identity"]);
    }
}
