// Events of a request to the state that is drawn. Pure: no DOM, no clock, no network.

export const DENSE = 128; // lanes; above there is the density view

const FATE = 'CANDIDATE_FATE_';

export const initial = () => ({
  phase: 'waiting', // running, finished, failed or stopped
  id: '',
  n: 0,
  promptTokens: 0,
  lanes: [], // {id, row, wave, parent, from, tokens, fate, scores: [{round, token, score}], text}
  numRows: 0,
  rounds: [], // traces, as the service sends them
  wave: 1,
  position: 0, // tokens of every live lane
  reach: 0, // tokens of the longest lane
  numLive: 0,
  grown: 0, // tokens of the round that runs, at least
  slots: [], // {at, session}; `at` in ms
  capacity: 0,
  cuts: [], // that divide the rewards so far into seven equal parts
  best: null,
  bestText: '',
  answer: '',
  parts: null, // {content, reasoning, tool_calls} of an answer that has parts
  isCertain: false,
  winner: null,
  hasChecks: false, // whether a reward is a verifier
  stopAt: null,
  stoppedBy: '',
  votes: [], // {answer, share, count}
  numDistinct: 0,
  usage: null,
  totalMs: null,
  flags: [],
  error: '',
});

export const isLive = (lane) => !lane.isHalted && ['', 'kept'].includes(lane.fate);
export const tokensOf = (state, lane) => (isLive(lane) ? state.position : lane.tokens);
export const scoreOf = (lane) => lane.scores.at(-1)?.score ?? null;

// The next state; `event` is {at, name, data}, with `at` in ms since the request was sent.
export function reduce(state, { at, name, data }) {
  switch (name) {
    case 'admitted':
      return admitted(state, data);
    case 'progress': {
      const now = state.rounds.length && !state.numLive ? nextWave(state) : state;
      return {
        ...now,
        position: Math.max(now.position, data.num_tokens),
        reach: Math.max(now.reach, data.num_tokens),
        numLive: data.num_live,
        grown: now.grown + Math.max(0, data.num_tokens - now.position) * data.num_live,
        slots: [...now.slots, { at, session: data.session_slots }],
        capacity: data.capacity_slots || now.capacity,
      };
    }
    case 'round_completed':
      return round(state, at, data);
    case 'text_delta':
      return certain(state, data);
    case 'finished':
      return finished(state, at, data);
    case 'error':
      return halted(state, 'failed', data.error?.message ?? String(data));
    case 'ended': {
      const isWhole = ['finished', 'failed'].includes(state.phase);
      return isWhole ? state : halted(state, 'failed', 'It ended without an answer.');
    }
    case 'stopped':
      return halted(state, 'stopped', '');
    default:
      return state;
  }
}

function certain(state, { candidate_id: winner, text, parts }) {
  const answer = state.answer + text;
  return { ...state, isCertain: true, winner, answer, parts: grown(state.parts, parts) };
}

// Each call is in one delta.
function grown(parts, delta) {
  if (!delta || !parts) return delta ?? parts;
  return {
    content: parts.content + delta.content,
    reasoning: parts.reasoning + delta.reasoning,
    tool_calls: [...parts.tool_calls, ...delta.tool_calls],
  };
}

// What the answer says, and a line for each call.
export function shown({ answer, parts }) {
  const calls = parts?.tool_calls.map((call) => `${call.name}(${call.arguments})`);
  return parts ? [parts.content, ...calls].join('\n') : answer;
}

// End the live lanes where they are: `isHalted` is set, `fate` stays as the service sent it.
function halted(state, phase, error) {
  const end = (old) => (isLive(old) ? { ...old, tokens: state.position, isHalted: true } : old);
  return { ...state, phase, error, numLive: 0, lanes: state.lanes.map(end) };
}

// `data` has what `Run.take` adds: waves, stop_at, hasChecks.
function admitted(state, data) {
  const { n, prompt_tokens: promptTokens } = data;
  const numFirst = Math.min(n, data.waves || n);
  const lanes = Array.from({ length: numFirst }, (_, id) => lane(id, id));
  const stopAt = data.stop_at ?? null;
  const hasChecks = Boolean(data.hasChecks) || stopAt !== null;
  const begun = { phase: 'running', id: data.request_id || state.id, n, promptTokens };
  // A request that has lost its generator is admitted again, and its rounds begin again.
  const counts = { numRows: numFirst, numLive: numFirst, rounds: [], wave: 1 };
  return { ...state, ...begun, ...counts, stopAt, hasChecks, lanes };
}

// As many candidates as there are, up to n, begin at token 0.
function nextWave(state) {
  const { n, lanes } = state,
    wave = state.wave + 1,
    numLive = Math.min(lanes.length, n - lanes.length),
    ids = Array.from({ length: numLive }, (_, index) => lanes.length + index),
    added = ids.map((id) => ({ ...lane(id, id), wave }));
  const all = [...lanes, ...added];
  return { ...state, wave, numLive, lanes: all, numRows: all.length, position: 0 };
}

const lane = (id, row, from = 0) => {
  return { id, row, wave: 1, parent: null, from, tokens: from, fate: '', scores: [], text: '' };
};

