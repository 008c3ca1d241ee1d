//! The emulated machine: two processors, one or two serial lines, no network, no disk.

use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};

use crate::processor::{Accelerator, Processor};

/// Log of the kernel.
const CONSOLE: &str = "console.log";
/// Log of the programs.
const RESULT: &str = "result.log";
/// Interval of checks whether it still runs.
const INTERVAL: Duration = Duration::from_millis(200);
/// Number of log lines in an error.
const TAIL_LINES: usize = 15;

/// The kernel to boot, and the directory of its logs.
#[derive(Debug)]
pub(super) struct Machine<'a> {
    pub(super) kernel: &'a Path,
    pub(super) initramfs: &'a Path,
    pub(super) directory: &'a Path,
    pub(super) processor: Processor,
    pub(super) cpu: &'a str,
    pub(super) timeout: Duration,
    pub(super) accelerator: Accelerator,
}

/// The emulator, ended when dropped.
struct Emulator(Child);

impl Drop for Emulator {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Boots and returns the programs' output, once the machine is off.
///
/// # Errors
/// When it cannot be started, does not end in time, or printed nothing; the message contains the console's last lines.
pub(super) fn boot(machine: &Machine<'_>) -> Result<String> {
    let log = |name: &str| machine.directory.join(name);
    let errors = fs::File::create(log("qemu.log")).context("create qemu.log")?;
    let (program, board) = machine.processor.emulator(machine.accelerator);
    let (console, said_on) = machine.processor.lines();
    // If both share a line, the kernel must not write to it.
    let (loglevel, result) = if console == said_on { (1, CONSOLE) } else { (4, RESULT) };
    let mut command = Command::new(program);
    command
        .args(["-machine", board, "-cpu", machine.cpu])
        .args(["-smp", "2", "-m", "1536", "-nodefaults", "-display", "none", "-no-reboot", "-kernel"])
        .arg(machine.kernel)
        .arg("-initrd")
        .arg(machine.initramfs)
        // A panic reboots, which ends the emulator.
        .args(["-append", &format!("console={console} panic=-1 loglevel={loglevel}")])
        .arg("-serial")
        .arg(format!("file:{}", log(CONSOLE).display()));
    if result != CONSOLE {
        command.arg("-serial").arg(format!("file:{}", log(result).display()));
    }
    let emulator = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(errors)
        .spawn()
        .with_context(|| format!("start {program}"))?;
    let mut emulator = Emulator(emulator);
    let begin = Instant::now();
    let ended = loop {
        if let Some(status) = emulator.0.try_wait()? {
            break Some(status);
        }
        if begin.elapsed() > machine.timeout {
            break None;
        }
        thread::sleep(INTERVAL);
    };
    let read = |name: &str| {
        fs::read(log(name)).map(|bytes| String::from_utf8_lossy(&bytes).replace('\r', "")).unwrap_or_default()
    };
    let said = read(result);
    match ended {
        Some(status) if status.success() && !said.is_empty() => Ok(said),
        Some(status) => {
            bail!("the machine ended ({status}) and said nothing: {}{}", tail(&read("qemu.log")), tail(&read(CONSOLE)))
        }
        None => bail!(
            "the machine did not end within {:?}; logs are in {}; it said last: {}",
            machine.timeout,
            machine.directory.display(),
            tail(if said.is_empty() { read(CONSOLE) } else { said }.as_str())
        ),
    }
}

fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_log_is_its_last_lines() {
        let text: String = (0..100).map(|line| format!("{line}\n")).collect();
        assert!(tail(&text).starts_with("85\n") && tail(&text).ends_with("99"));
        assert_eq!(tail(""), "");
    }
}
