//! Paths of fields in objects: `spec.networks[0].cidr`, `metadata.annotations["config.linkerd.io/proxy-uid"]`.

use std::fmt;

/// One step from a value to a value inside it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// The value of a key.
    Key(String),
    /// The n-th element, from 0.
    Index(usize),
}

/// Steps from the object's root.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct FieldPath(pub Vec<Step>);

/// A field with an invalid value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct Invalid {
    /// Path of the field.
    pub field: FieldPath,
    /// What is wrong and what was expected.
    pub problem: String,
}

impl FieldPath {
    /// The path of dotted keys, as in `FieldPath::of("spec.port")`.
    pub fn of(dotted: &str) -> Self {
        Self(dotted.split('.').map(|key| Step::Key(key.to_owned())).collect())
    }

    /// The path of an annotation.
    pub fn annotation(name: &str) -> Self {
        Self::of("metadata.annotations").key(name)
    }

    /// Appends a key.
    #[must_use]
    pub fn key(mut self, key: &str) -> Self {
        self.0.push(Step::Key(key.to_owned()));
        self
    }

    /// Appends an index.
    #[must_use]
    pub fn index(mut self, index: usize) -> Self {
        self.0.push(Step::Index(index));
        self
    }

    /// This path, prefixed with `outer`.
    #[must_use]
    pub fn under(self, mut outer: Self) -> Self {
        outer.0.extend(self.0);
        outer
    }

    /// A problem at this path.
    pub fn invalid(self, problem: impl fmt::Display) -> Invalid {
        Invalid { field: self, problem: problem.to_string() }
    }
}

impl fmt::Display for FieldPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, step) in self.0.iter().enumerate() {
            match step {
                Step::Index(index) => write!(f, "[{index}]")?,
                Step::Key(key) if key.contains(['.', '/']) => write!(f, "[{key:?}]")?,
                Step::Key(key) if i == 0 => f.write_str(key)?,
                Step::Key(key) => write!(f, ".{key}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_keys_elements_and_quoted_names() {
        assert_eq!(FieldPath::of("spec.networks").index(0).key("cidr").to_string(), "spec.networks[0].cidr");
        assert_eq!(FieldPath::annotation("a.b/c").to_string(), "metadata.annotations[\"a.b/c\"]");
        assert_eq!(FieldPath::of("spec").under(FieldPath::of("items").index(1)).to_string(), "items[1].spec");
    }
}
