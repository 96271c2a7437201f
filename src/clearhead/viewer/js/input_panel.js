/**
 * The input as the model receives it: the patch grid, the choice of the query and its direction, what a click does, and
 * the measured effect beside the map.
 */

import { drawColorBar, node, panelHead, segmented, setText } from "./dom.js";
import { GLOW, SIGNED_DARK } from "./colors.js";
import { patchName, percent, shortNumber, signed } from "./layout.js";
import { createGrid } from "./maps.js";
import { READOUT, indexOfMax, maxAbsOf, maxOf, outputQueryName, tokenLayout } from "./queries.js";

/** @typedef {import("./session.js").Session} Session */
/** @typedef {import("./session.js").Change} Change */

const CLICK_NOTES = {
  pin: "Pin a patch to keep its attention; pin a second one to see the difference of both.",
  hide: "Hide a patch: its pixels become background, so that their content is gone from the input.",
  mask: "Mask the key of a patch: its pixels stay, but no query may attend to the patch in any layer.",
};

/**
 * @param {Session} session
 * @param {import("./actions.js").Actions} actions
 * @param {HTMLElement} menu
 */
export function createInputPanel(session, actions, menu) {
  const { input, grid: shape } = session.description;
  const grid = createGrid(session, actions);
  const size = node("span", { class: "ch-note" }, input ? `${input.width} × ${input.height} pixels` : "");
  const query = node("p", { class: "ch-query" });
  const effect = node("p", { class: "ch-measured" });
  const readout = node("button", { type: "button", class: "ch-button", click: () => session.update({ pins: [] }) });
  readout.addEventListener("pointerenter", () => session.setHover(READOUT));
  readout.addEventListener("pointerleave", () => session.setHover(null));
  const direction = segmented(
    "Direction of attention",
    [
      ["to", "Attends to", "Weights of the query for each patch"],
      ["from", "Attention received", "Weight that each patch, as a query, gives to this token"],
    ],
    (value) => session.update({ direction: /** @type {"to" | "from"} */ (value) }),
  );
  const click = segmented(
    "A click on a patch",
    [
      ["pin", "Pin"],
      ["hide", "Hide"],
      ["mask", "Mask key"],
    ],
    (value) => session.update({ click: /** @type {"pin" | "hide" | "mask"} */ (value) }),
  );
  const note = node("p", { class: "ch-note ch-click-note" });
  const strip = node("canvas", { class: "ch-colorbar-strip", "aria-hidden": "true" });
  const [low, high] = [node("span", {}, "0"), node("span", {}, "")];
  const legend = node(
    "div",
    { class: "ch-colorbar", role: "img", "aria-label": "Color scale of attention weights" },
    low,
    strip,
    high,
  );
  const clickRow = node("div", { class: "ch-row" }, node("span", { class: "ch-label" }, "Click to"), click.element);
  const element = node(
    "section",
    { class: "ch-panel ch-area-input", "data-part": "input", "aria-label": "Input and attention" },
    panelHead("What the model sees", size, menu),
    grid.element,
    legend,
    node("div", { class: "ch-row" }, readout, direction.element),
    session.canRun ? clickRow : null,
    session.canRun ? note : null,
    query,
    effect,
  );

  /** The query in words. */
  function describeQuery() {
    const { query: active, minus } = session.activeQuery;
    const layer = session.layers[session.layer];
    if (!layer || !shape) return "";
    const tokens = tokenLayout(session.description, layer);
    if (!tokens.onGrid)
      return `The tokens of ${layer.name} are not the patches of this grid. Its matrix is shown below.`;
    const outputQuery = `The ${outputQueryName(session.description, layer).toLowerCase()}`;
    const name = (/** @type {number} */ patch) =>
      patch === READOUT || layer.queries === 1 ? outputQuery : `The patch in ${patchName(patch, shape)}`;
    const { direction } = session.state;
    if (minus !== null && layer.queries === 1) return `${layer.name} has a single query: no difference.`;
    if (minus !== null)
      return `Difference between ${patchName(active, shape)} (blue) and ${patchName(minus, shape)} (rose), in ${session.headName}.`;
    if (direction === "from" && active !== READOUT)
      return `Attention that the patch in ${patchName(active, shape)} receives, in ${session.headName}.`;
    if (active === READOUT && tokens.readout === "mean")
      return `Attention to each patch, mean over all queries, in ${session.headName}.`;
    return `${name(active)} attends to these patches, in ${session.headName}.`;
  }

  /** What was measured about this map: hiding its brightest patch, or the patch under the pointer. */
  function describeEffect() {
    const occlusion = session.attributions.get("occlusion");
    if (!session.canRun || session.input.empty || !shape) return "";
    if (!occlusion) return session.measuresWait ? "" : "Measuring …";
    const map = session.mapOf(session.layer, session.state.head);
    if (!map) return "";
    const hovered = session.hover !== null && session.hover !== READOUT;
    const patch = hovered ? /** @type {number} */ (session.hover) : indexOfMax(map);
    const change = -occlusion[patch];
    const now = session.probabilities[session.target];
    const what = hovered ? "Hiding this patch" : "Hiding the brightest patch";
    const name = session.className(session.target);
    return `${what} changes P(${name}) from ${percent(now)} to ${percent(now + change)} (${signed(change)}).`;
  }

  /** @param {Set<Change>} changes */
  function draw(changes) {
    grid.draw(changes);
    const map = session.input.empty ? null : session.mapOf(session.layer, session.state.head);
    const isSigned = session.activeQuery.minus !== null;
    const limit = map ? (isSigned ? maxAbsOf(map) : maxOf(map)) : 0;
    drawColorBar(strip, isSigned ? SIGNED_DARK : GLOW);
    setText(low, isSigned ? `−${shortNumber(limit)}` : "0");
    setText(high, map ? shortNumber(limit) : "");
    setText(query, session.input.empty ? "" : describeQuery());
    setText(effect, describeEffect());
    direction.set(session.state.direction);
    click.set(session.state.click);
    setText(note, CLICK_NOTES[session.state.click]);
    const layer = session.layers[session.layer];
    readout.hidden = !layer;
    if (layer) setText(readout, outputQueryName(session.description, layer));
    readout.setAttribute("aria-pressed", String(!session.state.pins.length));
  }

  return { element, draw, grid };
}
