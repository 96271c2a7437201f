/** The order of requests, one step of the queue at a time. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { noEdits } from "../../src/clearhead/viewer/js/engine.js";
import { JobQueue } from "../../src/clearhead/viewer/js/jobs.js";
import { randomPixels, randomVision } from "./models.mjs";

const VISION = randomVision();
let lastId = 0;

/** A queue that computes only when `step` is called, and a single pass of a long job at a time. */
function openQueue() {
  const replies = new Map();
  const queue = new JobQueue(
    VISION,
    ({ id, value, error }) => {
      assert.equal(replies.has(id), false, "one reply for each request");
      replies.set(id, error ?? value);
    },
    0,
  );
  queue.schedule = () => {};
  const submit = (kind, seed = 1, more = {}) => {
    queue.submit({ id: ++lastId, kind, pixels: randomPixels(seed), edits: noEdits, ...more });
    return lastId;
  };
  const finish = (id) => {
    for (let i = 0; i < 100 && !replies.has(id); i++) {
      queue.step();
    }
    assert.ok(replies.has(id));
    return replies.get(id);
  };
  return { queue, replies, submit, finish };
}

const LONG_JOBS = [
  ["headEffects", { target: 1 }],
  ["attribute", { method: "occlusion", target: 1 }],
];

for (const [kind, more] of LONG_JOBS) {
  test(`${kind}: a pass that arrives after it has begun is served at the next step`, () => {
    const { queue, replies, submit, finish } = openQueue();
    const long = submit(kind, 1, more);
    queue.step();
    queue.step();
    assert.equal(replies.size, 0);
    const run = submit("run", 2);
    queue.step();
    assert.deepEqual([...replies.keys()], [run]);
    assert.notEqual(finish(long), null);
  });

  test(`${kind}: passes between its steps do not change its result`, () => {
    const quiet = openQueue();
    const expected = quiet.finish(quiet.submit(kind, 1, more));
    const { queue, replies, submit } = openQueue();
    const long = submit(kind, 1, more);
    for (let seed = 2; !replies.has(long); seed++) {
      queue.step();
      const run = submit("run", seed, { edits: { ...noEdits, beta: seed, hiddenPatches: [seed % 6] } });
      queue.step();
      assert.ok(replies.has(run));
    }
    assert.deepEqual(replies.get(long), expected);
  });

  test(`${kind}: a newer one replaces it after it has begun`, () => {
    const { queue, replies, submit, finish } = openQueue();
    const old = submit(kind, 1, more);
    queue.step();
    const newer = submit(kind, 2, more);
    assert.equal(replies.get(old), null);
    const fresh = openQueue();
    assert.deepEqual(finish(newer), fresh.finish(fresh.submit(kind, 2, more)));
  });
}

test("only requests of the same kind replace each other", () => {
  const { replies, submit, finish } = openQueue();
  const ids = [
    submit("run"),
    submit("headSteps", 1, { layer: "pool.attn", head: 0 }),
    submit("attribute", 1, { method: "mean", target: 0 }),
    submit("attribute", 1, { method: "rollout", target: 0 }),
    submit("attribute", 1, { method: "occlusion", target: 0 }),
    submit("headEffects", 1, { target: 0 }),
  ];
  assert.equal(replies.size, 0);
  assert.ok(ids.every((id) => finish(id) !== null));
});

test("an outdated pass is not computed", () => {
  const { queue, replies, submit } = openQueue();
  const ids = [1, 2, 3].map((seed) => submit("run", seed));
  assert.deepEqual([...replies], [[ids[0], null], [ids[1], null]]);
  queue.step();
  assert.notEqual(replies.get(ids[2]), null);
});

test("an error is the answer to its own request only", () => {
  const { finish, submit } = openQueue();
  const bad = submit("headEffects", 1, { target: 9 });
  const good = submit("run");
  assert.equal(finish(good).logits.length, 4);
  assert.match(finish(bad), /9/);
  assert.notEqual(finish(submit("headEffects", 1, { target: 0 })), null);
});
