// A card with one metric of one or several runs: raw and smoothed lines, marks of events, zoom by dragging.
import { api, color, h, hideTip, number, seconds, showTip } from "./dom.js";

const FONT = "11px system-ui, sans-serif", STEPS = [];
for (let power = -12; power <= 12; power++) for (const m of [1, 2, 2.5, 5]) STEPS.push(m * 10 ** power);

// Exponential moving average without bias at the start: weight 0.9 averages about the last ten points.
export const smooth = (values, weight) => {
  let total = 0, mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    total = total * weight + value;
    mass = mass * weight + 1;
    return total / mass;
  });
};

const limits = (values, log) => {
  const known = values.filter((v) => v !== null && v !== undefined && (!log || v > 0));
  if (!known.length) return [0, 1];
  let low = Infinity, high = -Infinity;
  for (const v of known) { if (v < low) low = v; if (v > high) high = v; }
  if (log) { const a = 10 ** Math.floor(Math.log10(low)), b = 10 ** Math.ceil(Math.log10(high)); return [a, b > a ? b : a * 10]; }
  if (high - low <= 1e-6 * Math.abs(high)) { const margin = Math.abs(high) / 2 || 1; return [low < 0 ? low - margin : 0, high + margin]; }
  const margin = (high - low) * .07;
  return [low >= 0 && low < (high - low) / 2 ? 0 : low - margin, high + margin];
};
const decades = (plot, axis, low, high) => {
  const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9), stride = Math.max(1, Math.ceil((last - first + 1) / 5));
  return Array.from({ length: Math.floor((last - first) / stride) + 1 }, (_, n) => 10 ** (first + n * stride));
};
const short = (v) => {
  const size = Math.abs(v);
  return v === 0 ? "0" : size >= 1e6 || size < 1e-3 ? v.toExponential(1).replace("e+", "e").replace(".0e", "e") : size >= 1e4 ? `${v / 1000}k` : String(Number(v.toPrecision(6)));
};
const xText = (byTime) => (u, ticks) => ticks.map((v) => byTime ? seconds(v) : !Number.isInteger(v) ? "" : v < 0 ? "start" : v >= 10000 ? `${v / 1000}k` : String(v));
const isLog = (name) => /log_prob_gap|mismatch_kl$/.test(name);

// Options shared by all charts of a page: {smoothing, byTime, window, onZoom, marks}.
export class Chart {
  constructor(name, { big = false, title = name, help = "", metrics = [name] } = {}) {
    Object.assign(this, { name, metrics, lines: [], plot: null, log: isLog(name) });
    this.value = h("b");
    this.box = h("div", { class: "plot" });
    this.legend = h("div", { class: "legend" });
    this.logButton = h("button", { type: "button", title: "logarithmic axis", class: this.log ? "on" : "", onclick: () => { this.log = !this.log; this.logButton.classList.toggle("on", this.log); this.draw(); } }, "log");
    this.card = h("section", { class: `card${big ? " big" : ""}`, data: { metric: name } },
      h("div", { class: "chart-title" }, h("h3", { title: name }, title), this.value, this.logButton), help && h("div", { class: "help" }, help), this.legend, this.box);
    this.size = new ResizeObserver(() => this.plot?.setSize({ width: this.box.clientWidth, height: this.box.clientHeight }));
    this.size.observe(this.box);
  }

  // lines: [{label, color, x, y, low, high}] with `color` a CSS colour.
  show(lines, options) { Object.assign(this, { lines, options }); this.draw(); }

