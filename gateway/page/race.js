// One request: tiles, lanes, the text, the candidate under the pointer, charts and a table twin.

import './charts.js';
import './density.js';
import './lanes.js';
import { count, h, isStill, seconds, set, setText } from './dom.js';
import { cost, DENSE, initial, scoreOf, shown, tokensOf } from './reduce.js';
import { checkOf, described, fateOf, fixed, lossOf, markOf, sentence, stopOf } from './words.js';

const EASE_MS = 110;
const SHOWN_VOTES = 8;

export class Race extends HTMLElement {
  state = initial();
  #clock = () => 0;
  #picked = null;
  #position = 0; // and #domain: eased
  #domain = 32;
  #last = 0; // time of the last frame
  #frame = 0;
  #seen = {}; // what is drawn
  #parts = {}; // elements by their classes

  connectedCallback() {
    if (this.lanes) return;
    this.append(document.getElementById('race').content.cloneNode(true));
    this.find('answer').id = this.getAttribute('answer');
    setText(this.querySelector('h2'), this.getAttribute('label'));
    this.lanes = this.querySelector('specrej-lanes');
    this.density = this.querySelector('specrej-density');
    const sizes = new ResizeObserver((entries) => {
      for (const { target, contentRect } of entries) target.width = contentRect.width;
      this.#wake();
    });
    for (const view of [this.lanes, this.density]) {
      view.pick = (id) => this.#pick(id);
      sizes.observe(view);
    }
    this.find('twin').addEventListener('toggle', () => this.#tabulate(this.state));
    this.#wake();
  }

  find(name) {
    return (this.#parts[name] ??= this.querySelector(`.${name}`));
  }

  #write(texts) {
    for (const name in texts) setText(this.find(name), texts[name]);
  }

  // `clock` returns ms since the request was sent.
  show(state, clock) {
    if (state.n !== this.state.n || state.position < this.#position)
      this.#position = state.position;
    if (!state.lanes.some((lane) => lane.id === this.#picked)) this.#picked = null;
    this.state = state;
    this.#clock = clock;
    this.#wake();
  }

  set label(text) {
    setText(this.querySelector('h2'), text);
  }

  #pick(id) {
    this.#picked = id;
    this.#seen.card = null;
    this.#wake();
  }

  #wake() {
    this.#frame ||= requestAnimationFrame((now) => this.#draw(now));
  }

  #draw(now) {
    const { state } = this,
      elapsed = Math.min(100, now - this.#last);
    const share = isStill.matches ? 1 : 1 - Math.exp(-elapsed / EASE_MS);
    // The next power of two while it grows, so that lanes do not shrink all the time.
    const power = 2 ** Math.ceil(Math.log2(1 + state.reach * 1.02));
    const wanted = Math.max(24, state.numLive ? power : state.reach * 1.06);
    this.#last = now;
    this.#frame = 0;
    this.#position = eased(this.#position, state.position, share, 0.1);
    this.#domain = eased(this.#domain, wanted, share, wanted / 300);
    const isDense = state.numRows > DENSE;
    this.lanes.hidden = isDense;
    this.density.hidden = !isDense;
    (isDense ? this.density : this.lanes).draw(state, this.#position, this.#domain, this.#picked);
    this.#tiles(state);
    if (state !== this.#seen.state) this.#details(state);
    if (this.#seen.card !== state.lanes) this.#candidate(state);
    this.#seen.state = state;
    const isMoving = this.#position !== state.position || this.#domain !== wanted;
    if (isMoving || this.hasAttribute('busy')) this.#wake();
  }

  #tiles(state) {
    const { made, others, isFinal } = cost(state);
    const ms = state.totalMs ?? this.#clock();
    this.#write({
      live: state.n ? `${state.numLive} / ${state.n}` : '–',
      'best-head': isFinal ? 'reward' : 'best of the round',
      best: fixed(state.best),
      made: state.n ? count(made) : '–',
      'saved-head': isFinal ? 'tokens saved' : 'saved so far',
      saved: others ? `${Math.round(100 * (1 - made / others))} %` : '–',
      took: ms ? seconds(ms) : '–',
    });
  }

  #details(state) {
    const prompt = state.promptTokens ? `prompt of ${count(state.promptTokens)} tokens` : '';
    const soFar = state.isCertain ? '' : state.bestText.trim();
    this.#write({
      chip: this.getAttribute('idle') ?? state.phase,
      facts: [prompt, stopOf(state), ...state.flags].filter(Boolean).join(' · '),
      said: sentence(state),
      problem: state.error,
      'text-head': state.isCertain ? 'Answer' : 'Best text so far',
      answer: shown(state).trim(),
      reasoning: state.parts?.reasoning ?? '',
      'so-far': soFar,
    });
    set(this.find('chip'), { 'data-phase': state.phase });
    this.find('problem').hidden = !state.error;
    this.find('thought').hidden = !state.parts?.reasoning;
    if (state.rounds !== this.#seen.state?.rounds) this.#rounds(state);
    if (state.slots !== this.#seen.state?.slots) this.#slots(state);
    if (state.votes !== this.#seen.state?.votes) this.#votes(state);
    this.#tabulate(state);
  }

  #votes({ votes, numDistinct }) {
    const rows = votes.slice(0, SHOWN_VOTES).map(({ answer, share, count: number }) => {
      const meter = h('meter', { value: share, 'aria-label': `share of ${answer}` });
      const cells = [h('td', {}, meter), h('td', { text: `${Math.round(100 * share)} %` })];
      const name = h('th', { scope: 'row', class: 'texts', text: answer });
      return h('tr', {}, name, ...cells, h('td', { text: number }));
    });
    const num = numDistinct - rows.length;
    this.find('votes').hidden = !rows.length;
    this.find('votes').querySelector('tbody').replaceChildren(...rows);
    this.#write({ 'more-votes': num > 0 ? `and ${num} other answers` : '' });
  }

  #slots({ slots, capacity }) {
    this.find('slots').parentElement.hidden = !slots.length;
    const most = Math.max(0, ...slots.map((item) => item.session));
    const isNear = capacity < 3 * most; // else its line would flatten the others
    const line = isNear ? 'dashed: ' : '';
    this.#write({ capacity: capacity ? `${line}capacity ${count(capacity)}` : '' });
    const times = slots.map((item) => item.at / 1000);
    const lines = [slots.map((item) => item.session), slots.map(() => (isNear ? capacity : null))];
    const summary = `at most ${count(most)} of ${count(capacity)}`;
    this.find('slots').show([times, ...lines], summary);
  }

