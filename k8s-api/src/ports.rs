//! Port numbers, ranges and names in annotations and Services: `4190,4191,8000-8100,postgres`.
//!
//! Parses them and answers membership; the caller knows which ports a name denotes, and passes them in.

use std::{fmt, num::NonZeroU16, ops::RangeInclusive, str::FromStr};

use crate::names;

/// Linkerd's default opaque ports: SMTP, submission, MySQL, Galera, PostgreSQL, Redis, ElasticSearch, memcached.
pub const DEFAULT_OPAQUE_PORTS: &str = "25,587,3306,4444,5432,6379,9300,11211";

/// Ports, as a sorted list of disjoint, non-adjacent ranges.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct PortSet(Vec<(u16, u16)>);

/// Port numbers, ranges, and names that a container or a Service defines.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortList {
    numbers: PortSet,
    names: Vec<String>,
}

/// An entry of a port list is neither a port, nor a range, nor (where allowed) a port name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("bad port {entry:?}, expected {expected}")]
pub struct PortError {
    /// The entry, unparsed.
    pub entry: String,
    /// The entries that would have been accepted.
    pub expected: &'static str,
}

const NUMBERS: &str = "ports 1-65535 or ranges such as 8000-8100, separated by commas";
const NUMBERS_OR_NAMES: &str = "ports 1-65535, ranges such as 8000-8100 or port names, separated by commas";

impl PortSet {
    /// Whether `port` is in the set.
    pub fn contains(&self, port: u16) -> bool {
        self.0.iter().any(|(first, last)| (*first..=*last).contains(&port))
    }

    /// Whether no port is in the set.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether every port of this set is in the other one.
    pub fn is_subset(&self, of: &Self) -> bool {
        // Adjacent ranges are one, so that a range is never covered by two.
        self.0.iter().all(|(first, last)| of.0.iter().any(|(start, end)| start <= first && last <= end))
    }

    /// Adds every port of `range`; an empty range adds nothing.
    pub fn insert(&mut self, range: RangeInclusive<u16>) {
        if range.is_empty() {
            return;
        }
        self.0.push((*range.start(), *range.end()));
        self.0.sort_unstable();
        let mut merged: Vec<(u16, u16)> = Vec::with_capacity(self.0.len());
        for (first, last) in self.0.drain(..) {
            match merged.last_mut() {
                Some((_, end)) if first <= end.saturating_add(1) => *end = (*end).max(last),
                _ => merged.push((first, last)),
            }
        }
        self.0 = merged;
    }

    /// The ranges in ascending order.
    pub fn ranges(&self) -> impl Iterator<Item = RangeInclusive<u16>> + '_ {
        self.0.iter().map(|(first, last)| *first..=*last)
    }

    /// Every port in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u16> + '_ {
        self.ranges().flatten()
    }
}

impl FromIterator<u16> for PortSet {
    fn from_iter<I: IntoIterator<Item = u16>>(ports: I) -> Self {
        let mut set = Self::default();
        for port in ports {
            set.insert(port..=port);
        }
        set
    }
}

impl FromStr for PortSet {
    type Err = PortError;

    fn from_str(text: &str) -> Result<Self, PortError> {
        let mut set = Self::default();
        for entry in entries(text) {
            set.insert(range(entry).ok_or_else(|| PortError { entry: entry.to_owned(), expected: NUMBERS })?);
        }
        Ok(set)
    }
}

impl fmt::Display for PortSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (first, last)) in self.0.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            if first == last { write!(f, "{comma}{first}")? } else { write!(f, "{comma}{first}-{last}")? }
        }
        Ok(())
    }
}

impl PortList {
    /// Reads what can be read, as Linkerd does: one bad entry does not lose the others. The error is the first bad
    /// entry's.
    pub fn read(text: &str) -> (Self, Option<PortError>) {
        let (mut list, mut bad) = (Self::default(), None);
        for entry in entries(text) {
            match range(entry) {
                Some(range) => list.numbers.insert(range),
                None if is_service_port_name(entry) => list.names.push(entry.to_owned()),
                None if bad.is_none() => {
                    bad = Some(PortError { entry: entry.to_owned(), expected: NUMBERS_OR_NAMES });
                }
                None => {}
            }
        }
        (list, bad)
    }

    /// Resolves names: `named(name)` returns every port that a name denotes. Unknown names match nothing, as with
    /// Linkerd.
    pub fn resolve(&self, mut named: impl FnMut(&str) -> Vec<u16>) -> PortSet {
        let mut set = self.numbers.clone();
        for name in &self.names {
            for port in named(name) {
                set.insert(port..=port);
            }
        }
        set
    }

    /// Whether the list covers a port by its number or by its name.
    pub fn covers(&self, port: u16, name: Option<&str>) -> bool {
        self.numbers.contains(port) || name.is_some_and(|name| self.names.iter().any(|n| n == name))
    }
}

impl From<PortSet> for PortList {
    fn from(numbers: PortSet) -> Self {
        Self { numbers, names: Vec::new() }
    }
}

