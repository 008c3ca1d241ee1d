//! Linkerd's variables, and which of them this proxy does not act on, so that the log can name those that are set.

use super::env::{Env, PREFIX};

/// Linkerd's variables: name, value that the line is about, state, note.
const LINKERD: &str = include_str!("linkerd.txt");

/// How this proxy treats one of Linkerd's variables.
pub(super) struct Treated {
    /// Without its prefix.
    pub(super) name: &'static str,
    /// The value that this is about; empty means any.
    pub(super) value: &'static str,
    /// `works`, `no meaning here` or `not supported yet`.
    pub(super) state: &'static str,
    /// The reason, or its effect; may be empty.
    pub(super) note: &'static str,
}

/// Every variable of linkerd2-proxy.
pub(super) fn treated() -> impl Iterator<Item = Treated> {
    LINKERD.lines().filter(|line| !line.starts_with('#')).filter_map(|line| {
        let mut columns = line.split('\t');
        let mut next = || columns.next();
        Some(Treated { name: next()?, value: next()?, state: next()?, note: next().unwrap_or_default() })
    })
}

/// The full names of those that are set and not supported, except to `false`, which is what this proxy does anyway.
pub(super) fn set_without_effect(env: &Env<'_>) -> Vec<String> {
    let is_set = |row: &Treated| {
        let set = env.string(row.name);
        set.is_some_and(|set| match row.value {
            "" => !set.trim().eq_ignore_ascii_case("false"),
            wanted => set.split(',').any(|part| part.trim() == wanted),
        })
    };
    let unsupported = treated().filter(|row| row.state == "not supported yet");
    let mut names: Vec<_> = unsupported.filter(is_set).map(|row| format!("{PREFIX}{}", row.name)).collect();
    names.sort_unstable();
    names
}
