/**
 * What a query attends to, as a map of patches. Pure functions.
 *
 * A query is a patch (its index) or the output query (READOUT): the class token, the pooling query, or, where the output is
 * read from all tokens, the mean over all queries.
 */

/** @typedef {import("./types.js").Description} Description */
/** @typedef {import("./types.js").LayerWeights} LayerWeights */

/** The query that the output is read from. */
export const READOUT = -1;
/** In place of the index of a head: the mean over the heads of a layer. */
export const ALL_HEADS = -1;

/**
 * How the tokens of a layer lie on the patch grid.
 * @typedef {object} TokenLayout
 * @property {boolean} onGrid whether the keys are patches, after `prefix` other tokens; otherwise a map is a matrix
 * @property {number} prefix class token and register tokens among the keys
 * @property {"single" | "token" | "mean"} readout row of the output query: the only one, the class token's, or the mean row
 * @property {number} patches
 */

/**
 * @param {Description} description
 * @param {{queries: number, keys: number}} layer
 * @returns {TokenLayout}
 */
export function tokenLayout(description, layer) {
  const patches = description.grid ? description.grid[0] * description.grid[1] : 0;
  const prefix = layer.keys - patches;
  const square = layer.queries === layer.keys;
  const onGrid =
    patches > 0 && prefix >= 0 && prefix <= description.num_prefix_tokens && (square || layer.queries === 1);
  const hasClassToken = hasClassTokenIn(description) && prefix > 0;
  return { onGrid, prefix, patches, readout: layer.queries === 1 ? "single" : hasClassToken ? "token" : "mean" };
}

/** @param {Description} description */
export function hasClassTokenIn(description) {
  const pooling = description.config?.pooling;
  return pooling === undefined ? description.num_prefix_tokens > 0 : pooling === "cls";
}

/**
 * Name of the output query (READOUT) in a layer, for buttons.
 * @param {Description} description
 * @param {{queries: number, keys: number}} layer
 * @returns {"Class token" | "Pooling query" | "All queries"}
 */
export function outputQueryName(description, layer) {
  if (tokenLayout(description, layer).readout === "mean") return "All queries";
  return hasClassTokenIn(description) ? "Class token" : "Pooling query";
}

/**
 * The map (P) of one query in one layer and head. "to": the query's weights for each patch. "from": the weight that
 * each patch, as a query, gives to this token as a key.
 * @param {LayerWeights} layer
 * @param {TokenLayout} tokens
 * @param {number} head index or ALL_HEADS
 * @param {number} query patch or READOUT
 * @param {"to" | "from"} direction
 * @param {Float32Array} out (P)
 */
export function patchMap(layer, tokens, head, query, direction, out) {
  out.fill(0);
  const heads = head === ALL_HEADS ? range(layer.heads) : [head];
  for (const index of heads) addHeadMap(layer, tokens, index, query, direction, out);
  if (heads.length > 1) for (let i = 0; i < out.length; i++) out[i] /= heads.length;
  return out;
}

/**
 * @param {LayerWeights} layer
 * @param {TokenLayout} tokens
 * @param {number} head
 * @param {number} query
 * @param {"to" | "from"} direction
 * @param {Float32Array} out
 */
function addHeadMap({ queries, keys, weights }, { prefix, patches, readout }, head, query, direction, out) {
  const start = head * queries * keys;
  if (queries === 1) {
    const row = start + prefix;
    if (direction === "from" && query !== READOUT) out[query] += weights[row + query];
    else for (let key = 0; key < patches; key++) out[key] += weights[row + key];
    return;
  }
  if (query === READOUT && readout === "mean") {
    for (let row = prefix; row < queries; row++) {
      const offset = start + row * keys + prefix;
      for (let key = 0; key < patches; key++) out[key] += weights[offset + key] / patches;
    }
    return;
  }
  const token = query === READOUT ? 0 : prefix + query;
  if (direction === "to") {
    const offset = start + token * keys + prefix;
    for (let key = 0; key < patches; key++) out[key] += weights[offset + key];
  } else {
    for (let row = 0; row < patches; row++) out[row] += weights[start + (prefix + row) * keys + token];
  }
}

/**
 * Differences of two maps: first minus second.
 * @param {Float32Array} first changed in place
 * @param {Float32Array} second
 */
export function subtractMap(first, second) {
  for (let i = 0; i < first.length; i++) first[i] -= second[i];
  return first;
}

/**
 * Softargmax of logits.
 * @param {ArrayLike<number>} logits
 * @returns {Float32Array}
 */
export function toProbabilities(logits) {
  let max = -Infinity;
  for (let i = 0; i < logits.length; i++) max = Math.max(max, logits[i]);
  const out = Float32Array.from(logits, (value) => Math.exp(value - max));
  const sum = out.reduce((a, b) => a + b, 0);
  return out.map((value) => value / sum);
}

/** @param {ArrayLike<number>} values */
export function indexOfMax(values) {
  let best = 0;
  for (let i = 1; i < values.length; i++) if (values[i] > values[best]) best = i;
  return best;
}

/** @param {ArrayLike<number>} values */
export function maxOf(values) {
  let max = -Infinity;
  for (let i = 0; i < values.length; i++) if (values[i] > max) max = values[i];
  return max;
}

/** @param {ArrayLike<number>} values */
export function maxAbsOf(values) {
  let max = 0;
  for (let i = 0; i < values.length; i++) max = Math.max(max, Math.abs(values[i]));
  return max;
}

/** @param {number} n */
export function range(n) {
  return Array.from({ length: n }, (_, i) => i);
}
