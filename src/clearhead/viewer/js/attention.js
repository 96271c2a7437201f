/**
 * Attention: weights = softargmax(beta q kᵀ), out = weights v, in every head, with edits of the weights.
 *
 * Letters for shapes: H heads, G heads of keys and values, Q queries, K keys, D head width, E width.
 */

import { applyLinear, applyNorm, matmul, matrixView, transpose } from "./tensors.js";

/** @typedef {import("./tensors.js").LinearLayer} LinearLayer */
/** @typedef {import("./tensors.js").NormLayer} NormLayer */
/** @typedef {import("./tensors.js").Workspace} Workspace */
/** @typedef {import("./types.js").HeadSteps} HeadSteps */

/**
 * @typedef {object} AttentionLayer
 * @property {string} name module path, such as "blocks.0.attn"
 * @property {number} heads H
 * @property {number} kvHeads G; each serves H/G consecutive heads
 * @property {number} headDim D
 * @property {number} beta inverse temperature of the model
 * @property {LinearLayer} q
 * @property {LinearLayer} k
 * @property {LinearLayer} v
 * @property {LinearLayer | null} out output projection
 * @property {NormLayer | null} qNorm norm of the queries of each head
 * @property {NormLayer | null} kNorm
 */

/**
 * What changes a layer's attention.
 * @typedef {object} AttentionControls
 * @property {number} beta
 * @property {Uint8Array | null} visible (K) 1 where a key may be attended to; null: all of them
 * @property {Map<number, "zero" | "uniform">} patterns edited heads
 * @property {Float32Array | null} angles rotary angles (K, D/2), for self-attention
 */

/**
 * Everything that a layer has computed; the arrays belong to a workspace and are overwritten by the next pass.
 * @typedef {object} AttentionState
 * @property {AttentionLayer} layer
 * @property {AttentionControls} controls
 * @property {number} queries Q
 * @property {number} keys K
 * @property {Float32Array} qRaw (Q, H D) before norm and rotation
 * @property {Float32Array} kRaw (K, G D) before norm and rotation
 * @property {Float32Array} q (Q, H D)
 * @property {Float32Array} k (K, G D)
 * @property {Float32Array} v (K, G D)
 * @property {Float32Array} weights (H, Q, K)
 * @property {Float32Array} mixed (Q, H D) weights v, heads side by side
 * @property {Float32Array} out (Q, E)
 */

/** the largest finite float32 */
const FLOAT_MAX = 3.4028234663852886e38;

/**
 * e^(beta z_i) / sum_j e^(beta z_j) of one row, in place: positive weights that sum to 1.
 *
 * beta is the inverse temperature: 0 gives equal weights, +Infinity puts all weight on the largest entry, -Infinity on
 * the smallest; ties are shared. Entries that are 0 in `visible` get weight 0; a row without visible entries is all
 * zeros.
 * @param {Float32Array} z
 * @param {number} start
 * @param {number} length
 * @param {number} beta
 * @param {Uint8Array | null} visible (length)
 */
export function softargmax(z, start, length, beta, visible = null) {
  const sign = beta < 0 ? -1 : 1; // the smallest of z is the largest of -z
  let largest = -Infinity;
  for (let j = 0; j < length; j++) {
    if (visible === null || visible[j]) {
      largest = Math.max(largest, toFinite(sign * z[start + j]));
    }
  }
  const isInfinite = isInfiniteBeta(beta);
  let sum = 0;
  for (let j = 0; j < length; j++) {
    let power = 0;
    if (visible === null || visible[j]) {
      const below = toFinite(sign * z[start + j]) - largest; // at most 0, so that its power cannot overflow
      power = isInfinite ? (below < 0 ? 0 : 1) : Math.exp(sign * beta * below);
    }
    z[start + j] = power;
    sum += power;
  }
  for (let j = 0; sum > 0 && j < length; j++) {
    z[start + j] /= sum;
  }
}

/**
 * Whether beta is infinite in float32: then the weights do not change with small changes of the scores.
 * @param {number} beta
 */
export function isInfiniteBeta(beta) {
  return Math.abs(beta) > FLOAT_MAX;
}

/**
 * Finite numbers replace infinite ones, which would make NaN: 0 * Infinity, Infinity - Infinity.
 * @param {number} z
 */
function toFinite(z) {
  return z > FLOAT_MAX ? FLOAT_MAX : z < -FLOAT_MAX ? -FLOAT_MAX : z;
}

/**
 * Attention from the queries x (Q,E) to source (K,E).
 * @param {AttentionLayer} layer
 * @param {Float32Array} x
 * @param {Float32Array} source x itself for self-attention
 * @param {AttentionControls} controls
 * @param {Workspace} workspace
 * @returns {AttentionState}
 */
