/**
 * Geometry and text of the page: positions of cells, order of heads, numbers as text. Pure functions.
 */

import { range } from "./queries.js";

/**
 * The cell of a grid at a point; -1 outside.
 * @param {number} x from 0 to width
 * @param {number} y
 * @param {number} width
 * @param {number} height
 * @param {[number, number]} grid rows and columns
 */
export function cellAt(x, y, width, height, [rows, columns]) {
  const [row, column] = [Math.floor((y / height) * rows), Math.floor((x / width) * columns)];
  return row < 0 || column < 0 || row >= rows || column >= columns ? -1 : row * columns + column;
}

/**
 * The cell that an arrow key leads to; the same one at an edge, and null for other keys.
 * @param {number} cell
 * @param {string} key
 * @param {number} columns
 * @param {number} count
 * @returns {number | null}
 */
export function moveCell(cell, key, columns, count) {
  const column = cell % columns;
  const last = Math.min(columns, count) - 1;
  switch (key) {
    case "ArrowLeft":
      return column > 0 ? cell - 1 : cell;
    case "ArrowRight":
      return column < last && cell + 1 < count ? cell + 1 : cell;
    case "ArrowUp":
      return cell >= columns ? cell - columns : cell;
    case "ArrowDown":
      return cell + columns < count ? cell + columns : cell;
    case "Home":
      return cell - column;
    case "End":
      return Math.min(count - 1, cell - column + columns - 1);
    default:
      return null;
  }
}

/**
 * A patch for a reader: rows and columns counted from 1.
 * @param {number} patch
 * @param {[number, number]} grid
 */
export function patchName(patch, grid) {
  return `row ${Math.floor(patch / grid[1]) + 1}, column ${(patch % grid[1]) + 1}`;
}

/** @typedef {{layer: number, head: number}} HeadRef */
/** @typedef {HeadRef & {x: number, y: number, size: number}} WallCell */

/**
 * Every head of a model in the order of a sort. `values` has one number per head, layer after layer; where it is NaN
 * or missing, heads come last.
 * @param {number[]} headCounts of each layer
 * @param {ArrayLike<number> | null} values
 * @param {boolean} [descending]
 * @returns {HeadRef[]}
 */
export function orderHeads(headCounts, values, descending = false) {
  const heads = headCounts.flatMap((count, layer) => range(count).map((head) => ({ layer, head })));
  if (!values) return heads;
  const sign = descending ? -1 : 1;
  const rank = heads.map((_, i) => (Number.isFinite(values[i]) ? sign * values[i] : Infinity));
  return range(heads.length)
    .sort((a, b) => (rank[a] === rank[b] ? a - b : rank[a] - rank[b]))
    .map((i) => heads[i]);
}

/**
 * @typedef {object} WallOptions
 * @property {number} gap between cells
 * @property {number} caption height of the text under a cell
 * @property {number} label height of the text above a layer
 * @property {number} minSize of a cell
 * @property {number} goodSize of a cell, which is preferred to fewer rows
 * @property {number} maxSize
 */

/**
 * Positions of the heads of all layers. Each layer is a block of cells in one row; blocks stand side by side where the
 * cells stay large enough.
 * @param {number} width available
 * @param {number[]} headCounts of each layer
 * @param {WallOptions} options
 * @returns {{size: number, columns: number, height: number, cells: WallCell[], labels: {layer: number, x: number, y: number}[]}}
 */
export function wallBlocks(width, headCounts, { gap, caption, label, minSize, goodSize, maxSize }) {
  const most = Math.max(1, ...headCounts);
  const between = 2 * gap;
  const sizeOf = (/** @type {number} */ blocks) => {
    const gaps = gap * (most - 1) * blocks + between * (blocks - 1);
    return Math.floor(Math.min(maxSize, (width - gaps) / (most * blocks)));
  };
  let blocks = Math.max(1, headCounts.length);
  while (blocks > 1 && sizeOf(blocks) < goodSize) blocks--;
  const size = Math.max(minSize, sizeOf(blocks));
  const blockWidth = most * size + (most - 1) * gap + between;
  const rowHeight = label + size + caption + gap;
  /** @type {WallCell[]} */
  const cells = [];
  const labels = headCounts.map((count, layer) => {
    const [x, y] = [(layer % blocks) * blockWidth, Math.floor(layer / blocks) * rowHeight];
    for (let head = 0; head < count; head++)
      cells.push({ layer, head, x: x + head * (size + gap), y: y + label, size });
    return { layer, x, y };
  });
  const height = Math.ceil(headCounts.length / blocks) * rowHeight - gap;
  return { size, columns: most, height, cells, labels };
}

