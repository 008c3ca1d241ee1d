//! `weft tap`: requests as they happen, with the kernel's verdicts beside them.
//!
//! ```text
//! engine ── events of requests ──┬──> a line for each
//! agents ── verdicts, joined by pod and ports (--kernel) ──┘
//! ```

mod format;
mod kernel;
mod template;

use std::{ffi::OsStr, num::NonZeroU64};

use anyhow::{Result, anyhow};
use clap::{
    Args, ValueEnum,
    builder::{EnumValueParser, PossibleValue, TypedValueParser},
    error::ErrorKind,
};
use futures::StreamExt as _;
use serde_json::Value;
use weft_proto::viz::{TapEvent, TapRequest, tap_event};

use super::{
    render::problem,
    scope::{ScopeArgs, ToArgs, WindowArgs, resources},
};
use crate::{
    kind,
    output::{self, WideFormat, colour, note},
};
use format::{json, line};
use kernel::Kernel;
use template::Template;

/// Begins a template.
const JSON_PATH: &str = "jsonpath=";

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  weft tap deploy/web -n shop                               requests that web sends and receives
  weft tap deploy/client -n shop --to svc/web --path /api   some
  weft tap ns/shop --method POST --max-rps 10
  weft tap po/web-0 -n shop -o json | jq .requestInitEvent
  weft tap po/web-0 -n shop -o jsonpath='{.source.ip} {.requestInitEvent.path}'
  weft tap deploy/client -n shop --kernel                   the kernel's verdict of the same connection, too

Where weft-viz is installed, it taps for those who may create taps.viz.weft.io. Otherwise, and with --direct, proxies answer on the
loopback address of their pod, which a port-forward reaches: a user who may create pods/portforward may tap.
A proxy takes at most --max-rps requests a second and does not count the others; what several take beyond it is left out, and
counted on standard error.
--kernel asks the nodes' agents, which takes the right to weft trace; only connections that begin while tapping have a verdict.")]
pub(crate) struct TapArgs {
    #[arg(required = true, num_args = 1..=2, value_name = "RESOURCE", help = kind::help("KIND/NAME, KIND NAME or KIND"))]
    resource: Vec<String>,
    #[command(flatten)]
    filter: FilterArgs,
    /// Also show the verdicts of the kernel about each connection
    #[arg(long)]
    kernel: bool,
    /// Exit after N events
    #[arg(long, value_name = "N")]
    count: Option<NonZeroU64>,
    /// Output format: wide adds what both ends belong to and the route; json is one object a line, with headers, yaml
    /// one a document; jsonpath is what a template finds in each of these objects, in kubectl's form
    #[arg(short, long, value_parser = Outputs, default_value = "table")]
    output: Output,
    #[command(flatten)]
    scope: ScopeArgs,
}

/// Which requests.
#[derive(Clone, Debug, Args)]
pub(super) struct FilterArgs {
    /// Only pods with these labels, as for kubectl
    #[arg(short = 'l', long, default_value = "", hide_default_value = true)]
    selector: String,
    #[command(flatten)]
    to: ToArgs,
    /// Only requests with this method
    #[arg(long, default_value = "", hide_default_value = true)]
    method: String,
    /// Only requests whose authority has this prefix
    #[arg(long, default_value = "", hide_default_value = true)]
    authority: String,
    /// Only requests whose path has this prefix
    #[arg(long, default_value = "", hide_default_value = true)]
    path: String,
    /// Only requests with this scheme: http or https
    #[arg(long, default_value = "", hide_default_value = true)]
    scheme: String,
    /// The most requests a second, of all proxies together
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    max_rps: u32,
}

/// How events are shown.
#[derive(Clone, Debug)]
enum Output {
    Format(WideFormat),
    JsonPath(Template),
}

/// Reads [`Output`].
#[derive(Clone, Debug)]
struct Outputs;

impl TypedValueParser for Outputs {
    type Value = Output;

