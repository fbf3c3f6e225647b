// Elements without markup in texts: nothing that a model writes can become an element.

const SVG = 'http://www.w3.org/2000/svg';

function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (name === 'text') element.textContent = value;
    else if (value === true) element.setAttribute(name, '');
    else if (value !== false && value !== null && value !== undefined)
      element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const h = (tag, properties = {}, ...children) =>
  filled(document.createElement(tag), properties, children);
export const s = (tag, properties = {}, ...children) =>
  filled(document.createElementNS(SVG, tag), properties, children);

// Set only what has changed: unchanged texts and attributes cost no layout.
export const setText = (element, text) => {
  if (element.textContent !== text) element.textContent = text;
};
export const setAttribute = (element, name, value) => {
  if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
};

// Colors for canvases, by the names of CSS variables.
const colors = new Map();
export const isDark = matchMedia('(prefers-color-scheme: dark)');
isDark.addEventListener('change', () => colors.clear());

export function color(name) {
  if (!colors.has(name)) {
    const probe = h('i', { class: 'unseen' });
    probe.style.color = `var(${name})`;
    document.body.append(probe);
    colors.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return colors.get(name);
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
