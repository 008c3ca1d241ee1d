//! Why a body ended early, and the labels and answers for it.

use crate::{http::respond::Failure, request::deadlines::Expired};

/// Why a body ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BodyError {
    /// hyper could not read it, over HTTP/1.
    #[error("read the body")]
    Hyper(#[from] hyper::Error),
    /// The HTTP/2 stream was reset or its connection failed.
    #[error("read the body from its HTTP/2 stream")]
    H2(#[from] h2::Error),
    /// Its time is over.
    #[error("the body was not read in time: {0}")]
    Expired(Expired),
    /// Another of these errors, which came because clients of this proxy read slowly: the server has no part in it.
    #[error("{0}, because clients read slowly")]
    Unread(Box<Self>),
    /// The request is being sent again, from the beginning.
    #[error("the request is sent again")]
    Superseded,
}

impl BodyError {
    /// Whether the stream was reset by this proxy, as [`is_own_reset`] says.
    pub(super) fn is_own_reset(&self) -> bool {
        matches!(self, Self::H2(error) if is_own_reset(error))
    }

    /// Whether the server has no part in it.
    pub(crate) fn is_unread(&self) -> bool {
        matches!(self, Self::Unread(_))
    }

    /// The value of the label `error` of the families of statuses.
    pub(crate) fn status_label(&self) -> &'static str {
        match self {
            Self::Expired(expired) => Failure::Timeout(*expired).status_label(),
            Self::H2(error) => reset_label(error),
            Self::Hyper(_) => "IO",
            Self::Unread(error) => error.status_label(),
            Self::Superseded => "UNKNOWN",
        }
    }

    /// The value of the label `error` of `response_total`.
    pub(crate) fn response_label(&self) -> &'static str {
        match self {
            Self::Expired(_) => TIMEOUT,
            Self::H2(error) => response_reset_label(error),
            Self::Unread(error) => error.response_label(),
            Self::Hyper(_) | Self::Superseded => UNCLASSIFIED,
        }
    }

    /// The failure that a gRPC client is told in trailers; `None` if the stream is reset instead, as the server has
    /// reset it.
    pub(super) fn failure(&self) -> Option<Failure> {
        match self {
            Self::Expired(expired) => Some(Failure::Timeout(*expired)),
            Self::Unread(error) => error.failure(),
            Self::H2(error) if error.reason().is_some() && !error.is_go_away() => None,
            Self::Hyper(_) | Self::H2(_) | Self::Superseded => {
                Some(Failure::BadGateway("the response ended early".to_owned()))
            }
        }
    }
}

/// The value of the label `error` of the families of statuses for a stream that its server ended early.
pub(crate) fn reset_label(error: &h2::Error) -> &'static str {
    if error.is_go_away() {
        return "GO_AWAY";
    }
    if error.is_io() {
        return "IO";
    }
    match error.reason() {
        Some(h2::Reason::CANCEL) => "CANCEL",
        Some(h2::Reason::REFUSED_STREAM) => "REFUSED",
        Some(h2::Reason::ENHANCE_YOUR_CALM) => "ENHANCE_YOUR_CALM",
        _ => "RESET",
    }
}

/// The value of the label `error` of `response_total` for what has expired: Linkerd's.
pub(crate) const TIMEOUT: &str = "timeout";
/// The same for any other error: Linkerd's.
pub(crate) const UNCLASSIFIED: &str = "unclassified";

/// The value of the label `error` of `response_total` for a stream that was reset: Linkerd's, which has the names of
/// RFC 9113 section 7. A peer chooses the number of the reason; those without a name share a value.
pub(crate) fn response_reset_label(error: &h2::Error) -> &'static str {
    match error.reason() {
        None => UNCLASSIFIED,
        Some(h2::Reason::NO_ERROR) => "h2(NO_ERROR)",
        Some(h2::Reason::PROTOCOL_ERROR) => "h2(PROTOCOL_ERROR)",
        Some(h2::Reason::INTERNAL_ERROR) => "h2(INTERNAL_ERROR)",
        Some(h2::Reason::FLOW_CONTROL_ERROR) => "h2(FLOW_CONTROL_ERROR)",
        Some(h2::Reason::SETTINGS_TIMEOUT) => "h2(SETTINGS_TIMEOUT)",
        Some(h2::Reason::STREAM_CLOSED) => "h2(STREAM_CLOSED)",
        Some(h2::Reason::FRAME_SIZE_ERROR) => "h2(FRAME_SIZE_ERROR)",
        Some(h2::Reason::REFUSED_STREAM) => "h2(REFUSED_STREAM)",
        Some(h2::Reason::CANCEL) => "h2(CANCEL)",
        Some(h2::Reason::COMPRESSION_ERROR) => "h2(COMPRESSION_ERROR)",
        Some(h2::Reason::CONNECT_ERROR) => "h2(CONNECT_ERROR)",
        Some(h2::Reason::ENHANCE_YOUR_CALM) => "h2(ENHANCE_YOUR_CALM)",
        Some(h2::Reason::INADEQUATE_SECURITY) => "h2(INADEQUATE_SECURITY)",
        Some(h2::Reason::HTTP_1_1_REQUIRED) => "h2(HTTP_1_1_REQUIRED)",
        Some(_) => "h2(UNKNOWN)",
    }
}

/// Whether this proxy reset the stream, which it does when the client breaks off its request: the endpoint has no part
/// in it.
pub(crate) fn is_own_reset(error: &h2::Error) -> bool {
    error.is_reset() && !error.is_remote() && !error.is_library()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ended_a_response_is_labelled_as_linkerd_does_and_unnamed_numbers_share_a_value() {
        for number in 0..14 {
            let reason = h2::Reason::from(number);
            assert_eq!(BodyError::H2(reason.into()).response_label(), format!("h2({reason:?})"));
        }
        for number in [14, u32::MAX] {
            assert_eq!(BodyError::H2(h2::Reason::from(number).into()).response_label(), "h2(UNKNOWN)");
        }
        assert_eq!(BodyError::Expired(Expired::Idle).response_label(), "timeout");
        assert_eq!(BodyError::Superseded.response_label(), "unclassified");
    }

    #[test]
    fn what_slow_clients_end_is_labelled_as_what_ended_it() {
        let unread = BodyError::Unread(Box::new(BodyError::Expired(Expired::Idle)));
        assert_eq!((unread.response_label(), unread.status_label()), ("timeout", "IDLE_TIMEOUT"));
        assert!(matches!(unread.failure(), Some(Failure::Timeout(Expired::Idle))));
    }
}
