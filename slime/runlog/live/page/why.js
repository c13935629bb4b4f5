// "Why does the reward not rise?": statements of the server about the numbers, each with the rows behind it.
import { api, h } from "./dom.js";
import { Chart, fill } from "./charts.js";
import { chartOptions } from "./metrics.js";
import { groupTable, sampleTable } from "./samples.js";

export const findingRow = (state, finding, open) => {
  const rows = h("div", { class: "rows" });
  const links = h("span", { class: "links" });
  const row = h("div", { class: `finding ${finding.level}` }, h("span", { class: "mark", title: finding.level }), h("b", {}, finding.title), links, h("p", {}, finding.text), rows);
  if (finding.view) links.append(h("a", { href: state.link(finding.view, finding.query) }, finding.view === "groups" ? "all groups" : "all samples"));
  if (open) evidence(state, finding, rows);
  return row;
};

const evidence = async (state, finding, place) => {
  const charts = finding.metrics.map((name) => new Chart(name, { title: name }));
  place.append(h("div", { class: "grid" }, charts.map((chart) => chart.card)));
  try {
    await fill(charts, state.shown(), { ...chartOptions(state, () => {}), onZoom: null, window: null });
    if (!finding.view) return;
    const page = await api(finding.view, { run: state.run, ...finding.query });
    place.append(h("p", { class: "help" }, `${page.total.toLocaleString("en")} ${finding.view}; the first of them:`), (finding.view === "groups" ? groupTable : sampleTable)(state, page.rows.slice(0, 5)));
  } catch (error) { state.complain(error); }
};

export const whyView = (state) => {
  const root = h("div", { class: "stack" });
  let shown = "";
  const load = async () => {
    const run = await api("overview", { run: state.run });
    const text = JSON.stringify(run.findings);
    if (text === shown) return;
    shown = text;
    const part = (level, title) => {
      const found = run.findings.filter((finding) => finding.level === level);
      return found.length ? h("section", { class: "card" }, h("div", { class: "card-head" }, h("h2", {}, `${title} (${found.length})`)),
        found.map((finding) => findingRow(state, finding, level !== "fine"))) : null;
    };
    root.replaceChildren(h("p", { class: "help" }, "Why does the reward not rise? What the numbers of the last ten rollouts say. Limits are stated; nothing is concluded from metrics that the run does not log."),
      ...[part("problem", "Problems"), part("notice", "Worth a look"), part("fine", "Checked, fine")].filter(Boolean));
    if (!run.findings.length) root.append(h("p", { class: "help" }, "Nothing is recorded yet."));
  };
  const refresh = (changed) => changed && load().catch(state.complain);
  return { root, open: () => refresh(true), refresh, runsChanged: () => { shown = ""; refresh(true); }, close: () => {} };
};
