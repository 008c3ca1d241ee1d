//! Changes of a protobuf message that leave it one. A change of its bytes alone mostly breaks the length of a message
//! around it, and then nothing is read.

use prost::{
    bytes::{Buf, BufMut},
    encoding::{WireType, decode_key, decode_varint, encode_key, encode_varint},
};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

/// The deepest nesting that is looked into; the messages of policies nest less.
const MAX_DEPTH: usize = 24;
/// The largest number of a field that is invented.
const MAX_NUMBER: u32 = 8;
/// Numbers at which readers tend to decide.
const NUMBERS: [u64; 12] =
    [0, 1, 2, 99, 100, 599, 600, 65_535, 65_536, u32::MAX as u64, i64::MAX as u64, i64::MIN.cast_unsigned()];

/// A field of a message.
#[derive(Clone, Debug, PartialEq)]
struct Field {
    number: u32,
    value: Value,
}

/// What is known of a value without its message's definition.
#[derive(Clone, Debug, PartialEq)]
enum Value {
    Varint(u64),
    Eight(u64),
    Four(u32),
    /// A string, or something else that does not read as a message.
    Bytes(Vec<u8>),
    Message(Vec<Field>),
}

/// Changes one field of the message in the first `size` bytes of `data`; returns the new size, at most `max_size`. What
/// is not a message is changed by `change_bytes`, as is a field's text, and a message now and then.
pub(super) fn mutate(
    data: &mut [u8],
    size: usize,
    max_size: usize,
    seed: u32,
    change_bytes: impl Fn(&mut [u8], usize, usize) -> usize,
) -> usize {
    let mut rng = StdRng::seed_from_u64(seed.into());
    let parsed = parse(&data[..size], 0).filter(|fields| !fields.is_empty() && !rng.random_ratio(1, 16));
    let Some(mut fields) = parsed else { return change_bytes(data, size, max_size) };
    let others = flat(&fields);
    let mut left = rng.random_range(0..others.len());
    visit(&mut fields, &mut left, &mut |list, at| change(list, at, &others, &mut rng, &change_bytes));
    let changed = encoded(&fields);
    if changed.len() > max_size {
        return change_bytes(data, size, max_size);
    }
    data[..changed.len()].copy_from_slice(&changed);
    changed.len()
}

/// Changes a field of a message, or the message around it.
fn change(
    list: &mut Vec<Field>,
    at: usize,
    others: &[Field],
    rng: &mut StdRng,
    change_bytes: &impl Fn(&mut [u8], usize, usize) -> usize,
) {
    match rng.random_range(0..8) {
        0 => drop(list.remove(at)),
        1 => list.insert(at, list[at].clone()),
        2 => list[at].number = rng.random_range(1..=MAX_NUMBER),
        3 => list[at].value = others[rng.random_range(0..others.len())].value.clone(),
        4 => {
            let value = if rng.random() { Value::Message(Vec::new()) } else { Value::Varint(number(rng)) };
            let field = Field { number: rng.random_range(1..=MAX_NUMBER), value };
            match &mut list[at].value {
                Value::Message(inner) => inner.push(field),
                _ => list.push(field),
            }
        }
        _ => match &mut list[at].value {
            Value::Varint(value) if rng.random() => *value = value.wrapping_add(1),
            Value::Varint(value) => *value = number(rng),
            Value::Eight(value) => *value = if rng.random() { rng.random() } else { number(rng) },
            Value::Four(value) => *value = rng.random(),
            Value::Bytes(bytes) => {
                let size = bytes.len();
                bytes.resize(size + 16, 0);
                let size = change_bytes(bytes, size, size + 16);
                bytes.truncate(size);
            }
            Value::Message(inner) => inner.reverse(),
        },
    }
}

fn number(rng: &mut StdRng) -> u64 {
    if rng.random_ratio(3, 4) { NUMBERS[rng.random_range(0..NUMBERS.len())] } else { rng.random() }
}

/// Calls `change` with the field that comes after `left` others, and the list that it is in.
fn visit(fields: &mut Vec<Field>, left: &mut usize, change: &mut impl FnMut(&mut Vec<Field>, usize)) -> bool {
    for at in 0..fields.len() {
        if *left == 0 {
            change(fields, at);
            return true;
        }
        *left -= 1;
        if let Value::Message(inner) = &mut fields[at].value
            && visit(inner, left, change)
        {
            return true;
        }
    }
    false
}

/// All fields at all depths, in the order of [`visit`].
fn flat(fields: &[Field]) -> Vec<Field> {
    let mut all = Vec::new();
    for field in fields {
        all.push(field.clone());
        if let Value::Message(inner) = &field.value {
            all.extend(flat(inner));
        }
    }
    all
}

