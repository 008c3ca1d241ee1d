//! The name server of a sandbox: answers from a snapshot for the cluster's domain, refuses all other names.

use std::{net::SocketAddr, path::Path, sync::Arc, time::Duration};

use hickory_server::{
    net::runtime::Time,
    proto::{
        op::{Header, HeaderCounts, Metadata, ResponseCode},
        rr::{
            Name, RData, Record, RecordType,
            rdata::{A, AAAA, SRV},
        },
    },
    server::{Request, RequestHandler, ResponseHandler, ResponseInfo, Server},
    zone_handler::MessageResponseBuilder,
};
use tokio::{
    net::{TcpListener, UdpSocket},
    sync::watch,
};

use super::{
    DaemonError,
    names::{Answer, Names},
};
use crate::host::netns;

/// TTL of answers, in seconds: kube-dns' default.
const TTL_SECONDS: u32 = 5;
/// How long a client may leave a TCP connection idle.
const TCP_TIMEOUT: Duration = Duration::from_secs(5);
/// Answers that may wait on one TCP connection.
const TCP_BUFFER: usize = 32;

/// Answers from the current snapshot.
struct Handler {
    names: watch::Receiver<Arc<Names>>,
}

/// Binds in the node's network namespace and serves until the returned value is dropped.
///
/// # Errors
/// When the address cannot be bound.
pub(super) async fn serve(
    node_netns: &Path,
    address: SocketAddr,
    names: watch::Receiver<Arc<Names>>,
) -> Result<impl Sized + Send + use<>, DaemonError> {
    let bind = move || -> std::io::Result<_> {
        let (udp, tcp) = (std::net::UdpSocket::bind(address)?, std::net::TcpListener::bind(address)?);
        udp.set_nonblocking(true)?;
        tcp.set_nonblocking(true)?;
        Ok((udp, tcp))
    };
    let failed = |source| DaemonError::NameServer { address, source };
    let (udp, tcp) = netns::within(node_netns, bind)?.map_err(failed)?;
    let mut server = Server::new(Handler { names });
    server.register_socket(UdpSocket::from_std(udp).map_err(failed)?);
    server.register_listener(TcpListener::from_std(tcp).map_err(failed)?, TCP_TIMEOUT, TCP_BUFFER);
    Ok(server)
}

impl Handler {
    fn answer(&self, name: &Name, record_type: RecordType) -> (ResponseCode, Vec<Record>) {
        let text = name.to_ascii();
        let names = self.names.borrow();
        let record = |data| Record::from_rdata(name.clone(), TTL_SECONDS, data);
        let answer = match record_type {
            RecordType::SRV => match names.targets(&text) {
                Answer::Found(targets) => Answer::Found(
                    targets
                        .into_iter()
                        .filter_map(|target| {
                            let host = Name::from_ascii(format!("{}.", target.host)).ok()?;
                            Some(record(RData::SRV(SRV::new(0, 100, target.port, host))))
                        })
                        .collect(),
                ),
                Answer::NoSuchName => Answer::NoSuchName,
                Answer::NotOurs => Answer::NotOurs,
            },
            wanted => match names.addresses(&text) {
                Answer::Found(ips) => Answer::Found(
                    ips.into_iter()
                        .filter_map(|ip| match (ip, wanted) {
                            (std::net::IpAddr::V4(ip), RecordType::A) => Some(record(RData::A(A(ip)))),
                            (std::net::IpAddr::V6(ip), RecordType::AAAA) => Some(record(RData::AAAA(AAAA(ip)))),
                            _ => None,
                        })
                        .collect(),
                ),
                Answer::NoSuchName => Answer::NoSuchName,
                Answer::NotOurs => Answer::NotOurs,
            },
        };
        match answer {
            Answer::Found(records) => (ResponseCode::NoError, records),
            Answer::NoSuchName => (ResponseCode::NXDomain, Vec::new()),
            Answer::NotOurs => (ResponseCode::Refused, Vec::new()),
        }
    }
}

#[async_trait::async_trait]
impl RequestHandler for Handler {
    async fn handle_request<R: ResponseHandler, T: Time>(&self, request: &Request, mut response: R) -> ResponseInfo {
        let mut metadata = Metadata::response_from_request(&request.metadata);
        let (code, records) = match request.request_info() {
            Ok(info) => self.answer(info.query.original().name(), info.query.query_type()),
            Err(_) => (ResponseCode::FormErr, Vec::new()),
        };
        metadata.response_code = code;
        metadata.authoritative = code != ResponseCode::Refused;
        let message = MessageResponseBuilder::from_message_request(request);
        match response.send_response(message.build(metadata, &records, [], [], [])).await {
            Ok(info) => info,
            Err(error) => {
                tracing::debug!(%error, client.addr = %request.src(), "dns answer not sent");
                Header { metadata, counts: HeaderCounts::default() }.into()
            }
        }
    }
}
