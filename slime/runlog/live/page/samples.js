// Lists of samples, groups and prompts: filters and pages are the server's, this draws one page.
import { api, h, number, score, segmented, signed } from "./dom.js";

const RANGES = [["reward", "reward"], ["advantage", "advantage"], ["response_len", "tokens"], ["rollout_id", "rollout"]];
const heat = (value, low, high) => {
  if (value === null || value === undefined) return "transparent";
  const share = high > low ? (value - low) / (high - low) : .5;
  return `color-mix(in srgb, var(--good) ${Math.round(55 * share)}%, color-mix(in srgb, var(--bad) ${Math.round(38 * (1 - share))}%, transparent))`;
};

export const sampleLink = (state, row) => state.link("sample", { dataset: row.dataset, rollout_id: row.rollout_id, index: row.index });
const openOnClick = (link) => ({ class: "link", onclick: (event) => { if (!event.target.closest("button, a") && !getSelection().toString()) location.hash = link; } });
const text = (value, missing) => value === undefined || value === null ? h("td", { class: "none" }, missing) : h("td", {}, h("div", { class: "clip" }, value));
const head = (label, key, query, sort, numeric = true) => key && sort
  ? h("th", { class: `sort${numeric ? " num" : ""}${query.sort === key ? ` ${query.order === "up" ? "up" : "down"}` : ""}`, onclick: () => sort(key) }, label) : h("th", { class: numeric ? "num" : "" }, label);

export const sampleTable = (state, rows, query = {}, sort = null) => h("div", { class: "scroll" }, h("table", { id: "samples" },
  h("thead", {}, h("tr", {}, head("rollout", "rollout_id", query, sort), head("dataset", null, query, sort, false), head("reward", "reward", query, sort), head("advantage", "advantage", query, sort),
    head("tokens", "response_len", query, sort), head("status", null, query, sort, false), head("weights", null, query, sort), head("prompt", null, query, sort, false), head("response", null, query, sort, false))),
  h("tbody", {}, rows.map((row) => h("tr", { ...openOnClick(sampleLink(state, row)), data: { index: row.index } },
    h("td", { class: "num" }, h("a", { href: sampleLink(state, row) }, String(row.rollout_id))), h("td", {}, row.dataset), h("td", { class: "num" }, number(row.reward)),
    h("td", { class: `num ${row.advantage > 0 ? "good" : row.advantage < 0 ? "bad" : ""}` }, row.advantage === null ? "-" : signed(row.advantage)), h("td", { class: "num" }, row.response_len.toLocaleString("en")),
    h("td", {}, h("span", { class: `status ${row.status}` }, row.status)),
    h("td", { class: "num" }, row.oldest_version < 0 ? "-" : row.oldest_version === row.newest_version ? String(row.newest_version) : `${row.oldest_version}-${row.newest_version}`),
    text(row.prompt, "text not kept"), text(row.response, ""))))));

const rewardButtons = (state, row) => h("div", { class: "rewards" }, row.rewards.map((reward, place) => h("button", {
  type: "button", title: `sample ${row.indices[place]}`, style: { background: heat(reward, state.rewardRange[0], state.rewardRange[1]) },
  onclick: () => { location.hash = sampleLink(state, { ...row, index: row.indices[place] }); } }, reward === null ? "-" : number(reward))));

export const groupTable = (state, rows, query = {}, sort = null) => {
  const rewards = rows.flatMap((row) => row.rewards).filter((reward) => reward !== null);
  state.rewardRange = [Math.min(0, ...rewards), Math.max(1e-9, ...rewards)];
  return h("div", { class: "scroll" }, h("table", { id: "groups" },
    h("thead", {}, h("tr", {}, head("rollout", "rollout_id", query, sort), head("dataset", null, query, sort, false), head("mean", "mean", query, sort), head("rewards of its samples", null, query, sort, false),
      head("failed", "failed", query, sort), head("truncated", "truncated", query, sort), head("mean tokens", "length", query, sort), head("prompt", null, query, sort, false), h("th"))),
    h("tbody", {}, rows.map((row) => h("tr", { data: { group: row.group } }, h("td", { class: "num" }, String(row.rollout_id)), h("td", {}, row.dataset), h("td", { class: "num" }, score(row.mean)),
      h("td", {}, rewardButtons(state, row)), h("td", { class: `num ${row.failed ? "bad" : ""}` }, String(row.failed)), h("td", { class: `num ${row.truncated ? "warn" : ""}` }, String(row.truncated)), h("td", { class: "num" }, number(row.length)),
      text(row.prompt, "text not kept"), h("td", {}, h("a", { href: state.link("samples", { group: row.group, dataset: row.dataset, rollout_id_min: row.rollout_id, rollout_id_max: row.rollout_id }) }, "samples")))))));
};

const spark = (history) => {
  const canvas = h("canvas", { class: "spark", width: 240, height: 52, style: { width: "120px", height: "26px" } }), context = canvas.getContext("2d");
  const points = history.filter(([, mean]) => mean !== null);
  if (!points.length) return canvas;
  const xs = points.map(([x]) => x), ys = points.map(([, y]) => y);
  const low = Math.min(0, ...ys), high = Math.max(...ys, low + 1e-9), first = xs[0], span = Math.max(1, xs.at(-1) - first);
  context.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--c0");
  context.lineWidth = 3;
  context.beginPath();
  points.forEach(([x, y], n) => context[n ? "lineTo" : "moveTo"](6 + 228 * (x - first) / span, 46 - 40 * (y - low) / (high - low)));
  context.stroke();
  return canvas;
};

