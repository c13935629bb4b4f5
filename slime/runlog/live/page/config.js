// The configuration of the shown runs side by side; of several, what differs comes first.
import { api, h } from "./dom.js";

const show = (entry) => entry === undefined ? "-" : typeof entry.value === "string" ? entry.value : JSON.stringify(entry.value);

export const configView = (state) => {
  const root = h("div", { class: "stack" });
  const search = h("input", { type: "search", id: "config-search", class: "wide", placeholder: "filter flags", oninput: () => draw() });
  let found = {}, names = [], all = false;
  const toggle = h("input", { type: "checkbox", id: "config-all", onchange: () => { all = toggle.checked; draw(); } });
  const draw = () => {
    const keys = [...new Set(names.flatMap((name) => Object.keys(found[name] ?? {})))].filter((key) => key.includes(search.value.trim())).sort();
    const given = (key) => names.some((name) => found[name]?.[key] && !["default", "derived"].includes(found[name][key].origin));
    keys.sort((a, b) => given(b) - given(a));
    const values = (key) => names.map((name) => show(found[name]?.[key]));
    const differs = (key) => new Set(values(key)).size > 1;
    const several = names.length > 1;
    const shown = keys.filter((key) => all || (several ? differs(key) : given(key)));
    body.replaceChildren(h("p", { class: "help" }, several ? `${keys.filter(differs).length} flags differ between ${names.length} runs` : "flags that were set; tick runs on the left to compare them"),
      h("div", { class: "scroll" }, h("table", { class: "diff", id: "config" }, h("thead", {}, h("tr", {}, h("th", {}, "flag"), names.map((name) => h("th", {}, name)), !several && h("th", {}, "origin"))),
        h("tbody", {}, shown.map((key) => h("tr", { class: several && !differs(key) ? "same" : "", data: { flag: key } }, h("td", {}, `--${key.replaceAll("_", "-")}`), values(key).map((value) => h("td", {}, value)), !several && h("td", {}, found[names[0]]?.[key]?.origin ?? "")))))));
  };
  const body = h("section", { class: "card" });
  root.append(h("section", { class: "card" }, h("div", { class: "controls" }, search, h("label", {}, toggle, "all flags"))), body);
  const load = async () => {
    names = state.shown().map((run) => run.name);
    try { found = await api("configs", { names: JSON.stringify(names) }); draw(); } catch (error) { state.complain(error); }
  };
  return { root, open: load, refresh: () => {}, runsChanged: load, close: () => {} };
};
