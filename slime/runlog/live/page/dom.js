// Elements, numbers and questions to the server. Data only ever becomes text: nothing here parses HTML.

export const h = (tag, props = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "style") Object.assign(element.style, value);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
};

export const api = async (name, params = {}) => {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) if (value !== undefined && value !== null && value !== "") query.set(key, value);
  const reply = await fetch(`api/${name}?${query}`);
  if (!reply.ok) throw new Error((await reply.text()).trim());
  return reply.json();
};

export const number = (value) => {
  if (value === null || value === undefined || !Number.isFinite(value)) return "-";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6) return value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 2 });
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size >= 100) return value.toFixed(0);
  if (size >= 10) return String(Number(value.toFixed(1)));
  return size >= 1e-3 ? String(Number(value.toFixed(4))) : value.toExponential(1);
};
export const signed = (value) => (value > 0 ? "+" : "") + number(value);
export const score = (value) => value === null || value === undefined ? "-" : Math.abs(value) < 10 ? value.toFixed(3) : number(value);
const two = (n) => String(n).padStart(2, "0");
export const seconds = (s) => {
  if (s === null || s === undefined || !Number.isFinite(s)) return "-";
  if (s < 0.0995) return `${Math.round(s * 1000)}ms`;
  if (s < 9.95) return `${s.toFixed(1)}s`;
  const w = Math.round(s);
  if (w < 60) return `${w}s`;
  if (w < 3600) return `${Math.floor(w / 60)}m ${two(w % 60)}s`;
  return w < 86400 ? `${Math.floor(w / 3600)}h ${two(Math.floor(w % 3600 / 60))}m` : `${Math.floor(w / 86400)}d ${two(Math.floor(w % 86400 / 3600))}h`;
};
export const bytes = (b) => b === null || b === undefined ? "-" : b >= 2 ** 30 ? `${(b / 2 ** 30).toFixed(2)} GiB` : `${(b / 2 ** 20).toFixed(0)} MiB`;
export const clock = (time) => new Date(time * 1000).toLocaleTimeString("en-GB");
export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const tip = document.getElementById("tip");
export const showTip = (x, y, title, rows) => {
  tip.replaceChildren(h("b", {}, title), ...rows.map(([name, value, key]) =>
    h("div", {}, h("span", {}, key === undefined ? null : h("i", { class: "key", style: { background: key } }), name), h("span", {}, value))));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${x + 16 + box.width > innerWidth ? Math.max(4, x - box.width - 14) : x + 14}px`;
  tip.style.top = `${Math.max(6, Math.min(innerHeight - box.height - 6, y - box.height - 8))}px`;
};
export const hideTip = () => { tip.hidden = true; };

export const segmented = (options, current, choose) => h("span", { class: "seg" }, options.map(([value, label]) =>
  h("button", { type: "button", class: value === current ? "on" : "", onclick: () => choose(value) }, label)));
