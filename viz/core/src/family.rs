//! Which families and labels of a proxy are kept, and what is kept apart.
//!
//! Owns names. A proxy's series differ in addresses, status codes and authorizations, which no answer shows: what is
//! the same but for those is one series here.

use std::sync::Arc;

/// What a series counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Family {
    /// `response_total`.
    Responses,
    /// `response_latency_ms`.
    Latency,
    /// `tcp_open_connections`.
    Open,
    /// `tcp_read_bytes_total`.
    Read,
    /// `tcp_write_bytes_total`.
    Written,
    /// `inbound_http_authz_deny_total`.
    DeniedRequests,
    /// `inbound_tcp_authz_deny_total`.
    DeniedConnections,
    /// `inbound_http_local_ratelimit_total`.
    RateLimited,
    /// `route_response_total`: ServiceProfiles' routes.
    ProfileResponses,
    /// `route_response_latency_ms`.
    ProfileLatency,
    /// `route_actual_response_total`.
    ActualResponses,
    /// `route_actual_response_latency_ms`.
    ActualLatency,
    /// `outbound_{http,grpc}_route_request_statuses_total`.
    RouteStatuses,
    /// `outbound_{http,grpc}_route_request_duration_seconds`.
    RouteDuration,
    /// `outbound_{http,grpc}_route_retry_requests_total`.
    RouteRetries,
    /// `outbound_{http,grpc}_route_backend_response_statuses_total`.
    BackendStatuses,
    /// `outbound_{http,grpc}_route_backend_response_duration_seconds`.
    BackendDuration,
}

/// How a family's samples are to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sort {
    Counter,
    /// Has a value now, and no difference.
    Gauge,
    /// A cumulative bucket, with the label `le`.
    Bucket,
    /// When the process started.
    Start,
}

/// A sample's family and sort.
pub(crate) type Known = (Option<Family>, Sort);

/// Labels that are kept.
#[expect(clippy::enum_variant_names, reason = "they are the names of the labels")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Name {
    Direction,
    Peer,
    /// Success, failure or time-out: not a label, but what status and error say.
    Outcome,
    Authority,
    Tls,
    ClientId,
    ServerId,
    NoTlsReason,
    SrvKind,
    SrvName,
    SrvPort,
    RouteKind,
    RouteNamespace,
    RouteName,
    DstNamespace,
    DstService,
    DstPod,
    DstCronJob,
    DstDaemonSet,
    DstDeployment,
    DstJob,
    DstReplicaSet,
    DstReplicationController,
    DstStatefulSet,
    ProfileDst,
    ProfileRoute,
    ParentNamespace,
    ParentKind,
    ParentName,
    ParentPort,
    Hostname,
    BackendNamespace,
    BackendKind,
    BackendName,
    BackendPort,
}

/// The kept labels of a series, by name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Series {
    pub(crate) family: Family,
    pub(crate) labels: Box<[(Name, Arc<str>)]>,
}

/// Values of [`Name::Outcome`].
pub(crate) const SUCCESS: &str = "success";
pub(crate) const FAILURE: &str = "failure";
/// A failure by a time-out of the route.
pub(crate) const TIMEOUT: &str = "timeout";

/// The longest value that is kept, in bytes: of names in Kubernetes and of host names. The rest is cut.
const LONGEST: usize = 512;

impl Series {
    /// A label's value; empty without it.
    pub(crate) fn label(&self, name: Name) -> &str {
        let found = self.labels.iter().find(|(known, _)| *known == name);
        found.map_or("", |(_, value)| value)
    }

    /// Whether a label has this value.
    pub(crate) fn is(&self, name: Name, value: &str) -> bool {
        self.label(name) == value
    }
}

