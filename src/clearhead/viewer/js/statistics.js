/**
 * One number for each head of a layer, as `clearhead.insight` defines them: entropy, distance and diagonality.
 *
 * Each is a mean over the queries; rows without any weight are left out.
 * Letters for shapes: H heads, Q queries, K keys.
 */

/** @typedef {import("./types.js").LayerWeights} LayerWeights */

/**
 * -sum(w log w) in nats: 0 if a head attends to a single key, log K if it attends to all keys equally.
 * @param {LayerWeights} layer
 * @returns {Float32Array} (H)
 */
export function headEntropy(layer) {
  return meanOverRows(layer, 0, (row) => {
    return row.reduce((sum, weight) => (weight > 0 ? sum - weight * Math.log(weight) : sum), 0);
  });
}

/**
 * The mean attention distance in patches of the grid, or in positions of a sequence without one. Tokens before the
 * patches have no position: they are left out, and the rows are normalized again.
 * @param {LayerWeights} layer
 * @param {[number, number] | null} grid rows and columns
 * @param {number} prefix tokens before the patches
 * @returns {Float32Array} (H); NaN for a layer whose queries are not its keys
 */
export function headDistance(layer, grid, prefix) {
  if (layer.queries !== layer.keys || (grid !== null && grid[0] * grid[1] !== layer.keys - prefix)) {
    return new Float32Array(layer.heads).fill(NaN);
  }
  const columns = grid === null ? Infinity : grid[1];
  return meanOverRows(layer, prefix, (row, query) => {
    let sum = 0;
    let total = 0;
    row.forEach((weight, key) => {
      const down = grid === null ? 0 : Math.floor(query / columns) - Math.floor(key / columns);
      const across = grid === null ? query - key : (query % columns) - (key % columns);
      sum += weight * Math.hypot(down, across);
      total += weight;
    });
    return sum / total;
  });
}

/**
 * The weight on the diagonal, from the first query and key to the last.
 * @param {LayerWeights} layer
 * @returns {Float32Array} (H)
 */
export function headDiagonality(layer) {
  const { queries, keys } = layer;
  return meanOverRows(layer, 0, (row, query) => {
    const middle = queries > 1 ? (query * (keys - 1)) / (queries - 1) : 0;
    return row.reduce((sum, weight, key) => (Math.abs(key - middle) <= 0.5 ? sum + weight : sum), 0);
  });
}

/**
 * All three for every head.
 * @param {LayerWeights} layer
 * @param {[number, number] | null} grid
 * @param {number} prefix
 * @returns {{entropy: Float32Array, distance: Float32Array, diagonality: Float32Array}}
 */
export function headStatistics(layer, grid, prefix) {
  const distance = headDistance(layer, grid, prefix);
  return { entropy: headEntropy(layer), distance, diagonality: headDiagonality(layer) };
}

/**
 * @param {LayerWeights} layer
 * @param {number} prefix queries and keys that are left out
 * @param {(row: Float32Array, query: number) => number} measure
 * @returns {Float32Array} (H)
 */
function meanOverRows({ heads, queries, keys, weights }, prefix, measure) {
  return Float32Array.from({ length: heads }, (_, head) => {
    let sum = 0;
    let count = 0;
    for (let query = prefix; query < queries; query++) {
      const start = (head * queries + query) * keys;
      const row = weights.subarray(start + prefix, start + keys);
      if (row.some((weight) => weight > 0)) {
        sum += measure(row, query - prefix);
        count += 1;
      }
    }
    return sum / Math.max(1, count);
  });
}
