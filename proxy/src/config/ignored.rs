//! Linkerd's variables, and which of them mean nothing to this proxy.

/// Linkerd's variables: name, value that the line is about, state, note.
const LINKERD: &str = include_str!("linkerd.txt");

/// How this proxy treats one of Linkerd's variables.
pub(super) struct Treated {
    /// Without its prefix.
    pub(super) name: &'static str,
    /// The value that this is about; empty means any.
    pub(super) value: &'static str,
    /// `works` or `no meaning here`.
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
