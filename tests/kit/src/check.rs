//! For test programs with a `main` of their own, because they start themselves again as other processes. libtest-mimic
//! runs the tests, so that filters, `--list` and the output are those of libtest.

use std::{
    cell::RefCell,
    panic::{self, AssertUnwindSafe},
    sync::Once,
};

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

#[cfg(test)]
mod tests {
    use super::*;

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
