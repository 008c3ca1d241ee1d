//! docs/reference/cli.md: every command, argument and option, from the definitions that `--help` is made of.
//!
//! A test fails while the file is not what the definitions say; `WEFT_BLESS=1 cargo test -p weft-cli reference` writes
//! it.

use std::{collections::BTreeMap, env, fmt::Write as _, fs, path::Path};

use clap::{Arg, Command, CommandFactory as _};

use crate::Cli;

/// The file, from this package's directory.
const FILE: &str = "../docs/reference/cli.md";
/// Longest line of text.
const WIDTH: usize = 160;
/// Options with a heading that more commands than this have are described once.
const OFTEN: usize = 10;

const HEAD: &str = "# Commands and options

<!-- Written by `WEFT_BLESS=1 cargo test -p weft-cli reference` from the definitions in cli/src. -->

Every command of `weft`, with its arguments and options, as in `weft COMMAND --help`. [cli.md](../cli.md) is the guide, with examples.
";

/// Options with one heading of `--help`, as rows of a table.
type Group = (String, Vec<String>);

fn document() -> String {
    let mut root = Cli::command();
    root.build();
    let shared = shared(&root);
    let mut text = HEAD.to_owned();
    text.push_str("\n## Options of many commands\n");
    for (heading, rows) in &shared {
        let _ = write!(text, "\n### {heading} options\n\n{}", table("Option", rows));
    }
    walk(&root, &mut |command| text.push_str(&section(command, &shared)));
    text
}

/// Options of many commands, by their headings.
fn shared(root: &Command) -> Vec<Group> {
    let mut shared: Vec<Group> = Vec::new();
    let mut counts: BTreeMap<(String, String), usize> = BTreeMap::new();
    walk(root, &mut |command| {
        for (heading, rows) in groups(command).into_iter().filter(|(heading, _)| !heading.is_empty()) {
            for row in rows {
                let count = counts.entry((heading.clone(), row.clone())).or_default();
                *count += 1;
                if *count == OFTEN + 1 {
                    match shared.iter_mut().find(|(other, _)| *other == heading) {
                        Some((_, rows)) => rows.push(row),
                        None => shared.push((heading.clone(), vec![row])),
                    }
                }
            }
        }
    });
    shared
}

fn section(command: &Command, shared: &[Group]) -> String {
    let mut text = format!("\n## {}\n\n", full_name(command));
    if let Some(about) = command.get_long_about().or_else(|| command.get_about()) {
        let _ = write!(text, "{}.\n\n", wrap(escape(&about.to_string()).trim_end_matches('.')));
    }
    let usage = command.clone().render_usage().to_string();
    let _ = write!(text, "```text\n{}\n```\n", usage.trim_start_matches("Usage:").trim());
    let aliases: Vec<_> = command.get_visible_aliases().map(|alias| format!("`{alias}`")).collect();
    if !aliases.is_empty() {
        let _ = write!(text, "\nAlso: {}.\n", aliases.join(", "));
    }
    let subcommands: Vec<_> = visible(command)
        .map(|it| {
            format!(
                "| `{}` | {} |",
                it.get_name(),
                escape(&it.get_about().map(ToString::to_string).unwrap_or_default())
            )
        })
        .collect();
    if !subcommands.is_empty() {
        let _ = write!(text, "\n{}", table("Command", &subcommands));
    }
    let positionals: Vec<_> = command.get_positionals().filter(|arg| !arg.is_hide_set()).map(row).collect();
    if !positionals.is_empty() {
        let _ = write!(text, "\n{}", table("Argument", &positionals));
    }
    let mut links = Vec::new();
    for (heading, mut rows) in groups(command) {
        let known =
            shared.iter().find(|(other, known)| *other == heading && known.iter().all(|row| rows.contains(row)));
        if let Some((_, known)) = known {
            links.push(format!("[{heading} options](#{}-options)", heading.to_lowercase().replace(' ', "-")));
            rows.retain(|row| !known.contains(row));
        }
        if !rows.is_empty() {
            let _ = write!(text, "\n{}", table(if heading.is_empty() { "Option" } else { &heading }, &rows));
        }
    }
    if !links.is_empty() {
        let _ = write!(text, "\nAnd: {}.\n", links.join(", "));
    }
    text
}

/// With the names of its parents.
fn full_name(command: &Command) -> &str {
    command.get_bin_name().unwrap_or_else(|| command.get_name())
}

/// Every command that `--help` shows, parents first.
fn walk(command: &Command, visit: &mut impl FnMut(&Command)) {
    visit(command);
    visible(command).for_each(|it| walk(it, visit));
}

fn visible(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|it| !it.is_hide_set() && it.get_name() != "help")
}

