//! The datapath's metrics, read from the kernel's maps on a scrape, and at most once a second. Owns their names.

use std::{fmt, sync::Arc, time::Duration};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{
        counter::ConstCounter,
        family::Family,
        gauge::{ConstGauge, Gauge},
    },
    registry::Registry,
};
use tokio::runtime;
use weft_runtime::error::chain;

use crate::datapath::{
    DatapathError,
    handle::Handle,
    sample::{Enrolled, Sample},
};

/// Maximum age of a sample: scrapes cost system calls for each pod.
const MAX_AGE: Duration = Duration::from_secs(1);
/// How long a scrape waits for the datapath.
const PATIENCE: Duration = Duration::from_secs(5);

/// Registers all metrics.
pub(crate) fn register(registry: &mut Registry, datapath: Handle) {
    let info = Family::<[(&'static str, String); 1], Gauge>::default();
    info.get_or_create(&[("programs", datapath.facts().digest.clone())]).set(1);
    registry.register("weft_agent_programs_info", "The digest of the attached programs", info);
    registry.register_collector(Box::new(Datapath(datapath)));
}

struct Datapath(Handle);

impl fmt::Debug for Datapath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Datapath")
    }
}

impl Collector for Datapath {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let sample = match self.sample() {
            Ok(sample) => sample,
            Err(error) => {
                tracing::warn!(error = chain(&error), "cannot read the datapath's counters");
                return Ok(());
            }
        };
        let mut verdicts = encoder.encode_descriptor(
            "weft_agent_verdicts",
            "Connections of meshed pods by the kernel's verdict, since the maps were created",
            None,
            prometheus_client::metrics::MetricType::Counter,
        )?;
        for (direction, verdict, count) in &sample.verdicts {
            let labels = [("direction", direction.label()), ("verdict", verdict.label())];
            ConstCounter::new(*count).encode(verdicts.encode_family(&labels)?)?;
        }
        for (name, help, count) in [
            ("weft_agent_events_dropped", "Trace events lost because the buffer was full", sample.events_dropped),
            ("weft_agent_flow_misses", "Connections to a proxy without an original destination", sample.flow_misses),
            (
                "weft_agent_bind_failures",
                "Redirected connections without the pod's source address",
                sample.bind_failures,
            ),
            ("weft_agent_listeners_lost", "Listeners of proxies that could not be recorded", sample.listeners_lost),
            (
                "weft_agent_admissions_refused",
                "Binds of proxies for which the kernel had no room to admit their network namespace by itself",
                sample.admissions_refused,
            ),
        ] {
            let metric = ConstCounter::new(count);
            let metric_encoder = encoder.encode_descriptor(name, help, None, metric.metric_type())?;
            metric.encode(metric_encoder)?;
        }
        let pods = |which: fn(&Enrolled) -> bool| {
            i64::try_from(sample.pods.iter().filter(|pod| which(pod)).count()).unwrap_or(i64::MAX)
        };
        for (name, help, count) in [
            ("weft_agent_pods", "Enrolled pods", pods(|_| true)),
            (
                "weft_agent_pods_bypassed",
                "Enrolled pods whose redirection their owners switched off",
                pods(|pod| pod.bypassed),
            ),
            (
                "weft_agent_pods_self_enrolled",
                "Pods that the kernel enrolled and no agent has completed yet",
                pods(|pod| pod.self_enrolled),
            ),
            (
                "weft_agent_node_bypassed",
                "1 while all redirection on this node is switched off",
                sample.bypassed.into(),
            ),
        ] {
            let metric = ConstGauge::new(count);
            let metric_encoder = encoder.encode_descriptor(name, help, None, metric.metric_type())?;
            metric.encode(metric_encoder)?;
        }
        Ok(())
    }
}

impl Datapath {
    /// Waits outside the async threads: the owner may be loading a program.
    fn sample(&self) -> Result<Arc<Sample>, DatapathError> {
        let sample = self.0.call(|kernel| kernel.sample(MAX_AGE));
        let waited = tokio::task::block_in_place(|| {
            runtime::Handle::current().block_on(async { tokio::time::timeout(PATIENCE, sample).await })
        });
        waited.unwrap_or(Err(DatapathError::Busy))
    }
}
