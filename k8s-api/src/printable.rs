//! Text that others chose, such as names of processes and values of annotations, as a terminal may show it: control
//! characters and those that reorder text become `\u{..}`, so that nobody else moves the cursor or forges a line.

use std::{borrow::Cow, fmt::Write as _};

/// One line: line feeds are escaped, too.
#[must_use]
pub fn line(text: &str) -> Cow<'_, str> {
    if !text.contains(is_active) {
        return Cow::Borrowed(text);
    }
    let escape = |mut shown: String, character: char| {
        if is_active(character) {
            shown.extend(character.escape_default())
        } else {
            shown.push(character)
        }
        shown
    };
    Cow::Owned(text.chars().fold(String::with_capacity(text.len()), escape))
}

/// Several lines.
#[must_use]
pub fn lines(text: &str) -> Cow<'_, str> {
    if !text.contains(|character| character != '\n' && is_active(character)) {
        return Cow::Borrowed(text);
    }
    Cow::Owned(text.split('\n').map(line).collect::<Vec<_>>().join("\n"))
}

/// JSON, whose writers escape control characters of ASCII only. What it says stays the same.
#[must_use]
pub fn json(text: &str) -> Cow<'_, str> {
    let is_left = |character: char| character >= '\u{7f}' && is_active(character);
    if !text.contains(is_left) {
        return Cow::Borrowed(text);
    }
    let escape = |mut shown: String, character: char| {
        if is_left(character) {
            // All of them are in the basic plane, and outside of strings JSON has none.
            let _ = write!(shown, "\\u{:04x}", u32::from(character));
        } else {
            shown.push(character);
        }
        shown
    };
    Cow::Owned(text.chars().fold(String::with_capacity(text.len()), escape))
}

/// Whether a terminal acts on it instead of showing it: controls (C0, DEL, C1), line separators and Unicode's marks and
/// overrides of direction.
fn is_active(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROWS: [(&str, &str); 7] = [
        ("curl", "curl"),
        ("naïve-\u{fffd}", "naïve-\u{fffd}"),
        ("\x1b[2J", "\\u{1b}[2J"),
        // CSI of one character.
        ("\u{9b}1m", "\\u{9b}1m"),
        ("a\rb\x07\x7f", "a\\rb\\u{7}\\u{7f}"),
        ("a\nforged", "a\\nforged"),
        ("abc\u{202e}fed\u{2069}", "abc\\u{202e}fed\\u{2069}"),
    ];

    #[test]
    fn nothing_that_a_terminal_acts_on_is_left() {
        for (text, expected) in ROWS {
            assert_eq!(line(text), expected, "{text:?}");
        }
    }

    #[test]
    fn lines_stay_lines() {
        assert_eq!(lines("POD  STATE\nweb  \x1b[31mok\n"), "POD  STATE\nweb  \\u{1b}[31mok\n");
        assert!(matches!(lines("POD\nweb"), Cow::Borrowed(_)));
    }

    #[test]
    fn json_says_the_same() {
        for (text, _) in ROWS {
            let written = serde_json::to_string(text).unwrap();
            let shown = json(&written);
            assert!(!shown.contains(is_active), "{shown:?}");
            assert_eq!(serde_json::from_str::<String>(&shown).unwrap(), text);
        }
    }
}
