// Swim lanes of a run's processes over a window of time. The server tells many spans as bins, so a frame is never large.

import { ask, h, redraw, table } from "./dom.js";
import { pathOf, titled } from "./files.js";

const LANE = 40;
const LEFT = 120;
const AXIS = 22;
const FOLLOW_MS = 2000;
const COLOURS = ["#7fb0ea", "#e5ab77", "#7cc696", "#c29ad6", "#de9aa1", "#70bcc1"];
const SWAP = "#a3217b";
const SWAP_HIGH = 8;
const ORDER = ["admission", "generator", "reward", "inference", "learner", "controller"];
const STILL = new Set(["idle", "wait"]);
const colourOf = (version) => (version < 0 ? "#b9c2cb" : COLOURS[version % COLOURS.length]);
const rankOf = (process) => ORDER.indexOf(process.split("-")[0]) * 1e6 + (Number(process.split("-")[1]) || 0);
const versions = (oldest, newest) => (newest < 0 ? "" : oldest === newest ? `${newest}` : `${oldest} to ${newest}`);
const WHAT = { idle: "waits", wait: "waits", step: "trains", generate: "generates", score: "scores", swap: "swaps weights", publish: "publishes", checkpoint: "writes a checkpoint", evaluate: "evaluates", phase: "moves memory" };
const what = (track) => WHAT[track.name] ?? track.name;

// A text on a ground of its own, so that it can be read whatever lies beneath.
function write(pen, text, x, y, ground, ink = "#16202b") {
  pen.fillStyle = ground;
  pen.fillRect(x - 2, y - 6, pen.measureText(text).width + 4, 12);
  pen.fillStyle = ink;
  pen.fillText(text, x, y);
}

