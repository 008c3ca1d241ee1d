// The topology: who calls whom, whether mutual TLS protects it, and whether policy refuses it. Line, glyph and words say so, not colour alone.
import { h, s } from "./dom.js";
import { layered } from "./layout.js";
import { number, percent, rate, success, grade } from "./format.js";

const BOX = { wide: 168, high: 50 };
const GLYPH = {
  secure: "M3 6h7v5h-7zM4.5 6v-2a2 2 0 0 1 4 0v2",
  plain: "M3 6h7v5h-7zM4.5 6v-2a2 2 0 0 1 3.8-.9",
  refused: "M6.5 2a4.5 4.5 0 1 0 .01 0zM3.4 9.7l6.2-6.4",
};

export const stateOf = (edge) => edge.denied > 0 ? "refused" : edge.clientIdentity || edge.serverIdentity ? "secure" : "plain";
export const stateText = (edge) => ({ secure: "mutual TLS", plain: "plaintext", refused: "refused by policy" })[stateOf(edge)];
export const glyph = (kind) => s("svg", { class: "glyph", viewBox: "0 0 13 13", width: 13, height: 13, "aria-hidden": "true" }, s("path", { d: GLYPH[kind] }));

// `nodes` are {id, name, kind, href, golden, outside}, `edges` {from, to} and the fields of weft.viz.v1.Edge.
export function graph(nodes, edges, wide) {
  const known = new Map(nodes.map((node) => [node.id, node]));
  const drawn = [...new Set(edges.flatMap((edge) => [edge.from, edge.to]))].filter((id) => known.has(id)).sort();
  const { place, layers, bends } = layered(drawn, edges);
  const most = Math.max(1, ...layers.map((layer) => layer.length));
  const spare = layers.length > 1 ? (wide - layers.length * BOX.wide) / (layers.length - 1) : 0;
  const gap = Math.max(110, Math.min(230, spare));
  const across = layers.length * (BOX.wide + gap) - gap;
  // On a narrow screen from top to bottom.
  const down = across > wide;
  const step = down ? { layer: BOX.high + 74, index: Math.max(106, Math.min(BOX.wide + 20, (wide - 8) / most)) } : { layer: BOX.wide + gap, index: BOX.high + 30 };
  const box = down ? { wide: Math.min(BOX.wide, step.index - 12), high: BOX.high } : BOX;
  const size = down ? [most * step.index, layers.length * step.layer - 74] : [across, most * step.index];
  const centre = ({ layer, index, of }) => {
    const along = (index + .5 + (most - of) / 2) * step.index;
    return down ? [along, layer * step.layer + box.high / 2] : [layer * step.layer + box.wide / 2, along];
  };
  const at = new Map(drawn.map((id) => [id, centre(place.get(id))]));
  const chips = [];
  const lines = edges.filter((edge) => at.has(edge.from) && at.has(edge.to)).map((edge) => {
    const state = stateOf(edge), perSecond = rate(edge.http);
    const { path, point } = curve(at.get(edge.from), at.get(edge.to), (bends.get(edge) ?? []).map(centre), box, down, edge.from === edge.to);
    let [x, y] = point(.5);
    for (const t of [.5, .4, .6, .3, .7, .2, .8]) { [x, y] = point(t); if (!chips.some((chip) => Math.abs(chip.x - x) < 62 && Math.abs(chip.y - y) < 20)) break; }
    const text = edge.denied > 0 ? `${edge.denied} refused` : perSecond ? number(perSecond) + "/s" : "TCP";
    chips.push({ x, y, state, text, key: edge.from + ">" + edge.to });
    const idle = !edge.denied && !perSecond && !edge.tcp?.openConnections;
    return s("path", { key: edge.from + ">" + edge.to, class: `edge ${state === "secure" ? "" : state}${idle ? " idle" : ""}`, d: path, "marker-end": `url(#head-${state})`, "stroke-width": (1.2 + Math.min(2.6, Math.log10(1 + (perSecond ?? 0)))).toFixed(2) });
  });
  const label = `Topology: ${drawn.length} workloads, ${edges.length} connections. The table of connections has the same.`;
  return h("div", { class: "graph" }, s("svg", { viewBox: `-4 -4 ${size[0] + 8} ${size[1] + 8}`, width: size[0] + 8, height: size[1] + 8, role: "group", "aria-label": label },
    s("defs", {}, ["secure", "plain", "refused"].map((state) => s("marker", { id: "head-" + state, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8, markerUnits: "userSpaceOnUse", orient: "auto" }, s("path", { class: "head-" + state, d: "M0 0L8 4L0 8Z" })))),
    s("g", { "aria-hidden": "true" }, lines, chips.map(chip)),
    drawn.map((id) => node(known.get(id), at.get(id), box))));
}

