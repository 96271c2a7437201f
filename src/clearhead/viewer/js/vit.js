/**
 * The forward pass of the vision transformer (`clearhead.VisionTransformer`), with edits.
 *
 * Letters for shapes: P patches, L tokens, H heads, E width, V classes.
 */

import { attend } from "./attention.js";
import { embedPatches, hidePatches, normalizePixels } from "./embedding.js";
import { addBranch, applyLinear, applyNorm, gelu, sigmoid } from "./tensors.js";

/** @typedef {import("./attention.js").AttentionControls} AttentionControls */
/** @typedef {import("./attention.js").AttentionLayer} AttentionLayer */
/** @typedef {import("./attention.js").AttentionState} AttentionState */
/** @typedef {import("./loading.js").Block} Block */
/** @typedef {import("./loading.js").Mlp} Mlp */
/** @typedef {import("./loading.js").Vision} Vision */
/** @typedef {import("./tensors.js").NormLayer} NormLayer */
/** @typedef {import("./tensors.js").Workspace} Workspace */
/** @typedef {import("./types.js").Edits} Edits */

/**
 * What an MLP has computed: `hidden` before and `active` after its activation, and `gate` where it is gated.
 * @typedef {{mlp: Mlp, x: Float32Array, rows: number, gate: Float32Array | null, hidden: Float32Array,
 *   active: Float32Array, out: Float32Array}} MlpState
 */

/**
 * What a block has computed. Each sublayer reads its `input`; `sum` is x plus what the sublayer adds.
 * @typedef {object} BlockState
 * @property {Block} block
 * @property {Float32Array} x
 * @property {AttentionState} attention
 * @property {Float32Array} sum1
 * @property {Float32Array} middle residual stream after attention
 * @property {MlpState} mlp
 * @property {Float32Array} sum2
 * @property {Float32Array} out
 */

/**
 * A pass. All arrays belong to the workspace: the next pass overwrites them.
 * @typedef {object} VisionPass
 * @property {Float32Array} embedded tokens before the norm of the embeddings (L,E)
 * @property {Float32Array} tokens what enters the first block (L,E)
 * @property {BlockState[]} blocks
 * @property {Float32Array} encoded what leaves the last block, after the final norm (L,E)
 * @property {AttentionState | null} pool
 * @property {Float32Array} pooled (E)
 * @property {MlpState | null} head null if the head is a linear layer
 * @property {Float32Array} logits (V)
 * @property {AttentionState[]} layers all attention in order of execution
 */

/**
 * Throws an Error if edits do not fit the model.
 * @param {Vision} vision
 * @param {Edits} edits
 */
export function checkEdits(vision, edits) {
  const layers = new Map(attentionLayers(vision).map((layer) => [layer.name, layer]));
  for (const { layer, head, pattern } of edits.heads) {
    const found = layers.get(layer);
    if (found === undefined) {
      throw new Error(`the model has no attention layer ${layer}; it has ${[...layers.keys()].join(", ")}`);
    }
    if (!Number.isSafeInteger(head) || head < 0 || head >= found.heads) {
      throw new Error(`${layer} has the heads 0 to ${found.heads - 1}, got ${head}`);
    }
    if (pattern !== "zero" && pattern !== "uniform") {
      throw new Error(`the pattern of a head must be "zero" or "uniform", got ${JSON.stringify(pattern)}`);
    }
  }
  for (const patch of [...edits.hiddenPatches, ...edits.maskedPatches]) {
    if (!Number.isSafeInteger(patch) || patch < 0 || patch >= vision.patches) {
      throw new Error(`the image has the patches 0 to ${vision.patches - 1}, got ${patch}`);
    }
  }
  if (edits.beta !== null && (typeof edits.beta !== "number" || Number.isNaN(edits.beta))) {
    throw new Error(`beta must be a number, or null for the model's own, got ${edits.beta}`);
  }
}

/**
 * All attention layers in order of execution.
 * @param {Vision} vision
 * @returns {AttentionLayer[]}
 */
export function attentionLayers(vision) {
  const layers = vision.blocks.map((block) => block.attn);
  return vision.pool === null ? layers : [...layers, vision.pool];
}

/** @type {WeakMap<Workspace, {vision: Vision, pixels: Uint8Array}>} the image whose tokens are in a workspace */
const EMBEDDED_IMAGES = new WeakMap();

