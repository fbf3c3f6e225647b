// The form: what it shows for the chosen options, the request that it stands for, and code for it.

import { h, set, setText } from './dom.js';
import { FIELDS } from './fields.js';

const ORCHESTRATOR_PORT = 50050; // by default

// A mark after each field's name, which shows the schema's comment on it.
export function explain(form) {
  for (const part of form.querySelectorAll('[data-help]')) {
    const text = FIELDS[part.dataset.help];
    const name = part.firstChild.textContent.trim() || part.textContent.trim();
    const field = part.querySelector('input, select');
    const mark = h('span', { class: 'help', title: text, text: '?', 'aria-hidden': 'true' });
    const note = h('small', { id: `about-${field?.name ?? 'rewards'}`, text, hidden: true });
    mark.addEventListener('click', (event) => {
      event.preventDefault(); // the label would focus or check its field
      note.hidden = !note.hidden;
    });
    if (field) set(field, { 'aria-label': name, 'aria-describedby': note.id });
    if (field && field !== part.firstChild) field.before(mark);
    else part.append(mark);
    part.append(note);
  }
}

// Draw the seed of requests whose field is empty.
export function drawSeed(form) {
  form.elements.seed.placeholder = Math.floor(Math.random() * 2 ** 31);
}

// Show the fields that the chosen algorithm and schedule have; others must not refuse the form.
export function arrange(form) {
  const { algorithm, schedule } = form.elements;
  const chosen = [algorithm.value, algorithm.value === 'best-of-n' ? '' : schedule.value];
  for (const part of form.querySelectorAll('[data-for]')) {
    part.hidden = !part.dataset.for.split(' ').some((value) => chosen.includes(value));
    for (const field of part.querySelectorAll('input, select')) field.disabled = part.hidden;
  }
  schedule.disabled = algorithm.value === 'best-of-n';
  form.elements.alpha.disabled = algorithm.value !== 'speculative-rejection';
}

// Offer the models, rewards and defaults of a description; keeps what is chosen.
export function offer(form, { generator, rewards, ...defaults }) {
  const { model, n, max_tokens, schedule } = form.elements,
    { kind, ...parts } = defaults.default_schedule,
    chosen = model.value,
    names = [generator.model, ...generator.adapters];
  model.replaceChildren(...names.map((name) => h('option', { text: name })));
  if (chosen) model.value = chosen;
  n.placeholder = defaults.default_n || 'auto';
  max_tokens.placeholder = `up to ${defaults.default_max_tokens}`;
  // A default value leaves a field alone that was changed.
  const usual = kind.replace('SCHEDULE_KIND_', '').toLowerCase();
  schedule.querySelector(`[value=${usual}]`).defaultSelected = true;
  for (const [name, value] of Object.entries(parts)) {
    if (String(value)) form.elements[name].defaultValue = value;
  }
  const offered = [...form.querySelectorAll('[data-reward]')];
  if (offered.map((item) => item.dataset.reward).join() === rewards.join()) return;
  offered.forEach((item) => item.remove());
  for (const [index, name] of rewards.entries()) {
    const [item] = document.getElementById('reward').content.cloneNode(true).children;
    const [isChosen, weight, data] = item.querySelectorAll('input');
    set(item, { 'data-reward': name });
    setText(item.querySelector('span'), name);
    isChosen.checked = index === 0;
    set(weight, { 'aria-label': `Weight of ${name}` });
    set(data, { 'aria-label': `Data of ${name}, as JSON` });
    data.addEventListener('input', () =>
      data.setCustomValidity(dataOf(data) === undefined ? 'must be JSON' : ''),
    );
    form.querySelector('#rewards').append(item);
  }
}

// The JSON in a field, null if it is empty, undefined if it is no JSON.
function dataOf({ value }) {
  try {
    return value.trim() ? JSON.parse(value) : null;
  } catch {
    return undefined;
  }
}