const promptTable = (state, rows, query, sort) => h("div", { class: "scroll" }, h("table", { id: "prompts" },
  h("thead", {}, h("tr", {}, head("rollouts", "count", query, sort), head("first mean", null, query, sort), head("last mean", "last", query, sort), head("change", "change", query, sort), h("th", {}, "mean reward over rollouts"), head("dataset", null, query, sort, false), head("prompt", null, query, sort, false), h("th"))),
  h("tbody", {}, rows.map((row) => h("tr", {}, h("td", { class: "num" }, String(row.times)), h("td", { class: "num" }, score(row.first_mean)), h("td", { class: "num" }, score(row.mean)),
    h("td", { class: `num ${row.mean > row.first_mean ? "good" : row.mean < row.first_mean ? "bad" : ""}` }, row.mean === null || row.first_mean === null ? "-" : signed(row.mean - row.first_mean)), h("td", {}, spark(row.history)), h("td", {}, row.dataset), text(row.prompt, "text not kept"),
    h("td", {}, h("a", { href: state.link("groups", { prompt: row.prompt_hash, dataset: row.dataset }) }, "groups")))))));

const TABLES = { samples: sampleTable, groups: groupTable, prompts: promptTable };

export const listView = (kind) => (state) => {
  const root = h("div", { class: "stack" });
  const query = { ...(kind === "samples" && !Object.keys(state.query).length ? { kept: "1", dataset: "" } : {}), ...state.query };
  let asked = 0;
  const change = (changes) => { Object.assign(query, { start: "" }, changes); for (const key of Object.keys(query)) if (query[key] === "") delete query[key]; history.replaceState(null, "", state.link(kind, query)); load(); };
  const sort = (key) => change({ sort: key, order: query.sort === key && query.order !== "up" ? "up" : "down" });
  const bound = (name, label, end) => h("input", { type: "number", step: "any", id: `f-${name}-${end}`, placeholder: end, "aria-label": `${label} ${end}`, value: query[`${name}_${end}`] ?? "", onchange: (event) => change({ [`${name}_${end}`]: event.target.value }) });
  const field = (name, label) => h("label", { class: "range" }, label, bound(name, label, "min"), "-", bound(name, label, "max"));
  const select = (name, options) => h("select", { id: `f-${name}`, "aria-label": name, onchange: (event) => change({ [name]: event.target.value }) }, options.map(([value, label]) => h("option", { value, selected: (query[name] ?? "") === value }, label)));
  const filters = (page) => h("div", { class: "controls" },
    segmented([["samples", "samples"], ["groups", "groups"], ["prompts", "prompts over time"]], kind, (next) => { location.hash = state.link(next); }),
    select("dataset", [["", "all datasets"], ...page.datasets.map((name) => [name, name])]),
    kind === "samples" && select("status", [["", "any status"], ...["completed", "truncated", "failed", "aborted"].map((name) => [name, name])]),
    kind === "groups" && select("signal", [["", "all groups"], ["none", "without signal"], ["some", "with signal"]]),
    kind === "samples" && RANGES.map(([name, label]) => field(name, label)), kind === "groups" && field("rollout_id", "rollout"),
    kind === "samples" && h("input", { type: "search", id: "f-text", placeholder: "search in texts", value: query.text ?? "", onchange: (event) => change({ text: event.target.value }) }),
    kind === "samples" && h("label", {}, h("input", { type: "checkbox", id: "f-kept", checked: Boolean(query.kept), onchange: (event) => change({ kept: event.target.checked ? "1" : "" }) }), "with text"),
    (query.group || query.prompt) && h("button", { type: "button", onclick: () => change({ group: "", prompt: "" }) }, query.group ? `group ${query.group} ×` : "one prompt ×"),
    h("button", { type: "button", id: "f-clear", onclick: () => { for (const key of Object.keys(query)) delete query[key]; change({}); } }, "clear"));
  const load = async () => {
    const mine = ++asked;
    try {
      const page = await api(kind, { run: state.run, ...query });
      if (mine !== asked) return;
      const start = page.start, shown = page.rows.length;
      const pager = h("div", { class: "pager" }, h("button", { type: "button", id: "page-back", disabled: start === 0, onclick: () => change({ start: Math.max(0, start - 50) || "" }) }, "←"),
        h("span", { id: "found" }, shown ? `${(start + 1).toLocaleString("en")}-${(start + shown).toLocaleString("en")} of ${page.total.toLocaleString("en")}` : "none"), h("button", { type: "button", id: "page-next", disabled: start + shown >= page.total, onclick: () => change({ start: start + 50 }) }, "→"),
        page.all !== undefined && h("span", { class: "help" }, `${page.all.toLocaleString("en")} in this run`));
      const focused = document.activeElement?.id;
      root.replaceChildren(h("section", { class: "card" }, filters(page)), h("section", { class: "card" }, TABLES[kind](state, page.rows, query, sort), pager));
      if (focused) document.getElementById(focused)?.focus();
    } catch (error) { state.complain(error); }
  };
  const typing = () => root.contains(document.activeElement) && document.activeElement.matches("input, select");
  return { root, open: load, refresh: (changed) => { if (changed && !query.start && !typing()) load(); }, runsChanged: load, close: () => {} };
};