/**
 * The tokens that enter the first block: (L,E), before and after the norm of the embeddings. They are computed again
 * only if the image has changed: edits of heads, masks and beta come later.
 * @param {Vision} vision
 * @param {Uint8Array} pixels (C,height,width)
 * @param {Edits} edits
 * @param {Workspace} workspace
 * @returns {{embedded: Float32Array, tokens: Float32Array}}
 */
export function embedImage(vision, pixels, edits, workspace) {
  const { input, patchSize, prefix, patches, width, positions } = vision;
  if (pixels.length !== input.channels * input.height * input.width) {
    const expected = `${input.channels} x ${input.height} x ${input.width}`;
    throw new Error(`pixels must be ${expected} bytes, got ${pixels.length}`);
  }
  const shown = hidePatches(pixels, input, patchSize, edits.hiddenPatches);
  const embedded = workspace.floats("embedded", (prefix + patches) * width);
  const last = EMBEDDED_IMAGES.get(workspace);
  if (last === undefined || last.vision !== vision || !shown.every((value, i) => value === last.pixels[i])) {
    EMBEDDED_IMAGES.delete(workspace);
    const image = normalizePixels(shown, input, workspace);
    const patchTokens = embedPatches(vision.patchEmbed, image, patchSize, workspace);
    embedded.set(vision.prefixTokens);
    const start = prefix * width;
    for (let i = 0; i < patchTokens.length; i++) {
      embedded[start + i] = patchTokens[i] + (positions === null ? 0 : positions[i]);
    }
    EMBEDDED_IMAGES.set(workspace, { vision, pixels: shown });
  }
  return { embedded, tokens: normOrSame(vision.embedNorm, embedded, "tokens", workspace) };
}

/**
 * A forward pass: pixels (C,height,width) -> logits (V), attention weights of every layer, and all steps between them.
 * @param {Vision} vision
 * @param {Uint8Array} pixels
 * @param {Edits} edits
 * @param {Workspace} workspace
 * @returns {VisionPass}
 */
export function runVision(vision, pixels, edits, workspace) {
  checkEdits(vision, edits);
  const { embedded, tokens } = embedImage(vision, pixels, edits, workspace);
  return runTokens(vision, embedded, tokens, edits, workspace, null);
}

/**
 * The pass from the tokens on. Blocks before the first edit of `earlier` that differs need not be computed again: with
 * `earlier` = {pass, block}, the blocks before number `block` are taken from a pass in the same workspace.
 * @param {Vision} vision
 * @param {Float32Array} embedded
 * @param {Float32Array} tokens
 * @param {Edits} edits
 * @param {Workspace} workspace
 * @param {{pass: VisionPass, block: number} | null} earlier
 * @returns {VisionPass}
 */
export function runTokens(vision, embedded, tokens, edits, workspace, earlier) {
  const { width, prefix, patches } = vision;
  const blocks = earlier === null ? [] : earlier.pass.blocks.slice(0, earlier.block);
  let x = blocks.length ? blocks[blocks.length - 1].out : tokens;
  for (let i = blocks.length; i < vision.blocks.length; i++) {
    const block = vision.blocks[i];
    const controls = controlsOf(block.attn, edits, prefix, patches, vision.angles);
    const state = runBlock(block, `blocks.${i}`, x, controls, workspace);
    blocks.push(state);
    x = state.out;
  }
  const encoded = normOrSame(vision.norm, x, "encoded", workspace);
  let pool = null;
  const pooled = workspace.floats("pooled", width);
  if (vision.pool !== null && vision.query !== null) {
    const controls = controlsOf(vision.pool, edits, 0, patches, null);
    pool = attend(vision.pool, vision.query, encoded.subarray(prefix * width), controls, workspace);
    pooled.set(pool.out);
  } else if (vision.pooling === "cls") {
    pooled.set(encoded.subarray(0, width));
  } else {
    meanOfRows(pooled, encoded.subarray(prefix * width));
  }
  const { head } = vision;
  let headState = null;
  let logits = workspace.floats("logits", vision.classes);
  if ("up" in head) {
    headState = runMlp(head, "head", pooled, 1, workspace);
    logits = headState.out;
  } else {
    applyLinear(logits, pooled, 1, head);
  }
  const layers = blocks.map((state) => state.attention);
  if (pool !== null) {
    layers.push(pool);
  }
  return { embedded, tokens, blocks, encoded, pool, pooled, head: headState, logits, layers };
}

