//! The limit on open files and sockets of the process.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit on open files (`RLIMIT_NOFILE`) to the hard limit, as Go's runtime does: the soft limit is
/// 1,024 on most systems, for programs that use select(2). Returns the limit now in force; `None` means no limit.
///
/// # Errors
/// When the system refuses; the old limit stays.
pub fn raise_limit() -> std::io::Result<Option<u64>> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum {
        setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?;
    }
    Ok(maximum)
}

/// The soft limit, which is in force; `None` means no limit.
#[must_use]
pub fn limit() -> Option<u64> {
    getrlimit(Resource::Nofile).current
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_becomes_the_hard_one() {
        let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
        // Only by one, because other tests run in the same process.
        let lowered = Rlimit { current: maximum.map(|maximum| maximum - 1), maximum };
        setrlimit(Resource::Nofile, lowered).unwrap();
        assert_eq!(raise_limit().unwrap(), maximum);
        assert_eq!(limit(), maximum);
        assert_eq!(raise_limit().unwrap(), maximum, "nothing is left to raise");
    }
}
