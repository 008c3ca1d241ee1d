//! Variables of linkerd2-proxy that are not supported yet, so that the log can name those that are set.

use super::env::Env;

/// Names without their prefix, each with the value that the line concerns, if it concerns one.
const UNSUPPORTED: &str = include_str!("unsupported.txt");

/// The full names of those that are set, except to `false`, which is what this proxy does anyway.
pub(super) fn set_without_effect(env: &Env<'_>) -> Vec<String> {
    let lines = UNSUPPORTED.lines().filter(|line| !line.starts_with('#'));
    let rows = lines.map(|line| line.split_once(' ').map_or((line, None), |(name, value)| (name, Some(value))));
    let is_set = |(name, wanted): &(&str, Option<&str>)| {
        let set = env.string(name);
        set.is_some_and(|set| match wanted {
            Some(wanted) => set.split(',').any(|part| part.trim() == *wanted),
            None => !set.trim().eq_ignore_ascii_case("false"),
        })
    };
    rows.filter(is_set).map(|(name, _)| format!("LINKERD2_PROXY_{name}")).collect()
}
