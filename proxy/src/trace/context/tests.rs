//! Tests of reading and writing contexts.

use proptest::prelude::*;

use super::*;

const TRACE: u128 = 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736;
const SPAN: u64 = 0x00f0_67aa_0ba9_02b7;
const W3C: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const B3_SHORT: &str = "a3ce929d0e0e4736-00f067aa0ba902b7-1";

fn headers(fields: &[(&str, &str)]) -> HeaderMap {
    fields.iter().map(|(name, value)| (name.parse::<HeaderName>().unwrap(), value.parse().unwrap())).collect()
}

/// Trace, span and whether it is sampled.
fn read(fields: &[(&str, &str)]) -> Option<(u128, u64, bool)> {
    Context::read(&headers(fields)).map(|context| (context.trace_id, context.span_id, context.is_sampled()))
}

fn grpc(fields: &[&[u8]]) -> String {
    STANDARD_NO_PAD.encode(fields.concat())
}

#[test]
fn each_format_is_read() {
    let trace = TRACE.to_be_bytes();
    let binary = grpc(&[&[0, 0], &trace, &[1], &SPAN.to_be_bytes(), &[2, 1]]);
    let padded = format!("{binary}=");
    let (id, span) = ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7");
    let single = format!("{id}-{span}-d-05e3ac9a4f6e3b90");
    for fields in [
        &[("traceparent", W3C)][..],
        &[("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-03")],
        &[("traceparent", "cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-what-the-future-brings")],
        &[("grpc-trace-bin", &*binary)],
        &[("grpc-trace-bin", &*padded)],
        &[("b3", &*single)],
        &[("x-b3-traceid", id), ("x-b3-spanid", span), ("x-b3-sampled", "1")],
        &[("x-b3-traceid", id), ("x-b3-spanid", span), ("x-b3-sampled", "true")],
        &[("x-b3-traceid", id), ("x-b3-spanid", span), ("x-b3-flags", "1")],
    ] {
        assert_eq!(read(fields), Some((TRACE, SPAN, true)), "{fields:?}");
    }
    assert_eq!(read(&[("b3", B3_SHORT)]), Some((0xa3ce_929d_0e0e_4736, SPAN, true)));
}

#[test]
fn what_the_sender_does_not_sample_is_not_sampled() {
    let (id, span) = ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7");
    let (denied, deferred) = (format!("{id}-{span}-0"), format!("{id}-{span}"));
    for fields in [
        &[("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00")][..],
        &[("b3", &*denied)],
        &[("b3", &*deferred)],
        &[("x-b3-traceid", id), ("x-b3-spanid", span), ("x-b3-sampled", "0")],
        &[("x-b3-traceid", id), ("x-b3-spanid", span)],
    ] {
        assert_eq!(read(fields), Some((TRACE, SPAN, false)), "{fields:?}");
    }
}

#[test]
fn malformed_headers_are_none() {
    let trace = TRACE.to_be_bytes();
    let truncated = grpc(&[&[0, 0], &trace[..10]]);
    let version = grpc(&[&[1, 0], &trace, &[1], &SPAN.to_be_bytes(), &[2, 1]]);
    let endless = "A".repeat(60_000);
    for fields in [
        &[][..],
        &[("traceparent", "")],
        &[("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7")],
        &[("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more")],
        &[("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-011")],
        &[("traceparent", "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")],
        &[("traceparent", "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01")],
        &[("traceparent", "00-00000000000000000000000000000000-00f067aa0ba902b7-01")],
        &[("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01")],
        &[("traceparent", "00-+bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")],
        &[("traceparent", W3C), ("traceparent", W3C)],
        &[("traceparent", &*endless)],
        &[("grpc-trace-bin", "not base64")],
        &[("grpc-trace-bin", "")],
        &[("grpc-trace-bin", &*truncated)],
        &[("grpc-trace-bin", &*version)],
        &[("grpc-trace-bin", &*endless)],
        &[("b3", "0")],
        &[("b3", "4bf92f3577b34da6a3ce929d0e0e4736-1")],
        &[("x-b3-traceid", "4bf92f3577b34da6a3ce929d0e0e4736")],
        &[("x-b3-traceid", "4bf9"), ("x-b3-spanid", "00f067aa0ba902b7")],
    ] {
        assert_eq!(read(fields), None, "{fields:?}");
    }
}

#[test]
fn w3c_goes_before_b3_and_a_malformed_one_does_not_hide_it() {
    let denied = ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00");
    assert_eq!(read(&[denied, ("b3", B3_SHORT)]), Some((TRACE, SPAN, false)));
    assert_eq!(read(&[("traceparent", "00-1"), ("b3", B3_SHORT)]), Some((0xa3ce_929d_0e0e_4736, SPAN, true)));
}

