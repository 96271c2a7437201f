/** The laws of attention: softargmax and its limits, masks, permutations, and gradients. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { softargmax } from "../../src/clearhead/viewer/js/attention.js";
import { noEdits } from "../../src/clearhead/viewer/js/engine.js";
import { backward } from "../../src/clearhead/viewer/js/gradients.js";
import { erf, gelu, matmul, matrixView, probabilities, Workspace } from "../../src/clearhead/viewer/js/tensors.js";
import { embedImage, runTokens, runVision } from "../../src/clearhead/viewer/js/vit.js";
import { INPUT, largestDifference, randomNumbers, randomPixels, randomVision } from "./models.mjs";

function weightsOf(z, beta, visible = null) {
  const row = Float32Array.from(z);
  softargmax(row, 0, row.length, beta, visible);
  return [...row];
}

test("weights are positive and sum to 1", () => {
  const random = randomNumbers();
  for (const beta of [-30, -1, 0, 0.2, 1, 50]) {
    const weights = weightsOf(Array.from({ length: 20 }, () => 4 * random() - 2), beta);
    assert.ok(weights.every((weight) => weight >= 0));
    assert.ok(Math.abs(weights.reduce((a, b) => a + b) - 1) < 1e-6);
  }
});

test("the limits of beta", () => {
  const z = [1, 3, 3, -2];
  assert.deepEqual(weightsOf(z, 0), [0.25, 0.25, 0.25, 0.25]);
  assert.deepEqual(weightsOf(z, Infinity), [0, 0.5, 0.5, 0]); // ties are shared
  assert.deepEqual(weightsOf(z, -Infinity), [0, 0, 0, 1]);
  assert.deepEqual(weightsOf(z, 1e300), weightsOf(z, Infinity));
  assert.deepEqual(weightsOf(z, -1), weightsOf(z.map((x) => -x), 1));
  assert.ok(largestDifference(weightsOf(z, 1e6), weightsOf(z, Infinity)) < 1e-6);
});

test("infinite scores give finite weights", () => {
  assert.deepEqual(weightsOf([Infinity, 0, Infinity], 1), [0.5, 0, 0.5]);
  assert.deepEqual(weightsOf([-Infinity, 0], 1), [0, 1]);
  assert.deepEqual(weightsOf([-Infinity, Infinity, 0], 0), [1 / 3, 1 / 3, 1 / 3].map(Math.fround));
});

test("a masked key gets no weight, and a row without visible keys is zero", () => {
  assert.deepEqual(weightsOf([9, 1, 1], 1, Uint8Array.of(0, 1, 1)), [0, 0.5, 0.5]);
  for (const beta of [1, 0, Infinity, -Infinity]) {
    assert.deepEqual(weightsOf([9, 1, NaN], beta, Uint8Array.of(0, 0, 0)), [0, 0, 0]);
  }
});

test("a product is the same for all block sizes", () => {
  const random = randomNumbers();
  for (const [rows, inner, columns] of [[1, 1, 1], [4, 3, 4], [5, 7, 6], [9, 2, 3], [3, 5, 11]]) {
    const a = Float32Array.from({ length: rows * inner }, random);
    const b = Float32Array.from({ length: columns * inner }, random);
    const bias = Float32Array.from({ length: columns }, random);
    const out = new Float32Array(rows * columns);
    matmul(matrixView(out, columns), matrixView(a, inner), matrixView(b, inner), rows, inner, columns, bias);
    for (let i = 0; i < rows; i++) {
      for (let j = 0; j < columns; j++) {
        let sum = 0;
        for (let p = 0; p < inner; p++) {
          sum += a[i * inner + p] * b[j * inner + p];
        }
        assert.equal(out[i * columns + j], Math.fround(sum + bias[j]));
      }
    }
  }
});

test("equal rows give exactly equal results, wherever they stand", () => {
  const random = randomNumbers();
  const row = Float32Array.from({ length: 13 }, random);
  const same = new Float32Array(9 * 13);
  for (let i = 0; i < 9; i++) {
    same.set(row, 13 * i);
  }
  const out = new Float32Array(81);
  matmul(matrixView(out, 9), matrixView(same, 13), matrixView(same, 13), 9, 13, 9);
  assert.ok(out.every((value) => value === out[0]));
});

test("the error function and gelu", () => {
  const known = [[0, 0], [0.1, 0.112462916018285], [0.5, 0.520499877813047], [1, 0.842700792949715]];
  known.push([2, 0.995322265018953], [3.3, 0.999996942290203], [7, 1], [Infinity, 1]);
  for (const [x, value] of known) {
    assert.ok(Math.abs(erf(x) - value) < 1e-12, `erf(${x})`);
    assert.ok(Math.abs(erf(-x) + value) < 1e-12, `erf(${-x})`);
  }
  assert.ok(Number.isNaN(erf(NaN)));
  assert.ok(Math.abs(gelu(1) - 0.841344746068543) < 1e-12);
  assert.ok(Math.abs(gelu(-3) + 0.00404969409489031) < 1e-12);
});

test("probabilities of large logits", () => {
  assert.deepEqual([...probabilities(Float32Array.of(1e4, 1e4, -1e4))], [0.5, 0.5, 0]);
});

/** Patches of an image of 2 x 3 patches of 3 x 3 pixels, in another order. */
function shufflePatches(pixels, order) {
  const shuffled = new Uint8Array(pixels.length);
  const at = (patch, i) => (3 * Math.floor(patch / 3) + Math.floor(i / 3)) * INPUT.width + 3 * (patch % 3) + (i % 3);
  order.forEach((from, to) => {
    for (let i = 0; i < 9; i++) {
      shuffled[at(to, i)] = pixels[at(from, i)];
    }
  });
  return shuffled;
}

