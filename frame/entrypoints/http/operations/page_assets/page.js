// The page's frame: views by fragment, the key, the server's state, which the views read from here. Knows no view's inside.
import { byId } from "./elements.js";
import { startChat } from "./chat.js";
import { startLive } from "./live.js";
import { startCache } from "./cache.js";
import { showPlugins, showSettings } from "./about.js";

const KEY = "frame-key";
const PERIOD = 2000; // ms between two questions; the server makes its reply as often, once for all pages
const views = ["chat", "live", "cache", "plugins", "config"];

export function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
}

export class Refused extends Error {}

// A response of the server, or Refused with its sentence. Without a key where one is needed, the page asks for it.
export async function ask(path, options = {}) {
  const response = await fetch(path, { ...options, headers: { ...headers(), ...options.headers } });
  if (response.status === 401) byId("key-form").hidden = false;
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Refused(body?.error?.message ?? `the server answered ${response.status}`);
  }
  byId("key-form").hidden = true;
  return response;
}

export const askJson = async (path) => (await ask(path)).json();

function tellStatus(text, isWell) {
  if (byId("status-text").textContent !== text) byId("status-text").textContent = text;
  byId("status").className = `status ${isWell ? "well" : "ill"}`;
}

const model = { name: "", about: null };

async function loadAbout() {
  model.about = await askJson("/page/about.json");
  model.name = model.about.info.model;
  showPlugins(model.about);
  showSettings(model.about);
  show();
}

const live = startLive();
const cache = startCache();
startChat(model);

function view() {
  const name = location.hash.slice(1);
  return views.includes(name) ? name : "chat";
}

function show() {
  for (const name of views) byId(name).hidden = name !== view();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${view()}`) {
      link.setAttribute("aria-current", "page");
      document.title = `${link.textContent} · ${model.name || "frame"}`;
    } else link.removeAttribute("aria-current");
  }
  if (view() === "cache") cache.refresh().catch(() => {});
  if (view() === "live") live.draw();
}

async function tick() {
  try {
    if (!model.about) await loadAbout();
    const state = await askJson("/page/live.json");
    const isShared = state.finished === null; // with other keys, whose requests are not shown
    await live.take(isShared ? null : state, view() === "live");
    const load = isShared ? model.name : `${model.name}: ${state.load?.running ?? 0} running, ${state.load?.waiting ?? 0} waiting`;
    const [alert] = state.alerts ?? [];
    tellStatus(state.problem ?? (alert ? `${load} · ${alert.text}` : load), !state.problem && !alert);
    if (view() === "cache") await cache.refresh();
  } catch (error) {
    tellStatus(error instanceof Refused ? error.message : "the server cannot be reached", false);
  }
}

// A page that is not looked at asks nothing.
async function run() {
  for (;;) {
    if (document.hidden) await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
    else {
      await tick();
      await new Promise((resolve) => setTimeout(resolve, PERIOD));
    }
  }
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value);
  tick();
});
byId("skip").addEventListener("click", (event) => {
  event.preventDefault(); // a fragment is a view
  byId("main").focus();
});
addEventListener("hashchange", () => {
  show();
  scrollTo(0, 0);
});
show();
run();
