// Elements, requests and text. Whatever comes from a run is set as text, never as markup.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child != null).map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

export class Refused extends Error {
  constructor(status, text, faults) {
    super(text);
    Object.assign(this, { status, faults });
  }
}

async function checked(response) {
  if (response.ok) return response;
  const said = await response.json().catch(() => ({}));
  throw new Refused(response.status, said.error || `the daemon answered ${response.status}`, said.faults);
}

export const ask = async (path) => (await checked(await fetch(path))).json();
// A file grows, and of a part of one the browser would show what it has.
export const askText = async (path, headers = {}) => (await checked(await fetch(path, { headers, cache: "no-store" }))).text();
export const order = async (path, body, method = "POST") =>
  (await checked(await fetch(path, { method, body: body && JSON.stringify(body) }))).json();

// A number as the file has it: the shortest text that reads back as the same number.
export const exact = (value) => (value == null ? "–" : String(value));
export const time = (seconds) => (seconds ? new Date(seconds * 1000).toISOString().replace("T", " ").slice(0, 19) + "Z" : "");

// Control characters and those that turn the direction of text, made visible; line ends and tabs stay.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;
export const visible = (text) => text.replace(UNSEEN, (sign) => `\u27e8U+${sign.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}\u27e9`);

const MOST_SHOWN = 20000;
export function longText(text, label) {
  const pre = h("pre", { dir: "auto", tabindex: 0, "aria-label": label }, visible(text.slice(0, MOST_SHOWN)));
  if (text.length <= MOST_SHOWN) return pre;
  const more = h("button", { type: "button", onclick: () => { pre.textContent = visible(text); more.remove(); } },
    `Show all ${text.length} characters`);
  return h("div", {}, pre, more);
}

// rows: arrays of cells; a cell is a node, a number (set right, as its column's head) or text.
export function table(caption, heads, rows) {
  const isNumber = (i) => rows.some((row) => typeof row[i] === "number");
  const cell = (value) => h("td", { class: typeof value === "number" ? "number" : null }, value instanceof Node ? value : visible(exact(value)));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h("table", {}, h("caption", {}, caption), h("thead", {}, h("tr", {}, heads.map((head, i) => h("th", { scope: "col", class: isNumber(i) ? "number" : null }, head)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map(cell))))));
}

// Other nodes in a place that is drawn again and again; what had the keyboard's focus has it again.
export function redraw(place, ...nodes) {
  const held = place.contains(document.activeElement) ? document.activeElement : null;
  place.replaceChildren(...nodes);
  for (const name of ["aria-label", "href"])
    if (held?.getAttribute(name)) place.querySelector(`[${name}="${CSS.escape(held.getAttribute(name))}"]`)?.focus();
}

export const notice = (text, isError = false) => h("p", { class: isError ? "notice error" : "notice", role: isError ? "alert" : null }, visible(text));

// One stream of the page, closed while nobody looks: a browser allows six connections to a server, over all tabs.
export class Stream {
  constructor(path, handlers, onEnd) {
    Object.assign(this, { path, handlers, onEnd, last: -1, failures: 0 });
    this.onSeen = () => (document.hidden ? this.pause() : this.open());
    document.addEventListener("visibilitychange", this.onSeen);
    this.open();
  }
  open() {
    if (this.source) return;
    const path = typeof this.path === "function" ? this.path() : this.path;
    this.source = new EventSource(path + (this.last < 0 ? "" : `${path.includes("?") ? "&" : "?"}after=${this.last}`));
    this.source.onopen = () => say("live");
    this.source.onerror = () => {
      this.pause();
      say("not connected");
      this.timer = setTimeout(async () => {
        const isOver = this.onEnd && (await this.onEnd().catch((error) => error.status === 401));
        if (this.isClosed) return;
        if (isOver) this.close();
        else if (!document.hidden) this.open();
      }, 500);
    };
    for (const [kind, handle] of Object.entries(this.handlers))
      this.source.addEventListener(kind, (event) => {
        if (event.lastEventId) this.last = Number(event.lastEventId);
        handle(JSON.parse(event.data));
      });
  }
  pause() {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }
  close() {
    this.isClosed = true;
    this.pause();
    document.removeEventListener("visibilitychange", this.onSeen);
    say("");
  }
}

export function say(text) {
  const place = document.getElementById("connection");
  if (place.textContent !== text) place.textContent = text;
}
