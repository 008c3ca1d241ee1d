// Connections between pods, gathered by workload.
import { h } from "./dom.js";
import { NONE } from "./format.js";
import { glyph, stateOf, stateText } from "./graph.js";
import { empty, goldenColumns, hasPage, hrefOf, idOf, table, tcpColumns } from "./parts.js";

// What pods belong to: the furthest owner of each.
export function meshOf(pods) {
  const top = new Map(), owned = new Set(), unmeshed = new Set();
  for (const pod of pods) {
    const [kind, name] = pod.owners.at(-1) ?? ["pod", pod.name];
    const owner = { namespace: pod.namespace, kind, name };
    top.set(`${pod.namespace}/${pod.name}`, owner);
    for (const [between, its] of pod.owners.slice(0, -1)) owned.add(idOf({ namespace: pod.namespace, kind: between, name: its }));
    if (!pod.meshed) unmeshed.add(idOf(owner));
  }
  return { top, owned, unmeshed };
}

// The pods of a namespace and of those that its edges lead to; what may not be listed stays a pod.
export async function podsOf(ask, namespace, edges, pods) {
  const others = [...new Set(edges.flatMap((edge) => [edge.source, edge.destination]).filter((end) => end?.kind === "pod" && end.namespace !== namespace).map((end) => end.namespace))];
  const more = await Promise.all(others.slice(0, 8).map((other) => ask("pods", { namespace: other }).then((answer) => answer.pods, () => [])));
  return [pods ?? [], ...more].flat();
}

// Edges of pods as edges of their owners, with sums. Percentiles of several cannot be summed: the greatest stays.
export function fold(edges, mesh) {
  const all = new Map();
  for (const edge of edges) {
    const [source, destination] = [edge.source, edge.destination].map((end) => end?.kind === "pod" ? mesh.top.get(`${end.namespace}/${end.name}`) ?? end : end ?? { namespace: "", kind: "", name: "" });
    const [from, to] = [idOf(source), idOf(destination)];
    const known = all.get(from + ">" + to);
    // A destination counts what it refused by identity: every pod with that identity has the same count.
    const refuser = idOf(edge.destination) + " " + edge.clientIdentity;
    if (!known) { all.set(from + ">" + to, { ...edge, source, destination, from, to, http: edge.http && { ...edge.http }, tcp: edge.tcp && { ...edge.tcp }, denied: edge.denied ?? 0, plain: isPlain(edge) ? edge.noIdentityReason : undefined, refusers: new Map([[refuser, edge.denied ?? 0]]) }); continue; }
    known.refusers.set(refuser, Math.max(known.refusers.get(refuser) ?? 0, edge.denied ?? 0));
    known.denied = [...known.refusers.values()].reduce((sum, count) => sum + count, 0);
    known.clientIdentity ||= edge.clientIdentity;
    known.serverIdentity ||= edge.serverIdentity;
    if (edge.http) known.http = known.http ? { success: known.http.success + edge.http.success, failure: known.http.failure + edge.http.failure, seconds: Math.max(known.http.seconds, edge.http.seconds), ...most(known.http, edge.http) } : { ...edge.http };
    if (edge.tcp) known.tcp = known.tcp ? { openConnections: known.tcp.openConnections + edge.tcp.openConnections, readBytes: known.tcp.readBytes + edge.tcp.readBytes, writeBytes: known.tcp.writeBytes + edge.tcp.writeBytes, seconds: Math.max(known.tcp.seconds, edge.tcp.seconds) } : { ...edge.tcp };
    // One plaintext connection is what a person has to know.
    if (isPlain(edge)) known.plain = edge.noIdentityReason;
    if (known.plain !== undefined) { known.clientIdentity = ""; known.serverIdentity = ""; known.noIdentityReason = known.plain; }
  }
  return [...all.values()].sort((a, b) => a.from.localeCompare(b.from) || a.to.localeCompare(b.to));
}

const isPlain = (edge) => !edge.clientIdentity && !edge.serverIdentity;

function most(a, b) {
  const greatest = (field) => a[field] == null ? b[field] : b[field] == null ? a[field] : Math.max(a[field], b[field]);
  return { p50Ms: greatest("p50Ms"), p95Ms: greatest("p95Ms"), p99Ms: greatest("p99Ms") };
}

const end = (resource) => !resource.name ? h("span", { class: "quiet" }, "outside the mesh") : hasPage(resource) ? h("a", { href: hrefOf(resource) }, resource.name) : h("span", {}, resource.name, " ", h("small", { class: "quiet" }, resource.kind));
const REASONS = { no_tls_from_remote: "the client sent no TLS", not_provided_by_service_discovery: "not in the mesh", loopback: "its own loopback", port_skipped: "a skipped port" };
// The first two labels of an identity say whose it is.
const short = (identity) => identity.split(".").slice(0, 2).join(".");

export function edgesTable(edges) {
  if (!edges.length) return empty("No connections", "None were open or used in the window.");
  return table("Connections", [
    { title: "From → to", name: true, cell: (edge) => h("span", {}, end(edge.source), " → ", end(edge.destination)) },
    { title: "Protection", cell: (edge) => h("span", { class: "tag " + ({ secure: "good", plain: "warn", refused: "bad" })[stateOf(edge)] }, glyph(stateOf(edge)), stateText(edge)) },
    { title: "Client identity", wide: true, cell: (edge) => edge.clientIdentity ? h("span", { title: edge.clientIdentity }, short(edge.clientIdentity)) : edge.noIdentityReason ? h("span", { class: "quiet" }, REASONS[edge.noIdentityReason] ?? edge.noIdentityReason) : NONE },
    { title: "Refused", n: true, cell: (edge) => String(edge.denied) },
    ...goldenColumns((edge) => edge.http).slice(0, 2),
    ...goldenColumns((edge) => edge.http).slice(4),
    ...tcpColumns((edge) => edge.tcp).slice(0, 1),
  ], edges, (edge) => edge.from + ">" + edge.to);
}

