// Parts that pages share: figures, tables, notices, and what an answer rests on.
import { h, s } from "./dom.js";
import { NONE, bytes, grade, ms, number, percent, rate, seconds, success } from "./format.js";

const MARK = { good: "M2 6.5l3 3 5-6.5", warn: "M6 2v5M6 9.4v.4", bad: "M3 3l6 6M9 3l-6 6" };
const WORD = { good: "healthy", warn: "some failures", bad: "many failures" };

// A share of successes with a mark of its grade.
export function share(golden) {
  const value = success(golden), level = grade(value);
  if (!level) return NONE;
  return h("span", { class: "state " + level }, h("span", { class: "v" }, percent(value)),
    s("svg", { viewBox: "0 0 12 12", width: 12, height: 12, role: "img", "aria-label": WORD[level] }, s("path", { d: MARK[level], fill: "none", stroke: "currentColor", "stroke-width": 2, "stroke-linecap": "round" })));
}

// Requests per second, with the counts behind them.
export function requests(golden) {
  const value = rate(golden);
  if (!value) return number(value);
  const counted = golden.success + golden.failure;
  return h("span", { "data-count": counted, title: `${counted} requests in ${seconds(golden.seconds)}, ${golden.failure} failed` }, number(value));
}

// A table that becomes cards on a phone. Columns are {title, cell(row), n, wide, name}; `keyOf` names a row.
export function table(caption, columns, rows, keyOf) {
  return h("div", { class: "scroll" }, h("table", { class: "cards" },
    h("caption", { class: "hidden" }, caption),
    h("thead", {}, h("tr", {}, columns.map((column) => h("th", { scope: "col", class: column.n ? "n" : null }, column.title)))),
    h("tbody", {}, rows.map((row) => h("tr", { key: keyOf(row) }, columns.map((column) => {
      const content = column.cell(row);
      const none = content === NONE || content === "";
      const dim = none || content === "0.0" || content === "0" || content === "0 B";
      return h("td", { class: [column.n && "n", column.name && "name", column.wide && "wide", dim && "dim", none && "none"].filter(Boolean).join(" ") || null, "data-label": column.title }, content);
    }))))));
}

// The columns of a golden metric; `of` finds it in a row.
export const goldenColumns = (of) => [
  { title: "Success", n: true, cell: (row) => share(of(row)) },
  { title: "Req/s", n: true, cell: (row) => requests(of(row)) },
  { title: "p50", n: true, cell: (row) => ms(of(row)?.p50Ms) },
  { title: "p95", n: true, cell: (row) => ms(of(row)?.p95Ms) },
  { title: "p99", n: true, cell: (row) => ms(of(row)?.p99Ms) },
];

export const tcpColumns = (of) => [
  { title: "TCP conns", n: true, cell: (row) => of(row) ? String(of(row).openConnections) : NONE },
  { title: "Read/s", n: true, cell: (row) => of(row)?.seconds ? bytes(of(row).readBytes / of(row).seconds) : NONE },
  { title: "Write/s", n: true, cell: (row) => of(row)?.seconds ? bytes(of(row).writeBytes / of(row).seconds) : NONE },
];

export const figures = (list) => h("dl", { class: "figures" }, list.map(([name, value, more]) => h("div", { class: "figure" }, h("dt", {}, name), h("dd", {}, value, more && h("small", {}, " ", more)))));

export function goldenFigures(row) {
  const golden = row?.http, tcp = row?.tcp;
  return figures([
    ["Success", share(golden)],
    ["Requests", number(rate(golden)), "/s"],
    ["p50", ms(golden?.p50Ms)], ["p95", ms(golden?.p95Ms)], ["p99", ms(golden?.p99Ms)],
    ["TCP connections", tcp ? String(tcp.openConnections) : NONE],
    ...(row && row.runningPods + row.meshedPods > 0 ? [["Meshed pods", `${row.meshedPods}/${row.runningPods}`, row.failedPods ? `${row.failedPods} failed` : null]] : []),
  ]);
}

export const panel = (title, more, ...content) => h("section", { class: "panel", key: "panel " + title }, h("header", {}, h("h2", {}, title), more && h("span", { class: "quiet" }, more)), content);

export const notice = (kind, title, text, more) => h("div", { class: "notice " + kind, key: "notice " + title, role: kind === "bad" ? "alert" : null }, h("strong", {}, title), text, more);

export const empty = (title, text) => h("div", { class: "empty" }, h("strong", {}, title), text);

export const tag = (level, text) => h("span", { class: "tag " + level }, text);

export function head(kind, name, ...more) {
  return h("div", { class: "head", key: "head" }, h("h1", {}, kind && h("span", { class: "kind" }, kind), name), h("span", { class: "spring" }), more);
}

// How many proxies an answer rests on, and which did not answer.
export function coverage(found) {
  if (!found) return null;
  if (found.proxies === 0) return h("span", { class: "coverage" }, "no proxies here");
  const text = `${found.answered} of ${found.proxies} proxies answered` + (found.seconds > 0 ? `, last ${seconds(found.seconds)}` : "");
  if (!found.problems?.length) return h("span", { class: "coverage" }, text);
  return h("details", { class: "coverage" }, h("summary", {}, text),
    h("ul", {}, found.problems.map((one) => h("li", { key: one.namespace + "/" + one.pod }, h("span", { class: "mono" }, one.namespace + "/" + one.pod), ": ", one.message))));
}

// The address of a resource's page.
export const hrefOf = (resource) => "#/" + (resource.kind === "namespace" ? ["ns", resource.name] : ["ns", resource.namespace, resource.kind, resource.name]).map(encodeURIComponent).join("/");
// A client of which only the identity is known has none.
export const hasPage = (resource) => Boolean(resource.name && resource.namespace && resource.kind !== "serviceaccount");
export const linkTo = (resource, more) => h("a", { href: hrefOf(resource) }, resource.name, more);
export const idOf = (resource) => `${resource.namespace}/${resource.kind}/${resource.name}`;
