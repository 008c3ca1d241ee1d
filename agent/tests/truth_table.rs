//! The truth table of interception: one table of cases, each played behind linkerd-init's iptables rules and behind the
//! agent, with the real kernel. A test is a cell of the table: `O7 connect to 0.0.0.0 [iptables]`.
//!
//! Needs root, cgroup2, iproute2, iptables and nsenter, and fails without them. `WEFT_BLESS=1` writes the table into the
//! page about interception, if all of it holds.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a test program without libtest reports by itself")]
#![expect(clippy::allow_attributes, reason = "modules that test programs share are not used whole by each")]
#![expect(clippy::unwrap_used, reason = "a test ends where its expectation does")]

#[expect(dead_code, reason = "the test of the datapath has other commands")]
#[path = "datapath/pod.rs"]
mod pod;
#[expect(dead_code, reason = "the test of the datapath asks more of its world")]
#[path = "datapath/world.rs"]
mod world;

#[path = "truth_table/case.rs"]
mod case;
#[path = "truth_table/cases.rs"]
mod cases;
#[path = "truth_table/check.rs"]
mod check;
#[path = "truth_table/client.rs"]
mod client;
#[path = "truth_table/document.rs"]
mod document;
#[path = "truth_table/init.rs"]
mod init;
#[path = "truth_table/raw.rs"]
mod raw;
#[path = "truth_table/server.rs"]
mod server;
#[path = "truth_table/stage.rs"]
mod stage;
#[path = "truth_table/told.rs"]
mod told;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use libtest_mimic::{Arguments, Failed, Trial};

use crate::{
    case::Case,
    client::Client,
    stage::{Column, Stage},
};

/// What the cells share: they run one after the other.
#[derive(Default)]
struct Theatre {
    stages: [Option<Stage>; 2],
    /// Why there can be none; asking again would only take time.
    broken: [Option<String>; 2],
    green: usize,
    failed: usize,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|argument| argument == pod::SUBCOMMAND) {
        let mut client = Client::default();
        return pod::main(&arguments[1..], |words| client.answer(words));
    }
    let theatre = Arc::new(Mutex::new(Theatre::default()));
    let cells: Vec<_> = Column::ALL.iter().flat_map(|column| cases::all().map(move |case| (*column, case))).collect();
    let all = cells.len();
    let mut trials: Vec<Trial> = cells.into_iter().map(|(column, case)| trial(&theatre, column, case)).collect();
    trials.push(Trial::test("every row of the tables is there", || match &document::missing_rows()[..] {
        [] => Ok(()),
        missing => Err(format!("neither a case nor told where else it is proven, or both: {missing:?}").into()),
    }));
    let shared = Arc::clone(&theatre);
    trials.push(Trial::test("the document shows this table", move || {
        let theatre = shared.lock().unwrap_or_else(PoisonError::into_inner);
        if theatre.failed > 0 {
            return Err(format!("{} cells of the table do not hold", theatre.failed).into());
        }
        Ok(document::check(theatre.green == all)?)
    }));
    let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
    let conclusion = libtest_mimic::run(&arguments, trials);
    // Namespaces and the like go before the process does.
    theatre.lock().unwrap_or_else(PoisonError::into_inner).stages = [None, None];
    conclusion.exit_code()
}

impl Theatre {
    /// Plays a cell of the table; the outer error is a panic.
    fn play(&mut self, column: Column, case: &'static Case) -> thread::Result<Result<(), String>> {
        let at = column as usize;
        if let Some(reason) = &self.broken[at] {
            return Ok(Err(reason.clone()));
        }
        if self.stages[at].is_none() {
            let made = catch_unwind(|| Stage::new(column));
            if made.is_err() {
                self.broken[at] = Some("there is no stage for it, see the first cell of this column".into());
            }
            self.stages[at] = Some(made?);
        }
        let Some(stage) = &mut self.stages[at] else { unreachable!("made above") };
        let played = catch_unwind(AssertUnwindSafe(|| check::check(case, column, &stage.play(case))));
        if played.is_err() {
            eprintln!("{}", stage.agent_log());
            // Whatever state it is in, the next cell gets a new one.
            self.stages[at] = None;
        }
        played
    }
}

/// One cell.
fn trial(theatre: &Arc<Mutex<Theatre>>, column: Column, case: &'static Case) -> Trial {
    let theatre = Arc::clone(theatre);
    Trial::test(format!("{} {} [{}]", case.ids[0], case.what, column.label()), move || {
        let mut theatre = theatre.lock().unwrap_or_else(PoisonError::into_inner);
        let result = match theatre.play(column, case) {
            Ok(result) => result,
            Err(panic) => {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
                Err(text.unwrap_or_default())
            }
        };
        match &result {
            Ok(()) => theatre.green += 1,
            Err(_) => theatre.failed += 1,
        }
        result.map_err(Failed::from)
    })
}
