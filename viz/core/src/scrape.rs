//! Reads the text format of Prometheus, line by line and without copying: a mesh of 1,000 pods is two million lines
//! every ten seconds, most of which are of families that nobody asks for.
//!
//! Owns the syntax. Refuses to know families; a line that is not a sample is skipped, as the format's readers do with
//! what they do not know.

/// One sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Line<'a> {
    /// The name and the labels as written, which identify the series from one scrape to the next.
    pub(crate) series: &'a [u8],
    /// Between the braces.
    labels: &'a [u8],
    /// Finite.
    pub(crate) value: f64,
}

/// Calls `sample` for each sample whose name `family` knows, with what that returned.
pub(crate) fn samples<'a, F: Copy>(
    text: &'a [u8],
    family: impl Fn(&[u8]) -> Option<F>,
    mut sample: impl FnMut(F, Line<'a>),
) {
    // Samples of a family follow each other.
    let mut last: (&[u8], Option<F>) = (b"", None);
    let mut rest = text;
    while !rest.is_empty() {
        let end = memchr::memchr(b'\n', rest).unwrap_or(rest.len());
        let line = &rest[..end];
        rest = rest.get(end + 1..).unwrap_or_default();
        let Some(name_end) = memchr::memchr2(b'{', b' ', line) else { continue };
        let name = &line[..name_end];
        if name != last.0 {
            last = (name, if name.starts_with(b"#") { None } else { family(name) });
        }
        if let Some(family) = last.1
            && let Some(line) = read(line, name_end)
        {
            sample(family, line);
        }
    }
}

fn read(line: &[u8], name_end: usize) -> Option<Line<'_>> {
    let (labels, series_end) = match line.get(name_end)? {
        b'{' => {
            let closing = name_end + 1 + labels_end(&line[name_end + 1..])?;
            (&line[name_end + 1..closing], closing + 1)
        }
        _ => (&line[..0], name_end),
    };
    // The value comes first; a timestamp or an exemplar may follow.
    let value = line[series_end..].split(u8::is_ascii_whitespace).find(|part| !part.is_empty())?;
    let value: f64 = std::str::from_utf8(value).ok()?.parse().ok()?;
    value.is_finite().then_some(Line { series: &line[..series_end], labels, value })
}

/// Where the closing brace is; braces in values do not count.
fn labels_end(text: &[u8]) -> Option<usize> {
    let mut at = 0;
    loop {
        at += memchr::memchr2(b'"', b'}', &text[at..])?;
        if text[at] == b'}' {
            return Some(at);
        }
        at = value_end(text, at + 1)? + 1;
    }
}

/// Where the closing quote of a value is that begins at `at`.
fn value_end(text: &[u8], mut at: usize) -> Option<usize> {
    loop {
        at += memchr::memchr2(b'"', b'\\', text.get(at..)?)?;
        if text[at] == b'"' {
            return Some(at);
        }
        at += 2;
    }
}

impl<'a> Line<'a> {
    /// Calls `label` with each label's name and value, up to the first that is malformed. Values are as written,
    /// escapes included.
    pub(crate) fn labels(&self, mut label: impl FnMut(&'a [u8], &'a [u8])) {
        let mut rest = self.labels;
        loop {
            while let [b',' | b' ', after @ ..] = rest {
                rest = after;
            }
            let Some(equals) = memchr::memchr(b'=', rest) else { return };
            if rest.get(equals + 1) != Some(&b'"') {
                return;
            }
            let Some(end) = value_end(rest, equals + 2) else { return };
            label(&rest[..equals], &rest[equals + 2..end]);
            rest = &rest[end + 1..];
        }
    }
}

/// A value without its escapes; what is not UTF-8 is replaced.
pub(crate) fn unescape(value: &[u8]) -> String {
    let text = String::from_utf8_lossy(value);
    if !text.contains('\\') {
        return text.into_owned();
    }
    let mut unescaped = String::with_capacity(text.len());
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        unescaped.push(match character {
            '\\' => match characters.next() {
                Some('n') => '\n',
                Some(other) => other,
                None => break,
            },
            other => other,
        });
    }
    unescaped
}

#[cfg(test)]
mod tests {
    use super::*;

    type Read = (String, Vec<(String, String)>, f64);

    fn read_all(text: &str) -> Vec<Read> {
        let mut all = Vec::new();
        samples(
            text.as_bytes(),
            |name| (name != b"other").then_some(()),
            |(), line| {
                let mut labels = Vec::new();
                line.labels(|name, value| labels.push((String::from_utf8_lossy(name).into_owned(), unescape(value))));
                all.push((String::from_utf8_lossy(line.series).into_owned(), labels, line.value));
            },
        );
        all
    }

    fn label(name: &str, value: &str) -> (String, String) {
        (name.to_owned(), value.to_owned())
    }

    #[test]
    fn samples_have_names_labels_and_values() {
        let text = "# HELP a_total Things {of} a kind\n# TYPE a_total counter\na_total{x=\"1\",y=\"\"} 5\na_total{} 6\n\
            other{x=\"1\"} 7\nb 0.5\nb_bucket{le=\"+Inf\"} 4 # {trace_id=\"}\"} 1.0 1700000000\nc{x=\"1\"}  8 1700000000";
        let all = read_all(text);
        assert_eq!(all[0], ("a_total{x=\"1\",y=\"\"}".to_owned(), vec![label("x", "1"), label("y", "")], 5.0));
        assert_eq!(all[1], ("a_total{}".to_owned(), vec![], 6.0));
        assert_eq!(all[2], ("b".to_owned(), vec![], 0.5));
        assert_eq!(all[3], ("b_bucket{le=\"+Inf\"}".to_owned(), vec![label("le", "+Inf")], 4.0));
        assert_eq!(all[4], ("c{x=\"1\"}".to_owned(), vec![label("x", "1")], 8.0));
        assert_eq!(all.len(), 5);
    }

    #[test]
    fn what_a_value_contains_ends_nothing() {
        let all = read_all(r#"a{x="a\"b}, c=\\",y="{",z="l\n"} 3"#);
        assert_eq!(all[0].1, [label("x", "a\"b}, c=\\"), label("y", "{"), label("z", "l\n")]);
        assert_eq!(all[0].2, 3.0);
    }

    #[test]
    fn what_is_no_sample_is_skipped() {
        let text = "a\na{x=\"1\n a{ 5\na{x=\"\\\na{x} 2\na NaN\na +Inf\na{x=\"1\"} five\n\n{} 1\na 9";
        let values: Vec<f64> = read_all(text).iter().map(|(.., value)| *value).collect();
        // `a{x} 2` has no readable label, `{}` has no name that anybody asks for but here.
        assert_eq!(values, [2.0, 1.0, 9.0]);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read(bytes: Vec<u8>, tail in "[a-z]{0,3}[{\"\\\\,= }#\\n0-9]{0,40}") {
            let text = [bytes.as_slice(), tail.as_bytes()].concat();
            samples(&text, |_| Some(()), |(), line| line.labels(|_, value| drop(unescape(value))));
        }
    }
}