#[test]
fn grpcs_binary_goes_before_b3_and_after_w3c() {
    let binary = grpc(&[&[0, 0], &1_u128.to_be_bytes(), &[1], &2_u64.to_be_bytes(), &[2, 0]]);
    let (of_grpc, single) = (("grpc-trace-bin", &*binary), ("b3", B3_SHORT));
    let multi = [("x-b3-traceid", "a3ce929d0e0e4736"), ("x-b3-spanid", "00f067aa0ba902b7"), ("x-b3-sampled", "1")];
    assert_eq!(read(&[single, of_grpc]), Some((1, 2, false)));
    assert_eq!(read(&[multi[0], multi[1], multi[2], of_grpc]), Some((1, 2, false)));
    assert_eq!(read(&[of_grpc, ("traceparent", W3C)]), Some((TRACE, SPAN, true)));
    let malformed = ("grpc-trace-bin", "AAAA");
    assert_eq!(read(&[malformed, single]), Some((0xa3ce_929d_0e0e_4736, SPAN, true)));
}

#[test]
fn only_the_format_that_was_read_is_written() {
    let write = |fields: &[(&str, &str)]| {
        let mut written = headers(fields);
        Context::read(&written).unwrap().write(&mut written, 0xabc);
        let text = |(name, value): (&HeaderName, &HeaderValue)| format!("{name}: {}", value.to_str().unwrap());
        let mut lines: Vec<String> = written.iter().map(text).collect();
        lines.sort_unstable();
        lines
    };
    let w3c = "traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000abc-01";
    let b3 = format!("b3: {B3_SHORT}");
    assert_eq!(write(&[("traceparent", W3C), ("tracestate", "a=1"), ("b3", B3_SHORT)]), [&*b3, w3c, "tracestate: a=1"]);
    assert_eq!(write(&[("b3", B3_SHORT)]), ["b3: a3ce929d0e0e4736-0000000000000abc-1-00f067aa0ba902b7"]);
    let multi = [("x-b3-traceid", "A3CE929D0E0E4736"), ("x-b3-spanid", "00f067aa0ba902b7"), ("x-b3-sampled", "1")];
    assert_eq!(
        write(&multi),
        [
            "x-b3-parentspanid: 00f067aa0ba902b7",
            "x-b3-sampled: 1",
            "x-b3-spanid: 0000000000000abc",
            "x-b3-traceid: A3CE929D0E0E4736"
        ]
    );
}

fn formats() -> impl Strategy<Value = Format> {
    let sampling = prop_oneof![Just(Sampling::Accepted), Just(Sampling::Debug), Just(Sampling::DeniedOrDeferred)];
    prop_oneof![
        (0..=KNOWN_FLAGS).prop_map(|flags| Format::W3c { flags }),
        any::<u8>().prop_map(|options| Format::GrpcTraceBin { options }),
        sampling.prop_map(|sampling| Format::B3Single { is_short: false, sampling }),
    ]
}

proptest! {
    #[test]
    fn what_is_written_is_read_with_the_new_span(
        trace_id in 1..=u128::MAX, span_id in 1..=u64::MAX, next in 1..=u64::MAX, format in formats(),
    ) {
        let context = Context { trace_id, span_id, format };
        let mut headers = HeaderMap::new();
        context.write(&mut headers, next);
        prop_assert_eq!(Context::read(&headers), Some(Context { span_id: next, ..context }));
    }

    #[test]
    fn several_headers_of_b3_keep_their_trace(trace_id in 1..=u128::MAX, span_id in 1..=u64::MAX, next in 1..=u64::MAX, is_sampled: bool) {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            (B3_TRACE_ID, format!("{trace_id:032x}")),
            (B3_SPAN_ID, format!("{span_id:016x}")),
            (B3_SAMPLED, u8::from(is_sampled).to_string()),
        ] {
            insert(&mut headers, name, value);
        }
        let format = Format::B3Multi { is_sampled };
        let context = Context { trace_id, span_id, format };
        prop_assert_eq!(Context::read(&headers), Some(context.clone()));
        context.write(&mut headers, next);
        prop_assert_eq!(Context::read(&headers), Some(Context { span_id: next, ..context }));
    }

    #[test]
    fn any_text_is_read_or_ignored(name in 0..6_usize, value in "[ -~]{0,80}") {
        let name = [TRACEPARENT, GRPC_TRACE_BIN, B3, B3_TRACE_ID, B3_SPAN_ID, TRACESTATE][name].clone();
        let mut headers = headers(&[("x-b3-traceid", "a3ce929d0e0e4736"), ("x-b3-spanid", "00f067aa0ba902b7")]);
        insert(&mut headers, name, value);
        if let Some(context) = Context::read(&headers) {
            context.write(&mut headers, SPAN);
            prop_assert_eq!(Context::read(&headers).map(|read| (read.trace_id, read.span_id)), Some((context.trace_id, SPAN)));
        }
    }
}
