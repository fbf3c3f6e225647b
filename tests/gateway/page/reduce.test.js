// The reducer and the player on recorded streams: `python -m tests.gateway.page.record` made them.

import assert from 'node:assert/strict';
import { readdirSync, readFileSync } from 'node:fs';
import test from 'node:test';

const page = new URL('../../../gateway/page/', import.meta.url);
const { cost, initial, isLive, level, reduce, scoreOf, shown } = await import(new URL('reduce.js', page));
const { columnsOf } = await import(new URL('columns.js', page));
const { checkOf, described, lossOf, sentence, stopOf } = await import(new URL('words.js', page));
const { Player } = await import(new URL('replay.js', page));
globalThis.matchMedia = () => ({}); // a browser's
const { codeOf } = await import(new URL('ask.js', page));

const folder = new URL('streams/', import.meta.url);
const names = readdirSync(folder).map((file) => file.replace('.json', ''));
const recorded = (name) => JSON.parse(readFileSync(new URL(`${name}.json`, folder)));

const FATES = { CANDIDATE_FATE_REJECTED: 'rejected', CANDIDATE_FATE_VETOED: 'vetoed', CANDIDATE_FATE_FINISHED: 'finished' };

// A state that no later step may change.
function frozen(value) {
  if (value && typeof value === 'object' && !Object.isFrozen(value)) {
    Object.freeze(value);
    Object.values(value).forEach(frozen);
  }
  return value;
}

const fold = (events) => events.reduce((state, event) => frozen(reduce(state, frozen(event))), frozen(initial()));
const rowsOf = (state) => state.lanes.map(({ id, row, parent, from, tokens, fate, scores }) => ({ id, row, parent, from, tokens, fate, scores }));

test('in Python a body is text of JSON, whatever is in it', () => {
  const body = { a: [true, null], b: 'a """\\" \n\\', '': '' };
  const [, json] = codeOf('python', body, 'http://a/').match(/^body = json\.loads\(r"""(.*?)"""\)$/ms);
  assert.deepEqual(JSON.parse(json), body);
});

// Fates as the service reports them, round by round; the answer is the winner.
function fatesOf(finished) {
  const fates = new Map();
  for (const { candidates } of finished.rounds) {
    for (const { candidate_id: id, fate } of candidates) fates.set(id, FATES[fate] ?? 'kept');
  }
  return fates.set(finished.candidates[0].candidate_id, 'winner');
}

test('there are recorded streams', () => assert.deepEqual(names.sort(), ['branching', 'cached', 'certain', 'rejection', 'stopped', 'vetoed']));

test('a candidate that was above the answer has a reason, others have none', () => {
  const states = names.map((name) => fold(recorded(name))).filter(({ phase }) => phase === 'finished');
  const reasons = states.flatMap((state) => state.lanes.map((lane) => {
    const isHigher = lane.id !== state.winner && lane.scores.some(({ score }) => score > state.best + 1e-3);
    assert.equal(Boolean(lossOf(state, lane)), isHigher, lossOf(state, lane));
    return lossOf(state, lane);
  }));
  assert.ok(reasons.some((reason) => /number \d+ of \d+ at token \d+, and rejected/.test(reason)));
  const fallen = { ...states[0].lanes[0], id: 999, scores: [{ score: states[0].best + 0.1, token: 16 }, { score: states[0].best - 0.1, token: 32 }] };
  assert.match(lossOf(states[0], fallen), /fell from \d\.\d+ at token 16 to \d\.\d+ at token 32/);
  assert.match(lossOf(states[0], { ...fallen, fate: 'vetoed', scores: fallen.scores.slice(0, 1) }), /vetoed/);
  assert.ok(states.some((state) => /is the answer.* Candidate \d+ is not: its reward/.test(sentence(state))));
});

test('calls are lines of the answer, and reasoning is apart', () => {
  const calls = ['add', 'ping'].map((name, index) => ({ index, id: `call_0_${index}`, name, arguments: '{}' }));
  const deltas = [
    { content: '', reasoning: 'I ', tool_calls: [] },
    { content: 'So:', reasoning: 'add.', tool_calls: calls.slice(0, 1) },
    { content: '', reasoning: '', tool_calls: calls.slice(1) },
  ];
  const events = deltas.map((parts) => ({ at: 0, name: 'text_delta', data: { candidate_id: 0, text: 'raw', parts } }));
  const state = fold(events);
  assert.deepEqual([shown(state), state.parts.reasoning, state.answer], ['So:\nadd({})\nping({})', 'I add.', 'rawrawraw']);
  assert.equal(shown(fold([{ at: 0, name: 'text_delta', data: { candidate_id: 0, text: 'raw' } }])), 'raw');
  const others = recorded('certain');
  const whole = structuredClone(others);
  whole.at(-1).data.candidates[0].parts = { content: 'Yes', reasoning: '', tool_calls: [] };
  assert.equal(shown(fold(whole)), 'Yes');
});

