/** The engine: newest requests first, long jobs in slices, Workers and their absence, and recorded traces. */

import assert from "node:assert/strict";
import { afterEach, test } from "node:test";
import { MessageChannel, Worker as Thread } from "node:worker_threads";

import { createEngine, createTraceEngine, noEdits } from "../../src/clearhead/viewer/js/engine.js";
import { serveEngine } from "../../src/clearhead/viewer/js/worker.js";
import { INPUT, largestDifference, randomPixels, randomTensors, smallConfig } from "./models.mjs";

const CONFIG = smallConfig();
const TENSORS = randomTensors(CONFIG);
const DESCRIPTION = { kind: "model", config: CONFIG, input: INPUT, grid: [2, 3], num_prefix_tokens: 0, layers: [] };

/** A Worker of a browser, by two ports of a channel: messages are copied and arrive later. */
function fakeWorker({ fails = false } = {}) {
  const { port1, port2 } = new MessageChannel();
  const worker = {
    terminated: false,
    received: [],
    onmessage: null,
    onerror: null,
    postMessage: (message) => port1.postMessage(message),
    terminate() {
      worker.terminated = true;
      port1.close();
    },
  };
  port1.on("message", (data) => worker.onmessage({ data }));
  const scope = { onmessage: null, postMessage: (message, transfer) => port2.postMessage(message, transfer) };
  serveEngine(scope);
  port2.on("message", (data) => {
    if (fails) {
      worker.onerror({ preventDefault() {} });
    } else {
      worker.received.push(data.kind);
      scope.onmessage({ data });
    }
  });
  return worker;
}

const opened = [];

function openEngine(spawnWorker) {
  opened.push(createEngine({ description: DESCRIPTION, tensors: TENSORS, spawnWorker }));
  return opened[opened.length - 1];
}

afterEach(() => opened.splice(0).forEach((engine) => engine.close()));

/** An engine whose worker has answered. */
async function openReadyEngine(spawnWorker) {
  const engine = openEngine(spawnWorker);
  await engine.headEffects(randomPixels(), noEdits, 0);
  return engine;
}

for (const [name, spawnWorker] of [["a worker", fakeWorker], ["the main thread", null]]) {
  test(`${name} answers every kind of request`, async () => {
    const engine = await openReadyEngine(spawnWorker);
    const pixels = randomPixels();
    const result = await engine.run(pixels, noEdits);
    assert.equal(engine.canRun, true);
    assert.equal(result.logits.length, 4);
    assert.deepEqual(result.layers.map((layer) => layer.name), ["blocks.0.attn", "blocks.1.attn", "pool.attn"]);
    assert.equal((await engine.headEffects(pixels, noEdits, 1)).length, 6);
    for (const method of ["mean", "rollout", "relevance", "occlusion"]) {
      const attribution = await engine.attribute(pixels, noEdits, method, 1);
      assert.equal(attribution.method, method);
      assert.equal(attribution.patches.length, 6);
    }
    const steps = await engine.headSteps(pixels, noEdits, "pool.attn", 1);
    assert.deepEqual(steps.q.shape, [1, 4]);
    await assert.rejects(engine.run(pixels.subarray(1), noEdits), /54|53/);
    await assert.rejects(engine.attribute(pixels, noEdits, "relevance", 4), /0 to 3/);
    await assert.rejects(engine.headEffects(pixels, noEdits, -1), /0 to 3/);
    await assert.rejects(engine.headSteps(pixels, noEdits, "pool.attn", 2), /pool.attn/);
  });

  test(`on ${name}, an outdated request is answered with null`, async () => {
    const engine = await openReadyEngine(spawnWorker);
    await engine.run(randomPixels(), noEdits);
    const runs = [1, 2, 3, 4, 5].map((seed) => engine.run(randomPixels(seed), noEdits));
    const other = engine.attribute(randomPixels(), noEdits, "mean", 0);
    const results = await Promise.all(runs);
    assert.ok(results.slice(0, -1).some((result) => result === null));
    const again = await engine.run(randomPixels(5), noEdits);
    assert.deepEqual(results[4], again);
    assert.notEqual(await other, null, "a request of another kind is not outdated");
  });

  test(`on ${name}, a pass is served before other requests, and long jobs come last`, async () => {
    const engine = await openReadyEngine(spawnWorker);
    const pixels = randomPixels();
    const order = [];
    const note = (label) => (value) => {
      order.push(label);
      return value;
    };
    const effects = engine.headEffects(pixels, noEdits, 0).then(note("effects"));
    const occlusion = engine.attribute(pixels, noEdits, "occlusion", 0).then(note("occlusion"));
    const relevance = engine.attribute(pixels, noEdits, "relevance", 0).then(note("relevance"));
    const run = engine.run(pixels, noEdits).then(note("run"));
    const values = await Promise.all([effects, occlusion, relevance, run]);
    assert.deepEqual(order, ["run", "relevance", "effects", "occlusion"]);
    assert.ok(values.every((value) => value !== null));
  });

  test(`on ${name}, closing answers what is still pending`, async () => {
    const engine = await openReadyEngine(spawnWorker);
    const pending = engine.attribute(randomPixels(), noEdits, "occlusion", 0);
    engine.close();
    assert.equal(await pending, null);
  });
}

