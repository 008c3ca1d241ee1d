// Requests as they happen.
import { Problem, ask, follow } from "./api.js";
import { announce, h } from "./dom.js";
import { clock, ms } from "./format.js";
import { empty, hrefOf, notice, panel } from "./parts.js";

const KEPT = 500, SHOWN = 150, DRAW_MS = 200;
const KINDS = ["namespace", "deployment", "statefulset", "daemonset", "job", "cronjob", "pod"];

export function tap(options) {
  const wanted = { namespace: options.get("namespace") ?? "", kind: options.get("kind") ?? "deployment", name: options.get("name") ?? "", method: "", path: "", authority: "", maxRps: "100" };
  let requests = new Map(), seen = 0, skipped = 0, fresh = 0, paused = false, abort, problem, problems = new Map(), filter = "", page, waiting = false, drawn = 0, calm = false;

  const later = () => {
    if (waiting) return;
    waiting = true;
    // Many new rows at once are not worth a colour each.
    setTimeout(() => { waiting = false; if (!paused) fresh = 0; calm = seen - drawn > 4; drawn = seen; page.redraw(); }, DRAW_MS);
  };

  function take(event) {
    skipped += event.skipped ?? 0;
    if (event.event?.problem !== undefined) { problems.set(event.pod && `${event.namespace}/${event.pod}`, event.event.problem); if (problems.size > 20) problems.delete(problems.keys().next().value); later(); return; }
    const key = `${event.namespace}/${event.pod} ${event.id}`;
    const { request, response, end } = event.event ?? {};
    if (request) {
      // What is said of no pod is that none runs yet, or at the end why the tap breaks.
      problems.delete("");
      seen++; if (paused) fresh++;
      learn();
      requests.set(key, { key, at: new Date(), request, event });
      // The oldest go: a page is no log.
      if (requests.size > KEPT) requests.delete(requests.keys().next().value);
    }
    const known = requests.get(key);
    if (known && response) known.response = response;
    if (known && end) known.end = end;
    later();
  }

  // Proxies see addresses; the list of pods says whose they are. Without the right to list pods they stay addresses.
  let names = new Map(), named = 0;
  async function learn() {
    if (Date.now() - named < 10_000) return;
    named = Date.now();
    try {
      const { pods } = await ask("pods", { namespace: "" }, abort?.signal);
      names = new Map(pods.flatMap((pod) => pod.addresses.map((address) => [address, pod])));
    } catch { /* addresses */ }
  }

  async function start(event) {
    event?.preventDefault();
    if (event) for (const [name, value] of new FormData(event.target)) wanted[name] = String(value).trim();
    stop();
    requests = new Map(); problems = new Map(); seen = skipped = fresh = 0; problem = undefined; paused = false;
    const own = abort = new AbortController();
    page.redraw();
    learn();
    announce("Tap started");
    try {
      const resource = wanted.kind === "namespace" ? { kind: "namespace", name: wanted.name || wanted.namespace } : { namespace: wanted.namespace, kind: wanted.kind, name: wanted.name };
      await follow("tap", { resource, method: wanted.method.toUpperCase(), path: wanted.path, authority: wanted.authority, maxRps: Number(wanted.maxRps) || 100 }, own.signal, take);
      if (abort === own) problem = "The tap ended: its pods are gone, or the server stopped.";
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!(error instanceof Problem)) console.error(error);
      if (abort === own) problem = error.message;
    }
    if (abort === own) { abort = undefined; page.redraw(); }
  }

  function stop() { abort?.abort(); abort = undefined; }

  let frozen = [];
  function rows() {
    if (paused) return frozen;
    const text = filter.toLowerCase();
    const all = [...requests.values()].reverse();
    return text ? all.filter((one) => textOf(one).includes(text)) : all;
  }

  return page = {
    title: "Tap", crumbs: [{ name: "Tap", href: "#/tap" }],
    redraw() { /* set when the page opens */ },
    start() { if (wanted.name && (wanted.namespace || wanted.kind === "namespace")) start(); },
    stop,
    view() {
      const shown = rows();
      return [
        h("div", { class: "head", key: "head" }, h("h1", {}, "Tap"), h("span", { class: "coverage" }, "requests as proxies see them; bodies are never shown")),
        panel("What to tap", null, h("form", { class: "form", onsubmit: start },
          field("Namespace", "namespace", wanted, { placeholder: "shop" }),
          h("label", {}, "Kind", h("select", { name: "kind" }, KINDS.map((kind) => h("option", { value: kind, selected: kind === wanted.kind }, kind)))),
          field("Name", "name", wanted, { placeholder: "all" }), field("Method", "method", wanted, { placeholder: "any" }), field("Path begins with", "path", wanted, { placeholder: "/" }), field("Authority begins with", "authority", wanted, { placeholder: "any" }),
          field("At most per second", "maxRps", wanted, { type: "number", min: 1, max: 1000 }),
          h("div", { class: "row" }, h("button", { type: "submit", class: "primary" }, abort ? "Start again" : "Start"), h("button", { type: "button", onclick: () => { stop(); page.redraw(); announce("Tap stopped"); } }, "Stop")))),
        problem && notice("bad", "Tap failed", problem),
        problems.size > 0 && notice("warn", "Some requests are not shown", h("span", {}, [...problems].slice(0, 5).map(([pod, why]) => h("div", { key: pod }, pod && [h("span", { class: "mono" }, pod), ": "], why)))),
        panel("Requests", abort ? `${seen} seen${skipped ? `, ${skipped} left out by the limit` : ""}` : requests.size ? `stopped after ${seen}` : null,
          h("div", { class: "form" },
            h("label", {}, "Filter", h("input", { type: "search", name: "filter", placeholder: "path, pod, status…", autocomplete: "off", oninput: (event) => { filter = event.target.value; page.redraw(); } })),
            h("div", { class: "row" },
              h("button", { type: "button", "aria-pressed": String(paused), onclick: () => { frozen = rows(); paused = !paused; fresh = 0; page.redraw(); announce(paused ? "Paused" : "Live again"); } }, paused ? `Paused, ${fresh} new` : "Pause"),
              h("button", { type: "button", onclick: () => { requests = new Map(); frozen = []; page.redraw(); } }, "Clear"))),
          shown.length ? list(shown.slice(0, SHOWN), names, calm) : abort ? empty("Listening", filter ? "Nothing matches the filter." : "A request appears as soon as a proxy sees one.") : empty("Nothing tapped", "Choose a workload and start.")),
      ];
    },
  };
}