for (const name of names) {
  const events = recorded(name);
  const finished = events.find((event) => event.name === 'finished')?.data;

  test(`${name}: the fates of lanes are those of the response`, () => {
    const state = fold(events);
    if (!finished) return assert.equal(state.phase, 'stopped');
    const fates = fatesOf(finished);
    assert.ok(fates.size >= finished.n);
    assert.deepEqual(new Map(state.lanes.map((lane) => [lane.id, lane.fate])), fates);
    assert.equal(state.answer, finished.text);
    assert.deepEqual([state.phase, state.winner, state.best, state.totalMs], ['finished', finished.candidates[0].candidate_id, finished.score, finished.timings.total_ms]);
    assert.equal(state.capacity, finished.rounds.at(-1).capacity_slots);
    assert.deepEqual(cost(state), { made: finished.usage.generated_tokens, others: finished.usage.best_of_n_tokens_estimate, isFinal: true });
  });

  test(`${name}: a lane ends where its candidate did, with its scores`, () => {
    for (const lane of fold(events).lanes) {
      const own = (finished?.rounds ?? []).flatMap((trace) => trace.candidates.filter((traced) => traced.candidate_id === lane.id));
      if (!own.length) continue;
      assert.deepEqual(lane.scores.map((item) => item.score), own.map((traced) => traced.score));
      assert.equal(lane.tokens, own.at(-1).num_tokens);
    }
  });

  test(`${name}: after each event as many lanes live as the service reports, each in its own row`, () => {
    let state = initial();
    for (const event of events) {
      state = reduce(state, event);
      const live = state.lanes.filter(isLive);
      if (event.name === 'round_completed') assert.equal(live.length, event.data.round.num_live);
      assert.equal(new Set(live.map((lane) => lane.row)).size, live.length);
      assert.ok(state.lanes.every((lane) => lane.row < state.numRows));
      if (['round_completed', 'finished', 'stopped'].includes(event.name)) assert.match(sentence(state), /^(Round \d+ at token|Candidate \d+ of|The request was).*\.$/);
      const levels = state.lanes.map((lane) => level(state, scoreOf(lane))).filter((value) => value !== null);
      assert.ok(levels.every((value) => Number.isInteger(value) && value >= 0 && value <= 6));
    }
  });

  test(`${name}: each event shows the service's slots, capacity, best reward and best text`, () => {
    let state = initial();
    for (const event of events) {
      const before = state;
      state = reduce(state, event);
      const { at, data } = event;
      if (event.name === 'progress') {
        assert.deepEqual(state.slots, [...before.slots, { at, session: data.session_slots }]);
        assert.deepEqual([state.capacity, state.numLive, state.position], [data.capacity_slots, data.num_live, data.num_tokens]);
      }
      if (event.name !== 'round_completed') continue;
      const { session_slots: full, freed_slots: freed, capacity_slots: capacity, best_score: best, num_live: numLive } = data.round;
      assert.deepEqual(state.slots, [...before.slots, { at, session: full }, { at, session: full - freed }]);
      assert.deepEqual([state.capacity, state.best, state.bestText, state.numLive], [capacity, best, data.best_text, numLive]);
    }
  });

  test(`${name}: higher rewards have higher levels`, () => {
    const state = fold(events);
    const scores = state.lanes.flatMap((lane) => lane.scores.map(({ score }) => score)).sort((a, b) => a - b);
    const levels = scores.map((score) => level(state, score));
    assert.deepEqual(levels, [...levels].sort((a, b) => a - b));
    if (new Set(scores).size > 7) assert.deepEqual([levels[0], levels.at(-1)], [0, 6]);
  });

  test(`${name}: a column of the density view has the height of its round`, () => {
    const state = fold(events);
    const columns = columnsOf(state).filter(({ to }) => to !== null);
    assert.deepEqual(columns.map(({ size, numKept }) => [size, size - numKept]), state.rounds.map((trace) => [trace.num_started, trace.num_rejected]));
    for (const { bands, size } of columns) assert.equal(bands.reduce((sum, { count }) => sum + count, 0), size);
  });

  test(`${name}: the number of tokens made so far only grows, to that of the end`, () => {
    let state = initial(), before = 0;
    for (const event of events) {
      state = reduce(state, event);
      const { made } = cost(state);
      assert.ok(made >= before, `${made} after ${before}`);
      before = made;
    }
    if (finished) assert.equal(before, finished.usage.generated_tokens);
  });

  test(`${name}: a player that goes back has the state of that time`, () => {
    const player = new Player(events);
    const states = [player.state];
    while (player.time < player.end) {
      player.step(1);
      states.push(player.state);
    }
    for (const state of states.slice(0, -1).reverse()) {
      player.step(-1);
      assert.deepEqual(player.state, state);
    }
    player.isPlaying = true;
    player.speed = 4;
    player.advance(player.end / 8);
    assert.equal(player.time, player.end / 2);
    player.advance(player.end);
    assert.deepEqual([player.time, player.isPlaying], [player.end, false]);
  });
}

