//! Stops a sandbox when this process ends in any way: a sandbox's daemon outlives the process that started it.

use std::{
    io::{self, Write as _},
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Child, Command, Stdio},
};

use weft_sandbox::config::Layout;

/// Reads a line from the harness: "done" when the harness has cleaned up, end of file when it died. A sandbox that has
/// just been started cannot be stopped yet, so this retries for some seconds; a failed sandbox leaves its log. The
/// manifests belong to the harness.
const SCRIPT: &str = r#"
read -r word
[ "$word" = done ] && exit
for attempt in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
    "$0" sandbox stop --sandbox "$1" && break
    sleep 0.25
done
rm -rf "$2" "$3"
"#;

/// A waiting process that stops the sandbox when this one ends.
#[derive(Debug)]
pub(super) struct Guard {
    process: Child,
}

impl Guard {
    /// Watches over the sandbox of this name.
    ///
    /// # Errors
    /// The process cannot be started.
    pub(super) fn watch(weft: &Path, layout: &Layout, sandbox: &str, manifests: &Path) -> io::Result<Self> {
        let mut command = Command::new("sh");
        command.args(["-c", SCRIPT]).arg(weft).arg(sandbox).arg(layout.daemon_log()).arg(manifests);
        // Its own process group: Ctrl-C in the terminal is for the harness only.
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
        Ok(Self { process: command.spawn()? })
    }

    /// Ends the guard: the sandbox is stopped already, or is to keep running.
    pub(super) fn dismiss(mut self) {
        if let Some(mut words) = self.process.stdin.take() {
            // The guard may have ended already.
            let _ = words.write_all(b"done\n");
        }
        let _ = self.process.wait();
    }
}
