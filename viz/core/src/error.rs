//! Why a request has no answer.

/// Why a request has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The request is malformed; gRPC's INVALID_ARGUMENT.
    #[error("{field}: {message}")]
    Invalid {
        /// The field's name in `weft.viz.v1`.
        field: &'static str,
        /// What is wrong with it.
        message: String,
    },
    /// The pods are not known, with the reason; gRPC's UNAVAILABLE.
    #[error("{0}")]
    Unavailable(String),
}
