/**
 * The entrance of the viewer: `render({model, el})`, as anywidget defines it.
 *
 * For tests, `el.viewer` is {state, result, engine, session, ready}: the current state and result, and a promise that
 * resolves after the first pass.
 */

import { createBars } from "./bars.js";
import { node, panelHead, segmented, dropdown } from "./dom.js";
import { createEngine, createTraceEngine } from "./engine.js";
import { createGrid } from "./maps.js";
import { createPad } from "./pad.js";
import { parseSafetensors } from "./safetensors.js";
import { Session } from "./session.js";
import { decodeState, encodeState } from "./state.js";
import { createWall } from "./wall.js";

/** @typedef {import("./types.js").WidgetModel} WidgetModel */

/**
 * @param {{model: WidgetModel, el: HTMLElement}} context
 * @returns {() => void} removes the viewer
 */
export function render({ model, el }) {
  const description = model.get("description");
  const session = new Session(description, decodeState(window.location.hash, description));
  const pad = createPad(session, () => {});
  const bars = createBars(session);
  const grid = createGrid(session, {
    onPatch: (patch) => session.update({ pins: session.state.pins.includes(patch) ? session.state.pins.filter((p) => p !== patch) : [...session.state.pins, patch].slice(-2) }),
    onHide: (patch) => session.updateEdits({ hiddenPatches: toggled(session.state.edits.hiddenPatches, patch) }),
    onMask: (patch) => session.updateEdits({ maskedPatches: toggled(session.state.edits.maskedPatches, patch) }),
  });
  const wall = createWall(session, { onAblate() {}, onFlatten() {} });
  const root = node(
    "div",
    { class: "ch-viewer", "data-theme": "light" },
    node(
      "main",
      { class: "ch-instrument" },
      node("section", { class: "ch-panel ch-area-pad", "data-part": "pad" }, panelHead("Draw", null), pad.element),
      node("section", { class: "ch-panel ch-area-input", "data-part": "input" }, panelHead("What the model sees", null), grid.element),
      node("section", { class: "ch-panel ch-area-bars", "data-part": "bars" }, panelHead("Prediction", null), bars.element),
      node("section", { class: "ch-panel ch-area-wall", "data-part": "wall" }, panelHead("Layers and heads", null), wall.element),
    ),
  );
  el.replaceChildren(root);
  session.panels = [{ element: root, draw: pad.draw }, { element: root, draw: bars.draw }, { element: root, draw: grid.draw }, { element: root, draw: wall.draw }];
  const observer = new ResizeObserver(() => session.invalidate("layout"));
  observer.observe(root);
  session.onState = () => history.replaceState(null, "", `#${encodeState(session.state, description)}`);
  const start = () => { const t = model.get("tensors"); if (!t) return; const tensors = parseSafetensors(t); session.start(tensors, description.kind === "trace" ? createTraceEngine(description, tensors) : createEngine({ description, tensors })); };
  model.on("change:tensors", start);
  start();
  session.invalidate("layout", "state", "input");
  Object.defineProperty(el, "viewer", { value: { session }, configurable: true });
  return () => { session.close(); observer.disconnect(); el.replaceChildren(); };
}

/** @param {number[]} values @param {number} value */
function toggled(values, value) {
  return values.includes(value) ? values.filter((v) => v !== value) : [...values, value];
}

export default { render };
