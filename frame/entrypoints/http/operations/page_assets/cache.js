// The prefix cache drawn: one bar a run of tokens, at its place in its prompts, its continuations to the right. Knows no other view.
import { askJson } from "./page.js";
import { addTips, byId, count, drawn, element, percent, plural, table } from "./elements.js";

const ROW = 24, TOP = 22, WIDTH = 1200, MIN_BAR = 3;
const ORDER = { age: (run) => run.age, hits: (run) => -run.hits, tokens: (run) => -(run.start + run.tokens), locks: (run) => -run.locks };

// The runs as a tree: those that match, what they continue and what continues them, no deeper than `depth` (0: any), best first.
function choose(runs, { text, tenant, depth, sort }) {
  const behind = runs.map(() => []);
  const roots = [];
  runs.forEach((run, at) => (run.parent < 0 ? roots : behind[run.parent]).push(at));
  const isOwn = (run) => tenant === "" || String(run.namespace) === tenant;
  const best = new Map();
  const boxes = runs.map(() => null);
  function rank(at) {
    if (!best.has(at)) best.set(at, Math.min(ORDER[sort](runs[at]), ...behind[at].map(rank)));
    return best.get(at);
  }
  const matches = (at) => isOwn(runs[at]) && runs[at].text.toLowerCase().includes(text);
  const holds = (at) => matches(at) || behind[at].some(holds);
  let row = 0, deepest = 0;
  function place(at, level, isBelow) {
    deepest = Math.max(deepest, level);
    const from = row;
    const isMatch = isBelow || matches(at);
    if (depth === 0 || level < depth) {
      for (const next of behind[at].filter((each) => isMatch || holds(each)).sort((a, b) => rank(a) - rank(b))) place(next, level + 1, isMatch);
    }
    if (row === from) row += 1;
    boxes[at] = { from, rows: row - from };
  }
  for (const root of roots.filter(holds).sort((a, b) => rank(a) - rank(b))) place(root, 1, false);
  return { boxes, rows: row, deepest };
}

function describe(run) {
  return [
    `tokens ${count(run.start)} to ${count(run.start + run.tokens)}`,
    run.locks ? `in use by ${plural(run.locks, "request")}` : "not in use",
    `used ${plural(run.hits, "time")}, last ${count(run.age)} accesses ago`,
    ...Object.entries(run.groups).map(([group, pages]) => `${group}: ${plural(pages, "page")}`),
    run.tenant ? `tenant ${run.tenant}` : null,
    run.hidden ? `${count(run.hidden)} further continuations are not drawn` : null,
  ].filter(Boolean);
}

function scale(longest, x, height) {
  const step = 10 ** Math.floor(Math.log10(Math.max(1, longest)));
  const marks = [];
  for (let at = 0; at <= longest; at += longest / step < 3 ? step / 2 : step) {
    const anchor = x(at) > WIDTH - 40 ? "end" : "start"; // what begins at the edge would be cut off
    marks.push(drawn("text", { x: x(at), y: 12, class: "scale", "text-anchor": anchor }, count(at)), drawn("line", { x1: x(at), x2: x(at), y1: TOP - 6, y2: height, stroke: "var(--line)" }));
  }
  return marks;
}

const nameOf = (run) => run.tenant || (run.namespace ? `namespace ${run.namespace}` : "without a tenant");

function summarize(runs) {
  const tenants = new Map();
  for (const run of runs) {
    const sum = tenants.get(run.namespace) ?? { name: nameOf(run), runs: 0, tokens: 0, used: 0, hits: 0 };
    sum.runs += 1;
    sum.tokens += run.tokens;
    sum.used += run.locks ? run.tokens : 0;
    sum.hits += run.hits;
    tenants.set(run.namespace, sum);
  }
  return [...tenants].sort(([, a], [, b]) => b.tokens - a.tokens);
}

