/**
 * The arithmetic behind one number of an attention head: its terms, the largest first, and their sum. Pure functions.
 */

import { range } from "./queries.js";

/** @typedef {import("./types.js").HeadSteps} HeadSteps */
/** @typedef {import("./types.js").Tensor} Tensor */
/** @typedef {"scores" | "scaled" | "mask" | "weights" | "out" | "projected"} MatrixName */

/**
 * A term of a sum: `index` is the dimension or key that it belongs to, and its value is the product of its factors.
 * @typedef {{index: number, factors: number[], value: number}} Term
 */

/**
 * @typedef {object} Arithmetic
 * @property {MatrixName} matrix
 * @property {number} row
 * @property {number} column
 * @property {number} value the number in the matrix
 * @property {"dimension" | "key" | "none"} over what the terms belong to
 * @property {Term[]} terms the largest terms by absolute value
 * @property {number} numOthers
 * @property {number} others sum of the other terms
 * @property {number} sum of all terms: for "weights", the denominator of softargmax
 * @property {number | null} numerator for "weights"
 * @property {boolean} isReplaced whether an edit has replaced the computed number
 */

const NUM_TERMS = 6;

/**
 * The arithmetic of a cell; null if the cell does not exist, or if the weights that it needs are unknown.
 * @param {HeadSteps} steps
 * @param {MatrixName} matrix
 * @param {number} row
 * @param {number} column
 * @param {Tensor | null} projection W_O (E, heads * D), for "projected"
 * @returns {Arithmetic | null}
 */
export function explainCell(steps, matrix, row, column, projection = null) {
  const shown = matrixOf(steps, matrix);
  if (!shown || row >= shown.shape[0] || column >= shown.shape[1]) return null;
  const value = shown.data[row * shown.shape[1] + column];
  const at = { matrix, row, column, value };
  const { q, k, v, scores, weights, out, beta } = steps;
  const width = (/** @type {Tensor} */ tensor) => tensor.shape[1];
  const rowOf = (/** @type {Tensor} */ tensor, /** @type {number} */ i) =>
    tensor.data.subarray(i * width(tensor), (i + 1) * width(tensor));
  switch (matrix) {
    case "scores":
      return {
        ...at,
        over: "dimension",
        ...sumTerms(products(rowOf(q, row), rowOf(k, column))),
        numerator: null,
        isReplaced: false,
      };
    case "scaled": {
      const factors = [beta, scores.data[row * width(scores) + column]];
      const term = { index: 0, factors, value };
      return { ...at, over: "none", ...sumTerms([term]), numerator: null, isReplaced: false };
    }
    case "mask":
      return { ...at, over: "none", ...sumTerms([]), numerator: null, isReplaced: false };
    case "weights":
      return { ...at, ...explainWeight(steps, row, column, value) };
    case "out": {
      const column_ = range(v.shape[0]).map((key) => v.data[key * width(v) + column]);
      return {
        ...at,
        over: "key",
        ...sumTerms(products(rowOf(weights, row), column_)),
        numerator: null,
        isReplaced: false,
      };
    }
    case "projected": {
      if (!projection) return null;
      const start = column * projection.shape[1] + steps.head * width(out);
      const terms = products(rowOf(out, row), projection.data.subarray(start, start + width(out)));
      return { ...at, over: "dimension", ...sumTerms(terms), numerator: null, isReplaced: false };
    }
  }
}

/**
 * The matrices of a head in the order of the computation.
 * @param {HeadSteps} steps
 * @param {MatrixName} name
 * @returns {Tensor | null}
 */
export function matrixOf(steps, name) {
  if (name === "scaled") return { shape: steps.scores.shape, data: scaledScores(steps) };
  if (name === "mask") return steps.mask && { shape: steps.scores.shape, data: steps.mask };
  return steps[name] ?? null;
}

/**
 * beta times the scores; -Infinity where the mask hides a key. At infinite beta, the scores themselves.
 * @param {HeadSteps} steps
 * @returns {Float32Array}
 */
function scaledScores({ scores, beta, mask }) {
  const scale = Number.isFinite(beta) ? beta : 1;
  return Float32Array.from(scores.data, (score, i) => (mask && !mask[i] ? -Infinity : scale * score));
}

/**
 * exp(x_j - max) / sum over keys of exp(x - max), with x = beta times the scores.
 * @param {HeadSteps} steps
 * @param {number} row
 * @param {number} column
 * @param {number} value
 */
function explainWeight(steps, row, column, value) {
  const keys = steps.scores.shape[1];
  const scaled = scaledScores(steps).subarray(row * keys, (row + 1) * keys);
  const max = scaled.reduce((a, b) => Math.max(a, b), -Infinity);
  const power = (/** @type {number} */ x) => (Number.isFinite(steps.beta) ? Math.exp(x - max) : Number(x === max));
  const terms = Array.from(scaled, (x, index) => ({
    index,
    factors: [x - max],
    value: x === -Infinity ? 0 : power(x),
  }));
  const { value: numerator } = terms[column];
  const sum = sumTerms(terms);
  const isReplaced = Math.abs(numerator / (sum.sum || 1) - value) > 1e-4;
  return { over: /** @type {const} */ ("key"), ...sum, numerator, isReplaced };
}

/**
 * @param {ArrayLike<number>} a
 * @param {ArrayLike<number>} b
 * @returns {Term[]}
 */
function products(a, b) {
  return Array.from(a, (value, index) => ({ index, factors: [value, b[index]], value: value * b[index] }));
}

/** @param {Term[]} terms */
function sumTerms(terms) {
  const ordered = [...terms].sort((a, b) => Math.abs(b.value) - Math.abs(a.value) || a.index - b.index);
  const total = (/** @type {Term[]} */ some) => some.reduce((sum, { value }) => sum + value, 0);
  const rest = ordered.slice(NUM_TERMS);
  return { terms: ordered.slice(0, NUM_TERMS), numOthers: rest.length, others: total(rest), sum: total(terms) };
}