/// The family of a sample with this name.
pub(crate) fn known(name: &[u8]) -> Option<Known> {
    use Family as F;
    let counter = |family| Some((Some(family), Sort::Counter));
    let bucket = |family| Some((Some(family), Sort::Bucket));
    match name {
        b"response_total" => counter(F::Responses),
        b"response_latency_ms_bucket" => bucket(F::Latency),
        b"tcp_open_connections" => Some((Some(F::Open), Sort::Gauge)),
        b"tcp_read_bytes_total" => counter(F::Read),
        b"tcp_write_bytes_total" => counter(F::Written),
        b"inbound_http_authz_deny_total" => counter(F::DeniedRequests),
        b"inbound_tcp_authz_deny_total" => counter(F::DeniedConnections),
        b"inbound_http_local_ratelimit_total" => counter(F::RateLimited),
        b"route_response_total" => counter(F::ProfileResponses),
        b"route_response_latency_ms_bucket" => bucket(F::ProfileLatency),
        b"route_actual_response_total" => counter(F::ActualResponses),
        b"route_actual_response_latency_ms_bucket" => bucket(F::ActualLatency),
        b"process_start_time_seconds" => Some((None, Sort::Start)),
        _ => {
            let rest = name.strip_prefix(b"outbound_")?;
            let rest = rest.strip_prefix(b"http_route_").or_else(|| rest.strip_prefix(b"grpc_route_"))?;
            match rest {
                b"request_statuses_total" => counter(F::RouteStatuses),
                b"request_duration_seconds_bucket" => bucket(F::RouteDuration),
                b"retry_requests_total" => counter(F::RouteRetries),
                b"backend_response_statuses_total" => counter(F::BackendStatuses),
                b"backend_response_duration_seconds_bucket" => bucket(F::BackendDuration),
                _ => None,
            }
        }
    }
}

impl Family {
    /// Whether it is one of buckets.
    pub(crate) fn is_histogram(self) -> bool {
        use Family as F;
        matches!(self, F::Latency | F::ProfileLatency | F::ActualLatency | F::RouteDuration | F::BackendDuration)
    }

    /// The factor from the family's unit to milliseconds.
    pub(crate) fn to_ms(self) -> f64 {
        if matches!(self, Self::RouteDuration | Self::BackendDuration) { 1e3 } else { 1.0 }
    }

    /// Whether a label of this family is kept.
    fn keeps(self, name: Name) -> bool {
        use Name as N;
        match self {
            Self::Responses | Self::Latency => {
                !matches!(name, N::Peer | N::ProfileDst | N::ProfileRoute)
                    && !name.is_of_parent()
                    && name != N::RouteNamespace
            }
            Self::Open | Self::Read | Self::Written => {
                matches!(
                    name,
                    N::Direction
                        | N::Peer
                        | N::Tls
                        | N::ClientId
                        | N::ServerId
                        | N::NoTlsReason
                        | N::SrvKind
                        | N::SrvName
                ) || name.is_of_destination()
            }
            Self::DeniedRequests | Self::DeniedConnections | Self::RateLimited => matches!(
                name,
                N::Tls
                    | N::ClientId
                    | N::NoTlsReason
                    | N::SrvKind
                    | N::SrvName
                    | N::SrvPort
                    | N::RouteKind
                    | N::RouteName
            ),
            Self::ProfileResponses | Self::ProfileLatency | Self::ActualResponses | Self::ActualLatency => {
                matches!(name, N::Direction | N::Outcome | N::ProfileDst | N::ProfileRoute)
            }
            Self::RouteStatuses | Self::RouteDuration | Self::RouteRetries => {
                matches!(name, N::Outcome | N::RouteKind | N::RouteNamespace | N::RouteName)
                    || (name.is_of_parent() && !name.is_of_backend())
            }
            Self::BackendStatuses | Self::BackendDuration => {
                matches!(name, N::Outcome | N::RouteKind | N::RouteNamespace | N::RouteName)
                    || (name.is_of_parent() && name != N::Hostname)
            }
        }
    }
}

impl Name {
    fn read(name: &[u8]) -> Option<Self> {
        Some(match name {
            b"direction" => Self::Direction,
            b"peer" => Self::Peer,
            b"authority" => Self::Authority,
            b"tls" => Self::Tls,
            b"client_id" => Self::ClientId,
            b"server_id" => Self::ServerId,
            b"no_tls_reason" => Self::NoTlsReason,
            b"srv_kind" => Self::SrvKind,
            b"srv_name" => Self::SrvName,
            b"srv_port" => Self::SrvPort,
            b"route_kind" => Self::RouteKind,
            b"route_namespace" => Self::RouteNamespace,
            b"route_name" => Self::RouteName,
            b"dst" => Self::ProfileDst,
            b"rt_route" => Self::ProfileRoute,
            b"parent_namespace" => Self::ParentNamespace,
            b"parent_kind" => Self::ParentKind,
            b"parent_name" => Self::ParentName,
            b"parent_port" => Self::ParentPort,
            b"hostname" => Self::Hostname,
            b"backend_namespace" => Self::BackendNamespace,
            b"backend_kind" => Self::BackendKind,
            b"backend_name" => Self::BackendName,
            b"backend_port" => Self::BackendPort,
            _ => match name.strip_prefix(b"dst_")? {
                b"namespace" => Self::DstNamespace,
                b"service" => Self::DstService,
                b"pod" => Self::DstPod,
                b"cronjob" => Self::DstCronJob,
                b"daemonset" => Self::DstDaemonSet,
                b"deployment" => Self::DstDeployment,
                b"k8s_job" => Self::DstJob,
                b"replicaset" => Self::DstReplicaSet,
                b"replicationcontroller" => Self::DstReplicationController,
                b"statefulset" => Self::DstStatefulSet,
                _ => return None,
            },
        })
    }