fn parse(mut bytes: &[u8], depth: usize) -> Option<Vec<Field>> {
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let (number, kind) = decode_key(&mut bytes).ok()?;
        let value = match kind {
            WireType::Varint => Value::Varint(decode_varint(&mut bytes).ok()?),
            WireType::SixtyFourBit => Value::Eight(bytes.try_get_u64_le().ok()?),
            WireType::ThirtyTwoBit => Value::Four(bytes.try_get_u32_le().ok()?),
            WireType::LengthDelimited => {
                let length = usize::try_from(decode_varint(&mut bytes).ok()?).ok()?;
                let (inner, rest) = bytes.split_at_checked(length)?;
                bytes = rest;
                let parsed = if depth < MAX_DEPTH { parse(inner, depth + 1) } else { None };
                parsed.map_or_else(|| Value::Bytes(inner.to_vec()), Value::Message)
            }
            WireType::StartGroup | WireType::EndGroup => return None,
        };
        fields.push(Field { number, value });
    }
    Some(fields)
}

fn encoded(fields: &[Field]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let delimited = |number, inner: &[u8], bytes: &mut Vec<u8>| {
        encode_key(number, WireType::LengthDelimited, bytes);
        encode_varint(inner.len() as u64, bytes);
        bytes.extend_from_slice(inner);
    };
    for Field { number, value } in fields {
        match value {
            Value::Varint(value) => {
                encode_key(*number, WireType::Varint, &mut bytes);
                encode_varint(*value, &mut bytes);
            }
            Value::Eight(value) => {
                encode_key(*number, WireType::SixtyFourBit, &mut bytes);
                bytes.put_u64_le(*value);
            }
            Value::Four(value) => {
                encode_key(*number, WireType::ThirtyTwoBit, &mut bytes);
                bytes.put_u32_le(*value);
            }
            Value::Bytes(inner) => delimited(*number, inner, &mut bytes),
            Value::Message(inner) => delimited(*number, &encoded(inner), &mut bytes),
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use weft_proto::linkerd::http_route::{HostMatch, HttpRouteMatch, PathMatch, host_match, path_match};

    use super::*;

    /// No change of bytes.
    fn unchanged(_: &mut [u8], size: usize, _: usize) -> usize {
        size
    }

    #[test]
    fn what_was_parsed_is_written_again() {
        use prost::Message as _;
        let fields = [
            Field { number: 1, value: Value::Varint(u64::MAX) },
            Field { number: 2, value: Value::Eight(1.5_f64.to_bits()) },
            Field { number: 300, value: Value::Four(7) },
            Field { number: 4, value: Value::Bytes(b"\xff\xff".to_vec()) },
            Field { number: 5, value: Value::Message(vec![Field { number: 1, value: Value::Message(Vec::new()) }]) },
        ];
        assert_eq!(parse(&encoded(&fields), 0).as_deref(), Some(&fields[..]));
        let host = HostMatch { r#match: Some(host_match::Match::Exact("a.example.org".to_owned())) }.encode_to_vec();
        assert_eq!(encoded(&parse(&host, 0).expect("a message")), host);
        for broken in [&b"\x0a"[..], b"\x0a\x05ab", b"\x0b", b"\x0d\0\0", b"\x09\0", b"\x00"] {
            assert_eq!(parse(broken, 0), None, "{broken:?}");
        }
    }

    #[test]
    fn a_changed_message_is_a_message_with_another_field() {
        use prost::Message as _;
        let kind = Some(path_match::Kind::Prefix("/items/every".to_owned()));
        let message = HttpRouteMatch { path: Some(PathMatch { kind }), ..Default::default() }.encode_to_vec();
        let changed = |seed, max_size| {
            let mut data = message.clone();
            data.resize(message.len().max(max_size), 0);
            let size = mutate(&mut data, message.len(), max_size, seed, unchanged);
            data[..size].to_vec()
        };
        let all: Vec<_> = (0..500).map(|seed| changed(seed, 64)).collect();
        assert_eq!(all, (0..500).map(|seed| changed(seed, 64)).collect::<Vec<_>>(), "the same seed, the same change");
        assert!(all.iter().all(|bytes| bytes.len() <= 64 && parse(bytes, 0).is_some()));
        assert!(all.iter().filter(|bytes| **bytes != message).count() > 250);
        assert!((0..500).all(|seed| changed(seed, message.len()).len() <= message.len()));
        assert!((0..500).all(|seed| mutate(&mut [0xff; 8], 4, 8, seed, unchanged) == 4), "not a message");
    }
}
