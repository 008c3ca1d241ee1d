//! Line and column of a field, found by walking the text with the parser and stopping at the field.
//!
//! Typed objects carry no positions, so a rule that fails after parsing (such as an `except` outside its `cidr`) asks
//! here. The walk ends in an error on purpose: the parser adds the position to it.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::field::{FieldPath, Step};

/// Line and column, from 1, of the value at `path`, or of its innermost parent that exists.
pub fn locate(text: &str, json: bool, path: &FieldPath) -> Option<(usize, usize)> {
    (0..=path.0.len()).rev().find_map(|length| walk(text, json, &path.0[..length]))
}

fn walk(text: &str, json: bool, steps: &[Step]) -> Option<(usize, usize)> {
    if json {
        let mut deserializer = serde_json::Deserializer::from_str(text);
        let error = Walk(steps).deserialize(&mut deserializer).err()?;
        return error.to_string().starts_with(FOUND).then(|| (error.line(), error.column()));
    }
    let error = Walk(steps).deserialize(serde_yaml_ng::Deserializer::from_str(text)).err()?;
    let location = error.location()?;
    error.to_string().contains(FOUND).then(|| (location.line(), location.column()))
}

/// Message of the error that means success.
const FOUND: &str = "\u{1}field found\u{1}";

#[derive(Clone, Copy)]
struct Walk<'a>(&'a [Step]);

impl<'de> DeserializeSeed<'de> for Walk<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl Walk<'_> {
    /// A scalar ends the walk: either it is the field, or the path continues below it.
    fn end<E: Error>(self) -> Result<(), E> {
        if self.0.is_empty() { Err(E::custom(FOUND)) } else { Ok(()) }
    }
}

impl<'de> Visitor<'de> for Walk<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Some((first, rest)) = self.0.split_first() else { return Err(A::Error::custom(FOUND)) };
        while let Some(key) = map.next_key::<String>()? {
            match first {
                Step::Key(wanted) if *wanted == key => map.next_value_seed(Walk(rest))?,
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let Some((first, rest)) = self.0.split_first() else { return Err(A::Error::custom(FOUND)) };
        let mut index = 0;
        loop {
            let present = match first {
                Step::Index(wanted) if *wanted == index => seq.next_element_seed(Walk(rest))?.is_some(),
                _ => seq.next_element::<IgnoredAny>()?.is_some(),
            };
            if !present {
                return Ok(());
            }
            index += 1;
        }
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<(), E> {
        self.end()
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<(), E> {
        self.end()
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<(), E> {
        self.end()
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<(), E> {
        self.end()
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<(), E> {
        self.end()
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        self.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const YAML: &str =
        "kind: Server\nmetadata:\n  name: web\nspec:\n  networks:\n  - cidr: a\n  - cidr: b\n    except: [c]\n";

    fn check(path: FieldPath, line: usize) {
        assert_eq!(locate(YAML, false, &path).map(|(line, _)| line), Some(line), "{path}");
    }

    #[test]
    fn finds_lines_and_falls_back_to_parents() {
        check(FieldPath::of("kind"), 1);
        check(FieldPath::of("metadata.name"), 3);
        check(FieldPath::of("spec.networks").index(1).key("cidr"), 7);
        check(FieldPath::of("spec.networks").index(1).key("except").index(0), 8);
        check(FieldPath::of("spec.networks").index(0).key("except"), 6);
        check(FieldPath::of("spec.absent.field"), 5);
    }

    #[test]
    fn finds_lines_in_json() {
        let text = "{\n  \"kind\": \"Server\",\n  \"spec\": {\n    \"port\": \"0\"\n  }\n}";
        assert_eq!(locate(text, true, &FieldPath::of("spec.port")).map(|(line, _)| line), Some(4));
    }
}