/// Linkerd's default opaque ports, see [`DEFAULT_OPAQUE_PORTS`].
pub fn default_opaque_ports() -> PortSet {
    [25, 587, 3306, 4444, 5432, 6379, 9300, 11211].into_iter().collect()
}

fn entries(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|entry| !entry.is_empty())
}

/// A port or a range.
fn range(entry: &str) -> Option<RangeInclusive<u16>> {
    let (first, last) = entry.split_once('-').unwrap_or((entry, entry));
    let (first, last): (NonZeroU16, NonZeroU16) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
    (first <= last).then(|| first.get()..=last.get())
}

/// Whether `name` is the name of a container's port (RFC 6335 section 5.1 as Kubernetes applies it): at most 15
/// lower-case letters, digits and single inner hyphens, with at least one letter.
pub fn is_port_name(name: &str) -> bool {
    name.len() <= 15 && !name.contains("--") && is_service_port_name(name)
}

/// Whether `name` is the name of a Service's port: a DNS label. One without a letter is more likely a mistyped number.
fn is_service_port_name(name: &str) -> bool {
    names::is_label(name) && name.contains(|c: char| c.is_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn check(text: &str, expected: Result<&str, &str>) {
        let got = text.parse::<PortSet>().map(|set| set.to_string()).map_err(|error| error.entry);
        assert_eq!(got, expected.map(str::to_owned).map_err(str::to_owned), "{text:?}");
    }

    #[test]
    fn reads_ports_and_ranges() {
        for (text, expected) in [
            ("", Ok("")),
            ("4190,4191", Ok("4190-4191")),
            (" 8000-8100 , 80,", Ok("80,8000-8100")),
            ("1-65535", Ok("1-65535")),
            ("10-20,15-30", Ok("10-30")),
            ("0", Err("0")),
            ("65536", Err("65536")),
            ("20-10", Err("20-10")),
            ("1-2-3", Err("1-2-3")),
            ("http", Err("http")),
            ("80,-5", Err("-5")),
        ] {
            check(text, expected);
        }
    }

    #[test]
    fn a_set_is_in_another_with_all_its_ports() {
        for (set, of, expected) in [
            ("", "", true),
            ("80", "", false),
            ("80,8000-8100", "1-65535", true),
            ("10-20", "10-14,15-20", true),
            ("10-20", "10-14,16-20", false),
            ("9-20", "10-20", false),
        ] {
            let [set, of] = [set, of].map(|text| text.parse::<PortSet>().unwrap());
            assert_eq!(set.is_subset(&of), expected, "{set} in {of}");
        }
    }

    #[test]
    fn names_stand_for_the_ports_the_caller_knows() {
        let (list, bad) = PortList::read("80,postgres,no-such");
        assert_eq!(bad, None);
        let ports = list.resolve(|name| if name == "postgres" { vec![5432, 5433] } else { vec![] });
        assert_eq!(ports.to_string(), "80,5432-5433");
        assert!(list.covers(9, Some("postgres")) && !list.covers(9, None) && !list.covers(9, Some("other")));
    }

    #[test]
    fn names_are_those_of_services_too() {
        let longest = format!("p{}", "0".repeat(62));
        let too_long = format!("{longest}0");
        for (name, is_containers, is_services) in [
            ("http", true, true),
            ("postgres-replication", false, true),
            (longest.as_str(), false, true),
            (too_long.as_str(), false, false),
            ("a--b", false, true),
            ("-a", false, false),
            ("a-", false, false),
            ("A", false, false),
            ("a_b", false, false),
        ] {
            assert_eq!(is_port_name(name), is_containers, "{name}");
            let (list, bad) = PortList::read(name);
            assert_eq!((list.covers(1, Some(name)), bad.is_none()), (is_services, is_services), "{name}");
        }
        let (list, bad) = PortList::read("10-20");
        assert_eq!((list.numbers.to_string().as_str(), list.names.len(), bad), ("10-20", 0, None));
    }

    #[test]
    fn a_bad_entry_of_a_list_with_names_is_named_and_the_others_count() {
        for (text, numbers, names, bad) in [
            ("6543,My_Port,sql", "6543", &["sql"][..], Some("My_Port")),
            ("0,80,20-10,1-2-3", "80", &[], Some("0")),
            ("NOT A PORT", "", &[], Some("NOT A PORT")),
            ("", "", &[], None),
        ] {
            let (list, error) = PortList::read(text);
            assert_eq!(list.numbers.to_string(), numbers, "{text}");
            assert_eq!(list.names, names, "{text}");
            assert_eq!(error.map(|error| error.entry).as_deref(), bad, "{text}");
        }
    }

    #[test]
    fn the_default_list_is_the_documented_one() {
        assert_eq!(DEFAULT_OPAQUE_PORTS.parse::<PortSet>().unwrap(), default_opaque_ports());
    }

    proptest! {
        #[test]
        fn printing_and_parsing_agree(ranges in proptest::collection::vec((1u16.., 1u16..), 0..8)) {
            let mut set = PortSet::default();
            for (a, b) in ranges {
                set.insert(a.min(b)..=a.max(b));
            }
            prop_assert_eq!(set.to_string().parse::<PortSet>().unwrap(), set);
        }
    }
}
