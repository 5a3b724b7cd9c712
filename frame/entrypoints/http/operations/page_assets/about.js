// Plugins and settings, which are fixed while the server runs.
import { element } from "./elements.js";

function card(plugin) {
  const problems = [...plugin.problems, ...plugin.rejected];
  const origin = `${plugin.distribution} ${plugin.version}`.trim();
  const kinds = ["card plugin", plugin.is_chosen ? "chosen" : "", problems.length ? "off" : ""].join(" ");
  return element("article", { class: kinds },
    plugin.is_chosen ? element("span", { class: "badge" }, "chosen") : null,
    element("strong", {}, plugin.name),
    element("p", {}, plugin.summary),
    ...problems.map((sentence) => element("p", { class: "why" }, sentence)),
    origin.startsWith("frame-serve") ? null : element("p", {}, `from ${origin}`));
}

export function showPlugins(about) {
  const kinds = Map.groupBy ? Map.groupBy(about.plugins, (plugin) => plugin.kind) : group(about.plugins);
  const sections = [...kinds].map(([kind, plugins]) =>
    element("section", { class: "kind" }, element("h3", {}, kind.replaceAll("_", " ")),
      element("div", {}, ...plugins.toSorted((a, b) => b.is_chosen - a.is_chosen).map(card))));
  const broken = about.broken.map((each) => element("p", { class: "why" }, `broken: ${Object.values(each).join(": ")}`));
  document.getElementById("matrix").replaceChildren(...broken, ...sections);
}

function group(plugins) {
  const found = new Map();
  for (const plugin of plugins) found.set(plugin.kind, [...(found.get(plugin.kind) ?? []), plugin]);
  return found;
}

function row(setting) {
  const isSet = setting.source !== "default";
  const rejected = Object.entries(setting.rejected).map(([name, sentences]) => element("small", {}, `not ${name}: ${sentences.join("; ")}`));
  const from = isSet ? setting.source : setting.reason ? "chosen" : "default";
  return element("tr", { "data-open": String(isSet || Boolean(setting.reason)) },
    element("td", {}, setting.key), element("td", {}, setting.value), element("td", { class: isSet ? "set" : "" }, from),
    element("td", { class: "reason" }, setting.reason, ...rejected));
}

export function showSettings(about) {
  const rows = about.settings.map((setting) => ({ node: row(setting), words: `${setting.key} ${setting.value} ${setting.reason}`.toLowerCase() }));
  document.getElementById("no-settings").hidden = rows.length > 0;
  document.getElementById("settings").hidden = rows.length === 0;
  const head = element("thead", {}, element("tr", {}, ...["Setting", "Value", "From", "Why"].map((title) => element("th", {}, title))));
  document.getElementById("settings").replaceChildren(element("table", {}, head, element("tbody", {}, ...rows.map(({ node }) => node))));
  const find = document.getElementById("find");
  const onlySet = document.getElementById("only-set");
  const sift = () => {
    for (const { node, words } of rows) {
      node.hidden = !words.includes(find.value.trim().toLowerCase()) || (onlySet.checked && node.dataset.open !== "true");
    }
  };
  find.oninput = sift;
  onlySet.onchange = sift;
  sift();
}