test("without positions, shuffling the patches shuffles the attention and leaves the output unchanged", () => {
  const order = [4, 2, 0, 5, 3, 1];
  for (const pooling of ["cls", "mean", "attention"]) {
    const pixels = randomPixels();
    const shuffled = shufflePatches(pixels, order);
    const vision = randomVision({ pos_embed: "none", pooling });
    const before = runVision(vision, pixels, noEdits, new Workspace());
    const after = runVision(vision, shuffled, noEdits, new Workspace());
    assert.ok(largestDifference(before.logits, after.logits) < 1e-5);
    const { keys, weights } = before.layers[1];
    const place = (i) => (i < vision.prefix ? i : vision.prefix + order[i - vision.prefix]);
    for (let i = 0; i < keys; i++) {
      for (let j = 0; j < keys; j++) {
        assert.ok(Math.abs(after.layers[1].weights[i * keys + j] - weights[place(i) * keys + place(j)]) < 1e-6);
      }
    }
    const positioned = randomVision({ pooling });
    const one = runVision(positioned, pixels, noEdits, new Workspace());
    const other = runVision(positioned, shuffled, noEdits, new Workspace());
    assert.ok(largestDifference(one.logits, other.logits) > 1e-3, "positions must matter");
  }
});

test("rows of every layer sum to 1, or to 0 where all keys are masked", () => {
  const vision = randomVision({ num_kv_heads: 1, qk_norm: true });
  for (const maskedPatches of [[], [1, 4], [0, 1, 2, 3, 4, 5]]) {
    const { layers } = runVision(vision, randomPixels(), { ...noEdits, maskedPatches }, new Workspace());
    for (const { keys, weights } of layers) {
      for (let start = 0; start < weights.length; start += keys) {
        const row = weights.subarray(start, start + keys);
        assert.ok(Math.abs(row.reduce((a, b) => a + b) - (maskedPatches.length < 6 ? 1 : 0)) < 1e-6);
        assert.ok(maskedPatches.every((patch) => row[patch] === 0));
      }
    }
  }
});

test("buffers of a workspace are reused, and passes do not influence each other", () => {
  const vision = randomVision();
  const workspace = new Workspace();
  const first = runVision(vision, randomPixels(1), noEdits, workspace);
  const logits = first.logits.slice();
  const { size } = workspace.buffers;
  const other = runVision(vision, randomPixels(2), { ...noEdits, hiddenPatches: [0], beta: 3 }, workspace);
  assert.equal(workspace.buffers.size, size);
  assert.equal(other.logits, first.logits);
  assert.notDeepEqual(other.logits, logits);
  assert.deepEqual(runVision(vision, randomPixels(1), noEdits, workspace).logits, logits);
});

const GRADIENT_CONFIGS = [
  {},
  { norm: "post", pooling: "cls", activation: "relu", num_register_tokens: 1 },
  { norm: "none", pooling: "mean", activation: "swiglu", head_mlp_dim: 5, layer_scale: 0.1 },
  { norm_layer: "rmsnorm", qk_norm: true, num_kv_heads: 1, embed_norm: true, head_mlp_dim: 5 },
  { pos_embed: "rotary", bias: false, output_projection: false, beta: -0.7, qk_norm: true },
];

test("gradients equal finite differences", () => {
  const step = 1e-2;
  for (const changes of GRADIENT_CONFIGS) {
    const vision = randomVision(changes);
    const edits = { ...noEdits, maskedPatches: [2], heads: [{ layer: "blocks.1.attn", head: 0, pattern: "uniform" }] };
    const workspace = new Workspace();
    const pass = runVision(vision, randomPixels(), edits, workspace);
    const { embedded: gradient } = backward(vision, pass, 2);
    const { embedded } = embedImage(vision, randomPixels(), edits, new Workspace());
    const { embedNorm } = vision;
    for (let i = 0; i < embedded.length; i += 3) {
      const logit = (/** @type {number} */ change) => {
        const moved = embedded.slice();
        moved[i] += change;
        const tokens = embedNorm === null ? moved : normalized(moved, embedNorm);
        return runTokens(vision, moved, tokens, edits, new Workspace(), null).logits[2];
      };
      const expected = (logit(step) - logit(-step)) / (2 * step);
      assert.ok(Math.abs(gradient[i] - expected) < 3e-3 * Math.max(1, Math.abs(expected)), `${JSON.stringify(changes)} ${i}`);
    }
    assert.ok(gradient.some((value) => Math.abs(value) > 0.02), "the gradient must not vanish");
  }
});

/** Layer norm and RMS norm by their formulas. */
function normalized(x, { kind, weight, bias, eps, width }) {
  return x.map((value, i) => {
    const row = x.subarray(i - (i % width), i - (i % width) + width);
    const mean = kind === "layernorm" ? row.reduce((a, b) => a + b) / width : 0;
    const variance = row.reduce((sum, one) => sum + (one - mean) ** 2, 0) / width;
    return ((value - mean) / Math.sqrt(variance + eps)) * weight[i % width] + (bias === null ? 0 : bias[i % width]);
  });
}

test("no gradient passes through an infinite beta", () => {
  const vision = randomVision({ norm: "none" });
  const pass = runVision(vision, randomPixels(), { ...noEdits, beta: Infinity }, new Workspace());
  const { embedded, contributions } = backward(vision, pass, 0);
  assert.ok([...embedded, ...contributions.flatMap(({ data }) => [...data])].every(Number.isFinite));
});
