/** Preprocessing: MNIST's centering by mass, scaling by area, and fitting pictures. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { backgroundColor, centerByMass, downscale, fitImage, inkBounds, toGray } from "../../src/clearhead/viewer/js/image.js";
import { randomNumbers } from "./models.mjs";

const SIDE = 280;

/** A pad with filled rectangles [left, top, width, height], white on black. */
function drawing(...rectangles) {
  const gray = new Uint8Array(SIDE * SIDE);
  for (const [left, top, width, height] of rectangles) {
    for (let y = top; y < top + height; y++) {
      gray.fill(255, y * SIDE + left, y * SIDE + left + width);
    }
  }
  return gray;
}

function centerOfMass(pixels, size = 28) {
  let [mass, x, y] = [0, 0, 0];
  pixels.forEach((value, i) => {
    mass += value;
    x += value * (i % size);
    y += value * Math.floor(i / size);
  });
  return [x / mass, y / mass];
}

/** Like a 7: a bar at the top and a stem. */
const seven = (left, top) => drawing([left, top, 120, 24], [left + 90, top, 24, 170]);

test("the center of mass is at the center, within half a pixel", () => {
  for (const gray of [seven(20, 30), seven(150, 100), drawing([0, 0, 40, 200]), drawing([10, 200, 250, 30])]) {
    const [x, y] = centerOfMass(centerByMass(gray, SIDE, SIDE));
    assert.ok(Math.abs(x - 14) <= 0.5, `x ${x}`);
    assert.ok(Math.abs(y - 14) <= 0.5, `y ${y}`);
  }
});

test("the longer side of the ink has 20 pixels, and its proportions are kept", () => {
  const bounds = inkBounds(centerByMass(seven(30, 40), SIDE, SIDE), 28, 28);
  assert.equal(bounds.bottom - bounds.top, 20);
  assert.equal(bounds.right - bounds.left, Math.round((120 / 170) * 20));
});

test("the place of a drawing on the pad does not matter", () => {
  assert.deepEqual(centerByMass(seven(21, 33), SIDE, SIDE), centerByMass(seven(140, 101), SIDE, SIDE));
});

test("the size of a drawing hardly matters", () => {
  const small = centerByMass(drawing([50, 50, 60, 12], [95, 50, 12, 140]), SIDE, SIDE);
  const large = centerByMass(drawing([20, 0, 120, 24], [110, 0, 24, 280]), SIDE, SIDE);
  assert.ok(small.every((value, i) => Math.abs(value - large[i]) <= 1));
});

test("a dot is not blown up, and an empty pad stays empty", () => {
  const { left, right, top, bottom } = inkBounds(centerByMass(drawing([100, 50, 20, 20]), SIDE, SIDE), 28, 28);
  assert.deepEqual([right - left, bottom - top], [4, 4]);
  assert.ok(centerByMass(drawing(), SIDE, SIDE).every((value) => value === 0));
  const faint = drawing();
  faint[5] = 1;
  assert.ok(centerByMass(faint, SIDE, SIDE).every((value) => value <= 1));
});

test("ink with its mass at one end stays inside of the image", () => {
  const lopsided = drawing([0, 0, 280, 3], [0, 0, 40, 40]);
  const bounds = inkBounds(centerByMass(lopsided, SIDE, SIDE), 28, 28);
  assert.equal(bounds.right - bounds.left, 20);
  assert.equal(bounds.right, 28);
});

test("downscaling keeps the mean, and averages areas", () => {
  const random = randomNumbers();
  const gray = Uint8Array.from({ length: 60 * 40 }, () => Math.floor(256 * random()));
  const mean = (pixels) => pixels.reduce((a, b) => a + b, 0) / pixels.length;
  assert.ok(Math.abs(mean(downscale(gray, 60, 40, 9, 7)) - mean(gray)) < 1);
  assert.deepEqual([...downscale(Uint8Array.of(0, 100, 200, 100), 2, 2, 1, 1)], [100]);
  assert.deepEqual([...downscale(Uint8Array.of(0, 90, 90), 3, 1, 2, 1)], [30, 90]);
  assert.deepEqual(downscale(gray, 60, 40, 60, 40), gray);
});

const INPUT_3 = { channels: 3, height: 8, width: 8, mean: [0], std: [1], background: [0], draw: false, patch_size: 4 };

/** One color, with an optional alpha. */
function plain(width, height, color) {
  return Uint8Array.from({ length: width * height * 4 }, (_, i) => (i % 4 < 3 ? color[i % 4] : (color[3] ?? 255)));
}

test("a plain picture stays plain, however it is fitted", () => {
  for (const fit of ["pad", "crop", "stretch"]) {
    const pixels = fitImage(plain(13, 31, [10, 200, 77]), 13, 31, INPUT_3, fit);
    assert.deepEqual([...pixels], [10, 200, 77].flatMap((value) => Array(64).fill(value)));
  }
});

test("transparent parts are white, and gray is the luma of the color", () => {
  assert.deepEqual([...toGray(plain(1, 1, [0, 0, 0, 0]))], [255]);
  assert.deepEqual([...toGray(plain(1, 1, [255, 0, 0]))], [76]);
  const gray = fitImage(plain(5, 5, [0, 255, 0]), 5, 5, { ...INPUT_3, channels: 1 }, "pad");
  assert.deepEqual([...gray], Array(64).fill(150));
});

test("a wide picture is padded above and below, or cropped at its sides", () => {
  const rgba = plain(40, 20, [0, 0, 0]);
  for (let i = 0; i < 40 * 20; i++) {
    rgba[4 * i] = i % 40 < 10 ? 255 : 0; // the left quarter is red
  }
  const red = (fit, row) => [...fitImage(rgba, 40, 20, INPUT_3, fit).subarray(8 * row, 8 * row + 8)];
  assert.ok(red("pad", 4)[0] > 200);
  assert.ok(red("pad", 0).every((value) => value === 0));
  assert.ok(red("crop", 4).every((value) => value < 60));
  assert.ok(red("stretch", 0)[0] > 200);
});

test("the background color is the median of the border", () => {
  const image = new Uint8Array(16 * 16).fill(9);
  image.fill(250, 16 * 6, 16 * 9);
  assert.deepEqual(backgroundColor(image, 16, 16, 1), [9]);
});
