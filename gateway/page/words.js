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
    const answer = `Candidate ${state.winner} of ${state.n} is the answer, ${reward}, of ${made} tokens.`;
    const losses = state.lanes.map((lane) => ({ lane, loss: lossOf(state, lane) }));
    const stop = stopOf(state) && ` It ${stopOf(state)}.`;
    const [top] = losses.filter(({ loss }) => loss).sort((x, y) => topOf(y.lane).score - topOf(x.lane).score);
    return top ? `${answer}${stop} Candidate ${top.lane.id} is not: ${top.loss}.` : answer + stop;
  }
  if (!trace)
    return state.n ? `${state.n} candidates have started.` : 'Each candidate gets a lane here.';
  const ended = trace.num_finished ? ` ${trace.num_finished} finished,` : '';
  const begun = `Round ${trace.number} at token ${trace.decision_token}:${ended}`;
  const rest = `${trace.num_live} go on, best reward ${fixed(trace.best_score)}.`;
  return `${begun} ${trace.num_rejected} rejected, ${rest}`;
}

const STOPS = {
  SCORE: 'ended early: an answer has the score to stop at',
  FIRST: 'ended early: enough answers are complete',
  VOTE: 'ended early: the leading answer of the vote is safe',
};
export const stopOf = ({ stoppedBy }) => STOPS[stoppedBy] ?? '';

// Whether a verifier has passed a complete answer: a tick, a cross, or empty where it is open.
export function checkOf({ hasChecks, stopAt }, { fate, isCut, scores }) {
  if (!hasChecks || isCut || !['finished', 'winner', 'vetoed'].includes(fate)) return '';
  const score = fate === 'vetoed' ? 0 : scores.at(-1)?.score;
  if (score >= (stopAt ?? 1)) return '✓';
  return stopAt !== null || score === 0 ? '✗' : '';
}

export const markOf = (lane) => (isLive(lane) ? 'growing' : lane.isHalted ? 'stopped' : lane.fate);
export const fateOf = (lane) => (lane.fate === 'winner' ? 'the answer' : markOf(lane));

// A candidate's state in words.
export function described(state, lane) {
  const wave = lane.wave > 1 ? `, of wave ${lane.wave}` : '';
  const check = { '✓': ', passed', '✗': ', not passed' }[checkOf(state, lane)] ?? '';
  const end = isLive(lane) ? '' : ` at token ${lane.tokens}`;
  const parent = lane.parent === null ? '' : `, a fork of ${lane.parent} from token ${lane.from}`;
  return `${fateOf(lane)}${end}, reward ${fixed(scoreOf(lane))}${check}${parent}${wave}`;
}

const topOf = ({ scores }) => scores.reduce((top, each) => (each.score > top.score ? each : top));

// Why a candidate that had a higher reward than the answer is not the answer; empty for others.
export function lossOf(state, lane) {
  const isOver = state.phase === 'finished' && lane.id !== state.winner && lane.scores.length;
  if (!isOver || !(topOf(lane).score > state.best + 5e-4)) return '';
  const [last, top] = [lane.scores.at(-1), topOf(lane)];
  if (last.score <= state.best + 5e-4) {
    const fall = `its reward fell from ${fixed(top.score)} at token ${top.token}`;
    return `${fall} to ${fixed(last.score)} at token ${last.token}`;
  }
  const reward = `its reward was ${fixed(last.score)}`;
  if (lane.fate === 'vetoed') return `${reward}, but a reward vetoed it`;
  if (lane.fate === 'finished') return `${reward}, but complete answers without a veto were preferred`;
  if (lane.fate !== 'rejected') return `${reward}, but the deadline came before its end`;
  const { candidates } = state.rounds.find(({ number }) => number === last.round);
  const rank = 1 + candidates.findIndex((traced) => traced.candidate_id === lane.id);
  const cut = `number ${rank} of ${candidates.length} at token ${last.token}, and rejected`;
  return `${reward}, ${cut}: rewards of longer texts can be lower`;
}

// The color of a score; null: not scored yet.
export function colorOf(state, score) {
  const share = Math.round((100 * level(state, score)) / 6);
  return score === null ? 'var(--muted)' : `color-mix(in oklch, var(--low), var(--high) ${share}%)`;
}
