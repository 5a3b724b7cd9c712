// Elements with text that is never read as markup.
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function drawn(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) if (value !== false) made.setAttribute(name, value === true ? "" : value);
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

export const count = (value) => Math.round(value).toLocaleString("en");
