// Creates elements. Text is inserted as text and never as HTML, because names are not trusted.

const SVG = "http://www.w3.org/2000/svg";

/** Create an element: make("p", {class: "x", onclick: go}, "text", child). */
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Create an element inside an <svg>. The parameters are those of `make`. */
export function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) {
      element.setAttribute(name, String(value));
    }
  }
  element.append(...children);
  return element;
}

/** Create the head of a table. A title is text, or a cell. */
export function head(titles) {
  const cell = (title) => (title instanceof Element ? title : make("th", { scope: "col" }, title));
  return make("thead", {}, make("tr", {}, ...titles.map(cell)));
}

/** Create a row of a table: a heading of several children, and a cell for each value. */
export function row(heading, values, title = null) {
  const cells = values.map((value) => make("td", {}, value));
  return make("tr", {}, make("th", { scope: "row", title }, ...heading), ...cells);
}

/** Set the texts of cells. The last one counts failures: it is marked if there are any. */
export function setCells(cells, texts, failures) {
  texts.forEach((text, at) => setText(cells[at], text));
  cells.at(-1).classList.toggle("bad", failures > 0);
}

/** Set an element's text if it differs, so screen readers announce only changes. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Set an attribute if it differs; null removes it. */
export function mark(element, name, value) {
  if (value === null) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, String(value));
}

/** Return the page's element with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/**
 * Keep one part for each key below `parent`, in the order of `items`: [[key, facts], ...]. A part
 * has `.element` and `.update(facts)`. It is reused while its key is in `items`, to keep the focus.
 */
export function reconcile(parent, parts, items, create) {
  const wanted = new Set(items.map(([key]) => key));
  for (const [key, part] of parts) {
    if (!wanted.has(key)) {
      part.element.remove();
      parts.delete(key);
    }
  }
  let before = parent.firstElementChild;
  for (const [key, facts] of items) {
    let part = parts.get(key);
    if (!part) parts.set(key, (part = create(key)));
    if (part.element === before) before = before.nextElementSibling;
    else parent.insertBefore(part.element, before);
    part.update(facts);
  }
}
