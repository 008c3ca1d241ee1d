//! What indexes counted, as series.

use std::fmt;

use prometheus_client::{
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, gauge::ConstGauge},
};
use weft_index::{EndpointsCount, EndpointsLabels, Followed, InboundSizes, Statistics, Views};

use super::{Counted, LOCAL};

/// Labels of a series, in order.
type Labels<const N: usize> = [(&'static str, String); N];

fn view(view: &str) -> Labels<1> {
    [("view", view.to_owned())]
}

fn namespace(namespace: &str) -> Labels<1> {
    [("namespace", namespace.to_owned())]
}

/// Linkerd's counters without `_total`, a suffix that a counter has in OpenMetrics: no other type keeps their names.
const UPDATES: MetricType = MetricType::Unknown;

/// One of the sizes of a namespace.
type Size = fn(&InboundSizes) -> usize;

/// Encodes all series.
pub(super) fn encode(encoder: &mut DescriptorEncoder<'_>, counted: &Counted, waiting: usize) -> Result<(), fmt::Error> {
    let mut families = Families(encoder);
    families.objects(counted)?;
    families.endpoints(counted)?;
    if let Some(local) = counted.get(LOCAL) {
        let views = || local.views.iter().map(|(of, count)| (view(of), *count));
        let of_views = |(labels, count): (Labels<1>, Views)| (labels, number(count.views));
        families.gauges("weft_index_views", "Answers that are kept", views().map(of_views))?;
        let of_views = |(labels, count): (Labels<1>, Views)| (labels, number(count.subscribers));
        families.gauges("weft_index_subscribers", "Streams by what they follow", views().map(of_views))?;
        let profiles = || {
            local.profiles.iter().map(|(profile, followed)| {
                ([("namespace", profile.namespace.clone()), ("profile", profile.name.clone())], *followed)
            })
        };
        let help = "Streams that follow the profile of a Service";
        families.gauges(
            "profile_subscribers",
            help,
            profiles().map(|(labels, followed)| (labels, subscribers(followed))),
        )?;
        let updates = profiles().map(|(labels, followed)| (labels, followed.updates));
        families.family("profile_updates", "Changes of a profile that has subscribers", UPDATES, updates)?;
        let services = local.services.iter().map(|(service, count)| {
            ([("namespace", service.namespace.clone()), ("name", service.name.clone())], number(*count))
        });
        families.gauges("service_subscribers", "Streams that follow a Service's ports and annotations", services)?;
        let help = "Streams that follow the profile of a pod, an ExternalWorkload or another address";
        families.single("workload_subscribers", help, MetricType::Gauge, subscribers(local.workloads))?;
        let help = "Changes of such profiles that have subscribers";
        families.single("workload_updates", help, UPDATES, local.workloads.updates)?;
        families.inbound(local)?;
        families.outbound(local)?;
    }
    let help = "Questions of streams that wait for the index";
    families.single("weft_index_waiting_questions", help, MetricType::Gauge, number(waiting))
}

struct Families<'a, 'b>(&'a mut DescriptorEncoder<'b>);

impl Families<'_, '_> {
    fn objects(&mut self, counted: &Counted) -> Result<(), fmt::Error> {
        let kinds: Vec<_> = counted.get(LOCAL).into_iter().flat_map(|local| local.objects.keys()).collect();
        for kind in kinds {
            let sizes = counted.iter().map(|(cluster, statistics)| {
                ([("cluster", cluster.clone())], number(statistics.objects.get(kind).copied().unwrap_or_default()))
            });
            // Linkerd's name of the metric has the kind in it.
            self.gauges(&format!("{kind}_cache_size"), "Objects of this kind in the index", sizes)?;
        }
        Ok(())
    }

    fn endpoints(&mut self, counted: &Counted) -> Result<(), fmt::Error> {
        let of_cluster = |(cluster, statistics)| {
            let (cluster, statistics): (&String, &Statistics) = (cluster, statistics);
            statistics.endpoints.iter().map(move |(of, count)| {
                let EndpointsLabels { service, port, hostname, node } = of;
                let labels = [
                    ("cluster", cluster.clone()),
                    ("namespace", service.namespace.clone()),
                    ("service", service.name.clone()),
                    ("port", port.to_string()),
                    ("hostname", hostname.clone().unwrap_or_default()),
                    ("nodename", node.clone().unwrap_or_default()),
                ];
                (labels, *count)
            })
        };
        let with = |value: fn(EndpointsCount) -> u64| {
            counted.iter().flat_map(of_cluster).map(move |(labels, count)| (labels, value(count)))
        };
        let help = "Streams that follow the endpoints of a Service's port";
        self.gauges("endpoints_subscribers", help, with(|count| subscribers(count.followed)))?;
        let help = "Changes of the endpoints of a Service's port that has subscribers";
        self.family("endpoints_updates", help, UPDATES, with(|count| count.followed.updates))?;
        self.gauges("endpoints_pods", "Endpoints of a Service's port", with(|count| number(count.endpoints)))?;
        let help = "1 if the endpoints of the Service are listed anywhere";
        self.gauges("endpoints_exists", help, with(|count| count.exists.into()))
    }

    fn inbound(&mut self, local: &Statistics) -> Result<(), fmt::Error> {
        let sizes: [(&str, &str, Size); 8] = [
            ("meshtls_authentication", "MeshTLSAuthentications", |sizes| sizes.mesh_tls_authentications),
            ("network_authentication", "NetworkAuthentications", |sizes| sizes.network_authentications),
            ("pod", "Pods", |sizes| sizes.pods),
            ("external_workload", "ExternalWorkloads", |sizes| sizes.external_workloads),
            ("server", "Servers", |sizes| sizes.servers),
            ("server_authorization", "ServerAuthorizations", |sizes| sizes.server_authorizations),
            ("authorization_policy", "AuthorizationPolicies", |sizes| sizes.authorization_policies),
            ("http_route", "HTTPRoutes of Servers", |sizes| sizes.http_routes),
        ];
        for (kind, help, size) in sizes {
            let of_namespace = local.inbound.iter().map(|(name, sizes)| (namespace(name), number(size(sizes))));
            self.gauges(&format!("inbound_index_{kind}_index_size"), help, of_namespace)?;
        }
        Ok(())
    }

    fn outbound(&mut self, local: &Statistics) -> Result<(), fmt::Error> {
        let sizes = &local.outbound;
        let ips = number(sizes.service_ips);
        self.single("outbound_index_service_index_size", "Addresses of Services", MetricType::Gauge, ips)?;
        let (help, parents) = ("Services and EgressNetworks", number(sizes.parents));
        self.single("outbound_index_service_info_index_size", help, MetricType::Gauge, parents)?;
        let routed = sizes.routed_services.iter().map(|(name, count)| (namespace(name), number(*count)));
        self.gauges("outbound_index_service_route_index_size", "Services with routes", routed)?;
        let ports = sizes.ports.iter().map(|(name, count)| (namespace(name), number(*count)));
        let help = "Policies of Services' ports that clients follow";
        self.gauges("outbound_index_service_port_route_index_size", help, ports)
    }

    fn gauges<const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        series: impl Iterator<Item = (Labels<N>, u64)>,
    ) -> Result<(), fmt::Error> {
        self.family(name, help, MetricType::Gauge, series)
    }

    fn family<const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        metric_type: MetricType,
        series: impl Iterator<Item = (Labels<N>, u64)>,
    ) -> Result<(), fmt::Error> {
        let mut family = self.0.encode_descriptor(name, help, None, metric_type)?;
        for (labels, value) in series {
            ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    fn single(&mut self, name: &str, help: &str, metric_type: MetricType, value: u64) -> Result<(), fmt::Error> {
        ConstGauge::new(value).encode(self.0.encode_descriptor(name, help, None, metric_type)?)
    }
}

fn subscribers(followed: Followed) -> u64 {
    number(followed.subscribers)
}

fn number(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}
