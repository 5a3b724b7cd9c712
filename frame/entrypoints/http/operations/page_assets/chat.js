// The playground: a conversation over /v1/chat/completions, with one or two sampling settings, kept in the browser. Knows no other view.
import { ask, headers } from "./page.js";
import { button, byId, copy, copyButton, element } from "./elements.js";
import { AnswerView, emptyAnswer } from "./chat_answer.js";
import { asCurl, asMarkdown, asPython, download } from "./chat_code.js";

const STORE = "frame-chat";
const MAX_STORED = 2_000_000; // characters; the tokens of the oldest answers go first
const SUGGESTIONS = ["Reverse this list:\nriver,stone,moon,tree", "What is 17 + 25?", "Write this list in reverse order:\n4,8,15,16,23,42"];
const FIELDS = [
  ["temperature", "Temperature", { type: "range", min: 0, max: 2, step: 0.1 }, 0],
  ["top_p", "Top-p", { type: "range", min: 0.05, max: 1, step: 0.05 }, 1],
  ["top_k", "Top-k", { type: "number", min: 1, placeholder: "all" }, ""],
  ["max_tokens", "Maximum tokens", { type: "number", min: 1 }, 256],
  ["seed", "Seed", { type: "number", placeholder: "a new one each time" }, ""],
];
const SIDES = ["a", "b"];

function fieldsOf(side, onChange) {
  const inputs = {};
  const nodes = FIELDS.map(([name, title, attributes, value]) => {
    const isRange = attributes.type === "range";
    const id = `${name.replace("_", "-")}${side === "a" ? "" : "-b"}`;
    const input = inputs[name] = element("input", { id, ...attributes });
    input.value = value;
    const shown = isRange ? element("output", { for: id }, String(value)) : null;
    input.addEventListener("input", onChange);
    input.addEventListener("shown", () => { if (shown) shown.textContent = input.value; });
    input.addEventListener("input", () => input.dispatchEvent(new Event("shown")));
    return element("label", {}, element("span", {}, title, " ", shown), input);
  });
  byId(`settings-${side}`).append(element("h2", {}, `Setting ${side.toUpperCase()}`), ...nodes);
  return {
    read: () => Object.fromEntries(FIELDS.map(([name]) => [name, inputs[name].value]).filter(([, value]) => value !== "").map(([name, value]) => [name, Number(value)])),
    write(values) {
      for (const [name, , , value] of FIELDS) {
        inputs[name].value = values[name] ?? (values.temperature === undefined ? value : "");
        inputs[name].dispatchEvent(new Event("shown"));
      }
    },
  };
}

