//! The truth table of interception: one table of cases, each run behind linkerd-init's iptables rules and behind the
//! agent, with the real kernel. A test is a cell of the table: `O7 connect to 0.0.0.0 [iptables]`. The cells of a
//! column share its fixtures; cells of one fixture run one after the other, those of others beside them.
//!
//! Needs root, cgroup2, iproute2, iptables and nsenter, and fails without them. `WEFT_BLESS=1` writes the table into
//! the page about interception, if all of it holds.

#![expect(clippy::print_stderr, reason = "a test program without libtest reports by itself")]
#![expect(clippy::unwrap_used, reason = "a test ends where its expectation does")]

mod case;
mod cases;
mod check;
mod client;
mod document;
mod fixture;
mod linkerd_init;
mod raw;
mod server;
mod trace;

use std::{
    process::ExitCode,
    sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError},
};

use libtest_mimic::{Arguments, Failed, Trial};
use weft_test_kit::{check::catch, pod};

use crate::{
    case::Case,
    client::Client,
    fixture::{Column, Fixture},
};

const AGENT: &str = env!("CARGO_BIN_EXE_weft-agent");

/// The fixtures of a column. Cells wait for timers of TCP more than they compute.
const FIXTURES: usize = 2;

/// A fixture of a column, made by the first cell that runs in it.
#[derive(Default)]
struct Shared {
    fixture: Option<Fixture>,
    /// The reason why it cannot be created; another attempt would only take time.
    broken: Option<String>,
}

type Columns = Arc<[[Mutex<Shared>; FIXTURES]; 2]>;

fn main() -> ExitCode {
    let mut client = Client::default();
    if let Some(code) = pod::run_if_requested(|words| client.answer(words)) {
        return code;
    }
    let columns = Columns::default();
    let cells = cases::all().flat_map(|case| Column::ALL.map(|column| trial(&columns, column, case)));
    let mut trials: Vec<Trial> = cells.collect();
    trials.push(Trial::test("every row of the tables is there", || match &document::missing_rows()[..] {
        [] => Ok(()),
        missing => Err(format!("no case and no place of another proof, or both: {missing:?}").into()),
    }));
    let bless = std::env::var_os("WEFT_BLESS").is_some_and(|value| value == "1");
    trials.push(Trial::test(
        "the document shows this table",
        move || {
            if bless { Ok(()) } else { Ok(document::check()?) }
        },
    ));
    let all = trials.len() as u64;
    let arguments = Arguments::from_args();
    let at_once = Column::ALL.len() * FIXTURES;
    let test_threads = arguments.test_threads.map_or(at_once, |threads| threads.min(at_once));
    let conclusion = libtest_mimic::run(&Arguments { test_threads: Some(test_threads), ..arguments }, trials);
    // Namespaces and the like are removed before the process ends.
    drop(columns);
    if bless && conclusion.num_passed == all {
        if let Err(error) = document::write() {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    } else if bless {
        eprintln!("nothing is written: only a run in which every row holds may be written down");
        return ExitCode::FAILURE;
    }
    conclusion.exit_code()
}

/// One cell.
fn trial(columns: &Columns, column: Column, case: &'static Case) -> Trial {
    let columns = Arc::clone(columns);
    Trial::test(format!("{} {} [{}]", case.ids[0], case.what, column.label()), move || {
        free(&columns[column as usize]).run(column, case).map_err(Failed::from)
    })
}

/// A fixture that no other cell uses, or else the first one when it is free.
fn free(fixtures: &[Mutex<Shared>]) -> MutexGuard<'_, Shared> {
    let unused = fixtures.iter().find_map(|fixture| match fixture.try_lock() {
        Ok(shared) => Some(shared),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    });
    unused.unwrap_or_else(|| fixtures[0].lock().unwrap_or_else(PoisonError::into_inner))
}

impl Shared {
    /// Runs a case and checks its outcome.
    fn run(&mut self, column: Column, case: &'static Case) -> Result<(), String> {
        if let Some(reason) = &self.broken {
            return Err(reason.clone());
        }
        if self.fixture.is_none() {
            let made = catch(|| Fixture::new(column));
            if made.is_err() {
                self.broken = Some("there is no fixture for it, see the first failure of this column".into());
            }
            self.fixture = Some(made?);
        }
        let Some(fixture) = &mut self.fixture else { unreachable!("made above") };
        match catch(|| check::check(case, column, &fixture.run(case))) {
            Ok(outcome) => outcome,
            Err(panic) => {
                let log = fixture.agent_log();
                // Its state is unknown, so the next cell gets a new one.
                self.fixture = None;
                Err(format!("{panic}\nthe agent's log:\n{log}"))
            }
        }
    }
}