/// The options of a command, by their headings in the order of `--help`; those without a heading come first.
fn groups(command: &Command) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    let options = command.get_arguments().filter(|arg| !arg.is_positional());
    let mut options: Vec<&Arg> = options.filter(|arg| !arg.is_hide_set() && !is_builtin(command, arg)).collect();
    options.sort_by_key(|arg| arg.get_help_heading().is_some());
    for arg in options {
        let heading = arg.get_help_heading().unwrap_or_default();
        match groups.iter_mut().find(|(other, _)| other == heading) {
            Some((_, rows)) => rows.push(row(arg)),
            None => groups.push((heading.to_owned(), vec![row(arg)])),
        }
    }
    groups
}

/// What every command has. Global options are among those of `weft` itself.
fn is_builtin(command: &Command, arg: &Arg) -> bool {
    matches!(arg.get_id().as_str(), "help" | "version") || (arg.is_global_set() && full_name(command).contains(' '))
}

fn takes(arg: &Arg) -> bool {
    arg.get_action().takes_values()
}

fn row(arg: &Arg) -> String {
    let short = arg.get_short().map(|short| format!("-{short}"));
    let long = arg.get_long().map(|long| format!("--{long}"));
    let value = takes(arg).then(|| {
        let names =
            arg.get_value_names().map(|names| names.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "));
        let many = arg.get_num_args().is_some_and(|range| range.max_values() > 1);
        format!("{}{}", names.unwrap_or_default(), if many { "..." } else { "" })
    });
    let mut names: Vec<_> = short.into_iter().chain(long).collect();
    match (names.last_mut(), value) {
        (Some(last), Some(value)) => *last = format!("{last} {value}"),
        (None, Some(value)) => names.push(value),
        (_, None) => {}
    }
    let names: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
    format!("| {} | {} |", names.join(", "), meaning(arg))
}

/// The help, and what `--help` adds to it.
fn meaning(arg: &Arg) -> String {
    let help = arg.get_long_help().or_else(|| arg.get_help()).map(ToString::to_string).unwrap_or_default();
    let mut parts = vec![escape(&help)];
    let list = |values: Vec<String>| values.iter().map(|it| format!("`{it}`")).collect::<Vec<_>>().join(", ");
    if takes(arg) && !arg.is_hide_possible_values_set() {
        let shown = arg.get_possible_values().into_iter().filter(|value| !value.is_hide_set());
        let values: Vec<_> = shown.map(|value| value.get_name().to_owned()).collect();
        if !values.is_empty() {
            parts.push(format!("one of {}", list(values)));
        }
    }
    let defaults: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy().into_owned()).collect();
    if takes(arg) && !defaults.is_empty() && !arg.is_hide_default_value_set() {
        parts.push(format!("default {}", list(defaults)));
    }
    if let Some(variable) = arg.get_env() {
        parts.push(format!("variable `{}`", variable.to_string_lossy()));
    }
    parts.retain(|part| !part.is_empty());
    parts.join("; ")
}

fn table(first: &str, rows: &[String]) -> String {
    format!("| {first} | Meaning |\n|---|---|\n{}\n", rows.join("\n"))
}

/// Text in one line that Markdown shows as it is.
fn escape(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    line.replace('|', "\\|").replace('<', "\\<").replace('*', "\\*")
}

fn wrap(text: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(last) if last.is_empty() => last.push_str(word),
            Some(last) if last.chars().count() + word.chars().count() < WIDTH => {
                last.push(' ');
                last.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines.join("\n")
}

#[test]
fn the_reference_of_commands_is_current() {
    let text = document();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(FILE);
    if env::var_os("WEFT_BLESS").is_some() {
        fs::create_dir_all(file.parent().expect("a folder")).expect("make the folder");
        fs::write(&file, &text).expect("write the file");
    }
    let kept = fs::read_to_string(&file).unwrap_or_default();
    assert!(kept == text, "docs/reference/cli.md is not current; run `WEFT_BLESS=1 cargo test -p weft-cli reference`");
}

#[test]
fn everything_that_help_shows_is_in_the_reference() {
    let text = document();
    let mut root = Cli::command();
    root.build();
    walk(&root, &mut |command| {
        let name = full_name(command);
        assert!(text.contains(&format!("\n## {name}\n")), "{name}");
        for arg in command.get_arguments().filter(|arg| !arg.is_hide_set() && !is_builtin(command, arg)) {
            assert!(text.contains(&row(arg)), "{name}: {}", arg.get_id());
        }
    });
    assert!(text.contains("`--expected-version VERSION`") && text.contains("default `300s`"), "{text}");
    assert!(!text.contains("sandbox-init") && !text.contains("--init-image"), "what is hidden is in it");
}

/// The guide is written by hand; a new command has to be in it.
#[test]
fn every_command_is_in_the_guide() {
    let guide = include_str!("../../docs/cli.md");
    let headings: Vec<&str> = guide.lines().filter(|line| line.starts_with("## weft ")).collect();
    let words = |line: &&str| line.split([' ', ',']).map(str::to_owned).collect::<Vec<_>>();
    for command in visible(&Cli::command()) {
        let is_there = headings.iter().any(|line| words(line).iter().any(|word| word == command.get_name()));
        assert!(is_there, "docs/cli.md has no section `## weft {}`", command.get_name());
    }
}
