//! A process of the product, and its output.

use std::{
    io::{BufRead as _, BufReader, Read},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex, PoisonError},
    thread::{self, JoinHandle},
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::wait::eventually;

/// A process; killed on drop. If the test fails, its output is printed.
pub struct Process {
    child: Mutex<Child>,
    output: Arc<Mutex<Vec<String>>>,
    readers: Mutex<Vec<JoinHandle<()>>>,
    patience: Duration,
}

impl Process {
    /// Starts a process; waits for its output have this timeout.
    pub fn start(command: &mut Command, patience: Duration) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let output = Arc::new(Mutex::new(Vec::new()));
        let streams: [Box<dyn Read + Send>; 2] =
            [Box::new(child.stdout.take().unwrap()), Box::new(child.stderr.take().unwrap())];
        let readers = streams.map(|stream| {
            let output = Arc::clone(&output);
            thread::spawn(move || {
                for line in BufReader::new(stream).lines().map_while(Result::ok) {
                    output.lock().unwrap().push(line);
                }
            })
        });
        Self { child: Mutex::new(child), output, readers: Mutex::new(readers.into()), patience }
    }

    /// Its output so far.
    pub fn output(&self) -> String {
        self.output.lock().unwrap_or_else(PoisonError::into_inner).join("\n")
    }

    /// The output lines that contain this text.
    pub fn lines(&self, part: &str) -> Vec<String> {
        self.output.lock().unwrap().iter().filter(|line| line.contains(part)).cloned().collect()
    }

    /// Waits for an output line that contains this text.
    pub async fn says(&self, part: &str) {
        let said = async || if self.lines(part).is_empty() { Err("no such line") } else { Ok(()) };
        eventually(part, self.patience, said).await;
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        let pid = self.child.lock().unwrap().id();
        kill(Pid::from_raw(pid.cast_signed()), signal).unwrap();
    }

    /// Sends it a signal that ends it, and waits for its end.
    pub async fn end(&self, signal: Signal) {
        self.signal(signal);
        self.ended().await;
    }

    /// Waits for its end. Returns its exit code and its output.
    pub async fn ended(&self) -> (Option<i32>, String) {
        let ended = async || self.child.lock().unwrap().try_wait().unwrap().ok_or("it runs");
        let status = eventually("the end of the process", self.patience, ended).await;
        let readers = std::mem::take(&mut *self.readers.lock().unwrap());
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        (status.code(), self.output())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = child.kill();
        let _ = child.wait();
        if thread::panicking() {
            eprintln!("output of the process:\n{}", self.output());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(5);

    #[tokio::test]
    async fn what_a_process_prints_is_read_to_its_end() {
        let process = Process::start(Command::new("sh").args(["-c", "echo one; echo two >&2; exit 3"]), PATIENCE);
        process.says("two").await;
        let (code, output) = process.ended().await;
        assert_eq!(code, Some(3));
        assert!(output.contains("one") && output.contains("two"), "{output}");
    }

    #[tokio::test]
    async fn a_process_ends_by_a_signal() {
        let process = Process::start(Command::new("sleep").arg("1000"), PATIENCE);
        process.end(Signal::SIGTERM).await;
        assert_eq!(process.ended().await.0, None);
    }
}
