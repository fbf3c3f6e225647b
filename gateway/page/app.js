// The page: routes by the address's hash, runs requests, replays them.

import { get, setToken, stream, token } from './api.js';
import { arrange, bodyOf, byBestOfN, codeOf, drawSeed, explain, offer } from './ask.js';
import { count, h, isStill, seconds, set, setText } from './dom.js';
import { cost, initial, reduce } from './reduce.js';
import { Player } from './replay.js';
import { fixed } from './words.js';
import './race.js';

const KEPT = 32; // runs of this page whose events are kept
const WATCHED_MS = 250; // between drawings of the comparison
const RETRY_MS = 2000; // between looks at a model that loads

const NAMES = { 'speculative-rejection': 'Speculative Rejection', 'best-of-n': 'Best-of-N' };

const $ = (id) => document.getElementById(id);
const form = $('ask');
const remembered = new Map(); // {events, state, prompt, kind} by request id
let runs = [];
let isSent = false; // whether the form's current request has been sent

class Run {
  constructor(race) {
    this.race = race;
    this.reset();
  }

  reset() {
    this.state = initial();
    this.events = [];
    this.ended = null;
    this.began = performance.now();
    this.race.find('actions').replaceChildren();
    this.abort?.abort();
    this.abort = new AbortController();
  }

  get clock() {
    return () => (this.ended ?? performance.now()) - this.began;
  }

  wait() {
    this.reset();
    this.ended = this.began;
    this.isBusy = false;
    this.race.removeAttribute('busy');
    this.race.setAttribute('idle', 'next');
    this.race.show(this.state, this.clock);
  }

  skip() {
    this.race.removeAttribute('idle');
    this.take('stopped', {});
  }

  async start(body) {
    this.reset();
    this.prompt = body.messages[0].content;
    this.kind = NAMES[body.specrej.algorithm] ?? 'Branching';
    const { stop_at, waves, rewards } = body.specrej;
    const hasChecks = Array.isArray(rewards); // with data
    this.asked = { stop_at, waves, hasChecks };
    const { abort } = this;
    const take = (name, data) => abort === this.abort && this.take(name, data); // unless replaced
    this.isBusy = true;
    this.race.removeAttribute('idle');
    this.race.setAttribute('busy', '');
    this.race.show(this.state, this.clock);
    try {
      await stream(body, abort.signal, take);
      take('ended', {});
    } catch (error) {
      if (error.name === 'AbortError') take('stopped', {});
      else take('error', { error: { message: error.message } });
      if (error.needsToken) askToken();
    }
    if (abort !== this.abort) return;
    this.isBusy = false;
    this.race.removeAttribute('busy');
    this.keep();
  }

  take(name, data) {
    const own = name === 'admitted' || name === 'finished' ? { ...this.asked, ...data } : data;
    const event = { at: performance.now() - this.began, name, data: own };
    if (/^(finished|error|stopped|ended)$/.test(name)) this.ended ??= performance.now();
    this.events.push(event);
    this.state = reduce(this.state, event);
    this.race.show(this.state, this.clock);
  }

  keep() {
    const { events, state, prompt, kind } = this;
    const { id } = state;
    if (!id) return;
    remembered.set(id, { events, state, prompt, kind });
    if (remembered.size > KEPT) remembered.delete(remembered.keys().next().value);
    this.race.find('actions').replaceChildren(h('a', { href: `#record=${id}`, text: 'Replay' }));
  }
}

// Watch

const main = new Run($('live'));
const other = new Run($('other'));

async function ask(event) {
  event.preventDefault();
  if ($('run').disabled) return;
  stop();
  if (isSent) renew();
  isSent = true;
  const body = bodyOf(form),
    isCompared = form.elements.compare.checked && body.specrej.algorithm !== 'best-of-n';
  $('live').label = NAMES[body.specrej.algorithm] ?? 'Branching';
  setText($('compare').querySelector('.ours'), NAMES[body.specrej.algorithm] ?? 'Branching');
  $('other').hidden = $('compare').hidden = !isCompared;
  runs = isCompared ? [main, other] : [main];
  $('stop').disabled = false;
  if ($('live').getBoundingClientRect().top > innerHeight / 2) $('live').scrollIntoView();
  const mine = runs;
  if (isCompared) other.wait();
  const watching = isCompared ? setInterval(compare, WATCHED_MS) : 0;
  if (isCompared) compare();
  await main.start(body);
  // One after the other: at the same time on one engine each would slow the other down.
  if (isCompared && runs === mine) {
    if (main.state.phase === 'finished') await other.start(byBestOfN(body, main.state.n));
    else other.skip();
  }
  clearInterval(watching);
  if (isCompared) compare();
  if (runs === mine) $('stop').disabled = true;
}

