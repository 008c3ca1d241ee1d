//! Metrics of an agent on a Kubernetes node. Owns their names.

use std::time::Duration;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{gauge::ConstGauge, histogram::Histogram},
    registry::Registry,
};
use tokio::sync::watch;

use super::{Problem, Trackings};

/// Time from a pod's first process to both directions in force: the delay of its start that the agent may cause.
#[derive(Clone, Debug)]
pub(crate) struct EnrolmentSeconds(Histogram);

impl EnrolmentSeconds {
    pub(crate) fn new() -> Self {
        // From the cost of loading a program to a kubelet's probe period and beyond.
        Self(Histogram::new([0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0]))
    }

    pub(crate) fn observe(&self, time: Duration) {
        self.0.observe(time.as_secs_f64());
    }
}

/// Registers the metrics of an agent on a Kubernetes node.
pub(crate) fn register(registry: &mut Registry, seconds: &EnrolmentSeconds, pods: watch::Receiver<Trackings>) {
    registry.register(
        "weft_agent_enrolment_seconds",
        "Time from a pod's first process to both directions in force",
        seconds.0.clone(),
    );
    registry.register_collector(Box::new(Unenrolled(pods)));
}

#[derive(Debug)]
struct Unenrolled(watch::Receiver<Trackings>);

impl Collector for Unenrolled {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let pods = self.0.borrow().clone().unwrap_or_default();
        let is_refused = |problem: &Option<Problem>| matches!(problem, Some(Problem::Annotation(_)));
        let refused = pods.iter().filter(|pod| is_refused(&pod.problem)).count();
        let pending = pods.iter().filter(|pod| pod.enrolled.is_none() && !is_refused(&pod.problem)).count();
        for (name, help, count) in [
            ("weft_agent_pods_pending", "Meshed pods of this node that are not enrolled yet", pending),
            ("weft_agent_pods_refused", "Meshed pods of this node with an annotation that cannot be read", refused),
        ] {
            let metric = ConstGauge::new(i64::try_from(count).unwrap_or(i64::MAX));
            let metric_encoder = encoder.encode_descriptor(name, help, None, metric.metric_type())?;
            metric.encode(metric_encoder)?;
        }
        Ok(())
    }
}
