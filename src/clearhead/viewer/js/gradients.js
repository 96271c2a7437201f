/**
 * The backward pass of the vision transformer: the gradient of one logit with respect to every attention weight.
 *
 * Parameters get no gradients. Each function takes the gradient of its output and returns that of its input; the
 * forward pass has left all values in its workspace.
 * Letters for shapes: H heads, G heads of keys and values, Q queries, K keys, L tokens, D head width, E width.
 */

import { isInfiniteBeta, rotateHeads } from "./attention.js";
import { erf, matmul, matrixView, rowMoments, sigmoid, transpose } from "./tensors.js";

/** @typedef {import("./attention.js").AttentionState} AttentionState */
/** @typedef {import("./loading.js").Vision} Vision */
/** @typedef {import("./tensors.js").LinearLayer} LinearLayer */
/** @typedef {import("./tensors.js").NormLayer} NormLayer */
/** @typedef {import("./vit.js").BlockState} BlockState */
/** @typedef {import("./vit.js").MlpState} MlpState */
/** @typedef {import("./vit.js").VisionPass} VisionPass */

/** @typedef {{queries: number, keys: number, data: Float32Array}} Contribution mean of relu(A * dA) over heads (Q,K) */

/**
 * The backward pass from the logit of a class. The pass must be the last one in its workspace.
 * @param {Vision} vision
 * @param {VisionPass} pass
 * @param {number} target
 * @returns {{contributions: Contribution[], embedded: Float32Array}} of the layers in order of execution, and the
 *   gradient of the embedded tokens (L,E)
 */
export function backward(vision, pass, target) {
  const dLogits = new Float32Array(vision.classes);
  dLogits[target] = 1;
  const dPooled =
    pass.head === null
      ? linearGradient(/** @type {LinearLayer} */ (vision.head), dLogits)
      : mlpGradient(pass.head, dLogits);
  /** @type {Contribution[]} */
  const contributions = [];
  let dx = normGradient(vision.norm, lastOutput(pass), poolGradient(vision, pass, dPooled, contributions));
  for (const state of [...pass.blocks].reverse()) {
    dx = blockGradient(state, dx, contributions);
  }
  return { contributions: contributions.reverse(), embedded: normGradient(vision.embedNorm, pass.embedded, dx) };
}

/**
 * What leaves the last block, before the final norm.
 * @param {VisionPass} pass
 */
function lastOutput(pass) {
  return pass.blocks[pass.blocks.length - 1].out;
}

/**
 * The gradient of the encoded tokens (L,E).
 * @param {Vision} vision
 * @param {VisionPass} pass
 * @param {Float32Array} dPooled (E)
 * @param {Contribution[]} contributions gets that of the pooling layer
 */
function poolGradient(vision, pass, dPooled, contributions) {
  const { width, prefix, patches } = vision;
  const dEncoded = new Float32Array(pass.encoded.length);
  if (pass.pool !== null) {
    const { dSource, contribution } = attentionGradient(pass.pool, dPooled);
    contributions.push(contribution);
    dEncoded.set(dSource, prefix * width);
  } else if (vision.pooling === "cls") {
    dEncoded.set(dPooled);
  } else {
    const share = dPooled.map((value) => value / patches);
    for (let i = 0; i < patches; i++) {
      dEncoded.set(share, (prefix + i) * width);
    }
  }
  return dEncoded;
}

/**
 * @param {BlockState} state
 * @param {Float32Array} dOut (L,E)
 * @param {Contribution[]} contributions gets that of the block
 */
function blockGradient(state, dOut, contributions) {
  const { block, x, attention, sum1, middle, mlp, sum2 } = state;
  const { normFirst, norm1, norm2 } = block;
  const dSum2 = normFirst ? dOut : normGradient(norm2, sum2, dOut);
  const dMlpIn = mlpGradient(mlp, scaleGradient(dSum2, block.scale2));
  const dMiddle = sumOf(dSum2, normFirst ? normGradient(norm2, middle, dMlpIn) : dMlpIn);
  const dSum1 = normFirst ? dMiddle : normGradient(norm1, sum1, dMiddle);
  const { dX, dSource, contribution } = attentionGradient(attention, scaleGradient(dSum1, block.scale1));
  contributions.push(contribution);
  const dAttentionIn = sumOf(dX, dSource);
  return sumOf(dSum1, normFirst ? normGradient(norm1, x, dAttentionIn) : dAttentionIn);
}

