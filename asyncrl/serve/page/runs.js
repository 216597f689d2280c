// The list of runs, and several beside each other.

import { chart, freeCharts } from "./charts.js";
import { ask, h, notice, redraw, Stream, table, time } from "./dom.js";

export const state = (record) => {
  const text = record.outcome || record.state;
  return h("span", { class: `state-${text === "failed" ? "failed" : record.state}` }, text);
};
export const linkTo = (name, text = name) => h("a", { href: `#/run/${encodeURIComponent(name)}` }, text);

const OF_STEP = [["Reward", "reward_mean"], ["Staleness, mean", "staleness_mean"], ["Max", "staleness_max"],
  ["Learner idle", "learner_idle"], ["Generators idle", "generators_idle"]]; // of the newest step
const COLUMNS = [["Alarms", (one) => one.alarms.join(", ")], ["Project", (one) => one.project], ["Tags", (one) => one.tags.join(", ")],
  ["Priority", (one) => one.priority], ["By", (one) => one.submitted_by], ["Started", (one) => time(one.started_s)],
  ["Ended", (one) => time(one.ended_s)], ["Reason", (one) => one.reason]];

export async function runs(me) {
  const chosen = new Set();
  const place = h("div", { class: "dense" });
  const queue = h("div");
  const button = h("button", { type: "button", onclick: () => { location.hash = `#/compare/${encodeURIComponent([...chosen].join(","))}`; } }, "Compare");
  const filter = h("input", { type: "search", "aria-label": "Only runs whose name, project, tags or state contain", placeholder: "Filter", oninput: () => draw() });
  let records = [], total = 0;
  const settle = () => { button.disabled = chosen.size < 2; };
  const box = (record) => h("input", {
    type: "checkbox", "aria-label": `Compare ${record.id}`, checked: chosen.has(record.id),
    onchange: (event) => { chosen[event.target.checked ? "add" : "delete"](record.id); settle(); },
  });
  function draw() {
    const wanted = filter.value.toLowerCase();
    const found = records.filter((one) => [one.id, one.project, ...one.tags, one.state, one.outcome].join(" ").toLowerCase().includes(wanted));
    const columns = COLUMNS.filter(([, of]) => records.some((one) => of(one))); // a column in which nobody has anything is left out
    const ofStep = records.some((one) => one.newest) ? OF_STEP : [];
    redraw(place, found.length ? table(`${found.length} of ${total} runs, newest first${records.length < total ? ", without the oldest that have ended" : ""}`,
      ["", "Run", "State", "Step", "Of", ...ofStep.map(([head]) => head), "Accuracy before", "After", ...columns.map(([head]) => head)],
      found.map((one) => [box(one), linkTo(one.id), state(one), Math.max(one.version, 0), one.num_steps, ...ofStep.map(([, field]) => one.newest?.[field]),
        one.accuracy_before, one.accuracy_after, ...columns.map(([, of]) => of(one))]))
      : notice(records.length ? "No run has that in its name, project, tags or state." : "No run yet. `asyncrl.Server.submit`, or POST /v1/runs, submits one."));
  }
  async function drawQueue() {
    const { runs: waiting, waits } = records.some((one) => one.state === "queued") ? await ask("/v1/queue") : { runs: [] };
    redraw(queue, ...(waiting.length ? [table(`Queue: ${waiting.length}`, ["Position", "Run", "Priority", "Waits for"],
      waiting.map((one, i) => [i + 1, linkTo(one.id), one.priority, waits[i]]))] : []));
  }
  settle();
  const stream = new Stream("/v1/live", { runs: (now) => { ({ runs: records, total } = now); draw(); drawQueue().catch(() => {}); } }, async () => !(await ask("/v1/session")).name);
  return { node: h("div", {}, h("h1", {}, "Runs"), h("div", { class: "bar" }, filter, button), me.read_only ? null : await machine(), queue, place), leave: () => stream.close() };
}

async function machine() {
  const { has, in_use: used } = await ask("/v1/machine");
  const cores = used.reduce((sum, one) => sum + one.demand.cores, 0);
  const gpus = used.reduce((sum, one) => sum + one.gpus.length, 0);
  return h("p", { class: "soft" }, `This machine: ${has.gpus.length} GPUs (${gpus} in use), ${has.cores} cores (${cores} asked for by live runs), ${(has.memory_bytes / 2 ** 30).toFixed(1)} GiB.`);
}

