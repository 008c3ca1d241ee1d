//! Command lines as Linkerd's destination service takes them: `destinationController.additionalArgs` has them in this
//! form (`linkerd2:controller/cmd/destination/main.go`, Go's package `flag`).

use std::{
    ffi::OsString,
    net::{AddrParseError, SocketAddr},
};

use clap::Args as ClapArgs;

/// Flags of Linkerd's destination service that have no effect here. They are accepted, and named in the log.
#[derive(Clone, Debug, Default, ClapArgs)]
pub(crate) struct WithoutEffect {
    #[arg(long, hide = true, value_name = "N")]
    stream_queue_capacity: Option<String>,
    #[arg(long, hide = true, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    export_queue_metrics: Option<String>,
    #[arg(long, hide = true, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    enable_pprof: Option<String>,
}

impl WithoutEffect {
    /// Those that were given, and why they have no effect.
    pub(crate) fn given(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let flags = [
            (
                &self.stream_queue_capacity,
                "--stream-queue-capacity",
                "no stream has a queue: clients get the last state",
            ),
            (&self.export_queue_metrics, "--export-queue-metrics", "no stream has a queue"),
            (&self.enable_pprof, "--enable-pprof", "there are no profiles of Go"),
        ];
        flags.into_iter().filter_map(|(value, flag, reason)| value.as_ref().map(|_| (flag, reason)))
    }
}

/// Doubles the only dash of a long flag: Go takes `-flag` and `--flag` alike.
pub(crate) fn double_dashes(arguments: impl IntoIterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    arguments.into_iter().map(|argument| {
        let is_long = match argument.as_encoded_bytes() {
            [b'-', first, _, ..] => first.is_ascii_alphabetic(),
            _ => false,
        };
        if !is_long {
            return argument;
        }
        let mut doubled = OsString::from("-");
        doubled.push(argument);
        doubled
    })
}

/// An address to listen on; without a host, as in `:8086`, every IPv4 address.
pub(super) fn listen_address(text: &str) -> Result<SocketAddr, AddrParseError> {
    if text.starts_with(':') { format!("0.0.0.0{text}").parse() } else { text.parse() }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Args, Command, RunCommand};

    #[test]
    fn linkerds_flags_are_understood() {
        for flag in [
            "addr=:8086",
            "metrics-addr=:9996",
            "kubeconfig=config",
            "controller-namespace=mesh",
            "outbound-transport-mode=transparent",
            "enable-h2-upgrade=false",
            "enable-endpoint-slices=true",
            "enable-ipv6=false",
            "identity-trust-domain=mesh.example",
            "cluster-domain=mesh.example",
            "default-opaque-ports=25,587",
            "stream-queue-capacity=500",
            "ext-endpoint-zone-weights",
            r#"meshed-http2-client-params={"keep_alive":{"interval":{"seconds":10}}}"#,
            "export-queue-metrics",
            "enable-pprof=false",
            "log-level=debug",
            "log-format=json",
        ] {
            for dashes in ["-", "--"] {
                let flag = format!("{dashes}{flag}");
                let given = ["weft-control-plane", "destination", &flag, &flag].map(OsString::from);
                let parsed = Args::try_parse_from(double_dashes(given));
                assert!(parsed.is_ok(), "{flag}: {}", parsed.unwrap_err());
            }
        }
    }

    #[test]
    fn of_a_flag_that_is_given_twice_the_last_one_counts() {
        let given = [
            "--log-level=info",
            "--enable-h2-upgrade=true",
            "--cluster-networks=10.0.0.0/8,fd00::/8",
            "-enable-h2-upgrade=false",
            "-log-level=debug",
            "-cluster-networks=172.16.0.0/12",
            "-addr=:9086",
            "-stream-queue-capacity",
            "500",
        ];
        let given = ["weft-control-plane", "destination"].into_iter().chain(given).map(OsString::from);
        let Args { command: Command::Run(command), log } = Args::parse_from(double_dashes(given)) else {
            panic!("a process runs")
        };
        let RunCommand::Destination { cluster, destination, .. } = *command else {
            panic!("it is the destination service")
        };
        assert_eq!((log.log_level.as_str(), destination.enable_h2_upgrade), ("debug", false));
        assert_eq!(cluster.cluster_networks, ["172.16.0.0/12".parse().unwrap()]);
        assert_eq!(destination.destination_addr, "0.0.0.0:9086".parse().unwrap());
        let ignored: Vec<_> = destination.without_effect.given().map(|(flag, _)| flag).collect();
        assert_eq!(ignored, ["--stream-queue-capacity"]);
    }
}
