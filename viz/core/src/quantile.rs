//! Quantiles from the buckets of a histogram, interpolated as Prometheus' `histogram_quantile` does, so that numbers
//! agree with those of dashboards.

/// A histogram: (upper bound, observations in this bucket alone), in any order.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Histogram(Vec<(f64, u64)>);

impl Histogram {
    /// Adds observations to a bucket.
    pub(crate) fn add(&mut self, bound: f64, count: u64) {
        match self.0.iter_mut().find(|(known, _)| *known == bound) {
            Some((_, sum)) => *sum += count,
            None => self.0.push((bound, count)),
        }
    }

    /// The quantile, between 0 and 1, linear within its bucket, as if values were spread evenly. In the last bucket,
    /// which has no upper bound, it is the lower one. `None` without an observation.
    ///
    /// `bounds` are those that the histogram may have: an empty bucket between two is not written, and it ends where
    /// the next begins.
    pub(crate) fn quantile(&self, quantile: f64, bounds: &[f64]) -> Option<f64> {
        let mut buckets = self.0.clone();
        buckets.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        let observations: u64 = buckets.iter().map(|(_, count)| count).sum();
        if observations == 0 {
            return None;
        }
        let rank = quantile * observations as f64;
        let mut below = 0_u64;
        for (bound, count) in &buckets {
            let cumulative = below + count;
            if *count > 0 && cumulative as f64 >= rank {
                // The next bound below, whether or not its bucket has observations.
                let lower = bounds.iter().copied().filter(|lower| lower < bound).fold(0.0, f64::max);
                if bound.is_infinite() {
                    return Some(lower);
                }
                return Some(lower + (bound - lower) * ((rank - below as f64) / *count as f64));
            }
            below = cumulative;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of `histogram_quantile` in Prometheus' own tests (promql/promqltest/testdata/histograms.test:
    /// testhistogram3, request_duration), as cumulative buckets.
    #[test]
    fn quantiles_are_those_of_prometheus() {
        let inf = f64::INFINITY;
        for (cumulative, quantile, expected) in [
            // testhistogram3, start positive.
            (&[(0.0, 0), (0.1, 50), (0.2, 70), (1.0, 110), (inf, 120)][..], 0.2, 0.048),
            (&[(0.0, 0), (0.1, 50), (0.2, 70), (1.0, 110), (inf, 120)], 0.5, 0.15),
            (&[(0.0, 0), (0.1, 50), (0.2, 70), (1.0, 110), (inf, 120)], 0.8, 0.72),
            // request_duration_seconds, job1, ins1; the last one is in the bucket without an upper bound.
            (&[(0.1, 10), (0.2, 30), (inf, 40)], 0.3, 0.11),
            (&[(0.1, 10), (0.2, 30), (inf, 40)], 0.5, 0.15),
            (&[(0.1, 10), (0.2, 30), (inf, 40)], 0.9, 0.2),
            // By hand: empty buckets in the middle, and below all.
            (&[(1.0, 0), (2.0, 0), (5.0, 10), (10.0, 10), (20.0, 20), (inf, 20)], 0.25, 3.5),
            (&[(1.0, 0), (2.0, 0), (5.0, 10), (10.0, 10), (20.0, 20), (inf, 20)], 0.75, 15.0),
            (&[(1.0, 0), (2.0, 0), (5.0, 10), (10.0, 10), (20.0, 20), (inf, 20)], 0.5, 5.0),
        ] {
            let bounds: Vec<f64> = cumulative.iter().map(|(bound, _)| *bound).collect();
            let mut histogram = Histogram::default();
            let mut below = 0;
            for (bound, count) in cumulative {
                if *count > below {
                    histogram.add(*bound, count - below);
                }
                below = *count;
            }
            let found = histogram.quantile(quantile, &bounds).unwrap();
            assert!((found - expected).abs() < 1e-9, "{cumulative:?} {quantile}: {found}, not {expected}");
        }
        assert_eq!(Histogram::default().quantile(0.5, &[]), None);
    }
}