  draw() {
    const { lines, options, log } = this;
    if (!options || !this.box.isConnected) return;
    this.plot?.destroy();
    this.plot = null;
    const drawn = lines.filter((line) => line.x.length);
    const last = drawn[0]?.y.findLast((v) => v !== null);
    this.value.textContent = drawn.length ? number(last) : "";
    this.box.replaceChildren();
    this.legend.replaceChildren(...drawn.length > 1 ? drawn.map((line) => h("span", {}, h("i", { class: "key", style: { background: line.color } }), line.label)) : []);
    if (!drawn.length) return this.box.append(h("p", { class: "help" }, "no values"));
    const clean = (ys) => log ? ys.map((v) => v === null || v > 0 ? v : null) : ys;
    const tables = [], series = [], owners = [], bands = [];
    const add = (line, ys, look) => { tables.push([line.x, clean(ys)]); series.push({ stroke: line.color, width: 1.7, spanGaps: true, points: { show: false }, ...look }); return series.length; };
    for (const line of drawn) {
      if (line.low && drawn.length === 1) {
        const high = add(line, line.high, { stroke: "transparent", width: 0 }), low = add(line, line.low, { stroke: "transparent", width: 0 });
        bands.push({ series: [high, low], fill: `${line.color}1f` });
      }
      const few = line.x.length < 2 || line.markers;
      const smoothed = options.smoothing > 0 && line.x.length > 3 && !line.markers;
      owners[add(line, line.y, smoothed ? { stroke: `${line.color}50`, width: 1 } : { dash: line.dash, points: { show: few, size: 6, stroke: line.color, fill: color("--card") } })] = line;
      if (smoothed) add(line, smooth(line.y, options.smoothing), {});
    }
    const data = uPlot.join(tables), xs = data[0];
    const [low, high] = limits(data.slice(1).flat(), log);
    const axis = { stroke: color("--faint"), font: FONT, ticks: { show: false } };
    this.plot = new uPlot({
      width: this.box.clientWidth, height: this.box.clientHeight, legend: { show: false }, padding: [8, 12, 0, 0], bands,
      cursor: { y: false, drag: { x: true, y: false, setScale: false }, points: { size: 6 }, sync: { key: "watch", setSeries: false } },
      scales: { x: { time: false, range: () => options.window ?? [xs[0], Math.max(xs.at(-1), xs[0] + (options.byTime ? 1e-3 : 1))] }, y: { range: () => [low, high], distr: log ? 3 : 1 } },
      axes: [{ ...axis, grid: { show: false }, size: 26, gap: 5, space: 66, incrs: STEPS.filter((s) => options.byTime || Number.isInteger(s)), values: xText(options.byTime) },
        { ...axis, grid: { stroke: color("--grid"), width: 1 }, size: 50, gap: 6, space: 32, incrs: STEPS, ...(log ? { splits: decades, values: (_, ticks) => ticks.map((v) => v.toExponential(0)) } : { values: (_, ticks) => ticks.map(short) }) }],
      series: [{}, ...series],
      hooks: {
        draw: [(u) => this.mark(u)],
        setSelect: [(u) => { if (u.select.width > 4) options.onZoom?.([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]); u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false); }],
        setCursor: [(u) => this.point(u, xs, owners)],
        ready: [(u) => { u.over.addEventListener("mouseleave", hideTip); u.over.addEventListener("dblclick", () => options.onZoom?.(null)); }],
      },
    }, data, this.box);
  }

  point(u, xs, owners) {
    const i = u.cursor.idx;
    if (i === null || i === undefined || u.cursor.left < 0 || !u.over.matches(":hover")) return u.over.matches(":hover") || !this.box.matches(":hover") ? undefined : hideTip();
    const rows = owners.flatMap((line, place) => u.data[place]?.[i] === null || u.data[place]?.[i] === undefined ? [] : [[line.label, number(u.data[place][i]), line.color]]);
    const near = (this.options.marks ?? []).filter((mark) => Math.abs(u.valToPos(mark.x, "x") - u.cursor.left) < 4).slice(0, 3);
    const box = u.over.getBoundingClientRect();
    const at = this.options.byTime ? `after ${seconds(xs[i])}` : xs[i] < 0 ? "before training" : `rollout ${Number(xs[i].toFixed(1))}`;
    showTip(box.left + u.cursor.left, box.top + u.cursor.top, at, [...rows, ...near.map((mark) => [mark.text.slice(0, 120), ""])]);
  }

  mark(u) {
    const ratio = devicePixelRatio;
    u.ctx.save();
    u.ctx.lineWidth = ratio;
    u.ctx.setLineDash([3 * ratio, 4 * ratio]);
    for (const { x, kind } of this.options.marks ?? []) {
      if (x < u.scales.x.min || x > u.scales.x.max) continue;
      const left = u.valToPos(x, "x", true);
      u.ctx.strokeStyle = color(kind === "engine" || kind === "failed" || kind === "end" ? "--bad" : "--warn");
      u.ctx.beginPath();
      u.ctx.moveTo(left, u.bbox.top);
      u.ctx.lineTo(left, u.bbox.top + u.bbox.height);
      u.ctx.stroke();
    }
    u.ctx.restore();
  }

  close() { this.size.disconnect(); this.plot?.destroy(); this.plot = null; }
}

// Fills charts with the series of all shown runs, one request per run.
export const fill = async (charts, runs, options) => {
  const wanted = [...new Set(charts.flatMap((chart) => chart.metrics))];
  if (!wanted.length) return;
  const [from, to] = options.window ?? [];
  const answers = await Promise.all(runs.map((run) => api("series", { run: run.name, names: wanted.join(","), x: options.byTime ? "time" : "rollout", from, to })));
  for (const chart of charts) {
    const lines = runs.flatMap((run, n) => chart.metrics.map((metric, m) => ({
      label: runs.length > 1 ? (chart.metrics.length > 1 ? `${run.name} ${metric}` : run.name) : metric,
      color: chart.metrics.length > 1 && runs.length === 1 ? color(`--c${m % 7}`) : run.color,
      markers: metric.startsWith("eval/"), dash: m && runs.length > 1 ? [6, 4] : undefined,
      ...answers[n][metric],
    })));
    chart.show(lines, options);
  }
};
