//! A DNS server on loopback for tests, whose records change while it runs.

use std::{
    collections::HashMap,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use hickory_resolver::{
    TokioResolver,
    config::{ConnectionConfig, NameServerConfig, ResolverConfig},
    net::runtime::TokioRuntimeProvider,
    proto::{
        op::{Message, ResponseCode},
        rr::{
            Name, RData, Record, RecordType,
            rdata::{A, SRV},
        },
    },
};
use parking_lot::Mutex;
use tokio::net::UdpSocket;

use super::Dns;
use crate::{config::DnsConfig, metrics::Counters};

/// How long resolvers of tests wait for an answer.
const PATIENCE: Duration = Duration::from_millis(200);

/// The records of a name by their type, with their TTL in seconds.
type Records = HashMap<(Name, RecordType), (u32, Vec<RData>)>;

/// What is wrong with a server's answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// The server does not answer.
    Silence,
    /// They are not messages.
    Garbage,
    /// They answer another question.
    Foreign,
    /// They say that the server failed.
    Failure,
    /// They have no records, and say that there is more over TCP, where no server listens.
    Truncation,
}

/// The server. It ends with the test's runtime.
pub(crate) struct DnsServer {
    addr: SocketAddr,
    records: Arc<Mutex<Records>>,
    trouble: Arc<Mutex<Option<Trouble>>>,
}

impl DnsServer {
    /// Starts a server without records.
    pub(crate) async fn start() -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let addr = socket.local_addr().unwrap();
        let records = Arc::<Mutex<Records>>::default();
        let served = Arc::clone(&records);
        let trouble = Arc::<Mutex<Option<Trouble>>>::default();
        let troubled = Arc::clone(&trouble);
        tokio::spawn(async move {
            let mut packet = [0; 4096];
            while let Ok((length, client)) = socket.recv_from(&mut packet).await {
                let mut message = Message::from_vec(&packet[..length]).unwrap();
                let question = message.queries[0].clone();
                let known = served.lock().get(&(question.name().clone(), question.query_type())).cloned();
                let queries = std::mem::take(&mut message.queries);
                let mut answer = Message::response(message.metadata.id, message.metadata.op_code);
                answer.queries = queries;
                answer.metadata.recursion_available = true;
                match known {
                    None => answer.metadata.response_code = ResponseCode::NXDomain,
                    Some((ttl, records)) => {
                        let record = |data| Record::from_rdata(question.name().clone(), ttl, data);
                        answer.answers = records.into_iter().map(record).collect();
                    }
                }
                let mut garbage = None;
                match *troubled.lock() {
                    None => {}
                    Some(Trouble::Silence) => continue,
                    Some(Trouble::Garbage) => garbage = Some(b"HTTP/1.1 400 Bad Request".to_vec()),
                    Some(Trouble::Foreign) => answer.metadata.id = answer.metadata.id.wrapping_add(1),
                    Some(Trouble::Failure) => {
                        answer.answers.clear();
                        answer.metadata.response_code = ResponseCode::ServFail;
                    }
                    Some(Trouble::Truncation) => {
                        answer.answers.clear();
                        answer.metadata.truncation = true;
                    }
                }
                let answer = garbage.unwrap_or_else(|| answer.to_vec().unwrap());
                socket.send_to(&answer, client).await.unwrap();
            }
        });
        Self { addr, records, trouble }
    }

    /// Sets what is wrong from now on.
    pub(crate) fn trouble(&self, trouble: Option<Trouble>) {
        *self.trouble.lock() = trouble;
    }

    /// Sets the A records of a name.
    pub(crate) fn set_a(&self, name: &str, ttl: u32, ips: &[Ipv4Addr]) {
        let records = ips.iter().map(|ip| RData::A(A(*ip))).collect();
        self.records.lock().insert((Name::from_ascii(name).unwrap(), RecordType::A), (ttl, records));
    }

    /// Sets the SRV records of a name to these ports of 127.0.0.1.
    pub(crate) fn set_srv(&self, name: &str, ttl: u32, ports: &[u16]) {
        let target = Name::from_ascii("replica.test.").unwrap();
        self.set_a("replica.test.", ttl, &[Ipv4Addr::LOCALHOST]);
        let records = ports.iter().map(|port| RData::SRV(SRV::new(0, 0, *port, target.clone()))).collect();
        self.records.lock().insert((Name::from_ascii(name).unwrap(), RecordType::SRV), (ttl, records));
    }

    /// A resolver that asks this server.
    pub(crate) fn resolver(&self, resolutions: Counters, ttl: DnsConfig) -> Dns {
        let mut connection = ConnectionConfig::udp();
        connection.port = self.addr.port();
        let mut server = NameServerConfig::udp(self.addr.ip());
        server.connections = vec![connection];
        let mut config = ResolverConfig::default();
        config.name_servers = vec![server];
        let mut builder = TokioResolver::builder_with_config(config, TokioRuntimeProvider::default());
        builder.options_mut().timeout = PATIENCE;
        Dns::build(builder, resolutions, ttl).unwrap()
    }
}
