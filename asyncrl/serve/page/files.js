// What a run has written: events, samples, ledger, config, logs.

import { ask, askText, exact, h, longText, notice, Stream, table, time, visible } from "./dom.js";

const MOST_EVENTS = 2000;
const LOG_BYTES = 65536;
const pathOf = (name) => `/v1/runs/${encodeURIComponent(name)}`;
const titled = (name, what, ...children) => h("div", {}, h("h1", {}, `${name}: ${what}`), ...children);

export async function events(name) {
  const record = await ask(pathOf(name));
  const shown = table("What happened, newest first", ["Number", "Time", "What", "Of", "Why", "Version"], []);
  const body = shown.querySelector("tbody");
  const take = (event) => {
    const cells = [event.seq, time(event.time_s), event.kind, event.subject ?? "", event.text ?? "", event.version ?? ""];
    body.prepend(h("tr", {}, cells.map((cell) => h("td", {}, visible(String(cell))))));
    if (body.rows.length > MOST_EVENTS) body.lastChild.remove();
  };
  const stream = new Stream(`${pathOf(name)}/events`, { event: take }, async () => (await ask(pathOf(name))).state === "ended");
  return { node: titled(name, "events", record.reason ? notice(record.reason) : null, shown), leave: () => stream.close() };
}

const SORTS = {
  "as kept": () => 0,
  "lowest reward": (a, b) => a.reward - b.reward,
  "highest reward": (a, b) => b.reward - a.reward,
  longest: (a, b) => b.num_tokens - a.num_tokens,
  oldest: (a, b) => a.oldest_version - b.oldest_version,
};

export async function samples(name) {
  let { steps, rows } = await ask(`${pathOf(name)}/samples`);
  if (!rows.length) return { node: titled(name, "samples", notice("No samples are kept yet.")) };
  const place = h("div");
  const step = h("input", { type: "number", id: "step", min: steps[0], max: steps.at(-1), value: rows[0].step });
  const sort = h("select", { id: "sort" }, Object.keys(SORTS).map((label) => h("option", {}, label)));
  const draw = () => place.replaceChildren(h("p", { class: "soft", role: "status" }, `${rows.length} samples of step ${rows[0]?.step ?? step.value}`), ...[...rows].sort(SORTS[sort.value]).map(sample));
  const load = async () => {
    try {
      ({ steps, rows } = await ask(`${pathOf(name)}/samples?step=${encodeURIComponent(step.value)}`));
      draw();
    } catch (error) {
      place.replaceChildren(notice(error.message, true));
    }
  };
  step.addEventListener("change", load);
  sort.addEventListener("change", draw);
  draw();
  return { node: titled(name, "samples", h("div", { class: "bar" },
    h("label", { for: "step" }, `Step (${steps[0]} to ${steps.at(-1)} are kept)`), step, h("label", { for: "sort" }, "Order"), sort), place) };
}

function sample(row) {
  const id = `g${row.group_id}.${row.index}`;
  const parts = Object.entries(row.parts).map(([part, value]) => `${part} ${exact(value)}`).join(", ");
  return h("article", { "aria-label": `Sample ${id}` }, h("h3", {}, `${id}: reward `, h("span", { class: "reward" }, exact(row.reward))),
    h("div", { class: "soft" }, visible(`${parts ? `${parts}; ` : ""}${row.num_tokens} tokens; versions ${row.oldest_version} to ${row.newest_version}; ended by ${row.finish_reason}; prompt ${row.prompt_id}`)),
    h("div", {}, "Prompt"), longText(row.prompt, `Prompt of ${id}`), h("div", {}, "Completion"), longText(row.text, `Completion of ${id}`));
}

export async function ledger(name) {
  const { states, versions, steps, trained_in_steps: inSteps } = await ask(`${pathOf(name)}/ledger`);
  const sum = states.reduce((total, one) => total + one.groups, 0);
  const trained = states.filter((one) => one.state === "trained").reduce((total, one) => total + one.groups, 0);
  return { node: titled(name, "ledger",
    h("p", { id: "sum" }, `issued ${sum} = ${states.map((one) => `${one.state}${one.reason ? ` (${visible(one.reason)})` : ""} ${one.groups}`).join(" + ")}`),
    h("p", { id: "trained", class: trained === inSteps ? "" : "notice error" }, `trained ${trained}, groups of trained steps ${inSteps}: ${trained === inSteps ? "the sums agree" : "the sums do not agree"}`),
    table("Groups by state", ["State", "Reason", "Groups"], [...states.map((one) => [one.state, one.reason, one.groups]), ["all", "", sum]]),
    h("h2", {}, "Samples by oldest version"), table(`The newest ${Math.min(versions.length, 200)} versions`, ["Version", "Samples", "Tokens", "Mean reward"],
      versions.slice(-200).reverse().map((one) => [one.version, one.samples, one.tokens, one.mean_reward])),
    h("h2", {}, "Newest steps"), table(`The newest ${steps.length} steps`, ["Step", "State", "Groups", "Oldest staleness", "Taken", "Trained"],
      [...steps].reverse().map((one) => [one.step, one.state, one.group_ids.length, one.max_staleness, time(one.taken_s), time(one.trained_s)]))) };
}

export async function config(name) {
  return { node: titled(name, "config", h("pre", { tabindex: 0, "aria-label": "Config, TOML" }, visible(await askText(`${pathOf(name)}/config`)))) };
}

export async function logs(name) {
  const found = (await ask(`${pathOf(name)}/files/logs`)).filter((file) => !file.folder);
  if (!found.length) return { node: titled(name, "logs", notice("There is no log.")) };
  const pick = h("select", { id: "log" }, found.map((file) => h("option", {}, file.name)));
  const text = h("pre", { tabindex: 0, "aria-label": "Newest lines" });
  const load = async () => {
    const file = `${pathOf(name)}/files/logs/${encodeURIComponent(pick.value)}`;
    const size = (await ask(`${pathOf(name)}/files/logs`)).find((one) => one.name === pick.value)?.bytes;
    const tail = size ? await askText(file, { Range: `bytes=${Math.max(size - LOG_BYTES, 0)}-` }) : "";
    text.textContent = visible(size > LOG_BYTES ? tail.slice(tail.indexOf("\n") + 1) : tail);
    text.scrollTop = text.scrollHeight;
  };
  pick.addEventListener("change", load);
  await load();
  return { node: titled(name, "logs", h("div", { class: "bar" }, h("label", { for: "log" }, "Log of"), pick,
    h("button", { type: "button", onclick: load }, "Newest lines")), text) };
}
