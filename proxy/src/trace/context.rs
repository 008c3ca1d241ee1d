//! The trace that a request belongs to, in its headers: W3C's `traceparent`, gRPC's `grpc-trace-bin`, B3 in one header
//! or in several.
//!
//! Owns reading and writing them. Reads the first of the formats that is well formed, in this order; a malformed header
//! is no error, it is passed on as it is. Writes the format that was read and no other, as Linkerd's proxy does: a
//! request that carries two keeps the other one. `tracestate` belongs to others and is passed on.

use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use http::{HeaderMap, HeaderName, HeaderValue};

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");
const GRPC_TRACE_BIN: HeaderName = HeaderName::from_static("grpc-trace-bin");
const B3: HeaderName = HeaderName::from_static("b3");
const B3_TRACE_ID: HeaderName = HeaderName::from_static("x-b3-traceid");
const B3_SPAN_ID: HeaderName = HeaderName::from_static("x-b3-spanid");
const B3_PARENT_SPAN_ID: HeaderName = HeaderName::from_static("x-b3-parentspanid");
const B3_SAMPLED: HeaderName = HeaderName::from_static("x-b3-sampled");
const B3_FLAGS: HeaderName = HeaderName::from_static("x-b3-flags");

/// The longest `tracestate` that spans take over: what W3C requires to be propagated at least (Trace Context, 3.3.1.5).
const MAX_TRACE_STATE: usize = 512;

/// W3C's flags that have a meaning: sampled, and that the trace's ID is random (Trace Context 2).
const KNOWN_FLAGS: u8 = 0b11;
const SAMPLED: u8 = 0b1;

/// Version 0 of `grpc-trace-bin` and its three fields (OpenCensus' binary format): trace, span, options.
const GRPC_TRACE_BYTES: usize = 1 + 17 + 9 + 2;

/// The trace of a request, and the span that sent it. Neither ID is 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Context {
    pub(super) trace_id: u128,
    /// The sender's span.
    pub(super) span_id: u64,
    format: Format,
}

/// Where a context came from, and what has to be written with it.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Format {
    W3c { flags: u8 },
    GrpcTraceBin { options: u8 },
    B3Single { is_short: bool, sampling: Sampling },
    B3Multi { is_sampled: bool },
}

/// The third field of `b3`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sampling {
    Accepted,
    /// Accepted by everybody, whatever they sample.
    Debug,
    DeniedOrDeferred,
}

impl Context {
    /// The context of a request with these headers.
    pub(crate) fn read(headers: &HeaderMap) -> Option<Self> {
        w3c(headers).or_else(|| grpc_trace_bin(headers)).or_else(|| b3_single(headers)).or_else(|| b3_multi(headers))
    }

    /// Whether the sender records the trace.
    pub(crate) fn is_sampled(&self) -> bool {
        match self.format {
            Format::W3c { flags: bits } | Format::GrpcTraceBin { options: bits } => bits & SAMPLED != 0,
            Format::B3Single { sampling, .. } => sampling != Sampling::DeniedOrDeferred,
            Format::B3Multi { is_sampled } => is_sampled,
        }
    }

    /// Writes the context with `span_id` as the sender's span.
    pub(crate) fn write(&self, headers: &mut HeaderMap, span_id: u64) {
        let (trace_id, parent_id) = (self.trace_id, self.span_id);
        let (name, value) = match &self.format {
            Format::W3c { flags } => {
                (TRACEPARENT, format!("00-{trace_id:032x}-{span_id:016x}-{:02x}", flags & KNOWN_FLAGS))
            }
            Format::GrpcTraceBin { options } => {
                let mut bytes = Vec::with_capacity(GRPC_TRACE_BYTES);
                bytes.extend_from_slice(&[0, 0]);
                bytes.extend_from_slice(&trace_id.to_be_bytes());
                bytes.push(1);
                bytes.extend_from_slice(&span_id.to_be_bytes());
                bytes.extend_from_slice(&[2, *options]);
                (GRPC_TRACE_BIN, STANDARD_NO_PAD.encode(bytes))
            }
            Format::B3Single { is_short, sampling } => {
                let sampling = match sampling {
                    Sampling::Accepted => "-1",
                    Sampling::Debug => "-d",
                    Sampling::DeniedOrDeferred => "-0",
                };
                let width = if *is_short { 16 } else { 32 };
                (B3, format!("{trace_id:0width$x}-{span_id:016x}{sampling}-{parent_id:016x}"))
            }
            Format::B3Multi { .. } => {
                // Servers that share their client's span, as Zipkin's do, take its parent from here.
                insert(headers, B3_PARENT_SPAN_ID, format!("{parent_id:016x}"));
                (B3_SPAN_ID, format!("{span_id:016x}"))
            }
        };
        insert(headers, name, value);
    }
}

