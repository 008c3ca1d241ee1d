//! The injector's settings: Helm values and trust anchors, read from files and again when they change.
//!
//! Unreadable files leave the last good settings in force. Until there are some, the injector is not ready.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use k8s_openapi::api::core::v1::ObjectReference;
use notify::RecursiveMode;
use parking_lot::RwLock;
use weft_k8s_api::{field::Invalid, inject::InjectConfig, values::Values};
use weft_runtime::readiness::Gate;
use weft_tls::anchors::{AnchorsError, TrustAnchors};

use super::{Current, Sources};
use crate::{
    api::events::Events,
    file_changes::{self, FileChanges},
};

/// The files of a volume change one by one; reading waits until the directories have been quiet for this long.
const QUIET: Duration = Duration::from_millis(100);

/// The settings in force; clones share them.
#[derive(Clone, Default)]
pub(super) struct Settings(Arc<RwLock<Current>>);

impl Settings {
    /// Settings that stay as they are.
    #[cfg(test)]
    pub(super) fn of(config: InjectConfig) -> Self {
        Self(Arc::new(RwLock::new(Some(Arc::new(config)))))
    }

    /// The settings now; `None` before they were read for the first time.
    pub(super) fn get(&self) -> Current {
        self.0.read().clone()
    }
}

/// Why settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum SettingsError {
    #[error("{path}: cannot be read: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path}: {invalid}")]
    Values { path: PathBuf, invalid: Invalid },
    #[error("{path}: {source}")]
    Anchors { path: PathBuf, source: AnchorsError },
}

impl SettingsError {
    /// The ConfigMap from which the chart mounts the file.
    fn config_map(&self, sources: &Sources) -> &'static str {
        let (Self::Read { path, .. } | Self::Values { path, .. } | Self::Anchors { path, .. }) = self;
        if *path == sources.anchors { "linkerd-identity-trust-roots" } else { "linkerd-config" }
    }
}

/// Reads both files.
pub(super) fn load(sources: &Sources) -> Result<InjectConfig, SettingsError> {
    let read =
        |path: &Path| fs::read_to_string(path).map_err(|source| SettingsError::Read { path: path.to_owned(), source });
    let (yaml, anchors) = (read(&sources.values)?, read(&sources.anchors)?);
    if let Err(source) = TrustAnchors::from_pem(&anchors) {
        return Err(SettingsError::Anchors { path: sources.anchors.clone(), source });
    }
    let config = Values::parse(&yaml).and_then(|values| values.inject_config(&sources.namespace, &anchors));
    config.map_err(|invalid| SettingsError::Values { path: sources.values.clone(), invalid })
}

/// Keeps the settings current.
pub(super) async fn reload(sources: Sources, current: Settings, gate: Gate, events: Events) -> anyhow::Result<()> {
    let directories = [&sources.values, &sources.anchors].map(|file| file_changes::directory(file));
    let mut changes = FileChanges::new(directories.into(), RecursiveMode::NonRecursive, QUIET);
    let mut said = None;
    loop {
        apply(&sources, &current, &gate, &events, &mut said);
        changes.wait().await;
    }
}

fn apply(sources: &Sources, current: &Settings, gate: &Gate, events: &Events, said: &mut Option<String>) {
    match load(sources) {
        Ok(config) => {
            let changed = current.get().is_none_or(|known| *known != config);
            if changed {
                tracing::info!(image = config.proxy_image, "injection settings read");
                *current.0.write() = Some(Arc::new(config));
            }
            *said = None;
            gate.open();
        }
        Err(error) => {
            let problem = error.to_string();
            if said.as_ref() == Some(&problem) {
                return;
            }
            let in_force =
                if current.get().is_some() { "the old settings stay in force" } else { "nothing is injected" };
            tracing::error!(%problem, in_force, "injection settings are invalid");
            let config_map = ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("ConfigMap".to_owned()),
                namespace: Some(sources.namespace.clone()),
                name: Some(error.config_map(sources).to_owned()),
                ..ObjectReference::default()
            };
            events.warning("SettingsInvalid", format!("{problem}; {in_force}"), config_map);
            gate.explain(problem.clone());
            *said = Some(problem);
        }
    }
}
