// What each process did when: phases as lanes, weight versions of engines, events, memory.
import { api, bytes, clock, color, h, hideTip, number, seconds, segmented, showTip } from "./dom.js";
import { Chart } from "./charts.js";
import { eventRow } from "./overview.js";

const PHASES = { start: 6, generate: 0, train: 1, update_weights: 2, eval: 3, save: 4 };
const phaseColor = (name) => color(`--c${PHASES[name.split("/")[0]] ?? 5}`);
const LANES = { driver: 0, rollout: 1 };
const order = (a, b) => (LANES[a] ?? 2) - (LANES[b] ?? 2) || a.localeCompare(b, "en", { numeric: true });
const HEALTH = ["engine", "stall", "warning", "failed", "end", "start"];

export const timelineView = (state) => {
  const root = h("div", { class: "stack" }), lanes = h("section", { class: "card" }), below = h("div", { class: "stack" });
  let window = null, ends = null, memory = [];
  const bar = (item, span, extra) => {
    const [start, end] = window, from = Math.max(item.start, start), to = Math.min(item.end, end);
    if (to < start || from > end) return null;
    return h("div", { class: `bar${extra ?? ""}`, data: { phase: item.name }, style: { left: `${100 * (from - start) / span}%`, width: `${100 * (to - from) / span}%`, ...(item.color ? { background: item.color } : {}) },
      onmousemove: (event) => showTip(event.clientX, event.clientY, item.title, item.rows), onmouseleave: hideTip }, (to - from) / span > .05 ? item.label : "");
  };
  const lane = (who, children) => h("div", { class: "lane", data: { process: who } }, h("div", { class: "who", title: who }, who), h("div", { class: "track" }, children));
  const process = (name, spans, width) => {
    const kept = spans.filter(([, start, end]) => (end - start) / width > .0004);
    return lane(name, kept.slice(0, 1500).map(([phase, start, end]) => bar({ name: phase, start, end, label: phase.split("/").at(-1), color: phaseColor(phase), title: phase, rows: [["took", seconds(end - start)], ["from", clock(start)]] }, width, phase.includes("/") && spans.some(([other]) => other === phase.split("/")[0]) ? " inner" : "")));
  };
  const engine = (name, held, width) => lane(name, held.map(([start, version], n) => bar({ name: "version", start, end: held[n + 1]?.[0] ?? window[1], label: `v${version}`, title: name, rows: [["weight version", String(version)], ["since", clock(start)]] }, width, " plain")));
  const pins = (events, width) => lane("events", events.filter((event) => HEALTH.includes(event.kind)).map((event) => h("div", { class: `pin ${event.kind}`, style: { left: `${100 * (event.time - window[0]) / width}%` },
    onmousemove: (mouse) => showTip(mouse.clientX, mouse.clientY, `${event.kind}, ${clock(event.time)}`, [[event.text || event.outcome || "", ""]]), onmouseleave: hideTip })));
  const move = (shift, zoom = 1) => {
    const [start, end] = window ?? ends, middle = (start + end) / 2 + shift * (end - start), half = Math.max(.05, (end - start) / 2 * zoom);
    window = [Math.max(ends[0], middle - half), Math.min(ends[1], middle + half)];
    state.follow = false;
    load();
  };
  const tools = () => h("div", { class: "controls" }, h("span", { class: "seg" }, [["←", () => move(-.5)], ["→", () => move(.5)], ["−", () => move(0, 2)], ["+", () => move(0, .5)]].map(([label, go]) => h("button", { type: "button", onclick: go }, label))),
    h("button", { type: "button", class: state.follow ? "on" : "", onclick: () => { state.follow = true; window = null; load(); } }, "latest"), h("button", { type: "button", onclick: () => { state.follow = false; window = [...ends]; load(); } }, "whole run"),
    h("span", { class: "legend" }, Object.keys(PHASES).map((name) => h("span", {}, h("i", { class: "key", style: { background: phaseColor(name) } }), name.replace("_", " ")))));
  const ticks = (width) => h("div", { class: "ticks" }, Array.from({ length: 7 }, (_, n) => h("span", { style: { left: `${100 * n / 6}%` } }, n === 0 ? clock(window[0]) : `+${seconds(width * n / 6)}`)));
  const engineTable = (engines) => h("section", { class: "card" }, h("div", { class: "card-head" }, h("h2", {}, "Engines")), h("table", { id: "engines" }, h("thead", {}, h("tr", {}, ["engine", "address", "weight version", "since"].map((name) => h("th", {}, name)))),
    h("tbody", {}, Object.entries(engines).map(([url, held], n) => h("tr", {}, h("td", {}, String(n)), h("td", { class: "mono" }, url), h("td", {}, String(held.at(-1)?.[1] ?? "-")), h("td", {}, held.length ? clock(held.at(-1)[0]) : "-"))))));
  const memoryCharts = (found) => {
    for (const chart of memory) chart.close();
    memory = [["rss", "Resident memory"], ["gpu_peak", "GPU memory, peak reserved"]].filter(([key]) => Object.values(found).some((rows) => rows[key])).map(([key, title]) => Object.assign(new Chart(title, { title: `${title}, GiB` }), { key }));
    below.append(h("div", { class: "grid" }, memory.map((chart) => chart.card)));
    const first = Math.min(...Object.values(found).map((rows) => rows.time[0] ?? Infinity));
    for (const chart of memory) chart.show(Object.entries(found).filter(([, rows]) => rows[chart.key]).sort(([a], [b]) => order(a, b)).map(([name, rows], n) => ({ label: name, color: color(`--c${n % 7}`), x: rows.time.map((time) => time - first), y: rows[chart.key].map((value) => value === undefined || value === null ? null : value / 2 ** 30) })), { smoothing: 0, byTime: true, window: null, marks: [] });
  };
  const load = async () => {
    try {
      const [from, to] = state.follow ? [] : window ?? [];
      const found = await api("timeline", { run: state.run, from, to });
      ends = found.ends;
      if (!ends) { root.replaceChildren(h("p", { class: "help" }, "This run has recorded no phases: it has not begun, or an earlier version of slime wrote it.")); return; }
      window = found.window;
      const width = Math.max(window[1] - window[0], 1e-3);
      lanes.replaceChildren(h("div", { class: "card-head" }, h("h2", {}, "Phases of each process"), tools()), h("div", { class: "lanes" }, pins(found.events, width),
        Object.entries(found.lanes).sort(([a], [b]) => order(a, b)).map(([name, spans]) => process(name, spans, width)), Object.entries(found.engines).map(([, held], n) => engine(`engine ${n}`, held, width))), ticks(width));
      below.replaceChildren(engineTable(found.engines), h("section", { class: "card" }, h("div", { class: "card-head" }, h("h2", {}, "Events in this window")), h("div", { class: "events" }, found.events.length ? found.events.toReversed().map(eventRow) : h("p", { class: "help" }, "none"))));
      root.replaceChildren(lanes, below);
      memoryCharts(found.memory);
    } catch (error) { state.complain(error); }
  };
  state.follow ??= true;
  return { root, open: load, refresh: (changed) => { if (changed && state.follow) load(); }, runsChanged: () => { window = null; load(); }, close: () => memory.forEach((chart) => chart.close()) };
};
