// One run: who waits for whom, its charts, its processes, and the orders it takes.

import { changeRun } from "./change.js";
import { chart, freeCharts } from "./charts.js";
import { ask, exact, h, notice, order, redraw, Stream, table, time } from "./dom.js";
import { levelOf } from "./files.js";
import { state } from "./runs.js";

// Each chart: its title, and which series with their labels. A series is a field of a step report, or a metric.
const CHARTS = [
  ["Reward", [["reward_mean", "mean"], ["reward_std", "standard deviation"]]],
  ["Staleness, versions", [["staleness_mean", "mean"], ["staleness_max", "max"], ["bound", "bound"]]],
  ["Idle share", [["learner_idle", "learner"], ["generators_idle", "generators"]]],
  ["Buffer, groups", [["groups_running", "running"], ["groups_scoring", "scoring"], ["groups_ready", "ready"]]],
  ["Off-policy: effective sample size, clipped", [["ratio/ess", "ess"], ["policy/clip_fraction", "clip fraction"], ["policy/kept_fraction", "kept fraction"]]],
  ["Off-policy: KL, nat", [["kl/mean", "k3"], ["kl/k1", "k1"]]],
  ["Weights, ms", [["weight_sync_ms", "sync"], ["weights/blocked_ms", "learner stood still"], ["weights/swap_ms", "generator stood still"]]],
  ["Tokens a second", [["generated_tokens_per_s", "generated"], ["trained_tokens_per_s", "trained"]]],
  ["Entropy, nat", [["policy/entropy", "entropy"]]],
  ["Learner memory, GB", [["memory/peak_gb", "peak"], ["memory/allocated_gb", "allocated"]]],
];
const NAMES = CHARTS.flatMap(([, series]) => series.map(([name]) => name)).filter((name) => name !== "bound");
// Over seconds, the same; a name that ends in / has a series for each process.
const OF_SECONDS = [
  ["Idle share now", [["idle/learner", "learner"], ["idle/generators", "generators"]]],
  ["Groups now", [["queue/running", "running"], ["queue/scoring", "scoring"], ["queue/ready", "ready"]]],
  ["Requests in the engines", [["process/requests_running", "running"], ["process/slots", "slots"]]],
  ["Tokens generated in a second", [["throughput/generated_tokens_per_sec", "generated"]]],
  ["Resident memory, GB", [["memory/resident_gb/", ""], ["memory/available_gb", "available"]]],
];
const MOST_SECONDS = 3600;
const ORDERS = { pause: "Pause", resume: "Resume", checkpoint: "Checkpoint", drain: "Drain", stop: "Stop" };
const MEANING = {
  pause: "Generation and training are held; nothing in flight is lost.", resume: "The run goes on.", checkpoint: "A checkpoint is written now.",
  drain: "The step in hand is finished, a checkpoint is written, and the run ends.", stop: "The run ends at once. It can be resumed.",
};

function waitsOfNobody(record, status) {
  if (record.state !== "live") return "The run is not live.";
  return status.processes.length ? "Nobody waits: everything moves." : "Only the daemon of a run is told who waits for whom.";
}

export async function run(name, me) {
  const path = `/v1/runs/${encodeURIComponent(name)}`;
  const [record, status, series, evals, alarms] = await Promise.all(
    [ask(path), ask(`${path}/status`), ask(`${path}/series?names=${NAMES.map(encodeURIComponent)}`), ask(`${path}/evaluations`), ask(`${path}/alarms`)]);
  const page = new RunPage(path, me, record, status, series, evals, alarms);
  return { node: page.node, leave: () => page.leave() };
}