test('once certain, the answer grows with each delta to the text of the end', () => {
  const events = recorded('certain');
  let state = initial(), text = '';
  for (const event of events) {
    state = reduce(state, event);
    if (event.name !== 'text_delta') continue;
    text += event.data.text;
    assert.deepEqual([state.phase, state.answer, state.isCertain, state.winner], ['running', text, true, event.data.candidate_id]);
  }
  assert.ok(events.filter(({ name }) => name === 'text_delta').length > 9);
  assert.deepEqual([state.answer, state.winner], [text, events.at(-1).data.candidates[0].candidate_id]);
});

test('a score lies in the seventh that the cuts give', () => {
  const cuts = [1, 2, 3, 4, 5, 6];
  assert.deepEqual([0, 1, 1.5, 3, 5.9, 7, null].map((score) => level({ cuts }, score)), [0, 1, 1, 3, 5, 6, null]);
});

test('what ends early has no lane that grows', () => {
  const events = recorded('rejection');
  const part = events.slice(0, events.findLastIndex(({ name }) => name === 'progress') + 1);
  const endings = { stopped: {}, error: { error: { message: 'no room' } }, ended: {} };
  for (const [name, data] of Object.entries(endings)) {
    const running = fold(part), state = fold([...part, { at: 1e4, name, data }]);
    const cut = running.lanes.filter(isLive).map(({ id }) => id);
    assert.ok(cut.length > 0);
    assert.deepEqual([state.lanes.filter(isLive).length, state.numLive], [0, 0]);
    for (const lane of state.lanes.filter(({ id }) => cut.includes(id))) {
      assert.equal(lane.tokens, running.position);
      assert.match(described(state, lane), /^stopped at token/);
    }
    assert.deepEqual(cost(state), cost(running));
  }
});

test('an answer that the deadline hurried has no lane that grows', () => {
  const events = recorded('rejection');
  const part = events.slice(0, events.findIndex(({ name }) => name === 'round_completed') + 1);
  const kept = fold(part).lanes.filter(isLive);
  assert.ok(kept.length > 1);
  const state = fold([...part, events.at(-1)]);
  assert.deepEqual([state.phase, state.error, state.lanes.filter(isLive).length, state.numLive], ['finished', '', 0, 0]);
  const cut = state.lanes.filter(({ id }) => id !== state.winner && kept.some((lane) => lane.id === id));
  for (const lane of cut) assert.match(described(state, lane), /^stopped at token/);
});

test('forks take the rows that cuts have freed, and only then new ones', () => {
  let state = initial();
  for (const event of recorded('branching')) {
    const before = state;
    state = reduce(state, event);
    if (event.name !== 'round_completed') continue;
    const forks = state.lanes.slice(before.lanes.length);
    assert.deepEqual(forks.map(({ id, parent }) => [id, parent]), event.data.round.forks.map((fork) => [fork.candidate_id, fork.parent_id]));
    const ended = state.lanes.slice(0, before.lanes.length);
    const taken = new Set(ended.filter(({ fate }) => fate !== 'rejected').map(({ row }) => row));
    const free = before.numRows - taken.size;
    assert.equal(forks.filter(({ row }) => row < before.numRows).length, Math.min(free, forks.length));
    assert.equal(new Set([...taken, ...forks.map(({ row }) => row)]).size, taken.size + forks.length);
  }
});

test('forks begin at the cut, where their parents are', () => {
  const state = fold(recorded('branching'));
  const forks = state.lanes.filter((lane) => lane.parent !== null);
  assert.ok(forks.length > 0);
  for (const fork of forks) {
    const parent = state.lanes.find((lane) => lane.id === fork.parent);
    assert.ok(parent.tokens >= fork.from && fork.from > 0);
    const others = state.lanes.filter((lane) => lane.row === fork.row && lane.id !== fork.id);
    assert.ok(others.every((lane) => lane.tokens <= fork.from || lane.from >= fork.tokens));
  }
});

