// Very many candidates: each round is a column of the candidates that it ranked, best first, as high
// as they are many. One canvas of a single pixel's width per round, which is stretched.

import { color, h, isDark, setAttribute } from './dom.js';
import { described, level } from './reduce.js';

const HEIGHT = 360, TOP = 22;

export class Density extends HTMLElement {
  #columns = [];
  #drawn = {};
  #order = [];

  connectedCallback() {
    this.canvas = h('canvas', { role: 'slider', tabindex: 0, 'aria-label': 'Candidates, best first', 'aria-valuemin': 1 });
    this.replaceChildren(this.canvas);
    this.context = this.canvas.getContext('2d');
    new ResizeObserver(([entry]) => {
      this.width = entry.contentRect.width;
      this.ratio = Math.min(2, devicePixelRatio);
      this.canvas.width = this.width * this.ratio;
      this.canvas.height = HEIGHT * this.ratio;
      this.#drawn = {};
      this.dispatchEvent(new CustomEvent('resized'));
    }).observe(this);
    isDark.addEventListener('change', () => this.#forget());
    this.canvas.addEventListener('pointermove', (event) => this.#point(event));
    this.canvas.addEventListener('keydown', (event) => this.#move(event));
  }

  #forget() {
    this.#columns = [];
    this.#drawn = {};
    this.dispatchEvent(new CustomEvent('resized'));
  }

  draw(state, position, domain, picked) {
    const seen = { lanes: state.lanes, position, domain, picked, width: this.width };
    if (!this.width || Object.keys(seen).every((key) => seen[key] === this.#drawn[key])) return;
    if (this.#drawn.lanes !== state.lanes) this.#rank(state);
    this.#drawn = seen;
    this.state = state;
    this.x = (tokens) => (tokens / domain) * (this.width - 40);
    const { context } = this;
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, this.width, HEIGHT);
    context.imageSmoothingEnabled = false;
    for (const column of this.#columns) this.#paint(state, column, position);
    this.#label(state);
    this.#trace(state, picked, '--picked', 1.5);
    this.#trace(state, state.winner, '--gold', 2.5);
    this.#announce(state, picked);
  }

  // A column per round, and one for what grows now.
  #rank(state) {
    if (this.#columns.length && this.#columns[0].state.n !== state.n) this.#columns = [];
    this.#columns.length = Math.min(this.#columns.length, state.rounds.length);
    let from = 0;
    state.rounds.forEach((trace, index) => {
      const ids = trace.candidates.map((traced) => traced.candidate_id);
      const column = this.#columns[index];
      if (!column || column.low !== state.low || column.high !== state.high || !column.isRound) {
        this.#columns[index] = this.#column(state, ids, trace.candidates, from, trace);
      }
      from = trace.decision_token;
    });
    const last = state.rounds.at(-1);
    const live = new Map(state.lanes.filter((lane) => lane.fate === '' || lane.fate === 'kept').map((lane) => [lane.id, lane]));
    const ranked = last ? last.candidates.filter((traced) => live.has(traced.candidate_id)) : [];
    const forks = (last?.forks ?? []).map((fork) => ({ candidate_id: fork.candidate_id, score: null }));
    const growing = last ? [...ranked, ...forks] : [...live.keys()].map((id) => ({ candidate_id: id, score: null }));
    const ids = growing.map((traced) => traced.candidate_id);
    if (ids.length) this.#columns.push(this.#column(state, ids, growing, from, null));
    this.#order = (last ? last.candidates.map((traced) => traced.candidate_id) : ids);
  }

  #column(state, ids, ranked, from, trace) {
    const image = h('canvas', { width: 1, height: Math.max(1, ids.length) });
    const paint = image.getContext('2d');
    ranked.forEach(({ score }, index) => {
      const value = level(state, score);
      paint.fillStyle = color(value === null ? '--unscored' : `--r${value}`);
      paint.fillRect(0, index, 1, 1);
    });
    const to = trace?.decision_token ?? null;
    const numKept = trace ? ranked.length - trace.num_rejected : ranked.length;
    return { state, low: state.low, high: state.high, isRound: Boolean(trace), image, ids, from, to, numKept };
  }

  get #most() {
    return Math.max(this.state.n, ...this.#columns.map((column) => column.ids.length));
  }

  #paint(state, { image, ids, from, to, numKept }, position) {
    const { context } = this, scale = (HEIGHT - TOP) / this.#most;
    const [left, right] = [this.x(from), this.x(to ?? Math.max(from, position))];
    context.globalAlpha = to === null ? 0.6 : 1;
    context.drawImage(image, left, TOP, Math.max(0, right - left - 1), ids.length * scale);
    context.globalAlpha = 1;
    if (to === null || numKept === ids.length) return;
    context.fillStyle = color('--rejected');
    context.fillRect(right - 3, TOP + numKept * scale, 2, (ids.length - numKept) * scale);
  }

  #label(state) {
    const { context } = this;
    context.font = `11px ${getComputedStyle(this).fontFamily}`;
    context.fillStyle = color('--muted');
    context.textAlign = 'center';
    let free = 0;
    for (const { decision_token: token } of state.rounds) {
      const x = this.x(token);
      if (x < free) continue;
      free = x + 30;
      context.fillText(token, x, TOP - 9);
    }
  }

  // A candidate's rank from round to round.
  #trace(state, id, ink, width) {
    if (id === null || id === undefined) return;
    const { context } = this, scale = (HEIGHT - TOP) / this.#most;
    context.beginPath();
    for (const { ids, from, to } of this.#columns) {
      const rank = ids.indexOf(id);
      if (rank < 0) continue;
      const y = TOP + (rank + 0.5) * scale, lane = state.lanes.find((each) => each.id === id);
      context.lineTo(this.x(from), y);
      context.lineTo(this.x(to === null ? this.#drawn.position : Math.min(to, lane?.tokens ?? to)), y);
    }
    context.strokeStyle = color(ink);
    context.lineWidth = width;
    context.stroke();
  }

  #announce(state, picked) {
    const lane = state.lanes.find((each) => each.id === picked) ?? state.lanes[0];
    if (!lane) return;
    const rank = Math.max(0, this.#order.indexOf(lane.id));
    setAttribute(this.canvas, 'aria-valuemax', Math.max(1, this.#order.length));
    setAttribute(this.canvas, 'aria-valuenow', rank + 1);
    setAttribute(this.canvas, 'aria-valuetext', `Candidate ${lane.id}, ${described(lane)}`);
  }

  #point({ offsetX, offsetY }) {
    if (!this.x) return;
    const column = this.#columns.findLast(({ from }) => this.x(from) <= offsetX);
    const id = column?.ids[Math.floor((offsetY - TOP) / ((HEIGHT - TOP) / this.#most))];
    if (id !== undefined) this.dispatchEvent(new CustomEvent('pick', { detail: id }));
  }

  #move(event) {
    const now = this.#order.indexOf(this.#drawn.picked), last = this.#order.length - 1;
    const next = { ArrowDown: now + 1, ArrowUp: now - 1, PageDown: now + 32, PageUp: now - 32, Home: 0, End: last }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    const id = this.#order[Math.max(0, Math.min(last, next))];
    if (id !== undefined) this.dispatchEvent(new CustomEvent('pick', { detail: id }));
  }
}
customElements.define('specrej-density', Density);
