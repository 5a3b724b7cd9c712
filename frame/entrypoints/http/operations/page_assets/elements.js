// Elements with text that is never read as markup, and what all views share: numbers as text, tables, the tip.
export const byId = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function drawn(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) if (value !== false) node.setAttribute(name, value === true ? "" : value);
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

export function button(text, act, attributes = {}) {
  const node = element("button", { type: "button", ...attributes }, text);
  node.addEventListener("click", act);
  return node;
}

// rows: of cells, which are text or nodes. On a phone each row is a card, and each cell has its title.
export function table(titles, rows, attributes = {}) {
  const head = element("thead", {}, element("tr", {}, ...titles.map((title) => element("th", { scope: "col" }, title))));
  const body = rows.map((cells) => element("tr", {}, ...cells.map((cell, place) => element("td", { "data-title": titles[place] }, cell))));
  return element("table", attributes, head, element("tbody", {}, ...body));
}

// A bar of a share between 0 and 1.
export const meter = (share, label) => element("meter", { min: 0, max: 1, value: Math.min(1, share || 0), "aria-label": label });

export const count = (value) => Math.round(value).toLocaleString("en");
export const plural = (number, word) => `${count(number)} ${word}${Math.round(number) === 1 ? "" : "s"}`;

export function percent(part, whole) {
  const share = (100 * part) / Math.max(1, whole);
  return `${share > 0 && share < 10 ? share.toFixed(1) : count(share)} %`;
}

export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value < 0.9995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 0)} s`;
  return `${count(value / 60)} min`;
}

export function bytes(value) {
  return value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(1)} GiB` : `${count(value / 2 ** 20)} MiB`;
}

// One tip for the whole page, at the pointer or at an element.
const tipNode = element("div", { class: "tip", role: "tooltip", hidden: true });

export const tip = {
  show(lines, x, y) {
    if (!tipNode.isConnected) document.body.append(tipNode);
    tipNode.replaceChildren(...lines.map((line) => (line instanceof Node ? line : element("div", {}, line))));
    tipNode.hidden = false;
    tipNode.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - tipNode.offsetWidth - 12))}px`;
    tipNode.style.top = `${Math.max(8, y + 14 + tipNode.offsetHeight > innerHeight ? y - tipNode.offsetHeight - 10 : y + 14)}px`;
  },
  hide() { tipNode.hidden = true; },
};

// Tips for the many items of a list that is one stop of the Tab key: the arrow keys move among its items.
export function addTips(list, selector, describe) {
  const show = (item, x, y) => tip.show(describe(item), x, y);
  let current = null;
  const move = (item) => {
    current?.classList.remove("current");
    current = item;
    current?.classList.add("current");
    if (!current) return tip.hide();
    current.scrollIntoView({ block: "nearest", inline: "nearest" });
    const box = current.getBoundingClientRect();
    show(current, box.left, box.bottom - 8);
  };
  list.addEventListener("pointermove", (event) => {
    const item = event.target.closest?.(selector);
    if (item) show(item, event.clientX, event.clientY);
    else tip.hide();
  });
  list.addEventListener("pointerleave", tip.hide);
  list.addEventListener("blur", () => move(null));
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") move(null);
    if (!step) return;
    event.preventDefault();
    const items = [...list.querySelectorAll(selector)];
    const at = items.indexOf(current);
    move(items[Math.max(0, Math.min(items.length - 1, at < 0 ? (step > 0 ? 0 : items.length - 1) : at + step))] ?? null);
  });
}

// Text to the clipboard; without https the browser offers only the older way.
export async function copy(text) {
  if (navigator.clipboard && isSecureContext) return navigator.clipboard.writeText(text);
  const area = element("textarea", { class: "unseen", "aria-hidden": "true" });
  area.value = text;
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

export function copyButton(read, attributes = {}) {
  const node = button("Copy", async () => {
    await copy(read());
    node.textContent = "Copied";
    setTimeout(() => { node.textContent = "Copy"; }, 1500);
  }, attributes);
  return node;
}