export function startChat(model) {
  const list = byId("messages");
  const settings = Object.fromEntries(SIDES.map((side) => [side, fieldsOf(side, () => save())]));
  let turns = []; // {user, answers: one a side}
  let running = null;

  function sides() {
    return byId("compare").checked ? SIDES : SIDES.slice(0, 1);
  }

  // The request for the answer of a side to turn `at`.
  function bodyOf(side, at) {
    const system = byId("system").value.trim();
    const place = SIDES.indexOf(side);
    const past = turns.slice(0, at + 1).flatMap((turn, number) => {
      const said = (turn.answers[place] ?? turn.answers[0])?.content;
      return [{ role: "user", content: turn.user }, ...(said && number < at ? [{ role: "assistant", content: said }] : [])];
    });
    return {
      model: model.name,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...past],
      ...settings[side].read(),
      ...(byId("logprobs").checked ? { logprobs: true, top_logprobs: 5 } : {}),
      stream: true,
      stream_options: { include_usage: true },
    };
  }

  // stored conversation ----------------------------------------------------------------------------

  function state() {
    return { a: settings.a.read(), b: settings.b.read(), compare: byId("compare").checked, logprobs: byId("logprobs").checked, system: byId("system").value, turns };
  }

  function save() {
    const data = structuredClone(state());
    const answers = data.turns.flatMap((turn) => turn.answers);
    let text = JSON.stringify(data);
    while (text.length > MAX_STORED && answers.length) {
      answers.shift().tokens = [];
      text = JSON.stringify(data);
    }
    try {
      localStorage.setItem(STORE, text);
    } catch { /* no room, or no storage: the conversation lasts as long as the page */ }
  }

  function restore() {
    try {
      const data = JSON.parse(localStorage.getItem(STORE));
      if (!data) return;
      for (const side of SIDES) settings[side].write(data[side]);
      byId("compare").checked = data.compare;
      byId("logprobs").checked = data.logprobs;
      byId("system").value = data.system;
      turns = data.turns.map(({ user, answers }) => ({ user: String(user), answers: answers.map((each) => ({ ...emptyAnswer(), ...each })) }));
    } catch {
      localStorage.removeItem(STORE); // of another version of the page
    }
  }

  // drawing ----------------------------------------------------------------------------------------

  function setRunning(controller) {
    running = controller;
    byId("send").hidden = controller !== null;
    byId("stop").hidden = controller === null;
    list.classList.toggle("busy", controller !== null);
  }

  function label(side) {
    const { temperature, top_p, top_k, seed } = settings[side].read();
    const more = [top_k === undefined ? null : `top-k ${top_k}`, seed === undefined ? null : `seed ${seed}`].filter(Boolean);
    return `${side.toUpperCase()}: ${[`temperature ${temperature}`, `top-p ${top_p}`, ...more].join(", ")}`;
  }

  function userNode(at) {
    const node = element("div", { class: "message user" }, element("div", { class: "text" }, turns[at].user));
    node.append(element("div", { class: "actions" }, copyButton(() => turns[at].user), button("Edit", () => edit(at, node))));
    return node;
  }

  function edit(at, node) {
    const area = element("textarea", { rows: 3, "aria-label": "Edited message" });
    area.value = turns[at].user;
    const send = () => { if (area.value.trim() && !running) run(at, area.value.trim()); };
    node.replaceChildren(area, element("div", { class: "actions" }, button("Send", send, { class: "primary" }), button("Cancel", () => node.replaceWith(userNode(at)))));
    area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
      if (event.key === "Escape") node.replaceWith(userNode(at));
    });
    area.focus();
  }

  function turnNode(at) {
    const views = turns[at].answers.map((record) => {
      const view = new AnswerView(record.label);
      view.show(record);
      view.actions.append(copyButton(() => record.content), button("Regenerate", () => { if (!running) run(at, turns[at].user); }));
      return view;
    });
    return { views, node: element("li", { class: "turn" }, userNode(at), element("div", { class: `answers${views.length > 1 ? " two" : ""}` }, ...views.map((view) => view.node))) };
  }

  function draw() {
    if (turns.length) return list.replaceChildren(...turns.map((_, at) => turnNode(at).node));
    const offers = SUGGESTIONS.map((text) => button(text, () => run(0, text)));
    list.replaceChildren(element("li", { class: "empty" }, "Nothing said yet. For a start:", element("div", { class: "suggestions" }, ...offers)));
  }

  // Ask at turn `at`, after which the conversation begins anew.
  async function run(at, text) {
    const chosen = sides();
    turns = [...turns.slice(0, at), { user: text, answers: chosen.map((side) => ({ ...emptyAnswer(), label: chosen.length > 1 ? label(side) : "" })) }];
    draw();
    const { views, node } = turnNode(at);
    list.lastChild.replaceWith(node);
    node.scrollIntoView({ block: "end" });
    setRunning(new AbortController());
    const signal = running.signal;
    await Promise.all(chosen.map((side, place) => {
      const options = { method: "POST", body: JSON.stringify(bodyOf(side, at)), headers: { "content-type": "application/json" }, signal };
      return views[place].stream(ask("/v1/chat/completions", options), turns[at].answers[place]);
    }));
    setRunning(null);
    save();
  }

  function clear() {
    running?.abort();
    turns = [];
    save();
    draw();
    byId("prompt").focus();
  }

  function submit(event) {
    event.preventDefault();
    const text = byId("prompt").value.trim();
    if (!text || running) return;
    byId("prompt").value = "";
    run(turns.length, text);
  }

  function showCode(title, write) {
    const text = byId("prompt").value.trim();
    const kept = turns;
    if (text || !turns.length) turns = [...turns, { user: text || "Hello", answers: [] }]; // what would be sent now
    byId("code-title").textContent = title;
    byId("code-text").textContent = write(bodyOf("a", turns.length - 1), Boolean(headers().authorization));
    turns = kept;
    byId("code").showModal();
  }

  byId("composer").addEventListener("submit", submit);
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  });
  addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", clear);
  byId("as-curl").addEventListener("click", () => showCode("As curl", asCurl));
  byId("as-python").addEventListener("click", () => showCode("As Python", asPython));
  byId("code-copy").addEventListener("click", () => copy(byId("code-text").textContent));
  byId("code-close").addEventListener("click", () => byId("code").close());
  byId("export-md").addEventListener("click", () => download("conversation.md", "text/markdown", asMarkdown(model.name, state())));
  byId("export-json").addEventListener("click", () => download("conversation.json", "application/json", JSON.stringify({ model: model.name, ...state() }, null, 2)));
  for (const name of ["compare", "logprobs", "system"]) byId(name).addEventListener("input", save);
  const showSides = () => { byId("settings-b").hidden = !byId("compare").checked; };
  byId("compare").addEventListener("input", showSides);
  restore();
  showSides();
  if (matchMedia("(max-width: 52rem)").matches) byId("chat-settings").open = false; // the conversation comes first
  draw();
}
