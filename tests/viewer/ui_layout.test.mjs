/** Geometry, numbers as text, color scales, and maps of queries. */

import assert from "node:assert/strict";
import { test } from "node:test";
import * as colors from "../../src/clearhead/viewer/js/colors.js";
import * as layout from "../../src/clearhead/viewer/js/layout.js";
import { ALL_HEADS, READOUT, outputQueryName, patchMap, tokenLayout } from "../../src/clearhead/viewer/js/queries.js";

const entry = (table, i) => Array.from(table.subarray(3 * i, 3 * i + 3));

test("the sequential scales are monotonic in lightness", () => {
  for (const [table, sign] of [
    [colors.GLOW, 1],
    [colors.AMBER_LIGHT, -1],
  ]) {
    for (let i = 4; i < 256; i += 4) {
      const step = colors.lightnessOf(entry(table, i)) - colors.lightnessOf(entry(table, i - 4));
      assert.ok(sign * step > 0, `entry ${i}`);
    }
  }
});

test("the diverging scales are symmetric in lightness, and their ends differ in blue and yellow", () => {
  for (const table of [colors.SIGNED_DARK, colors.SIGNED_LIGHT]) {
    for (const distance of [30, 80, 127]) {
      const below = colors.lightnessOf(entry(table, 127 - distance));
      const above = colors.lightnessOf(entry(table, 128 + distance));
      assert.ok(Math.abs(below - above) < 0.05, `distance ${distance}`);
    }
    const [rose, blue] = [entry(table, 0), entry(table, 255)];
    assert.ok(blue[2] - blue[0] > 90 && rose[0] - rose[2] > 40);
  }
});

test("OKLCH without chroma is gray, from black to white", () => {
  assert.deepEqual(colors.oklchToRgb(0, 0, 0), [0, 0, 0]);
  assert.deepEqual(colors.oklchToRgb(1, 0, 0), [255, 255, 255]);
  const [r, g, b] = colors.oklchToRgb(0.5, 0, 120);
  assert.ok(r === g && g === b);
});

test("colors are clamped, and equal limits give the first color", () => {
  const rgba = new Uint8ClampedArray(16);
  colors.paintColors([-1, 0.5, 9, NaN], 0, 1, colors.GLOW, rgba);
  assert.deepEqual([...rgba.subarray(0, 3)], entry(colors.GLOW, 0));
  assert.deepEqual([...rgba.subarray(8, 11)], entry(colors.GLOW, 255));
  assert.deepEqual([...rgba.subarray(12, 15)], entry(colors.GLOW, 0));
  colors.paintColors([3, 3, 3, 3], 3, 3, colors.GLOW, rgba);
  assert.deepEqual([...rgba.subarray(0, 3)], entry(colors.GLOW, 0));
});

test("points are found in their cells", () => {
  assert.equal(layout.cellAt(0, 0, 70, 70, [7, 7]), 0);
  assert.equal(layout.cellAt(69, 11, 70, 70, [7, 7]), 13);
  assert.equal(layout.cellAt(70, 0, 70, 70, [7, 7]), -1);
  assert.equal(layout.cellAt(-1, 0, 70, 70, [7, 7]), -1);
});

test("arrow keys stay inside of the grid", () => {
  for (let cell = 0; cell < 12; cell++) {
    for (const key of ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"]) {
      const next = layout.moveCell(cell, key, 4, 12);
      assert.ok(next >= 0 && next < 12);
      if (/Left|Right|Home|End/.test(key)) assert.equal(Math.floor(next / 4), Math.floor(cell / 4));
      else assert.equal(next % 4, cell % 4);
    }
  }
  assert.equal(layout.moveCell(3, "a", 4, 12), null);
});

test("heads are sorted by a value, and those without one come last", () => {
  const order = layout.orderHeads([2, 2], [0.5, NaN, 0.1, 0.9]);
  assert.deepEqual(
    order.map(({ layer, head }) => 2 * layer + head),
    [2, 0, 3, 1],
  );
  const descending = layout.orderHeads([2, 2], [0.5, NaN, 0.1, 0.9], true);
  assert.deepEqual(
    descending.map(({ layer, head }) => 2 * layer + head),
    [3, 0, 2, 1],
  );
  assert.deepEqual(layout.orderHeads([1, 2], null), [
    { layer: 0, head: 0 },
    { layer: 1, head: 0 },
    { layer: 1, head: 1 },
  ]);
});

const WALL = { gap: 12, caption: 20, label: 22, minSize: 20, goodSize: 84, maxSize: 128 };

test("the wall fits into its width, and no two cells overlap", () => {
  for (const width of [276, 358, 940, 1300]) {
    for (const counts of [[2, 2, 2], [1], [4, 4, 2], Array(12).fill(12), Array(6).fill(6)]) {
      const blocks = layout.wallBlocks(width, counts, WALL);
      const rows = layout.wallRows(width, layout.orderHeads(counts, null), blocks.size, WALL);
      for (const { cells, height } of [blocks, rows]) {
        assert.equal(
          cells.length,
          counts.reduce((a, b) => a + b),
        );
        const places = new Set(cells.map(({ x, y }) => `${x} ${y}`));
        assert.equal(places.size, cells.length);
        for (const { x, y, size } of cells) {
          assert.ok(x >= 0 && (x + size <= width || size === WALL.minSize), `${width}: ${x} + ${size}`);
          assert.ok(y >= 0 && y + size <= height);
        }
      }
    }
  }
});