/**
 * Positions of heads in a given order, row after row, with cells as large as in `wallBlocks` or smaller.
 * @param {number} width available
 * @param {HeadRef[]} order
 * @param {number} size of a cell
 * @param {WallOptions} options
 * @returns {{columns: number, height: number, cells: WallCell[]}}
 */
export function wallRows(width, order, size, { gap, caption }) {
  const columns = Math.max(1, Math.floor((width + gap) / (size + gap)));
  const cells = order.map((ref, i) => ({
    ...ref,
    x: (i % columns) * (size + gap),
    y: Math.floor(i / columns) * (size + caption + gap),
    size,
  }));
  return { columns, height: Math.ceil(order.length / columns) * (size + caption + gap) - gap, cells };
}

/**
 * The classes that the bars show: all in their order, or the most probable of many.
 * @param {ArrayLike<number>} probabilities
 * @param {number} limit
 */
export function shownClasses(probabilities, limit) {
  const all = range(probabilities.length);
  if (all.length <= limit) return all;
  return all.sort((a, b) => probabilities[b] - probabilities[a] || a - b).slice(0, limit);
}

/**
 * The two most probable classes and the difference of their probabilities.
 * @param {ArrayLike<number>} probabilities
 */
export function topTwo(probabilities) {
  let [first, second] = [0, -1];
  for (let i = 1; i < probabilities.length; i++) {
    if (probabilities[i] > probabilities[first]) [first, second] = [i, first];
    else if (second < 0 || probabilities[i] > probabilities[second]) second = i;
  }
  return { first, second, margin: second < 0 ? 1 : probabilities[first] - probabilities[second] };
}

/**
 * A probability as a percentage that is never rounded to certainty.
 * @param {number} value
 */
export function percent(value) {
  if (!Number.isFinite(value)) return "–";
  if (value > 0.999 && value < 1) return ">99.9%";
  if (value > 0 && value < 0.001) return "<0.1%";
  return `${(100 * value).toFixed(1)}%`;
}

/**
 * A number of things, such as "1 head" or "12 heads".
 * @param {number} count
 * @param {string} noun in the singular
 */
export function counted(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

/**
 * A number with a sign, and with a real minus sign.
 * @param {number} value
 * @param {number} [digits]
 */
export function signed(value, digits = 2) {
  if (!Number.isFinite(value)) return "–";
  const text = Math.abs(value).toFixed(digits);
  if (Number(text) === 0) return `±${text}`;
  return (value < 0 ? "−" : "+") + text;
}

/**
 * The sign of a number that `signed` shows: 0 if it is rounded to zero.
 * @param {number} value
 * @param {number} [digits]
 */
export function signOf(value, digits = 2) {
  return Math.sign(Number(value.toFixed(digits))) || 0;
}

/**
 * A number with about three significant digits, as short as possible.
 * @param {number} value
 */
export function shortNumber(value) {
  if (value === Infinity) return "∞";
  if (value === -Infinity) return "−∞";
  if (Number.isNaN(value)) return "NaN";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e5 || size < 1e-4)
    return value.toExponential(1).replace("-", "−").replace("e+", "e").replace("e-", "e−");
  const digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : size >= 0.01 ? 3 : 4;
  return value.toFixed(digits).replace("-", "−");
}

/** Positions of the slider of beta: 0 at the left end, infinity at the right end, in between a logarithmic scale. */
export const BETA_STEPS = 200;
const BETA_DECADES = 2;

/**
 * The inverse temperature at a position of the slider; `own` (the model's) is in the middle.
 * @param {number} position 0 to BETA_STEPS
 * @param {number} own
 */
export function betaAt(position, own) {
  if (position <= 0) return 0;
  if (position >= BETA_STEPS) return Infinity;
  return own * 10 ** (BETA_DECADES * ((2 * position) / BETA_STEPS - 1));
}

/**
 * @param {number} beta
 * @param {number} own
 */
export function betaPosition(beta, own) {
  if (!(beta > 0)) return 0;
  if (beta === Infinity) return BETA_STEPS;
  const position = (BETA_STEPS / 2) * (Math.log10(beta / own) / BETA_DECADES + 1);
  return Math.min(BETA_STEPS - 1, Math.max(1, Math.round(position)));
}

/**
 * Keep what lies in [low, high].
 * @param {number} value
 * @param {number} low
 * @param {number} high
 */
export function clamp(value, low, high) {
  return Math.min(high, Math.max(low, value));
}
