// Which page the address asks for, and its refresh. A page is {crumbs, title, load(ask) -> state, view(state) -> nodes, start, stop}.
import { Problem, ask, keepKey } from "./api.js";
import { announce, children, h } from "./dom.js";
import { notice } from "./parts.js";
import { namespace } from "./namespace.js";
import { namespaces } from "./namespaces.js";
import { resource } from "./resource.js";
import { tap } from "./tap.js";

// How often an open page asks again, and how long it waits after a failure.
const REFRESH_MS = 2000, AGAIN_MS = 4000;
const main = document.getElementById("content");
const chosen = document.getElementById("window");
const holdButton = document.getElementById("hold");
let current, held = false, timer;

function pageOf(hash) {
  const [path, query] = hash.replace(/^#/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decode);
  const options = new URLSearchParams(query ?? "");
  if (parts.length === 0) return namespaces();
  if (parts[0] === "tap") return tap(options);
  if (parts[0] === "ns" && parts.length === 2) return namespace(parts[1]);
  if (parts[0] === "ns" && parts.length === 4) return resource(parts[1], parts[2], parts[3]);
  return { crumbs: [], title: "Not found", view: () => [notice("warn", "There is no such page", "", h("a", { href: "#/" }, "All namespaces"))] };
}

function decode(part) {
  try { return decodeURIComponent(part); } catch { return part; }
}

function draw(content) {
  children(main, content.flat(Infinity).filter(Boolean));
}

async function open() {
  clearTimeout(timer);
  current?.stop?.();
  current?.abort.abort();
  const page = current = Object.assign(pageOf(location.hash), { abort: new AbortController() });
  page.redraw = () => { if (page === current) draw(page.view(page.state ?? {})); };
  document.title = page.title + " · weft";
  children(document.getElementById("crumbs"), page.crumbs.map((crumb, index) => h("a", { href: crumb.href, "aria-current": index === page.crumbs.length - 1 ? "page" : null }, crumb.name)));
  main.replaceChildren();
  scrollTo(0, 0);
  if (page.load) draw([h("p", { class: "empty", key: "wait" }, "Asking the proxies…")]);
  else page.redraw();
  page.start?.(page);
  await refresh(page);
  if (page === current) announce(page.title);
}

async function refresh(page) {
  if (page !== current || !page.load) return;
  let wait = REFRESH_MS;
  if (!document.hidden && (!held || !page.state)) {
    try {
      const state = await page.load((path, body) => ask(path, body, page.abort.signal), Number(chosen.value), page.state);
      if (page !== current) return;
      page.state = state;
      page.redraw();
    } catch (error) {
      if (page !== current || error.name === "AbortError") return;
      if (!(error instanceof Problem)) console.error(error);
      const text = error instanceof Problem ? error.message : "This page failed: " + error.message;
      const shown = page.state ? page.view(page.state) : [];
      draw([notice("bad", page.state ? "These numbers are old" : "No answer", text), shown]);
      wait = AGAIN_MS;
    }
  }
  timer = setTimeout(() => refresh(page), wait);
}

holdButton.onclick = () => {
  held = !held;
  holdButton.setAttribute("aria-pressed", String(held));
  announce(held ? "The numbers stand still" : "The numbers follow again");
};
chosen.onchange = () => { clearTimeout(timer); refresh(current); };
addEventListener("hashchange", () => { keepKey(); open().then(() => main.focus({ preventScroll: true })); });
// What is drawn for a width is drawn again for the new one.
addEventListener("resize", () => { if (current.state) current.redraw(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) { clearTimeout(timer); refresh(current); } });
document.querySelector(".skip").onclick = (event) => { event.preventDefault(); main.focus(); };

keepKey();
ask("about").then((about) => {
  const target = document.getElementById("target");
  target.textContent = about.target;
  target.title = about.source;
}).catch(() => { /* the page says what is wrong */ });
open();
