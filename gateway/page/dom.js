// Elements without markup in texts: nothing that a model writes can become an element.

function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name === 'text') element.textContent = value;
    else if (value === true) element.setAttribute(name, '');
    else if (value !== false && value !== null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export const h = (tag, properties = {}, ...children) =>
  filled(document.createElement(tag), properties, children);
export const s = (tag, properties = {}, ...children) =>
  filled(document.createElementNS('http://www.w3.org/2000/svg', tag), properties, children);

// Set only what has changed: unchanged texts and attributes cost no layout. null: no attribute.
export const setText = (element, text) => {
  if (element.textContent !== text) element.textContent = text;
};
export function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null) element.removeAttribute(name);
    else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
  }
}

// The index that an arrow key, Home or End leads to; undefined for other keys.
export function moved(event, now, length) {
  const last = length - 1;
  const next = { ArrowDown: now + 1, ArrowUp: now - 1, Home: 0, End: last }[event.key];
  if (next === undefined) return undefined;
  event.preventDefault();
  return Math.max(0, Math.min(last, next));
}

export const count = (number) => Math.round(number).toLocaleString('en');
export const seconds = (ms) => `${(ms / 1000).toFixed(ms < 9995 ? 2 : 1)} s`;
export const isStill = matchMedia('(prefers-reduced-motion: reduce)');