test("layers stand side by side where there is room", () => {
  assert.equal(new Set(layout.wallBlocks(940, [2, 2, 2], WALL).labels.map(({ y }) => y)).size, 1);
  assert.equal(new Set(layout.wallBlocks(276, [2, 2, 2], WALL).labels.map(({ y }) => y)).size, 3);
});

test("percentages are never rounded to certainty", () => {
  assert.equal(layout.percent(1), "100.0%");
  assert.equal(layout.percent(0.99999), ">99.9%");
  assert.equal(layout.percent(0.00001), "<0.1%");
  assert.equal(layout.percent(0), "0.0%");
  assert.equal(layout.percent(0.5), "50.0%");
  assert.equal(layout.percent(NaN), "–");
});

test("signed numbers use a minus sign, and zero has both", () => {
  assert.equal(layout.signed(-0.123), "−0.12");
  assert.equal(layout.signed(0.5), "+0.50");
  assert.equal(layout.signed(-0.001), "±0.00");
});

test("the slider of beta has zero, the model's own value and infinity", () => {
  const own = 1 / Math.sqrt(32);
  assert.equal(layout.betaAt(0, own), 0);
  assert.equal(layout.betaAt(layout.BETA_STEPS, own), Infinity);
  assert.ok(Math.abs(layout.betaAt(layout.BETA_STEPS / 2, own) - own) < 1e-12);
  for (let position = 0; position <= layout.BETA_STEPS; position++) {
    assert.equal(layout.betaPosition(layout.betaAt(position, own), own), position);
  }
});

test("of many classes, the most probable are shown", () => {
  const probabilities = Float32Array.from({ length: 100 }, (_, i) => (i * 37) % 100);
  const shown = layout.shownClasses(probabilities, 10);
  assert.deepEqual(
    shown.map((i) => probabilities[i]),
    [99, 98, 97, 96, 95, 94, 93, 92, 91, 90],
  );
  assert.deepEqual(layout.shownClasses([0.2, 0.5, 0.3], 10), [0, 1, 2]);
  const top = layout.topTwo([0.2, 0.5, 0.3]);
  assert.deepEqual([top.first, top.second], [1, 2]);
  assert.ok(Math.abs(top.margin - 0.2) < 1e-12);
});

const GRID = { grid: [1, 3], num_prefix_tokens: 2, config: { pooling: "cls" } };

test("rows and columns of the attention matrix become maps of patches", () => {
  const [queries, keys] = [5, 5];
  const weights = Float32Array.from({ length: 2 * 25 }, (_, i) => i);
  const layer = { name: "x", heads: 2, queries, keys, weights };
  const tokens = tokenLayout(GRID, layer);
  assert.deepEqual(tokens, { onGrid: true, prefix: 2, patches: 3, readout: "token" });
  const map = (head, query, direction) => [...patchMap(layer, tokens, head, query, direction, new Float32Array(3))];
  assert.deepEqual(map(0, 1, "to"), [17, 18, 19]);
  assert.deepEqual(map(1, 1, "from"), [38, 43, 48]);
  assert.deepEqual(map(0, READOUT, "to"), [2, 3, 4]);
  assert.deepEqual(map(0, READOUT, "from"), [10, 15, 20]);
  assert.deepEqual(map(ALL_HEADS, 0, "to"), [24.5, 25.5, 26.5]);
});

test("without a class token, the readout is the mean over the queries, or the pooling query", () => {
  const description = { grid: [1, 2], num_prefix_tokens: 0, config: { pooling: "attention" } };
  const square = { name: "x", heads: 1, queries: 2, keys: 2, weights: Float32Array.of(0.2, 0.8, 0.6, 0.4) };
  const mean = patchMap(square, tokenLayout(description, square), 0, READOUT, "to", new Float32Array(2));
  assert.ok(Math.abs(mean[0] - 0.4) < 1e-6 && Math.abs(mean[1] - 0.6) < 1e-6);
  const pool = { name: "p", heads: 1, queries: 1, keys: 2, weights: Float32Array.of(0.3, 0.7) };
  const tokens = tokenLayout(description, pool);
  assert.equal(tokens.readout, "single");
  assert.deepEqual([...patchMap(pool, tokens, 0, 1, "to", new Float32Array(2))], [...pool.weights]);
  assert.deepEqual([...patchMap(pool, tokens, 0, 1, "from", new Float32Array(2))], [0, pool.weights[1]]);
});

test("the output query is named after the row that is shown", () => {
  const [square, pool] = [3, 1].map((queries) => ({ queries, keys: 3 }));
  const pooledBy = (pooling) => ({ grid: [1, 3], num_prefix_tokens: 0, config: { pooling } });
  assert.equal(outputQueryName(GRID, { queries: 5, keys: 5 }), "Class token");
  assert.equal(outputQueryName(pooledBy("attention"), pool), "Pooling query");
  assert.equal(outputQueryName(pooledBy("attention"), square), "All queries");
  assert.equal(outputQueryName(pooledBy("mean"), square), "All queries");
});

test("a number of things has the plural unless it is 1", () => {
  const texts = [0, 1, 2, 1234].map((count) => layout.counted(count, "head"));
  assert.deepEqual(texts, ["0 heads", "1 head", "2 heads", "1,234 heads"]);
});

test("tokens that are not patches of the grid are shown as matrices", () => {
  assert.equal(tokenLayout(GRID, { queries: 9, keys: 9 }).onGrid, false);
  assert.equal(tokenLayout(GRID, { queries: 4, keys: 5 }).onGrid, false);
  assert.equal(tokenLayout({ grid: null, num_prefix_tokens: 0, config: null }, { queries: 3, keys: 3 }).onGrid, false);
});