test("a worker and the main thread give the same results", async () => {
  let worker = null;
  const there = await openReadyEngine(() => (worker = fakeWorker()));
  const here = openEngine(null);
  const edits = { heads: [{ layer: "pool.attn", head: 0, pattern: "zero" }], hiddenPatches: [1], maskedPatches: [2], beta: Infinity };
  assert.deepEqual(await there.run(randomPixels(), edits), await here.run(randomPixels(), edits));
  assert.deepEqual(worker.received, ["load", "headEffects", "run"]);
});

test("without a worker, the engine computes on the main thread", async () => {
  const engine = openEngine(() => {
    throw new Error("workers are not allowed here");
  });
  assert.equal((await engine.run(randomPixels(), noEdits)).logits.length, 4);
});

test("if the worker fails, the main thread takes over what is pending", async () => {
  let worker = null;
  const engine = openEngine(() => (worker = fakeWorker({ fails: true })));
  const pending = engine.run(randomPixels(), noEdits);
  assert.equal((await pending).logits.length, 4);
  assert.equal(worker.terminated, true);
  assert.equal((await engine.run(randomPixels(), noEdits)).logits.length, 4);
});

test("passes do not wait until the worker is ready", async () => {
  const received = [];
  const worker = { onmessage: null, postMessage: (message) => received.push(message), terminate() {} };
  const engine = openEngine(() => worker);
  const first = await engine.run(randomPixels(1), noEdits);
  assert.equal(first.logits.length, 4);
  const effects = engine.headEffects(randomPixels(1), noEdits, 0);
  assert.deepEqual(received.map(({ kind }) => kind), ["load", "headEffects"]);

  const here = engine.run(randomPixels(2), noEdits);
  worker.onmessage({ data: { isReady: true } });
  const there = engine.run(randomPixels(3), noEdits);
  assert.equal(await here, null, "the newer pass is computed in the worker");
  assert.equal(received[2].kind, "run");
  worker.onmessage({ data: { id: received[2].id, value: "answer of the worker" } });
  assert.equal(await there, "answer of the worker");

  worker.onerror({ preventDefault() {} });
  assert.equal((await effects).length, 6, "the main thread takes over");
});

test("the worker gets the weights only, not the examples", async () => {
  const tensors = new Map([...TENSORS, ["examples.pixels", { shape: [1], data: Uint8Array.of(1) }]]);
  let sent = null;
  const worker = { postMessage: (message) => (sent ??= message), terminate() {} };
  createEngine({ description: DESCRIPTION, tensors, spawnWorker: () => worker }).close();
  assert.equal(sent.tensors.has("examples.pixels"), false);
  assert.equal(sent.tensors.size, TENSORS.size);
});

test("results do not share memory with later passes", async () => {
  const engine = openEngine(null);
  const first = await engine.run(randomPixels(1), noEdits);
  const copy = structuredClone(first);
  await engine.run(randomPixels(2), noEdits);
  assert.deepEqual(first, copy);
});

test("weights that do not fit are an error at once", () => {
  const tensors = new Map(TENSORS);
  tensors.delete("model.head.weight");
  assert.throws(() => createEngine({ description: DESCRIPTION, tensors }), /head\.weight/);
  assert.throws(() => createEngine({ description: { ...DESCRIPTION, config: null }, tensors: TENSORS }), /config/);
  const unknown = { ...DESCRIPTION, config: { ...CONFIG, pooling: "max" } };
  assert.throws(() => createEngine({ description: unknown, tensors: TENSORS }), /pooling.*max/);
});

