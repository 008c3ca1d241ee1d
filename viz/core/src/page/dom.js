// Elements and their update. What comes from the mesh becomes text or an attribute, never markup: there is no way here to parse HTML.

const SVG = "http://www.w3.org/2000/svg";
const HANDLERS = ["onclick", "onsubmit", "oninput", "onchange"];

// An element with attributes and children. `key` identifies it among its siblings.
export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

// The same for SVG.
export function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (HANDLERS.includes(name)) element[name] = value;
    else if (name === "key") element.weftKey = String(value);
    else if (name === "href" && !/^[#/]/.test(value)) continue;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

// Makes `current` look like `wanted` and keeps the elements that stay: focus, scroll and what was typed survive.
export function update(current, wanted) {
  for (const { name } of [...current.attributes]) if (!wanted.hasAttribute(name) && name !== "open") current.removeAttribute(name);
  for (const { name, value } of wanted.attributes) if (current.getAttribute(name) !== value) current.setAttribute(name, value);
  for (const name of HANDLERS) if (current[name] !== wanted[name]) current[name] = wanted[name];
  current.weftKey = wanted.weftKey;
  children(current, [...wanted.childNodes]);
}

export function children(parent, wanted) {
  const keyed = new Map();
  for (const child of parent.childNodes) if (child.weftKey !== undefined) keyed.set(child.weftKey, child);
  let place = parent.firstChild;
  for (const next of wanted) {
    let found = next.weftKey === undefined ? place : keyed.get(next.weftKey);
    if (found && found.nodeName === next.nodeName && found.weftKey === next.weftKey) {
      if (found !== place) parent.insertBefore(found, place);
      else place = place.nextSibling;
      if (found.nodeType === Node.TEXT_NODE) { if (found.data !== next.data) found.data = next.data; } else update(found, next);
    } else {
      parent.insertBefore(next, place);
    }
  }
  while (place) { const after = place.nextSibling; place.remove(); place = after; }
}

// One line for screen readers.
export function announce(text) {
  document.getElementById("announce").textContent = text;
}
