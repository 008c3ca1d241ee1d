//! The agent's metrics, read from the kernel's maps when somebody scrapes. Owns their names.

use std::time::Duration;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{
        counter::ConstCounter,
        family::Family,
        gauge::{ConstGauge, Gauge},
        histogram::Histogram,
    },
    registry::Registry,
};
use tokio::sync::watch;
use weft_ebpf_abi::{
    counter,
    verdict::{Direction, Verdict},
};

use crate::{
    datapath::{DatapathError, Enrolled},
    error::chain,
    kubernetes::{Problem, Trackings},
    shared::Shared,
};

/// From a pod's first process to both directions in force: the time by which the agent may hold up its start.
#[derive(Clone, Debug)]
pub(crate) struct EnrolmentSeconds(Histogram);

impl EnrolmentSeconds {
    pub(crate) fn new() -> Self {
        // From what loading a program costs to a kubelet's probe period and beyond.
        Self(Histogram::new([0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0]))
    }

    pub(crate) fn observe(&self, time: Duration) {
        self.0.observe(time.as_secs_f64());
    }
}

/// Registers what only an agent on a Kubernetes node knows.
pub(crate) fn register_kubernetes(
    registry: &mut Registry,
    seconds: &EnrolmentSeconds,
    pods: watch::Receiver<Trackings>,
) {
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

/// Registers everything.
pub(crate) fn register(registry: &mut Registry, datapath: Shared) {
    let info = Family::<[(&'static str, String); 1], Gauge>::default();
    info.get_or_create(&[("programs", datapath.lock().digest())]).set(1);
    registry.register("weft_agent_programs_info", "The digest of the attached programs", info);
    registry.register_collector(Box::new(Datapath(datapath)));
}

struct Datapath(Shared);

impl std::fmt::Debug for Datapath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Datapath")
    }
}

impl Collector for Datapath {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let sample = match self.sample() {
            Ok(sample) => sample,
            Err(error) => {
                tracing::warn!(error = chain(&error), "cannot read the datapath's counters");
                return Ok(());
            }
        };
        let mut verdicts = encoder.encode_descriptor(
            "weft_agent_verdicts",
            "Connections of meshed pods by what the kernel decided, since the maps were made",
            None,
            prometheus_client::metrics::MetricType::Counter,
        )?;
        for (direction, verdict, count) in sample.verdicts {
            let labels = [("direction", direction.label()), ("verdict", verdict.label())];
            ConstCounter::new(count).encode(verdicts.encode_family(&labels)?)?;
        }
        for (name, help, count) in [
            ("weft_agent_events_dropped", "Trace events that found no room", sample.events_dropped),
            ("weft_agent_flow_misses", "Connections to a proxy that nobody announced", sample.flow_misses),
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
        for (name, help, count) in [
            ("weft_agent_pods", "Enrolled pods", sample.pods),
            ("weft_agent_pods_bypassed", "Enrolled pods whose redirection their owners switched off", sample.bypassed),
            (
                "weft_agent_pods_self_enrolled",
                "Pods that the kernel enrolled and no agent completed yet",
                sample.self_enrolled,
            ),
            ("weft_agent_node_bypassed", "1 while all redirection on this node is switched off", sample.node_bypassed),
        ] {
            let metric = ConstGauge::new(count);
            let metric_encoder = encoder.encode_descriptor(name, help, None, metric.metric_type())?;
            metric.encode(metric_encoder)?;
        }
        Ok(())
    }
}

struct Sample {
    verdicts: Vec<(Direction, Verdict, u64)>,
    events_dropped: u64,
    flow_misses: u64,
    bind_failures: u64,
    listeners_lost: u64,
    admissions_refused: u64,
    pods: i64,
    bypassed: i64,
    self_enrolled: i64,
    node_bypassed: i64,
}

impl Datapath {
    fn sample(&self) -> Result<Sample, DatapathError> {
        let datapath = self.0.lock();
        let mut verdicts = Vec::new();
        for direction in Direction::ALL {
            for verdict in Verdict::ALL.into_iter().filter(|verdict| verdict.is_counted()) {
                verdicts.push((direction, verdict, datapath.verdicts(direction, verdict)?));
            }
        }
        let pods = datapath.pods()?;
        let count = |which: fn(&Enrolled) -> bool| {
            i64::try_from(pods.iter().filter(|pod| which(pod)).count()).unwrap_or(i64::MAX)
        };
        Ok(Sample {
            verdicts,
            events_dropped: datapath.counter(counter::EVENTS_DROPPED)?,
            flow_misses: datapath.counter(counter::FLOW_MISSES)?,
            bind_failures: datapath.counter(counter::BIND_FAILURES)?,
            listeners_lost: datapath.counter(counter::LISTENERS_LOST)?,
            admissions_refused: datapath.counter(counter::ADMISSIONS_REFUSED)?,
            pods: count(|_| true),
            bypassed: count(|pod| pod.bypassed),
            self_enrolled: count(|pod| pod.self_enrolled),
            node_bypassed: datapath.bypassed()?.into(),
        })
    }
}