test("worker.js starts by itself in the scope of a worker", async () => {
  const code = `
    const { parentPort } = require("node:worker_threads");
    globalThis.WorkerGlobalScope = class {};
    globalThis.postMessage = (message, transfer) => parentPort.postMessage(message, transfer);
    import(${JSON.stringify(new URL("../../src/clearhead/viewer/js/worker.js", import.meta.url).href)}).then(() => {
      parentPort.on("message", (data) => globalThis.onmessage({ data }));
    });`;
  const thread = new Thread(code, { eval: true });
  const worker = {
    onmessage: null,
    onerror: null,
    postMessage: (message) => thread.postMessage(message),
    terminate: () => thread.terminate(),
  };
  thread.on("message", (data) => worker.onmessage({ data }));
  const engine = openEngine(() => worker);
  const here = openEngine(null);
  const [there, expected] = await Promise.all([engine, here].map((one) => one.headEffects(randomPixels(), noEdits, 1)));
  assert.deepEqual(there, expected);
});

function recordedTrace() {
  const layer = (name, queries, keys) => ({ name, kernel: "", heads: 2, queries, keys, note: "" });
  const weights = (queries, keys) => new Float32Array(2 * 2 * queries * keys).map((_, i) => (i % keys === i % 3 ? 1 : 0));
  const description = { ...DESCRIPTION, kind: "trace", config: null, layers: [layer("a", 6, 6), layer("b", 1, 6)] };
  const tensors = new Map([
    ["trace.0", { shape: [2, 2, 6, 6], data: weights(6, 6) }],
    ["trace.1", { shape: [2, 2, 1, 6], data: weights(1, 6).map((value, i) => value + i) }],
    ["trace.pixels", { shape: [2, 1, 6, 9], data: Uint8Array.of(...randomPixels(1), ...randomPixels(2)) }],
    ["trace.logits", { shape: [2, 3], data: Float32Array.of(1, 2, 3, 4, 5, 6) }],
  ]);
  return { description, tensors, engine: createTraceEngine(description, tensors) };
}

test("a recorded trace returns the pass of each of its inputs", async () => {
  const { engine, tensors } = recordedTrace();
  assert.equal(engine.canRun, false);
  for (const [index, seed] of [[0, 1], [1, 2]]) {
    const { logits, layers } = await engine.run(randomPixels(seed), noEdits);
    assert.deepEqual([...logits], [1, 2, 3].map((value) => value + 3 * index));
    assert.deepEqual([...layers[1].weights], [...tensors.get("trace.1").data.subarray(12 * index, 12 * index + 12)]);
    assert.deepEqual([layers[0].name, layers[0].heads, layers[0].queries, layers[0].keys], ["a", 2, 6, 6]);
  }
});

test("a recorded trace aggregates its weights, and refuses whatever needs the model", async () => {
  const { engine } = recordedTrace();
  const pixels = randomPixels(2);
  const { layers } = await engine.run(pixels, noEdits);
  const mean = Array.from({ length: 6 }, (_, j) => (layers[1].weights[j] + layers[1].weights[6 + j]) / 2);
  const attribution = await engine.attribute(pixels, noEdits, "mean", 0);
  assert.ok(largestDifference(attribution.patches, mean) < 1e-6);
  assert.equal((await engine.attribute(pixels, noEdits, "rollout", 0)).patches.length, 6);
  await assert.rejects(engine.attribute(pixels, noEdits, "relevance", 0), /relevance/);
  await assert.rejects(engine.headEffects(pixels, noEdits, 0), /model/);
  await assert.rejects(engine.headSteps(pixels, noEdits, "a", 0), /model/);
  await assert.rejects(engine.run(pixels, { ...noEdits, beta: 2 }), /model/);
});

test("a trace without pixels, logits or grid", async () => {
  const { description, tensors } = recordedTrace();
  tensors.delete("trace.pixels");
  tensors.delete("trace.logits");
  const engine = createTraceEngine({ ...description, grid: null }, tensors);
  const { logits, layers } = await engine.run(new Uint8Array(0), noEdits);
  assert.equal(logits.length, 0);
  assert.equal(layers.length, 2);
  await assert.rejects(engine.attribute(new Uint8Array(0), noEdits, "mean", 0), /grid/);
});
