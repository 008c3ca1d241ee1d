// Small plots in SVG. A gap in the data is a gap in the line.
import { h, s } from "./dom.js";
import { NONE } from "./format.js";

const WIDE = 300, HIGH = 100;

// Points are {x: 0 to 1, y} with y undefined for a gap.
function line(points, top, close) {
  let path = "", open = false, start = 0, last = 0;
  const end = () => { if (open && close) path += `L${last} ${HIGH}L${start} ${HIGH}Z`; open = false; };
  for (const { x, y } of points) {
    if (y === undefined) { end(); continue; }
    const [px, py] = [(x * WIDE).toFixed(1), (HIGH - Math.min(1, y / top) * (HIGH - 6)).toFixed(1)];
    if (!open) start = px;
    path += (open ? "L" : "M") + px + " " + py;
    last = px;
    open = true;
  }
  end();
  return path;
}

const axis = (points, value) => {
  const oldest = Math.max(1e-9, ...points.map((point) => point.ageSeconds));
  // A late scrape counts for the points before it, too.
  const covering = (index) => {
    const next = points[index + 1];
    return next?.http && next.http.seconds > 1.5 * (points[index].ageSeconds - next.ageSeconds) ? value(next) : undefined;
  };
  return points.map((point, index) => ({ x: 1 - point.ageSeconds / oldest, y: value(point) ?? covering(index) }));
};

// A round number that is not below the greatest value.
export function ceiling(most) {
  if (!(most > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 1.5, 2, 3, 4, 5, 7.5, 10].map((step) => step * power).find((step) => step >= most * 0.999);
}

const all = (point) => point.http && point.http.seconds > 0 ? (point.http.success + point.http.failure) / point.http.seconds : undefined;
const failed = (point) => point.http && point.http.seconds > 0 ? point.http.failure / point.http.seconds : undefined;

// Requests per second and the failures among them, without axes.
export function spark(points) {
  if (!points?.some((point) => all(point) !== undefined)) return NONE;
  const top = Math.max(1e-9, ...points.map((point) => all(point) ?? 0));
  return s("svg", { class: "spark", viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    s("path", { class: "area c-rps", d: line(axis(points, all), top, true) }),
    s("path", { class: "c-rps", d: line(axis(points, all), top) }),
    s("path", { class: "area c-fail", d: line(axis(points, failed), top, true) }));
}

// A plot with a caption. `lines` are {name, class, value(point), area}.
export function plot(title, now, points, lines, show, fixedTop) {
  const data = lines.map((one) => ({ ...one, points: axis(points, one.value) }));
  const values = data.flatMap((one) => one.points.map((point) => point.y)).filter((y) => y !== undefined);
  const top = fixedTop ?? ceiling(Math.max(0, ...values));
  const oldest = Math.max(0, ...points.map((point) => point.ageSeconds));
  const latest = (one) => [...one.points].reverse().find((point) => point.y !== undefined)?.y;
  const label = title + ": " + (values.length ? data.map((one) => (one.name ? one.name + " " : "") + show(latest(one))).join(", ") + "; greatest " + show(Math.max(...values)) : "no data yet");
  return h("figure", { class: "plot panel" },
    h("figcaption", {}, h("h2", {}, title), now && h("span", { class: "now" }, now),
      lines.length > 1 && h("div", { class: "keys" }, data.map((one) => h("span", {}, s("svg", { width: 14, height: 8, "aria-hidden": "true" }, s("path", { class: one.class, d: "M0 4H14", "stroke-width": 2.5, "stroke-dasharray": one.dash })), one.name, " ", h("b", {}, show(latest(one))))))),
    h("div", { class: "stage", role: "img", "aria-label": label },
      s("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", "aria-hidden": "true" },
        [6, 53, HIGH].map((y) => s("path", { class: "grid", d: `M0 ${y}H${WIDE}` })),
        data.map((one) => [one.area && s("path", { class: "area " + one.class, d: line(one.points, top, true) }),
          s("path", { class: one.class, d: line(one.points, top), "stroke-dasharray": one.dash })])),
      h("span", { class: "top" }, show(top))),
    h("div", { class: "axis" }, h("span", {}, oldest >= 90 ? Math.round(oldest / 60) + " min ago" : Math.round(oldest) + " s ago"), h("span", {}, "now")));
}