test('an error ends the request with its message, and an unknown event changes nothing', () => {
  const state = reduce(initial(), { at: 1, name: 'error', data: { error: { message: 'no room' } } });
  assert.deepEqual([state.phase, state.error, sentence(state)], ['failed', 'no room', 'The request failed: no room']);
  assert.equal(reduce(state, { at: 2, name: 'new kind', data: {} }), state);
});

test('a round without its candidates leaves the survivors', () => {
  const events = recorded('rejection');
  const bare = events.map((event) => (event.name === 'round_completed'
    ? { ...event, data: { ...event.data, round: { ...event.data.round, candidates: [], scores: [] } } } : event));
  const state = fold(bare.filter((event) => event.name !== 'finished'));
  const last = bare.findLast((event) => event.name === 'round_completed').data;
  assert.deepEqual(state.lanes.filter(isLive).map((lane) => lane.id), last.survivors);
  const columns = columnsOf(state);
  assert.ok(columns.length > 1);
  for (const [index, { size, numKept, bands }] of columns.entries()) {
    const trace = state.rounds[index]; // none of the last column, which grows
    if (trace) assert.deepEqual([size, numKept], [trace.num_started, trace.num_started - trace.num_rejected]);
    assert.deepEqual(bands, [{ rank: 0, fill: 'var(--muted)', count: size }]);
  }
});

test('candidates of later waves begin at their own beginning, with ticks where a verifier passed', () => {
  const round = (number, wave, ids, score, fate = 'CANDIDATE_FATE_FINISHED') => ({ at: number, name: 'round_completed', data: { survivors: [], best_text: 'x', round: {
    number, wave, decision_token: 16 * (3 - wave), num_started: ids.length, num_finished: ids.length, num_rejected: 0, num_live: 0, best_score: score, session_slots: 9, freed_slots: 9, capacity_slots: 99, generated_tokens: 16 * ids.length, forks: [],
    candidates: ids.map((id) => ({ candidate_id: id, score, fate, num_tokens: 16 * (3 - wave) })) } } });
  const grown = (num_tokens, num_live) => ({ at: 1, name: 'progress', data: { num_tokens, num_live, session_slots: 5, capacity_slots: 99 } });
  const best = { candidate_id: 3, score: 1, num_tokens: 16, text: '4', finish_reason: 'FINISH_REASON_STOP' };
  const events = [
    { at: 0, name: 'admitted', data: { n: 16, waves: 2, stop_at: 1, request_id: 'r' } }, grown(4, 2), round(1, 1, [0, 1], 0), grown(4, 2), round(2, 2, [2, 3], 1),
    { at: 9, name: 'finished', data: { request_id: 'r', n: 16, candidates: [best], rounds: [], usage: { generated_tokens: 96, best_of_n_tokens_estimate: 512 }, timings: { total_ms: 9 }, stopped_by: 'STOP_REASON_SCORE', votes: [{ answer: '4', share: 1, count: 2 }], num_distinct: 1 } },
  ];
  const begun = fold(events.slice(0, 4));
  assert.deepEqual([begun.lanes.map(({ wave }) => wave), begun.numLive, begun.position, begun.reach], [[1, 1, 2, 2], 2, 4, 32]);
  assert.deepEqual(begun.lanes.filter(isLive).map(({ id }) => id), [2, 3]);
  const state = fold(events);
  assert.deepEqual(state.lanes.map((lane) => checkOf(state, lane)), ['✗', '✗', '✓', '✓']);
  assert.equal(described(state, state.lanes[3]), 'the answer at token 16, reward 1.000, passed, of wave 2');
  assert.match(sentence(state), /ended early: an answer has the score/);
  assert.deepEqual([state.votes.length, stopOf({ stoppedBy: '' })], [1, '']);
  const cut = fold([...events.slice(0, 5), { ...events[5], data: { ...events[5].data, candidates: [{ ...best, finish_reason: 'FINISH_REASON_LENGTH' }] } }]);
  assert.equal(checkOf(cut, cut.lanes[3]), '', 'a truncated text is no complete answer');
  const stored = fold([{ ...events[5], data: { ...events[5].data, stop_at: 1, rounds: [events[2].data.round, events[4].data.round] } }]);
  assert.deepEqual(rowsOf(stored).map(({ id, fate }) => [id, fate]), rowsOf(state).map(({ id, fate }) => [id, fate]));
});
