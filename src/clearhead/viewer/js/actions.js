/**
 * What visitors can do to patches and heads, from any panel.
 */

import { ALL_HEADS, range } from "./queries.js";

/** @typedef {import("./session.js").Session} Session */
/** @typedef {import("./types.js").HeadEdit} HeadEdit */

/**
 * @typedef {object} Actions
 * @property {(patch: number) => void} onPatch a click on a patch: pins, hides or masks it
 * @property {(patch: number) => void} pin
 * @property {(patch: number) => void} hide
 * @property {(patch: number) => void} mask
 * @property {(layer: number, head: number, pattern: HeadEdit["pattern"]) => void} editHead twice: undone
 * @property {() => void} reset
 */

/**
 * @param {Session} session
 * @returns {Actions}
 */
export function createActions(session) {
  /** @type {Actions} */
  const actions = {
    onPatch(patch) {
      actions[session.canRun ? session.state.click : "pin"](patch);
    },
    pin(patch) {
      const { pins } = session.state;
      const kept = pins.length === 2 ? pins.slice(0, 1) : pins;
      session.update({ pins: pins.includes(patch) ? pins.filter((pin) => pin !== patch) : [...kept, patch] });
    },
    hide(patch) {
      if (session.canRun) session.updateEdits({ hiddenPatches: toggle(session.state.edits.hiddenPatches, patch) });
    },
    mask(patch) {
      if (session.canRun) session.updateEdits({ maskedPatches: toggle(session.state.edits.maskedPatches, patch) });
    },
    editHead(layer, head, pattern) {
      if (!session.canRun) return;
      const { name, heads: count } = session.layers[layer];
      const chosen = head === ALL_HEADS ? range(count) : [head];
      const { heads } = session.state.edits;
      const isDone = chosen.every((h) => heads.some((e) => e.layer === name && e.head === h && e.pattern === pattern));
      const others = heads.filter((edit) => edit.layer !== name || !chosen.includes(edit.head));
      const added = isDone ? [] : chosen.map((h) => ({ layer: name, head: h, pattern }));
      session.updateEdits({ heads: [...others, ...added] });
    },
    reset() {
      session.updateEdits({ heads: [], hiddenPatches: [], maskedPatches: [], beta: null });
    },
  };
  return actions;
}

/**
 * @param {number[]} values
 * @param {number} value
 */
function toggle(values, value) {
  return values.includes(value) ? values.filter((other) => other !== value) : [...values, value];
}
