// What the server does: its history in plots, and this moment's requests, tenants, drafts, experts and processes.
import { askJson } from "./page.js";
import { byId, drawn, element, table, meter, tip, count, plural, percent, seconds, bytes } from "./elements.js";

const WIDTH = 600, HEIGHT = 150, CAPACITY = 720;
const PHASES = {
  adapter: "waiting for an adapter", grammar: "waiting for a grammar", queued: "queued", tier: "waiting for a cache tier", media: "waiting for media",
  prefill: "prefill", decode: "decode", preempted: "preempted",
};
const LATENCY = { text: seconds, least: 0.01 };

// title, series (label, column), the smallest top of the axis, text of a value, top: a column, into: another place, shown only where a value is known
const PLOTS = [
  { title: "Requests", series: [["running", "running"], ["waiting", "waiting"]], least: 4 },
  { title: "Tokens a second", series: [["generated", "generated"], ["prompt", "prompt"], ["cached", "cached"]], least: 10 },
  { title: "Time to first token", series: [["p50", "ttft_p50"], ["p90", "ttft_p90"], ["p99", "ttft_p99"]], ...LATENCY },
  { title: "Inter-token latency", series: [["p50", "itl_p50"], ["p90", "itl_p90"], ["p99", "itl_p99"]], ...LATENCY },
  { title: "KV cache, pages", series: [["in use", "used_pages"], ["cached", "evictable_pages"]], least: 1, top: "total_pages" },
  { title: "Failed, refused and preempted a second", series: [["failed", "failed"], ["refused", "rejected"], ["preempted", "preempted"]], least: 1, text: (value) => value.toFixed(1) },
  { title: "Accepted of drafted tokens", series: [["share", "acceptance"]], least: 1, text: (value) => percent(value, 1), into: "acceptance" },
  { title: "Busiest rank over the mean", series: [["ratio", "imbalance"]], least: 2, text: (value) => value.toFixed(2), into: "imbalance" },
];

const TILES = [
  ["running", (s) => count(s.load?.running ?? 0)],
  ["waiting", (s) => count(s.load?.waiting ?? 0)],
  ["KV cache in use", (s) => percent(s.load?.used_pages ?? 0, s.load?.total_pages ?? 0)],
  ["prompt tokens cached", (s) => percent(s.cached_tokens, s.prompt_tokens)],
  ["time to first token, p50 · p90 · p99", (s) => quantiles(s.latency.ttft), true],
  ["tokens/s", (s, generated) => (generated === null ? "–" : count(generated))],
  ["requests finished", (s) => count(Object.values(s.finished).reduce((sum, value) => sum + value, 0))],
  ["refused", (s) => count(s.rejected)],
  ["preempted", (s) => count(s.load?.preempted ?? 0)],
  ["inter-token latency, p50 · p90 · p99", (s) => quantiles(s.latency.itl), true],
];

function quantiles([p50, p90, p99]) {
  const texts = [p50, p90, p99].map(seconds);
  return texts.every((text) => text.endsWith(" ms")) ? `${texts.map((text) => text.slice(0, -3)).join(" · ")} ms` : texts.join(" · ");
}

