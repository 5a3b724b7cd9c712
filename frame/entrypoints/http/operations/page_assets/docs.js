// The page /docs: shows /openapi.json. Loads nothing from other servers.

import { element } from "/page/elements.js";

const KEY = "frame-key"; // of page.js too
const byId = (id) => document.getElementById(id);

async function load() {
  const key = sessionStorage.getItem(KEY);
  const response = await fetch("/openapi.json", { headers: key ? { authorization: `Bearer ${key}` } : {} });
  byId("key-form").hidden = response.status !== 401;
  if (!response.ok) {
    byId("operations").replaceChildren(element("p", {}, `The server answered ${response.status}.`));
    return;
  }
  show(await response.json());
}

function resolve(description, schema) {
  const name = schema?.$ref?.split("/").pop();
  return name ? { name, schema: description.components.schemas[name] } : { name: "", schema };
}

// The type of a schema in one line; a reference is named, not followed.
function typeOf(schema) {
  if (!schema || !Object.keys(schema).length) return "any";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" | ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.type === "array") return `list of ${typeOf(schema.items)}`;
  return schema.type ?? "any";
}

function fields(description, schema) {
  const { name, schema: found } = resolve(description, schema);
  const required = new Set(found?.required ?? []);
  const rows = Object.entries(found?.properties ?? {}).map(([field, each]) => element("tr", {},
    element("td", {}, element("code", {}, field)), element("td", {}, typeOf(each)),
    element("td", {}, required.has(field) ? "required" : each.default === undefined ? "" : JSON.stringify(each.default)),
    element("td", {}, each.description ?? "")));
  const about = found?.description ? [element("p", {}, found.description)] : [];
  return [element("h4", {}, `Body: ${name || typeOf(found)}`), ...about, element("table", {}, element("tbody", {}, ...rows))];
}

function operation(description, path, method, each) {
  const parameters = (each.parameters ?? []).map((one) => element("tr", {},
    element("td", {}, element("code", {}, one.name)), element("td", {}, typeOf(one.schema)), element("td", {}, one.in)));
  const body = each.requestBody?.content?.["application/json"]?.schema;
  const node = element("details", {},
    element("summary", {}, element("code", {}, `${method.toUpperCase()} ${path}`), ` ${each.description ?? each.summary ?? ""}`),
    ...(parameters.length ? [element("h4", {}, "Parameters"), element("table", {}, element("tbody", {}, ...parameters))] : []),
    ...(body ? fields(description, body) : []));
  return { node, words: `${method} ${path} ${each.summary ?? ""} ${each.description ?? ""}`.toLowerCase() };
}

function show(description) {
  const all = Object.entries(description.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, each]) => operation(description, path, method, each)));
  byId("operations").replaceChildren(...all.map((each) => each.node));
  byId("filter").oninput = () => {
    const wanted = byId("filter").value.toLowerCase();
    for (const each of all) each.node.hidden = !each.words.includes(wanted);
  };
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value);
  load();
});
load();