  #rounds({ rounds }) {
    const points = rounds.flatMap(({ number, best_score: best, candidates }) =>
      candidates.map(({ score, fate }) => {
        const isRejected = /REJECTED|VETOED/.test(fate);
        return [number, isRejected ? score : null, isRejected ? null : score, best];
      }),
    );
    const lines = [0, 1, 2, 3].map((index) => points.map((point) => point[index]));
    this.find('rewards').parentElement.hidden = !points.length;
    const best = rounds.length ? `best ${fixed(rounds.at(-1).best_score)}` : 'no rewards yet';
    this.find('rewards').show(lines, best);
  }

  // The candidate under the pointer or the focus, else the answer, else the best so far.
  #candidate(state) {
    this.#seen.card = state.lanes;
    const id = this.#picked ?? state.winner ?? state.rounds.at(-1)?.candidates[0]?.candidate_id;
    const lane = state.lanes.find((each) => each.id === id);
    for (const name of ['fate', 'scores']) this.find(name).hidden = !lane;
    if (!lane) {
      const hint = 'Point at a lane, or move to it with the arrow keys.';
      this.#write({ 'card-head': 'Candidate', 'text-so-far': hint });
      return;
    }
    const hint = state.phase === 'running' ? 'Texts come with the end of a round.' : '';
    this.#write({
      'card-head': `Candidate ${lane.id}`,
      'fate-text': [described(state, lane), lossOf(state, lane)].filter(Boolean).join('; '),
      'text-so-far': lane.text.trim() || hint,
    });
    const use = this.find('card').querySelector('use');
    set(use, { href: `#mark-${markOf(lane)}`, class: `mark ${markOf(lane)}` });
    const rows = lane.scores.map(({ round, token, score }) => row([round, token, fixed(score)]));
    this.find('scores').tBodies[0].replaceChildren(...rows);
  }

  #tabulate(state) {
    const twin = this.find('twin');
    if (!twin.open) return;
    const { rows } = twin.querySelector('tbody');
    const texts = state.lanes.map((lane) => {
      const reward = `${checkOf(state, lane)} ${fixed(scoreOf(lane))}`.trim();
      const numbers = [count(tokensOf(state, lane)), reward, lane.parent ?? '–', lane.wave];
      return [lane.id, fateOf(lane), ...numbers];
    });
    // Rows stay where a reader is; only cells change.
    if (rows.length !== texts.length) twin.querySelector('tbody').replaceChildren(...texts.map(row));
    else texts.forEach((own, at) => own.forEach((text, n) => setText(rows[at].cells[n], `${text}`)));
  }
}

const row = (cells) => h('tr', {}, ...cells.map((text) => h('td', { text })));

function eased(value, goal, share, least) {
  const next = value + (goal - value) * share;
  return Math.abs(goal - next) < least ? goal : next;
}

customElements.define('specrej-race', Race);
