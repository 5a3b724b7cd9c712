// The prefix cache drawn: one bar a run of tokens, at its place in its prompts, its continuations to the right. Knows no other view.
import { ask } from "./page.js";
import { drawn, element, count } from "./elements.js";

const ROW = 24, TOP = 22, WIDTH = 1200, MIN_BAR = 3;

// A row for each leaf; a run is as high as its continuations together.
function place(runs) {
  const behind = runs.map(() => []);
  const roots = [];
  runs.forEach((run, at) => (run.parent < 0 ? roots : behind[run.parent]).push(at));
  let row = 0;
  const boxes = runs.map(() => null);
  function walk(at) {
    const from = row;
    for (const next of behind[at]) walk(next);
    if (row === from) row += 1;
    boxes[at] = { from, rows: row - from };
  }
  for (const root of roots) walk(root);
  return { boxes, rows: row };
}

function described(run) {
  return [
    `tokens ${count(run.start)} to ${count(run.start + run.tokens)}`,
    run.locks ? `in use by ${count(run.locks)} request${run.locks > 1 ? "s" : ""}` : "not in use",
    `used ${count(run.hits)} times, last ${count(run.age)} accesses ago`,
    ...Object.entries(run.groups).map(([group, pages]) => `${group}: ${count(pages)} page${pages === 1 ? "" : "s"}`),
    run.hidden ? `${count(run.hidden)} further continuations are not drawn` : null,
  ].filter(Boolean);
}

function tip() {
  const node = element("div", { class: "tip", hidden: true });
  document.body.append(node);
  return {
    show(run, x, y) {
      node.replaceChildren(...described(run).map((line) => element("div", {}, line)), run.text ? element("code", {}, run.text + "…") : "");
      node.hidden = false;
      node.style.left = `${Math.min(x + 14, innerWidth - node.offsetWidth - 12)}px`;
      node.style.top = `${Math.min(y + 14, innerHeight - node.offsetHeight - 12)}px`;
    },
    hide() { node.hidden = true; },
  };
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

export function startCache() {
  const tree = document.getElementById("tree");
  const summary = document.getElementById("cache-summary");
  const hint = tip();

  function draw(data) {
    const runs = data.runs;
    const longest = Math.max(1, ...runs.map((run) => run.start + run.tokens));
    const oldest = Math.max(1, ...runs.map((run) => run.age));
    const { boxes, rows } = place(runs);
    const x = (token) => (token / longest) * WIDTH;
    const height = TOP + rows * ROW + 4;
    const bars = runs.map((run, at) => {
      const box = boxes[at];
      const width = Math.max(MIN_BAR, x(run.tokens));
      const shape = { x: x(run.start), y: TOP + box.from * ROW, width, height: box.rows * ROW - 3, rx: 3, tabindex: 0, "data-tokens": run.tokens };
      const bar = drawn("rect", { ...shape, class: run.locks ? "used" : "", opacity: run.locks ? 1 : 0.25 + 0.6 * (1 - run.age / oldest) }, drawn("title", {}, described(run).join("; ")));
      bar.addEventListener("pointermove", (event) => hint.show(run, event.clientX, event.clientY));
      bar.addEventListener("pointerleave", hint.hide);
      const room = Math.floor((width - 10) / 7.3);
      const words = run.text ? run.text.replace(/\s+/g, " ") : count(run.tokens);
      const label = room > 3 ? drawn("text", { x: x(run.start) + 6, y: TOP + box.from * ROW + 15 }, words.length > room ? `${words.slice(0, room - 1)}…` : words) : null;
      return drawn("g", {}, bar, label);
    });
    tree.replaceChildren(drawn("svg", { viewBox: `0 0 ${WIDTH + 2} ${height}`, role: "img", "aria-label": "the prefix cache as a tree" }, ...scale(longest, x, height), ...bars));
    const tokens = runs.reduce((sum, run) => sum + run.tokens, 0);
    const used = runs.reduce((sum, run) => sum + (run.locks ? run.tokens : 0), 0);
    const groups = Object.keys(runs[0].groups).map((group) => `; ${group}: ${count(runs.reduce((sum, run) => sum + run.groups[group], 0))} pages`);
    summary.textContent = `${count(runs.length)} runs shown, ${count(tokens)} tokens, ${count(used)} of them in use; pages of ${count(data.page_size)} tokens${groups.join("")}`;
  }

  let before = "";
  return {
    async refresh() {
      const text = await (await ask("/page/cache.json")).text();
      if (text === before) return;
      before = text;
      const data = JSON.parse(text);
      if (data.runs.length) return draw(data);
      hint.hide();
      tree.replaceChildren();
      summary.textContent = "Nothing is cached. Once a request has been served, its tokens are kept here until room is needed.";
    },
  };
}
