//! Small applications that the demo, the tests and the benches run inside pods. They are ordinary programs that know
//! nothing of the mesh:
//!
//! - [`server`]: one port for HTTP/1.1, HTTP/2, gRPC and WebSocket, one for a server-speaks-first protocol,
//! - [`client`]: sends requests to a server in one of these protocols and counts the results,
//! - [`rawtcp`]: plain TCP for measuring the cost of connections, round trips and bulk transfer.
//!
//! Nothing here is part of the product: no other package may depend on it at run time.

pub mod client;
pub mod listen;
pub mod rawtcp;
pub mod server;

/// The messages and services of `proto/echo.proto`.
#[expect(missing_docs, reason = "generated from proto/echo.proto, which carries the documentation")]
#[expect(clippy::allow_attributes, clippy::allow_attributes_without_reason, reason = "generated")]
pub mod echo {
    tonic::include_proto!("weft.examples.v1");
}
