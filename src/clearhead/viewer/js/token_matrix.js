/**
 * The attention matrix of the selected head, with the names of its tokens: for sequences, and for layers whose tokens
 * are not patches of the grid.
 */

import { GLOW, paintColors } from "./colors.js";
import { contextOf, drawColorBar, fitCanvas, node, panelHead, setText } from "./dom.js";
import { cellAt, moveCell, shortNumber } from "./layout.js";
import { ALL_HEADS, maxOf, range, tokenLayout } from "./queries.js";

/** @typedef {import("./session.js").Session} Session */
/** @typedef {import("./session.js").Change} Change */
/** @typedef {import("./types.js").LayerWeights} LayerWeights */

const MAX_CELL_SIDE = 34;
const MIN_CELL_FOR_LABELS = 11;
const MAX_LABELS = 120;

/**
 * A token for a reader.
 * @param {string[] | null | undefined} labels
 * @param {number} index
 * @param {number} count of tokens
 */
export function tokenLabel(labels, index, count) {
  return labels?.length === count ? `“${labels[index]}”` : `token ${index}`;
}

/**
 * The weights (Q,K) of a head, or their mean over all heads.
 * @param {LayerWeights} layer
 * @param {number} head
 * @returns {Float32Array}
 */
export function headMatrix({ heads, queries, keys, weights }, head) {
  const size = queries * keys;
  if (head !== ALL_HEADS) return weights.subarray(head * size, (head + 1) * size);
  const mean = new Float32Array(size);
  for (let i = 0; i < weights.length; i++) mean[i % size] += weights[i] / heads;
  return mean;
}

/**
 * @param {Session} session
 * @param {boolean} hasGrid whether another panel shows layers whose tokens are patches
 * @param {HTMLElement} menu
 */
