// One sample: its conversation, its tokens with every number that is kept of them, and its group.
import { api, color, h, hideTip, number, score, segmented, showTip, signed } from "./dom.js";
import { sampleLink, sampleTable } from "./samples.js";

const COLUMNS = [["engine", "engine log-prob"], ["trainer", "trainer log-prob"], ["gap", "gap"], ["weight", "importance weight"], ["advantage", "advantage"], ["mask", "in the loss"], ["version", "weight version"], ["ref", "reference log-prob"], ["teacher_log_probs", "teacher log-prob"], ["values", "value"]];

const turn = (role, text, extra = []) => h("div", { class: `turn ${role}` }, h("div", { class: "role" }, role), text === "" && extra.length ? null : h("pre", { class: "mono" }, text), extra);
const calls = (message) => (message.tool_calls ?? []).map((call) => h("div", { class: "call mono" }, h("b", {}, call.name), ` ${call.arguments}`));

// ChatML, as many templates write it, or messages as JSON; anything else is one turn.
const promptTurns = (prompt) => {
  if (prompt.startsWith("[")) {
    try {
      const messages = JSON.parse(prompt);
      if (messages.every((message) => typeof message?.role === "string")) return messages.map((message) => turn(message.role, typeof message.content === "string" ? message.content : JSON.stringify(message.content), calls(message)));
    } catch { /* it only looks like JSON */ }
  }
  const parts = prompt.split("<|im_start|>");
  if (parts.length < 2) return [turn("prompt", prompt)];
  return [...(parts[0] ? [turn("prompt", parts[0])] : []), ...parts.slice(1).flatMap((part, n) => {
    const role = part.slice(0, part.indexOf("\n")), body = part.slice(part.indexOf("\n") + 1).replace(/<\|im_end\|>\s*$/, "");
    return n === parts.length - 2 && body === "" ? [] : [turn(role, body)];
  })];
};

// Stretches of the response by who wrote them: the model where a token is in the loss, else tools or the template.
const responseTurns = (sample) => {
  const tokens = sample.tokens, starts = tokens ? tokens.position.findIndex((position) => position >= sample.prompt_len) : -1;
  const masks = starts < 0 ? [] : tokens.mask.slice(starts);
  const inner = masks.slice(0, masks.lastIndexOf(1) + 1);
  if (!inner.includes(0) || !inner.includes(1)) return [turn("assistant", sample.response)];
  const found = [];
  masks.forEach((mask, n) => {
    const text = tokens.texts[starts + n];
    found.at(-1)?.mask === mask ? (found.at(-1).text += text) : found.push({ mask, text });
  });
  return found.map(({ mask, text }) => turn(mask ? "assistant" : "observation", text));
};

const conversation = (sample) => h("section", { class: "card", id: "conversation" }, h("div", { class: "card-head" }, h("h2", {}, "Conversation"), sample.label !== null && sample.label !== undefined && h("span", { class: "push help" }, `label: ${sample.label}`)),
  sample.images?.length > 0 && h("div", { class: "images" }, sample.images.map((source, n) => h("img", { src: source, alt: `image ${n + 1}` }))),
  sample.messages ? sample.messages.map((message) => turn(message.role || "message", message.content, calls(message))) : [...promptTurns(sample.prompt), ...responseTurns(sample)],
  sample.error && h("div", { class: "turn" }, h("div", { class: "role" }, "error"), h("pre", { class: "mono error" }, sample.error)));

const shade = (name, value, tokens) => {
  if (value === null || value === undefined) return "";
  const mix = (key, share) => `color-mix(in srgb, ${color(key)} ${Math.round(70 * Math.min(1, share))}%, transparent)`;
  if (name === "mask") return value ? mix("--c2", .45) : "";
  if (name === "version") return value < 0 ? "" : mix(`--c${value % 7}`, .45);
  if (name === "weight") return value === 1 ? "" : mix(value > 1 ? "--c1" : "--c0", Math.abs(Math.log(value)) / Math.max(tokens.most.gap, 1e-6));
  if (name === "engine" || name === "trainer" || name === "ref" || name === "teacher_log_probs") return mix("--c4", -value / 4);
  return mix(value > 0 ? "--c2" : "--c4", Math.abs(value) / Math.max(tokens.most[name] ?? 0, 1e-9));
};
const visible = (text) => text.includes("\n") ? [...text].flatMap((letter) => letter === "\n" ? [h("span", { class: "ret" }, "↵"), "\n"] : [letter]) : [text === "" ? "∅" : text];

