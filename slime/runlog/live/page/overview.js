// The first page of a run: what it is, what it learned, what stands out, and the charts to look at first.
import { Chart, fill } from "./charts.js";
import { api, clock, h, number, score, seconds } from "./dom.js";
import { chartOptions, controls } from "./metrics.js";
import { findingRow } from "./why.js";

const FIRST = [
  ["rollout/response_len_mean", "Response length"], ["train/entropy", "Entropy"], ["rollout/zero_std_groups", "Groups without signal"],
  ["train/grad_norm", "Gradient norm"], ["train/log_prob_gap_mean", "Log-prob gap"], ["train/stale_log_prob_gap_mean", "Staleness gap"], ["rollout/truncated", "Truncated"],
  ["perf/tokens_per_second", "Tokens per second"], ["perf/step_time", "Seconds per rollout"], ["rollout/staleness_mean", "Staleness"],
];

export const eventRow = (event) => h("div", { class: `event ${event.kind}${event.outcome === "failed" ? " bad" : ""}` },
  h("time", { title: new Date(event.time * 1000).toLocaleString() }, clock(event.time)), h("span", { class: "kind" }, event.kind), h("span", {}, event.text || event.outcome || ""));

const tiles = (run) => {
  const left = run.num_rollout && run.step_seconds ? (run.num_rollout - run.rollouts) * run.step_seconds : null;
  const entries = [
    ["Rollouts", run.num_rollout ? `${run.rollouts} / ${run.num_rollout}` : run.rollouts, run.state === "running" && left > 0 ? `${seconds(left)} left` : run.state],
    ["Training reward", score(run.latest["rollout/reward_mean"]), "latest rollout"],
    ...Object.entries(run.evals).slice(0, 3).map(([name, metric]) => [`Eval ${name}`, score(run.latest[metric]), `${score(run.first[name])} at first`]),
    ["Per rollout", seconds(run.step_seconds), `${seconds(run.seconds)} in all`],
    ["Throughput", `${number(run.latest["perf/tokens_per_second"])}/s`, `${number(run.tokens)} response tokens`],
    ["Weight version", run.latest["perf/weight_version"] ?? "-", run.latest["rollout/staleness_mean"] ? `staleness ${number(run.latest["rollout/staleness_mean"])}` : "on policy"],
    ["Model", run.model, run.layout],
  ];
  return h("dl", { class: "tiles" }, entries.map(([label, value, sub]) => h("div", {}, h("dt", {}, label), h("dd", {}, String(value)), h("dd", { class: "sub" }, sub))));
};

export const overviewView = (state) => {
  const root = h("div", { class: "stack" }), head = h("div"), notes = h("section", { class: "card", id: "stands-out" }), events = h("div", { class: "events" });
  let charts = [], drawn = "", busy = false;
  const redraw = (refetch = true) => { if (refetch) { drawn = ""; refresh(true); } else for (const chart of charts) if (chart.options) chart.show(chart.lines, chartOptions(state, redraw)); };
  const build = (run) => {
    for (const chart of charts) chart.close();
    const rewards = ["rollout/reward_mean", ...Object.values(run.evals)].filter((name) => run.metrics.includes(name));
    const main = new Chart("reward", { big: true, title: rewards.length ? "Reward" : "Loss", metrics: rewards.length ? rewards : ["train/loss"] });
    const components = Object.groupBy(run.metrics.filter((name) => /^(rollout|eval\/.+)\/reward\/./.test(name)), (name) => name.split("/reward/")[0]);
    const parts = Object.entries(components).map(([kind, metrics]) => new Chart(`${kind}/reward/`, { title: `Reward components, ${kind === "rollout" ? "train" : kind.replace("/", " ")}`, metrics }));
    charts = [main, ...parts, ...FIRST.filter(([name]) => run.metrics.includes(name)).map(([name, title]) => new Chart(name, { title, help: name }))];
    root.replaceChildren(head, controls(state, redraw), h("div", { class: "split" }, main.card, notes), h("div", { class: "grid" }, charts.slice(1).map((chart) => chart.card)),
      h("section", { class: "card" }, h("div", { class: "card-head" }, h("h2", {}, "Events"), h("a", { class: "push", href: state.link("timeline") }, "timeline")), events));
  };
  const update = (run) => {
    const notable = run.findings.filter((finding) => finding.level !== "fine");
    head.replaceChildren(tiles(run));
    notes.replaceChildren(h("div", { class: "card-head" }, h("h2", {}, "What stands out"), h("a", { class: "push", href: state.link("why") }, `all ${run.findings.length} checks`)),
      ...notable.length ? notable.slice(0, 4).map((finding) => findingRow(state, finding, false)) : [h("p", { class: "help" }, run.findings.length ? "Nothing: all checks are fine." : "Nothing is recorded yet.")]);
    events.replaceChildren(...run.events.length ? run.events.toReversed().map(eventRow) : [h("p", { class: "help" }, "none")]);
  };
  const refresh = async (changed) => {
    if (!changed || busy) return;
    busy = true;
    try {
      const run = await api("overview", { run: state.run }), key = JSON.stringify(run.metrics);
      state.events = run.events;
      if (key !== drawn) build(run); // a metric that is new
      drawn = key;
      update(run);
      await fill(charts, state.shown(), chartOptions(state, redraw));
    } catch (error) { state.complain(error); } finally { busy = false; }
  };
  return { root, open: () => refresh(true), refresh, runsChanged: () => refresh(true), close: () => charts.forEach((chart) => chart.close()) };
};