    /// The label with the name of a destination's owner of this kind.
    pub(crate) fn of_destination(kind: &str) -> Option<Self> {
        Some(match kind {
            "namespace" => Self::DstNamespace,
            "service" => Self::DstService,
            "pod" => Self::DstPod,
            "cronjob" => Self::DstCronJob,
            "daemonset" => Self::DstDaemonSet,
            "deployment" => Self::DstDeployment,
            "job" => Self::DstJob,
            "replicaset" => Self::DstReplicaSet,
            "replicationcontroller" => Self::DstReplicationController,
            "statefulset" => Self::DstStatefulSet,
            _ => return None,
        })
    }

    fn is_of_destination(self) -> bool {
        (Self::DstNamespace..=Self::DstStatefulSet).contains(&self)
    }

    fn is_of_parent(self) -> bool {
        (Self::ParentNamespace..=Self::BackendPort).contains(&self)
    }

    fn is_of_backend(self) -> bool {
        (Self::BackendNamespace..=Self::BackendPort).contains(&self)
    }
}

/// Of a sample's labels, what identifies its series here.
#[derive(Debug, Default)]
pub(crate) struct Reader {
    labels: Vec<(Name, String)>,
    status: Option<bool>,
    error: String,
}

impl Reader {
    /// The series and the bound of the bucket. `None` without a readable `le`, where there has to be one.
    pub(crate) fn read(
        &mut self,
        (family, sort): (Family, Sort),
        line: &crate::scrape::Line<'_>,
    ) -> Option<(Read, f64)> {
        self.labels.clear();
        self.error.clear();
        self.status = None;
        let mut bound = None;
        let mut outcome = None;
        line.labels(|name, value| match name {
            b"le" if sort == Sort::Bucket => bound = std::str::from_utf8(value).ok().and_then(|le| le.parse().ok()),
            b"classification" => outcome = Some(if value == SUCCESS.as_bytes() { SUCCESS } else { FAILURE }),
            b"http_status" => self.status = Some(value.first().is_some_and(|digit| matches!(digit, b'1'..=b'4'))),
            b"grpc_status" => self.status = Some(!is_grpc_failure(value)),
            b"error" => self.error = String::from_utf8_lossy(value).into_owned(),
            _ => {
                if let Some(name) = Name::read(name).filter(|name| family.keeps(*name)) {
                    let mut value = crate::scrape::unescape(value);
                    value.truncate(value.floor_char_boundary(LONGEST));
                    self.labels.push((name, value));
                }
            }
        });
        if matches!(family, Family::RouteStatuses | Family::BackendStatuses) {
            outcome = Some(match (self.error.as_str(), self.status) {
                (error, _) if error.ends_with("_TIMEOUT") => TIMEOUT,
                ("", Some(true)) => SUCCESS,
                _ => FAILURE,
            });
        }
        if let Some(outcome) = outcome.filter(|_| family.keeps(Name::Outcome) && sort == Sort::Counter) {
            self.labels.push((Name::Outcome, outcome.to_owned()));
        }
        self.labels.sort_unstable();
        self.labels.dedup_by_key(|(name, _)| *name);
        let bound = match sort {
            Sort::Bucket => bound.filter(|bound: &f64| !bound.is_nan())?,
            _ => 0.0,
        };
        Some((Read { family, labels: std::mem::take(&mut self.labels) }, bound))
    }
}

/// A series as it was read.
#[derive(Debug)]
pub(crate) struct Read {
    pub(crate) family: Family,
    pub(crate) labels: Vec<(Name, String)>,
}

/// Linkerd's default, by name: the route families have names instead of numbers.
fn is_grpc_failure(status: &[u8]) -> bool {
    matches!(
        status,
        b"UNKNOWN" | b"DEADLINE_EXCEEDED" | b"PERMISSION_DENIED" | b"INTERNAL" | b"UNAVAILABLE" | b"DATA_LOSS"
    )
}