const strip = (sample) => {
  const tokens = sample.tokens, known = COLUMNS.filter(([name]) => tokens[name]?.some((value) => value !== null));
  tokens.most = Object.fromEntries(known.map(([name]) => [name, tokens[name].reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 0)]));
  let by = known.find(([name]) => name === "gap")?.[0] ?? "engine", table = false;
  const body = h("div"), head = h("div", { class: "controls" });
  const values = (n) => known.map(([name, label]) => [label, name === "mask" ? (tokens.mask[n] ? "yes" : "no") : name === "version" ? (tokens.version[n] < 0 ? "-" : String(tokens.version[n])) : tokens[name][n] === null ? "-" : String(Number(tokens[name][n].toPrecision(7)))]);
  const row = (n) => h("tr", { data: { position: tokens.position[n] } }, h("td", { class: "num" }, String(tokens.position[n])), h("td", { class: "num" }, String(tokens.ids[n])), h("td", { class: "mono" }, JSON.stringify(tokens.texts[n]).slice(1, -1)), values(n).map(([, text]) => h("td", { class: "num" }, text)));
  const span = (n) => h("span", { class: `tok${tokens.mask[n] ? "" : " off"}`, data: { n }, style: { background: shade(by, tokens[by]?.[n], tokens) } }, visible(tokens.texts[n]));
  const all = tokens.ids.map((_, n) => n);
  const draw = () => {
    head.replaceChildren(h("label", {}, "colour by", h("select", { id: "strip-by", onchange: (event) => { by = event.target.value; draw(); } }, known.map(([name, label]) => h("option", { value: name, selected: name === by }, label)))),
      segmented([[false, "strip"], [true, "table"]], table, (next) => { table = next; draw(); }), h("span", { class: "help" }, "grey: not in the loss; point at a token for its numbers"));
    if (table) return body.replaceChildren(h("div", { class: "scroll" }, h("table", { id: "tokens" }, h("thead", {}, h("tr", {}, ["position", "id", "token", ...known.map(([, label]) => label)].map((label) => h("th", { class: label === "token" ? "" : "num" }, label)))), h("tbody", {}, all.map(row)))));
    const parts = all.flatMap((n) => {
      const skipped = n ? tokens.position[n] - tokens.position[n - 1] - 1 : tokens.position[0];
      return [skipped > 0 ? h("span", { class: "gap" }, ` … ${skipped.toLocaleString("en")} tokens not kept … `) : null, span(n)];
    });
    body.replaceChildren(h("div", { class: "strip mono", id: "strip" }, parts));
    const box = body.firstChild;
    box.addEventListener("mousemove", (event) => {
      const token = event.target.closest(".tok");
      if (!token) return hideTip();
      const n = Number(token.dataset.n);
      showTip(event.clientX, event.clientY, JSON.stringify(tokens.texts[n]), [["position", String(tokens.position[n])], ["id", String(tokens.ids[n])], ...values(n)]);
    });
    box.addEventListener("mouseleave", hideTip);
  };
  draw();
  return h("section", { class: "card" }, h("div", { class: "card-head" }, h("h2", {}, "Tokens")), head, body);
};

const facts = (sample) => h("section", { class: "card" }, h("dl", { class: "facts", id: "facts" }, [
  ["rollout", sample.rollout_id], ["dataset", sample.dataset], ["group", sample.group], ["sample", sample.index], ["reward", score(sample.reward)], ["advantage", sample.advantage === null ? "-" : signed(sample.advantage)],
  ...Object.entries(sample.rewards ?? {}).map(([name, value]) => [`reward ${name}`, number(value)]),
  ["prompt tokens", sample.prompt_len], ["response tokens", sample.response_len], ["in the loss", sample.trained_len], ["status", sample.status], ["weight versions", sample.oldest_version < 0 ? "-" : sample.oldest_version === sample.newest_version ? sample.newest_version : `${sample.oldest_version}-${sample.newest_version}`],
].map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value))))));

export const sampleView = (state) => {
  const root = h("div", { class: "stack" });
  const load = async () => {
    try {
      const sample = await api("sample", { run: state.run, ...state.query });
      const place = sample.members.findIndex((member) => member.index === sample.index), next = (step) => sample.members[place + step];
      const step = (label, other) => h("button", { type: "button", disabled: !other, onclick: () => { location.hash = sampleLink(state, other); } }, label);
      root.replaceChildren(h("div", { class: "controls" }, h("button", { type: "button", onclick: () => history.back() }, "← back"), step("previous of the group", next(-1)), step("next of the group", next(1)), h("a", { href: state.link("groups", { prompt: sample.prompt_hash, dataset: sample.dataset }) }, "this prompt over time")),
        facts(sample), sample.kept ? conversation(sample) : h("p", { class: "help" }, "The text of this sample was not kept; --log-samples sets how many of each rollout are."),
        sample.tokens ? strip(sample) : sample.kept && h("p", { class: "help" }, "The tokens of this sample were not kept."),
        ...(sample.branches.length ? [h("section", { class: "card", id: "branches" }, h("div", { class: "card-head" }, h("h2", {}, `Branches of this trajectory (${sample.branches.length})`)), sampleTable(state, sample.branches))] : []),
        h("section", { class: "card" }, h("div", { class: "card-head" }, h("h2", {}, `Group ${sample.group}`), h("span", { class: "help" }, `${sample.members.length} samples of the same prompt`)), sampleTable(state, sample.members)));
    } catch (error) { state.complain(error); }
  };
  return { root, open: load, refresh: () => {}, runsChanged: load, close: hideTip };
};
