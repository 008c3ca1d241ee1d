//! How much one caller, and all callers together, may ask at a time.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;
use tonic::Status;

/// The most requests at a time: of one caller, such as a dashboard that asks for all its parts, and of all.
const REQUESTS: Bounds = Bounds { caller: 16, all: 256 };
/// The most taps at a time. Each has a connection to every proxy that it is about.
const TAPS: Bounds = Bounds { caller: 4, all: 32 };

#[derive(Clone, Copy, Debug)]
struct Bounds {
    caller: usize,
    all: usize,
}

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Use {
    /// A request with one answer.
    Request,
    /// An open tap.
    Tap,
}

impl Use {
    fn bounds(self) -> Bounds {
        match self {
            Self::Request => REQUESTS,
            Self::Tap => TAPS,
        }
    }

    fn plural(self) -> &'static str {
        match self {
            Self::Request => "requests",
            Self::Tap => "taps",
        }
    }
}

/// What callers use now; clones share it. A caller without any use has no entry, so there are at most as many as uses.
#[derive(Clone, Debug, Default)]
pub(crate) struct InUse(Arc<Mutex<HashMap<Use, HashMap<String, usize>>>>);

/// One use, which ends when it is dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    used: InUse,
    what: Use,
    user: String,
}

impl InUse {
    /// Begins a use.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED when the caller, or all callers together, have the most already.
    pub(crate) fn begin(&self, what: Use, user: &str) -> Result<Permit, Status> {
        let mut used = self.0.lock();
        let users = used.entry(what).or_default();
        let (bounds, plural) = (what.bounds(), what.plural());
        if users.get(user).is_some_and(|count| *count >= bounds.caller) {
            return Err(Status::resource_exhausted(format!(
                "{user} has {} {plural} in progress, the maximum",
                bounds.caller
            )));
        }
        if users.values().sum::<usize>() >= bounds.all {
            return Err(Status::resource_exhausted(format!(
                "there are {} {plural} in progress, the maximum",
                bounds.all
            )));
        }
        *users.entry(user.to_owned()).or_default() += 1;
        Ok(Permit { used: self.clone(), what, user: user.to_owned() })
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut used = self.used.0.lock();
        let Some(users) = used.get_mut(&self.what) else { return };
        if let Some(count) = users.get_mut(&self.user) {
            *count -= 1;
            if *count == 0 {
                users.remove(&self.user);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_and_all_callers_are_bounded() {
        let used = InUse::default();
        let mut permits: Vec<_> = (0..TAPS.caller).map(|_| used.begin(Use::Tap, "jane").unwrap()).collect();
        assert_eq!(used.begin(Use::Tap, "jane").unwrap_err().code(), tonic::Code::ResourceExhausted);
        let request = used.begin(Use::Request, "jane").unwrap();
        permits.pop();
        permits.push(used.begin(Use::Tap, "jane").unwrap());
        for number in permits.len()..TAPS.all {
            permits.push(used.begin(Use::Tap, &number.to_string()).unwrap());
        }
        assert_eq!(used.begin(Use::Tap, "joe").unwrap_err().code(), tonic::Code::ResourceExhausted);
        drop((permits, request));
        assert!(used.0.lock().values().all(HashMap::is_empty), "nothing stays");
    }
}