function chip({ x, y, state, text, key }) {
  const wide = 22 + text.length * 6.1;
  return s("g", { key, class: "chip " + state, transform: `translate(${(x - wide / 2).toFixed(1)} ${(y - 9).toFixed(1)})` },
    s("rect", { width: wide.toFixed(1), height: 18, rx: 9 }), s("path", { d: GLYPH[state], transform: "translate(4 2.5)" }), s("text", { x: 19, y: 12.8 }, text));
}

function node(one, [x, y], box) {
  const share = success(one.golden), level = grade(share);
  const fits = Math.floor((box.wide - 20) / 7.1);
  const short = (text) => text.length > fits ? text.slice(0, fits - 1) + "…" : text;
  const facts = rate(one.golden) ? `${number(rate(one.golden))}/s  ${share === undefined ? "" : (level === "bad" ? "▼ " : level === "warn" ? "▲ " : "") + percent(share)}` : one.kind === "serviceaccount" ? "ServiceAccount" : one.outside ? "no proxy" : "no inbound HTTP";
  const inside = [s("rect", { class: "box" + (one.outside ? " outside" : ""), width: box.wide, height: box.high, rx: 7 }), s("title", {}, `${one.kind} ${one.name}`),
    s("text", { class: "title", x: 10, y: 21 }, short(one.name)), s("text", { class: "small " + level, x: 10, y: 38 }, facts)];
  const where = `translate(${(x - box.wide / 2).toFixed(1)} ${(y - box.high / 2).toFixed(1)})`;
  return one.href ? s("a", { key: one.id, href: one.href, transform: where, "aria-label": `${one.kind} ${one.name}, ${facts}` }, inside) : s("g", { key: one.id, transform: where }, inside);
}

// A curve through bends, and its points at t, 0 to 1.
function curve(from, to, bends, box, down, own) {
  const [w, hgt] = [box.wide / 2, box.high / 2];
  if (own) {
    const [x, y] = from;
    const path = `M${x - 20} ${y - hgt}C${x - 24} ${y - hgt - 26} ${x + 24} ${y - hgt - 26} ${x + 20} ${y - hgt}`;
    return { path, point: () => [x, y - hgt - 16] };
  }
  const along = down ? 1 : 0;
  const ahead = to[along] >= from[along] ? 1 : -1;
  const level = Math.abs(to[along] - from[along]) < 1;
  const leave = [...from], arrive = [...to];
  const half = down ? hgt : w;
  leave[along] += ahead * half; arrive[along] -= ahead * half;
  if (level) { leave[along] = from[along] + half; arrive[along] = to[along] + half; }
  const points = [leave, ...bends, arrive];
  let path = `M${points[0].map((v) => v.toFixed(1)).join(" ")}`;
  const parts = [];
  for (let i = 1; i < points.length; i++) {
    const [a, b] = [points[i - 1], points[i]];
    const pull = level ? 60 : Math.abs(b[along] - a[along]) / 2;
    const one = [...a], two = [...b];
    one[along] += (level ? 1 : ahead) * pull; two[along] -= (level ? -1 : ahead) * pull;
    path += `C${[one, two, b].map((p) => p.map((v) => v.toFixed(1)).join(" ")).join(" ")}`;
    parts.push([a, one, two, b]);
  }
  const point = (t) => {
    const scaled = t * parts.length, index = Math.min(parts.length - 1, Math.floor(scaled)), u = scaled - index;
    return [0, 1].map((axis) => parts[index].reduce((sum, p, i) => sum + p[axis] * [1, 3, 3, 1][i] * (1 - u) ** (3 - i) * u ** i, 0));
  };
  return { path, point };
}
