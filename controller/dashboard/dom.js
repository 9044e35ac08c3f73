// Elements from plain values. Text goes in as text and never as HTML: names come from anywhere.

const SVG = "http://www.w3.org/2000/svg";

/** Make an element: make("p", {class: "x", onclick: go}, "text", child). */
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for what is inside an <svg>. */
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

/** Set an element's text, if it is another one: what did not change is not said again. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Set an attribute, or remove it with null. */
export function mark(element, name, value) {
  if (value === null) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, String(value));
}

/** The element of the page with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/**
 * Keep one part a key below `parent`, in the order of `items`: [[key, facts], ...]. A part has
 * `.element` and `.update(facts)`; it lives as long as its key is there, so focus stays.
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
