// Records of requests as events, and a player of events.

import { initial, reduce } from './reduce.js';

const STRIDES = 24; // progress events of a round

// The events of a record, as the stream had them: without texts, and with evenly spread progress.
export function eventsOf(record) {
  const { rounds } = record;
  let token = 0;
  let slots = record.prompt_tokens;
  let at = record.opened_at_ms ?? rounds[0]?.start_ms ?? 0;
  const events = record.n ? [{ at, name: 'admitted', data: record }] : [];
  let wave = 1;
  for (const { start_ms: start, trace } of rounds) {
    if (trace.wave > wave) token = 0;
    wave = trace.wave ?? 1;
    const grown = trace.decision_token - token;
    const stride = Math.max(1, Math.ceil(grown / STRIDES));
    for (let step = stride; step < grown; step += stride) {
      const share = step / grown;
      const session_slots = Math.round(slots + (trace.session_slots - slots) * share);
      const reached = { num_tokens: token + step, num_live: trace.num_started };
      const data = { ...reached, session_slots, capacity_slots: trace.capacity_slots };
      events.push({ at: start + trace.extend_ms * share, name: 'progress', data });
    }
    at = start + trace.extend_ms + trace.score_ms + trace.prune_ms;
    events.push({ at, name: 'round_completed', data: { round: trace } });
    token = trace.decision_token;
    slots = trace.session_slots - trace.freed_slots;
  }
  return [...events, ...ending(record, Math.max(at, record.elapsed_ms))];
}

function ending(record, at) {
  if (record.outcome === 'OK' && record.usage) {
    const { answer_candidate_id: candidate_id, score, usage } = record;
    const data = {
      ...record,
      candidates: [{ candidate_id, score, num_tokens: usage.answer_tokens }],
      timings: { total_ms: record.elapsed_ms },
      degraded: record.degradations.length > 0,
      cached: ['ANSWER_SOURCE_CACHE', 'ANSWER_SOURCE_FLIGHT'].includes(record.source),
    };
    return [{ at, name: 'finished', data }];
  }
  if (!record.outcome) return [];
  if (record.outcome === 'CANCELLED') return [{ at, name: 'stopped', data: {} }];
  return [{ at, name: 'error', data: { error: { message: record.outcome } } }];
}

// Plays events against a clock that the caller advances. `state` follows `time`, in ms.
export class Player {
  constructor(events) {
    this.events = events;
    this.speed = 1;
    this.isPlaying = false;
    this.end = events.at(-1)?.at ?? 0;
    this.seek(0);
  }

  // Forwards or backwards; backwards starts over.
  seek(time) {
    if (this.time === undefined || time < this.time) {
      this.state = initial();
      this.index = 0;
    }
    this.time = Math.min(Math.max(0, time), this.end);
    while (this.index < this.events.length && this.events[this.index].at <= this.time) {
      this.state = reduce(this.state, this.events[this.index++]);
    }
  }

  advance(elapsed) {
    if (!this.isPlaying) return;
    this.seek(this.time + elapsed * this.speed);
    if (this.time >= this.end) this.isPlaying = false;
  }

  // To the next or the previous event that is not progress; `direction` is 1 or -1.
  step(direction) {
    const isStop = ({ name }) => !['progress', 'text_delta'].includes(name);
    const stops = this.events.filter(isStop).map(({ at }) => at);
    const before = stops.findLast((at) => at < this.time) ?? 0;
    this.stop(direction < 0 ? before : (stops.find((at) => at > this.time) ?? this.end));
  }

  // Pause at a time.
  stop(time) {
    this.isPlaying = false;
    this.seek(time);
  }
}