class RunPage {
  constructor(path, me, record, status, series, evals, { alarms }) {
    Object.assign(this, { path, me, record, status, evals, alarms, newest: series.newest, steps: series.steps, columns: series.columns, bounds: series.bounds, seen: series.events });
    this.top = h("div");
    this.bottom = h("div");
    this.every = h("details", { ontoggle: () => this.showNewest() });
    this.said = h("div", { role: "status" });
    this.orders = Object.fromEntries(Object.entries(ORDERS).map(([what, label]) => [what, h("button", { type: "button", onclick: () => this.order(what) }, label)]));
    const change = () => changeRun(path, record.id, (answer) => this.said.replaceChildren(answer))
      .catch((error) => this.said.replaceChildren(notice(error.message, true)));
    this.change = h("button", { type: "button", onclick: change }, "Change");
    this.charts = CHARTS.map(([title, lines]) => chart(title, "step", this.steps, this.series(lines)));
    this.evaluations = chart("Held-out evaluations", "version", ...this.evalSeries(), { points: true });
    const mayOrder = !me.read_only && me.role !== "viewer";
    this.node = h("div", {}, h("h1", {}, record.id), mayOrder ? h("div", { class: "bar", role: "group", "aria-label": "Orders" }, Object.values(this.orders), this.change) : null,
      this.said, this.top, h("h2", {}, "Over steps"), h("div", { class: "charts" }, this.charts[0], this.evaluations, this.charts.slice(1)), this.every, this.bottom);
    this.perSecond = new Seconds(this.node);
    this.show();
    this.begin(series.offset).catch((error) => this.said.replaceChildren(notice(error.message, true)));
  }
  async begin(offset) {
    await new Promise((drawn) => { setTimeout(drawn); }); // what is there is shown first
    const { path, record } = this;
    const seconds = await ask(`${path}/seconds`);
    if (this.isGone) return;
    for (const row of seconds.rows) this.perSecond.take(row);
    this.perSecond.show();
    if (record.state !== "ended")
      this.stream = new Stream(`${path}/live?offset=${offset}&seconds=${seconds.offset}`, {
        second: (row) => { this.perSecond.take(row); this.later(); },
        step: (report) => this.take(report),
        status: ({ status: newer, record: now }) => { this.status = newer ?? this.status; this.record = now; this.later(); },
        event: (event) => {
          if (event.kind === "evaluation") this.evaluate();
          else if (event.kind === "alarm") this.alarm();
          else if (event.kind === "change" && event.seq > this.seen) this.rebound();
        },
      }, async () => this.ended());
  }
  leave() {
    this.isGone = true;
    this.stream?.close();
  }
  series(lines) {
    return lines.map(([name, label]) => [label, name === "bound" ? this.steps.map((step) => this.boundOf(step)) : this.columns[name]]);
  }
  boundOf(step) {
    return this.bounds.findLast(([first]) => first <= step)?.[1] ?? null;
  }
  evalSeries() {
    return [this.evals.map((one) => one.version), [["accuracy", this.evals.map((one) => one.accuracy)], ["reward", this.evals.map((one) => one.reward_mean)]]];
  }
  take(report) {
    let i = this.steps.length;
    while (i > 0 && this.steps[i - 1] > report.step) i -= 1;
    if (i > 0 && this.steps[i - 1] === report.step) i -= 1; // said again after a crash: the last time counts
    this.steps[i] = report.step;
    for (const name of NAMES) this.columns[name][i] = report[name] ?? report.metrics[name] ?? null;
    if (i === this.steps.length - 1) this.newest = report;
    this.hasSteps = true;
    this.later();
  }
  later() {
    if (this.drawing) return;
    this.drawing = requestAnimationFrame(() => {
      this.drawing = 0;
      if (!this.isGone) this.show();
    });
  }
  async evaluate() {
    this.evals = await ask(`${this.path}/evaluations`);
    this.evaluations.show(...this.evalSeries());
  }
  async alarm() {
    ({ alarms: this.alarms } = await ask(`${this.path}/alarms`));
    this.later();
  }
  async rebound() {
    ({ bounds: this.bounds, events: this.seen } = await ask(`${this.path}/series`));
    this.hasSteps = true;
    this.later();
  }
  async ended() {
    this.record = await ask(this.path);
    if (this.record.state !== "ended" || this.isGone) return this.isGone;
    // At once: who logs out meanwhile would be refused the second.
    [this.status, this.evals] = await Promise.all([ask(`${this.path}/status`), ask(`${this.path}/evaluations`)]);
    this.evaluations.show(...this.evalSeries());
    this.later();
    return true;
  }
  async order(what) {
    if (!confirm(`${ORDERS[what]} ${this.record.id}? ${MEANING[what]}`)) return;
    const wasOver = this.record.state === "ended";
    this.said.replaceChildren(notice(`${ORDERS[what]}: asked`));
    try {
      const answer = await order(`${this.path}/${what}`);
      this.said.replaceChildren(notice(`${ORDERS[what]}: done${typeof answer === "string" ? `, ${answer}` : ""}`));
      if (what === "resume" && wasOver) dispatchEvent(new Event("hashchange")); // it is followed again
    } catch (error) {
      this.said.replaceChildren(notice(`${ORDERS[what]}: ${error.message}`, true));
    }
  }
  show() {
    const { record, status, newest } = this;
    for (const [what, button] of Object.entries(this.orders)) {
      const isPaused = status.phase === "paused";
      button.disabled = what === "resume" ? !(isPaused || record.state === "ended") : record.state !== "live" || (what === "pause" && isPaused);
    }
    this.change.disabled = record.state !== "live";
    const facts = [["State", state(record)], ["Phase", status.phase], ["Step", `${Math.max(record.version, newest?.version ?? 0)} of ${record.num_steps}`],
      ["Accuracy", `${exact(record.accuracy_before)} → ${exact(record.accuracy_after)}`], ["Started", time(record.started_s)], ["Ended", time(record.ended_s)],
      ["Project", record.project], ["Tags", record.tags.join(", ")], ["Forked from", record.parent], ["Checkpoint", status.checkpoint], ["Reason", status.reason || record.reason]];
    redraw(this.top,
      h("p", { class: status.waiting ? "notice" : "soft", id: "waiting" }, status.waiting || waitsOfNobody(record, status)),
      ...this.alarms.filter((alarm) => !alarm.over_s).map((alarm) => h("p", { class: `notice${alarm.level === "error" ? " error" : ""}` }, levelOf(alarm), ": ",
        h("a", { href: `#/run/${encodeURIComponent(record.id)}/alarms` }, alarm.rule), `: ${alarm.text}`)),
      table("The run", facts.filter(([, value]) => value).map(([label]) => label), [facts.map(([, value]) => value).filter(Boolean)]));
    if (this.hasSteps) this.charts.forEach((figure, i) => figure.show(this.steps, this.series(CHARTS[i][1])));
    this.hasSteps = false;
    this.perSecond.show();
    redraw(this.bottom, ...[
      status.processes.length ? [h("h2", {}, "Processes"), table("Who waits for whom", ["Process", "Kind", "Pid", "State", "Deaths", "Waits for", "Since, s"],
        status.processes.map((one) => [one.name + (one.joined ? " (joined)" : ""), one.kind, one.pid, one.state, one.deaths, one.waiting_for, one.waiting_for ? +one.waiting_s.toFixed(1) : null]))] : [],
      status.failures.length ? [h("h2", {}, "Failures of samples"), table("By kind", ["Kind", "Where", "Samples", "First reason"], status.failures.map((one) => [one.kind, one.stage, one.count, one.reason]))] : [],
    ].flat());
    this.showNewest();
  }
  showNewest() {
    const { newest, every } = this;
    if (!newest) return;
    const values = Object.entries({ ...newest, ...newest.metrics }).filter(([, value]) => typeof value === "number");
    redraw(every, h("summary", { "aria-label": "Every value of the newest step" }, `Every value of step ${newest.step}`),
      every.open ? table("Every value", ["Value", ""], values) : "");
  }
}

