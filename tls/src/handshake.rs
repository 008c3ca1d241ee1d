//! A TLS handshake without a network, for tests.

use rustls::{ClientConnection, Error, ServerConnection};

/// Carries records between the two until both are done, or one refuses.
pub(crate) fn complete(client: &mut ClientConnection, server: &mut ServerConnection) -> Result<(), Error> {
    while client.is_handshaking() || server.is_handshaking() {
        let mut wire = Vec::new();
        client.write_tls(&mut wire).unwrap();
        server.read_tls(&mut wire.as_slice()).unwrap();
        server.process_new_packets()?;
        wire.clear();
        server.write_tls(&mut wire).unwrap();
        client.read_tls(&mut wire.as_slice()).unwrap();
        client.process_new_packets()?;
    }
    Ok(())
}
