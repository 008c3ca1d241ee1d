//! Long-lived tasks under supervision: the unexpected end of one ends the process.

use std::future::Future;

use anyhow::{Context, anyhow};
use tokio::task::{Id, JoinSet};

/// The process's long-lived tasks. Dropping it aborts them.
#[derive(Debug, Default)]
pub struct Tasks {
    set: JoinSet<anyhow::Result<()>>,
    names: Vec<(Id, &'static str)>,
}

impl Tasks {
    /// Creates an empty set.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Starts a task that is meant to run until the process ends.
    pub fn spawn<F>(&mut self, name: &'static str, task: F)
    where
        F: Future<Output = anyhow::Result<()>> + Send + 'static,
    {
        let handle = self.set.spawn(task);
        self.names.push((handle.id(), name));
    }

    /// Runs until `shutdown` completes; the tasks continue until the set is dropped.
    ///
    /// # Errors
    /// When a task ends earlier, for any reason: the message names it.
    pub async fn run_until(&mut self, shutdown: impl Future<Output = ()>) -> anyhow::Result<()> {
        tokio::select! {
            () = shutdown => Ok(()),
            Some(ended) = self.set.join_next_with_id() => {
                let id = ended.as_ref().map_or_else(tokio::task::JoinError::id, |(id, _)| *id);
                let name = self.names.iter().find(|(known, _)| *known == id).map_or("unknown", |(_, name)| *name);
                match ended {
                    Ok((_, Ok(()))) => Err(anyhow!("task {name} ended unexpectedly")),
                    Ok((_, Err(error))) => Err(error).with_context(|| format!("task {name} failed")),
                    Err(error) => Err(anyhow!(error)).with_context(|| format!("task {name} panicked")),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_end_of_a_task_is_an_error_that_names_it() {
        let mut tasks = Tasks::new();
        tasks.spawn("forever", std::future::pending());
        tasks.spawn("brief", async { Ok(()) });
        let error = tasks.run_until(std::future::pending()).await.unwrap_err();
        assert!(error.to_string().contains("brief"), "{error}");
    }

    #[tokio::test]
    async fn shutdown_is_no_error() {
        let mut tasks = Tasks::new();
        tasks.spawn("forever", std::future::pending());
        tasks.run_until(std::future::ready(())).await.unwrap();
    }
}
