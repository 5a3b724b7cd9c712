// The playground: a conversation over /v1/chat/completions, streamed, with what each answer cost. Knows nothing of the other views.
import { ask } from "./page.js";
import { element, count } from "./elements.js";

const byId = (id) => document.getElementById(id);
const SUGGESTIONS = ["Reverse this list:\nriver,stone,moon,tree", "What is 17 + 25?", "Write this list in reverse order:\n4,8,15,16,23,42"];

// Server-sent events of a response, each a parsed JSON object.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: ?/, "");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

// Text with its fenced code set apart.
function written(text) {
  return text.split("```").map((part, place) => (place % 2 ? element("pre", {}, part.replace(/^\w*\n/, "")) : document.createTextNode(part)));
}

class Answer {
  constructor(list) {
    this.text = element("div", { class: "text" });
    this.facts = element("div", { class: "facts" });
    this.item = element("li", { class: "message assistant pending" }, this.text, this.facts);
    this.content = "";
    this.reasoning = "";
    this.started = performance.now();
    list.append(this.item);
  }

  take(event) {
    if (event.error) throw new Error(event.error.message);
    const delta = event.choices?.[0]?.delta ?? {};
    const thought = delta.reasoning_content ?? delta.reasoning ?? "";
    if ((delta.content || thought) && !this.first) this.first = performance.now();
    if (thought) this.think(thought);
    if (delta.content) {
      this.content += delta.content;
      this.text.replaceChildren(...written(this.content));
    }
    if (event.usage) this.usage = event.usage;
  }

  think(thought) {
    this.reasoning += thought;
    if (!this.thoughts) {
      this.thoughts = element("div");
      this.item.prepend(element("details", { class: "reasoning" }, element("summary", {}, "Reasoning"), this.thoughts));
    }
    this.thoughts.textContent = this.reasoning;
  }

  end(error) {
    this.item.classList.remove("pending");
    if (error) this.item.append(element("div", { class: "error", role: "alert" }, error));
    const usage = this.usage;
    if (!usage || !this.first) return;
    const seconds = (performance.now() - this.first) / 1000;
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    this.facts.textContent = [
      `${count(this.first - this.started)} ms to the first token`,
      `${count(usage.completion_tokens)} tokens`,
      seconds > 0.05 ? `${count(usage.completion_tokens / seconds)} tokens/s` : null,
      `${count(usage.prompt_tokens)} in the prompt, ${count(cached)} of them cached`,
    ].filter(Boolean).join(" · ");
  }
}

export function startChat(model) {
  const list = byId("messages");
  let history = [];
  let running = null;

  for (const name of ["temperature", "top-p"]) {
    byId(name).addEventListener("input", () => { byId(`${name}-shown`).textContent = byId(name).value; });
  }

  function body() {
    const system = byId("system").value.trim();
    const seed = byId("seed").value;
    return {
      model: model.name,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...history],
      temperature: Number(byId("temperature").value),
      top_p: Number(byId("top-p").value),
      max_tokens: Number(byId("max-tokens").value) || undefined,
      ...(seed === "" ? {} : { seed: Number(seed) }),
      stream: true,
      stream_options: { include_usage: true },
    };
  }

  function setRunning(controller) {
    running = controller;
    byId("send").hidden = controller !== null;
    byId("stop").hidden = controller === null;
  }

  async function send(text) {
    if (running) return;
    list.querySelector(".empty")?.remove();
    list.append(element("li", { class: "message user" }, text));
    history.push({ role: "user", content: text });
    const answer = new Answer(list);
    setRunning(new AbortController());
    let error = null;
    try {
      const options = { method: "POST", body: JSON.stringify(body()), headers: { "content-type": "application/json" }, signal: running.signal };
      for await (const event of events(await ask("/v1/chat/completions", options))) {
        answer.take(event);
        answer.item.scrollIntoView({ block: "end" });
      }
    } catch (caught) {
      error = caught.name === "AbortError" ? "stopped" : caught.message;
    }
    setRunning(null);
    answer.end(error);
    if (answer.content) history.push({ role: "assistant", content: answer.content });
    else history.pop(); // what was not answered is not part of the conversation
  }

  function clear() {
    running?.abort();
    history = [];
    const offers = SUGGESTIONS.map((text) => {
      const button = element("button", { type: "button" }, text);
      button.addEventListener("click", () => send(text));
      return button;
    });
    list.replaceChildren(element("li", { class: "empty" }, "Nothing said yet. For a start:", element("div", { class: "suggestions" }, ...offers)));
  }

  function submit(event) {
    event.preventDefault();
    const text = byId("prompt").value.trim();
    if (!text || running) return;
    byId("prompt").value = "";
    send(text);
  }

  byId("composer").addEventListener("submit", submit);
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", clear);
  clear();
}
