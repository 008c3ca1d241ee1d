//! Waits until an optional kind is installed.

use std::{pin::pin, time::Duration};

use futures::StreamExt;
use kube::{
    Api, Client,
    core::{ApiResource, DynamicObject, PartialObjectMeta},
    runtime::watcher::{self, Config, Event},
};

use super::kinds::Watched;
use crate::api::explain_watch;

/// Wait before the next attempt if definitions cannot be watched.
const RETRY: Duration = Duration::from_secs(30);

/// Returns when the definition of a kind exists, or when it is time to look whether it does. Nothing is polled while
/// the definition can be watched.
pub(super) async fn installed(client: &Client, kind: Watched) {
    let resource = ApiResource {
        group: "apiextensions.k8s.io".to_owned(),
        version: "v1".to_owned(),
        api_version: "apiextensions.k8s.io/v1".to_owned(),
        kind: "CustomResourceDefinition".to_owned(),
        plural: "customresourcedefinitions".to_owned(),
    };
    let name = format!("{}.{}", kind.plural, kind.kind.group());
    let api = Api::<PartialObjectMeta<DynamicObject>>::all_with(client.clone(), &resource);
    let mut events = pin!(watcher::watcher(api, Config::default().fields(&format!("metadata.name={name}"))));
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::InitApply(_) | Event::Apply(_)) => return,
            Ok(Event::Init | Event::InitDone | Event::Delete(_)) => {}
            Err(error) => {
                tracing::debug!(definition = name, error = explain_watch(&error), "definition cannot be watched");
                return tokio::time::sleep(RETRY).await;
            }
        }
    }
}
