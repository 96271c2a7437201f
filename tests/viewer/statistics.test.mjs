/** Numbers for each head: their limits, and rows without weight. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { headDiagonality, headDistance, headEntropy, headStatistics } from "../../src/clearhead/viewer/js/statistics.js";

/** A layer from the rows of one head each. */
function layerOf(...heads) {
  const [rows] = heads;
  const weights = Float32Array.from(heads.flat(2));
  return { name: "attn", heads: heads.length, queries: rows.length, keys: rows[0].length, weights };
}

const identity = (n) => Array.from({ length: n }, (_, i) => Array.from({ length: n }, (_, j) => (i === j ? 1 : 0)));
const uniform = (n) => Array.from({ length: n }, () => Array(n).fill(1 / n));
const near = (found, expected) => found.forEach((value, i) => assert.ok(Math.abs(value - expected[i]) < 1e-6, `${found}`));

test("entropy is 0 for a single key and log K for equal weights", () => {
  near(headEntropy(layerOf(identity(6), uniform(6))), [0, Math.log(6)]);
});

test("diagonality is the weight on the diagonal", () => {
  near(headDiagonality(layerOf(identity(6), uniform(6))), [1, 1 / 6]);
  near(headDiagonality(layerOf([[1, 0, 0, 0, 0, 0], [0, 0, 0.5, 0.5, 0, 0], [0, 0, 0, 0, 0, 1]])), [1]);
  near(headDiagonality(layerOf([[0.25, 0.75]])), [0.25]);
});

test("distance is measured on the grid, without the tokens before the patches", () => {
  const flipped = identity(6).map((row) => [...row].reverse());
  near(headDistance(layerOf(identity(6), flipped), [2, 3], 0), [0, (4 * Math.sqrt(5) + 2 * 1) / 6]);
  near(headDistance(layerOf(identity(6), flipped), null, 0), [0, (5 + 3 + 1 + 1 + 3 + 5) / 6]);
  const withToken = [[1, 0, 0], [0.5, 0.25, 0.25], [0.8, 0.2, 0]];
  near(headDistance(layerOf(withToken), [1, 2], 1), [(0.5 + 1) / 2]);
});

test("distance needs as many queries as keys, and the patches of the grid", () => {
  assert.ok(Number.isNaN(headDistance(layerOf([[0.5, 0.5]]), null, 0)[0]));
  assert.ok(Number.isNaN(headDistance(layerOf(identity(5)), [2, 3], 0)[0]));
});

test("rows without weight are left out", () => {
  const half = [[0.5, 0.5], [0, 0]];
  const { entropy, distance, diagonality } = headStatistics(layerOf(half, [[0, 0], [0, 0]]), [1, 2], 0);
  near(entropy, [Math.log(2), 0]);
  near(distance, [0.5, 0]);
  near(diagonality, [0.5, 0]);
});