/**
 * @param {AttentionState} state
 * @param {Float32Array} dOut (Q,E)
 * @returns {{dX: Float32Array, dSource: Float32Array, contribution: Contribution}} gradients of the inputs of
 *   queries (Q,E), and of keys and values (K,E)
 */
function attentionGradient(state, dOut) {
  const { layer, controls, queries, keys, q, k, v, weights } = state;
  const { heads, kvHeads, headDim } = layer;
  const width = heads * headDim;
  const kvWidth = kvHeads * headDim;
  const size = queries * keys;
  const dMixed = layer.out === null ? dOut : linearGradient(layer.out, dOut);
  const dq = new Float32Array(queries * width);
  const dk = new Float32Array(keys * kvWidth);
  const dv = new Float32Array(keys * kvWidth);
  const contribution = { queries, keys, data: new Float32Array(size) };
  const dWeights = new Float32Array(size);
  for (let head = 0; head < heads; head++) {
    const own = weights.subarray(head * size, (head + 1) * size);
    const group = Math.floor((head * kvHeads) / heads) * headDim;
    const dHead = matrixView(dMixed, width, head * headDim);
    matmul(matrixView(dWeights, keys), dHead, matrixView(v, kvWidth, group), queries, headDim, keys);
    for (let i = 0; i < size; i++) {
      contribution.data[i] += Math.max(0, own[i] * dWeights[i]) / heads;
    }
    addOuter(dv, kvWidth, group, own, keys, dMixed, width, head * headDim, queries, headDim);
    if (controls.patterns.has(head) || isInfiniteBeta(controls.beta)) {
      continue; // the weights do not depend on queries and keys
    }
    const dScores = softargmaxGradient(own, dWeights, queries, keys, controls.beta);
    addOuter(dk, kvWidth, group, dScores, keys, q, width, head * headDim, queries, headDim);
    const transposed = new Float32Array(size);
    transpose(transposed, dScores, queries, keys);
    addOuter(dq, width, head * headDim, transposed, queries, k, kvWidth, group, keys, headDim);
  }
  if (controls.angles !== null) {
    rotateHeads(dq, controls.angles, heads, headDim, -1);
    rotateHeads(dk, controls.angles, kvHeads, headDim, -1);
  }
  const dX = linearGradient(layer.q, normGradient(layer.qNorm, state.qRaw, dq));
  const dKeys = linearGradient(layer.k, normGradient(layer.kNorm, state.kRaw, dk));
  return { dX, dSource: sumOf(dKeys, linearGradient(layer.v, dv)), contribution };
}

/**
 * out_j += sum over rows i of a_ij b_i, for the columns j of a: out (columns, D), a (rows, columns), b (rows, D). `out`
 * and b are heads of wider matrices, given by their stride and first column.
 * @param {Float32Array} out
 * @param {number} outStride
 * @param {number} outStart
 * @param {Float32Array} a
 * @param {number} columns
 * @param {Float32Array} b
 * @param {number} bStride
 * @param {number} bStart
 * @param {number} rows
 * @param {number} headDim
 */
function addOuter(out, outStride, outStart, a, columns, b, bStride, bStart, rows, headDim) {
  for (let i = 0; i < rows; i++) {
    const from = bStart + i * bStride;
    for (let j = 0; j < columns; j++) {
      const factor = a[i * columns + j];
      const to = outStart + j * outStride;
      for (let d = 0; d < headDim; d++) {
        out[to + d] += factor * b[from + d];
      }
    }
  }
}

/**
 * beta A (dA - sum of A dA over the row)
 * @param {Float32Array} weights (Q,K)
 * @param {Float32Array} dWeights (Q,K)
 * @param {number} queries
 * @param {number} keys
 * @param {number} beta
 */
