/**
 * What links the viewer with its surroundings: the address of the page, the color scheme, keys, and dropped pictures.
 */

import { decodeState, encodeState } from "./state.js";

/** @typedef {import("./types.js").WidgetModel} WidgetModel */
/** @typedef {import("./session.js").Session} Session */

/**
 * @typedef {object} Linked
 * @property {HTMLElement} root
 * @property {{toggle: () => void}} help
 * @property {{reset: () => void}} actions
 * @property {{receiveFile: (file: Blob) => void} | null} source
 */

/** Milliseconds of rest before the address changes. */
const ADDRESS_DELAY = 250;

/**
 * Keep the state and the address of the page equal.
 * @param {WidgetModel} model
 * @param {Session} session
 */
export function linkState(model, session) {
  const { description } = session;
  let written = encodeState(session.state, description);
  let timer = 0;
  let pushNext = false;
  const write = () => {
    const next = encodeState(session.state, description);
    if (next === written) return;
    written = next;
    try {
      if (pushNext) window.history.pushState(null, "", window.location.href);
    } catch {
      // a frame without an address of its own has no history
    }
    pushNext = false;
    model.set("state", next);
    model.save_changes();
  };
  session.onState = (push) => {
    pushNext ||= push;
    clearTimeout(timer);
    timer = window.setTimeout(write, ADDRESS_DELAY);
  };
  const read = () => {
    const next = (model.get("state") ?? "").replace(/^#/, "");
    if (next === written) return;
    clearTimeout(timer);
    written = next;
    const onState = session.onState;
    session.onState = () => {};
    session.update(decodeState(next, description, session.examples?.count), { push: false });
    session.onState = onState;
  };
  model.on("change:state", read);
  return () => {
    clearTimeout(timer);
    model.off("change:state", read);
  };
}

/**
 * @param {Session} session
 * @param {HTMLElement} root
 */
export function linkTheme(session, root) {
  const query = window.matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    const { theme } = session.state;
    const next = theme === "auto" ? (query.matches ? "dark" : "light") : theme;
    if (next === root.dataset.theme) return;
    session.theme = next;
    root.dataset.theme = next;
    session.invalidate("theme", "layout");
  };
  apply();
  query.addEventListener("change", apply);
  session.panels.push({ element: root, draw: apply });
  return () => query.removeEventListener("change", apply);
}

/**
 * Keys that work everywhere, and pictures that are dropped or pasted.
 * @param {Session} session
 * @param {Linked} page
 */
export function linkKeys(session, page) {
  /** @param {KeyboardEvent} event */
  const onKey = (event) => {
    const target = /** @type {HTMLElement} */ (event.target);
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName ?? ""))
      return;
    const key = event.key.toLowerCase(); // also with Caps Lock
    if (key === "?") page.help.toggle();
    else if (key === "r" && session.canRun) page.actions.reset();
    else if (key === "t") session.update({ theme: session.theme === "dark" ? "light" : "dark" }, { push: false });
    else return;
    event.preventDefault();
  };
  /** @param {DataTransfer | null} data */
  const receive = (data) => {
    const file = [...(data?.files ?? [])].find(({ type }) => type.startsWith("image/"));
    if (file) page.source?.receiveFile(file);
    return Boolean(file);
  };
  const onPaste = (/** @type {ClipboardEvent} */ event) => receive(event.clipboardData) && event.preventDefault();
  const onDrop = (/** @type {DragEvent} */ event) => receive(event.dataTransfer) && event.preventDefault();
  const onDrag = (/** @type {DragEvent} */ event) =>
    event.dataTransfer?.types.includes("Files") && event.preventDefault();
  document.addEventListener("keydown", onKey);
  document.addEventListener("paste", onPaste);
  page.root.addEventListener("drop", onDrop);
  page.root.addEventListener("dragover", onDrag);
  return () => {
    document.removeEventListener("keydown", onKey);
    document.removeEventListener("paste", onPaste);
  };
}