// The body of a call of /v1/specrej/stream: the same until a field changes or a seed is drawn.
export function bodyOf(form) {
  const value = (name) => form.elements[name].value.trim();
  const number = (name) => (value(name) ? Number(value(name)) : undefined); // not in JSON
  const { cache, compare, seed } = form.elements,
    isStored = cache.checked && !compare.checked; // a comparison needs two runs, no stored answer
  const specrej = { n: number('n'), cache: isStored ? 'use' : 'bypass' };
  const algorithm = value('algorithm');
  if (algorithm === 'branching')
    specrej.branching = { width: number('width'), keep: number('keep'), taper: number('taper') };
  else specrej.algorithm = algorithm;
  const { alpha } = form.elements,
    isDefault = alpha.value === alpha.defaultValue;
  // With a vote the server's default is to reject nobody for its rank.
  if (algorithm === 'speculative-rejection' && !(value('vote') && isDefault))
    specrej.alpha = number('alpha');
  if (algorithm !== 'best-of-n') specrej.schedule = scheduleOf(value('schedule'), value, number);
  specrej.stop_at = number('stop_at');
  if (algorithm !== 'branching') specrej.waves = number('waves');
  const [extractor, ...argument] = value('vote').split(':');
  if (extractor) specrej.vote = { extractor, argument: argument.join(':') };
  const rewards = [];
  for (const item of form.querySelectorAll('[data-reward]')) {
    const [isChosen, weight, data] = item.querySelectorAll('input');
    const own = { name: item.dataset.reward, weight: Number(weight.value) };
    const given = dataOf(data) ?? null;
    if (isChosen.checked) rewards.push(given === null ? own : { ...own, data: given });
  }
  const hasData = rewards.some((reward) => 'data' in reward);
  const weights = Object.fromEntries(rewards.map(({ name, weight }) => [name, weight]));
  if (rewards.length) specrej.rewards = hasData ? rewards : weights;
  return {
    model: value('model'),
    messages: [{ role: 'user', content: value('prompt') }],
    max_tokens: number('max_tokens'),
    temperature: number('temperature'),
    seed: Number(value('seed') || seed.placeholder),
    specrej,
  };
}

function scheduleOf(kind, value, number) {
  if (kind === 'memory') return { kind, first: number('first') };
  if (kind === 'geometric') return { kind, first: number('first'), factor: number('factor') };
  return {
    kind,
    tokens:
      value('tokens')
        .match(/[^\s,]+/g)
        ?.map(Number) ?? [],
  };
}

// The same request by Best-of-N, of as many candidates as it has got, without stops.
export function byBestOfN(body, n) {
  const { branching, schedule, alpha, stop_at, waves, ...rest } = body.specrej;
  return { ...body, specrej: { ...rest, n, algorithm: 'best-of-n' } };
}

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

// `url` is that of the stream.
export function codeOf(language, body, url) {
  const json = JSON.stringify(body, null, 1);
  const headers = { authorization: 'Bearer TOKEN', 'content-type': 'application/json' };
  if (language === 'curl') {
    const options = Object.entries(headers).map(([name, value]) => `-H '${name}: ${value}'`);
    return `curl -sN ${url} \\\n  ${options.join(' \\\n  ')} \\\n  -d ${quoted(json)}`;
  }
  if (language === 'grpcurl') return grpcurl(body, new URL(url));
  // Not as Python: JSON's true, false and null are other words there.
  return `import json
import urllib.request

body = json.loads(r"""${json}""")
headers = ${JSON.stringify(headers)}
call = urllib.request.Request("${url}", json.dumps(body).encode(), headers)
with urllib.request.urlopen(call) as events:
    for line in events:
        print(line.decode(), end="")`;
}

// The request that the gateway makes of the body.
function grpcurl({ model, messages, max_tokens, temperature, seed, specrej }, url) {
  const { cache, schedule, vote, rewards = {}, ...selection } = specrej;
  const constant = (type, name) => `${type}_${name.toUpperCase().replaceAll('-', '_')}`;
  if (selection.algorithm) selection.algorithm = constant('ALGORITHM', selection.algorithm);
  const listed = Array.isArray(rewards)
    ? rewards
    : Object.entries(rewards).map(([name, weight]) => ({ name, weight }));
  selection.rewards = listed.map(({ data, ...rest }) =>
    data === undefined ? rest : { ...rest, data: JSON.stringify(data) },
  );
  if (vote) selection.vote = { ...vote, extractor: constant('VOTE_EXTRACTOR', vote.extractor) };
  if (schedule) {
    selection.schedule = { ...schedule, kind: constant('SCHEDULE_KIND', schedule.kind) };
  }
  const sampling = { max_tokens, temperature, seed };
  const cache_control = constant('CACHE_CONTROL', cache);
  const request = { model, prompt: { messages }, sampling, selection, cache_control };
  const call = { request, progress: true, text_deltas: true, texts: true };
  const data = quoted(JSON.stringify(call, null, 1));
  const security = url.protocol === 'http:' ? '-plaintext ' : '';
  return `grpcurl ${security}-H 'authorization: Bearer TOKEN' -d ${data} \\
  ${url.hostname}:${ORCHESTRATOR_PORT} specrej.v1.OrchestratorService/GenerateStream`;
}
