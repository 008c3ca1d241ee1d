//! `weft-viz`: golden metrics and live requests of a mesh. Everything is in the library beside it.

use std::process::ExitCode;

fn main() -> ExitCode {
    weft_viz::main()
}
