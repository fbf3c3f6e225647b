// The form: what it shows for the chosen options, the request that it stands for, and code for it.

import { h } from './dom.js';

const MAX_RANDOM_SEED = 2 ** 48;

// Show the fields that the chosen algorithm and schedule have.
export function arrange(form) {
  const { algorithm, schedule } = form.elements;
  const shown = new Set([algorithm.value, algorithm.value === 'best-of-n' ? '' : schedule.value]);
  for (const part of form.querySelectorAll('[data-for]')) part.hidden = !shown.has(part.dataset.for);
  schedule.disabled = algorithm.value === 'best-of-n';
  form.elements.alpha.disabled = algorithm.value !== 'speculative-rejection';
}

// Offer the models and rewards of a description; keeps what is chosen.
export function offer(form, { generator, rewards }) {
  const { model } = form.elements, chosen = model.value;
  model.replaceChildren(...[generator.model, ...generator.adapters].map((name) => h('option', { text: name })));
  if (chosen) model.value = chosen;
  const host = form.querySelector('#rewards');
  if ([...host.querySelectorAll('[data-reward]')].map((item) => item.dataset.reward).join() === rewards.join()) return;
  host.replaceChildren(host.querySelector('legend'), ...rewards.map((name, index) =>
    h('div', { class: 'reward', 'data-reward': name },
      h('label', { class: 'check' }, h('input', { type: 'checkbox', checked: index === 0 }), ` ${name}`),
      h('input', { type: 'number', step: 'any', value: 1, 'aria-label': `Weight of ${name}` }))));
}

// The body of a call of /v1/specrej/stream. An empty seed is a random one, the same for a comparison.
export function bodyOf(form) {
  const value = (name) => form.elements[name].value.trim();
  const number = (name) => Number(value(name));
  const specrej = { n: number('n'), events: 'all', cache: form.elements.cache.checked ? 'use' : 'bypass' };
  const algorithm = value('algorithm');
  if (algorithm === 'branching') specrej.branching = { width: number('width'), keep: number('keep') };
  else specrej.algorithm = algorithm;
  if (algorithm === 'speculative-rejection') specrej.alpha = number('alpha');
  if (algorithm !== 'best-of-n') specrej.schedule = scheduleOf(value('schedule'), value, number);
  const rewards = {};
  for (const item of form.querySelectorAll('[data-reward]')) {
    const [isChosen, weight] = item.querySelectorAll('input');
    if (isChosen.checked) rewards[item.dataset.reward] = Number(weight.value);
  }
  if (Object.keys(rewards).length) specrej.rewards = rewards;
  return {
    model: value('model'),
    messages: [{ role: 'user', content: value('prompt') }],
    max_tokens: number('max_tokens'),
    temperature: number('temperature'),
    seed: value('seed') ? number('seed') : Math.floor(Math.random() * MAX_RANDOM_SEED),
    specrej,
  };
}

function scheduleOf(kind, value, number) {
  if (kind === 'tokens') return { kind, tokens: value('tokens').split(/[\s,]+/).filter(Boolean).map(Number) };
  return { kind, first: number('first'), ...(kind === 'geometric' && { factor: number('factor') }) };
}

// The same request by Best-of-N.
export function byBestOfN(body) {
  const { branching, schedule, alpha, ...rest } = body.specrej;
  return { ...body, specrej: { ...rest, algorithm: 'best-of-n' } };
}

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

export function codeOf(language, body, origin) {
  if (language === 'curl') {
    return `curl -sN ${origin}v1/specrej/stream \\\n  -H "authorization: Bearer $TOKEN" \\\n`
      + `  -H "content-type: application/json" -d ${quoted(JSON.stringify(body, null, 1))}`;
  }
  return language === 'Python' ? python(body) : grpcurl(body);
}

function python({ model, messages, max_tokens: tokens, temperature, seed, specrej }) {
  const text = (value) => JSON.stringify(value);
  const { n, alpha, algorithm, branching, rewards, schedule } = specrej;
  const options = [`n=${n}`, `max_tokens=${tokens}`, `temperature=${temperature}`, `seed=${seed}`, `model=${text(model)}`];
  const imports = ['Client'];
  if (alpha !== undefined) options.push(`alpha=${alpha}`);
  if (algorithm === 'best-of-n') options.push('algorithm=c.Algorithm.BEST_OF_N');
  if (branching) options.push(`branching=c.Branching(${branching.width}, ${branching.keep})`);
  if (rewards) options.push(`rewards=${text(rewards)}`);
  if (schedule) options.push(`schedule=${{
    geometric: `c.GeometricSchedule(${schedule.first}, ${schedule.factor})`,
    memory: `c.MemorySchedule(${schedule.first})`,
    tokens: `c.TokensSchedule((${schedule.tokens},))`,
  }[schedule.kind]}`);
  return `import asyncio\n\nfrom specrej import ${imports}\nfrom specrej import contracts as c\n\n\n`
    + 'async def main() -> None:\n    async with Client("127.0.0.1:50050") as client:\n'
    + `        events = client.stream(\n            ${text(messages[0].content)},\n            ${options.join(',\n            ')},\n        )\n`
    + '        async for event in events:\n            print(event)\n\n\nasyncio.run(main())';
}

function grpcurl({ model, messages, max_tokens, temperature, seed, specrej }) {
  const { n, alpha, algorithm, branching, rewards, schedule } = specrej;
  const selection = { n, alpha, branching };
  if (algorithm) selection.algorithm = `ALGORITHM_${algorithm.toUpperCase().replaceAll('-', '_')}`;
  if (rewards) selection.rewards = Object.entries(rewards).map(([name, weight]) => ({ name, weight }));
  if (schedule) {
    const { kind, tokens, ...rest } = schedule;
    selection.schedule = { [kind]: tokens ? { decision_tokens: tokens } : rest };
  }
  const request = { model, prompt: { messages }, sampling: { max_tokens, temperature, seed }, selection };
  return `grpcurl -plaintext -H "authorization: Bearer $TOKEN" \\\n  -d ${quoted(JSON.stringify({ request, progress: true }, null, 1))} \\\n`
    + '  127.0.0.1:50050 specrej.v1.OrchestratorService/GenerateStream';
}
