//! A family of metrics that is scraped without a lock: prometheus-client's own holds its lock while it writes text,
//! and a caller that needs a new label set waits until the lock is released.

use std::{borrow::Borrow as _, collections::HashMap, fmt, hash::Hash, sync::Arc};

use parking_lot::RwLock;
use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeMetric, MetricEncoder},
    metrics::{MetricType, TypedMetric},
};

/// Metrics of one name by their labels. Clones share them.
///
/// A metric is itself a handle that clones share, so that it can be kept and counted without a look-up.
#[derive(Debug)]
pub struct Family<S, M>(Arc<RwLock<HashMap<Arc<S>, M>>>);

impl<S, M> Family<S, M>
where
    S: Clone + Eq + Hash,
    M: Clone + Default,
{
    /// The metric with these labels, created if there is none.
    #[must_use]
    pub fn get_or_create(&self, labels: &S) -> M {
        if let Some(metric) = self.0.read().get(labels) {
            return metric.clone();
        }
        self.0.write().entry(Arc::new(labels.clone())).or_default().clone()
    }

    /// The same as [`Self::get_or_create`], under the name that prometheus-client has for it.
    #[must_use]
    pub fn get_or_create_owned(&self, labels: &S) -> M {
        self.get_or_create(labels)
    }

    /// Removes the metric with these labels, and returns whether there was one. Handles to it still count, but no
    /// scrape shows it.
    pub fn remove(&self, labels: &S) -> bool {
        self.0.write().remove(labels.borrow()).is_some()
    }

    /// A number that clones of this family share, and that no other family has meanwhile.
    #[must_use]
    pub fn id(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    /// The metrics at this moment.
    fn snapshot(&self) -> Vec<(Arc<S>, M)> {
        self.0.read().iter().map(|(labels, metric)| (Arc::clone(labels), metric.clone())).collect()
    }
}

impl<S, M> Clone for Family<S, M> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<S, M> Default for Family<S, M> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<S, M: TypedMetric> TypedMetric for Family<S, M> {
    const TYPE: MetricType = M::TYPE;
}

impl<S, M> EncodeMetric for Family<S, M>
where
    S: Clone + Eq + Hash + EncodeLabelSet,
    M: Clone + Default + EncodeMetric + TypedMetric,
{
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
        for (labels, metric) in self.snapshot() {
            metric.encode(encoder.encode_family(&*labels)?)?;
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        M::TYPE
    }

    fn is_empty(&self) -> bool {
        self.0.read().is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, mpsc};

    use prometheus_client::{metrics::counter::Counter, registry::Registry};

    use super::*;

    type Labels = Vec<(&'static str, &'static str)>;

    #[test]
    fn metrics_are_found_by_their_labels() {
        let family = Family::<Labels, Counter>::default();
        family.get_or_create(&vec![("a", "1")]).inc();
        family.get_or_create_owned(&vec![("a", "1")]).inc();
        let mut registry = Registry::default();
        registry.register("seen", "Seen", family.clone());
        let text = || {
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
            text
        };
        assert!(text().contains("# TYPE seen counter\nseen_total{a=\"1\"} 2\n"), "{}", text());
        assert!(family.remove(&vec![("a", "1")]) && !family.remove(&vec![("a", "1")]));
        assert!(!text().contains("seen"), "{}", text());
    }

    #[test]
    fn clones_have_the_same_number_and_other_families_have_not() {
        let family = Family::<Labels, Counter>::default();
        assert_eq!(family.id(), family.clone().id());
        assert_ne!(family.id(), Family::<Labels, Counter>::default().id());
    }

    /// A metric whose encoding waits until the test allows it.
    #[derive(Clone, Debug, Default)]
    struct Slow(Option<Arc<Steps>>);

    #[derive(Debug)]
    struct Steps {
        began: mpsc::SyncSender<()>,
        finish: Mutex<mpsc::Receiver<()>>,
    }

    impl TypedMetric for Slow {
        const TYPE: MetricType = MetricType::Gauge;
    }

    impl EncodeMetric for Slow {
        fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
            if let Some(steps) = &self.0 {
                steps.began.send(()).unwrap();
                steps.finish.lock().unwrap().recv().unwrap();
            }
            encoder.encode_gauge(&1_i64)
        }

        fn metric_type(&self) -> MetricType {
            Self::TYPE
        }
    }

    #[test]
    fn new_labels_do_not_wait_for_a_scrape() {
        let family = Family::<Labels, Slow>::default();
        let (began, began_rx) = mpsc::sync_channel(0);
        let (finish_tx, finish) = mpsc::sync_channel(0);
        let slow = Slow(Some(Arc::new(Steps { began, finish: Mutex::new(finish) })));
        family.0.write().insert(Arc::new(vec![("a", "1")]), slow);
        let mut registry = Registry::default();
        registry.register("slow", "Slow", family.clone());
        std::thread::scope(|scope| {
            let scrape = scope.spawn(|| {
                let mut text = String::new();
                prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
                text
            });
            began_rx.recv().unwrap();
            // The scrape is in the middle of the family. With a lock held, this would never return.
            let _ = family.get_or_create(&vec![("a", "2")]);
            finish_tx.send(()).unwrap();
            assert!(scrape.join().unwrap().contains("slow{a=\"1\"} 1\n"));
        });
        assert_eq!(family.snapshot().len(), 2);
    }
}
