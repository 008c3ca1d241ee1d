//! `weft tap` of every request of a sandbox's pods, as a person runs it: at most 100 requests a second, the others left
//! out.

use std::{fs, process::Stdio};

use anyhow::{Context as _, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::NamedTempFile;
use tokio::process::{Child, Command};
use weft_test_kit::binaries;

/// A running tap, and the file of what it prints, which nobody has to read meanwhile.
pub(super) struct Tap {
    weft: Child,
    printed: NamedTempFile,
}

impl Tap {
    /// Taps both proxies.
    ///
    /// # Errors
    /// `weft` does not start.
    pub(super) fn start(sandbox: &str, namespace: &str) -> anyhow::Result<Self> {
        let mut weft = Command::new(binaries::directory()?.join("weft"));
        weft.args(["tap", &format!("ns/{namespace}"), "--sandbox", sandbox]);
        let printed = NamedTempFile::new().context("create a file for weft tap")?;
        weft.stdin(Stdio::null()).stdout(printed.reopen()?).stderr(Stdio::null()).kill_on_drop(true);
        Ok(Self { weft: weft.spawn().context("start weft tap")?, printed })
    }

    /// Ends it.
    ///
    /// # Errors
    /// It did not see requests of both proxies, or ended by itself: then nothing was measured.
    pub(super) async fn finish(mut self) -> anyhow::Result<()> {
        let pid = self.weft.id().context("weft tap ended by itself")?;
        kill(Pid::from_raw(i32::try_from(pid)?), Signal::SIGINT).context("end weft tap")?;
        self.weft.wait().await.context("wait for the end of weft tap")?;
        let seen = fs::read_to_string(self.printed.path()).context("read what weft tap printed")?;
        for side in ["proxy=out ", "proxy=in "] {
            let count = seen.lines().filter(|line| line.starts_with("req ") && line.contains(side)).count();
            ensure!(count > 0, "weft tap saw no request with {side}");
        }
        Ok(())
    }
}
