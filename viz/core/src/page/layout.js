// A layered layout of a directed graph: who calls is before who is called. Long edges bend around what is between.

// `nodes` are ids, `edges` are {from, to}. Returns for each node its layer and place in it, and each edge's bends as [layer, place].
export function layered(nodes, edges) {
  const next = new Map(nodes.map((id) => [id, []]));
  for (const edge of edges) if (edge.from !== edge.to) next.get(edge.from).push(edge);
  const back = backEdges(nodes, next);
  const forward = edges.filter((edge) => edge.from !== edge.to).map((edge) => back.has(edge) ? { edge, from: edge.to, to: edge.from } : { edge, from: edge.from, to: edge.to });

  // The longest way from a node without callers.
  const layer = new Map(nodes.map((id) => [id, 0]));
  for (let pass = 0; pass < nodes.length; pass++) {
    let moved = false;
    for (const { from, to } of forward) if (layer.get(to) < layer.get(from) + 1) { layer.set(to, layer.get(from) + 1); moved = true; }
    if (!moved) break;
  }

  const layers = [];
  const put = (id, at) => (layers[at] ??= []).push(id);
  for (const id of nodes) put(id, layer.get(id));
  const links = [], bends = new Map();
  for (const { edge, from, to } of forward) {
    let previous = from;
    const own = [];
    for (let at = layer.get(from) + 1; at < layer.get(to); at++) {
      const bend = Symbol();
      put(bend, at); links.push([previous, bend]); own.push([at, bend]);
      previous = bend;
    }
    links.push([previous, to]);
    bends.set(edge, back.has(edge) ? own.reverse() : own);
  }
  sweep(layers, links);
  const place = new Map(layers.flatMap((ids, at) => ids.map((id, index) => [id, { layer: at, index, of: ids.length }])));
  return { place, layers, bends: new Map([...bends].map(([edge, own]) => [edge, own.map(([, bend]) => place.get(bend))])) };
}

// Edges that close a circle, found depth first.
function backEdges(nodes, next) {
  const back = new Set(), state = new Map();
  for (const root of nodes) {
    if (state.has(root)) continue;
    const stack = [[root, 0]];
    state.set(root, "open");
    while (stack.length) {
      const top = stack[stack.length - 1];
      const edge = next.get(top[0])[top[1]++];
      if (!edge) { state.set(top[0], "done"); stack.pop(); continue; }
      const seen = state.get(edge.to);
      if (seen === "open") back.add(edge);
      else if (!seen) { state.set(edge.to, "open"); stack.push([edge.to, 0]); }
    }
  }
  return back;
}

// Orders each layer by the average place of its neighbours, back and forth.
function sweep(layers, links) {
  const near = new Map();
  for (const [a, b] of links) { (near.get(a) ?? near.set(a, []).get(a)).push(b); (near.get(b) ?? near.set(b, []).get(b)).push(a); }
  for (let pass = 0; pass < 6; pass++) {
    const order = pass % 2 ? layers.keys().toArray().reverse() : layers.keys().toArray();
    for (const at of order) {
      const beside = layers[pass % 2 ? at + 1 : at - 1];
      if (!beside) continue;
      const index = new Map(beside.map((id, place) => [id, place / beside.length]));
      const middle = new Map(layers[at].map((id, place) => {
        const known = (near.get(id) ?? []).map((other) => index.get(other)).filter((value) => value !== undefined);
        return [id, known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : place / layers[at].length];
      }));
      layers[at].sort((a, b) => middle.get(a) - middle.get(b));
    }
  }
}
