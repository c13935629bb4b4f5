// All metrics of the shown runs, in sections by prefix; only charts on the screen are fetched and drawn.
import { fill, Chart } from "./charts.js";
import { h, segmented } from "./dom.js";

const TITLES = { rollout: "Rollout", train: "Training", eval: "Evaluation", perf: "Time and throughput" };
const ORDER = ["eval", "rollout", "train", "perf"];

export const chartOptions = (state, redraw) => ({
  smoothing: state.smoothing, byTime: state.byTime, window: state.window, marks: state.marks(),
  onZoom: (window) => { state.window = window; redraw(); },
});

export const controls = (state, redraw) => h("div", { class: "controls" },
  h("label", {}, "smoothing", h("input", { type: "range", id: "smoothing", min: 0, max: .98, step: .02, value: state.smoothing, oninput: (event) => { state.smoothing = Number(event.target.value); redraw(false); } })),
  h("label", {}, "x axis", segmented([[false, "rollout"], [true, "time"]], state.byTime, (value) => { state.byTime = value; state.window = null; redraw(true, true); })),
  state.window && h("button", { type: "button", id: "reset-zoom", onclick: () => { state.window = null; redraw(true, true); } }, "reset zoom"),
  h("span", { class: "help" }, "drag to zoom, double click to reset"));

export const metricsView = (state) => {
  const root = h("div"), charts = new Map(), visible = new Set();
  const search = h("input", { type: "search", id: "metric-search", class: "wide", placeholder: "filter metrics, such as reward|entropy", value: state.metricSearch ?? "", oninput: () => { state.metricSearch = search.value; build(); } });
  let pending = null;
  const load = () => { // charts that come into view within one frame share a request
    pending ??= requestAnimationFrame(async () => {
      pending = null;
      await fill([...visible], state.shown(), chartOptions(state, redraw)).catch(state.complain);
    });
  };
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const chart = charts.get(entry.target.dataset.metric);
      if (!chart) continue;
      entry.isIntersecting ? visible.add(chart) : visible.delete(chart);
    }
    load();
  }, { rootMargin: "200px" });
  const redraw = (refetch = true, rebuild = false) => {
    if (rebuild || Boolean(state.window) !== Boolean(root.querySelector("#reset-zoom"))) return build();
    if (refetch) return load();
    for (const chart of visible) { if (chart.options) chart.show(chart.lines, chartOptions(state, redraw)); }
  };
  const matches = (name) => {
    const parts = search.value.toLowerCase().split("|").map((part) => part.trim()).filter(Boolean);
    return !parts.length || parts.some((part) => name.toLowerCase().includes(part));
  };
  const build = () => {
    for (const chart of charts.values()) chart.close();
    charts.clear(); visible.clear(); watcher.disconnect();
    const names = [...new Set(state.shown().flatMap((run) => run.metrics))].filter(matches).sort();
    const sections = new Map();
    for (const name of names) { const part = name.split("/")[0]; sections.set(part, [...sections.get(part) ?? [], name]); }
    const order = [...ORDER.filter((part) => sections.has(part)), ...[...sections.keys()].filter((part) => !ORDER.includes(part)).sort()];
    const focused = document.activeElement === search;
    root.replaceChildren(h("section", { class: "card" }, h("div", { class: "controls" }, search, controls(state, redraw))),
      ...order.flatMap((part) => section(part, sections.get(part))));
    if (focused) search.focus();
    if (!names.length) root.append(h("p", { class: "help" }, "No metric matches, or none is logged yet."));
  };
  const section = (part, names) => {
    const grid = h("div", { class: "grid" });
    const head = h("div", { class: "section-head", onclick: () => { grid.hidden = !grid.hidden; } }, h("h2", {}, TITLES[part] ?? part), h("small", {}, `${names.length} metrics`));
    for (const name of names) {
      const chart = new Chart(name, { title: name.slice(part.length + 1) || name });
      charts.set(name, chart);
      grid.append(chart.card);
      watcher.observe(chart.card);
    }
    return [head, grid];
  };
  root.className = "stack";
  return { root, open: build, refresh: (changed) => {
    const known = [...new Set(state.shown().flatMap((run) => run.metrics))].filter(matches);
    known.some((name) => !charts.has(name)) ? build() : changed && load();
  }, runsChanged: build, close: () => { watcher.disconnect(); for (const chart of charts.values()) chart.close(); } };
};