function stop() {
  for (const run of runs) if (run.isBusy) run.abort.abort();
}

function compare() {
  const sides = [main, other].map(({ state, clock }) => ({
    isDone: state.phase === 'finished',
    seconds: state.totalMs ?? clock(),
    tokens: cost(state).made,
    reward: state.best ?? 0,
  }));
  const isDone = sides.every((side) => side.isDone),
    isOver = [main, other].some(({ state }) => ['failed', 'stopped'].includes(state.phase)),
    gap = sides[0].reward - sides[1].reward;
  const difference =
    Math.abs(gap) < 5e-4 ? 'the same' : `${gap > 0 ? '+' : '−'}${fixed(Math.abs(gap))}`;
  const verdictOf = (name, [ours, theirs]) => {
    if (name === 'reward') return [difference, gap <= -5e-4];
    const isMore = ours > theirs;
    const ratio = Math.max(ours, theirs) / Math.max(1e-9, Math.min(ours, theirs));
    const word = { seconds: ['faster', 'slower'], tokens: ['fewer', 'more'] }[name][+isMore];
    return [`${ratio.toFixed(1)} times ${word}`, isMore];
  };
  for (const [name, format] of Object.entries({ seconds, tokens: count, reward: fixed })) {
    const values = sides.map((side) => side[name]),
      row = $(`compare-${name}`);
    row.querySelectorAll('.amount').forEach((cell, index) => setText(cell, format(values[index])));
    row.querySelectorAll('meter').forEach((meter, index) => {
      meter.min = Math.min(0, ...values); // rewards may be negative
      meter.max = Math.max(0, ...values) || Number(meter.min === 0);
      meter.value = values[index];
    });
    const [text, isLoss] = verdictOf(name, values);
    const verdict = row.querySelector('.verdict');
    set(verdict, { class: `verdict ${isDone && isLoss ? 'bad' : 'accent'}` });
    setText(verdict, isDone ? text : isOver ? '–' : '…');
  }
}

const url = new URL('v1/specrej/stream', location.href).href;
const code = () => codeOf($('language').value, bodyOf(form), url);
function showCode() {
  setText($('code').querySelector('pre'), code());
  setText($('copy'), 'Copy');
}

// Make the form a new request: draw a new seed, and update the code.
function renew() {
  isSent = false;
  drawSeed(form);
  showCode();
}

