// The page's frame: views by fragment, the key, the server's state, which the views read from here. Knows no view's inside.
import { startChat } from "./chat.js";
import { startLive } from "./live.js";
import { startCache } from "./cache.js";
import { showPlugins, showSettings } from "./about.js";

const KEY = "frame-key";
const views = ["chat", "live", "cache", "plugins", "config"];
const byId = (id) => document.getElementById(id);

export function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
}

export class Refused extends Error {}

// An answer of the server, or Refused with its sentence. Without a key where one is needed, the page asks for it.
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

function tellStatus(text, isWell) {
  byId("status-text").textContent = text;
  byId("status").className = `status ${isWell ? "well" : "ill"}`;
}

const model = { name: "", about: null };

async function loadAbout() {
  model.about = await (await ask("/page/about.json")).json();
  model.name = model.about.info.model;
  document.title = `${model.name} · frame`;
  showPlugins(model.about);
  showSettings(model.about);
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
    if (link.hash === `#${view()}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (view() === "cache") cache.refresh();
}

async function tick() {
  try {
    if (!model.about) await loadAbout();
    const state = await (await ask("/page/live.json")).json();
    const isShared = state.finished === null; // with other keys, whose requests are not shown
    if (!isShared) live.take(state);
    const load = isShared ? model.name : `${model.name}: ${state.load?.running ?? 0} running, ${state.load?.waiting ?? 0} waiting`;
    tellStatus(state.problem ?? load, !state.problem);
    if (view() === "cache" && !document.hidden) await cache.refresh();
  } catch (error) {
    tellStatus(error instanceof Refused ? error.message : "the server cannot be reached", false);
  }
  setTimeout(tick, document.hidden ? 5000 : 1000);
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value);
  loadAbout().catch((error) => tellStatus(error.message, false));
});
addEventListener("hashchange", () => {
  show();
  scrollTo(0, 0);
});
show();
tick();