// How the run stood in each second of the newest hour; the charts are made once there is something to show.
class Seconds {
  constructor(place) {
    Object.assign(this, { place, rows: [], charts: [], drawn: 0 });
  }
  take(row) {
    if (this.rows.length && row.time_s <= this.rows.at(-1).time_s) return; // said again
    this.rows.push(row);
    if (this.rows.length > MOST_SECONDS) this.rows.shift();
  }
  show() {
    const { rows } = this;
    if (!rows.length || rows.at(-1).time_s === this.drawn) return;
    this.drawn = rows.at(-1).time_s;
    const known = new Set(rows.flatMap(({ values }) => Object.keys(values)));
    this.first ??= rows[0].time_s;
    const names = OF_SECONDS.map(([, lines]) => lines.flatMap(([name, label]) => (name.endsWith("/")
      ? [...known].filter((one) => one.startsWith(name)).sort().map((one) => [one, one.slice(name.length)]) : [[name, label]])));
    const xs = rows.map((row) => row.time_s - this.first);
    const series = names.map((lines) => lines.map(([name, label]) => [label, rows.map(({ values }) => values[name] ?? null)]));
    const labels = JSON.stringify(names);
    if (labels === this.labels) return this.charts.forEach((figure, i) => figure.show(xs, series[i]));
    this.labels = labels; // a process that was not there before has a line of its own
    this.charts = OF_SECONDS.map(([title], i) => chart(title, "second", xs, series[i]));
    const figures = h("section", { class: "seconds" }, h("h2", {}, `Over seconds, since ${time(this.first)}`), h("div", { class: "charts" }, this.charts));
    this.box ? this.box.replaceWith(figures) : this.place.append(figures);
    this.box = figures;
    freeCharts();
  }
}
