// What a run has written: events, ledger, config, logs.

import { ask, askText, h, notice, Stream, table, time, visible } from "./dom.js";

const MOST_EVENTS = 2000;
const LOG_BYTES = 65536;
const FOLLOW_MS = 1000;
export const pathOf = (name) => `/v1/runs/${encodeURIComponent(name)}`;
export const titled = (name, what, ...children) => h("div", {}, h("h1", {}, `${name}: ${what}`), ...children);

export async function events(name) {
  const record = await ask(pathOf(name));
  const shown = table("What happened, newest first", ["Number", "Time", "What", "Of", "Why", "Version"], []);
  const body = shown.querySelector("tbody");
  const kinds = h("select", { id: "kind", onchange: () => { for (const row of body.rows) row.hidden = isHidden(row); } }, h("option", {}, "everything"));
  const isHidden = (row) => kinds.selectedIndex > 0 && row.cells[2].textContent !== kinds.value;
  const take = (event) => {
    if (![...kinds.options].some((one) => one.value === event.kind)) kinds.append(h("option", {}, event.kind));
    if (event.kind === "swap") return; // one a step; the timeline has them
    const cells = [event.seq, time(event.time_s), event.kind, event.subject ?? "", event.text ?? "", event.version ?? ""];
    body.prepend(h("tr", {}, cells.map((cell) => h("td", {}, visible(String(cell))))));
    body.rows[0].hidden = isHidden(body.rows[0]);
    if (body.rows.length > MOST_EVENTS) body.lastChild.remove();
  };
  const stream = new Stream(`${pathOf(name)}/events`, { event: take }, async () => (await ask(pathOf(name))).state === "ended");
  return { node: titled(name, "events", record.reason ? notice(record.reason) : null,
    h("div", { class: "bar" }, h("label", { for: "kind" }, "Show"), kinds), shown), leave: () => stream.close() };
}

const low = (...about) => h("div", { class: "low" }, table(...about));
export const levelOf = (alarm) => h("span", { class: `level-${alarm.level}` }, alarm.level);