export function attend(layer, x, source, controls, workspace) {
  const { name, heads, kvHeads, headDim } = layer;
  const queries = x.length / layer.q.inputs;
  const keys = source.length / layer.k.inputs;
  const width = heads * headDim;
  const kvWidth = kvHeads * headDim;
  /** @param {string} part @param {number} size */
  const buffer = (part, size) => workspace.floats(`${name}.${part}`, size);

  const qRaw = buffer("q", queries * width);
  const kRaw = buffer("k", keys * kvWidth);
  const v = buffer("v", keys * kvWidth);
  applyLinear(qRaw, x, queries, layer.q);
  applyLinear(kRaw, source, keys, layer.k);
  applyLinear(v, source, keys, layer.v);
  const isPlain = layer.qNorm === null && controls.angles === null;
  const q = isPlain ? qRaw : buffer("q.rotated", qRaw.length);
  const k = isPlain ? kRaw : buffer("k.rotated", kRaw.length);
  if (!isPlain) {
    normalizeHeads(q, qRaw, headDim, layer.qNorm);
    normalizeHeads(k, kRaw, headDim, layer.kNorm);
    if (controls.angles !== null) {
      rotateHeads(q, controls.angles, heads, headDim, 1);
      rotateHeads(k, controls.angles, kvHeads, headDim, 1);
    }
  }

  const weights = buffer("weights", heads * queries * keys);
  const vTransposed = buffer("v.transposed", v.length);
  const mixed = buffer("mixed", queries * width);
  transpose(vTransposed, v, keys, kvWidth);
  for (let head = 0; head < heads; head++) {
    const group = Math.floor((head * kvHeads) / heads) * headDim;
    const start = head * queries * keys;
    const rows = matrixView(weights, keys, start);
    const pattern = controls.patterns.get(head);
    if (pattern === undefined) {
      const qHead = matrixView(q, width, head * headDim);
      matmul(rows, qHead, matrixView(k, kvWidth, group), queries, headDim, keys);
      for (let i = 0; i < queries; i++) {
        softargmax(weights, start + i * keys, keys, controls.beta, controls.visible);
      }
    } else {
      const row = pattern === "zero" ? new Float32Array(keys) : uniformRow(keys, controls.visible);
      for (let i = 0; i < queries; i++) {
        weights.set(row, start + i * keys);
      }
    }
    const values = matrixView(vTransposed, keys, group * keys);
    matmul(matrixView(mixed, width, head * headDim), rows, values, queries, keys, headDim);
  }
  let out = mixed;
  if (layer.out !== null) {
    out = buffer("out", queries * layer.out.outputs);
    applyLinear(out, mixed, queries, layer.out);
  }
  return { layer, controls, queries, keys, qRaw, kRaw, q, k, v, weights, mixed, out };
}

/**
 * Equal weights for all keys that may be seen; zeros if there are none.
 * @param {number} keys
 * @param {Uint8Array | null} visible
 */
function uniformRow(keys, visible) {
  const allowed = Float32Array.from({ length: keys }, (_, j) => (visible === null || visible[j] ? 1 : 0));
  const count = Math.max(1, allowed.reduce((a, b) => a + b, 0));
  return allowed.map((one) => one / count);
}

/**
 * @param {Float32Array} out
 * @param {Float32Array} x rows of one head of one token each
 * @param {number} headDim
 * @param {NormLayer | null} norm
 */
function normalizeHeads(out, x, headDim, norm) {
  if (norm === null) {
    out.set(x);
  } else {
    applyNorm(out, x, x.length / headDim, norm);
  }
}

/**
 * Rotates each pair (x_i, x_{i+D/2}) of every head by the angle of its token, in place; direction -1 rotates back.
 * @param {Float32Array} x (L, heads D)
 * @param {Float32Array} angles (L, D/2)
 * @param {number} heads
 * @param {number} headDim
 * @param {1 | -1} direction
 */
export function rotateHeads(x, angles, heads, headDim, direction) {
  const half = headDim / 2;
  for (let i = 0; i < angles.length; i++) {
    const token = Math.floor(i / half);
    const cos = Math.cos(angles[i]);
    const sin = direction * Math.sin(angles[i]);
    for (let head = 0; head < heads; head++) {
      const first = (token * heads + head) * headDim + (i % half);
      const a = x[first];
      const b = x[first + half];
      x[first] = a * cos - b * sin;
      x[first + half] = a * sin + b * cos;
    }
  }
}

/**
 * Copies of all steps of one head.
 * @param {AttentionState} state
 * @param {number} head
 * @returns {HeadSteps}
 */
export function copyHeadSteps(state, head) {
  const { layer, controls, queries, keys } = state;
  const { headDim } = layer;
  const group = Math.floor((head * layer.kvHeads) / layer.heads);
  const q = copyColumns(state.q, queries, head * headDim, headDim);
  const k = copyColumns(state.k, keys, group * headDim, headDim);
  const v = copyColumns(state.v, keys, group * headDim, headDim);
  const out = copyColumns(state.mixed, queries, head * headDim, headDim);
  const scores = new Float32Array(queries * keys);
  matmul(matrixView(scores, keys), matrixView(q, headDim), matrixView(k, headDim), queries, headDim, keys);
  const size = queries * keys;
  const { visible } = controls;
  let projected = null;
  if (layer.out !== null) {
    const { weight, inputs, outputs } = layer.out;
    const data = new Float32Array(queries * outputs);
    const slice = matrixView(weight, inputs, head * headDim);
    matmul(matrixView(data, outputs), matrixView(out, headDim), slice, queries, headDim, outputs);
    projected = { shape: [queries, outputs], data };
  }
  return {
    layer: layer.name,
    head,
    beta: controls.beta,
    q: { shape: [queries, headDim], data: q },
    k: { shape: [keys, headDim], data: k },
    v: { shape: [keys, headDim], data: v },
    scores: { shape: [queries, keys], data: scores },
    mask: visible === null ? null : Uint8Array.from({ length: size }, (_, i) => visible[i % keys]),
    weights: { shape: [queries, keys], data: state.weights.slice(head * size, (head + 1) * size) },
    out: { shape: [queries, headDim], data: out },
    projected,
  };
}

/**
 * @param {Float32Array} x (rows, any)
 * @param {number} rows
 * @param {number} first
 * @param {number} columns
 * @returns {Float32Array} (rows, columns)
 */
function copyColumns(x, rows, first, columns) {
  const stride = x.length / rows;
  const copy = new Float32Array(rows * columns);
  for (let i = 0; i < rows; i++) {
    copy.set(x.subarray(i * stride + first, i * stride + first + columns), i * columns);
  }
  return copy;
}
