//! Settings of the export of spans.

use std::path::PathBuf;

use super::{
    ControlAddr,
    env::{ConfigError, Env},
};

/// Linkerd's default of `TRACE_SERVICE_NAME`.
const SERVICE_NAME: &str = "linkerd-proxy";

/// Settings of the export of spans.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TraceConfig {
    /// The OpenTelemetry collector.
    pub(crate) collector: ControlAddr,
    /// `service.name`.
    pub(crate) service_name: String,
    /// File of the pod's labels.
    pub(crate) labels: Option<PathBuf>,
    /// Further attributes, `name=value`, one a line.
    pub(crate) attributes: String,
    /// `OTEL_RESOURCE_ATTRIBUTES`, OpenTelemetry's variable for the same.
    pub(crate) otel_attributes: String,
    /// `host.name`: the pod's name.
    pub(crate) hostname: String,
}

impl TraceConfig {
    /// Reads the settings; `None` if there is no collector.
    ///
    /// # Errors
    /// The address or the identity of the collector is malformed, or the latter is missing.
    pub(super) fn parse(env: &Env<'_>) -> Result<Option<Self>, ConfigError> {
        let service_name = env.string("TRACE_SERVICE_NAME").unwrap_or_else(|| SERVICE_NAME.to_owned());
        let labels = env.string("TRACE_ATTRIBUTES_PATH").map(PathBuf::from);
        let attributes = env.string("TRACE_EXTRA_ATTRIBUTES").unwrap_or_default();
        let collector = env.optional_control("TRACE_COLLECTOR_SVC")?;
        let foreign = |name| env.foreign(name).unwrap_or_default();
        let (otel_attributes, hostname) = (foreign("OTEL_RESOURCE_ATTRIBUTES"), foreign("HOSTNAME"));
        Ok(collector.map(|collector| Self { collector, service_name, labels, attributes, otel_attributes, hostname }))
    }

    /// Settings with Linkerd's defaults.
    #[cfg(test)]
    pub(crate) fn to(host: &str, port: u16) -> Self {
        Self {
            collector: ControlAddr { host: host.to_owned(), port, identity: None },
            service_name: SERVICE_NAME.to_owned(),
            labels: None,
            attributes: String::new(),
            otel_attributes: String::new(),
            hostname: String::new(),
        }
    }
}
