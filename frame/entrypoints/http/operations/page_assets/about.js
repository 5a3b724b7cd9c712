// Plugins and settings, which are fixed while the server runs.
import { byId, element, plural, table } from "./elements.js";

function card(plugin) {
  const reasons = [...plugin.problems, ...plugin.rejected];
  const origin = `${plugin.distribution} ${plugin.version}`.trim();
  return element("article", { class: `card plugin${plugin.is_chosen ? " chosen" : ""}` },
    plugin.is_chosen ? element("span", { class: "badge" }, "runs") : null,
    element("strong", {}, plugin.name),
    element("p", {}, plugin.summary),
    ...reasons.map((sentence) => element("p", { class: "why" }, sentence)),
    origin.startsWith("frame-serve") ? null : element("p", {}, `from ${origin}`));
}

// A kind: what runs, then what could, then what cannot, folded.
function kindOf(name, plugins) {
  const rank = (plugin) => (plugin.is_chosen ? 0 : plugin.problems.length + plugin.rejected.length ? 2 : 1);
  const cards = plugins.toSorted((a, b) => rank(a) - rank(b)).map((plugin) => ({
    plugin, node: card(plugin), isRejected: rank(plugin) === 2, words: `${name} ${plugin.name} ${plugin.summary}`.toLowerCase(),
  }));
  const grid = (isRejected) => element("div", { class: "grid" }, ...cards.filter((each) => each.isRejected === isRejected).map(({ node }) => node));
  const summary = element("summary");
  const folded = element("details", { class: "rejected" }, summary, grid(true));
  const title = name.replaceAll("_", " ");
  return { title, cards, summary, folded, node: element("section", { class: "kind" }, element("h2", {}, title), grid(false), folded) };
}

export function showPlugins(about) {
  const names = [...new Set(about.plugins.map((plugin) => plugin.kind))];
  const kinds = names.map((name) => kindOf(name, about.plugins.filter((plugin) => plugin.kind === name)));
  const broken = about.broken.map((each) => element("p", { class: "why" }, `broken: ${Object.values(each).join(": ")}`));
  byId("matrix").replaceChildren(...broken, ...kinds.map(({ node }) => node));
  const find = byId("plugin-find");
  const onlyChosen = byId("only-chosen");
  const sift = () => {
    const words = find.value.trim().toLowerCase();
    let shown = 0;
    for (const { cards, summary, folded, node } of kinds) {
      for (const each of cards) each.node.hidden = !each.words.includes(words) || (onlyChosen.checked && !each.plugin.is_chosen);
      const open = cards.filter((each) => !each.node.hidden);
      const rejected = open.filter((each) => each.isRejected).length;
      summary.textContent = `${rejected} cannot be used here`;
      folded.hidden = rejected === 0;
      folded.open = words !== "" && rejected > 0; // a search is a demand
      node.hidden = open.length === 0;
      shown += open.length;
    }
    const running = about.plugins.filter((plugin) => plugin.is_chosen).length;
    byId("plugin-summary").textContent = `${plural(shown, "plugin")} of ${about.plugins.length} shown; ${running} run.`;
  };
  find.oninput = sift;
  onlyChosen.onchange = sift;
  sift();
}

export function showSettings(about) {
  const settings = about.settings.map((setting) => {
    const isSet = setting.source !== "default";
    const rejected = Object.entries(setting.rejected).map(([name, sentences]) => element("small", {}, `not ${name}: ${sentences.join("; ")}`));
    const cells = [setting.key, setting.value, isSet ? setting.source : setting.reason ? "chosen" : "default", element("span", {}, setting.reason, ...rejected)];
    return { cells, isOpen: isSet || Boolean(setting.reason), words: `${setting.key} ${setting.value} ${setting.reason}`.toLowerCase() };
  });
  byId("no-settings").hidden = settings.length > 0;
  byId("settings").hidden = settings.length === 0;
  const node = table(["Setting", "Value", "From", "Why"], settings.map(({ cells }) => cells), { class: "settings" });
  byId("settings").replaceChildren(node);
  const rows = [...node.querySelectorAll("tbody tr")];
  const find = byId("find");
  const onlySet = byId("only-set");
  const sift = () => {
    settings.forEach(({ isOpen, words }, place) => { rows[place].hidden = !words.includes(find.value.trim().toLowerCase()) || (onlySet.checked && !isOpen); });
  };
  find.oninput = sift;
  onlySet.onchange = sift;
  sift();
}
