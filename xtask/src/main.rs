//! The program of `cargo xtask`.

use std::process::ExitCode;

fn main() -> ExitCode {
    weft_xtask::main()
}