export function startCache() {
  const tree = byId("tree");
  let data = { runs: [], page_size: 0 };
  const controls = ["cache-find", "cache-sort", "cache-depth", "cache-tenant"].map(byId);
  addTips(tree, "rect", (bar) => {
    const run = data.runs[Number(bar.dataset.run)];
    return [...describe(run), run.text ? element("code", {}, `${run.text}…`) : ""];
  });

  function draw() {
    const runs = data.runs;
    const [text, sort, depth, tenant] = controls.map((control) => control.value);
    const { boxes, rows } = choose(runs, { text: text.trim().toLowerCase(), sort, depth: Number(depth), tenant });
    const shown = runs.filter((_, at) => boxes[at]);
    const longest = Math.max(1, ...shown.map((run) => run.start + run.tokens));
    const oldest = Math.max(1, ...runs.map((run) => run.age));
    const x = (token) => (token / longest) * WIDTH;
    const height = TOP + rows * ROW + 4;
    const bars = runs.map((run, at) => {
      const box = boxes[at];
      if (!box) return null;
      const width = Math.max(MIN_BAR, x(run.tokens));
      const shape = { x: x(run.start), y: TOP + box.from * ROW, width, height: box.rows * ROW - 3, rx: 3, "data-run": at, class: run.locks ? "used" : "" };
      const bar = drawn("rect", { ...shape, opacity: run.locks ? 1 : 0.25 + 0.6 * (1 - run.age / oldest) });
      const room = Math.floor((width - 10) / 7.3);
      const words = run.text ? run.text.replace(/\s+/g, " ") : count(run.tokens);
      const label = room > 3 ? drawn("text", { x: x(run.start) + 6, y: TOP + box.from * ROW + 15 }, words.length > room ? `${words.slice(0, room - 1)}…` : words) : null;
      return drawn("g", {}, bar, label);
    });
    const label = `the prefix cache as a tree of ${plural(shown.length, "run")}; the arrow keys move among them`;
    tree.replaceChildren(...(shown.length ? [drawn("svg", { viewBox: `0 0 ${WIDTH + 2} ${height}`, "aria-hidden": "true" }, ...scale(longest, x, height), ...bars)] : []));
    tree.setAttribute("aria-label", label);
    const tokens = shown.reduce((sum, run) => sum + run.tokens, 0);
    const used = shown.reduce((sum, run) => sum + (run.locks ? run.tokens : 0), 0);
    const groups = Object.keys(runs[0]?.groups ?? {}).map((group) => `; ${group}: ${plural(shown.reduce((sum, run) => sum + run.groups[group], 0), "page")}`);
    byId("cache-summary").textContent = !runs.length ? "Nothing is cached. Once a request has been served, its tokens are kept here until room is needed."
      : !shown.length ? "No cached run matches."
        : `${plural(shown.length, "run")} shown, ${plural(tokens, "token")}, ${count(used)} of them in use; pages of ${plural(data.page_size, "token")}${groups.join("")}`;
  }

  function drawTenants() {
    const tenants = summarize(data.runs);
    const select = byId("cache-tenant");
    const chosen = select.value;
    byId("cache-tenant-label").hidden = tenants.length < 2;
    select.replaceChildren(element("option", { value: "" }, "all"), ...tenants.map(([number, { name }]) => element("option", { value: number }, name)));
    select.value = tenants.some(([number]) => String(number) === chosen) ? chosen : "";
    const total = tenants.reduce((sum, [, each]) => sum + each.tokens, 0);
    const rows = tenants.map(([, each]) => [each.name, count(each.runs), count(each.tokens), percent(each.tokens, total), count(each.used), count(each.hits)]);
    byId("cache-tenants").replaceChildren(rows.length ? element("div", { class: "scroll" }, table(["Tenant", "Runs", "Tokens", "Share", "In use", "Uses"], rows, { class: "figures" })) : "");
  }

  for (const control of controls) control.addEventListener("input", draw);
  let before = "";
  return {
    async refresh() {
      const next = await askJson("/page/cache.json");
      const text = JSON.stringify(next);
      if (text === before) return;
      [before, data] = [text, next];
      tree.toggleAttribute("hidden", data.runs.length === 0);
      drawTenants();
      draw();
    },
  };
}
