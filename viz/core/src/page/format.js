// Numbers as people read them, in widths that do not jump.

export const NONE = "–";

// Requests per second of a golden metric, or undefined.
export const rate = (golden) => golden && golden.seconds > 0 ? (golden.success + golden.failure) / golden.seconds : undefined;
// Share of successes, 0 to 1; undefined without requests.
export const success = (golden) => golden && golden.success + golden.failure > 0 ? golden.success / (golden.success + golden.failure) : undefined;
// A count of the same window as a rate.
export const per = (count, golden) => golden && golden.seconds > 0 ? count / golden.seconds : undefined;

export function number(value) {
  if (value === undefined || value === null || !Number.isFinite(value)) return NONE;
  if (value === 0) return "0.0";
  if (value < 0.05) return "<0.1";
  if (value < 1000) return value.toFixed(1);
  if (value < 99950) return (value / 1000).toFixed(1) + "k";
  return value < 999500 ? Math.round(value / 1000) + "k" : (value / 1e6).toFixed(1) + "M";
}

export function percent(share) {
  if (share === undefined) return NONE;
  // Never rounded up to all.
  const floor = Math.floor(share * 10000) / 100;
  return (floor === 100 ? "100.0" : floor.toFixed(floor >= 99 ? 2 : 1)) + "%";
}

export function ms(value) {
  if (value === undefined || value === null) return NONE;
  if (value < 1) return value.toFixed(2) + " ms";
  if (value < 100) return value.toFixed(1) + " ms";
  if (value < 1000) return Math.round(value) + " ms";
  return (value / 1000).toFixed(2) + " s";
}

export function bytes(value) {
  if (value === undefined || value === null) return NONE;
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (value >= size * 0.9995) return (value / size).toFixed(1) + " " + unit;
  return Math.round(value) + " B";
}

// "good", "warn" or "bad" for a share of successes.
export const grade = (share) => share === undefined ? "" : share >= 0.99 ? "good" : share >= 0.95 ? "warn" : "bad";

export const seconds = (value) => value >= 90 ? Math.round(value / 60) + " min" : Math.round(value) + " s";

export const clock = (date) => date.toTimeString().slice(0, 8) + "." + String(date.getMilliseconds()).padStart(3, "0");
