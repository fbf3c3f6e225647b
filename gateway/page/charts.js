// Line charts by uPlot, in the page's colors.

import { set } from './dom.js';

/* global uPlot */

const HEIGHT = 168;
const PAUSE_MS = 80; // between two drawings

// Register the colors, so that computed styles contain resolved values, which canvases need.
for (const color of ['accent', 'wash', 'gold', 'bad', 'muted', 'line', 'panel']) {
  const name = `--${color}`;
  CSS.registerProperty({ name, syntax: '<color>', inherits: true, initialValue: 'gray' });
}

export class Chart extends HTMLElement {
  #timer = 0;

  connectedCallback() {
    if (this.plot) return;
    this.host = this.querySelector('.plot');
    const kind = KINDS[this.className];
    const ink = (name) => name && (() => getComputedStyle(this).getPropertyValue(`--${name}`));
    const axis = (values, sizes) => ({
      ...sizes,
      values: (_, ticks) => ticks.map(values),
      stroke: ink('muted'),
      grid: { stroke: ink('line'), width: 1 },
      ticks: { show: false },
    });
    const lines = kind.series.map(({ stroke, fill, dash, dot }) => ({
      stroke: ink(stroke),
      fill: ink(fill),
      dash,
      width: 1.75,
      spanGaps: true,
      paths: dot && (() => null),
      points: { show: Boolean(dot), size: 6, fill: ink(dot) },
    }));
    const options = {
      width: 300,
      height: HEIGHT,
      legend: { show: false },
      cursor: { show: false },
      scales: { x: { time: false }, y: { range: (_, low, high) => kind.range(low, high) } },
      axes: [axis(kind.x, { incrs: kind.incrs, size: 26 }), axis(kind.y, {})],
      series: [{}, ...lines],
    };
    this.plot = new uPlot(options, [[], ...lines.map(() => [])], this.host);
    new ResizeObserver(([{ contentRect }]) => {
      this.plot.setSize({ width: Math.max(160, contentRect.width), height: HEIGHT });
    }).observe(this.host);
    const isDark = matchMedia('(prefers-color-scheme: dark)');
    isDark.addEventListener('change', () => this.plot.redraw());
  }

  // `data`: x and the values of each series; `summary` is the picture in words.
  show(data, summary) {
    this.data = data;
    set(this.host, { 'aria-label': `${this.firstElementChild.textContent}: ${summary}` });
    this.#timer ||= setTimeout(() => {
      this.#timer = 0;
      this.plot.setData(this.data);
    }, PAUSE_MS);
  }
}

const fromZero = (_, high) => [0, 1.08 * (high || 1)];
const short = (value) => (value >= 1e4 ? `${value / 1e3}k` : String(value));
const ago = (value) => (value ? `${value} s` : 'now');

const OVER_TIME = { range: fromZero, x: ago, y: short, incrs: [0.1, 0.5, 1, 5, 10, 30, 60, 300] };
const FILLED = { stroke: 'accent', fill: 'wash' };

const KINDS = {
  slots: { ...OVER_TIME, series: [FILLED, { stroke: 'muted', dash: [4, 4] }] },
  rewards: {
    range: around,
    incrs: [1, 2, 5, 10, 20, 50],
    x: String,
    y: (value) => value.toFixed(2),
    series: [
      { stroke: 'bad', dot: 'panel' },
      { stroke: 'accent', dot: 'accent' },
      { stroke: 'gold' },
    ],
  },
};

function around(low, high) {
  if (low === null || high === null) return [0, 1];
  const margin = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  return [low - margin, high + margin];
}

customElements.define('specrej-chart', Chart);
