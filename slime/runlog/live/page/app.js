// The page: which runs there are, which one is open, which view shows it; asks for news every two seconds.
import { api, color, h, hideTip, number, score } from "./dom.js";
import { configView } from "./config.js";
import { metricsView } from "./metrics.js";
import { overviewView } from "./overview.js";
import { listView } from "./samples.js";
import { sampleView } from "./sample.js";
import { timelineView } from "./timeline.js";
import { whyView } from "./why.js";

const TABS = [["overview", "Overview"], ["why", "Why?"], ["metrics", "Metrics"], ["samples", "Samples"], ["timeline", "Timeline"], ["config", "Config"]];
const VIEWS = { overview: overviewView, metrics: metricsView, why: whyView, timeline: timelineView, config: configView, sample: sampleView, samples: listView("samples"), groups: listView("groups"), prompts: listView("prompts") };
const NEWS_MS = 2000;
const get = (id) => document.getElementById(id);

const state = {
  runs: [], run: null, compared: new Set(), tab: "overview", query: {}, events: [], smoothing: .6, byTime: false, window: null,
  colorOf: (name) => color(`--c${Math.max(0, state.runs.findIndex((run) => run.name === name)) % 7}`),
  // The open run first, then those that were ticked.
  shown: () => state.runs.filter((run) => run.name === state.run || state.compared.has(run.name)).sort((a, b) => (b.name === state.run) - (a.name === state.run)).map((run) => ({ ...run, color: state.colorOf(run.name) })),
  link: (tab, query = {}) => `#${new URLSearchParams({ tab, run: state.run ?? "", ...query })}`,
  marks: () => {
    const run = state.runs.find((other) => other.name === state.run);
    return state.events.filter((event) => ["engine", "stall", "failed", "warning"].includes(event.kind) || event.outcome === "failed").map((event) => ({ kind: event.kind, text: event.text, x: state.byTime ? event.time - (run?.first_time ?? 0) : event.rollout })).filter((mark) => Number.isFinite(mark.x));
  },
  complain: (error) => { // the server is gone, or cannot answer this
    if (error instanceof TypeError) return setOffline(true);
    get("view").prepend(h("p", { class: "bad", id: "complaint" }, error.message));
  },
};
let view = null, versions = new Map();

const setOffline = (gone) => { get("offline").hidden = !gone; };
const drawTabs = () => get("tabs").replaceChildren(...TABS.map(([tab, label]) => h("a", { href: state.link(tab), data: { tab }, class: tab === state.tab || (tab === "samples" && ["groups", "prompts", "sample"].includes(state.tab)) ? "on" : "" }, label)));
const drawHead = () => {
  const run = state.runs.find((other) => other.name === state.run);
  get("run-name").textContent = run?.name ?? "no run yet";
  get("run-state").textContent = run ? `${run.state} · ${run.state_text}` : "";
  get("run-state").title = run?.state_text ?? "";
  get("run-state").className = `chip ${run?.state ?? ""}`;
  document.title = run ? `${run.name} · slime watch` : "slime watch";
};
const drawRuns = () => {
  const wanted = get("run-search").value.toLowerCase();
  get("runs").replaceChildren(...state.runs.filter((run) => run.name.toLowerCase().includes(wanted)).map((run) => {
    const shown = run.name === state.run || state.compared.has(run.name), key = state.colorOf(run.name);
    return h("div", { class: `run-row${run.name === state.run ? " on" : ""}`, data: { run: run.name }, title: run.path, onclick: () => { location.hash = `#${new URLSearchParams({ tab: ["sample", "groups", "prompts"].includes(state.tab) ? "samples" : state.tab, run: run.name })}`; } },
      h("button", { type: "button", class: "swatch", "aria-label": `compare ${run.name}`, "aria-pressed": String(shown), style: { borderColor: key, background: shown ? key : "transparent" }, onclick: (event) => { event.stopPropagation(); compare(run.name); } }),
      h("div", {}, h("div", { class: "name" }, run.name), h("div", { class: "sub" }, `${run.state_text.split(";")[0].slice(0, 40)}${run.reward === null ? "" : ` · ${score(run.reward)}`}`)), h("span", { class: `dot ${run.state}`, title: run.state }));
  }));
};
const compare = (name) => {
  if (name === state.run) return;
  state.compared.has(name) ? state.compared.delete(name) : state.compared.add(name);
  drawRuns();
  view?.runsChanged();
};

const route = () => {
  const query = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const { tab = "overview", run, ...rest } = query;
  const other = run && run !== state.run;
  state.tab = tab in VIEWS ? tab : "overview";
  state.run = state.runs.some((known) => known.name === run) ? run : state.run ?? state.runs[0]?.name ?? null;
  state.query = rest;
  if (other) { state.events = []; state.window = null; state.follow = true; }
  hideTip();
  view?.close();
  drawTabs(); drawHead(); drawRuns();
  if (!state.run) return get("view").replaceChildren(h("p", { class: "help" }, "No run has written anything yet; this page looks again every two seconds."));
  view = VIEWS[state.tab](state);
  get("view").replaceChildren(view.root);
  scrollTo(0, 0);
  view.open();
};

const news = async () => {
  if (!document.hidden) try {
    const runs = await api("runs"), first = !state.runs.length;
    setOffline(false);
    state.runs = runs;
    const changed = state.shown().some((run) => versions.get(run.name) !== `${run.version} ${run.state}`);
    versions = new Map(runs.map((run) => [run.name, `${run.version} ${run.state}`]));
    if (first && runs.length) route();
    else { drawHead(); drawRuns(); if (view) view.refresh(changed); }
  } catch (error) { state.complain(error); }
  setTimeout(news, NEWS_MS);
};

addEventListener("hashchange", route);
get("run-search").addEventListener("input", drawRuns);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view && route());
route();
news();
