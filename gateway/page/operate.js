// What a running service does: totals and backends, by polling its description.

import { get } from './api.js';
import { count, h, setText } from './dom.js';

const POLL_MS = 1000;
const KEPT = 300; // samples of the charts
const RECENT = 5; // samples of a process, between which its rate is measured
const GONE_MS = 30_000; // after which a process that is not seen does not count

const HEALTH = {
  BACKEND_HEALTH_SERVING: ['● serving', 'good'],
  BACKEND_HEALTH_OTHER_VERSION: ['◐ other version', 'poor'],
  BACKEND_HEALTH_AWAY: ['○ away', 'bad'],
};
const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : '–');

export class Operate {
  #timer = 0;
  #isPolling = false;
  #processes = new Map(); // the latest counters and the rate of each orchestrator: calls alternate
  #samples = []; // {at, rate, owned}

  constructor(host) {
    this.find = (name) => host.querySelector(`.${name}`);
  }

  start() {
    this.#timer ||= setInterval(() => this.#poll(), POLL_MS);
    this.#poll();
  }

  stop() {
    clearInterval(this.#timer);
    this.#timer = 0;
  }

  async #poll() {
    if (document.hidden || this.#isPolling) return;
    this.#isPolling = true;
    const problem = this.find('problem');
    try {
      this.#show(await get('v1/specrej/describe'), performance.now());
      problem.hidden = true;
    } catch (error) {
      problem.hidden = false;
      setText(problem, error.message);
    }
    this.#isPolling = false;
  }

  #show(now, at) {
    const { generator, backends } = now;
    const { slots } = generator;
    const known = this.#processes.get(now.process_id)?.counts ?? [];
    const counts = [...known.slice(1 - RECENT), { at, made: now.generated_tokens }];
    const made = now.generated_tokens - counts[0].made;
    const process = { ...now, at, counts, rate: made && (1000 * made) / (at - counts[0].at) };
    this.#processes.set(now.process_id, process);
    const processes = [...this.#processes.values()].filter((each) => at - each.at < GONE_MS);
    const sum = (name) => processes.reduce((total, each) => total + each[name], 0);
    this.#samples = [
      ...this.#samples.slice(1 - KEPT),
      { at, rate: sum('rate'), owned: slots.owned },
    ];
    const saved = sum('saved_tokens_estimate');
    const texts = {
      running: count(sum('running')),
      queued: count(sum('queued')),
      rate: count(sum('rate')),
      saved: share(saved, sum('generated_tokens') + saved),
      cached: share(sum('num_cached'), sum('num_answers') + sum('num_cached')),
      answers: count(sum('num_answers')),
      refused: count(sum('num_refused')),
      weak: `${count(sum('num_degraded'))} · ${count(sum('num_hurried'))}`,
      facts: [
        `${generator.model} on ${generator.device}`,
        `rewards ${now.rewards.join(', ')}`,
        `cache ${now.cache_available ? 'available' : 'away'}`,
        processes.length > 1 ? `${processes.length} orchestrators` : 'one orchestrator',
      ].join(' · '),
    };
    for (const name in texts) setText(this.find(name), texts[name]);
    const times = this.#samples.map((each) => Math.round((each.at - at) / 1000));
    const owned = [times, this.#samples.map((each) => each.owned), times.map(() => null)];
    this.find('tokens').show([times, this.#samples.map((each) => each.rate)], texts.rate);
    this.find('slots').show(owned, `${count(slots.owned)} of ${count(slots.capacity)}`);
    this.find('hidden-backends').hidden = backends.length > 0;
    this.find('scroll').hidden = !backends.length;
    this.find('rows').replaceChildren(...backends.map(row));
  }
}

function row({ kind, address, health, serves, running, sessions, waiting, slots }) {
  const isGenerator = kind === 'BACKEND_KIND_GENERATOR';
  const [word, tone] = HEALTH[health] ?? ['unknown', 'poor'];
  const load = [isGenerator ? sessions : running, isGenerator ? waiting : '–', slots ? '' : '–'];
  const cells = [
    h('td', {}, h('code', { text: address })),
    h('td', { class: tone, text: word }),
    ...[serves || '–', ...load].map((text) => h('td', { text })),
  ];
  if (slots) {
    const named = { max: slots.capacity || 1, value: slots.owned, 'aria-label': 'Slots in use' };
    cells.at(-1).append(h('meter', named), ` ${count(slots.owned)} of ${count(slots.capacity)}`);
  }
  const name = isGenerator ? 'generator' : 'reward service';
  return h('tr', {}, h('th', { scope: 'row', text: name }), ...cells);
}
