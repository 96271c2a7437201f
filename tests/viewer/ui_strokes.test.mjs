/** Drawings: their text, their image, and MNIST's preprocessing. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { decodeStrokes, drawingToImage, encodeStrokes } from "../../src/clearhead/viewer/js/strokes.js";
import { RECORDED_CLOSING, RECORDED_THREE, firstPoints } from "../../src/clearhead/viewer/js/story.js";

const SIZE = { width: 28, height: 28 };
const line = (...points) => ({ erase: false, points });

function centerOfMass(pixels) {
  let [mass, x, y] = [0, 0, 0];
  pixels.forEach((value, i) => {
    mass += value;
    x += value * ((i % 28) + 0.5);
    y += value * (Math.floor(i / 28) + 0.5);
  });
  return [x / mass, y / mass, mass / 255];
}

test("strokes are the same after encoding and decoding", () => {
  const strokes = [line(0, 0), { erase: true, points: [279, 280, 270, 260, 265, 262] }, line(10, 20, 12, 25, 41, 0)];
  assert.deepEqual(decodeStrokes(encodeStrokes(strokes)), strokes);
});

test("long steps are split on the straight line", () => {
  const [{ points }] = decodeStrokes(encodeStrokes([line(0, 0, 200, 100)]));
  assert.deepEqual(points.slice(-2), [200, 100]);
  for (let i = 0; i < points.length; i += 2) assert.ok(Math.abs(points[i + 1] - points[i] / 2) <= 0.5);
});

test("malformed strokes are left out", () => {
  for (const text of ["", ".", "p", "pAB", "xAAAA", "pAAA!", "pAAAAA", "..pé"])
    assert.deepEqual(decodeStrokes(text), [], text);
  assert.equal(decodeStrokes("junk.p0A0A.").length, 1);
});

test("a straight line has the width of the pen", () => {
  const { pixels } = drawingToImage([line(40, 140, 240, 140)], SIZE, false);
  const column = Array.from({ length: 28 }, (_, row) => pixels[row * 28 + 14] / 255);
  assert.ok(Math.abs(column.reduce((a, b) => a + b) - 2.4) < 0.05);
  assert.equal(pixels[0], 0);
});

test("the eraser removes ink, and an empty pad is empty", () => {
  const erased = [line(140, 140), { erase: true, points: [140, 140] }];
  assert.equal(drawingToImage(erased, SIZE, true).empty, true);
  assert.ok(drawingToImage(erased, SIZE, true).pixels.every((value) => value === 0));
  assert.equal(drawingToImage([], SIZE, true).empty, true);
});

test("centering puts the center of mass into the middle, wherever and however large a digit is drawn", () => {
  const shape = [0, 0, 30, 10, 60, 50, 20, 90];
  for (const [dx, dy, scale] of [
    [20, 30, 1],
    [150, 140, 1],
    [30, 20, 2.4],
    [100, 100, 1.1],
  ]) {
    const points = shape.map((value, i) => Math.round(scale * value) + (i % 2 ? dy : dx));
    const { pixels, transform } = drawingToImage([line(...points)], SIZE, true);
    const [x, y] = centerOfMass(pixels);
    assert.ok(Math.abs(x - 14) < 0.1 && Math.abs(y - 14) < 0.1, `${x} ${y}`);
    const rows = [...pixels.keys()].filter((i) => pixels[i]).map((i) => Math.floor(i / 28));
    const height = Math.max(...rows) - Math.min(...rows) + 1;
    assert.ok(height >= 19 && height <= 21, `${height} rows`);
    const first = [transform.scale * points[0] + transform.dx, transform.scale * points[1] + transform.dy];
    assert.ok(pixels[Math.floor(first[1] / 10) * 28 + Math.floor(first[0] / 10)] > 0, "the transform leads to the ink");
  }
});

test("a dot stays a dot", () => {
  const { pixels } = drawingToImage([line(20, 250)], SIZE, true);
  const [x, y, mass] = centerOfMass(pixels);
  assert.ok(Math.abs(x - 14) < 0.1 && Math.abs(y - 14) < 0.1);
  assert.ok(mass < 6);
});

test("without centering, the drawing stays where it is", () => {
  const { pixels, transform } = drawingToImage([line(40, 40)], SIZE, false);
  assert.deepEqual(transform, { scale: 1, dx: 0, dy: 0 });
  const [x, y] = centerOfMass(pixels);
  assert.ok(Math.abs(x - 4) < 0.05 && Math.abs(y - 4) < 0.05);
});

test("the recorded strokes of the story are readable and inside of the pad", () => {
  for (const text of [RECORDED_THREE, RECORDED_CLOSING]) {
    const strokes = decodeStrokes(text);
    assert.equal(encodeStrokes(strokes), text);
    assert.ok(strokes.length > 0 && strokes.every(({ points }) => points.every((value) => value >= 0 && value <= 280)));
  }
});

test("the beginning of a drawing grows point by point", () => {
  const strokes = [line(1, 1, 2, 2), line(3, 3, 4, 4, 5, 5)];
  assert.deepEqual(firstPoints(strokes, 3), [line(1, 1, 2, 2), line(3, 3)]);
  assert.deepEqual(firstPoints(strokes, 9), strokes);
  assert.deepEqual(firstPoints(strokes, 0), []);
});
