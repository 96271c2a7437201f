/**
 * The input of the model: a drawing, an example or a picture, as pixels (C,height,width). Pure functions.
 */

import { drawingToImage } from "./strokes.js";

/** @typedef {import("./types.js").Description} Description */
/** @typedef {import("./types.js").Tensors} Tensors */
/** @typedef {import("./state.js").State} State */
/** @typedef {import("./strokes.js").PadTransform} PadTransform */

/** @typedef {{pixels: Uint8Array, transform: PadTransform | null, empty: boolean}} Input `transform` of a drawing */

/**
 * Images to choose from: test examples, or the inputs of a recorded pass.
 * @typedef {object} Examples
 * @property {number} count
 * @property {Uint8Array} pixels (N,C,height,width)
 * @property {Int32Array | null} labels (N)
 * @property {Float32Array | null} logits (N,V)
 * @property {number} classes V, or 0 without logits
 */

/** @param {Description} description */
export function inputSize({ input }) {
  return input ? input.channels * input.height * input.width : 0;
}

/**
 * @param {Tensors | null} tensors
 * @param {boolean} canRun false for a recorded pass
 * @returns {Examples | null}
 */
export function examplesOf(tensors, canRun) {
  const prefix = canRun ? "examples" : "trace";
  const pixels = tensors?.get(`${prefix}.pixels`);
  if (!tensors || !pixels || !pixels.shape[0]) return null;
  const logits = tensors.get(`${prefix}.logits`);
  return {
    count: pixels.shape[0],
    pixels: /** @type {Uint8Array} */ (pixels.data),
    labels: /** @type {Int32Array | null} */ (tensors.get(`${prefix}.labels`)?.data ?? null),
    logits: /** @type {Float32Array | null} */ (logits?.data ?? null),
    classes: logits ? logits.shape[1] : 0,
  };
}

/**
 * The input that a state describes. It is empty if nothing is drawn, or while examples are being loaded.
 * @param {State} state
 * @param {Description} description
 * @param {Examples | null} examples
 * @returns {Input}
 */
export function inputOf(state, description, examples) {
  const spec = description.input;
  if (!spec) return { pixels: new Uint8Array(0), transform: null, empty: false };
  if (state.source === "draw") return drawingToImage(state.strokes, spec, state.center);
  if (state.source === "picture" && state.picture) return { pixels: state.picture, transform: null, empty: false };
  const size = inputSize(description);
  if (!examples) return { pixels: new Uint8Array(size), transform: null, empty: true };
  const index = Math.min(state.example, examples.count - 1);
  return { pixels: examples.pixels.slice(index * size, (index + 1) * size), transform: null, empty: false };
}
