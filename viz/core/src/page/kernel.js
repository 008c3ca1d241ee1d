// What the kernel decides about a pod's connections, while it decides it, and what it would decide. The agents answer with the rights of
// the person who runs `weft dashboard`.
import { Problem, ask, follow } from "./api.js";
import { h } from "./dom.js";
import { clock } from "./format.js";
import { empty, notice, panel } from "./parts.js";

const KEPT = 200, SHOWN = 60;
const levelOf = (verdict) => verdict.startsWith("deny") ? "bad" : verdict.includes("bypassed") ? "warn" : verdict === "redirect" ? "good" : "";

export function kernel(namespace, pod, redraw) {
  let events = [], counts = new Map(), lost = 0, count = 0, problem, connected = false, answer, failure, asking = false, waiting = false;
  const abort = new AbortController();
  const later = () => { if (!waiting) { waiting = true; setTimeout(() => { waiting = false; redraw(); }, 250); } };

  async function watch() {
    while (!abort.signal.aborted) {
      try {
        await follow("kernel", { namespace, pod }, abort.signal, (event) => {
          connected = true; problem = undefined;
          if (event.problem) { problem = event.problem; later(); return; }
          if (!event.verdict) { later(); return; }
          events.unshift({ ...event, number: ++count });
          events.length = Math.min(events.length, KEPT);
          lost += event.droppedBefore ?? 0;
          const key = event.verdict + " " + event.direction;
          counts.set(key, (counts.get(key) ?? 0) + 1);
          later();
        });
      } catch (error) {
        if (error.name === "AbortError") return;
        if (!(error instanceof Problem)) console.error(error);
        problem = error.message; later();
      }
      await new Promise((done) => setTimeout(done, 3000));
    }
  }

  async function explain(event) {
    event.preventDefault();
    const form = new FormData(event.target);
    asking = true; failure = answer = undefined; redraw();
    try {
      answer = await ask("explain", { namespace, pod, destination: form.get("destination").trim(), inbound: form.get("direction") === "inbound", from: form.get("from")?.trim() || null }, abort.signal);
    } catch (error) {
      if (error.name === "AbortError") return;
      failure = error.message;
    }
    asking = false; redraw();
  }

  const live = () => [
    h("div", { class: "verdicts", "aria-label": "Verdicts since this page is open" },
      counts.size ? [...counts].sort().map(([key, many]) => { const [verdict, direction] = key.split(" "); return h("span", { class: "tag " + levelOf(verdict), key }, `${verdict} ${direction} `, h("b", {}, String(many))); }) : h("span", { class: "quiet" }, connected ? "Waiting for connections. The kernel decides when one is opened, not for every request on it." : problem ? "" : "Connecting to the node's agent…"),
      lost > 0 && h("span", { class: "tag warn" }, `${lost} not shown: too many`)),
    events.length > 0 && h("div", { class: "scroll stream short" }, h("table", { class: "cards" }, h("caption", { class: "hidden" }, "Verdicts"),
      h("thead", {}, h("tr", {}, ["Time", "Direction", "Verdict", "Process", "Source", "Destination", "Arrives at"].map((title) => h("th", { scope: "col" }, title)))),
      h("tbody", {}, events.slice(0, SHOWN).map((event) => h("tr", { key: event.number, class: "fresh" },
        h("td", { "data-label": "Time", class: "mono" }, clock(new Date(event.timeUnixMs))), h("td", { "data-label": "Direction" }, event.direction),
        h("td", { "data-label": "Verdict" }, h("span", { class: "tag " + levelOf(event.verdict) }, event.verdict)),
        h("td", { "data-label": "Process" }, event.command ? `${event.command} (${event.pid})` : "–"),
        h("td", { class: "mono wide", "data-label": "Source" }, event.source), h("td", { class: "mono wide", "data-label": "Destination" }, event.originalDestination),
        h("td", { class: "mono wide", "data-label": "Arrives at" }, event.newDestination === event.originalDestination ? "the same" : event.newDestination || "refused")))))),
  ];

  return {
    start() { watch(); },
    stop() { abort.abort(); },
    view: () => [
      panel("Kernel verdicts", "live, from the node's agent", problem && notice("warn", "The agent cannot be asked", problem), live()),
      panel("Explain", "what the kernel would do with a connection of this pod; nothing is sent",
        h("form", { class: "form", onsubmit: explain },
          h("label", {}, "Direction", h("select", { name: "direction" }, h("option", { value: "outbound" }, "from the pod"), h("option", { value: "inbound" }, "to the pod"))),
          h("label", {}, "Destination", h("input", { name: "destination", required: true, autocomplete: "off", spellcheck: "false", placeholder: "payments:80, 10.0.0.9:53 or 8080" })),
          h("label", {}, "Client, if to the pod", h("input", { name: "from", autocomplete: "off", spellcheck: "false", placeholder: "any address" })),
          h("button", { type: "submit", class: "primary", "aria-busy": asking ? "true" : null }, "Explain")),
        h("div", { role: "status" },
          failure && notice("bad", "No explanation", failure),
          answer && h("dl", { class: "answer" },
            h("dt", {}, "Verdict"), h("dd", {}, h("span", { class: "tag " + levelOf(answer.verdict) }, answer.verdict), " ", h("span", { class: "mono" }, `${answer.destination} → ${answer.new_destination ?? "refused"}`)),
            h("dt", {}, "Because"), h("dd", {}, answer.reason),
            answer.change ? [h("dt", {}, "To change it"), h("dd", {}, answer.change)] : null,
            answer.endpoints?.length ? [h("dt", {}, "Endpoints"), h("dd", {}, answer.endpoints.map((one) => h("div", { class: "mono" }, one.address, one.pod ? ` ${one.pod}` : "", one.identity ? ", mutual TLS" : `, ${one.transport}${one.reason ? ": " + one.reason : ""}`)))] : null)),
        !answer && !failure && empty("Ask about a connection", "An address, or a Service as the pod would name it.")),
    ],
  };
}
