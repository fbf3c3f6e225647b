// Lanes and rounds to the columns of the density view. Pure, as reduce.js is.

import { isLive } from './reduce.js';
import { colorOf } from './words.js';

// A column per round, and one, without an end, for what grows now: {from, to, size, numKept, ids,
// bands}. `ids` are best first; a round of very many candidates is without them.
export function columnsOf(state) {
  const scores = new Map(); // of the last round; forks and newcomers have none
  let from = 0,
    wave = 1;
  const columns = state.rounds.map(
    ({ candidates, decision_token: to, num_started, num_rejected, wave: own = 1 }) => {
      if (own > wave) from = 0;
      wave = own;
      const ids = candidates.map((traced) => traced.candidate_id);
      const size = ids.length || num_started;
      const fills = candidates.map(({ score }) => colorOf(state, score));
      const bands = ids.length ? bandsOf(fills) : unscored(size);
      const column = { from, to, size, numKept: Math.max(0, size - num_rejected), ids, bands };
      from = to;
      scores.clear();
      for (const { candidate_id: id, score } of candidates) scores.set(id, score);
      return column;
    },
  );
  const live = new Set(state.lanes.filter(isLive).map(({ id }) => id));
  const ids = [...new Set([...scores.keys(), ...live])].filter((id) => live.has(id));
  const bands = bandsOf(ids.map((id) => colorOf(state, scores.get(id) ?? null)));
  const growing = { from, to: null, size: ids.length, numKept: ids.length, ids, bands };
  return ids.length ? [...columns, growing] : columns;
}

const unscored = (count) => [{ rank: 0, fill: 'var(--muted)', count }];

// Neighbours of the same color as one band.
function bandsOf(fills) {
  const bands = [];
  fills.forEach((fill, rank) => {
    if (bands.at(-1)?.fill === fill) bands.at(-1).count++;
    else bands.push({ rank, fill, count: 1 });
  });
  return bands;
}
