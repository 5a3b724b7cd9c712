// A conversation as text: a curl command, a Python program, a Markdown file, a download. Knows no element of the chat.
import { element } from "./elements.js";

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

// Without what only the page needs.
const plain = ({ stream, stream_options, ...body }) => body;

export function asCurl(body, needsKey) {
  return [
    `curl ${location.origin}/v1/chat/completions`,
    "-H 'Content-Type: application/json'",
    needsKey ? "-H \"Authorization: Bearer $API_KEY\"" : null,
    `-d ${quoted(JSON.stringify(plain(body), null, 2))}`,
  ].filter(Boolean).join(" \\\n  ");
}

// JSON is Python but for three words; a JSON text is a valid text of Python.
function literal(value, indent) {
  if (Array.isArray(value)) return `[\n${value.map((each) => `${indent}    ${literal(each, `${indent}    `)},\n`).join("")}${indent}]`;
  if (value && typeof value === "object") return `{${Object.entries(value).map(([key, each]) => `${JSON.stringify(key)}: ${literal(each, indent)}`).join(", ")}}`;
  if (typeof value === "boolean") return value ? "True" : "False";
  return value === null ? "None" : JSON.stringify(value);
}

export function asPython(body, needsKey) {
  const { top_k, ...known } = plain(body);
  const fields = Object.entries(known).filter(([, value]) => value !== undefined).map(([name, value]) => `    ${name}=${literal(value, "    ")},`);
  if (top_k !== undefined) fields.push(`    extra_body={"top_k": ${top_k}},`);
  return [
    ...(needsKey ? ["import os", ""] : []),
    "from openai import OpenAI", "",
    `client = OpenAI(base_url=${JSON.stringify(`${location.origin}/v1`)}, api_key=${needsKey ? "os.environ[\"API_KEY\"]" : "\"none\""})`,
    "response = client.chat.completions.create(", ...fields, ")",
    "print(response.choices[0].message.content)",
  ].join("\n");
}

export function asMarkdown(model, { system, turns }) {
  const blocks = [`# Conversation with ${model}`, ...(system ? [`**System**\n\n${system}`] : [])];
  for (const turn of turns) {
    blocks.push(`**User**\n\n${turn.user}`);
    turn.answers.forEach((answer, place) => blocks.push(`**Assistant${turn.answers.length > 1 ? ` ${"AB"[place]}` : ""}**\n\n${answer.content || answer.error || ""}`));
  }
  return `${blocks.join("\n\n")}\n`;
}

export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = element("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
