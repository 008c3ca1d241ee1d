//! The other paths that an application may read where a client sends one.
//!
//! Routes match a path as it was sent, as in Linkerd. Applications differ: most decode it before they route it, and
//! many merge slashes or drop the parameters of segments, some before they decode and some afterwards. Some parse it as
//! a reference to a URL, of which `//` begins the host. Without a look at these readings, `/%61dmin` and `//x/admin`
//! would take the route of `/` and reach the application's `/admin`.
//!
//! Owns the readings. Refuses to know routes.

use percent_encoding::percent_decode_str;

/// The path has a segment `.` or `..`, encoded or not. Clients resolve these before they send a request (RFC 3986
/// section 5.2.4), and applications do not agree about them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DotSegment;

/// A way in which applications read paths, as the index of its steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reading(usize);

type Step = fn(&str) -> String;

/// The steps of each reading. The order matters: in `/a;%2Fb`, the parameter is `%2Fb` before decoding and empty after
/// it.
const READINGS: [&[Step]; 11] = [
    &[decode_needless],
    &[decode],
    &[decode, backslashes, drop_parameters, merge],
    &[decode, drop_parameters, backslashes, merge],
    &[decode, drop_parameters, merge],
    &[backslashes, drop_parameters, decode, backslashes, merge],
    &[drop_parameters, decode, backslashes, merge],
    // Tomcat's (`CoyoteAdapter.postParseRequest`).
    &[drop_parameters, decode, merge],
    // RFC 3986 section 4.2, as PHP, Python and Ruby read it, and the same where `\` is a slash, as in Node (WHATWG).
    &[drop_authority, decode, drop_parameters, merge],
    &[backslashes, drop_authority, drop_parameters, decode, merge],
    &[decode, backslashes, drop_parameters, drop_authority, merge],
];

impl Reading {
    /// The whole path decoded.
    pub(crate) const DECODED: Self = Self(1);

    /// All readings, by index.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        (0..READINGS.len()).map(Self)
    }

    /// Its place in [`Self::all`].
    pub(crate) fn index(self) -> usize {
        self.0
    }

    /// The path as this reading has it.
    pub(crate) fn read(self, path: &str) -> String {
        READINGS[self.0].iter().fold(path.to_owned(), |path, step| step(&path))
    }
}

/// The readings that differ from the path itself; none for a path that all applications read alike.
///
/// # Errors
/// [`DotSegment`].
pub(crate) fn of(path: &str) -> Result<Vec<(Reading, String)>, DotSegment> {
    if is_plain(path) {
        return Ok(Vec::new());
    }
    let mut readings: Vec<_> = Reading::all().map(|reading| (reading, reading.read(path))).collect();
    let has_dots = |path: &str| path.split('/').any(|segment| matches!(segment, "." | ".."));
    if readings.iter().any(|(_, read)| has_dots(read)) {
        return Err(DotSegment);
    }
    readings.retain(|(_, read)| read != path);
    Ok(readings)
}

/// Whether all applications read a path alike.
pub(crate) fn is_read_alike(path: &str) -> bool {
    is_plain(path) || Reading::all().all(|reading| reading.read(path) == path)
}

/// Whether no step changes the path, nor has it dots. Most paths are plain.
fn is_plain(path: &str) -> bool {
    !path.contains(['%', ';', '\\']) && !path.contains("//") && !path.contains("/.")
}

/// Decodes the characters that need no encoding (RFC 3986 section 6.2.2.2).
fn decode_needless(path: &str) -> String {
    let mut parts = path.split('%');
    let mut read = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (code, rest) = part.split_at_checked(2).unwrap_or((part, ""));
        match u8::from_str_radix(code, 16).map(char::from) {
            Ok(character) if character.is_ascii_alphanumeric() || "-._~".contains(character) => read.push(character),
            _ => read.extend(["%", code]),
        }
        read.push_str(rest);
    }
    read
}

fn decode(path: &str) -> String {
    percent_decode_str(path).decode_utf8_lossy().into_owned()
}

/// Makes `\` a slash, as some servers do.
fn backslashes(path: &str) -> String {
    path.replace('\\', "/")
}

