//! The words of a template's actions: what is between `{{` and `}}`.

use anyhow::{Result, bail};

/// A word.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    /// A function or a keyword.
    Word(String),
    /// `.name`; glued if nothing is between it and what precedes it.
    Field {
        name: String,
        glued: bool,
    },
    /// `$name`, or `$` without a name.
    Variable(String),
    Dot,
    Text(String),
    Int(i64),
    Float(f64),
    Open,
    Close,
    Pipe,
    Comma,
    Declare,
    Assign,
}

/// A part of a template.
#[derive(Debug, PartialEq)]
pub(super) enum Part {
    Text(String),
    Action(Vec<Token>),
}

/// Splits a template into text and actions; blanks beside `{{-` and `-}}` are left out.
///
/// # Errors
/// When an action does not end, or has a character that means nothing.
pub(super) fn parts(source: &str) -> Result<Vec<Part>> {
    let (mut parts, mut rest, mut trims) = (Vec::new(), source, false);
    while let Some((before, after)) = rest.split_once("{{") {
        let trimmed = after.strip_prefix('-').filter(|after| after.starts_with(char::is_whitespace));
        let text = if trims { before.trim_start() } else { before };
        let text = if trimmed.is_some() { text.trim_end() } else { text };
        if !text.is_empty() {
            parts.push(Part::Text(text.to_owned()));
        }
        let (tokens, behind) = action(trimmed.unwrap_or(after))?;
        if !tokens.is_empty() {
            parts.push(Part::Action(tokens));
        }
        (rest, trims) = behind;
    }
    let text = if trims { rest.trim_start() } else { rest };
    if !text.is_empty() {
        parts.push(Part::Text(text.to_owned()));
    }
    Ok(parts)
}

/// The words of one action, what follows it, and whether that is trimmed.
fn action(source: &str) -> Result<(Vec<Token>, (&str, bool))> {
    let (mut tokens, mut rest) = (Vec::new(), source);
    loop {
        let blanks = rest.len() - rest.trim_start().len();
        rest = rest.trim_start();
        if let Some(after) = rest.strip_prefix("}}") {
            return Ok((tokens, (after, false)));
        }
        if blanks > 0
            && let Some(after) = rest.strip_prefix("-}}")
        {
            return Ok((tokens, (after, true)));
        }
        if let Some(comment) = rest.strip_prefix("/*") {
            let Some((_, after)) = comment.split_once("*/") else { bail!("a comment does not end") };
            rest = after;
            continue;
        }
        let (token, after) = token(rest, blanks == 0 && !tokens.is_empty())?;
        tokens.push(token);
        rest = after;
    }
}

fn token(rest: &str, glued: bool) -> Result<(Token, &str)> {
    for (sign, token) in [
        (":=", Token::Declare),
        ("=", Token::Assign),
        ("|", Token::Pipe),
        ("(", Token::Open),
        (")", Token::Close),
        (",", Token::Comma),
    ] {
        if let Some(after) = rest.strip_prefix(sign) {
            return Ok((token, after));
        }
    }
    if let Some(raw) = rest.strip_prefix('`') {
        let Some((text, after)) = raw.split_once('`') else { bail!("a text in backquotes does not end") };
        return Ok((Token::Text(text.to_owned()), after));
    }
    if let Some(quoted) = rest.strip_prefix('"') {
        return string(quoted);
    }
    let word = |text: &str| text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    if let Some(after) = rest.strip_prefix('$') {
        let (name, after) = after.split_at(word(after));
        return Ok((Token::Variable(name.to_owned()), after));
    }
    if let Some(after) = rest.strip_prefix('.') {
        let (name, after) = after.split_at(word(after));
        let token = if name.is_empty() { Token::Dot } else { Token::Field { name: name.to_owned(), glued } };
        return Ok((token, after));
    }
    let length = rest.find(|c: char| !c.is_alphanumeric() && !['_', '.', '-', '+'].contains(&c)).unwrap_or(rest.len());
    if rest.starts_with(|c: char| c.is_ascii_digit() || c == '-' || c == '+') {
        let (number, after) = rest.split_at(length);
        if let Ok(number) = number.parse() {
            return Ok((Token::Int(number), after));
        }
        return match number.parse() {
            Ok(number) => Ok((Token::Float(number), after)),
            Err(_) => bail!("{number:?} is not a number"),
        };
    }
    match rest.split_at(word(rest)) {
        ("", _) => bail!("unexpected {:?}", rest.chars().next().unwrap_or('}')),
        (name, after) => Ok((Token::Word(name.to_owned()), after)),
    }
}

/// A text in quotes, with the escapes that charts use.
fn string(quoted: &str) -> Result<(Token, &str)> {
    let mut text = String::new();
    let mut chars = quoted.char_indices();
    while let Some((index, c)) = chars.next() {
        match c {
            '"' => return Ok((Token::Text(text), &quoted[index + 1..])),
            '\\' => match chars.next() {
                Some((_, 'n')) => text.push('\n'),
                Some((_, 't')) => text.push('\t'),
                Some((_, c @ ('"' | '\\'))) => text.push(c),
                other => bail!("unknown escape \\{}", other.map_or(' ', |(_, c)| c)),
            },
            c => text.push(c),
        }
    }
    bail!("a text in quotes does not end")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blanks_beside_marks_are_left_out() {
        let texts = |source: &str| -> Vec<String> {
            let texts = parts(source).unwrap().into_iter().filter_map(|part| match part {
                Part::Text(text) => Some(text),
                Part::Action(_) => None,
            });
            texts.collect()
        };
        assert_eq!(texts("a \n{{- x -}}\n b {{ y }} c"), ["a", "b ", " c"]);
        assert_eq!(texts("a {{- /* no {{ action */ -}} b"), ["a", "b"]);
    }

    #[test]
    fn words_are_told_apart() {
        let field = |name: &str, glued| Token::Field { name: name.to_owned(), glued };
        let variable = |name: &str| Token::Variable(name.to_owned());
        let found = parts("{{ $x.a .b (f -1 `raw` \"q\\n\").c | g }}").unwrap();
        let expected = vec![
            variable("x"),
            field("a", true),
            field("b", false),
            Token::Open,
            Token::Word("f".to_owned()),
            Token::Int(-1),
            Token::Text("raw".to_owned()),
            Token::Text("q\n".to_owned()),
            Token::Close,
            field("c", true),
            Token::Pipe,
            Token::Word("g".to_owned()),
        ];
        assert_eq!(found, [Part::Action(expected)]);
    }

    #[test]
    fn what_does_not_end_is_an_error() {
        for source in ["{{ x", "{{ \"x }}", "{{ `x }}", "{{ /* x }}", "{{ # }}"] {
            assert!(parts(source).is_err(), "{source}");
        }
    }
}