/// The request's `tracestate`, if there is one that is not too long.
pub(super) fn trace_state(headers: &HeaderMap) -> Option<&str> {
    only(headers, &TRACESTATE).filter(|state| state.len() <= MAX_TRACE_STATE)
}

fn insert(headers: &mut HeaderMap, name: HeaderName, value: String) {
    // Hexadecimal digits and base64 are always a value.
    if let Ok(value) = HeaderValue::try_from(value) {
        headers.insert(name, value);
    }
}

/// The value of a header that occurs once and is visible ASCII.
fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?;
    value.to_str().ok().filter(|_| values.next().is_none())
}

/// `version-traceid-parentid-flags` (Trace Context, 3.2). Later versions may append fields; 255 is invalid.
fn w3c(headers: &HeaderMap) -> Option<Context> {
    let mut fields = only(headers, &TRACEPARENT)?.split('-');
    let mut field = |digits| {
        fields
            .next()
            .filter(|field| !field.contains(|c: char| c.is_ascii_uppercase()))
            .and_then(|field| hex(field, digits))
    };
    let version = field(2)?;
    let (trace_id, span_id, flags) = (field(32)?, field(16)?, field(2)?);
    if version == 0xff || (version == 0 && fields.next().is_some()) {
        return None;
    }
    let format = Format::W3c { flags: u8::try_from(flags).ok()? };
    context(trace_id, span_id, format)
}

fn grpc_trace_bin(headers: &HeaderMap) -> Option<Context> {
    let text = only(headers, &GRPC_TRACE_BIN)?.trim_end_matches('=');
    let mut bytes = [0; 2 * GRPC_TRACE_BYTES];
    let length = STANDARD_NO_PAD.decode_slice(text, &mut bytes).ok()?;
    let (mut trace_id, mut span_id, mut options) = (0, 0, 0);
    let (version, mut rest) = bytes.get(..length)?.split_first()?;
    if *version != 0 {
        return None;
    }
    while let Some((field, value)) = rest.split_first() {
        rest = match field {
            0 => {
                let (value, rest) = value.split_first_chunk()?;
                trace_id = u128::from_be_bytes(*value);
                rest
            }
            1 => {
                let (value, rest) = value.split_first_chunk()?;
                span_id = u128::from(u64::from_be_bytes(*value));
                rest
            }
            2 => {
                let (value, rest) = value.split_first()?;
                options = *value;
                rest
            }
            // Fields of later versions follow those that are known.
            _ => break,
        };
    }
    context(trace_id, span_id, Format::GrpcTraceBin { options })
}

/// `traceid-spanid-sampled-parentspanid`, of which the last two may be missing (openzipkin/b3-propagation).
fn b3_single(headers: &HeaderMap) -> Option<Context> {
    let mut fields = only(headers, &B3)?.split('-');
    let trace_id = fields.next()?;
    let is_short = trace_id.len() == 16;
    let (trace_id, span_id) = (b3_trace_id(trace_id)?, hex(fields.next()?, 16)?);
    let sampling = match fields.next() {
        Some("1") => Sampling::Accepted,
        Some("d") => Sampling::Debug,
        _ => Sampling::DeniedOrDeferred,
    };
    context(trace_id, span_id, Format::B3Single { is_short, sampling })
}

fn b3_multi(headers: &HeaderMap) -> Option<Context> {
    let trace_id = b3_trace_id(only(headers, &B3_TRACE_ID)?)?;
    let span_id = hex(only(headers, &B3_SPAN_ID)?, 16)?;
    // Debug implies accept; `true` is what tracers before 2016 sent.
    let is_sampled = matches!(only(headers, &B3_SAMPLED), Some("1" | "true")) || only(headers, &B3_FLAGS) == Some("1");
    context(trace_id, span_id, Format::B3Multi { is_sampled })
}

/// 128 bits, or their lower half.
fn b3_trace_id(text: &str) -> Option<u128> {
    hex(text, 32).or_else(|| hex(text, 16))
}

fn context(trace_id: u128, span_id: u128, format: Format) -> Option<Context> {
    let span_id = u64::try_from(span_id).ok()?;
    (trace_id != 0 && span_id != 0).then_some(Context { trace_id, span_id, format })
}

/// A number of exactly `digits` hexadecimal digits, at most 32.
fn hex(text: &str, digits: usize) -> Option<u128> {
    let is_hex = text.len() == digits && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hex.then(|| u128::from_str_radix(text, 16).ok())?
}

#[cfg(test)]
mod tests;