const COMPARED = [["Reward", "reward_mean"], ["Staleness, mean", "staleness_mean"], ["Learner idle", "learner_idle"], ["Effective sample size", "ratio/ess"]];

// Where a step lies on the axis: each a number that grows with the steps.
const OVER = {
  steps: ({ steps }) => steps,
  "samples trained": ({ columns }) => { let sum = 0; return columns["data/samples"].map((samples) => (sum += samples ?? 0)); },
  "seconds since the first step": ({ columns: { time_s: times } }) => times.map((time) => time - times[0]),
};

// Mean, least and most of runs that differ in their seed alone; between two of its steps a run lies on the line from one to the other.
function overSeeds(xs, run, columns) {
  const between = columns.map((column) => {
    const known = xs.map((_, i) => i).filter((i) => column[i] != null);
    let next = 0;
    return xs.map((x, i) => {
      while (next < known.length && known[next] < i) next += 1;
      const [left, right] = [known[next - 1], known[next]];
      if (right === i) return column[i];
      return left == null || right == null ? null : column[left] + ((column[right] - column[left]) * (x - xs[left])) / (xs[right] - xs[left]);
    });
  });
  const of = (take) => xs.map((_, i) => (between.every((one) => one[i] != null) ? take(between.map((one) => one[i])) : null));
  const name = columns.length > 1 ? `${run} and ${columns.length - 1} more` : run;
  return [[name, of((all) => all.reduce((sum, one) => sum + one, 0) / all.length)],
    [`${name}, least`, of((all) => Math.min(...all))], [`${name}, most`, of((all) => Math.max(...all))]];
}

export async function compare(names) {
  const { runs: rows } = await ask(`/v1/compare?runs=${encodeURIComponent(names)}`);
  const asked = [...COMPARED.map(([, name]) => name), "time_s", "data/samples"].map(encodeURIComponent).join(",");
  const series = await Promise.all(rows.map((row) => ask(`/v1/runs/${encodeURIComponent(row.run)}/series?names=${asked}`)));
  const keys = [...new Set(rows.flatMap((row) => Object.keys(row.config)))].sort();
  const drawn = h("div", { class: "charts" });
  const over = h("select", { id: "over", onchange: () => { draw(); freeCharts(); } }, Object.keys(OVER).map((name) => h("option", {}, name)));
  const arms = new Map(); // settings without the seed, to the runs that have them
  rows.forEach(({ config }, i) => {
    const settings = JSON.stringify(Object.entries(config).filter(([key]) => !["seed", "name", "folder"].includes(key)).sort());
    arms.set(settings, [...(arms.get(settings) ?? []), i]);
  });
  const seeds = h("input", { type: "checkbox", id: "seeds", onchange: () => { draw(); freeCharts(); } });
  function draw() {
    const all = series.map((one) => OVER[over.value](one));
    drawn.replaceChildren(...COMPARED.map(([title, name]) => {
      const [xs, ...columns] = uPlot.join(series.map((one, i) => [all[i], one.columns[name]]));
      if (!seeds.checked) return chart(title, over.value, xs, rows.map((row, i) => [row.run, columns[i]]));
      const shown = [...arms.values()].flatMap((members) => overSeeds(xs, rows[members[0]].run, members.map((i) => columns[i])));
      return chart(title, over.value, xs, shown, { bands: [...arms.keys()].map((_, i) => [3 * i + 2, 3 * i + 1]) });
    }));
  }
  draw();
  return { node: h("div", {}, h("h1", {}, `Compare ${rows.length} runs`),
    table("Results; reward and staleness are means of the newest 50 steps", ["Run", "Outcome", "Version", "Accuracy before", "After", "Reward", "Staleness", "Steps a second"],
      rows.map((row) => [linkTo(row.run), row.outcome, row.version, row.accuracy_before, row.accuracy_after, row.reward, row.staleness, row.steps_per_s])),
    h("h2", {}, "Settings that differ"),
    keys.length ? table("Settings that differ", ["Setting", ...rows.map((row) => row.run)], keys.map((key) => [key, ...rows.map((row) => JSON.stringify(row.config[key] ?? null))]))
      : notice("No setting differs."),
    h("div", { class: "bar" }, h("label", { for: "over" }, "Over"), over, ...(arms.size < rows.length ? [seeds, h("label", { for: "seeds" }, "Seeds as one line, with their range")] : [])), drawn) };
}
