/**
 * Which patches does the output depend on? Mean attention, rollout, relevance and occlusion, and numbers for each head.
 *
 * These are the definitions of `clearhead.insight`: mean and rollout use the weights alone, relevance weights them by
 * gradients, and occlusion hides patches and measures the output.
 * Letters for shapes: H heads, Q queries, K keys, L tokens, P patches.
 */

import { backward } from "./gradients.js";
import { probabilities } from "./tensors.js";
import { attentionLayers, runTokens, runVision } from "./vit.js";

/** @typedef {import("./loading.js").Vision} Vision */
/** @typedef {import("./tensors.js").Workspace} Workspace */
/** @typedef {import("./types.js").Edits} Edits */
/** @typedef {import("./types.js").HeadEdit} HeadEdit */
/** @typedef {import("./types.js").LayerWeights} LayerWeights */

/** @typedef {{queries: number, keys: number, data: Float32Array}} Matrix (Q,K) */

/**
 * Where the output is read: from the class token, which is the first token, or from all patches, whose number is P.
 * @typedef {{hasClassToken: boolean, patches: number}} Readout
 */

/**
 * @param {Vision} vision
 * @returns {Readout}
 */
export function readoutOf(vision) {
  return { hasClassToken: vision.pooling === "cls", patches: vision.patches };
}

/**
 * Mean attention from the output to each patch (P): over the heads of the pooling layer, or over all layers and heads.
 * @param {LayerWeights[]} layers
 * @param {Readout} readout
 * @returns {Float32Array}
 */
export function meanAttention(layers, readout) {
  const last = lastOf(layers);
  const chosen = last.queries === last.keys ? layers : [last]; // only a pooling layer's query leads to the output
  const data = new Float32Array(last.queries * last.keys);
  for (const layer of chosen) {
    if (layer.queries !== last.queries || layer.keys !== last.keys) {
      const shapes = chosen.map(({ queries, keys }) => `${queries} x ${keys}`).join(", ");
      throw new Error(`a mean needs layers of one shape, got ${shapes}`);
    }
    meanOfHeads(layer).data.forEach((weight, i) => {
      data[i] += weight / chosen.length;
    });
  }
  return readPatches({ queries: last.queries, keys: last.keys, data }, readout);
}

/**
 * Attention rollout (Abnar & Zuidema 2020) from the output to each patch (P): the product of (A + I) / 2 over the
 * layers, with A the mean over a layer's heads. A row without any weight is left unchanged.
 * @param {LayerWeights[]} layers
 * @param {Readout} readout
 * @returns {Float32Array}
 */
export function rolloutAttention(layers, readout) {
  return readPatches(propagate(layers.map(meanOfHeads), true), readout);
}

/**
 * Relevance (Chefer et al. 2021) of each patch (P) for the logit of a class: the product of I + C over the layers, with
 * C the mean over heads of the positive part of A * dA.
 * @param {Vision} vision
 * @param {Uint8Array} pixels
 * @param {Edits} edits
 * @param {number} target
 * @param {Workspace} workspace
 * @returns {Float32Array}
 */
export function relevanceOf(vision, pixels, edits, target, workspace) {
  checkTarget(vision, target);
  const { contributions } = backward(vision, runVision(vision, pixels, edits, workspace), target);
  return readPatches(propagate(contributions, false), readoutOf(vision));
}

/**
 * How much the probability of a class drops when each patch is hidden (P). It yields after each pass.
 * @param {Vision} vision
 * @param {Uint8Array} pixels
 * @param {Edits} edits
 * @param {number} target
 * @param {Workspace} workspace
 * @returns {Generator<undefined, Float32Array>}
 */
export function* occlusionSteps(vision, pixels, edits, target, workspace) {
  checkTarget(vision, target);
  /** @param {number[]} hiddenPatches */
  const probability = (hiddenPatches) => {
    return probabilities(runVision(vision, pixels, { ...edits, hiddenPatches }, workspace).logits)[target];
  };
  const before = probability(edits.hiddenPatches);
  const drops = new Float32Array(vision.patches);
  for (let patch = 0; patch < vision.patches; patch++) {
    yield;
    drops[patch] = before - probability([...edits.hiddenPatches, patch]);
  }
  return drops;
}

/**
 * How the probability of a class changes when each head is set to zero, layer after layer. It yields after each pass.
 *
 * The last layer comes first: the blocks before an edited layer keep their results.
 * @param {Vision} vision
 * @param {Uint8Array} pixels
 * @param {Edits} edits
 * @param {number} target
 * @param {Workspace} workspace
 * @returns {Generator<undefined, Float32Array>}
 */