class Plot {
  constructor(plan) {
    this.plan = { text: count, ...plan };
    this.values = plan.series.map(() => element("b"));
    this.lines = plan.series.map((_, place) => drawn("path", { class: `s${place}` }));
    this.top = element("span");
    this.since = element("span");
    this.cursor = drawn("line", { y1: 0, y2: HEIGHT, class: "cursor", visibility: "hidden" });
    const grid = [0, 0.25, 0.5, 0.75, 1].map((part) => drawn("line", { x1: 0, x2: WIDTH, y1: HEIGHT * part, y2: HEIGHT * part }));
    const legend = plan.series.map(([label], place) => element("span", {}, element("span", { class: `legend s${place}` }, `${label} `), this.values[place]));
    this.svg = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, ...grid, this.cursor, ...this.lines);
    this.node = element("article", { class: "card plot" },
      element("h2", {}, plan.title), element("p", { class: "legends" }, ...legend), element("div", { class: "area" }, this.top, this.svg),
      element("div", { class: "axis" }, this.since, element("span", {}, "now")));
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => {
      this.cursor.setAttribute("visibility", "hidden");
      tip.hide();
    });
  }

  draw(rows, columns, range) {
    const { series, least, top, text, into } = this.plan;
    const places = series.map(([, name]) => columns.indexOf(name));
    const highest = Math.max(least, top ? rows.at(-1)?.[columns.indexOf(top)] ?? 0 : 0, ...rows.flatMap((row) => places.map((place) => row[place] ?? 0)));
    const end = rows.at(-1)?.[0] ?? 0;
    const x = (row) => WIDTH * (1 - (end - row[0]) / range);
    this.shown = { rows, places, x };
    this.node.hidden = Boolean(into) && rows.every((row) => row[places[0]] === null);
    this.top.textContent = text(highest);
    this.since.textContent = `${range < 120 ? plural(range, "second") : plural(range / 60, "minute")} ago`;
    places.forEach((place, number) => {
      let isOpen = false; // a value that is not known breaks the line
      const path = rows.map((row) => {
        const mark = row[place] === null ? "" : `${isOpen ? "L" : "M"}${x(row).toFixed(1)},${(HEIGHT * (1 - row[place] / highest)).toFixed(1)}${isOpen ? "" : "h.1"}`;
        isOpen = row[place] !== null;
        return mark;
      });
      this.lines[number].setAttribute("d", path.join(""));
      const last = rows.at(-1)?.[place] ?? null;
      this.values[number].textContent = last === null ? "–" : text(last);
    });
    const latest = series.map(([label], number) => `${label} ${this.values[number].textContent}`);
    this.svg.setAttribute("aria-label", `${this.plan.title}: now ${latest.join(", ")}; top of the axis ${this.top.textContent}`);
  }

  point(event) {
    const { rows, places, x } = this.shown;
    if (!rows.length) return;
    const box = this.svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * WIDTH;
    const row = rows.reduce((best, each) => (Math.abs(x(each) - at) < Math.abs(x(best) - at) ? each : best));
    this.cursor.setAttribute("x1", x(row));
    this.cursor.setAttribute("x2", x(row));
    this.cursor.setAttribute("visibility", "visible");
    const values = this.plan.series.map(([label], number) => `${label}: ${row[places[number]] === null ? "–" : this.plan.text(row[places[number]])}`);
    tip.show([new Date(row[0] * 1000).toLocaleTimeString(), ...values], event.clientX, event.clientY);
  }
}

function drawPhases(state) {
  const known = Object.entries(state.phases);
  const total = known.reduce((sum, [, number]) => sum + number, 0);
  const bars = known.filter(([, number]) => number).map(([phase, number]) => drawn("rect", { class: `phase ${phase}`, width: number, height: 1 }));
  bars.reduce((at, bar) => { bar.setAttribute("x", at); return at + Number(bar.getAttribute("width")); }, 0);
  const legend = known.map(([phase, number]) => element("li", { class: number ? "" : "none" }, element("span", { class: `swatch ${phase}` }), `${PHASES[phase] ?? phase} `, element("b", {}, count(number))));
  const label = known.map(([phase, number]) => `${PHASES[phase] ?? phase} ${number}`).join(", ");
  byId("phases").replaceChildren(
    drawn("svg", { class: "stack", viewBox: `0 0 ${Math.max(1, total)} 1`, preserveAspectRatio: "none", role: "img", "aria-label": label }, ...bars),
    element("ul", { class: "phases" }, ...legend));
}

function phaseOf(request) {
  const name = PHASES[request.phase] ?? request.phase;
  const chunk = request.phase === "prefill" ? ` ${count(request.computed)} of ${count(request.prompt)}` : "";
  return element("span", {}, element("span", { class: `swatch ${request.phase}` }), name + chunk, request.preemptions ? `, preempted ${plural(request.preemptions, "time")}` : "");
}