const SEEN = / \(is (\S+), bound (\S+), /; // as an alarm says what it has seen

export async function alarms(name) {
  const { alarms: raised, rules } = await ask(`${pathOf(name)}/alarms`);
  const until = (one) => (one.over_s ? time(one.over_s) : "stands");
  const sources = Object.fromEntries(rules.map((rule) => [rule.name, rule.source]));
  const seen = (one) => SEEN.exec(one.text)?.slice(1).map(Number) ?? [null, null];
  return { node: titled(name, "alarms",
    raised.length ? table("Raised, newest first", ["Rule", "Level", "Value", "Threshold", "Threshold from", "Since", "At version", "Over", "At version", "What is seen, and what to do"],
      raised.map((one) => [one.rule, levelOf(one), ...seen(one), sources[one.rule], time(one.since_s), one.version, until(one),
        one.over_s ? one.over_version : "", one.text]))
      : notice("No alarm was raised."),
    h("h2", {}, "What is looked at"), table("Rules", ["Rule", "Level", "Met when", "In steps", "Threshold from", "What to do", "Then the run"],
      rules.map((rule) => [rule.name, levelOf(rule), rule.meets, `${rule.needed} of ${rule.of}`, rule.source, rule.advice, ACTIONS[rule.action]]))) };
}
const ACTIONS = { off: "is not told", warn: "goes on", pause: "is paused", stop: "is stopped" };

const STATES = ["running", "scoring", "ready", "taken", "trained", "dropped", "failed"];
const SELECTION = [["bias/length_ratio", "Mean length trained over generated"], ["bias/reward_gap", "Mean reward trained minus scored"]];
const ENDS = ["", "_low", "_high"]; // the figure, and the ends of its interval of 95 %

export async function ledger(name) {
  const [told, series] = await Promise.all(
    [ask(`${pathOf(name)}/ledger`), ask(`${pathOf(name)}/series?names=${SELECTION.flatMap(([metric]) => ENDS.map((end) => encodeURIComponent(metric + end)))}`)]);
  const { issued, states, prompts, versions, steps, trained_in_steps: inSteps } = told;
  const groups = (rows) => rows.reduce((total, one) => total + one.groups, 0);
  const of = (state) => groups(states.filter((one) => one.state === state));
  const sum = STATES.reduce((total, state) => total + of(state), 0);
  const lost = states.filter((one) => one.state === "dropped" || one.state === "failed");
  const agrees = (isRight) => (isRight ? "" : "notice error");
  const last = series.steps.length - 1;
  return { node: titled(name, "ledger",
    h("p", { id: "sum", class: agrees(sum === issued) },
      `issued ${issued} = ${STATES.map((state) => `${state} ${of(state)}`).join(" + ")}; sum holds: ${sum === issued ? "yes" : `no, it is ${sum}`}`),
    h("p", { id: "trained", class: agrees(of("trained") === inSteps) },
      `trained ${of("trained")}, groups of trained steps ${inSteps}: ${of("trained") === inSteps ? "the sums agree" : "the sums do not agree"}`),
    table("Groups by state", ["State", "Reason", "Groups"], [...states.map((one) => [one.state, one.reason, one.groups]), ["all", "", groups(states)]]),
    h("h2", {}, "What was lost"), lost.length ? table("Dropped and failed, by reason", ["Reason", "State", "Groups", "Share of issued"],
      lost.sort((a, b) => b.groups - a.groups).map((one) => [one.reason, one.state, one.groups, one.groups / issued])) : notice("No group was dropped or failed."),
    h("h2", {}, "Selection, over the whole run"),
    table(last < 0 ? "No step yet" : `At step ${series.steps[last]}`, ["Figure", "Value", "95 % from", "To"],
      SELECTION.map(([metric, label]) => [label, ...ENDS.map((end) => series.columns[metric + end][last])])),
    h("h2", {}, "Samples by oldest version"), low(`The newest ${Math.min(versions.length, 200)} versions`, ["Version", "Samples", "Tokens", "Mean reward"],
      versions.slice(-200).reverse().map((one) => [one.version, one.samples, one.tokens, one.mean_reward])),
    h("h2", {}, "Prompts"), low(`The ${prompts.length} prompts issued most often`, ["Prompt", "Groups", "Trained", "Dropped", "Failed", "Mean reward", "Mean tokens"],
      prompts.map((one) => [one.prompt_id, one.groups, one.trained, one.dropped, one.failed, one.mean_reward, one.mean_tokens])),
    h("h2", {}, "Newest steps"), low(`The newest ${steps.length} steps`, ["Step", "State", "Groups", "Oldest staleness", "Taken", "Trained"],
      [...steps].reverse().map((one) => [one.step, one.state, one.group_ids.length, one.max_staleness, time(one.taken_s), time(one.trained_s)]))) };
}

export async function config(name) {
  return { node: titled(name, "config", h("pre", { tabindex: 0, "aria-label": "Config, TOML" }, visible(await askText(`${pathOf(name)}/config`)))) };
}

export async function logs(name) {
  const found = (await ask(`${pathOf(name)}/files/logs`)).filter((file) => !file.folder);
  if (!found.length) return { node: titled(name, "logs", notice("There is no log.")) };
  const pick = h("select", { id: "log" }, found.map((file) => h("option", {}, file.name)));
  const text = h("pre", { class: "log", tabindex: 0, "aria-label": "Newest lines" });
  const toEnd = () => { text.scrollTop = text.scrollHeight; };
  const follows = h("input", { id: "follows", type: "checkbox" });
  let shownBytes = -1; // of the log, where the text is a log's
  const load = async () => {
    const file = `${pathOf(name)}/files/logs/${encodeURIComponent(pick.value)}`;
    const size = (await ask(`${pathOf(name)}/files/logs`)).find((one) => one.name === pick.value)?.bytes ?? 0;
    if (size === shownBytes) return;
    const tail = size ? await askText(file, { Range: `bytes=${Math.max(size - LOG_BYTES, 0)}-` }) : "";
    text.textContent = visible(size > LOG_BYTES ? tail.slice(tail.indexOf("\n") + 1) : tail);
    shownBytes = size;
    toEnd();
  };
  const loadAnew = () => { shownBytes = -1; return load(); };
  const wanted = h("input", { id: "wanted", type: "search" });
  const pattern = h("input", { id: "pattern", type: "checkbox" });
  const search = async () => {
    const lines = await ask(`${pathOf(name)}/logs?${pattern.checked ? "pattern" : "q"}=${encodeURIComponent(wanted.value)}`);
    text.textContent = visible(lines.map(([process, line]) => `${process}: ${line}`).join("\n")) || "No line has that.";
    follows.checked = false;
    toEnd();
  };
  const show = (what) => what().catch((error) => { text.textContent = visible(error.message); });
  pick.addEventListener("change", () => show(loadAnew));
  await load();
  const timer = setInterval(() => { if (follows.checked) show(load); }, FOLLOW_MS);
  return { shown: toEnd, leave: () => clearInterval(timer), node: titled(name, "logs",
    h("div", { class: "bar" }, h("label", { for: "log" }, "Log of"), pick,
      h("button", { type: "button", onclick: () => show(loadAnew) }, "Newest lines"), follows, h("label", { for: "follows" }, "Follow")),
    h("form", { class: "bar", onsubmit: (event) => { event.preventDefault(); show(search); } },
      h("label", { for: "wanted" }, "Lines of all processes with"), wanted, pattern, h("label", { for: "pattern" }, "as a regular expression"), h("button", {}, "Search")), text) };
}
