// Very many candidates: each round is a column of the candidates that it ranked, best first, as
// high as they are many. Neighbours of the same color are one rectangle, so there are few of them.

import { columnsOf } from './columns.js';
import { h, moved, s, set } from './dom.js';
import { described } from './words.js';

const HEIGHT = 360;
const TOP = 22;

// `width` and `pick`, a function of a candidate's number, are set from outside.
export class Density extends HTMLElement {
  #columns = [];
  #drawn = {};

  connectedCallback() {
    if (this.svg) return;
    const named = { role: 'slider', tabindex: 0, 'aria-label': 'Candidates, best first' };
    this.svg = s('svg', { height: HEIGHT, 'aria-hidden': 'true' });
    this.slider = h('div', named, this.svg);
    this.append(this.slider);
    this.svg.addEventListener('pointermove', (event) => this.#point(event));
    this.slider.addEventListener('keydown', (event) => {
      const ids = this.#order;
      this.#choose(ids[moved(event, ids.indexOf(this.#drawn.picked), ids.length)]);
    });
  }

  draw(state, position, domain, picked) {
    const seen = { lanes: state.lanes, domain, picked, width: this.width };
    if (!this.width) return;
    this.x = (tokens) => (tokens / domain) * (this.width - 40);
    if (state.lanes !== this.#drawn.lanes) this.#columns = columnsOf(state);
    if (Object.keys(seen).some((key) => seen[key] !== this.#drawn[key]))
      this.#layOut(state, picked);
    this.#drawn = seen;
    for (const bar of this.svg.querySelectorAll('.growing')) {
      set(bar, { width: Math.max(0, this.x(position) - bar.getAttribute('x')).toFixed(1) });
    }
  }

  #layOut(state, picked) {
    const most = Math.max(...this.#columns.map(({ size }) => size), state.n);
    this.y = (rank) => TOP + (rank / most) * (HEIGHT - TOP);
    const traces = [
      s('path', { class: 'trace', d: this.#trace(picked) }),
      s('path', { class: 'trace winner', d: this.#trace(state.winner) }),
    ];
    this.svg.replaceChildren(...this.#columns.flatMap((column) => this.#column(column)), ...traces);
    const ids = this.#order,
      rank = Math.max(0, ids.indexOf(picked)),
      lane = state.lanes.find(({ id }) => id === ids[rank]),
      text = lane ? `Candidate ${lane.id}, ${described(state, lane)}` : 'none';
    const range = { 'aria-valuemin': 1, 'aria-valuemax': ids.length, 'aria-valuenow': rank + 1 };
    set(this.slider, { ...range, 'aria-valuetext': text });
  }

  #column({ size, from, to, bands, numKept }) {
    const x = this.x(from),
      end = this.x(to ?? from),
      height = (count) => this.y(count) - TOP;
    const named = { class: to === null ? 'growing' : 'bar', x, width: Math.max(0, end - x - 1) };
    const bars = bands.map(({ rank, count, fill }) =>
      s('rect', { ...named, y: this.y(rank), height: height(count), fill }),
    );
    if (to === null) return bars;
    const lost = { x: end - 3, y: this.y(numKept), width: 2, height: height(size - numKept) };
    const label = { class: 'tick', x: end, y: TOP - 9, text: to, 'text-anchor': 'middle' };
    return [...bars, s('rect', { class: 'lost', ...lost }), s('text', label)];
  }

  // A candidate's rank from round to round.
  #trace(id) {
    const points = this.#columns.flatMap(({ ids, from, to }) => {
      const rank = ids.indexOf(id),
        y = this.y(rank + 0.5);
      return rank < 0 ? [] : [`${this.x(from)},${y}`, `${this.x(to ?? from)},${y}`];
    });
    return points.length ? `M${points.join('L')}` : '';
  }

  // The candidates of the last round that has ranked them, else those that grow.
  get #order() {
    const isRanked = ({ to, ids }) => to !== null && ids.length;
    return (this.#columns.findLast(isRanked) ?? this.#columns.at(-1))?.ids ?? [];
  }

  #choose(id) {
    if (id !== undefined) this.pick(id);
  }

  #point({ offsetX, offsetY }) {
    const column = this.#columns.findLast(({ from }) => this.x(from) <= offsetX);
    this.#choose(column?.ids.find((_, rank) => this.y(rank + 1) > offsetY));
  }
}

customElements.define('specrej-density', Density);
