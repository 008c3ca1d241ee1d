// One workload or one pod: figures, plots, routes, connections; of a pod also what the kernel decides.
import { Problem } from "./api.js";
import { h } from "./dom.js";
import { NONE, bytes, ms, number, per, percent, rate, success } from "./format.js";
import { edgesTable, fold, meshOf, podsOf } from "./edges.js";
import { kernel } from "./kernel.js";
import { plot } from "./plot.js";
import { coverage, empty, goldenColumns, goldenFigures, head, idOf, linkTo, notice, panel, table, tcpColumns } from "./parts.js";

export function resource(namespace, kind, name) {
  const self = { namespace, kind, name };
  const pod = kind === "pod";
  let ofKernel;
  const page = {
    title: `${kind} ${name}`,
    crumbs: [{ name: namespace, href: "#/ns/" + encodeURIComponent(namespace) }, { name, href: "#/" + ["ns", namespace, kind, name].map(encodeURIComponent).join("/") }],
    start(started) { if (pod) { ofKernel = kernel(namespace, name, started.redraw); ofKernel.start(); } },
    stop() { ofKernel?.stop(); },
    async load(ask, window) {
      const wanted = { resource: self, windowSeconds: window };
      const [stat, series, inbound, outbound, edges, pods] = await Promise.all([
        ask("stat", wanted), ask("series", wanted), ask("stat-inbound", wanted), ask("stat-outbound", wanted), ask("edges", { resource: { namespace, kind: "pod" }, windowSeconds: window }),
        ask("pods", { namespace }).catch((error) => { if (error instanceof Problem) return undefined; throw error; }),
      ]);
      const mesh = meshOf(await podsOf(ask, namespace, edges.edges, pods?.pods));
      const own = (pods?.pods ?? []).filter((one) => pod ? one.name === name : one.owners.some(([its, known]) => its === kind && known === name));
      const names = new Set(own.map((one) => one.name));
      const mine = (end) => end && end.namespace === namespace && (names.has(end.name) || (end.kind === kind && end.name === name));
      let rows = [];
      if (!pod && names.size) rows = (await ask("stat", { resource: { namespace, kind: "pod" }, windowSeconds: window })).rows.filter((row) => names.has(row.resource.name));
      rows.sort((a, b) => a.resource.name.localeCompare(b.resource.name));
      return { stat: stat.rows[0], coverage: stat.coverage, points: series.points, inbound: inbound.rows, outbound: outbound.rows, edges: fold(edges.edges.filter((edge) => mine(edge.source) || mine(edge.destination)), mesh), rows, info: pod ? own[0] : undefined, listed: !!pods };
    },
    view(state) {
      const { stat, points } = state;
      if (!stat) return [head(kind, name, state.coverage && coverage(state.coverage)), notice("warn", `There is no ${kind} ${name} in ${namespace} (any more)`, "It may have been deleted or renamed. ", h("a", { href: "#/ns/" + encodeURIComponent(namespace) }, "Its namespace")), ofKernel?.view() ?? []];
      return [
        head(kind, name, coverage(state.coverage), h("a", { class: "button", href: `#/tap?namespace=${encodeURIComponent(namespace)}&kind=${encodeURIComponent(kind)}&name=${encodeURIComponent(name)}` }, "Tap its requests")),
        about(state.info),
        stat.meshedPods === 0 && notice("warn", "No proxy here", h("span", {}, "Its traffic is neither protected nor counted. ", h("code", {}, "weft inject"), " or the annotation ", h("code", {}, "linkerd.io/inject: enabled"), " adds the proxy; its pods have to be recreated.")),
        goldenFigures(stat),
        plots(points, stat),
        ofKernel?.view(),
        !pod && panel("Pods", `${stat.meshedPods} of ${stat.runningPods} with a proxy${stat.failedPods ? `, ${stat.failedPods} failed` : ""}`, state.rows.length ? table("Pods", [
          { title: "Pod", name: true, cell: (row) => linkTo(row.resource) },
          ...goldenColumns((row) => row.http), ...tcpColumns((row) => row.tcp),
        ], state.rows, (row) => row.resource.name) : empty("No pods listed", state.listed ? "None runs now." : "Listing pods needs the right `list pods` in this namespace.")),
        panel("Inbound", "by server and route, with what policy refused", state.inbound.length ? table("Inbound", [
          { title: "Server", name: true, cell: (row) => h("span", {}, row.server || NONE, row.resource.kind !== kind && h("small", {}, row.resource.name)) },
          { title: "Route", cell: (row) => row.route || NONE },
          ...goldenColumns((row) => row.http),
          { title: "Refused", n: true, cell: (row) => refused(row.denied) },
          { title: "Rate limited", n: true, cell: (row) => refused(row.rateLimited) },
        ], state.inbound, (row) => `${idOf(row.resource)} ${row.server} ${row.route} ${row.routeKind}`) : empty("Nothing inbound", "No request reached it in the window.")),
        panel("Outbound", "by Service, route and backend", state.outbound.length ? table("Outbound", [
          { title: "Service", name: true, cell: (row) => row.service || NONE },
          { title: "Route", cell: (row) => row.route || NONE },
          { title: "Backend", cell: (row) => row.backend || NONE },
          ...goldenColumns((row) => row.http),
          { title: "Timeouts", n: true, cell: (row) => refused(row.timeouts) },
          { title: "Retries", n: true, cell: (row) => number(per(row.retries, row.http)) },
        ], state.outbound, (row) => `${idOf(row.resource)} ${row.service} ${row.route} ${row.backend}`) : empty("Nothing outbound", "It called nobody in the window.")),
        panel("Connections", null, edgesTable(state.edges)),
      ];
    },
  };
  return page;
}

const refused = (count) => count ? h("strong", { class: "bad" }, String(count)) : "0";

function about(info) {
  if (!info) return null;
  const owner = info.owners.at(-1);
  return h("p", { class: "quiet", key: "about" },
    owner && h("span", {}, `of ${owner[0]} `, linkTo({ namespace: info.namespace, kind: owner[0], name: owner[1] }), " · "),
    h("span", { class: "mono" }, info.addresses.join(", ") || "no address"), info.node ? ` · node ${info.node}` : "", ` · ${info.phase}`, info.serviceAccount ? ` · ServiceAccount ${info.serviceAccount}` : "");
}

function plots(points, stat) {
  const p = (field) => (point) => point.http?.[field] ?? undefined;
  const perSecond = (field) => (point) => point.tcp?.seconds > 0 ? point.tcp[field] / point.tcp.seconds : undefined;
  const failures = (point) => per(point.http?.failure, point.http);
  return h("div", { class: "plots", key: "plots" },
    plot("Received/s", null, points, [{ name: "all", class: "c-rps", value: (point) => rate(point.http), area: true }, { name: "failed", class: "c-fail", value: failures, area: true, dash: "4 2" }], number),
    plot("Success", percent(success(stat.http)), points, [{ class: "c-rps", value: (point) => success(point.http), area: true }], percent, 1),
    plot("Latency", null, points, [{ name: "p50", class: "c-p50", value: p("p50Ms") }, { name: "p95", class: "c-p95", value: p("p95Ms"), dash: "7 2" }, { name: "p99", class: "c-p99", value: p("p99Ms"), dash: "3 2" }], ms),
    plot("TCP bytes/s", null, points, [{ name: "read", class: "c-in", value: perSecond("readBytes"), area: true }, { name: "written", class: "c-out", value: perSecond("writeBytes"), dash: "4 2" }], bytes));
}