function hatch(context) {
  const tile = h("canvas", { width: 6, height: 6 });
  const pen = tile.getContext("2d");
  pen.strokeStyle = "#8793a0";
  pen.moveTo(0, 6);
  pen.lineTo(6, 0);
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

export async function timeline(name) {
  const page = new Timeline(name, await ask(`${pathOf(name)}/timeline`), (await ask(pathOf(name))).state !== "ended");
  return { node: page.node, leave: () => page.leave() };
}

class Timeline {
  constructor(name, frame, isLive) {
    Object.assign(this, { path: `${pathOf(name)}/timeline`, frame, isLive });
    this.canvas = h("canvas", { class: "timeline", tabindex: 0, role: "application", "aria-describedby": "said",
      "aria-label": "Timeline. Left and right move, plus and minus zoom, Home is the whole run, End its newest tenth." });
    this.said = h("p", { id: "said", class: "soft", role: "status" });
    this.below = h("div");
    const button = (label, move) => h("button", { type: "button", onclick: move }, label);
    this.node = titled(name, "timeline", h("div", { class: "bar", role: "group", "aria-label": "Window" },
      button("Earlier", () => this.pan(-0.25)), button("Later", () => this.pan(0.25)), button("Zoom in", () => this.zoom(0.5)),
      button("Zoom out", () => this.zoom(2)), button("Whole run", () => this.go(0, Infinity)), button("Newest", () => this.newest())),
    h("p", { class: "soft" }, "Each version has a colour and its number; a dark bar (s) is a swap of weights; hatched is a wait, with its reason below. ",
      "As high as a bar is, as many of its samples are in flight."), this.said, this.canvas, this.below);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.redraw = () => this.draw();
    this.scheme.addEventListener("change", this.redraw);
    this.sizes = new ResizeObserver(this.redraw);
    this.sizes.observe(this.canvas);
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.at(event.offsetX));
    }, { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => {
      this.canvas.setPointerCapture(event.pointerId);
      this.held = { x: event.offsetX, from: this.frame.from_s, to: this.frame.to_s };
    });
    this.canvas.addEventListener("pointerup", () => { this.held = null; });
    this.canvas.addEventListener("pointermove", (event) => {
      if (!this.held) return this.hover(event.offsetX, event.offsetY);
      const by = ((this.held.x - event.offsetX) / this.width) * (this.held.to - this.held.from);
      this.go(this.held.from + by, this.held.to + by);
    });
    this.timer = isLive && setInterval(() => this.isAtEnd && !document.hidden && this.go(this.frame.from_s, Infinity), FOLLOW_MS);
    this.show(frame);
  }
  leave() {
    clearInterval(this.timer);
    this.sizes.disconnect();
    this.scheme.removeEventListener("change", this.redraw);
  }
  get width() { return Math.max(this.canvas.clientWidth - LEFT, 1); }
  get span() { return this.frame.to_s - this.frame.from_s; }
  get isAtEnd() { return this.frame.to_s >= this.frame.end_s; }
  at(x) { return this.frame.from_s + (this.span * (x - LEFT)) / this.width; }
  x(seconds) { return LEFT + (this.width * (seconds - this.frame.from_s)) / this.span; }
  // The window that is wished for, whether it has come or not.
  get now() { return this.wish ?? this.sent ?? [this.frame.from_s, this.frame.to_s]; }
  pan(share) {
    const [from, to] = this.now;
    return this.go(from + share * (to - from), to + share * (to - from));
  }
  zoom(by, around) {
    const [from, to] = this.now;
    const middle = around ?? (from + to) / 2;
    return this.go(middle - (middle - from) * by, middle + (to - middle) * by);
  }
  newest() { return this.go(this.frame.end_s * 0.9, Infinity); }
  key(event) {
    const moves = { ArrowLeft: () => this.pan(-0.25), ArrowRight: () => this.pan(0.25), "+": () => this.zoom(0.5), "=": () => this.zoom(0.5),
      "-": () => this.zoom(2), Home: () => this.go(0, Infinity), End: () => this.newest() };
    if (!moves[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    moves[event.key]();
  }
  // Ask for a window, within the run; while one is on its way only the newest wish is kept.
  async go(from, to) {
    const { end_s: end } = this.frame;
    const length = Math.min(Math.max(to - from, 1e-4), end);
    const first = Math.max(Math.min(from, end - length), 0);
    this.wish = to === Infinity ? [from, end] : [first, first + length];
    if (this.sent) return;
    try {
      while (this.wish) {
        this.sent = this.wish;
        this.wish = null;
        const [start, stop] = this.sent;
        this.show(await ask(`${this.path}?from=${start}&to=${stop < end ? stop : ""}&bins=${Math.min(Math.ceil(this.width), 2000)}`));
      }
    } finally {
      this.sent = null;
    }
  }
  show(frame) {
    this.frame = frame;
    this.lanes = [...new Set(frame.tracks.map((track) => track.process))].sort((a, b) => rankOf(a) - rankOf(b) || a.localeCompare(b));
    this.said.textContent = `Seconds ${frame.from_s.toFixed(3)} to ${frame.to_s.toFixed(3)} of ${frame.end_s.toFixed(3)}.`;
    const tracks = [...frame.tracks].sort((a, b) => rankOf(a.process) - rankOf(b.process) || b.seconds - a.seconds);
    const few = tracks.every((track) => track.each) ? tracks.flatMap((track) => track.each.map((one) => [track, one])) : [];
    this.isOpen = this.every?.open;
    this.every = few.length ? h("details", { open: this.isOpen, ontoggle: () => this.fill(few) }, h("summary", { "aria-label": "Every span" }, `Every one of ${few.length} spans`)) : h("p", { class: "soft" }, "Zoom in to have every span in a table.");
    redraw(this.below, table("What is in the window", ["Process", "What", "For", "Times", "Seconds, added up", "Versions"],
      tracks.map((track) => [track.process, what(track), track.why, track.spans, track.seconds, versions(track.oldest, track.newest)])), this.every);
    this.draw();
  }
  fill(few) {
    if (!this.every.open) return;
    const rows = few.sort(([, a], [, b]) => a[0] - b[0]).map(([track, [start, end, oldest, newest, group, samples]]) =>
      [track.process, what(track), track.why, start, end - start, versions(oldest, newest), group < 0 ? "" : `g${group}`, samples < 0 ? "" : samples]);
    this.every.replaceChildren(this.every.firstChild, table("Every span of the window", ["Process", "What", "For", "Start, s", "Length, s", "Versions", "Group", "Samples"], rows));
  }
  draw() {
    const { canvas } = this;
    const height = this.lanes.length * LANE + AXIS;
    const scale = devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = (LEFT + this.width) * scale;
    canvas.height = height * scale;
    const pen = canvas.getContext("2d");
    const ink = getComputedStyle(document.documentElement).getPropertyValue("--ink");
    pen.scale(scale, scale);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    this.hits = [];
    this.hatch ??= hatch(pen);
    const draws = (track) => (STILL.has(track.name) ? 0 : track.name === "swap" ? 2 : 1);
    this.lanes.forEach((process, row) => {
      const top = row * LANE;
      pen.fillStyle = ink;
      pen.fillText(process, 4, top + LANE / 2, LEFT - 8);
      pen.fillRect(0, top + LANE - 1, LEFT + this.width, 0.5);
      pen.save();
      pen.beginPath();
      pen.rect(LEFT, top, this.width, LANE);
      pen.clip();
      const own = this.frame.tracks.filter((track) => track.process === process).sort((a, b) => draws(a) - draws(b));
      for (const track of own) (track.each ? this.drawEach(pen, track, top) : this.drawBins(pen, track, top));
      pen.restore();
    });
    pen.fillStyle = ink;
    for (let i = 0; i <= 6; i += 1) {
      const seconds = this.frame.from_s + (this.span * i) / 6;
      pen.textAlign = i === 6 ? "right" : "center";
      pen.fillText(`${seconds.toFixed(this.span < 6 ? 3 : 1)} s`, Math.max(this.x(seconds), LEFT + 20), height - AXIS / 2);
    }
    pen.textAlign = "left";
  }
  drawEach(pen, track, top) {
    const ends = [];
    const placed = [...track.each].sort((a, b) => a[0] - b[0]).map((one) => {
      let level = ends.findIndex((end) => end <= one[0]);
      if (level < 0) level = ends.length;
      ends[level] = one[1];
      return [one, level];
    });
    const isStill = STILL.has(track.name);
    const tall = (LANE - 6) / Math.max(ends.length, 1);
    const isSwap = track.name === "swap";
    const areMany = this.width / track.each.length < 14; // swaps then do not cover what is generated
    for (const [one, level] of placed) {
      const [start, end, , newest] = one;
      const [left, wide] = [this.x(start), Math.max(this.x(end) - this.x(start), 1)];
      const y = isSwap || isStill ? top + 3 : top + 3 + level * tall;
      const high = isSwap && areMany ? SWAP_HIGH : isSwap || isStill ? LANE - 6 : Math.max(tall - 1, 1);
      pen.fillStyle = isStill ? this.hatch : isSwap ? SWAP : colourOf(newest);
      pen.fillRect(left, y, isSwap ? Math.max(wide, 2) : wide, high);
      if (isSwap && !areMany) write(pen, "s", Math.max(left, LEFT) + 2, top + 10, SWAP, "#fff");
      else if (!isSwap && newest >= 0 && high > 9 && wide > 26) write(pen, `v${newest}`, Math.max(left, LEFT) + 4, y + high / 2, pen.fillStyle);
      this.hits.push([left, left + Math.max(wide, 2), y, y + high, track, one]);
    }
  }
  drawBins(pen, track, top) {
    const most = Math.max(...track.busy) || 1;
    const wide = this.width / track.busy.length;
    const isStill = STILL.has(track.name);
    let before = null;
    track.busy.forEach((share, i) => {
      if (!share) return;
      const high = (LANE - 6) * (isStill ? 1 : share / most);
      if (track.name === "swap") {
        pen.fillStyle = SWAP;
        return pen.fillRect(LEFT + i * wide, top + 3, Math.max(wide, 1), SWAP_HIGH);
      }
      pen.fillStyle = isStill ? this.hatch : colourOf(track.version[i]);
      pen.fillRect(LEFT + i * wide, top + LANE - 3 - high, wide + 0.5, high);
    });
    if (isStill || track.name === "swap") return;
    let labelled = -Infinity;
    track.version.forEach((version, i) => {
      if (version !== before && version >= 0 && i * wide - labelled > 34) {
        labelled = i * wide;
        write(pen, `v${version}`, LEFT + i * wide + 2, top + LANE - 11, colourOf(version));
      }
      before = version;
    });
  }
  hover(x, y) {
    const hit = [...this.hits].reverse().find(([left, right, up, down]) => left <= x && x <= right && up <= y && y <= down);
    if (!hit) return;
    const [, , , , track, [start, end, oldest, newest, group, samples]] = hit;
    this.canvas.title = [track.process, what(track), track.why && `for ${track.why}`, `${(end - start).toFixed(4)} s`, newest >= 0 && `version ${versions(oldest, newest)}`,
      group >= 0 && `group g${group}`, samples > 0 && `${samples} samples`].filter(Boolean).join(", ");
  }
}