/// Drops the parameters of segments: `/a;v=1/b` becomes `/a/b`.
fn drop_parameters(path: &str) -> String {
    let segments: Vec<_> = path.split('/').map(|segment| segment.split(';').next().unwrap_or_default()).collect();
    segments.join("/")
}

/// Drops the first segment of a path that begins with several slashes, where it is the host of a URL.
fn drop_authority(path: &str) -> String {
    let Some(rest) = path.strip_prefix("//") else { return path.to_owned() };
    let rest = rest.trim_start_matches('/');
    rest.find('/').map_or("/", |end| &rest[end..]).to_owned()
}

/// Drops empty segments, except the last: a slash at the end stays.
fn merge(path: &str) -> String {
    let mut segments: Vec<_> = path.split('/').filter(|segment| !segment.is_empty()).collect();
    if path.ends_with('/') && !segments.is_empty() {
        segments.push("");
    }
    format!("/{}", segments.join("/"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The different paths of the readings, in their order.
    fn read(path: &str) -> Vec<String> {
        let mut found: Vec<String> = Vec::new();
        for (_, read) in of(path).unwrap() {
            if !found.contains(&read) {
                found.push(read);
            }
        }
        found
    }

    #[test]
    fn most_paths_are_read_alike() {
        for path in ["/", "/a/b", "/pkg.Service/Method", "/a.b/~c", "*", ""] {
            assert_eq!(of(path), Ok(Vec::new()), "{path}");
        }
        for (path, alike) in [("/a", true), ("/.well-known", true), ("/%zz", true), ("/a%20b", false), ("/a;b", false)]
        {
            assert_eq!(is_read_alike(path), alike, "{path}");
        }
    }

    #[test]
    fn a_path_is_read_decoded_merged_and_without_parameters() {
        for (path, expected) in [
            ("/%61dmin", &["/admin"][..]),
            ("/%61%2Fb", &["/a%2Fb", "/a/b"]),
            ("/a%2Fb%3b/c", &["/a/b;/c", "/a/b/c"]),
            ("//admin", &["/admin", "/"]),
            ("//x/admin", &["/x/admin", "/admin"]),
            (r"/\x/admin", &["/x/admin", "/admin"]),
            ("///x//admin", &["/x/admin", "/admin"]),
            ("/admin;v=1/users", &["/admin/users"]),
            (r"/x\admin/", &["/x/admin/"]),
            ("/a//", &["/a/"]),
            ("/100%", &[]),
            ("/%zz%4", &[]),
        ] {
            assert_eq!(read(path), expected, "{path}");
        }
    }

    #[test]
    fn parameters_are_dropped_before_and_after_decoding_and_with_and_without_backslashes() {
        for (path, expected) in [
            ("/admin;%2Fx/users", "/admin/users"),
            ("/admin%3Bv%2Fx/users", "/admin/x/users"),
            (r"/secret;\x", "/secret"),
            (r"/secret;\x", "/secret/x"),
            (r"/secret%3B\x", "/secret"),
            (r"/x\secret;\y", "/x/secret"),
            (r"/x;\%79/;%2Fz", "/x/y/"),
            ("/a;%5Cb/c", "/a/c"),
            ("//x%2Fy/%61dmin", "/admin"),
            ("//x/one;%2Fx", "/one"),
            (r"/\x;/admin", "/admin"),
            (r"//x\y/admin", "/admin"),
        ] {
            assert!(read(path).iter().any(|read| read == expected), "{path}: {:?}", read(path));
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
        fn a_reading_has_no_further_readings(path in "(/[a-c;.]{0,3}|/%2[EF]|//|\\\\|%3B){0,6}") {
            if of(&path).is_ok() {
                let read = Reading(2).read(&path);
                prop_assert_eq!(of(&read), Ok(Vec::new()), "{}", path);
            }
        }

        /// A path that begins with the segments of another still does so in each reading of both.
        #[test]
        fn a_prefix_of_whole_segments_stays_one(prefix in r"(/[a-b;%\\]{1,3}){1,3}", rest in "(/[a-c]{1,3}){0,2}") {
            for reading in Reading::all() {
                let (path, prefix) = (reading.read(&format!("{prefix}{rest}")), reading.read(&prefix));
                let rest = path.strip_prefix(prefix.trim_end_matches('/'));
                prop_assert!(rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/')), "{} {}", path, prefix);
            }
        }
    }
}
