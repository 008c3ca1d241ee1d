//! A terminal that a program draws in: a pseudo-terminal of a size, whose content is known.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    num::NonZeroU16,
    process::{Child, Command, ExitStatus},
    sync::{Arc, Mutex},
    time::Duration,
};

use nix::{
    pty::{Winsize, openpty},
    unistd::ttyname,
};
use weft_test_kit::wait::blocking::eventually;

/// How long a program may take to draw.
const WITHIN: Duration = Duration::from_secs(30);

pub(super) struct Terminal {
    child: Child,
    keys: File,
    path: String,
    seen: Arc<Mutex<Seen>>,
}

struct Seen {
    parser: vt100::Parser,
    bytes: Vec<u8>,
}

impl Terminal {
    /// Starts a program whose terminal it is.
    pub(super) fn run(command: &Command, (rows, columns): (u16, u16)) -> Self {
        let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        let pair = openpty(Some(&size), None).unwrap();
        let path = ttyname(&pair.slave).unwrap().to_str().unwrap().to_owned();
        let mut with_terminal = Command::new("setsid");
        with_terminal.args(["--ctty", "--wait"]).arg(command.get_program()).args(command.get_args());
        let [input, output, errors] = [(); 3].map(|()| pair.slave.try_clone().unwrap());
        let child = with_terminal.stdin(input).stdout(output).stderr(errors).spawn().unwrap();
        // Only the program still has it open, so reading ends with the program.
        drop((pair.slave, with_terminal));
        let seen = Arc::new(Mutex::new(Seen {
            parser: vt100::Parser::new(cells(rows), cells(columns), 0),
            bytes: Vec::new(),
        }));
        let (mut screen, filled) = (File::from(pair.master.try_clone().unwrap()), Arc::clone(&seen));
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = screen.read(&mut buffer) {
                let mut seen = filled.lock().unwrap();
                seen.parser.process(&buffer[..length]);
                seen.bytes.extend_from_slice(&buffer[..length]);
            }
        });
        Self { child, keys: File::from(pair.master), path, seen }
    }

    pub(super) fn press(&mut self, key: &str) {
        self.keys.write_all(key.as_bytes()).unwrap();
    }

    pub(super) fn resize(&self, (rows, columns): (u16, u16)) {
        self.seen.lock().unwrap().parser.screen_mut().set_size(cells(rows), cells(columns));
        let mut stty = Command::new("stty");
        stty.args(["-F", &self.path, "rows", &rows.to_string(), "cols", &columns.to_string()]);
        assert!(stty.status().unwrap().success());
    }

    /// Waits until what is on the screen is as wanted.
    pub(super) fn until(&self, wanted: impl Fn(&vt100::Screen) -> bool) {
        eventually("what the screen should have", WITHIN, || {
            let is_shown = wanted(self.seen.lock().unwrap().parser.screen());
            if is_shown { Ok(()) } else { Err(self.shown()) }
        });
    }

    pub(super) fn shown(&self) -> String {
        self.seen.lock().unwrap().parser.screen().contents()
    }

    /// How often the program has written this.
    pub(super) fn written(&self, part: &str) -> usize {
        self.seen.lock().unwrap().bytes.windows(part.len()).filter(|bytes| *bytes == part.as_bytes()).count()
    }

    /// Waits until the program ends.
    pub(super) fn end(&mut self) -> ExitStatus {
        let Self { child, seen, .. } = self;
        eventually("the end of the program", WITHIN, || {
            let shown = || seen.lock().unwrap().parser.screen().contents();
            child.try_wait().unwrap().ok_or_else(shown)
        })
    }
}

fn cells(number: u16) -> NonZeroU16 {
    NonZeroU16::new(number).unwrap()
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
