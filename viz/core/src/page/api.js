// Questions to the server. The key is in the address that `weft dashboard` prints, after the #, which browsers do not send; it stays
// in this origin's storage and goes with every question.

const KEY = "weft-key";

export class Problem extends Error {
  constructor(message, code) { super(message); this.code = code; }
}

// Takes the key out of the address.
export function keepKey() {
  const found = /^#key=([A-Za-z0-9_-]+)$/.exec(location.hash);
  if (!found) return;
  localStorage.setItem(KEY, found[1]);
  history.replaceState(null, "", "#/");
}

async function send(path, body, signal) {
  let response;
  try {
    response = await fetch("/api/v1/" + path, {
      method: "POST", signal, body: JSON.stringify(body ?? {}), cache: "no-store",
      headers: { "content-type": "application/json", authorization: "Bearer " + (localStorage.getItem(KEY) ?? "") },
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("weft dashboard does not answer. Is it still running in its terminal? Start it again and open the address that it prints.", "gone");
  }
  if (response.ok) return response;
  let text = "";
  try { text = (await response.json()).error; } catch { /* not ours */ }
  if (response.status === 401) throw new Problem("This page's key is not valid (any more). Open the address that weft dashboard printed.", "key");
  throw new Problem(text || "The server answered " + response.status + ".", response.status);
}

export const ask = async (path, body, signal) => (await send(path, body, signal)).json();

// Server-sent events: calls `each` with every event's object until the stream or the signal ends.
export async function follow(path, body, signal, each) {
  const reader = (await send(path, body, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    let end;
    while ((end = rest.indexOf("\n\n")) >= 0) {
      const data = rest.slice(0, end).split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      rest = rest.slice(end + 2);
      if (data) each(JSON.parse(data));
    }
  }
}

// Calls `act` for each element, at most `most` at once.
export async function each(list, most, act) {
  const queue = [...list];
  await Promise.all(Array.from({ length: Math.min(most, queue.length) }, async () => {
    while (queue.length) await act(queue.shift());
  }));
}
