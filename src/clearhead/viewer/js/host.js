/**
 * Starts the viewer in its host: an HTML file or a notebook, which contain description and tensors in script elements,
 * or the local server, which is asked for them and for the list of models.
 */

import { remoteEngine } from "./remote.js";
import { decodeBase64 } from "./safetensors.js";
import { request } from "./server.js";
import { render } from "./viewer.js";

/** @typedef {import("./types.js").Description} Description */
/** @typedef {import("./types.js").WidgetModel} WidgetModel */

/**
 * An entry of the server's list.
 * @typedef {object} ListedModel
 * @property {string} id
 * @property {string} title
 * @property {string} detail recipe, accuracy and state of a run
 * @property {string} problem why it cannot be shown; "" if it can
 */

/** the text of the joined script; null where modules are loaded one by one */
const script = document.currentScript?.textContent ?? null;

/**
 * A worker that runs worker.js, or null where workers cannot be started.
 * @returns {Worker | null}
 */
function spawnWorker() {
  try {
    if (script === null) return new Worker("js/worker.js", { type: "module" });
    const address = URL.createObjectURL(new Blob([script], { type: "text/javascript" }));
    const worker = new Worker(address);
    URL.revokeObjectURL(address);
    return worker;
  } catch {
    return null;
  }
}

/**
 * The model that `render` takes, with the state of the page in the fragment of the address.
 * @param {Record<string, any>} traits
 * @returns {WidgetModel}
 */
function hostModel(traits) {
  const values = { ...traits, spawn: spawnWorker, state: readFragment() };
  /** @type {Map<string, Set<() => void>>} */
  const listeners = new Map();
  const changed = (/** @type {string} */ event) => listeners.get(event)?.forEach((callback) => callback());
  window.addEventListener("hashchange", () => {
    if (readFragment() === values.state) return;
    values.state = readFragment();
    changed("change:state");
  });
  return {
    get: (name) => /** @type {Record<string, any>} */ (values)[name],
    set: (name, value) => {
      Object.assign(values, { [name]: value });
      changed(`change:${name}`);
    },
    on: (event, callback) => void listeners.set(event, (listeners.get(event) ?? new Set()).add(callback)),
    off: (event, callback) => void listeners.get(event)?.delete(callback),
    save_changes: () => writeFragment(values.state),
  };
}

function readFragment() {
  return window.location.hash.replace(/^#/, "");
}

/** @param {string} state */
function writeFragment(state) {
  if (state === readFragment()) return;
  try {
    window.history.replaceState(null, "", `#${state}`);
  } catch {
    // A notebook shows this page in a frame without an address of its own: its state is not kept.
  }
}

/**
 * @param {HTMLElement} el
 * @param {Description} description
 * @param {Uint8Array} tensors
 * @param {string} address of the model on the server; "" without one
 */
function show(el, description, tensors, address) {
  const engine = description.kind === "live" ? remoteEngine(address) : null;
  render({ model: hostModel({ description, tensors, engine }), el });
  followTheme(el);
}

/**
 * The page around the viewer has the viewer's theme.
 * @param {HTMLElement} el
 */
function followTheme(el) {
  const viewer = el.firstElementChild;
  if (!(viewer instanceof HTMLElement)) return;
  const apply = () => void (document.body.dataset.theme = viewer.dataset.theme ?? "light");
  new MutationObserver(apply).observe(viewer, { attributes: true, attributeFilter: ["data-theme"] });
  apply();
}

/** @param {HTMLElement} el */
function startEmbedded(el) {
  const text = (/** @type {string} */ id) => document.getElementById(id)?.textContent ?? "";
  show(el, JSON.parse(text("clearhead-description")), decodeBase64(text("clearhead-tensors")), "");
}

/** @param {HTMLElement} el */
async function startServed(el) {
  const status = element("p", "host-status", "Loading the list of models …");
  el.replaceChildren(status);
  try {
    const { models, opened } = await (await request("api/models")).json();
    const id = new URLSearchParams(window.location.search).get("model") ?? opened;
    el.before(modelPicker(models, id));
    const chosen = models.find((/** @type {ListedModel} */ model) => model.id === id);
    if (!chosen) throw new Error("This model is not in the list any more. Choose another one.");
    if (chosen.problem) throw new Error(chosen.problem);
    document.title = `${chosen.title} · Clearhead`;
    status.textContent = `Loading ${chosen.title} …`;
    const address = `api/models/${encodeURIComponent(id)}`;
    const description = await (await request(`${address}/description`)).json();
    const tensors = new Uint8Array(await (await request(`${address}/tensors`)).arrayBuffer());
    show(el, description, tensors, address);
  } catch (error) {
    status.classList.add("host-problem");
    status.setAttribute("role", "alert");
    status.textContent = error instanceof Error ? error.message : String(error);
  }
}

/**
 * The choice of a model, and the runs that cannot be shown, with their reasons.
 * @param {ListedModel[]} models
 * @param {string} id
 */
function modelPicker(models, id) {
  const header = element("header", "host-models");
  const select = document.createElement("select");
  select.id = "host-model";
  for (const model of models) {
    if (model.problem && model.id !== id) continue;
    const option = document.createElement("option");
    option.value = model.id;
    option.textContent = model.detail ? `${model.title} (${model.detail})` : model.title;
    option.selected = model.id === id;
    select.append(option);
  }
  select.addEventListener("change", () => {
    window.location.assign(`?model=${encodeURIComponent(select.value)}`);
  });
  const label = document.createElement("label");
  label.append("Model ", select);
  header.append(label);
  const problems = models.filter(({ problem }) => problem);
  if (problems.length) {
    const details = document.createElement("details");
    const count = problems.length === 1 ? "1 run cannot be shown" : `${problems.length} runs cannot be shown`;
    details.append(element("summary", "", count));
    const list = document.createElement("ul");
    for (const { title, problem } of problems) list.append(element("li", "", `${title}: ${problem}`));
    details.append(list);
    header.append(details);
  }
  return header;
}

/**
 * @param {string} tag
 * @param {string} className
 * @param {string} [text]
 */
function element(tag, className, text = "") {
  const created = document.createElement(tag);
  if (className) created.className = className;
  created.textContent = text;
  return created;
}

const root = document.getElementById("clearhead");
document.body.dataset.theme = window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
if (root && document.getElementById("clearhead-description")) {
  startEmbedded(root);
} else if (root) {
  startServed(root);
}
