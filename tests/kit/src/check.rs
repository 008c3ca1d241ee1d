//! For test programs with a `main` of their own, because they start themselves again as other processes. libtest-mimic
//! runs the tests, so that filters, `--list` and the output are those of libtest.

use std::{
    cell::RefCell,
    env,
    panic::{self, AssertUnwindSafe},
    sync::Once,
};

use libtest_mimic::{Completion, Failed};

/// Set by `cargo xtask test` for checks in a cluster that it made, which meets every requirement.
const REQUIRE_ALL: &str = "WEFT_TEST_REQUIRE_ALL";

thread_local! {
    /// The location of this thread's panic inside [`catch`].
    static NOTED: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Runs a function that may panic and returns the panic's message and location instead of printing them: the caller
/// reports them, once, with its own information.
///
/// # Errors
/// The panic's message and location.
pub fn catch<T>(act: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let print = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let is_caught = NOTED.with_borrow_mut(|noted| match noted {
                Some(text) => {
                    text.clear();
                    text.push_str(&info.to_string());
                    true
                }
                None => false,
            });
            if !is_caught {
                print(info);
            }
        }));
    });
    let outer = NOTED.replace(Some(String::new()));
    let result = panic::catch_unwind(AssertUnwindSafe(act));
    let noted = NOTED.replace(outer);
    result.map_err(|_| noted.filter(|text| !text.is_empty()).unwrap_or_else(|| "panicked elsewhere".to_owned()))
}

/// Whether a check fails if a requirement is not met, rather than being ignored: `WEFT_TEST_REQUIRE_ALL` is set.
pub fn requires_all() -> bool {
    env::var_os(REQUIRE_ALL).is_some()
}

/// The outcome of a check that is not run, because a requirement is not met: ignored, with the reason.
///
/// # Errors
/// With `requires_all`: the check fails, with the same reason.
pub fn not_run(reason: &str, requires_all: bool) -> Result<Completion, Failed> {
    if requires_all {
        return Err(Failed::from(format!("a requirement is not met: {reason}")));
    }
    Ok(Completion::ignored_with(reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_whose_requirement_is_not_met_is_ignored_or_fails() {
        let reason = "one node is not enough";
        let ignored = not_run(reason, false);
        assert!(matches!(ignored, Ok(Completion::Ignored { reason: Some(said) }) if said == reason));
        let failed = not_run(reason, true);
        assert!(matches!(failed, Err(failed) if failed.message().is_some_and(|said| said.ends_with(reason))));
    }

    #[test]
    fn a_panic_is_told_with_its_place() {
        let caught = catch(|| panic!("because of {}", 7)).map(|()| "nothing");
        let error = caught.unwrap_err();
        assert!(error.contains("check.rs:") && error.contains("because of 7"), "{error}");
        assert_eq!(catch(|| 3), Ok(3));
    }

    #[test]
    fn a_panic_of_an_inner_check_stays_there() {
        let both = catch(|| (catch(|| panic!("inner")).map(|()| 1).is_err(), 2));
        assert_eq!(both, Ok((true, 2)));
    }
}
