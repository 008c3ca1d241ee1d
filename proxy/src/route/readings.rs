//! The other paths that an application may read where a client sends one.
//!
//! Routes match a path as it was sent, as in Linkerd. Applications differ: most decode it before they route it, and
//! many merge slashes or drop the parameters of segments. Without a look at these readings, `/%61dmin` would take the
//! route of `/` and reach the application's `/admin`.
//!
//! Owns the readings. Refuses to know routes.

use percent_encoding::percent_decode_str;

/// The path has a segment `.` or `..`, encoded or not. Clients resolve these before they send a request (RFC 3986
/// section 5.2.4), and applications do not agree about them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DotSegment;

/// The paths, other than this one, that an application may read; none for a path that all read alike.
///
/// # Errors
/// [`DotSegment`].
pub(crate) fn of(path: &str) -> Result<Vec<String>, DotSegment> {
    let is_plain = !path.contains(['%', ';', '\\']) && !path.contains("//") && !path.contains("/.");
    if is_plain {
        return Ok(Vec::new());
    }
    let decoded = percent_decode_str(path).decode_utf8_lossy();
    let segments = segments(&decoded);
    if segments.iter().any(|segment| matches!(*segment, "." | "..")) {
        return Err(DotSegment);
    }
    let merged = format!("/{}", segments.join("/"));
    let mut readings = vec![without_needless_encoding(path), decoded.into_owned(), merged];
    readings.retain(|reading| reading != path);
    readings.dedup();
    Ok(readings)
}

/// The segments that are not empty, without their parameters (`/a;v=1`), and with `\` as a separator, as some servers
/// have it. The last one may be empty: a slash at the end counts.
fn segments(path: &str) -> Vec<&str> {
    let mut segments: Vec<&str> =
        path.split(['/', '\\']).map(|segment| segment.split(';').next().unwrap_or_default()).collect();
    let ends_with_slash = segments.last().is_some_and(|last| last.is_empty());
    segments.retain(|segment| !segment.is_empty());
    if ends_with_slash && !segments.is_empty() {
        segments.push("");
    }
    segments
}

/// The path with those characters decoded that need no encoding (RFC 3986 section 6.2.2.2).
fn without_needless_encoding(path: &str) -> String {
    let mut parts = path.split('%');
    let mut reading = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (code, rest) = part.split_at_checked(2).unwrap_or((part, ""));
        match u8::from_str_radix(code, 16).map(char::from) {
            Ok(character) if character.is_ascii_alphanumeric() || "-._~".contains(character) => reading.push(character),
            _ => reading.extend(["%", code]),
        }
        reading.push_str(rest);
    }
    reading
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn most_paths_are_read_alike() {
        for path in ["/", "/a/b", "/pkg.Service/Method", "/a.b/~c", "*", ""] {
            assert_eq!(of(path), Ok(Vec::new()), "{path}");
        }
    }

    #[test]
    fn a_path_is_read_decoded_merged_and_without_parameters() {
        for (path, expected) in [
            ("/%61dmin", &["/admin"][..]),
            ("/%61%2Fb", &["/a%2Fb", "/a/b"]),
            ("/a%2Fb%3b/c", &["/a/b;/c", "/a/b/c"]),
            ("//admin", &["/admin"]),
            ("/admin;v=1/users", &["/admin/users"]),
            (r"/x\admin/", &["/x/admin/"]),
            ("/a//", &["/a/"]),
            ("/100%", &[]),
            ("/%zz%4", &[]),
        ] {
            assert_eq!(of(path).unwrap(), expected, "{path}");
        }
    }

    #[test]
    fn segments_of_dots_are_found_however_they_are_written() {
        for path in ["/a/../b", "/a/..", "/./a", "/a/%2e%2E/b", "/a/..;/b", r"/a\..\b", "/a%2F..%2Fb", "/.%2e/b"] {
            assert_eq!(of(path), Err(DotSegment), "{path}");
        }
        for path in ["/a..b", "/.well-known/x", "/...", "/a/.b./c"] {
            assert!(of(path).is_ok(), "{path}");
        }
    }

    proptest! {
        /// What has been decoded and merged is read alike, unless it was encoded twice.
        #[test]
        fn a_reading_has_no_further_readings(path in "(/[a-c;.]{0,3}|/%2[EF]|//){0,6}") {
            if let Ok(readings) = of(&path)
                && let Some(last) = readings.last()
            {
                prop_assert_eq!(of(last), Ok(Vec::new()), "{}", path);
            }
        }
    }
}
