//! The source against a real directory.

use std::{fs, path::Path, time::Duration};

use tokio::{sync::mpsc, time::timeout};

use super::*;

/// Longer than a change takes to be seen.
const DEADLINE: Duration = Duration::from_secs(20);

fn account(name: &str) -> String {
    format!("apiVersion: v1\nkind: ServiceAccount\nmetadata: {{name: {name}, namespace: shop}}\n")
}

/// Replaces a file as writers must: under a temporary name first.
fn write(dir: &Path, file: &str, text: &str) {
    let temporary = dir.join(format!(".{}.tmp", file.replace('/', "-")));
    fs::write(&temporary, text).unwrap();
    fs::rename(temporary, dir.join(file)).unwrap();
}

/// Checks the names of events, in order, until as many arrived as are expected.
async fn check(events: &mut mpsc::Receiver<Vec<Event>>, expected: &[&str]) {
    let mut got = Vec::new();
    while got.len() < expected.len() {
        let batch = timeout(DEADLINE, events.recv()).await.unwrap().unwrap();
        got.extend(batch.into_iter().map(|event| match event {
            Event::Apply(object) => format!("+{}", object.reference().name),
            Event::Delete(reference) => format!("-{}", reference.name),
            Event::Synced => "synced".to_owned(),
        }));
    }
    assert_eq!(got, expected);
}

#[tokio::test]
async fn changes_become_events_and_malformed_files_disturb_nobody() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("sub")).unwrap();
    write(dir.path(), "sub/a.yaml", &account("a"));
    write(dir.path(), "bad.yaml", "kind: [\n");
    let (events_tx, mut events) = mpsc::channel(1);
    let source = FileSource::new(dir.path().to_owned()).unwrap();
    let running = tokio::spawn(source.run(events_tx));
    check(&mut events, &["+a", "synced"]).await;
    write(dir.path(), "sub/a.yaml", &format!("{}---\n{}", account("a"), account("b")));
    check(&mut events, &["+b"]).await;
    write(dir.path(), "sub/a.yaml", &format!("{}---\napiVersion: v1\nkind: Service\nmetadata: []\n", account("c")));
    check(&mut events, &["+c"]).await;
    fs::create_dir(dir.path().join("new")).unwrap();
    write(dir.path(), "new/d.json", r#"{"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "d"}}"#);
    check(&mut events, &["+d"]).await;
    fs::remove_file(dir.path().join("sub/a.yaml")).unwrap();
    check(&mut events, &["-a", "-b", "-c"]).await;
    drop(events);
    write(dir.path(), "e.yaml", &account("e"));
    timeout(DEADLINE, running).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn an_empty_directory_is_a_state_and_a_missing_one_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let (events_tx, mut events) = mpsc::channel(1);
    tokio::spawn(FileSource::new(dir.path().to_owned()).unwrap().run(events_tx));
    check(&mut events, &["synced"]).await;
    let error = FileSource::new(dir.path().join("none")).err().unwrap();
    assert!(error.to_string().contains("--dir") && error.to_string().contains("create it"), "{error}");
}
