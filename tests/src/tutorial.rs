//! A tutorial as a test: the shell blocks of a Markdown file, run as written, in order, in one shell.
//!
//! Blocks fenced as `sh` are run; all other blocks are only shown. A block that fails ends the tutorial, so a tutorial
//! states its promises as commands that fail if a promise is broken.

use std::{
    io::{self, BufRead as _, BufReader, Write as _},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use pulldown_cmark::{CodeBlockKind, Event, HeadingLevel, Parser, Tag, TagEnd};

/// One block that is run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// The `##` heading above it.
    pub section: String,
    /// Line of the fence, from 1.
    pub line: usize,
    /// The shell's input.
    pub code: String,
}

/// The blocks of a Markdown text that are fenced as `sh`.
pub fn blocks(markdown: &str) -> Vec<Block> {
    let (mut found, mut section) = (Vec::new(), String::new());
    let (mut in_heading, mut in_block) = (false, false);
    for (event, range) in Parser::new(markdown).into_offset_iter() {
        match event {
            Event::Start(Tag::Heading { level: HeadingLevel::H2, .. }) => {
                in_heading = true;
                section.clear();
            }
            Event::End(TagEnd::Heading(_)) => in_heading = false,
            Event::Start(Tag::CodeBlock(CodeBlockKind::Fenced(language))) if language.as_ref() == "sh" => {
                in_block = true;
                let line = markdown[..range.start].matches('\n').count() + 1;
                found.push(Block { section: section.clone(), line, code: String::new() });
            }
            Event::End(TagEnd::CodeBlock) => in_block = false,
            Event::Text(text) | Event::Code(text) if in_heading => section.push_str(&text),
            Event::Text(text) if in_block => {
                if let Some(block) = found.last_mut() {
                    block.code.push_str(&text);
                }
            }
            _ => {}
        }
    }
    found
}

/// A shell that keeps its variables between blocks, as a reader's terminal does.
#[derive(Debug)]
pub struct Shell {
    child: Child,
    stdin: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Shell {
    /// Starts bash in `directory`; it stops at the first command that fails.
    ///
    /// # Errors
    /// When there is no bash.
    pub fn start(directory: &Path, environment: &[(&str, String)]) -> io::Result<Self> {
        let mut child = Command::new("bash")
            .args(["--noprofile", "--norc", "-euo", "pipefail"])
            .current_dir(directory)
            .envs(environment.iter().map(|(name, value)| (*name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (stdin, output) = (child.stdin.take(), child.stdout.take());
        let output = output.ok_or_else(|| io::Error::other("bash has no standard output"))?;
        let mut shell = Self { child, stdin, output: BufReader::new(output) };
        // Both streams are merged into one, in the order in which they were written.
        shell.send("exec 2>&1\n")?;
        Ok(shell)
    }

    /// Runs a block and returns its output, which is also printed while it runs.
    ///
    /// # Errors
    /// A command of the block failed; the message contains its line in the file and the block's output.
    pub fn run(&mut self, block: &Block) -> anyhow::Result<String> {
        println!("  line {}: {}", block.line, block.code.trim_end().replace('\n', "\n    "));
        let marker = format!("--- the block of line {} is done ---", block.line);
        // Read completely before it is run, so that a command that reads standard input does not consume the next one.
        self.send(&format!("{{\n{}\n}} </dev/null\necho '{marker}'\n", block.code))?;
        let mut printed = String::new();
        loop {
            let mut line = String::new();
            if self.output.read_line(&mut line)? == 0 {
                let status = self.child.wait()?;
                anyhow::bail!("line {}: the shell ended ({status}):\n{}\n{printed}", block.line, block.code);
            }
            if line.trim_end() == marker {
                return Ok(printed);
            }
            print!("    | {line}");
            printed.push_str(&line);
        }
    }

    fn send(&mut self, text: &str) -> io::Result<()> {
        match &mut self.stdin {
            Some(stdin) => stdin.write_all(text.as_bytes()),
            None => Err(io::Error::other("the shell has no standard input")),
        }
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        // End of input ends an idle shell; one that hangs in a command is killed.
        drop(self.stdin.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# Title\n\n## One `thing`\n\n```sh\nA=1\n```\n\n```console\n$ exit 1\n```\n\n## Two\n\ntext\n\n```sh\necho $A\n```\n";

    #[test]
    fn finds_blocks_with_their_section_and_line() {
        let found = blocks(TEXT);
        assert_eq!(
            found,
            [
                Block { section: "One thing".to_owned(), line: 5, code: "A=1\n".to_owned() },
                Block { section: "Two".to_owned(), line: 17, code: "echo $A\n".to_owned() },
            ]
        );
    }

    #[test]
    fn variables_stay_and_a_failure_names_its_line() {
        let mut shell = Shell::start(Path::new("/"), &[("B", "2".to_owned())]).unwrap();
        let block = |code: &str| Block { section: String::new(), line: 7, code: code.to_owned() };
        shell.run(&block("A=1; cat")).unwrap();
        assert_eq!(shell.run(&block("echo \"$A$B\" >&2")).unwrap(), "12\n");
        let error = shell.run(&block("false\necho not reached")).unwrap_err().to_string();
        assert!(error.starts_with("line 7:") && !error.contains("\nnot reached"), "{error}");
    }
}
