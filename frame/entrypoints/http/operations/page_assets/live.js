// Plots of the last minutes, made of what the server says once a second. Knows no other view.
import { drawn, element, count } from "./elements.js";

const POINTS = 300, FEWEST = 60; // seconds that a plot shows: as many as there are samples, within these
const WIDTH = 600, HEIGHT = 160;

// title, series (label, value of a sample), smallest top of the axis
const PLOTS = [
  { title: "Requests", series: [["running", (s) => s.running], ["waiting", (s) => s.waiting]], least: 4 },
  { title: "Tokens a second", series: [["generated", (s) => s.generated], ["prompt", (s) => s.prompt], ["from the cache", (s) => s.cached]], least: 10 },
  { title: "KV cache, pages", series: [["in use", (s) => s.used], ["in use or cached", (s) => s.used + s.evictable]], least: 1, top: (s) => s.pages },
  { title: "Steps a second", series: [["steps", (s) => s.steps]], least: 10 },
];

const TILES = [
  ["running", (s) => count(s.running)],
  ["waiting", (s) => count(s.waiting)],
  ["tokens/s", (s) => count(s.generated)],
  ["of the KV cache in use", (s) => percent(s.used, s.pages)],
  ["of prompt tokens cached", (s) => percent(s.allCached, s.allPrompt)],
  ["requests finished", (s) => count(s.finished)],
  ["refused", (s) => count(s.rejected)],
  ["preempted", (s) => count(s.preempted)],
  ["of drafts accepted, by position", (s) => s.drafts ? `${s.acceptedAt.map((rows) => count((100 * rows) / s.drafts)).join(" · ")} %` : "–"],
];

function percent(part, whole) {
  const share = (100 * part) / Math.max(1, whole);
  return `${share > 0 && share < 10 ? share.toFixed(1) : count(share)} %`;
}

function sampleOf(state, last) {
  const load = state.load ?? {};
  const seconds = last ? Math.max(0.001, state.time - last.time) : 1;
  const rate = (now, before) => (last ? Math.max(0, now - before) / seconds : 0);
  return {
    running: load.running ?? 0,
    waiting: load.waiting ?? 0,
    used: load.used_pages ?? 0,
    evictable: load.evictable_pages ?? 0,
    pages: load.total_pages ?? 0,
    preempted: load.preempted ?? 0,
    drafts: load.num_drafts ?? 0,
    acceptedAt: load.accepted_at ?? [],
    generated: rate(state.generated_tokens, last?.generated_tokens),
    prompt: rate(state.prompt_tokens, last?.prompt_tokens),
    cached: rate(state.cached_tokens, last?.cached_tokens),
    steps: rate(load.step ?? 0, last?.load?.step ?? 0),
    allPrompt: state.prompt_tokens,
    allCached: state.cached_tokens,
    finished: Object.values(state.finished).reduce((sum, value) => sum + value, 0),
    rejected: state.rejected,
  };
}

class Plot {
  constructor(plan) {
    this.plan = plan;
    this.values = plan.series.map(() => element("b"));
    this.lines = plan.series.map((_, place) => drawn("path", { class: `s${place}` }));
    this.areas = plan.series.map((_, place) => drawn("path", { class: `area s${place}` }));
    this.top = element("span");
    this.since = element("span");
    const grid = [0.25, 0.5, 0.75].map((part) => drawn("line", { x1: 0, x2: WIDTH, y1: HEIGHT * part, y2: HEIGHT * part }));
    const legend = plan.series.map(([label], place) => element("span", {}, element("span", { class: `legend s${place}` }, `${label} `), this.values[place]));
    this.node = element("div", { class: "card plot" },
      element("h3", {}, element("b", {}, plan.title), ...legend),
      drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": plan.title }, ...grid, ...this.areas, ...this.lines),
      element("div", { class: "axis" }, this.since, this.top, element("span", {}, "now")));
  }

  draw(samples) {
    const { series, least, top } = this.plan;
    const last = samples.at(-1);
    const values = series.map(([, read]) => samples.map(read));
    const highest = Math.max(least, top ? top(last) : 0, ...values.flat());
    const shown = Math.max(FEWEST, samples.length) - 1;
    this.top.textContent = `top: ${count(highest)}`;
    this.since.textContent = shown < 120 ? `${shown + 1} s ago` : `${count(shown / 60)} minutes ago`;
    values.forEach((points, place) => {
      const start = WIDTH * (1 - (points.length - 1) / shown);
      const path = points.map((value, at) => `${(start + (at * WIDTH) / shown).toFixed(1)},${(HEIGHT * (1 - value / highest)).toFixed(1)}`);
      this.lines[place].setAttribute("d", `M${path.join("L")}`);
      this.areas[place].setAttribute("d", `M${start.toFixed(1)},${HEIGHT}L${path.join("L")}L${WIDTH},${HEIGHT}Z`);
      this.values[place].textContent = count(points.at(-1));
    });
  }
}

export function startLive() {
  const plots = PLOTS.map((plan) => new Plot(plan));
  document.getElementById("plots").append(...plots.map((plot) => plot.node));
  const shown = TILES.map(([label]) => element("b", {}, "–"));
  document.getElementById("tiles").append(...TILES.map(([label], place) => element("div", { class: "card tile" }, shown[place], element("span", {}, label))));
  const samples = [];
  let last = null;
  return {
    take(state) {
      if (samples.length === 1 && samples[0].isFirst) samples.pop(); // it could not know how fast anything was
      samples.push({ ...sampleOf(state, last), isFirst: last === null });
      last = state;
      if (samples.length > POINTS) samples.shift();
      TILES.forEach(([, read], place) => { shown[place].textContent = read(samples.at(-1)); });
      for (const plot of plots) plot.draw(samples);
    },
  };
}