form.addEventListener('submit', ask);
form.addEventListener('input', ({ target }) => {
  if (target === $('language')) return;
  arrange(form);
  renew();
});
form.addEventListener('keydown', (event) => {
  if (event.key !== 'Enter' || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault(); // an input would submit a second time
  form.requestSubmit();
});
// A browser can show what is wrong with a field only where it can be seen.
const show = ({ target }) => target.closest('details')?.setAttribute('open', '');
form.addEventListener('invalid', show, true);
$('stop').addEventListener('click', stop);
$('code').addEventListener('toggle', showCode);
$('language').addEventListener('change', showCode);
$('copy').addEventListener('click', async () => {
  try {
    await navigator.clipboard.writeText(code());
    setText($('copy'), 'Copied');
  } catch {
    // Over plain HTTP from another machine there is no clipboard.
    getSelection().selectAllChildren($('code').querySelector('pre'));
    setText($('copy'), 'Selected');
  }
});

// Look back

let player = new Player([]);
let lastFrame = 0;

const brief = (text) => (text.length > 80 ? `${text.slice(0, 79)}…` : text);

function list() {
  const rows = [...remembered].reverse().map(([id, { state, prompt, kind }]) => {
    const { made, others } = cost(state);
    const facts = [
      state.phase === 'finished' ? `reward ${fixed(state.best)}` : state.phase,
      `${Math.round(100 * (1 - made / Math.max(1, others)))} % saved`,
    ];
    const href = `#record=${id}`;
    const current = { 'aria-current': location.hash === href && 'true' };
    const link = h('a', { href, ...current, text: `${kind} of ${state.n}` });
    const lines = [brief(prompt), facts.join(' · ')];
    return h('li', {}, link, ...lines.map((text) => h('p', { class: 'muted', text })));
  });
  const none = h('p', { class: 'muted', text: 'None yet: run one on the page Watch.' });
  $('recent').replaceChildren(rows.length ? h('ol', {}, ...rows) : none);
}

function replay(id) {
  const { events, prompt } = remembered.get(id) ?? { events: [], prompt: '' };
  player = new Player(events);
  player.speed = Number($('speed').value);
  $('past').removeAttribute('idle');
  $('past').label = `Replay of ${id.slice(0, 8)}`;
  $('player').hidden = false;
  setText($('asked'), prompt);
  play(!isStill.matches);
}

function play(isPlaying) {
  if (isPlaying && player.time >= player.end) player.seek(0);
  player.isPlaying = isPlaying;
  lastFrame = performance.now();
  tick(lastFrame);
}

function tick(now) {
  player.advance(Math.max(0, now - lastFrame));
  lastFrame = now;
  showPlayer();
  if (player.isPlaying) requestAnimationFrame(tick);
}

function showPlayer() {
  setText($('play'), player.isPlaying ? 'Pause' : 'Play');
  $('seek').value = player.end ? (1000 * player.time) / player.end : 0;
  $('seek').setAttribute('aria-valuetext', seconds(player.time));
  setText($('time'), `${seconds(player.time)} of ${seconds(player.end)}`);
  const { time } = player;
  $('past').show(player.state, () => time);
}

const on = (id, name, action) => $(id).addEventListener(name, () => (action(), showPlayer()));
$('play').addEventListener('click', () => play(!player.isPlaying));
on('next', 'click', () => player.step(1));
on('previous', 'click', () => player.step(-1));
on('speed', 'change', () => (player.speed = Number($('speed').value)));
on('seek', 'input', () => player.stop((player.end * $('seek').value) / 1000));

// Routes

function route() {
  const [name, id] = location.hash.slice(1).split('=');
  const view = ['record', 'back'].includes(name) ? 'back' : 'watch';
  for (const each of ['watch', 'back']) {
    $(`view-${each}`).hidden = each !== view;
    const link = document.querySelector(`nav a[href="#${each}"]`);
    set(link, { 'aria-current': each === view ? 'page' : null });
  }
  if (view !== 'back') return;
  if (id) replay(id);
  list();
}

async function describe() {
  try {
    const description = await get('v1/specrej/describe');
    const { model, device, form: made = '', takes_images: sees } = description.generator;
    const words = made.replace('CANDIDATE_FORM_', '').replaceAll('_', ' ').toLowerCase();
    const how = words && words !== 'in place' ? `, ${words}` : '';
    setText($('service'), `${model} on ${device}${how}${sees ? ', takes images' : ''}`);
    offer(form, description);
    arrange(form);
    $('run').disabled = false;
    setText($('run'), 'Run');
    for (const race of document.querySelectorAll('[idle=loading]')) {
      race.setAttribute('idle', 'ready');
      race.show(initial(), () => 0);
    }
    showCode();
  } catch (error) {
    const { needsToken, message } = error;
    setText($('service'), needsToken ? message : `Waiting for the model: ${message}`);
    setText($('run'), needsToken ? 'No token' : 'Loading');
    if (needsToken) askToken();
    else setTimeout(describe, RETRY_MS); // the model loads, or a service starts
  }
}

function askToken() {
  if ($('token').open) return;
  $('token').querySelector('input').value = token();
  $('token').returnValue = ''; // what Escape leaves
  $('token').showModal();
}

$('token-open').addEventListener('click', askToken);
$('token').addEventListener('close', ({ target }) => {
  const { returnValue: choice } = target;
  if (choice) setToken(choice === 'save' ? target.querySelector('input').value.trim() : '');
  if (choice === 'save') describe();
  if (choice === 'forget') location.reload(); // without what the token has shown
});
addEventListener('hashchange', route);

explain(form);
arrange(form);
renew();
describe();
route();