export function* headEffectSteps(vision, pixels, edits, target, workspace) {
  checkTarget(vision, target);
  const pass = runVision(vision, pixels, edits, workspace);
  const { embedded, tokens } = pass;
  const before = probabilities(pass.logits)[target];
  const layers = attentionLayers(vision);
  const effects = layers.map((layer) => new Float32Array(layer.heads));
  for (let block = layers.length - 1; block >= 0; block--) {
    const { name, heads } = layers[block];
    for (let head = 0; head < heads; head++) {
      yield;
      /** @type {HeadEdit[]} */
      const edited = [...edits.heads, { layer: name, head, pattern: "zero" }]; // the last edit of a head counts
      const changed = runTokens(vision, embedded, tokens, { ...edits, heads: edited }, workspace, { pass, block });
      effects[block][head] = probabilities(changed.logits)[target] - before;
    }
  }
  return Float32Array.from(effects.flatMap((changes) => [...changes]));
}

/**
 * @param {Vision} vision
 * @param {number} target
 */
function checkTarget(vision, target) {
  if (!Number.isSafeInteger(target) || target < 0 || target >= vision.classes) {
    throw new Error(`the model has the classes 0 to ${vision.classes - 1}, got ${target}`);
  }
}

/**
 * @param {LayerWeights} layer
 * @returns {Matrix}
 */
function meanOfHeads({ heads, queries, keys, weights }) {
  const size = queries * keys;
  const data = Float32Array.from({ length: size }, (_, i) => {
    let sum = 0;
    for (let head = 0; head < heads; head++) {
      sum += weights[head * size + i];
    }
    return sum / heads;
  });
  return { queries, keys, data };
}

/**
 * From the identity at the input through all layers: R + A R, or (R + A R) / (1 + the sum of A's row) if `isMean`. A
 * pooling query at the end is not a token and has no residual connection; it sees the last tokens, without registers.
 * @param {Matrix[]} layers
 * @param {boolean} isMean
 * @returns {Matrix}
 */
function propagate(layers, isMean) {
  const length = layers[0].keys;
  /** @type {Matrix} */
  let result = { queries: length, keys: length, data: new Float32Array(length * length) };
  for (let i = 0; i < length; i++) {
    result.data[i * length + i] = 1;
  }
  layers.forEach((layer, index) => {
    const isPooling = layer.queries !== layer.keys;
    const isLast = index === layers.length - 1;
    if (isPooling ? !isLast || layer.keys > length : layer.keys !== length) {
      const shapes = layers.map(({ queries, keys }) => `${queries} x ${keys}`).join(", ");
      throw new Error(`all layers but a pooling layer at the end must have as many queries as keys, got ${shapes}`);
    }
    result = isPooling ? multiplyRows(layer, result) : updateRows(layer, result, isMean);
  });
  return result;
}

/**
 * A R, where the keys of A are the last rows of R.
 * @param {Matrix} a
 * @param {Matrix} r
 * @returns {Matrix}
 */
function multiplyRows(a, r) {
  const first = r.queries - a.keys;
  const sums = new Float64Array(r.keys);
  const data = new Float32Array(a.queries * r.keys);
  for (let i = 0; i < a.queries; i++) {
    sums.fill(0);
    for (let k = 0; k < a.keys; k++) {
      const weight = a.data[i * a.keys + k];
      const row = (first + k) * r.keys;
      for (let j = 0; j < r.keys; j++) {
        sums[j] += weight * r.data[row + j];
      }
    }
    data.set(sums, i * r.keys);
  }
  return { queries: a.queries, keys: r.keys, data };
}

/**
 * @param {Matrix} a
 * @param {Matrix} r
 * @param {boolean} isMean
 * @returns {Matrix}
 */
function updateRows(a, r, isMean) {
  const product = multiplyRows(a, r);
  for (let i = 0; i < a.queries; i++) {
    const sum = a.data.subarray(i * a.keys, (i + 1) * a.keys).reduce((total, weight) => total + weight, 0);
    for (let j = i * r.keys; j < (i + 1) * r.keys; j++) {
      product.data[j] = (r.data[j] + product.data[j]) / (isMean ? 1 + sum : 1);
    }
  }
  return product;
}

/**
 * The row of the class token or the pooling query, or the mean row of the patches: (P)
 * @param {Matrix} matrix
 * @param {Readout} readout
 * @returns {Float32Array}
 */
function readPatches({ queries, keys, data }, { hasClassToken, patches }) {
  const first = keys - patches;
  if (first < 0) {
    throw new Error(`attention to ${keys} tokens cannot be shown on ${patches} patches`);
  }
  if (hasClassToken) {
    return data.slice(first, keys);
  }
  const firstRow = queries === keys ? first : 0;
  return Float32Array.from({ length: patches }, (_, j) => {
    let sum = 0;
    for (let i = firstRow; i < queries; i++) {
      sum += data[i * keys + first + j];
    }
    return sum / (queries - firstRow);
  });
}

/**
 * @param {LayerWeights[]} layers
 * @returns {LayerWeights}
 */
function lastOf(layers) {
  if (layers.length === 0) {
    throw new Error("at least one attention layer is needed, got none");
  }
  return layers[layers.length - 1];
}
