// One lane per candidate; x is tokens. A bar is as dark and as thick as its reward is high, and its
// end has the mark of its fate, so that color alone carries nothing.

import { moved, s, set, setText } from './dom.js';
import { isLive, level, scoreOf, tokensOf } from './reduce.js';
import { checkOf, colorOf, described, fixed, markOf } from './words.js';

const LEFT = 34; // for numbers
const RIGHT = 58; // for rewards
const TOP = 22; // for decision tokens
const ALL = 400; // the height that the rows share, within the limits of a row
const [FLAT, TALL] = [5, 24]; // least and greatest height of a row
const LABELLED = 11; // rows of this height have texts

// `width` and `pick`, a function of a candidate's number, are set from outside.
export class Lanes extends HTMLElement {
  #views = new Map(); // elements of each lane, by its id
  #drawn = {}; // what the last layout was made from

  connectedCallback() {
    if (this.svg) return;
    this.grid = s('g', { 'aria-hidden': 'true' });
    this.body = s('g', { role: 'presentation' });
    // Not in lanes, which have names of their own.
    this.texts = s('g', { 'aria-hidden': 'true', 'pointer-events': 'none' });
    const named = { role: 'listbox', 'aria-label': 'Candidates' };
    this.svg = s('svg', named, this.grid, this.body, this.texts);
    this.append(this.svg);
    for (const name of ['pointerover', 'focusin']) {
      this.svg.addEventListener(name, ({ target }) => {
        const id = target.closest('[data-candidate]')?.dataset.candidate;
        if (id) this.pick(Number(id));
      });
    }
    this.svg.addEventListener('keydown', (event) => this.#move(event));
  }

  // `position`: tokens of live lanes, and `domain` those of the axis, both eased.
  draw(state, position, domain, picked) {
    const { lanes } = state;
    const seen = { lanes, domain, picked, width: this.width };
    const isSame = Object.keys(seen).every((key) => seen[key] === this.#drawn[key]);
    if (!this.width || (isSame && !lanes.some(isLive))) return;
    this.row = Math.max(FLAT, Math.min(TALL, ALL / Math.max(1, state.numRows)));
    this.x = (tokens) => LEFT + (tokens / domain) * Math.max(1, this.width - LEFT - RIGHT);
    this.y = (row) => TOP + (row + 0.5) * this.row;
    if (!isSame) this.#layOut(state, picked);
    for (const lane of lanes) this.#grow(state, lane, position);
    this.#drawn = seen;
  }

  #layOut(state, picked) {
    const height = this.y(state.numRows);
    set(this.svg, { height });
    this.#rule(state, height);
    if (this.#views.size > state.lanes.length) {
      this.#views.clear();
      this.body.replaceChildren();
      this.texts.replaceChildren();
    }
    const rows = new Map(state.lanes.map((lane) => [lane.id, lane.row]));
    const focusable = rows.has(picked) ? picked : 0;
    for (const lane of state.lanes) {
      if (!this.#views.has(lane.id)) this.#add(lane);
      this.#shape(state, lane, rows.get(lane.parent));
      const isPicked = { 'aria-selected': lane.id === picked };
      set(this.#views.get(lane.id).group, {
        ...isPicked,
        tabindex: lane.id === focusable ? 0 : -1,
      });
    }
  }

  // Lines at decision tokens with their positions, where there is room for them.
  #rule({ rounds }, height) {
    let free = 0;
    const lines = rounds.map(({ decision_token: token }) => {
      const x = this.x(token),
        line = s('line', { class: 'cut', x1: x, x2: x, y1: TOP - 4, y2: height });
      if (x < free) return line;
      free = x + 30;
      return s('g', {}, line, s('text', { x, y: TOP - 9, text: token, 'text-anchor': 'middle' }));
    });
    this.grid.replaceChildren(...lines);
  }

  #add({ id }) {
    const view = {
      hit: s('rect', { class: 'hit', fill: 'transparent' }),
      fork: s('path', { class: 'fork' }),
      bars: s('g'),
      growing: s('rect', { class: 'growing' }),
      mark: s('use'),
    };
    const named = { class: 'lane', role: 'option', 'data-candidate': id };
    view.group = s('g', named, ...Object.values(view));
    view.number = s('text', { x: LEFT - 8, dy: '0.35em', 'text-anchor': 'end' });
    view.score = s('text', { dy: '0.35em' });
    this.texts.append(view.number, view.score);
    this.#views.set(id, view);
    this.body.append(view.group);
  }

  #shape(state, lane, parentRow) {
    const view = this.#views.get(lane.id),
      y = this.y(lane.row),
      mark = markOf(lane),
      isLabelled = this.row >= LABELLED;
    const named = `Candidate ${lane.id}, ${described(state, lane)}`;
    set(view.group, { 'aria-label': named, 'data-fate': lane.fate || null });
    set(view.hit, { y: y - this.row / 2, height: this.row, width: this.width });
    view.from = lane.from;
    const bars = lane.scores.map(({ token, score }) => {
      const x = this.x(view.from),
        width = Math.max(0.5, this.x(token) - x);
      view.from = token;
      return s('rect', { class: 'bar', x, width, ...this.#bar(state, score, y) });
    });
    view.bars.replaceChildren(...bars);
    set(view.growing, { x: this.x(view.from), ...this.#bar(state, scoreOf(lane), y) });
    if (parentRow !== undefined) {
      const x = this.x(lane.from),
        start = this.y(parentRow);
      set(view.fork, { d: `M${x - 5},${start} C${x + 6},${start} ${x - 8},${y} ${x + 3},${y}` });
    } else view.fork.removeAttribute('d');
    set(view.mark, { href: `#mark-${mark}`, class: `mark ${mark}` });
    set(view.number, { y });
    set(view.score, { y });
    setText(view.number, isLabelled && lane.parent === null ? String(lane.id) : '');
    const isScored = isLabelled && lane.scores.length && !['rejected', 'vetoed'].includes(mark);
    setText(view.score, isScored ? `${checkOf(state, lane)} ${fixed(scoreOf(lane))}`.trim() : '');
  }

  #bar(state, score, y) {
    const height = this.row * (0.24 + 0.1 * (level(state, score) ?? 1));
    return { y: y - height / 2, height, fill: colorOf(state, score) };
  }

  #grow(state, lane, position) {
    const view = this.#views.get(lane.id);
    const end = this.x(isLive(lane) ? Math.max(view.from, position) : tokensOf(state, lane));
    const scale = Math.max(lane.fate === 'winner' ? 0.9 : 0.5, Math.min(1, this.row / 14));
    const place = `translate(${(end + 7 * scale).toFixed(1)},${this.y(lane.row)}) scale(${scale})`;
    set(view.growing, { width: Math.max(0, end - this.x(view.from)).toFixed(1) });
    set(view.mark, { transform: place });
    set(view.score, { x: (end + 16).toFixed(1) });
  }

  #move(event) {
    const y = ({ hit }) => Number(hit.getAttribute('y'));
    const views = [...this.#views.values()].sort((a, b) => y(a) - y(b));
    const now = views.findIndex(({ group }) => group === document.activeElement);
    views[moved(event, now, views.length)]?.group.focus();
  }
}

customElements.define('specrej-lanes', Lanes);
