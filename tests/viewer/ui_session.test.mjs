/** The passes of a session: the newest input is computed, also after an error. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { Session } from "../../src/clearhead/viewer/js/session.js";
import { defaultState } from "../../src/clearhead/viewer/js/state.js";

globalThis.window = globalThis;
globalThis.requestAnimationFrame = () => 1;
globalThis.cancelAnimationFrame = () => {};

const DESCRIPTION = {
  format: 1,
  kind: "model",
  title: "test",
  source: "model",
  input: { channels: 1, height: 4, width: 4, mean: [0], std: [1], background: [0], draw: true, patch_size: 2 },
  classes: ["0", "1"],
  grid: [2, 2],
  num_prefix_tokens: 0,
  layers: [{ name: "pool.attn", kernel: "", heads: 1, queries: 1, keys: 4, note: "" }],
  unresolved: [],
  config: null,
};
const RESULT = { logits: Float32Array.of(0, 1), layers: [] };

/** A session whose passes wait until they are settled. */
function startSession() {
  const session = new Session(DESCRIPTION, defaultState(DESCRIPTION));
  const passes = [];
  const errors = [];
  session.onError = (message) => errors.push(message);
  const run = () => new Promise((resolve, reject) => passes.push({ resolve, reject }));
  session.start(new Map(), { canRun: true, run, close() {} });
  return { session, passes, errors };
}

const settled = () => new Promise((resolve) => setImmediate(resolve));

test("an input that arrives during a pass that fails is computed", async () => {
  const { session, passes, errors } = startSession();
  session.requestRun();
  assert.equal(passes.length, 1);
  passes[0].reject(new Error("first"));
  await settled();
  assert.deepEqual(errors, ["first"]);
  assert.equal(passes.length, 2);
  passes[1].resolve(RESULT);
  await settled();
  assert.equal(session.result, RESULT);
  assert.equal(session.resultVersion, session.version);
  session.close();
});

test("a pass that fails is not repeated until the input changes", async () => {
  const { session, passes, errors } = startSession();
  passes[0].reject(new Error("first"));
  await settled();
  assert.equal(passes.length, 1);
  assert.equal(session.running, false);
  session.requestRun();
  passes[1].resolve(RESULT);
  await settled();
  assert.deepEqual(errors, ["first"]);
  assert.equal(session.result, RESULT);
  session.close();
});
