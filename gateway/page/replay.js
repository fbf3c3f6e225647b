// Records of requests as events, and a player of events.

import { initial, reduce } from './reduce.js';

const STRIDES = 24; // progress events of a round

// The events of a record, as the stream had them: without texts, and with evenly spread progress.
export function eventsOf(record) {
  const rounds = record.rounds;
  const begun = record.opened_at_ms ?? rounds[0]?.start_ms ?? 0;
  const admitted = {
    n: record.n,
    prompt_tokens: record.prompt_tokens,
    request_id: record.request_id,
  };
  const events = record.n ? [{ at: begun, name: 'admitted', data: admitted }] : [];
  let token = 0,
    slots = record.prompt_tokens,
    at = begun;
  for (const { start_ms: start, trace } of rounds) {
    const grown = trace.decision_token - token;
    const stride = Math.max(1, Math.ceil(grown / STRIDES));
    for (let step = stride; step < grown; step += stride) {
      const share = step / grown;
      const session = Math.round(slots + (trace.session_slots - slots) * share);
      const data = {
        num_tokens: token + step,
        num_live: trace.num_started,
        session_slots: session,
      };
      events.push({
        at: start + trace.extend_ms * share,
        name: 'progress',
        data: { ...data, capacity_slots: trace.capacity_slots },
      });
    }
    at = start + trace.extend_ms + trace.score_ms + trace.prune_ms;
    const kept = trace.candidates.filter((traced) => traced.fate === 'CANDIDATE_FATE_KEPT');
    const survivors = kept.map((traced) => traced.candidate_id);
    events.push({ at, name: 'round_completed', data: { round: trace, survivors, best_text: '' } });
    token = trace.decision_token;
    slots = trace.session_slots - trace.freed_slots;
  }
  return [...events, ...ending(record, Math.max(at, record.elapsed_ms))];
}

function ending(record, at) {
  if (record.outcome === 'OK' && record.usage) {
    const best = {
      candidate_id: record.answer_candidate_id,
      score: record.score,
      num_tokens: record.usage.answer_tokens,
    };
    const data = {
      candidates: [best],
      rounds: [],
      usage: record.usage,
      n: record.n,
      request_id: record.request_id,
      timings: { total_ms: record.elapsed_ms },
      hurried: record.hurried,
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
    this.isPlaying = false;
    const stops = [
      ...new Set(
        this.events
          .filter((event) => !['progress', 'text_delta'].includes(event.name))
          .map((event) => event.at),
      ),
    ];
    const next =
      direction > 0 ? stops.find((at) => at > this.time) : stops.findLast((at) => at < this.time);
    this.seek(next ?? (direction > 0 ? this.end : 0));
  }
}
