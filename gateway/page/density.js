// Very many candidates: each round is a column of the candidates that it ranked, best first, as
// high as they are many. Neighbours of the same color are one rectangle, so there are few of them.

import { h, moved, s, setAttribute } from './dom.js';
import { isLive, level } from './reduce.js';
import { described } from './words.js';

const HEIGHT = 360;
const TOP = 22;

export class Density extends HTMLElement {
  #columns = [];
  #drawn = {};

  connectedCallback() {
    if (this.svg) return;
    const named = { role: 'slider', tabindex: 0, 'aria-label': 'Candidates, best first' };
    this.svg = s('svg', { height: HEIGHT, 'aria-hidden': 'true' });
    this.slider = h('div', named, this.svg);
    this.append(this.slider);
    new ResizeObserver(([entry]) => {
      this.width = entry.contentRect.width;
      this.dispatchEvent(new CustomEvent('resized'));
    }).observe(this);
    this.svg.addEventListener('pointermove', (event) => this.#point(event));
    this.slider.addEventListener('keydown', (event) => this.#move(event));
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
      const width = Math.max(0, this.x(position) - Number(bar.getAttribute('x')));
      setAttribute(bar, 'width', width.toFixed(1));
    }
  }

  #layOut(state, picked) {
    const most = Math.max(...this.#columns.map(({ ids }) => ids.length), state.n);
    this.y = (rank) => TOP + (rank / most) * (HEIGHT - TOP);
    const traces = [picked, state.winner].map((id, index) =>
      s('path', { class: index ? 'trace winner' : 'trace', d: this.#trace(id) }),
    );
    this.svg.replaceChildren(...this.#columns.flatMap((column) => this.#column(column)), ...traces);
    const ids = this.#order,
      rank = Math.max(0, ids.indexOf(picked)),
      lane = state.lanes.find(({ id }) => id === ids[rank]);
    setAttribute(this.slider, 'aria-valuemin', 1);
    setAttribute(this.slider, 'aria-valuemax', ids.length);
    setAttribute(this.slider, 'aria-valuenow', rank + 1);
    if (lane)
      setAttribute(this.slider, 'aria-valuetext', `Candidate ${lane.id}, ${described(lane)}`);
  }

  #column({ ids, from, to, bands, numKept }) {
    const x = this.x(from),
      end = this.x(to ?? from);
    const named = { class: to === null ? 'growing' : 'bar', x, width: Math.max(0, end - x - 1) };
    const bars = bands.map(({ rank, count, fill }) => {
      const height = this.y(rank + count) - this.y(rank);
      return s('rect', { ...named, y: this.y(rank), height, fill: `var(--${fill})` });
    });
    if (to === null) return bars;
    const lost = { x: end - 3, y: this.y(numKept), height: this.y(ids.length) - this.y(numKept) };
    const label = s('text', { class: 'tick', x: end, y: TOP - 9, text: to });
    return [...bars, s('rect', { class: 'lost', width: 2, ...lost }), label];
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

  get #order() {
    return this.#columns.findLast(({ to }) => to !== null)?.ids ?? this.#columns[0]?.ids ?? [];
  }

  #pick(id) {
    if (id !== undefined) this.dispatchEvent(new CustomEvent('pick', { detail: id }));
  }

  #point({ offsetX, offsetY }) {
    const column = this.#columns.findLast(({ from }) => this.x(from) <= offsetX);
    this.#pick(column?.ids.find((_, rank) => this.y(rank + 1) > offsetY));
  }

  #move(event) {
    const ids = this.#order;
    this.#pick(ids[moved(event, ids.indexOf(this.#drawn.picked), ids.length)]);
  }
}

// A column per round, and one, without an end, for what grows now.
function columnsOf(state) {
  const live = new Set(state.lanes.filter(isLive).map(({ id }) => id));
  const ranked = new Map(); // by score of the last round; forks and newcomers have none
  let from = 0;
  const columns = state.rounds.map(({ candidates, decision_token: to, num_rejected: lost }) => {
    const column = { from, to, ids: candidates.map((each) => each.candidate_id) };
    column.bands = bandsOf(candidates.map(({ score }) => `r${level(state, score)}`));
    column.numKept = candidates.length - lost;
    from = to;
    ranked.clear();
    for (const { candidate_id: id, score } of candidates) ranked.set(id, score);
    return column;
  });
  const ids = [...new Set([...ranked.keys(), ...live])].filter((id) => live.has(id));
  const fills = ids.map((id) => (ranked.has(id) ? `r${level(state, ranked.get(id))}` : 'unscored'));
  return ids.length ? [...columns, { from, to: null, ids, bands: bandsOf(fills) }] : columns;
}

function bandsOf(fills) {
  const bands = [];
  fills.forEach((fill, rank) => {
    if (bands.at(-1)?.fill === fill) bands.at(-1).count++;
    else bands.push({ rank, fill, count: 1 });
  });
  return bands;
}

customElements.define('specrej-density', Density);
