//! Just enough of Rust's lexical rules to tell code from comments and literals.

/// The source with comments and the contents of string and character literals replaced by spaces. Lines keep their
/// numbers, so a finding can be reported where it is.
pub(crate) fn code_only(source: &str) -> String {
    let characters: Vec<char> = source.chars().collect();
    let mut code = String::with_capacity(source.len());
    let mut at = 0;
    while at < characters.len() {
        let rest = &characters[at..];
        let skipped = comment(rest).or_else(|| string(rest, characters[..at].last())).or_else(|| character(rest));
        if let Some(length) = skipped {
            code.extend(rest[..length].iter().map(|c| if *c == '\n' { '\n' } else { ' ' }));
            at += length;
        } else {
            code.push(rest[0]);
            at += 1;
        }
    }
    code
}

/// The length of a comment that starts here; block comments nest.
fn comment(rest: &[char]) -> Option<usize> {
    if rest.starts_with(&['/', '/']) {
        return Some(rest.iter().position(|c| *c == '\n').unwrap_or(rest.len()));
    }
    if !rest.starts_with(&['/', '*']) {
        return None;
    }
    let (mut depth, mut at) = (0usize, 0);
    while at < rest.len() {
        if rest[at..].starts_with(&['/', '*']) {
            (depth, at) = (depth + 1, at + 2);
        } else if rest[at..].starts_with(&['*', '/']) {
            (depth, at) = (depth - 1, at + 2);
            if depth == 0 {
                return Some(at);
            }
        } else {
            at += 1;
        }
    }
    Some(rest.len())
}

/// The length of a string literal that starts here, raw or not.
fn string(rest: &[char], before: Option<&char>) -> Option<usize> {
    if rest[0] == '"' {
        return Some(quoted(rest, '"'));
    }
    let in_word = before.is_some_and(|c| c.is_alphanumeric() || *c == '_');
    if in_word || rest[0] != 'r' {
        return None;
    }
    let hashes = rest[1..].iter().take_while(|c| **c == '#').count();
    if rest.get(1 + hashes) != Some(&'"') {
        return None;
    }
    let end: Vec<char> = std::iter::once('"').chain(std::iter::repeat_n('#', hashes)).collect();
    let start = hashes + 2;
    let length = rest[start..].windows(end.len()).position(|window| window == end);
    Some(length.map_or(rest.len(), |length| start + length + end.len()))
}

/// The length of a character literal that starts here; a lifetime is none.
fn character(rest: &[char]) -> Option<usize> {
    let literal = rest[0] == '\'' && (rest.get(1) == Some(&'\\') || rest.get(2) == Some(&'\''));
    literal.then(|| quoted(rest, '\''))
}

fn quoted(rest: &[char], quote: char) -> usize {
    let mut at = 1;
    while at < rest.len() && rest[at] != quote {
        at += if rest[at] == '\\' { 2 } else { 1 };
    }
    (at + 1).min(rest.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_code_is_left() {
        let cases = [
            ("line comment", "a // unsafe\nb", "a\nb"),
            ("nested comment", "a /* x /* unsafe */ y */ b", "a b"),
            ("string", r#"f("unsafe \" still") b"#, "f( ) b"),
            ("raw string", r###"f(r#"unsafe " still"#) b"###, "f( ) b"),
            ("character", r"f('\'', '{', '\\') b", "f( , , ) b"),
            ("lifetime", "fn f<'a>(x: &'a str) {}", "fn f<'a>(x: &'a str) {}"),
            ("word that ends in r", "for\"x\" y", "for y"),
        ];
        for (name, source, expected) in cases {
            let squeeze = |text: &str| {
                let lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
                lines.collect::<Vec<_>>().join("\n")
            };
            assert_eq!(squeeze(&code_only(source)), expected, "{name}");
        }
    }

    #[test]
    fn lines_keep_their_numbers() {
        let source = "/*\n\n*/ let a = \"\n\"; // x\nunsafe {}";
        assert_eq!(code_only(source).lines().position(|line| line.contains("unsafe")), Some(4));
    }
}
