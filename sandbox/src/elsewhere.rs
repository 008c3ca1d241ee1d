//! The client on systems that have no sandboxes: it finds none, and says why.

use crate::state::State;

/// A sandbox on this host. There is none.
#[derive(Debug)]
pub enum Sandbox {}

/// Why a request to a sandbox failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// There is no such sandbox.
    #[error("no sandbox `{0}` runs here: sandboxes are made of network namespaces and cgroups, which only Linux has")]
    NotFound(String),
}

impl Sandbox {
    /// Finds a running sandbox.
    ///
    /// # Errors
    /// Always.
    pub fn open(name: &str) -> Result<Self, ClientError> {
        Err(ClientError::NotFound(name.to_owned()))
    }

    /// The current state.
    ///
    /// # Errors
    /// Never: there is no such value.
    pub fn state(&self) -> Result<State, ClientError> {
        match *self {}
    }

    /// The environment of a container.
    ///
    /// # Errors
    /// Never: there is no such value.
    pub fn environment(&self, _pod: &str, _container: &str) -> Result<Vec<(String, String)>, ClientError> {
        match *self {}
    }
}
