//! Metrics of Linkerd's control plane. Series have Linkerd's labels, unless the note says otherwise.

use super::{
    Setting,
    State::{Meaningless, Unsupported, Works},
};

const QUEUES: &str = "streams have no queue: a slow client gets the newest state";
const LAG: &str = "of objects that were known before; weft_watch_up says whether the watch works";
const WATCHES: &str = "also of destination";

/// Metrics of `destination` (`linkerd2:controller/api/destination/`, `linkerd2:pkg/prometheus/`).
pub const DESTINATION_METRICS: &[Setting] = &[
    Setting::new("grpc_server_started_total", Works, ""),
    Setting::new("grpc_server_msg_received_total", Works, ""),
    Setting::new("grpc_server_msg_sent_total", Works, ""),
    Setting::new("grpc_server_handled_total", Works, ""),
    Setting::new("grpc_server_handling_seconds", Works, ""),
    Setting::new("endpoints_subscribers", Works, "nodename: only where endpoints on the client's node count alone"),
    Setting::new("endpoints_updates", Works, "counted while there are subscribers"),
    Setting::new("endpoints_pods", Works, ""),
    Setting::new("endpoints_exists", Works, ""),
    Setting::new("profile_subscribers", Works, "of the ServiceProfile that counts for the client"),
    Setting::new("profile_updates", Works, "counted while there are subscribers"),
    Setting::new("service_subscribers", Works, ""),
    Setting::new("workload_subscribers", Works, "one series without labels: clients choose the addresses"),
    Setting::new("workload_updates", Works, "one series without labels: clients choose the addresses"),
    Setting::new("server_port_subscribers", Meaningless, "profiles do not follow Servers one by one"),
    Setting::new("cluster_store_size", Works, ""),
    Setting::new("service_cache_size", Works, ""),
    Setting::new("endpoints_cache_size", Works, "0 with EndpointSlices"),
    Setting::new("endpointslice_cache_size", Works, ""),
    Setting::new("pod_cache_size", Works, ""),
    Setting::new("node_cache_size", Works, ""),
    Setting::new("job_cache_size", Works, ""),
    Setting::new("replicaset_cache_size", Works, ""),
    Setting::new("server_cache_size", Works, ""),
    Setting::new("serviceprofile_cache_size", Works, ""),
    Setting::new("externalworkload_cache_size", Works, ""),
    Setting::new("endpoint_updates_queue_overflow", Meaningless, QUEUES),
    Setting::new("endpoint_profile_updates_queue_overflow", Meaningless, QUEUES),
    Setting::new("profile_updates_queue_overflow", Meaningless, QUEUES),
    Setting::new("go_*", Meaningless, "no Go"),
    Setting::new("process_start_time_seconds", Works, ""),
    Setting::new("process_cpu_seconds_total", Works, ""),
    Setting::new("process_open_fds", Works, ""),
    Setting::new("process_max_fds", Works, ""),
    Setting::new("process_resident_memory_bytes", Works, ""),
    Setting::new("process_virtual_memory_bytes", Works, ""),
    Setting::new("process_virtual_memory_max_bytes", Meaningless, "address space is not limited"),
    Setting::new("process_network_*", Unsupported, "the kubelet reports traffic of pods"),
];

/// Metrics of `destination` about its watches and about the queue of EndpointSlices to be written. Watches of linked
/// clusters are not among them.
pub const DISCOVERY_API_METRICS: &[Setting] = &[
    Setting::new("endpoints_informer_lag_seconds", Works, LAG),
    Setting::new("endpointslices_informer_lag_seconds", Works, LAG),
    Setting::new("services_informer_lag_seconds", Works, LAG),
    Setting::new("servers_informer_lag_seconds", Works, LAG),
    Setting::new("pods_informer_lag_seconds", Works, LAG),
    Setting::new("externalworkload_informer_lag_seconds", Works, LAG),
    Setting::new("serviceprofiles_informer_lag_seconds", Works, LAG),
    Setting::new("workqueue_depth", Works, "of the replica with the lease; 0 in others"),
    Setting::new("workqueue_adds_total", Works, ""),
    Setting::new("workqueue_queue_duration_seconds", Works, ""),
    Setting::new("workqueue_work_duration_seconds", Works, ""),
    Setting::new("workqueue_unfinished_work_seconds", Works, ""),
    Setting::new("workqueue_longest_running_processor_seconds", Works, ""),
    Setting::new("workqueue_retries_total", Works, ""),
    Setting::new("workqueue_drops_total", Works, ""),
];

/// Metrics of `policy` (`linkerd2:policy-controller/`), beside those of its gRPC server.
pub const POLICY_METRICS: &[Setting] = &[
    Setting::new("inbound_index_meshtls_authentication_index_size", Works, ""),
    Setting::new("inbound_index_network_authentication_index_size", Works, ""),
    Setting::new("inbound_index_pod_index_size", Works, ""),
    Setting::new("inbound_index_external_workload_index_size", Works, ""),
    Setting::new("inbound_index_server_index_size", Works, ""),
    Setting::new("inbound_index_server_authorization_index_size", Works, ""),
    Setting::new("inbound_index_authorization_policy_index_size", Works, ""),
    Setting::new("inbound_index_http_route_index_size", Works, ""),
    Setting::new("outbound_index_service_index_size", Works, ""),
    Setting::new("outbound_index_service_info_index_size", Works, ""),
    Setting::new("outbound_index_service_route_index_size", Works, ""),
    Setting::new("outbound_index_service_port_route_index_size", Works, "of ports that clients follow"),
];

/// Metrics of Kubernetes API clients.
pub const API_METRICS: &[Setting] = &[
    Setting::new("kube_watch_applies_total", Works, WATCHES),
    Setting::new("kube_watch_restarts_total", Works, WATCHES),
    Setting::new("kube_watch_deletes_total", Works, WATCHES),
    Setting::new("kube_watch_errors_total", Works, WATCHES),
    Setting::new("http_client_requests_total", Works, "client: k8s, or link for linked clusters"),
    Setting::new("http_client_request_latency_seconds", Works, "until the answer begins"),
    Setting::new("http_client_in_flight_requests", Works, "until the answer begins"),
    Setting::new("resource_status_patches_total", Works, ""),
    Setting::new("resource_status_patch_api_errors_total", Works, ""),
    Setting::new("resource_status_patch_timeouts_total", Works, ""),
    Setting::new("resource_status_patch_duration_seconds", Works, ""),
    Setting::new("resource_status_patch_dequeues_total", Works, ""),
    Setting::new("resource_status_patch_drops_total", Works, ""),
    Setting::new("resource_status_patch_enqueues_total", Works, ""),
    Setting::new(
        "resource_status_patch_enqueue_overflows_total",
        Meaningless,
        "what waits is kept once for each object",
    ),
];
