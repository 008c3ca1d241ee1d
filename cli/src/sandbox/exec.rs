//! `weft sandbox exec`, `logs` and `stop`.

use std::{
    fs::File,
    io::{self, Read as _, Seek as _, Write as _},
    os::unix::{fs::MetadataExt as _, process::ExitStatusExt as _},
    path::Path,
    process::{ExitCode, ExitStatus, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use tokio::signal::unix::{SignalKind, signal};
use weft_sandbox::{
    client::{ClientError, Sandbox},
    config::Layout,
    host::{HostError, cleanup},
};

use super::{ExecArgs, LogsArgs, StopArgs};
use crate::output;

/// How often a followed log is read.
const LOOK_EVERY: Duration = Duration::from_millis(100);

pub(super) async fn exec(args: ExecArgs) -> Result<ExitCode> {
    // Ctrl-C is for the command on the same terminal; this process waits in order to pass on its exit status.
    let _interrupted = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    let mut terminated = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let sandbox = Sandbox::open(&args.sandbox.name)?;
    let mut child = sandbox.spawn(
        &args.pod,
        args.container.container.as_deref(),
        &args.command,
        Stdio::inherit(),
        Stdio::inherit(),
        Stdio::inherit(),
    )?;
    let status = tokio::select! {
        status = child.wait() => status,
        _ = terminated.recv() => {
            // Nothing else would end it.
            child.start_kill().context("end the command")?;
            child.wait().await
        }
    };
    Ok(exit_code(status.with_context(|| format!("wait for the command in pod {}", args.pod))?))
}

/// The command's own exit status; 128 plus the signal's number if a signal ended it, as in shells.
fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default());
    ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX))
}

pub(super) async fn logs(args: &LogsArgs) -> Result<()> {
    let sandbox = Sandbox::open(&args.sandbox.name)?;
    let path = sandbox.log_path(&args.pod, args.container.container.as_deref())?;
    let shown = || format!("cannot read the log {} of pod {}", path.display(), args.pod);
    let mut file = File::open(&path).with_context(shown)?;
    loop {
        copy(&mut file)?;
        if !args.follow {
            return Ok(());
        }
        if !is_still(&path, &file) {
            // Output between the last read and the end.
            copy(&mut file)?;
            return Ok(());
        }
        tokio::time::sleep(LOOK_EVERY).await;
        if file.metadata().with_context(shown)?.len() < file.stream_position().with_context(shown)? {
            // The file was truncated.
            file.rewind().with_context(shown)?;
        }
    }
}

/// Prints the rest of a file. Errors keep their kind, because a closed pipe is not a failure.
fn copy(file: &mut File) -> io::Result<()> {
    let mut out = io::stdout().lock();
    let mut buffer = [0; 16 * 1024];
    loop {
        match file.read(&mut buffer)? {
            0 => return out.flush(),
            read => out.write_all(&buffer[..read])?,
        }
    }
}

/// Whether the path still leads to this file: the logs of a pod are removed with it.
fn is_still(path: &Path, file: &File) -> bool {
    match (path.metadata(), file.metadata()) {
        (Ok(there), Ok(open)) => there.ino() == open.ino() && there.dev() == open.dev(),
        _ => false,
    }
}

pub(super) async fn stop(args: &StopArgs) -> Result<()> {
    let name = &args.sandbox.name;
    match Sandbox::open(name) {
        Ok(mut sandbox) => {
            sandbox.stop().await?;
            output::line(&format!("sandbox {name} stopped"))?;
        }
        Err(ClientError::NotFound(_)) if Layout::of(name).run_dir().exists() => {
            remove_rest(name)?;
            output::line(&format!("sandbox {name} did not run any more; removed what it left"))?;
        }
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

/// For when the daemon and its janitor both died, as in an out-of-memory kill.
fn remove_rest(name: &str) -> Result<()> {
    let _lock = match cleanup::lock(name) {
        Ok(lock) => lock,
        Err(HostError::AlreadyRuns { pid, .. }) => {
            bail!("sandbox `{name}` (pid {pid}) is starting or cleaning up: try again in a moment, or end that process")
        }
        Err(error) => return Err(error.into()),
    };
    cleanup::remove_everything(&Layout::of(name)).with_context(|| format!("clean up after sandbox {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commands_status_is_passed_on() {
        // In a wait status, the exit status is the second byte and the signal the first.
        assert_eq!(exit_code(ExitStatus::from_raw(7 << 8)), ExitCode::from(7));
        assert_eq!(exit_code(ExitStatus::from_raw(9)), ExitCode::from(137));
    }
}
