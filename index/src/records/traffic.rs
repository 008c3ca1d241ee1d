//! What annotations of a Service or an EgressNetwork say about the traffic to it.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use weft_k8s_api::{
    field::Invalid,
    policy::traffic::{
        self, FailureAccrual, GrpcCode, LoadBias, Retry, StatusRange, Timeouts, failure_accrual, grpc_retry,
        honor_retry_after, http_retry, load_bias,
    },
};

/// Annotations about traffic. A family that cannot be read is left out as a whole, because it only tunes.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Traffic {
    /// Limits of requests that no route has its own for.
    pub(crate) timeouts: Timeouts,
    /// Retries of HTTP requests that no route has its own for.
    pub(crate) http_retry: Option<Retry<StatusRange>>,
    /// Retries of gRPC requests that no route has its own for.
    pub(crate) grpc_retry: Option<Retry<GrpcCode>>,
    /// When an endpoint gets no requests for a time.
    pub(crate) accrual: Option<FailureAccrual>,
    /// Whether `Retry-After` lengthens that time.
    pub(crate) honor_retry_after: bool,
    /// How much slower an endpoint with failures appears.
    pub(crate) load_bias: Option<LoadBias>,
}

impl Traffic {
    /// Reads the annotations of a Service.
    pub(crate) fn of_service(metadata: &ObjectMeta, problems: &mut Vec<String>) -> Self {
        let Some(annotations) = &metadata.annotations else { return Self::default() };
        let load_bias = family(load_bias(annotations), problems);
        Self { load_bias, ..Self::of_egress_network(metadata, problems) }
    }

    /// Reads the annotations of an EgressNetwork, whose connections no balancer places.
    pub(crate) fn of_egress_network(metadata: &ObjectMeta, problems: &mut Vec<String>) -> Self {
        let Some(annotations) = &metadata.annotations else { return Self::default() };
        Self {
            timeouts: family(traffic::timeouts(annotations), problems).unwrap_or_default(),
            http_retry: family(http_retry(annotations), problems),
            grpc_retry: family(grpc_retry(annotations), problems),
            accrual: family(failure_accrual(annotations), problems),
            honor_retry_after: family(honor_retry_after(annotations), problems),
            load_bias: None,
        }
    }
}

fn family<T: Default>(read: Result<T, Vec<Invalid>>, problems: &mut Vec<String>) -> T {
    read.unwrap_or_else(|found| {
        for invalid in found {
            let problem = format!("{invalid}; the annotations of this family are ignored");
            // Retries of HTTP and of gRPC share some.
            if !problems.contains(&problem) {
                problems.push(problem);
            }
        }
        T::default()
    })
}
