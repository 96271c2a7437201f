/** The arithmetic of a head's cells adds up, and exported figures are well formed. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { explainCell } from "../../src/clearhead/viewer/js/arithmetic.js";
import { figureToSvg } from "../../src/clearhead/viewer/js/exporting.js";
import { filterExamples } from "../../src/clearhead/viewer/js/examples.js";

const random = (() => {
  let seed = 7;
  return () => ((seed = (seed * 48271) % 2147483647) / 2147483647) * 4 - 2;
})();
const tensor = (rows, columns) => ({
  shape: [rows, columns],
  data: Float32Array.from({ length: rows * columns }, random),
});
const multiply = (a, b) => {
  const [rows, inner, columns] = [a.shape[0], a.shape[1], b.shape[1]];
  const data = Float32Array.from({ length: rows * columns }, (_, i) => {
    const [row, column] = [Math.floor(i / columns), i % columns];
    let sum = 0;
    for (let k = 0; k < inner; k++) sum += a.data[row * inner + k] * b.data[k * columns + column];
    return sum;
  });
  return { shape: [rows, columns], data };
};
const transpose = ({ shape: [rows, columns], data }) => ({
  shape: [columns, rows],
  data: Float32Array.from({ length: rows * columns }, (_, i) => data[(i % rows) * columns + Math.floor(i / rows)]),
});

function makeSteps(beta, mask = null) {
  const [q, k, v] = [tensor(3, 9), tensor(12, 9), tensor(12, 9)];
  const scores = multiply(q, transpose(k));
  const weights = { shape: [3, 12], data: new Float32Array(36) };
  for (let row = 0; row < 3; row++) {
    const visible = [...Array(12).keys()].filter((key) => !mask || mask[row * 12 + key]);
    const max = Math.max(...visible.map((key) => scores.data[row * 12 + key]));
    const power = (key) =>
      beta === Infinity
        ? Number(scores.data[row * 12 + key] === max)
        : Math.exp(beta * (scores.data[row * 12 + key] - max));
    const sum = visible.reduce((total, key) => total + power(key), 0);
    for (const key of visible) weights.data[row * 12 + key] = power(key) / sum;
  }
  const out = multiply(weights, v);
  const projection = tensor(5, 18);
  const own = {
    shape: [5, 9],
    data: Float32Array.from({ length: 45 }, (_, i) => projection.data[Math.floor(i / 9) * 18 + 9 + (i % 9)]),
  };
  const projected = multiply(out, transpose(own));
  return { steps: { layer: "x", head: 1, beta, q, k, v, scores, mask, weights, out, projected }, projection };
}

const close = (a, b) => assert.ok(Math.abs(a - b) < 1e-4, `${a} is not ${b}`);

test("the terms of every cell add up to its number", () => {
  const { steps, projection } = makeSteps(0.33);
  for (const matrix of ["scores", "scaled", "out", "projected"]) {
    const found = explainCell(steps, matrix, 2, 3, projection);
    close(found.sum, found.value);
    close(found.terms.reduce((sum, { value }) => sum + value, 0) + found.others, found.sum);
    for (const { factors, value } of found.terms)
      close(
        factors.reduce((a, b) => a * b),
        value,
      );
    const sizes = found.terms.map(({ value }) => Math.abs(value));
    assert.deepEqual(
      sizes,
      [...sizes].sort((a, b) => b - a),
    );
  }
});

test("a weight is its exponential divided by the sum", () => {
  for (const beta of [0.33, 0, Infinity]) {
    const { steps } = makeSteps(beta);
    for (let key = 0; key < 12; key++) {
      const found = explainCell(steps, "weights", 1, key);
      close(found.numerator / found.sum, found.value);
      assert.equal(found.isReplaced, false);
    }
  }
});

test("masked keys have no term, and edited weights are recognized", () => {
  const mask = Uint8Array.from({ length: 36 }, (_, i) => Number(i % 12 !== 4));
  const { steps } = makeSteps(0.33, mask);
  const found = explainCell(steps, "weights", 0, 4);
  assert.equal(found.numerator, 0);
  assert.equal(found.isReplaced, false);
  assert.equal(explainCell(steps, "mask", 0, 4).value, 0);
  const uniform = { ...steps, weights: { shape: [3, 12], data: new Float32Array(36).fill(1 / 12) } };
  assert.equal(explainCell(uniform, "weights", 0, 1).isReplaced, true);
});

test("cells that do not exist have no arithmetic", () => {
  const { steps } = makeSteps(0.33);
  assert.equal(explainCell(steps, "scores", 3, 0), null);
  assert.equal(explainCell(steps, "projected", 0, 0, null), null);
  assert.equal(explainCell(steps, "mask", 0, 0), null);
});

test("text in figures is escaped, and cells of one color are one path", () => {
  const rgba = new Uint8ClampedArray([1, 2, 3, 255, 1, 2, 3, 255, 9, 9, 9, 128, 0, 0, 0, 0]);
  const svg = figureToSvg({
    width: 10,
    height: 10,
    background: "#fff",
    shapes: [
      { kind: "text", x: 1, y: 2, text: `<script>"a" & 'b'`, fill: "#000" },
      { kind: "cells", x: 0, y: 0, width: 4, height: 4, rows: 2, columns: 2, rgba },
      { kind: "line", points: [0, 0, 1, 1], stroke: "#000", width: 2 },
      { kind: "rect", x: 0, y: 0, width: 1, height: 1, fill: "#000" },
    ],
  });
  assert.ok(!svg.includes("<script>"));
  assert.ok(svg.includes("&#60;script&#62;&#34;a&#34; &#38; &#39;b&#39;"));
  assert.equal(svg.match(/<path /g).length, 2);
  assert.equal(svg.match(/fill="rgb\(1,2,3\)" d="M0 0h2v2h-2zM2 0h2v2h-2z"/g).length, 1);
});

test("examples are filtered by class, mistake and certainty", () => {
  const logits = Float32Array.of(3, 0, 0, 2, 1, 0, 0, 5, 0.1, 0);
  const examples = { count: 5, pixels: new Uint8Array(5), labels: Int32Array.of(0, 0, 1, 1, 0), logits, classes: 2 };
  const all = { label: -1, mistakes: false, uncertain: false };
  assert.deepEqual(filterExamples(examples, all), [0, 1, 2, 3, 4]);
  assert.deepEqual(filterExamples(examples, { ...all, label: 1 }), [2, 3]);
  assert.deepEqual(filterExamples(examples, { ...all, mistakes: true }), [1, 2]);
  assert.deepEqual(filterExamples(examples, { ...all, uncertain: true }), [4, 2, 1, 0, 3]);
  assert.deepEqual(
    filterExamples({ ...examples, labels: null, logits: null, classes: 0 }, { ...all, uncertain: true }),
    [0, 1, 2, 3, 4],
  );
});
