// States in words, numbers and colors.

import { cost, isLive, level, scoreOf } from './reduce.js';

export const fixed = (score) => score?.toFixed(3) ?? '–';

// One sentence for readers that do not see the picture.
export function sentence(state) {
  const trace = state.rounds.at(-1);
  if (state.phase === 'failed') return `The request failed: ${state.error}`;
  if (state.phase === 'stopped') return 'The request was stopped.';
  if (state.phase === 'finished') {
    const made = cost(state).made.toLocaleString('en');
    const reward = `with reward ${fixed(state.best)}`;
    return `Candidate ${state.winner} of ${state.n} is the answer, ${reward}, of ${made} tokens.`;
  }
  if (!trace)
    return state.n ? `${state.n} candidates have started.` : 'Each candidate gets a lane here.';
  const ended = trace.num_finished ? ` ${trace.num_finished} finished,` : '';
  const begun = `Round ${trace.number} at token ${trace.decision_token}:${ended}`;
  const rest = `${trace.num_live} go on, best reward ${fixed(trace.best_score)}.`;
  return `${begun} ${trace.num_rejected} rejected, ${rest}`;
}

export const markOf = (lane) => (isLive(lane) ? 'growing' : lane.isHalted ? 'stopped' : lane.fate);
export const fateOf = (lane) => (lane.fate === 'winner' ? 'the answer' : markOf(lane));

// A candidate's state in words.
export function described(lane) {
  const end = isLive(lane) ? '' : ` at token ${lane.tokens}`;
  const parent = lane.parent === null ? '' : `, a fork of ${lane.parent} from token ${lane.from}`;
  return `${fateOf(lane)}${end}, reward ${fixed(scoreOf(lane))}${parent}`;
}

// The color of a score; null: not scored yet.
export function colorOf(state, score) {
  const share = Math.round((100 * level(state, score)) / 6);
  return score === null ? 'var(--muted)' : `color-mix(in oklch, var(--low), var(--high) ${share}%)`;
}
