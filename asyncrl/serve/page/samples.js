// The kept samples of a step, and one of them token by token, as the learner saw it.

import { ask, exact, h, longText, notice, table, visible } from "./dom.js";
import { pathOf, titled } from "./files.js";

const SORTS = {
  "as kept": () => 0,
  "lowest reward": (a, b) => a.reward - b.reward,
  "highest reward": (a, b) => b.reward - a.reward,
  longest: (a, b) => b.num_tokens - a.num_tokens,
  oldest: (a, b) => b.lag - a.lag,
  "highest ratio": (a, b) => b.ratio_p99 - a.ratio_p99,
};
const SHOWN = 60;
const nameOf = (row) => `g${row.group_id}.${row.index}`;

// By what tokens are coloured: the column, and the shade of a value: 0 to 5 of one colour, or n3 to p3 of two.
const among = (value, least, most) => (most > least ? Math.round((5 * (value - least)) / (most - least)) : 0);
const sided = (share) => (share < 0 ? "n" : "p") + Math.min(3, Math.ceil(3 * Math.abs(share)));
const COLOURS = {
  version: ["version", (value) => `v${value % 6}`, "Each version has a colour; a bar stands where it changes."],
  "log-probability": ["learner", (value, least, most) => 5 - among(value, least, most), "The darker, the less likely to the learner."],
  ratio: ["ratio", (value) => sided(Math.log2(value)), "Orange: the learner gives it more than the policy that sampled; blue: less."],
  weight: ["weights", among, "The darker, the higher the weight of the correction."],
  clipped: ["clipped", (value) => (value ? 5 : 0), "Dark and underlined: a clip holds the gradient back."],
  kept: ["kept", (value) => (value ? 0 : 5), "Dark and struck through: a correction dropped it."],
  entropy: ["entropy", among, "The darker, the less sure the learner."],
  advantage: ["advantages", (value, least, most) => sided(value / (Math.max(-least, most) || 1)), "Orange: better than expected; blue: worse."],
};
const VALUES = ["token", "version", "behaviour", "learner", "ratio", "weights", "kept", "clipped", "entropy", "advantages", "trained"];
const HEADS = ["Place", "Text", "Id", "Version", "Behaviour logprob", "Learner logprob", "Ratio", "Weight", "Kept", "Clipped", "Entropy", "Advantage", "Trained"];

export async function samples(name) {
  const others = groups(name);
  let { steps, rows } = await ask(`${pathOf(name)}/samples`);
  if (!rows.length) return { node: titled(name, "samples", notice("No samples are kept yet."), others) };
  const list = h("div", { class: "low" });
  const one = h("div");
  const step = h("input", { type: "number", id: "step", min: steps[0], max: steps.at(-1), value: rows[0].step });
  const sort = h("select", { id: "sort" }, Object.keys(SORTS).map((label) => h("option", {}, label)));
  let turn = 0;
  const open = async (row, isAsked = false) => {
    const mine = (turn += 1);
    const node = await sample(name, row);
    if (mine !== turn) return; // another was asked for meanwhile
    one.replaceChildren(node);
    if (isAsked) one.scrollIntoView({ block: "start" });
  };
  const draw = async () => {
    const sorted = [...rows].sort(SORTS[sort.value]);
    const button = (row) => h("button", { type: "button", onclick: () => open(row, true) }, nameOf(row));
    list.replaceChildren(table(`${rows.length} samples of step ${rows[0]?.step ?? step.value}`,
      ["Sample", "Reward", "Tokens", "Versions", "Lag", "Ratio, 99th percentile", "Ended by", "Prompt", "Begins with"],
      sorted.map((row) => [button(row), row.reward, row.num_tokens, `${row.oldest_version} to ${row.newest_version}`, row.lag, row.ratio_p99,
        row.finish_reason, row.prompt_id, row.text.slice(0, SHOWN)])));
    one.replaceChildren();
    if (sorted.length) await open(sorted[0]);
  };
  const load = async () => {
    try {
      ({ steps, rows } = await ask(`${pathOf(name)}/samples?step=${encodeURIComponent(step.value)}`));
      await draw();
    } catch (error) {
      list.replaceChildren(notice(error.message, true));
    }
  };
  step.addEventListener("change", load);
  sort.addEventListener("change", draw);
  await draw();
  return { node: titled(name, "samples", h("div", { class: "bar" },
    h("label", { for: "step" }, `Step (${steps[0]} to ${steps.at(-1)} are kept)`), step, h("label", { for: "sort" }, "Order"), sort), list, one, others) };
}

const STATES = ["running", "scoring", "ready", "taken", "trained", "dropped", "failed"];

