// The page: who is logged in, and which view the address names, #/run/NAME/samples.

import { freeCharts } from "./charts.js";
import { ask, h, notice, order, Refused } from "./dom.js";
import { compare, runs } from "./runs.js";
import { run } from "./run.js";
import { alarms, config, events, ledger, logs } from "./files.js";
import { samples } from "./samples.js";
import { timeline } from "./timeline.js";

const VIEWS = { run, alarms, timeline, samples, events, ledger, config, logs };
const content = document.getElementById("content");
const logout = document.getElementById("logout");
let me = null;
let leave = null;
let shown = 0;

const parts = () => location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decodeURIComponent);

function showNav(name, here) {
  const link = (path, text, isHere) => h("a", { href: `#/${path}`, "aria-current": isHere && "page" }, text);
  const of = name && `run/${encodeURIComponent(name)}`;
  document.getElementById("nav").replaceChildren(link("", "Runs", !here),
    ...(name ? [link(of, name, here === "run"), ...Object.keys(VIEWS).slice(1).map((view) => link(`${of}/${view}`, view, here === view))] : []));
}

async function show() {
  const turn = (shown += 1);
  leave?.();
  leave = null;
  const [kind, name, view = "run"] = parts();
  showNav(kind === "run" && me ? name : "", kind && (kind === "run" ? view : kind));
  document.title = [view !== "run" && view, name, "asyncrl"].filter(Boolean).join(" – ");
  logout.hidden = !me;
  document.getElementById("who").textContent = me ? `${me.name} (${me.role})` : "";
  let made;
  content.setAttribute("aria-busy", "true"); // what is there is dimmed until the asked view has come
  try {
    if (!me) made = { node: login() };
    else if (!kind) made = await runs(me);
    else if (kind === "compare") made = await compare(name);
    else if (kind === "run" && name && Object.hasOwn(VIEWS, view)) made = await VIEWS[view](name, me);
    else made = { node: notice(`There is no page ${location.hash}`, true) };
  } catch (error) {
    if (error.status === 401) {
      me = null;
      return show();
    }
    if (!(error instanceof Refused || error instanceof TypeError)) throw error;
    made = { node: notice(error.message, true) };
  }
  if (turn !== shown) return made.leave?.();
  leave = made.leave;
  content.replaceChildren(made.node);
  content.removeAttribute("aria-busy");
  made.shown?.();
  freeCharts();
}

function login(failed = "") {
  const token = h("input", { id: "token", type: "password", autocomplete: "current-password", required: true });
  const submit = async (event) => {
    event.preventDefault();
    if (await enter(token.value.trim())) return;
    content.replaceChildren(login("This is no token of the daemon."));
    document.getElementById("token").focus();
  };
  return h("form", { class: "login", onsubmit: submit }, h("h1", {}, "Log in"), h("label", { for: "token" }, "Token"), token,
    failed ? notice(failed, true) : h("p", { class: "soft" }, "The admin’s is in the daemon’s folder, in admin.token."),
    h("button", {}, "Log in"));
}

async function enter(token) {
  try {
    await order("/v1/login", { token });
  } catch (error) {
    if (error.status === 401) return false;
    throw error;
  }
  me = await ask("/v1/session");
  await show();
  return true;
}

logout.addEventListener("click", async () => {
  leave?.(); // who has logged out asks for nothing more
  leave = null;
  try {
    await order("/v1/logout");
    me = null;
  } finally {
    await show();
  }
});
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  content.focus();
});
addEventListener("hashchange", async () => {
  await show();
  content.focus({ preventScroll: true });
  scrollTo(0, 0);
});

const given = /^#token=([\w-]+)$/.exec(location.hash);
if (given) history.replaceState(null, "", "#/");
if (!given || !(await enter(given[1]))) {
  const session = await ask("/v1/session");
  me = session.name ? session : null;
  await show();
}
