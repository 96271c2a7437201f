/**
 * The overlay that lists the keys, and small messages.
 */

import { iconButton, node } from "./dom.js";

/** @type {[string, [string, string][]][]} */
const KEYS = [
  [
    "Everywhere",
    [
      ["?", "show or close this help"],
      ["Tab", "go to the next panel"],
      ["R", "remove all edits"],
      ["T", "switch between light and dark"],
    ],
  ],
  [
    "Drawing pad",
    [
      ["Arrow keys", "move the pen, with Shift in larger steps"],
      ["Space", "put the pen down or lift it"],
      ["E", "switch between pen and eraser"],
      ["Ctrl+Z, Ctrl+Y", "undo, redo"],
      ["Delete", "clear the pad"],
    ],
  ],
  [
    "Patch grid",
    [
      ["Arrow keys", "choose the query patch"],
      ["Enter", "pin it; pin a second one for the difference"],
      ["H", "hide its pixels"],
      ["M", "mask its key"],
      ["Escape", "return to the class token or pooling query"],
    ],
  ],
  [
    "Layers and heads",
    [
      ["Arrow keys", "move between heads"],
      ["Enter", "select a head"],
      ["Z", "set it to zero"],
      ["U", "make it uniform"],
    ],
  ],
  ["Matrices of a head", [["Arrow keys", "choose a number and see its arithmetic"]]],
];

export function createHelp() {
  const dialog = node("dialog", { class: "ch-help", "aria-label": "Keys" });
  const close = () => dialog.close();
  const groups = KEYS.map(([title, keys]) =>
    node(
      "section",
      {},
      node("h3", {}, title),
      node(
        "dl",
        {},
        ...keys.flatMap(([key, text]) => [
          node("dt", {}, ...key.split(", ").map((k) => node("kbd", {}, k))),
          node("dd", {}, text),
        ]),
      ),
    ),
  );
  dialog.append(
    node("header", {}, node("h2", {}, "Keys"), iconButton("close", "Close", close)),
    node("div", { class: "ch-help-groups" }, ...groups),
  );
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) close();
  });
  return {
    element: dialog,
    toggle() {
      if (dialog.open) close();
      else dialog.showModal();
    },
  };
}

/** A short message at the bottom of the page, which is read aloud. */
export function createToast() {
  const element = node("div", { class: "ch-toast", role: "status" });
  let timer = 0;
  return {
    element,
    /** @param {string} text */
    say(text) {
      element.textContent = text;
      element.classList.add("ch-shown");
      clearTimeout(timer);
      timer = window.setTimeout(() => element.classList.remove("ch-shown"), 2600);
    },
  };
}
