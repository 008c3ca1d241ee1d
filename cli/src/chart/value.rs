//! Values in templates, as Go has them: maps are shared, so `set` changes the map that every variable sees.

use std::{cell::RefCell, collections::BTreeMap, fmt, rc::Rc};

use serde_json::Number;

/// A map, sorted as Go ranges over one.
pub(super) type Map = Rc<RefCell<BTreeMap<String, Value>>>;

/// A value.
#[derive(Clone, Debug, Default)]
pub(super) enum Value {
    #[default]
    Nil,
    Bool(bool),
    /// Of literals, and of functions such as `int`.
    Int(i64),
    /// Every number in YAML and JSON, as helm reads them.
    Float(f64),
    Text(Rc<str>),
    List(Rc<Vec<Value>>),
    Map(Map),
}

impl Value {
    pub(super) fn text(text: impl Into<Rc<str>>) -> Self {
        Self::Text(text.into())
    }

    pub(super) fn list(items: Vec<Value>) -> Self {
        Self::List(Rc::new(items))
    }

    pub(super) fn map(entries: BTreeMap<String, Value>) -> Self {
        Self::Map(Rc::new(RefCell::new(entries)))
    }

    /// Go's truth, and the opposite of sprig's `empty`.
    pub(super) fn is_true(&self) -> bool {
        match self {
            Self::Nil => false,
            Self::Bool(is) => *is,
            Self::Int(number) => *number != 0,
            Self::Float(number) => *number != 0.0,
            Self::Text(text) => !text.is_empty(),
            Self::List(items) => !items.is_empty(),
            Self::Map(map) => !map.borrow().is_empty(),
        }
    }

    /// Go's kind, for `kindIs` and messages.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Nil => "invalid",
            Self::Bool(_) => "bool",
            Self::Int(_) => "int64",
            Self::Float(_) => "float64",
            Self::Text(_) => "string",
            Self::List(_) => "slice",
            Self::Map(_) => "map",
        }
    }

    /// A copy that shares nothing.
    pub(super) fn deep(&self) -> Value {
        match self {
            Self::List(items) => Self::list(items.iter().map(Self::deep).collect()),
            Self::Map(map) => Self::map(map.borrow().iter().map(|(key, value)| (key.clone(), value.deep())).collect()),
            _ => self.clone(),
        }
    }

    /// As JSON; numbers without a fraction are integers, as Go writes them.
    pub(super) fn json(&self) -> serde_json::Value {
        use serde_json::Value as Json;
        match self {
            Self::Nil => Json::Null,
            Self::Bool(is) => Json::Bool(*is),
            Self::Int(number) => Json::from(*number),
            Self::Float(number) => match exact(*number) {
                Some(integer) => Json::from(integer),
                None => Number::from_f64(*number).map_or(Json::Null, Json::Number),
            },
            Self::Text(text) => Json::from(text.as_ref()),
            Self::List(items) => Json::Array(items.iter().map(Self::json).collect()),
            Self::Map(map) => {
                Json::Object(map.borrow().iter().map(|(key, value)| (key.clone(), value.json())).collect())
            }
        }
    }
}

impl From<serde_json::Value> for Value {
    fn from(json: serde_json::Value) -> Self {
        use serde_json::Value as Json;
        match json {
            Json::Null => Self::Nil,
            Json::Bool(is) => Self::Bool(is),
            Json::Number(number) => Self::Float(number.as_f64().unwrap_or_default()),
            Json::String(text) => Self::text(text),
            Json::Array(items) => Self::list(items.into_iter().map(Self::from).collect()),
            Json::Object(entries) => {
                Self::map(entries.into_iter().map(|(key, value)| (key, Self::from(value))).collect())
            }
        }
    }
}

/// The integer that a float is, if it is one that JSON readers keep.
fn exact(number: f64) -> Option<i64> {
    const MOST: f64 = 9_007_199_254_740_992.0;
    (number.fract() == 0.0 && number.abs() <= MOST).then_some(number as i64)
}

/// Go's `%v`. Nothing is the empty text, with which helm replaces `<no value>`.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nil => Ok(()),
            Self::Bool(is) => write!(f, "{is}"),
            Self::Int(number) => write!(f, "{number}"),
            Self::Float(number) => f.write_str(&float(*number)),
            Self::Text(text) => f.write_str(text),
            Self::List(items) => {
                f.write_str("[")?;
                for (index, item) in items.iter().enumerate() {
                    write!(f, "{}{item}", if index == 0 { "" } else { " " })?;
                }
                f.write_str("]")
            }
            Self::Map(map) => {
                f.write_str("map[")?;
                for (index, (key, value)) in map.borrow().iter().enumerate() {
                    write!(f, "{}{key}:{value}", if index == 0 { "" } else { " " })?;
                }
                f.write_str("]")
            }
        }
    }
}

/// The fewest digits, with an exponent below 1e-4 and from 1e6 (`strconv.FormatFloat(f, 'g', -1, 64)`).
fn float(number: f64) -> String {
    let scientific = format!("{number:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    match exponent.parse::<i32>() {
        Ok(exponent) if !(-4..6).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        _ => number.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_are_printed_as_go_does() {
        for (number, text) in [
            (0.0, "0"),
            (4143.0, "4143"),
            (0.5, "0.5"),
            (1e6, "1e+06"),
            (123_456_789.0, "1.23456789e+08"),
            (1e-5, "1e-05"),
        ] {
            assert_eq!(Value::Float(number).to_string(), text);
        }
        assert_eq!(Value::Float(1e6).json().to_string(), "1000000");
    }

    #[test]
    fn maps_are_shared_until_they_are_copied() {
        let map = Value::map(BTreeMap::new());
        let (shared, copy) = (map.clone(), map.deep());
        if let Value::Map(map) = &map {
            map.borrow_mut().insert("a".to_owned(), Value::Bool(true));
        }
        assert_eq!((shared.json(), copy.json()), (json!({"a": true}), json!({})));
    }
}
