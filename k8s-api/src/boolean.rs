//! Booleans as in Go: those of annotations and Helm values.

/// The spellings that Go's `strconv.ParseBool` accepts; `None` for anything else.
pub fn parse(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}