/**
 * @param {AttentionLayer} layer
 * @param {Edits} edits
 * @param {number} prefix tokens before the patches
 * @param {number} patches
 * @param {Float32Array | null} angles
 * @returns {AttentionControls}
 */
function controlsOf(layer, edits, prefix, patches, angles) {
  let visible = null;
  if (edits.maskedPatches.length) {
    visible = new Uint8Array(prefix + patches).fill(1);
    for (const patch of edits.maskedPatches) {
      visible[prefix + patch] = 0;
    }
  }
  const own = edits.heads.filter((edit) => edit.layer === layer.name);
  const patterns = new Map(own.map((edit) => [edit.head, edit.pattern]));
  return { beta: edits.beta ?? layer.beta, visible, patterns, angles };
}

/**
 * pre-norm: x + f(norm(x)); post-norm: norm(x + f(x)); where f is attention, then the MLP
 * @param {Block} block
 * @param {string} name
 * @param {Float32Array} x (L,E)
 * @param {AttentionControls} controls
 * @param {Workspace} workspace
 * @returns {BlockState}
 */
function runBlock(block, name, x, controls, workspace) {
  const width = block.attn.q.inputs;
  const { normFirst, norm1, norm2 } = block;
  /** @param {NormLayer | null} norm @param {Float32Array} values @param {string} part */
  const normalize = (norm, values, part) => normOrSame(norm, values, `${name}.${part}`, workspace);

  const input1 = normFirst ? normalize(norm1, x, "norm1") : x;
  const attention = attend(block.attn, input1, input1, controls, workspace);
  const sum1 = workspace.floats(`${name}.sum1`, x.length);
  addBranch(sum1, x, attention.out, block.scale1);
  const middle = normFirst ? sum1 : normalize(norm1, sum1, "norm1");

  const input2 = normFirst ? normalize(norm2, middle, "norm2") : middle;
  const mlp = runMlp(block.mlp, `${name}.mlp`, input2, x.length / width, workspace);
  const sum2 = workspace.floats(`${name}.sum2`, x.length);
  addBranch(sum2, middle, mlp.out, block.scale2);
  const out = normFirst ? sum2 : normalize(norm2, sum2, "norm2");
  return { block, x, attention, sum1, middle, mlp, sum2, out };
}

/**
 * @param {Mlp} mlp
 * @param {string} name
 * @param {Float32Array} x (rows, inputs)
 * @param {number} rows
 * @param {Workspace} workspace
 * @returns {MlpState}
 */
function runMlp(mlp, name, x, rows, workspace) {
  const size = rows * mlp.up.outputs;
  const hidden = workspace.floats(`${name}.hidden`, size);
  const active = workspace.floats(`${name}.active`, size);
  const out = workspace.floats(`${name}.out`, rows * mlp.down.outputs);
  applyLinear(hidden, x, rows, mlp.up);
  let gate = null;
  if (mlp.gate !== null) {
    gate = workspace.floats(`${name}.gate`, size);
    applyLinear(gate, x, rows, mlp.gate);
    for (let i = 0; i < size; i++) {
      active[i] = gate[i] * sigmoid(gate[i]) * hidden[i];
    }
  } else if (mlp.activation === "relu") {
    for (let i = 0; i < size; i++) {
      active[i] = Math.max(0, hidden[i]);
    }
  } else {
    for (let i = 0; i < size; i++) {
      active[i] = gelu(hidden[i]);
    }
  }
  applyLinear(out, active, rows, mlp.down);
  return { mlp, x, rows, gate, hidden, active, out };
}

/**
 * @param {NormLayer | null} norm
 * @param {Float32Array} x (rows, E)
 * @param {string} name
 * @param {Workspace} workspace
 * @returns {Float32Array} x itself without a norm
 */
function normOrSame(norm, x, name, workspace) {
  if (norm === null) {
    return x;
  }
  const out = workspace.floats(name, x.length);
  applyNorm(out, x, x.length / norm.width, norm);
  return out;
}

/**
 * @param {Float32Array} out (E)
 * @param {Float32Array} x (rows, E)
 */
function meanOfRows(out, x) {
  const width = out.length;
  const rows = x.length / width;
  for (let j = 0; j < width; j++) {
    let sum = 0;
    for (let i = 0; i < rows; i++) {
      sum += x[i * width + j];
    }
    out[j] = sum / rows;
  }
}
