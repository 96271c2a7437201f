/** The state of the page survives its way through the address, and whatever a stranger writes into it. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { decodeState, defaultState, encodeState } from "../../src/clearhead/viewer/js/state.js";

const DESCRIPTION = {
  format: 1,
  kind: "model",
  title: "test",
  source: "model",
  input: { channels: 1, height: 28, width: 28, mean: [0], std: [1], background: [0], draw: true, patch_size: 4 },
  classes: [..."0123456789"],
  grid: [7, 7],
  num_prefix_tokens: 0,
  layers: [
    { name: "blocks.0.attn", kernel: "", heads: 2, queries: 49, keys: 49, note: "" },
    { name: "pool.attn", kernel: "", heads: 3, queries: 1, keys: 49, note: "" },
  ],
  unresolved: [],
  config: null,
};

const FULL = {
  source: "draw",
  strokes: [
    { erase: false, points: [100, 40, 120, 60, 131, 91] },
    { erase: true, points: [5, 7] },
  ],
  example: 17,
  filter: { label: 3, mistakes: true, uncertain: true },
  picture: null,
  center: false,
  layer: 1,
  head: 2,
  pins: [3, 48],
  direction: "from",
  sort: "entropy",
  scale: "own",
  click: "mask",
  edits: {
    heads: [
      { layer: "blocks.0.attn", head: 1, pattern: "zero" },
      { layer: "pool.attn", head: 0, pattern: "uniform" },
    ],
    hiddenPatches: [12, 3],
    maskedPatches: [40],
    beta: Infinity,
  },
  cell: { matrix: "weights", row: 3, column: 4 },
  story: "hide",
  theme: "dark",
};

test("a state is the same after encoding and decoding", () => {
  assert.deepEqual(decodeState(encodeState(FULL, DESCRIPTION), DESCRIPTION), FULL);
  for (const beta of [0, 0.25, 17.5, null]) {
    const state = { ...FULL, edits: { ...FULL.edits, beta } };
    assert.equal(decodeState(encodeState(state, DESCRIPTION), DESCRIPTION).edits.beta, beta);
  }
});

test("a small picture is kept, and a large one is not", () => {
  const picture = Uint8Array.from({ length: 784 }, (_, i) => (i * 7) % 256);
  const state = { ...defaultState(DESCRIPTION), source: "picture", picture };
  assert.deepEqual(decodeState(encodeState(state, DESCRIPTION), DESCRIPTION).picture, picture);
  const large = { ...DESCRIPTION, input: { ...DESCRIPTION.input, channels: 3, height: 224, width: 224, draw: false } };
  const text = encodeState({ ...defaultState(large), source: "picture", picture: new Uint8Array(150528) }, large);
  assert.ok(text.length < 100);
  assert.equal(decodeState(text, large).source, "example");
});

test("the default state has an empty text, and an empty text is the default state", () => {
  assert.equal(encodeState(defaultState(DESCRIPTION), DESCRIPTION), "");
  for (const text of ["", "#", "&", "=", "#&&==&"])
    assert.deepEqual(decodeState(text, DESCRIPTION), defaultState(DESCRIPTION));
});

test("values out of range become defaults", () => {
  const state = decodeState(
    "#l=9&h=9&q=99.-5.x&e=-1&x=49.1e9.3&z=0-7z.5-0z.0-0q&b=-3&a=9.1.1&o=q&f=99mu&f=12&s=constructor",
    DESCRIPTION,
    10,
  );
  const expected = defaultState(DESCRIPTION);
  assert.deepEqual(state, { ...expected, edits: { ...expected.edits, hiddenPatches: [3] } });
  assert.equal(decodeState("e=10", DESCRIPTION, 10).example, 0);
  assert.equal(decodeState("l=1&h=2", DESCRIPTION).head, 2);
  assert.equal(decodeState("l=0&h=2", DESCRIPTION).head, -1);
});

test("random and truncated text never throws and gives a valid state", () => {
  const good = encodeState(FULL, DESCRIPTION);
  let seed = 1;
  const random = () => (seed = (seed * 48271) % 2147483647) / 2147483647;
  for (let i = 0; i < 2000; i++) {
    const at = Math.floor(random() * good.length);
    const noise = String.fromCharCode(32 + Math.floor(random() * 200)).repeat(1 + Math.floor(random() * 3));
    const state = decodeState(good.slice(0, at) + noise + good.slice(at + Math.floor(random() * 5)), DESCRIPTION);
    assert.ok(state.pins.every((pin) => pin >= -1 && pin < 49));
    assert.ok(state.edits.heads.every(({ layer, head }) => head < (layer === "pool.attn" ? 3 : 2)));
    assert.ok(state.edits.beta === null || state.edits.beta >= 0);
    assert.ok(["draw", "example", "picture"].includes(state.source));
    assert.deepEqual(decodeState(encodeState(state, DESCRIPTION), DESCRIPTION), state);
  }
});

test("a recorded pass has no drawing and no edits", () => {
  const trace = { ...DESCRIPTION, kind: "trace" };
  const state = decodeState(encodeState(FULL, DESCRIPTION), trace);
  assert.equal(state.source, "example");
  assert.deepEqual(state.strokes, []);
  assert.deepEqual(state.edits, defaultState(trace).edits);
});
