// One namespace: its workloads and who calls whom.
import { Problem, each } from "./api.js";
import { h } from "./dom.js";
import { rate } from "./format.js";
import { glyph, graph } from "./graph.js";
import { edgesTable, fold, meshOf, podsOf } from "./edges.js";
import { spark } from "./plot.js";
import { coverage, empty, goldenColumns, goldenFigures, hasPage, head, hrefOf, idOf, linkTo, notice, panel, table, tcpColumns } from "./parts.js";

const KINDS = ["deployment", "statefulset", "daemonset", "cronjob", "job"];
const PLOT_EVERY = 3, PLOTS = 40;

export function namespace(name) {
  let round = 0, kinds = KINDS;
  const plots = new Map();
  return {
    title: name, crumbs: [{ name, href: "#/ns/" + encodeURIComponent(name) }],
    async load(ask, window) {
      const all = round % 15 === 0;
      const pods = await ask("pods", { namespace: name }).catch(ignore);
      const [own, edges, ...answers] = await Promise.all([
        ask("stat", { resource: { kind: "namespace", name }, windowSeconds: window }),
        ask("edges", { resource: { namespace: name, kind: pods && pods.pods.length <= 300 ? "pod" : "deployment" }, windowSeconds: window }),
        ...(all ? KINDS : kinds).map((kind) => ask("stat", { resource: { namespace: name, kind }, windowSeconds: window })),
      ]);
      const rows = answers.flatMap((answer) => answer.rows);
      if (all) kinds = KINDS.filter((kind) => rows.some((row) => row.resource.kind === kind));
      // Jobs of CronJobs are in their CronJobs.
      const mesh = meshOf(await podsOf(ask, name, edges.edges, pods?.pods));
      const loose = (pods?.pods ?? []).filter((pod) => !pod.owners.length).map((pod) => pod.name).slice(0, 20);
      if (loose.length) {
        const answer = await ask("stat", { resource: { namespace: name, kind: "pod" }, windowSeconds: window });
        rows.push(...answer.rows.filter((row) => loose.includes(row.resource.name)));
      }
      const shown = rows.filter((row) => !(row.resource.kind === "job" && mesh.owned.has(idOf(row.resource))));
      shown.sort((a, b) => (rate(b.http) ?? -1) - (rate(a.http) ?? -1) || a.resource.name.localeCompare(b.resource.name));
      if (round++ % PLOT_EVERY === 0) {
        await each(shown.filter((row) => row.meshedPods > 0).slice(0, PLOTS), 4, async (row) => {
          plots.set(idOf(row.resource), (await ask("series", { resource: row.resource, windowSeconds: Math.max(window, 300) })).points);
        });
      }
      return { own: own.rows[0], coverage: own.coverage, rows: shown, edges: fold(edges.edges, mesh), unmeshed: mesh.unmeshed };
    },
    view({ own, coverage: found, rows, edges, unmeshed }) {
      const nodes = nodesOf(rows, edges, unmeshed, name);
      const without = rows.filter((row) => row.runningPods > row.meshedPods);
      return [
        head("namespace", name, coverage(found)),
        without.length > 0 && notice("warn", `${without.length === 1 ? "One workload has" : without.length + " workloads have"} pods without a proxy`,
          h("span", {}, "The mesh neither protects nor counts them: ", without.slice(0, 5).map((row) => row.resource.name).join(", "), without.length > 5 ? " and others. " : ". ", h("code", {}, "weft inject"), " or the annotation ", h("code", {}, "linkerd.io/inject: enabled"), " adds it.")),
        goldenFigures(own),
        panel("Topology", "who calls whom in the window",
          edges.length ? graph(nodes, edges, Math.max(280, Math.min(1320, innerWidth - (innerWidth > 640 ? 80 : 48)))) : empty("No traffic between workloads", "Connections appear here when meshed pods talk to each other."),
          h("div", { class: "legend" },
            h("span", { class: "" }, glyph("secure"), "solid: mutual TLS"), h("span", {}, glyph("plain"), "dashed: plaintext"), h("span", {}, glyph("refused"), "policy refused some"))),
        panel("Workloads", "requests that they received",
          rows.length ? table("Workloads", [
            { title: "Workload", name: true, cell: (row) => h("span", {}, linkTo(row.resource), h("small", {}, row.resource.kind)) },
            { title: "Meshed", n: true, cell: (row) => `${row.meshedPods}/${row.runningPods}` },
            ...goldenColumns((row) => row.http),
            ...tcpColumns((row) => row.tcp).slice(0, 1),
            { title: "Requests, 5 min", wide: true, cell: (row) => spark(plots.get(idOf(row.resource))) },
          ], rows, (row) => idOf(row.resource)) : empty("No workloads", "There are no pods in this namespace.")),
        panel("Connections", "by workload; identities are those of certificates", edgesTable(edges)),
      ];
    },
  };
}

// Without the right to list pods, edges are between Deployments.
function ignore(error) {
  if (error instanceof Problem && error.code !== "key" && error.code !== "gone") return undefined;
  throw error;
}

function nodesOf(rows, edges, unmeshed, namespace) {
  const nodes = new Map(rows.map((row) => [idOf(row.resource), { id: idOf(row.resource), name: row.resource.name, kind: row.resource.kind, href: hrefOf(row.resource), golden: row.http, outside: row.meshedPods === 0 }]));
  for (const edge of edges) {
    for (const end of [edge.source, edge.destination]) {
      const id = idOf(end);
      if (nodes.has(id)) continue;
      const elsewhere = end.namespace && end.namespace !== namespace;
      nodes.set(id, { id, name: (elsewhere ? end.namespace + "/" : "") + (end.name || "outside the mesh"), kind: end.kind, href: hasPage(end) ? hrefOf(end) : null, outside: !hasPage(end) || unmeshed.has(id) });
    }
  }
  return [...nodes.values()];
}