function drawRequests(state) {
  const several = { tenant: state.requests.some((each) => each.tenant), replica: state.replicas.length > 1 };
  const columns = [
    ["Request", (each) => element("code", { title: each.rid }, each.rid || "hidden")],
    several.tenant ? ["Tenant", (each) => each.tenant] : null,
    several.replica ? ["Replica", (each) => count(each.replica)] : null,
    ["Phase", phaseOf], ["Prompt", (each) => count(each.prompt)], ["Cached", (each) => count(each.cached)], ["Output", (each) => count(each.output)],
    ["KV pages", (each) => count(each.pages)], ["Age", (each) => seconds(each.age)],
  ].filter(Boolean);
  const rows = state.requests.map((each) => columns.map(([, read]) => read(each)));
  const total = Object.values(state.phases).reduce((sum, number) => sum + number, 0);
  const note = total > rows.length ? element("p", { class: "hint" }, `The oldest ${count(rows.length)} of ${count(total)}.`) : null;
  const list = element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Requests" }, table(columns.map(([title]) => title), rows, { class: "figures requests" }));
  keepScroll(byId("requests"), ...(rows.length ? [list, note] : [element("p", { class: "hint" }, "No request is in the engine.")]));
}

// New content; a list that was scrolled or has the focus keeps both.
function keepScroll(parent, ...children) {
  const old = parent.querySelector(".scroll");
  const [top, left, isFocused] = [old?.scrollTop ?? 0, old?.scrollLeft ?? 0, old !== null && old === document.activeElement];
  parent.replaceChildren(...children.filter(Boolean));
  const next = parent.querySelector(".scroll");
  if (!next) return;
  next.scrollTo(left, top);
  if (isFocused) next.focus({ preventScroll: true });
}

function drawTenants(state) {
  const load = state.load;
  const total = load?.total_pages ?? 0;
  const rows = state.tenants.map((each) => [
    each.tenant ? element("code", {}, each.tenant) : "requests without a tenant", count(each.running), count(each.waiting), count(each.pages), meter(each.pages / total, `share of the KV cache, ${percent(each.pages, total)}`),
  ]);
  const cached = load ? `${count(load.used_pages)} of ${count(total)} pages are in use, ${count(load.evictable_pages)} more are cached.` : "";
  byId("tenants").replaceChildren(
    rows.length ? table(["Tenant", "Running", "Waiting", "Pages", "Share"], rows, { class: "figures" }) : "",
    element("p", { class: "hint" }, rows.length ? `${cached} A page that several requests share counts for each.` : cached || "No load is known yet."));
}

function drawSpeculation(state) {
  const load = state.load;
  if (!state.drafter) return byId("speculation").replaceChildren(element("p", { class: "hint" }, "No drafter runs (speculative.algorithm)."));
  const drafts = load?.num_drafts ?? 0;
  const positions = (load?.accepted_at ?? []).map((accepted, place) => [`token ${place + 1}`, percent(accepted, drafts), meter(accepted / Math.max(1, drafts), `accepted at position ${place + 1}`)]);
  byId("speculation").replaceChildren(
    element("p", {}, element("code", {}, state.drafter), `: ${percent(load?.accepted_tokens ?? 0, load?.drafted_tokens ?? 0)} of ${count(load?.drafted_tokens ?? 0)} drafted tokens were accepted, `
      + `${drafts ? (1 + load.accepted_tokens / drafts).toFixed(2) : "–"} tokens a step; ${seconds(load?.drafter_seconds ?? 0)} in the drafter.`),
    drafts ? table(["Position", "Accepted", "Share"], positions, { class: "figures" }) : element("p", { class: "hint" }, "Nothing was drafted yet."));
}

