//! From the contents of files to events. Pure functions.

use std::{
    collections::{BTreeMap, HashSet},
    path::{Path, PathBuf},
    sync::Arc,
};

use weft_k8s_api::manifest::{Object, ObjectRef};

use super::scan::Files;
use weft_index::Event;

/// The state that was last applied.
#[derive(Default)]
pub(super) struct Plan {
    applied: BTreeMap<ObjectRef, Applied>,
}

struct Applied {
    object: Object,
    file: Arc<Path>,
    /// Whether it was read as it is, and is not the strictest reading of a document that was never good.
    is_good: bool,
}

impl Plan {
    /// The events that lead from the last state to this one. New objects come before deletions, so that a Server that
    /// is renamed is replaced without a gap.
    pub(super) fn advance(&mut self, files: &Files) -> Vec<Event> {
        let mut events = Vec::new();
        let mut present = HashSet::new();
        for located in files.values().flat_map(|manifests| &manifests.objects) {
            let reference = located.object.reference();
            if present.contains(&reference) {
                tracing::error!(
                    file = %located.file.display(),
                    line = located.line,
                    object = %reference,
                    "object is defined twice, the first definition counts"
                );
                continue;
            }
            self.apply(&reference, &located.object, &located.file, true, &mut events);
            present.insert(reference);
        }
        let mut damaged: HashSet<PathBuf> = HashSet::new();
        for error in files.values().flat_map(|manifests| &manifests.errors) {
            let Some(reference) = &error.object else {
                // The unreadable document could be any of them, so every object of the file keeps its state.
                damaged.insert(error.file.to_path_buf());
                continue;
            };
            let is_good = self.applied.get(reference).is_some_and(|applied| applied.is_good);
            if !present.insert(reference.clone()) || is_good {
                continue;
            }
            // Never read in a good state: its strictest reading is safer than none, which would be the default policy.
            if let Some(object) = &error.restrictive {
                self.apply(reference, object, &error.file, false, &mut events);
            }
        }
        let kept = |applied: &Applied| damaged.contains(&*applied.file);
        let gone = self.applied.iter().filter(|(reference, applied)| !present.contains(reference) && !kept(applied));
        for reference in gone.map(|(reference, _)| reference.clone()).collect::<Vec<_>>() {
            self.applied.remove(&reference);
            events.push(Event::Delete(reference));
        }
        events
    }

    fn apply(
        &mut self,
        reference: &ObjectRef,
        object: &Object,
        file: &Arc<Path>,
        is_good: bool,
        events: &mut Vec<Event>,
    ) {
        let known = self.applied.get_mut(reference);
        if let Some(applied) = known.filter(|applied| applied.object == *object) {
            (applied.file, applied.is_good) = (file.clone(), is_good);
            return;
        }
        self.applied.insert(reference.clone(), Applied { object: object.clone(), file: file.clone(), is_good });
        events.push(Event::Apply(Box::new(object.clone())));
    }
}

#[cfg(test)]
mod tests {
    use weft_k8s_api::manifest;

    use super::*;

    fn account(name: &str) -> String {
        format!("apiVersion: v1\nkind: ServiceAccount\nmetadata: {{name: {name}, namespace: shop}}\n---\n")
    }

    fn server(access: &str) -> String {
        format!(
            "apiVersion: policy.linkerd.io/v1beta3\nkind: Server\nmetadata: {{name: s, namespace: shop}}\n\
             spec: {{podSelector: {{}}, port: 80, accessPolicy: {access}}}\n---\n"
        )
    }

    /// Names of events, `+` applied and `-` deleted.
    fn check(plan: &mut Plan, files: &[(&str, String)], expected: &str) {
        let read = |file: &str, text: &str| Arc::new(manifest::parse(Path::new(file), text));
        let files = files.iter().map(|(file, text)| (PathBuf::from(file), read(file, text))).collect();
        let events = plan.advance(&files).into_iter().map(|event| match event {
            Event::Apply(object) => format!("+{}", object.reference().name),
            Event::Delete(reference) => format!("-{}", reference.name),
            Event::Synced => "synced".to_owned(),
        });
        assert_eq!(events.collect::<Vec<_>>().join(" "), expected);
    }

    #[test]
    fn follows_files() {
        let mut plan = Plan::default();
        check(&mut plan, &[("1.yaml", account("a") + &account("b"))], "+a +b");
        check(&mut plan, &[("1.yaml", account("a") + &account("b"))], "");
        check(&mut plan, &[("1.yaml", account("a")), ("2.yaml", account("b"))], "");
        check(&mut plan, &[("2.yaml", account("b") + &account("c"))], "+c -a");
        check(&mut plan, &[], "-b -c");
    }

    #[test]
    fn the_first_definition_counts() {
        let mut plan = Plan::default();
        check(&mut plan, &[("1.yaml", server("deny")), ("2.yaml", server("audit"))], "+s");
        check(&mut plan, &[("2.yaml", server("audit"))], "+s");
    }

    #[test]
    fn what_becomes_unreadable_keeps_its_state_and_the_rest_goes_on() {
        let mut plan = Plan::default();
        check(&mut plan, &[("1.yaml", server("deny") + &account("a"))], "+s +a");
        check(&mut plan, &[("1.yaml", server("alow") + &account("b"))], "+b -a");
        check(&mut plan, &[("1.yaml", server("audit") + &account("b"))], "+s");
        check(&mut plan, &[("1.yaml", "kind: [\n---\n".to_owned() + &account("c"))], "+c");
        check(&mut plan, &[("1.yaml", account("c"))], "-b -s");
    }

    #[test]
    fn a_server_that_was_never_readable_is_applied_for_its_denial() {
        check(&mut Plan::default(), &[("1.yaml", server("alow"))], "+s");
        let mut plan = Plan::default();
        let on = |port: &str| server("alow").replace("port: 80", &format!("port: {port}"));
        check(&mut plan, &[("1.yaml", on("[]"))], "+s");
        // Until it can be read, the newest version counts.
        check(&mut plan, &[("1.yaml", on("80"))], "+s");
        check(&mut plan, &[("1.yaml", on("80"))], "");
        check(&mut plan, &[("1.yaml", on("90"))], "+s");
        check(&mut plan, &[("1.yaml", server("deny"))], "+s");
        check(&mut plan, &[("1.yaml", on("90"))], "");
        check(&mut plan, &[("1.yaml", on("80800"))], "");
        check(&mut plan, &[], "-s");
    }
}
