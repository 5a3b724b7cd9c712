// One answer: what is streamed, its record (plain data, which is stored), and how it is drawn. Knows no conversation.
import { addTips, count, element, seconds } from "./elements.js";

// Server-sent events of a response, each a parsed JSON object.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.replace(/^data: ?/, "");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

export const emptyAnswer = () => ({ content: "", reasoning: "", tokens: [], facts: "", error: "" });

const probability = (logprob) => {
  const share = 100 * Math.exp(logprob);
  return `${share >= 99.95 || share < 0.001 ? Math.round(share) : share.toPrecision(3)} %`;
};

// The place of each token in the text, as [start, end, token]; a token without text there (of reasoning, of half a character) has none.
function findPlaces(text, tokens) {
  const places = [];
  let at = 0;
  for (const token of tokens) {
    if (!token.t || !text.startsWith(token.t, at)) continue;
    places.push([at, at + token.t.length, token]);
    at += token.t.length;
  }
  return places;
}

// Text with its fenced code set apart, and each token in an element of its own.
function written(text, tokens) {
  const places = findPlaces(text, tokens);
  let at = 0, next = 0;
  const spans = (end) => {
    const nodes = [];
    while (at < end) {
      while (next < places.length && places[next][1] <= at) next += 1;
      const [start, stop, token] = places[next] ?? [end, end, null];
      const until = Math.min(end, start > at ? start : stop);
      const piece = text.slice(at, until);
      nodes.push(start > at || !token ? piece : element("span", { class: `token p${Math.min(4, Math.floor(5 * Math.exp(token.p)))}`, "data-token": tokens.indexOf(token) }, piece));
      at = until;
    }
    return nodes;
  };
  return text.split("```").flatMap((part, place) => {
    const end = at + part.length;
    const head = place % 2 ? part.match(/^\w*\n/)?.[0].length ?? 0 : 0;
    at += head; // the language
    const nodes = spans(end);
    at = end + 3;
    return place % 2 ? [element("pre", { tabindex: 0 }, ...nodes)] : nodes;
  });
}

function describe(token) {
  const rows = token.top.map(([text, logprob]) => element("div", { class: text === token.t ? "row drawn" : "row" }, element("code", {}, JSON.stringify(text)), element("span", {}, probability(logprob))));
  const own = element("div", { class: "row drawn" }, element("code", {}, JSON.stringify(token.t)), element("span", {}, probability(token.p)));
  return token.top.some(([text]) => text === token.t) ? rows : [own, ...rows];
}

export class AnswerView {
  constructor(label) {
    this.text = element("div", { class: "text" });
    this.facts = element("div", { class: "facts" });
    this.thoughts = element("div");
    this.reasoning = element("details", { class: "reasoning", hidden: true }, element("summary", {}, "Reasoning"), this.thoughts);
    this.error = element("div", { class: "error", role: "alert", hidden: true });
    this.actions = element("div", { class: "actions" });
    this.node = element("div", { class: "message assistant" }, label ? element("div", { class: "label" }, label) : null, this.reasoning, this.text, this.error, this.facts, this.actions);
    this.frame = 0;
    this.record = emptyAnswer();
    addTips(this.text, ".token", (span) => describe(this.record.tokens[Number(span.dataset.token)]));
  }

  show(record) {
    this.record = record;
    this.reasoning.hidden = !record.reasoning;
    this.thoughts.textContent = record.reasoning;
    this.text.replaceChildren(...written(record.content, record.tokens));
    if (record.tokens.length) {
      for (const [name, value] of Object.entries({ tabindex: 0, role: "group", "aria-label": "answer; the arrow keys show the probabilities of its tokens" })) this.text.setAttribute(name, value);
    }
    this.facts.textContent = record.facts;
    this.error.textContent = record.error;
    this.error.hidden = !record.error;
  }

  // Streamed text is drawn once a frame of the screen, without tokens.
  showSoon(record) {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.show({ ...record, tokens: [] });
      if (this.follows) this.node.scrollIntoView({ block: "end" });
    });
  }

  async stream(response, record) {
    this.node.classList.add("pending");
    const times = { started: performance.now(), first: 0 };
    let usage = null;
    try {
      for await (const event of events(await response)) {
        if (event.error) throw new Error(event.error.message);
        const choice = event.choices?.[0];
        const thought = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "";
        record.reasoning += thought;
        record.content += choice?.delta?.content ?? "";
        if ((thought || choice?.delta?.content) && !times.first) times.first = performance.now();
        for (const each of choice?.logprobs?.content ?? []) record.tokens.push({ t: each.token, p: each.logprob, top: each.top_logprobs.map((top) => [top.token, top.logprob]) });
        usage = event.usage ?? usage;
        this.follows = innerHeight + scrollY > document.body.scrollHeight - 160; // whoever scrolls up reads on undisturbed
        this.showSoon(record);
      }
    } catch (caught) {
      record.error = caught.name === "AbortError" ? "stopped" : caught.message;
    }
    record.facts = tell(times, usage);
    cancelAnimationFrame(this.frame);
    this.node.classList.remove("pending");
    this.show(record);
  }
}

function tell({ started, first }, usage) {
  if (!usage || !first) return "";
  const passed = (performance.now() - first) / 1000;
  return [
    `${seconds((first - started) / 1000)} to the first token`,
    `${count(usage.completion_tokens)} tokens`,
    passed > 0.05 ? `${count(usage.completion_tokens / passed)} tokens/s` : null,
    `${count(usage.prompt_tokens)} in the prompt, ${count(usage.prompt_tokens_details?.cached_tokens ?? 0)} of them cached`,
  ].filter(Boolean).join(" · ");
}
