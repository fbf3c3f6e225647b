// A player of events.

import { initial, reduce } from './reduce.js';

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
