//! Arguments as Linkerd's command line takes them, rewritten to what the definitions of the commands take.
//!
//! Linkerd's global flags stand before or after the command, and a flag without a value may have one (`--ha=true`).
//! Here each command has the flags that mean something to it, so that its help shows no others and clap checks them
//! together. Before a command, the others have no effect, as with Linkerd.

use std::{
    ffi::{OsStr, OsString},
    iter,
};

use clap::{Arg, ArgAction, Command};
use weft_k8s_api::boolean;

/// Rewrites a command line: options of `root` move behind the command's name, and switches lose their values.
pub(crate) fn rewritten(root: &Command, line: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut words = line.into_iter();
    let mut names: Vec<_> = words.next().into_iter().collect();
    let (mut command, mut moved, mut rest) = (root, Vec::new(), Vec::new());
    while command.has_subcommands() {
        let Some(word) = words.next() else { break };
        if let Some(option) = option(root, &word) {
            let value = if wants_next(option, &word) { words.next() } else { None };
            moved.push((option, word, value));
        } else if let Some(below) = command.find_subcommand(&word) {
            command = below;
            names.push(word);
        } else {
            rest.push(word);
            break;
        }
    }
    // Aliases of the shell put an option before every command.
    moved.retain(|(found, word, _)| found.is_global_set() || option(command, word).is_some());
    let moved = moved.into_iter().flat_map(|(_, word, value)| iter::once(word).chain(value));
    let mut words = moved.chain(rest).chain(words);
    // What follows the name of another program belongs to that program.
    let passes_on = command.get_positionals().any(Arg::is_trailing_var_arg_set);
    while let Some(word) = words.next() {
        let is_argument = !word.as_encoded_bytes().starts_with(b"-");
        if word == "--" || (is_argument && passes_on) {
            names.push(word);
            break;
        }
        let Some(option) = option(command, &word).or_else(|| option(root, &word)) else {
            names.push(word);
            continue;
        };
        match switched(option, &word) {
            Some((name, true)) => names.push(name.into()),
            Some((_, false)) => {}
            None => {
                let value = if wants_next(option, &word) { words.next() } else { None };
                names.extend([word].into_iter().chain(value));
            }
        }
    }
    names.extend(words);
    names
}

/// The option of a command that a word names.
fn option<'a>(command: &'a Command, word: &OsStr) -> Option<&'a Arg> {
    let word = word.to_string_lossy();
    if let Some(long) = word.strip_prefix("--") {
        let name = long.split('=').next().unwrap_or(long);
        let is_named = |arg: &&Arg| {
            arg.get_long() == Some(name) || arg.get_all_aliases().is_some_and(|aliases| aliases.contains(&name))
        };
        return command.get_arguments().find(is_named);
    }
    let short = word.strip_prefix('-')?.chars().next()?;
    command.get_arguments().find(|arg| arg.get_short() == Some(short))
}

/// A word's parts: the option's name with its dashes, and the value in the same word. Of a short switch it begins with
/// `=`: in `-At` other options follow.
fn parts<'a>(option: &Arg, word: &'a str) -> (&'a str, Option<&'a str>) {
    if word.starts_with("--") {
        return word.split_once('=').map_or((word, None), |(name, value)| (name, Some(value)));
    }
    let end = word.char_indices().nth(2).map_or(word.len(), |(index, _)| index);
    let (name, value) = word.split_at(end);
    let without_sign = || option.get_action().takes_values().then_some(value).filter(|value| !value.is_empty());
    (name, value.strip_prefix('=').or_else(without_sign))
}

/// Whether an option's value is the next word.
fn wants_next(option: &Arg, word: &OsStr) -> bool {
    let has_value = parts(option, &word.to_string_lossy()).1.is_some();
    option.get_action().takes_values() && !option.is_require_equals_set() && !has_value
}

/// The name of a switch that has a value, and the value.
fn switched(option: &Arg, word: &OsStr) -> Option<(String, bool)> {
    if !matches!(option.get_action(), ArgAction::SetTrue) {
        return None;
    }
    let (name, value) = parts(option, word.to_str()?);
    Some((name.to_owned(), boolean::parse(value?)?))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;
    use crate::Cli;

    fn rewrite(line: &str) -> String {
        let words = rewritten(&Cli::command(), line.split(' ').map(OsString::from));
        words.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn options_before_the_command_come_after_it() {
        for (line, rewritten) in [
            ("weft --context=west check --pre", "weft check --context=west --pre"),
            ("weft -L mesh --as jane install", "weft install -L mesh --as jane"),
            (
                "weft -Lmesh --verbose viz --context west stat deploy",
                "weft viz stat -Lmesh --verbose --context west deploy",
            ),
            ("weft --color never dg --api-addr a:1 endpoints x", "weft dg endpoints --color never --api-addr a:1 x"),
            // Of no meaning to the command.
            ("weft --context west -L mesh uninject web.yaml", "weft uninject web.yaml"),
            ("weft --context west --color never completion bash", "weft completion --color never bash"),
            ("weft --api-addr a:1 --cni-namespace=b install --ha", "weft install --ha"),
            ("weft sandbox --context west exec web-0 -- a", "weft sandbox exec web-0 -- a"),
            ("weft --context west multicluster link", "weft multicluster link"),
            ("weft uninject --context west web.yaml", "weft uninject --context west web.yaml"),
            ("weft check -n shop --context west", "weft check -n shop --context west"),
            // Without a command they stay, for clap's message.
            ("weft --context west", "weft --context west"),
            ("weft --context west help check", "weft --context west help check"),
            ("weft --context check", "weft --context check"),
        ] {
            assert_eq!(rewrite(line), rewritten, "{line}");
        }
    }

    #[test]
    fn a_switch_may_have_a_value() {
        for (line, rewritten) in [
            ("weft install --ha=true --crds=1", "weft install --ha --crds"),
            ("weft inject --ingress=false --manual=T -", "weft inject --manual -"),
            ("weft check --pre=false --proxy=true", "weft check --proxy"),
            ("weft status -A=true", "weft status -A"),
            ("weft status -A=t", "weft status -A"),
            // Several options in one word.
            ("weft stat deploy -At 5m", "weft stat deploy -At 5m"),
            ("weft stat deploy -wt 5m", "weft stat deploy -wt 5m"),
            ("weft stat deploy -wf", "weft stat deploy -wf"),
            // Neither a truth value, nor a switch, nor an option.
            ("weft check --proxy=maybe", "weft check --proxy=maybe"),
            ("weft check --namespace=true", "weft check --namespace=true"),
            ("weft check -n --proxy=true", "weft check -n --proxy=true"),
            ("weft sandbox exec web-0 -- a --proxy=true", "weft sandbox exec web-0 -- a --proxy=true"),
            ("weft multicluster link --ha=true", "weft multicluster link --ha=true"),
            // `=false` says more than nothing: it takes back what was installed.
            ("weft upgrade --disable-heartbeat=false", "weft upgrade --disable-heartbeat=false"),
        ] {
            assert_eq!(rewrite(line), rewritten, "{line}");
        }
    }
}