    fn parse_ref(
        &self,
        command: &clap::Command,
        argument: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<Output, clap::Error> {
        let Some(template) = value.to_str().and_then(|value| value.strip_prefix(JSON_PATH)) else {
            let format = EnumValueParser::<WideFormat>::new().parse_ref(command, argument, value);
            return format.map(Output::Format);
        };
        let read = Template::read(template).map(Output::JsonPath);
        read.map_err(|why| clap::Error::raw(ErrorKind::ValueValidation, format!("-o {JSON_PATH}{template}: {why}\n")))
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let formats = WideFormat::value_variants().iter().filter_map(ValueEnum::to_possible_value);
        let template =
            PossibleValue::new("jsonpath=TEMPLATE").help("What a template such as {.requestInitEvent.path} finds");
        Some(Box::new(formats.chain([template])))
    }
}

impl Output {
    /// Whether it shows Linkerd's objects, which have headers.
    fn has_objects(&self) -> bool {
        match self {
            Self::Format(format) => format.data().is_some(),
            Self::JsonPath(_) => true,
        }
    }
}

impl FilterArgs {
    pub(super) fn request(&self, words: &[String], namespace: &str, headers: bool) -> Result<TapRequest> {
        let mut found = resources(words, namespace)?;
        let (Some(wanted), true) = (found.pop(), found.is_empty()) else {
            return Err(anyhow!("name one resource: KIND/NAME, KIND NAME or KIND"));
        };
        Ok(TapRequest {
            resource: Some(wanted),
            selector: self.selector.clone(),
            to: self.to.resource(namespace)?,
            method: self.method.clone(),
            authority: self.authority.clone(),
            path: self.path.clone(),
            scheme: self.scheme.clone(),
            max_rps: self.max_rps,
            headers,
        })
    }
}

pub(super) async fn execute(args: TapArgs) -> Result<()> {
    let scope = args.scope.once(&WindowArgs { time_window: None }).await?;
    let request = args.filter.request(&args.resource, &scope.namespace, args.output.has_objects())?;
    // Verdicts precede requests: the agents have to be asked first.
    let mut kernel = if args.kernel { Some(Kernel::open(&scope.network, &scope.namespace).await) } else { None };
    let mut events = scope.source.tap(request).await?;
    if matches!(args.output, Output::Format(WideFormat::Wide)) {
        note(scope.source.name());
    }
    let mut left = args.count.map(NonZeroU64::get);
    loop {
        let event = tokio::select! {
            _ = tokio::signal::ctrl_c() => return Ok(()),
            // Verdicts are kept while no request comes.
            () = async { match &mut kernel { Some(kernel) => kernel.listen().await, None => std::future::pending().await } } => continue,
            event = events.next() => event,
        };
        let Some(event) = event.transpose()? else { return Ok(()) };
        if event.skipped > 0 {
            note(&format!("{} requests were left out before this one: see --max-rps", event.skipped));
        }
        if let Some(tap_event::Event::Problem(why)) = &event.event {
            note(&problem(&event.namespace, &event.pod, why));
            continue;
        }
        show(&args, &event)?;
        if let (Some(kernel), Some(tap_event::Event::Request(_))) = (&mut kernel, &event.event)
            && let Some(verdict) = kernel.verdict(&event).await
        {
            match &args.output {
                Output::JsonPath(template) => print_found(template, &verdict.json(&event))?,
                Output::Format(format) => match format.data() {
                    Some(data) => data.print_next(&verdict.json(&event))?,
                    None => output::styled(&verdict.line(&event, colour::on_stdout()))?,
                },
            }
        }
        if let Some(tap_event::Event::End(_)) = event.event
            && let Some(left) = &mut left
        {
            *left -= 1;
            if *left == 0 {
                return Ok(());
            }
        }
    }
}

fn show(args: &TapArgs, event: &TapEvent) -> Result<()> {
    match &args.output {
        Output::Format(format) => match format.data() {
            Some(data) => data.print_next(&json(event)),
            None => Ok(output::line(&line(event, *format == WideFormat::Wide))?),
        },
        Output::JsonPath(template) => print_found(template, &json(event)),
    }
}

/// Prints what a template finds in an object, if it is anything.
fn print_found(template: &Template, object: &Value) -> Result<()> {
    template.line(object).map_or(Ok(()), |line| Ok(output::styled(&line)?))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        args: TapArgs,
    }

    #[test]
    fn the_output_is_a_format_or_a_template() {
        let parse = |output: &str| Cli::try_parse_from(["tap", "ns/shop", "-o", output]).map(|cli| cli.args.output);
        assert!(matches!(parse("wide"), Ok(Output::Format(WideFormat::Wide))));
        assert!(matches!(parse("jsonpath={.source.ip}"), Ok(Output::JsonPath(_))));
        for (output, expected) in
            [("xml", "possible values"), ("jsonpath", "possible values"), ("jsonpath=x", "no path")]
        {
            let error = parse(output).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}