function softargmaxGradient(weights, dWeights, queries, keys, beta) {
  const dScores = new Float32Array(queries * keys);
  for (let i = 0; i < queries; i++) {
    let mean = 0;
    for (let j = i * keys; j < (i + 1) * keys; j++) {
      mean += weights[j] * dWeights[j];
    }
    for (let j = i * keys; j < (i + 1) * keys; j++) {
      dScores[j] = beta * weights[j] * (dWeights[j] - mean);
    }
  }
  return dScores;
}

/**
 * @param {MlpState} state
 * @param {Float32Array} dOut
 */
function mlpGradient(state, dOut) {
  const { mlp, gate, hidden } = state;
  const dActive = linearGradient(mlp.down, dOut);
  if (mlp.gate !== null && gate !== null) {
    const dGate = dActive.map((d, i) => {
      const s = sigmoid(gate[i]);
      return d * hidden[i] * s * (1 + gate[i] * (1 - s));
    });
    const dUp = dActive.map((d, i) => d * gate[i] * sigmoid(gate[i]));
    return sumOf(linearGradient(mlp.up, dUp), linearGradient(mlp.gate, dGate));
  }
  const slope = mlp.activation === "relu" ? reluSlope : geluSlope;
  return linearGradient(mlp.up, dActive.map((d, i) => d * slope(hidden[i])));
}

/** @param {number} x */
function reluSlope(x) {
  return x > 0 ? 1 : 0;
}

/** Φ(x) + x φ(x), with distribution function and density of the normal distribution @param {number} x */
function geluSlope(x) {
  return 0.5 * (1 + erf(x * Math.SQRT1_2)) + (x * Math.exp(-0.5 * x * x)) / Math.sqrt(2 * Math.PI);
}

/** @type {WeakMap<Float32Array, Float32Array>} weights, transposed when a gradient first needs them */
const TRANSPOSED_WEIGHTS = new WeakMap();

/**
 * dOut W: (rows, outputs) -> (rows, inputs)
 * @param {LinearLayer} layer
 * @param {Float32Array} dOut
 */
function linearGradient({ weight, inputs, outputs }, dOut) {
  let transposed = TRANSPOSED_WEIGHTS.get(weight);
  if (transposed === undefined) {
    transposed = new Float32Array(weight.length);
    transpose(transposed, weight, outputs, inputs);
    TRANSPOSED_WEIGHTS.set(weight, transposed);
  }
  const rows = dOut.length / outputs;
  const dX = new Float32Array(rows * inputs);
  matmul(matrixView(dX, inputs), matrixView(dOut, outputs), matrixView(transposed, outputs), rows, outputs, inputs);
  return dX;
}

/**
 * @param {NormLayer | null} norm
 * @param {Float32Array} x what entered the norm (rows, width)
 * @param {Float32Array} dOut
 */
function normGradient(norm, x, dOut) {
  if (norm === null) {
    return dOut;
  }
  const { width, weight } = norm;
  const dX = new Float32Array(x.length);
  for (let start = 0; start < x.length; start += width) {
    const [mean, scale] = rowMoments(x, start, norm);
    let sum = 0;
    let product = 0;
    for (let j = 0; j < width; j++) {
      const d = dOut[start + j] * weight[j];
      sum += d;
      product += d * (x[start + j] - mean) * scale;
    }
    const shift = norm.kind === "layernorm" ? sum / width : 0;
    for (let j = 0; j < width; j++) {
      const normalized = (x[start + j] - mean) * scale;
      dX[start + j] = scale * (dOut[start + j] * weight[j] - shift - (normalized * product) / width);
    }
  }
  return dX;
}

/**
 * @param {Float32Array} d
 * @param {Float32Array | null} gamma layer scale
 */
function scaleGradient(d, gamma) {
  return gamma === null ? d : d.map((value, i) => value * gamma[i % gamma.length]);
}

/**
 * @param {Float32Array} a
 * @param {Float32Array} b
 */
function sumOf(a, b) {
  return a.map((value, i) => value + b[i]);
}