// The newest groups in a state, trained or not, by the ledger.
function groups(name) {
  const state = h("select", { id: "state" }, h("option", {}, "choose"), STATES.map((one) => h("option", {}, one)));
  const list = h("div", { class: "low" });
  const mean = (values) => (values.length ? values.reduce((sum, one) => sum + one, 0) / values.length : null);
  state.addEventListener("change", async () => {
    if (!state.selectedIndex) return list.replaceChildren();
    try {
      const found = await ask(`${pathOf(name)}/groups?state=${state.value}`);
      list.replaceChildren(found.length ? table(`The newest ${found.length} groups that are ${state.value}`,
        ["Group", "Prompt", "Why", "Generator", "Issued at version", "Attempt", "Members", "Scored", "Mean reward", "Mean tokens", "Failures"],
        found.map((one) => [`g${one.group_id}`, one.prompt_id, one.reason, one.generator, one.version, one.attempt, one.size, one.rewards.length,
          mean(one.rewards), mean(one.tokens), one.failures.join("; ")])) : notice(`No group is ${state.value}.`));
    } catch (error) {
      list.replaceChildren(notice(error.message, true));
    }
  });
  return h("section", {}, h("h2", {}, "Groups by state"), h("div", { class: "bar" }, h("label", { for: "state" }, "Groups that are"), state), list);
}

async function sample(name, row) {
  const id = nameOf(row);
  const parts = Object.entries(row.parts).map(([part, value]) => `${part} ${exact(value)}`).join(", ");
  const path = `${pathOf(name)}/tokens?step=${row.step}&group=${row.group_id}&index=${row.index}`;
  const first = await ask(path);
  const seen = first.num_tokens ? tokens(id, path, first) : [notice("The learner's view of its tokens is not kept.")];
  return h("article", { "aria-label": `Sample ${id}` }, h("h2", {}, `${id}: reward `, h("span", { class: "reward" }, exact(row.reward))),
    h("div", { class: "soft" }, visible(parts)), h("div", {}, "Prompt"), longText(row.prompt, `Prompt of ${id}`),
    h("div", {}, "Completion"), longText(row.text, `Completion of ${id}`), ...seen);
}

function tokens(id, path, got) {
  let now = got;
  let here = 0;
  const colour = h("select", { id: "colour" }, Object.keys(COLOURS).map((label) => h("option", {}, label)));
  const legend = h("p", { class: "soft" });
  const box = h("div", { class: "tokens", role: "listbox", tabindex: 0, "aria-label": `Tokens of ${id}` });
  const current = h("div", { class: "dense", "aria-live": "polite" });
  const every = h("details", {}, h("summary", {}, "Values of these tokens"));
  const values = (i) => [now.first + i, now.text[i], ...VALUES.map((column) => now[column][i])];
  const fill = () => {
    if (every.open) every.replaceChildren(every.firstChild, table("Values of these tokens", HEADS, now.text.map((_, i) => values(i))));
  };
  const point = (i) => {
    box.children[here]?.setAttribute("aria-selected", "false");
    here = Math.max(0, Math.min(i, now.text.length - 1));
    const chosen = box.children[here];
    chosen.setAttribute("aria-selected", "true");
    box.setAttribute("aria-activedescendant", chosen.id);
    current.replaceChildren(table("The chosen token", HEADS, [values(here)]));
  };
  const paint = () => {
    const [column, shade, meaning] = COLOURS[colour.value];
    const known = now[column].filter((value, i) => now.trained[i] && value != null).map(Number);
    const [least, most] = known.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
    legend.textContent = `${meaning} Here from ${exact(known.length ? least : null)} to ${exact(known.length ? most : null)}. Dotted: not trained.`;
    [...box.children].forEach((span, i) => {
      const value = now[column][i];
      const bar = i && now.version[i] !== now.version[i - 1] ? "changes" : "";
      const marks = [bar, now.trained[i] ? "" : "untrained", now.clipped[i] ? "clipped" : "", now.trained[i] && !now.kept[i] ? "dropped" : ""];
      const isShown = value != null && (now.trained[i] || column === "version");
      span.className = [isShown ? `shade${shade(value, least, most)}` : "", ...marks].join(" ");
      span.title = `${column} ${exact(value)}`;
    });
  };
  const draw = () => {
    box.replaceChildren(...now.text.map((text, i) => h("span", { role: "option", id: `token-${i}`, "aria-selected": "false" }, visible(text) || "∅")));
    paint();
    point(0);
    fill();
  };
  const MOVES = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10, Home: -Infinity, End: Infinity };
  box.addEventListener("keydown", (event) => {
    if (!(event.key in MOVES)) return;
    event.preventDefault();
    point(here + MOVES[event.key]);
    box.children[here].scrollIntoView({ block: "nearest" });
  });
  box.addEventListener("click", (event) => event.target.role === "option" && point([...box.children].indexOf(event.target)));
  colour.addEventListener("change", paint);
  every.addEventListener("toggle", fill);
  const size = now.text.length;
  const from = h("input", { type: "number", id: "first", min: 0, max: now.num_tokens - 1, step: size, value: 0 });
  from.addEventListener("change", async () => {
    now = await ask(`${path}&first=${Math.max(0, Math.min(Number(from.value) || 0, now.num_tokens - 1))}`);
    draw();
  });
  draw();
  return [h("h2", {}, "Rewards of its group"), got.group.length
    ? table("Rewards of its group", ["Sample", "State", "Reward", "Tokens"], got.group.map((member) => [member.index, member.state, member.reward, member.tokens]))
    : notice("The ledger does not say."),
  h("h2", {}, `Its ${now.num_tokens} tokens, as the learner saw them before the step`),
  h("div", { class: "bar" }, h("label", { for: "colour" }, "Colour by"), colour,
    ...(now.num_tokens > size ? [h("label", { for: "first" }, `From token, ${size} at once`), from] : [])),
  legend, box, current, every];
}