function drawExperts(state) {
  const layers = state.expert_imbalance;
  const most = Math.max(2, ...layers);
  const bars = layers.map((value, place) => drawn("rect", { x: place + 0.1, width: 0.8, y: 1 - value / most, height: value / most }));
  const mean = layers.reduce((sum, value) => sum + value, 0) / layers.length;
  byId("experts").replaceChildren(...(layers.length ? [
    element("p", {}, `The busiest rank has ${mean.toFixed(2)} times the mean of tokens, in the worst layer ${Math.max(...layers).toFixed(2)} times; 1.00 is balanced.`),
    drawn("svg", { class: "bars", viewBox: `0 0 ${layers.length} 1`, preserveAspectRatio: "none", role: "img", "aria-label": `load of the busiest rank over the mean, of ${layers.length} layers` }, ...bars),
  ] : [element("p", { class: "hint" }, "Not counted: experts' tokens are counted with parallel.eplb, between ranks that divide them.")]));
}

function drawReplicas(state) {
  const replicas = state.replicas.map((each, number) => [
    count(number), each.state ?? "takes requests", count(each.load?.running ?? 0), count(each.load?.waiting ?? 0), percent(each.load?.used_pages ?? 0, each.load?.total_pages ?? 0),
  ]);
  const processes = state.processes.map((each) => [element("code", {}, each.process), bytes(each.memory), each.device_memory ? bytes(each.device_memory) : "–", count(each.restarts)]);
  byId("replicas").replaceChildren(
    table(["Replica", "State", "Running", "Waiting", "KV in use"], replicas, { class: "figures" }),
    processes.length ? table(["Process", "Memory", "On the device", "Restarts"], processes, { class: "figures" }) : "");
}

let shownAlerts = "";

function drawAlerts(state) {
  const text = JSON.stringify(state.alerts);
  if (text === shownAlerts) return;
  shownAlerts = text;
  byId("alerts").replaceChildren(...state.alerts.map((each) => element("li", { class: each.level }, element("b", {}, each.level === "critical" ? "Critical: " : "Warning: "), each.text)));
}

export function startLive() {
  const plots = PLOTS.map((plan) => new Plot(plan));
  for (const plot of plots) byId(plot.plan.into ?? "plots").append(plot.node);
  const values = TILES.map(() => element("b", {}, "–"));
  byId("tiles").append(...TILES.map(([label, , isWide], place) => element("div", { class: `card tile${isWide ? " wide" : ""}` }, values[place], element("span", {}, label))));
  let rows = [], columns = [], sample = -1, state = null;

  // Samples since the last look: the newest comes with the state, after a pause all are read again.
  async function update() {
    if (state.sample === sample) return;
    if (sample >= 0 && state.sample === sample + 1) {
      rows = [...rows, state.row].slice(-CAPACITY);
      sample = state.sample;
    } else ({ rows, columns, sample } = await askJson("/page/history.json"));
  }

  function draw() {
    byId("no-live").hidden = state !== null || sample !== -2;
    byId("live-content").hidden = state === null;
    if (!state) return;
    const end = rows.at(-1)?.[0] ?? 0;
    const range = Math.min(Number(byId("range").value), Math.max(60, end - (rows[0]?.[0] ?? 0))); // a young server fills the plots too
    const recent = rows.filter((row) => row[0] >= end - range);
    for (const plot of plots) plot.draw(recent, columns, range);
    const generated = rows.at(-1)?.[columns.indexOf("generated")] ?? null;
    TILES.forEach(([, read], place) => { values[place].textContent = read(state, generated); });
    for (const part of [drawAlerts, drawPhases, drawRequests, drawTenants, drawSpeculation, drawExperts, drawReplicas]) part(state);
  }

  byId("range").addEventListener("change", draw);
  return {
    draw,
    // null: this key does not read the load
    async take(next, isShown) {
      if (next === null) {
        [state, sample] = [null, -2];
      } else {
        state = next;
        await update();
      }
      if (isShown) draw();
    },
  };
}