function field(title, name, wanted, more) {
  return h("label", {}, title, h("input", { name, value: wanted[name], autocomplete: "off", spellcheck: "false", ...more }));
}

function textOf({ request, response, event }) {
  return [request.method, request.authority, request.path, response?.status, event.pod, event.source, event.destination, event.sourceLabels?.pod, event.destinationLabels?.pod, event.direction === 1 ? "outbound" : "inbound"].join(" ").toLowerCase();
}

function statusOf({ response, end }) {
  const outcome = end?.outcome;
  if (outcome?.resetCode !== undefined) return ["bad", "reset"];
  if (outcome?.grpcStatus !== undefined) return [outcome.grpcStatus === 0 ? "good" : "bad", "gRPC " + outcome.grpcStatus];
  if (!response) return end ? ["bad", "none"] : ["", "…"];
  return [response.status >= 500 ? "bad" : response.status >= 400 ? "warn" : "good", String(response.status)];
}

// An address without its port.
const host = (address) => address.replace(/:\d+$/, "").replace(/^\[(.*)\]$/, "$1");

function peer(address, names) {
  const pod = names.get(host(address));
  return pod ? h("a", { href: hrefOf({ namespace: pod.namespace, kind: "pod", name: pod.name }), title: address }, pod.name) : h("span", { class: "mono" }, address);
}

function list(rows, names, calm) {
  return h("div", { class: "scroll stream" }, h("table", { class: "cards" }, h("caption", { class: "hidden" }, "Requests, newest first"),
    h("thead", {}, h("tr", {}, ["Time", "At", "Request", "Status", "Latency", "From → to", "TLS"].map((title) => h("th", { scope: "col", class: title === "Latency" ? "n" : null }, title)))),
    h("tbody", {}, rows.map((one) => {
      const { event, request, end, response } = one, [level, status] = statusOf(one);
      const outbound = event.direction === 1, tls = (outbound ? event.destinationLabels : event.sourceLabels)?.tls;
      return h("tr", { key: one.key, class: calm ? null : "fresh" },
        h("td", { class: "mono", "data-label": "Time" }, clock(one.at)),
        h("td", { "data-label": "At" }, outbound ? "client" : "server"),
        h("td", { class: "path wide", "data-label": "Request" }, h("b", {}, request.method), " ", request.path, h("div", { class: "quiet" }, request.authority)),
        h("td", { "data-label": "Status" }, h("span", { class: "tag " + level }, status)),
        h("td", { class: "n", "data-label": "Latency" }, end ? ms(end.sinceRequestUs / 1000) : response ? ms(response.sinceRequestUs / 1000) + " …" : "…"),
        h("td", { class: "peers wide", "data-label": "From → to" }, peer(event.source, names), " → ", peer(event.destination, names)),
        h("td", { "data-label": "TLS" }, tls === "true" ? "mutual" : tls ? h("span", { class: "warn" }, "no") : "–"));
    }))));
}