function round(before, at, { round: trace, survivors, best_text: bestText, texts }) {
  const state = (trace.wave || 1) > before.wave ? nextWave(before) : before;
  const known = new Map(trace.candidates.map((traced) => [traced.candidate_id, traced]));
  const written = new Map((texts ?? []).map((item) => [item.candidate_id, item.text]));
  const hasLive = survivors?.length || !trace.num_live;
  const live = new Set(hasLive ? survivors : state.lanes.map(({ id }) => id));
  const lanes = state.lanes.map((old) => {
    if (!isLive(old)) return old;
    const traced = known.get(old.id);
    // A round of very many candidates is without them; what waited for a reader without survivors.
    const isKept = live.has(old.id);
    const fate = traced?.fate.slice(FATE.length).toLowerCase() ?? (isKept ? 'kept' : 'rejected');
    const tokens = (fate === 'finished' && traced?.num_tokens) || trace.decision_token;
    const score = { round: trace.number, token: tokens, score: traced?.score };
    const scores = traced ? [...old.scores, score] : old.scores;
    // Once the text is certain, only its parts are sent.
    const text = written.get(old.id) ?? (old.id === state.winner ? state.answer : old.text);
    return { ...old, fate, tokens, scores, text };
  });
  const numRows = addForks(lanes, trace, state.numRows);
  const all = lanes.flatMap((each) => each.scores.map(({ score }) => score)).sort((a, b) => a - b);
  const cuts = [1, 2, 3, 4, 5, 6].map((part) => all[Math.floor((part * all.length) / 7)]);
  const after = trace.session_slots - trace.freed_slots;
  return {
    ...state,
    lanes,
    numRows,
    rounds: [...state.rounds, trace],
    position: Math.max(state.position, trace.decision_token),
    reach: Math.max(state.reach, trace.decision_token),
    numLive: trace.num_live,
    grown: 0,
    slots: [...state.slots, { at, session: trace.session_slots }, { at, session: after }],
    capacity: trace.capacity_slots || state.capacity,
    cuts,
    best: trace.best_score,
    bestText: bestText || state.bestText,
  };
}

// A fork goes on in the nearest row that rejection has freed, else in a new one.
function addForks(lanes, trace, numRows) {
  const byId = new Map(lanes.map((each) => [each.id, each]));
  const taken = new Set(
    lanes.filter((each) => !['rejected', 'vetoed'].includes(each.fate)).map((each) => each.row),
  );
  const free = new Set(lanes.map((each) => each.row).filter((row) => !taken.has(row)));
  for (const { candidate_id: id, parent_id: parentId } of trace.forks) {
    const parent = byId.get(parentId);
    if (!parent) continue;
    const near = [...free].sort((a, b) => Math.abs(a - parent.row) - Math.abs(b - parent.row))[0];
    free.delete(near);
    const begun = lane(id, near ?? numRows++, trace.decision_token);
    const made = { ...begun, parent: parentId, fate: 'kept', text: parent.text };
    lanes.push(made);
    byId.set(id, made);
  }
  return numRows;
}

function finished(state, at, data) {
  let reached = state;
  if (!state.lanes.length && data.rounds.length) {
    // From the cache, or of an equal request: the rounds of the run that made the answer.
    const more = { prompt_tokens: data.usage.prompt_tokens, waves: data.rounds[0].num_started };
    reached = admitted(state, { ...data, ...more });
    for (const trace of data.rounds) reached = round(reached, at, { round: trace });
  }
  const best = data.candidates[0];
  const lanes = reached.lanes.map((old) =>
    old.id === best.candidate_id
      ? {
          ...old,
          fate: 'winner',
          tokens: best.num_tokens,
          text: best.text ?? old.text,
          isCut: best.finish_reason === 'FINISH_REASON_LENGTH',
        }
      : old,
  );
  return {
    ...halted({ ...reached, lanes }, 'finished', ''), // a hurried answer leaves lanes that grow
    id: data.request_id || state.id,
    winner: best.candidate_id,
    best: best.score,
    isCertain: true,
    answer: best.text ?? state.answer,
    parts: best.parts ?? null,
    stoppedBy: (data.stopped_by ?? '').replace(/^STOP_REASON_(UNSPECIFIED)?/, ''),
    votes: data.votes ?? [],
    numDistinct: data.num_distinct ?? 0,
    usage: data.usage,
    totalMs: data.timings.total_ms,
    flags: ['cached', 'degraded', 'hurried', 'reduced'].filter((flag) => data[flag]),
  };
}

// Tokens made, and those that Best-of-N of the same N would have made: during the run as if no
// candidate had been rejected so far, at its end the service's estimate.
export function cost(state) {
  if (state.usage) {
    const { generated_tokens: made, best_of_n_tokens_estimate: others } = state.usage;
    return { made, others, isFinal: true };
  }
  const made = state.rounds.reduce((sum, trace) => sum + trace.generated_tokens, state.grown);
  const own = state.lanes.filter(({ parent }) => parent === null);
  const ends = own.map(({ fate, tokens }) => (fate === 'finished' ? tokens : state.reach));
  return { made, others: ends.reduce((sum, end) => sum + end, 0), isFinal: false };
}

// In which seventh of the rewards so far a score lies: 0, the lowest, to 6.
export function level({ cuts }, score) {
  return score === null ? null : cuts.filter((cut) => cut <= score).length;
}
