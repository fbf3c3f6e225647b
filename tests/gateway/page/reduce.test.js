// The reducer and the player on recorded streams: `python -m tests.gateway.page.record` made them.

import assert from 'node:assert/strict';
import { readdirSync, readFileSync } from 'node:fs';
import test from 'node:test';

const page = new URL('../../../gateway/page/', import.meta.url);
const { cost, initial, isLive, level, reduce, scoreOf } = await import(new URL('reduce.js', page));
const { sentence } = await import(new URL('words.js', page));
const { eventsOf, Player } = await import(new URL('replay.js', page));

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

// Fates as the service reports them, round by round; the answer is the winner.
function fatesOf(finished) {
  const fates = new Map();
  for (const { candidates } of finished.rounds) {
    for (const { candidate_id: id, fate } of candidates) fates.set(id, FATES[fate] ?? 'kept');
  }
  return fates.set(finished.candidates[0].candidate_id, 'winner');
}

test('there are recorded streams', () => assert.deepEqual(names.sort(), ['branching', 'cached', 'rejection', 'stopped', 'vetoed']));

for (const name of names) {
  const { events, record } = recorded(name);
  const finished = events.find((event) => event.name === 'finished')?.data;

  test(`${name}: the fates of lanes are those of the response`, () => {
    const state = fold(events);
    if (!finished) return assert.equal(state.phase, 'stopped');
    const fates = fatesOf(finished);
    assert.ok(fates.size >= finished.n);
    assert.deepEqual(new Map(state.lanes.map((lane) => [lane.id, lane.fate])), fates);
    assert.equal(state.answer, finished.text);
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

  test(`${name}: a record replays to the lanes of the stream`, () => {
    const player = new Player(eventsOf(record));
    player.seek(player.end);
    assert.deepEqual(rowsOf(player.state), rowsOf(fold(events)));
    assert.equal(player.state.phase, fold(events).phase);
  });

  test(`${name}: a player that goes back has the state of that time`, () => {
    const player = new Player(eventsOf(record));
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

test('forks begin at the cut, in a row that the cut has freed', () => {
  const state = fold(recorded('branching').events);
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
  const { events } = recorded('rejection');
  const bare = events.map((event) => (event.name === 'round_completed'
    ? { ...event, data: { ...event.data, round: { ...event.data.round, candidates: [], scores: [] } } } : event));
  const state = fold(bare.filter((event) => event.name !== 'finished'));
  const last = bare.findLast((event) => event.name === 'round_completed').data;
  assert.deepEqual(state.lanes.filter(isLive).map((lane) => lane.id), last.survivors);
});