export function createTokenMatrix(session, hasGrid, menu) {
  const canvas = node("canvas", {
    class: "ch-token-matrix",
    tabindex: "0",
    role: "application",
    "aria-label": "Attention matrix. Arrow keys choose a query and a key.",
  });
  const title = node("span", { class: "ch-note" });
  const reading = node("p", { class: "ch-query", "aria-live": "polite" });
  const strip = node("canvas", { class: "ch-colorbar-strip", "aria-hidden": "true" });
  const high = node("span", {});
  const legend = node("div", { class: "ch-colorbar" }, node("span", {}, "0"), strip, high);
  const element = node(
    "section",
    { class: "ch-panel ch-area-matrix", "data-part": "matrix", "aria-label": "Attention matrix" },
    panelHead("From query to key", title, menu),
    canvas,
    legend,
    reading,
  );
  const sheet = document.createElement("canvas");
  /** @type {number | null} cell under the pointer or the cursor */
  let chosen = null;
  let cell = MAX_CELL_SIDE;
  /** width of the names of the tokens */
  let labels = 30;

  /** @type {{layer: LayerWeights | null, head: number, matrix: Float32Array, limit: number}} */
  let painted = { layer: null, head: 0, matrix: new Float32Array(0), limit: 1 };

  const layerNow = () => session.result?.layers[session.layer] ?? null;

  canvas.addEventListener("pointermove", (event) => {
    const layer = layerNow();
    if (!layer) return;
    const box = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left - labels, event.clientY - box.top - labels];
    const found = cellAt(x, y, layer.keys * cell, layer.queries * cell, [layer.queries, layer.keys]);
    chosen = found < 0 ? null : found;
    session.invalidate("query");
  });
  canvas.addEventListener("pointerleave", () => {
    chosen = null;
    session.invalidate("query");
  });
  canvas.addEventListener("keydown", (event) => {
    const layer = layerNow();
    const next = layer && moveCell(chosen ?? 0, event.key, layer.keys, layer.queries * layer.keys);
    if (next === null) return;
    chosen = next;
    event.preventDefault();
    event.stopPropagation();
    session.invalidate("query");
  });

  /** @param {LayerWeights} layer @param {Float32Array} matrix */
  function drawMatrix(layer, matrix) {
    const { queries, keys } = layer;
    const room = Math.max(120, element.clientWidth - labels);
    cell = Math.min(MAX_CELL_SIDE, room / keys, 640 / queries);
    const [width, height] = [labels + keys * cell, labels + queries * cell];
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    legend.style.width = `${width}px`;
    const context = fitCanvas(canvas, width, height);
    context.imageSmoothingEnabled = false;
    context.drawImage(sheet, labels, labels, keys * cell, queries * cell);
    drawLabels(context, layer);
    if (chosen !== null && chosen < matrix.length) {
      const [row, column] = [Math.floor(chosen / keys), chosen % keys];
      context.strokeStyle = "#fff";
      context.lineWidth = 1;
      context.strokeRect(labels + 0.5, labels + row * cell + 0.5, keys * cell - 1, cell - 1);
      context.lineWidth = 2;
      context.strokeRect(labels + column * cell + 1, labels + row * cell + 1, cell - 2, cell - 2);
    }
    drawColorBar(strip, GLOW);
    setText(high, shortNumber(painted.limit));
  }

  /** The colors of the matrix, one pixel for each weight; painted again only if the matrix has changed. @param {LayerWeights} layer */
  function paint(layer) {
    const { head } = session.state;
    const matrix = headMatrix(layer, head);
    const limit = maxOf(matrix) || 1;
    const image = new ImageData(layer.keys, layer.queries);
    paintColors(matrix, 0, limit, GLOW, image.data);
    labels = labelWidth(layer);
    [sheet.width, sheet.height] = [layer.keys, layer.queries];
    contextOf(sheet).putImageData(image, 0, 0);
    painted = { layer, head, matrix, limit };
  }

  /** @param {number} index @param {number} count */
  function labelText(index, count) {
    const { tokens } = session.description;
    return tokens?.length === count ? tokens[index] : String(index);
  }

  const labelFont = () => `12px ${getComputedStyle(canvas).fontFamily}`;

  /** @param {LayerWeights} layer */
  function labelWidth({ queries, keys }) {
    const context = contextOf(sheet);
    context.font = labelFont();
    const counts = [...new Set([queries, keys])];
    const widths = counts.flatMap((count) => range(count).map((i) => context.measureText(labelText(i, count)).width));
    return Math.min(MAX_LABELS, Math.ceil(Math.max(...widths)) + 16);
  }

  /** @param {CanvasRenderingContext2D} context @param {LayerWeights} layer */
  function drawLabels(context, { queries, keys }) {
    context.fillStyle = getComputedStyle(canvas).color;
    context.font = labelFont();
    const every = Math.ceil(MIN_CELL_FOR_LABELS / cell);
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (let i = 0; i < queries; i += every)
      context.fillText(labelText(i, queries), labels - 8, labels + (i + 0.5) * cell, labels - 10);
    context.textAlign = "left";
    for (let i = 0; i < keys; i += every) {
      context.save();
      context.translate(labels + (i + 0.5) * cell, labels - 8);
      if (labels > cell) context.rotate(-Math.PI / 2);
      else context.textAlign = "center";
      context.fillText(labelText(i, keys), 0, 0, labels - 10);
      context.restore();
    }
  }

  /** @param {LayerWeights} layer @param {Float32Array} matrix */
  function describe({ queries, keys }, matrix) {
    if (chosen === null || chosen >= matrix.length) return "Rows are queries, columns are keys. Each row sums to 1.";
    const { tokens } = session.description;
    const [row, column] = [Math.floor(chosen / keys), chosen % keys];
    const [query, key] = [tokenLabel(tokens, row, queries), tokenLabel(tokens, column, keys)];
    const weight = shortNumber(matrix[chosen]);
    return `${query} in row ${row} attends to ${key} in column ${column} with weight ${weight}.`;
  }

  /** @param {Set<Change>} changes */
  function draw(changes) {
    const layer = layerNow();
    element.hidden = !layer || (hasGrid && tokenLayout(session.description, layer).onGrid);
    if (!layer || element.hidden || (changes.size === 1 && changes.has("measures"))) return;
    if (painted.layer !== layer || painted.head !== session.state.head) paint(layer);
    const { matrix } = painted;
    setText(title, session.headName);
    drawMatrix(layer, matrix);
    setText(reading, describe(layer, matrix));
  }

  return { element, draw };
}
