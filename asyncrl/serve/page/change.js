// Changes of a live run's config: a dialog with every field that can change, asked once, answered field by field.

import { ask, exact, h, notice, order, table } from "./dom.js";

const shown = (value) => (value == null ? "" : typeof value === "string" ? value : JSON.stringify(value));

function read(text) {
  if (text.trim() === "") return null;
  try {
    return JSON.parse(text);
  } catch {
    return text.trim();
  }
}

// Opens the dialog; `told` gets what became of the change.
export async function changeRun(path, name, told) {
  const { fields, alarms } = await ask(`${path}/changeable`);
  const inputs = new Map();
  const line = ([field, value]) => {
    const fault = h("div", { id: `fault-${field}`, class: "error" });
    const input = h("input", { id: `change-${field}`, value: shown(value), autocomplete: "off", "aria-describedby": `fault-${field}` });
    inputs.set(field, { input, fault, before: shown(value) });
    return [h("label", { for: `change-${field}` }, field), h("div", {}, input, fault)];
  };
  const said = h("div", { role: "status" });
  const lines = (all) => h("div", { class: "fields" }, Object.entries(all).flatMap(line));
  const form = h("form", { method: "dialog" }, h("h2", {}, `Change ${name}`),
    h("p", { class: "soft" }, "A change holds from a step on that the answer names, and is noted with who made it. Whatever is not here wants a fork."),
    lines(fields), h("details", {}, h("summary", {}, "Alarms"), lines(alarms)), said,
    h("div", { class: "bar" }, h("button", { type: "submit" }, "Change"), h("button", { type: "button", onclick: () => dialog.close() }, "Cancel")));
  const dialog = h("dialog", { "aria-label": `Change ${name}` }, form);
  const send = async (event) => {
    event.preventDefault();
    const changed = [...inputs].filter(([, { input, before }]) => input.value !== before);
    const values = Object.fromEntries(changed.map(([field, { input }]) => [field, read(input.value)]));
    for (const { input, fault } of inputs.values()) {
      input.removeAttribute("aria-invalid");
      fault.textContent = "";
    }
    if (!changed.length) return said.replaceChildren(notice("No value is another one."));
    if (!confirm(`Change ${Object.entries(values).map(([field, value]) => `${field} to ${exact(value)}`).join(", ")}?`)) return;
    try {
      const answer = await order(`${path}/config`, { values }, "PATCH");
      told(table(`Changed from step ${answer.step} on, revision ${answer.revision} of the config`, ["Field", "Before", "After"],
        answer.changes.map((one) => [one.field, shown(one.before), shown(one.after)])));
      dialog.close();
    } catch (error) {
      for (const { field, allowed } of error.faults ?? []) {
        const { input, fault } = inputs.get(field);
        input.setAttribute("aria-invalid", "true");
        input.closest("details")?.setAttribute("open", "");
        fault.textContent = allowed;
      }
      said.replaceChildren(notice(error.faults ? "Nothing was changed; see the fields." : error.message, true));
    }
  };
  form.addEventListener("submit", send);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
