// All namespaces.
import { each } from "./api.js";
import { h } from "./dom.js";
import { number, rate } from "./format.js";
import { spark } from "./plot.js";
import { coverage, empty, figures, goldenColumns, head, linkTo, panel, share, table } from "./parts.js";

// Plots are asked for at one refresh of `PLOT_EVERY`, and for the first `PLOTS` rows.
const PLOT_EVERY = 3, PLOTS = 40;

export function namespaces() {
  let round = 0;
  const plots = new Map();
  return {
    title: "Namespaces", crumbs: [],
    async load(ask, window) {
      const answer = await ask("stat", { resource: { kind: "namespace" }, windowSeconds: window });
      const rows = answer.rows.sort((a, b) => (rate(b.http) ?? -1) - (rate(a.http) ?? -1) || a.resource.name.localeCompare(b.resource.name));
      if (round++ % PLOT_EVERY === 0) {
        await each(rows.filter((row) => row.meshedPods > 0).slice(0, PLOTS), 4, async (row) => {
          plots.set(row.resource.name, (await ask("series", { resource: row.resource, windowSeconds: Math.max(window, 300) })).points);
        });
      }
      return { rows, coverage: answer.coverage };
    },
    view({ rows, coverage: found }) {
      const sum = (field) => rows.reduce((total, row) => total + field(row), 0);
      const http = rows.filter((row) => row.http);
      const total = { success: sum((row) => row.http?.success ?? 0), failure: sum((row) => row.http?.failure ?? 0), seconds: 1 };
      return [
        head(null, "Namespaces", coverage(found)),
        figures([
          ["Success", share(total)],
          ["Requests", number(http.length ? http.reduce((all, row) => all + (rate(row.http) ?? 0), 0) : undefined), "/s"],
          ["Meshed pods", `${sum((row) => row.meshedPods)}/${sum((row) => row.runningPods)}`],
          ["Namespaces", String(rows.length)],
        ]),
        panel("Namespaces", "requests that their workloads received",
          rows.length ? table("Namespaces", [
            { title: "Namespace", name: true, cell: (row) => linkTo(row.resource) },
            { title: "Meshed", n: true, cell: (row) => `${row.meshedPods}/${row.runningPods}` },
            ...goldenColumns((row) => row.http),
            { title: "Requests, 5 min", wide: true, cell: (row) => spark(plots.get(row.resource.name)) },
          ], rows, (row) => row.resource.name) : empty("No namespaces", h("span", {}, "There are no pods here yet. ", h("code", {}, "weft inject"), " adds the proxy to workloads."))),
      ];
    },
  };
}
