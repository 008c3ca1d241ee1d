//! Running other programs: the command is printed, its output goes to standard error, and an error contains its name.
//!
//! Standard output is for results (`demo --json` ends with an object on it), so children write to standard error
//! unless the caller reads their output.

use std::{
    ffi::OsStr,
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
};

use anyhow::{Context, Result, bail};

/// Prints a step on standard error.
pub fn step(what: &str) {
    eprintln!("==> {what}");
}

/// Runs to the end with standard output sent to standard error.
///
/// # Errors
/// When the program cannot be started or fails; the message contains the command line.
pub fn run(command: &mut Command) -> Result<()> {
    command.stdout(Stdio::from(io::stderr()));
    run_inheriting(command)
}

/// Runs to the end with standard output inherited, for commands whose output is the result.
///
/// # Errors
/// As [`run`].
pub fn run_inheriting(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("start `{}`", line(command)))?;
    succeeded(status, command)
}

/// As [`run_inheriting`]; `read` is called with each line of standard output after it is printed.
///
/// # Errors
/// As [`run`], and when standard output cannot be read or written.
pub fn run_reading(command: &mut Command, mut read: impl FnMut(&str)) -> Result<()> {
    let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| format!("start `{}`", line(command)))?;
    let mut output = BufReader::new(child.stdout.take().context("standard output is a pipe")?);
    let mut bytes = Vec::new();
    while output.read_until(b'\n', &mut bytes)? > 0 {
        io::stdout().write_all(&bytes)?;
        read(String::from_utf8_lossy(&bytes).trim_end());
        bytes.clear();
    }
    succeeded(child.wait()?, command)
}

/// As [`run_reading`], for a program that runs beside others: both of its outputs are kept and printed together at the
/// end, as standard output.
///
/// # Errors
/// As [`run_reading`].
pub fn run_keeping(command: &mut Command, mut read: impl FnMut(&str)) -> Result<()> {
    let (mut output, input) = io::pipe().context("make a pipe")?;
    command.stdin(Stdio::null()).stdout(input.try_clone().context("make a pipe")?).stderr(input);
    let mut child = command.spawn().with_context(|| format!("start `{}`", line(command)))?;
    // The pipe ends when nobody can write to it.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut kept = Vec::new();
    output.read_to_end(&mut kept).with_context(|| format!("read the output of `{}`", line(command)))?;
    let status = child.wait()?;
    io::stdout().lock().write_all(&kept)?;
    String::from_utf8_lossy(&kept).lines().for_each(|line| read(line.trim_end()));
    succeeded(status, command)
}

/// Runs to the end and returns standard output.
///
/// # Errors
/// As [`run`]; standard error is part of the message.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("start `{}`", line(command)))?;
    if !output.status.success() {
        let reason = String::from_utf8_lossy(&output.stderr);
        bail!("`{}` failed ({}): {}", line(command), output.status, reason.trim());
    }
    String::from_utf8(output.stdout).with_context(|| format!("read the output of `{}`", line(command)))
}

/// Finds a program by name in PATH and, because root's PATH often lacks them, in the system's `sbin` directories.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|directory| directory.join(program))
        .find(|candidate| is_executable(candidate))
}

/// The PATH of this process with `directory` in front.
///
/// # Errors
/// When `directory` contains a colon.
pub fn path_with(directory: &Path) -> Result<std::ffi::OsString> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories = std::iter::once(directory.to_path_buf()).chain(std::env::split_paths(&path));
    std::env::join_paths(directories).with_context(|| format!("put {} into PATH", directory.display()))
}

/// The cargo that started this program, so that a rustup override also applies to its children.
pub fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// git in a checkout. It may belong to another user than root, who runs this in CI.
pub fn git(checkout: &Path) -> Command {
    let mut git = Command::new("git");
    git.args(["-c", "safe.directory=*"]).current_dir(checkout);
    git
}

/// Whether this process may load programs and create namespaces, according to its effective user.
pub fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
}

fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata().is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

fn succeeded(status: ExitStatus, command: &Command) -> Result<()> {
    if !status.success() {
        bail!("`{}` failed ({status})", line(command));
    }
    Ok(())
}

fn line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_the_command() {
        let error = run(Command::new("false").arg("--why")).expect_err("false fails");
        assert!(error.to_string().starts_with("`false --why` failed"), "{error}");
    }

    #[test]
    fn a_success_returns_what_was_printed() {
        assert_eq!(output(Command::new("echo").arg("weft")).expect("echo works"), "weft\n");
    }

    #[test]
    fn lines_are_read_while_they_are_shown() {
        let mut lines = Vec::new();
        run_reading(Command::new("echo").arg("one\n two"), |line| lines.push(line.to_owned())).expect("echo works");
        assert_eq!(lines, ["one", " two"]);
        let error = run_reading(Command::new("false").arg("--why"), |_| {}).expect_err("false fails");
        assert!(error.to_string().starts_with("`false --why` failed"), "{error}");
    }

    #[test]
    fn kept_lines_are_those_of_both_outputs() {
        let mut lines = Vec::new();
        let mut both = Command::new("sh");
        both.args(["-c", "echo one; echo two >&2; exit 3"]);
        let error = run_keeping(&mut both, |line| lines.push(line.to_owned())).expect_err("it exits with 3");
        assert!(error.to_string().contains("exit status: 3"), "{error}");
        assert_eq!(lines, ["one", "two"]);
    }

    #[test]
    fn finds_programs_that_exist_and_no_others() {
        assert!(find("sh").is_some());
        assert!(find("weft-no-such-program").is_none());
    }
}
