/** Requests to the local server: what a page says if they fail. */

import assert from "node:assert/strict";
import { afterEach, test } from "node:test";
import { remoteEngine } from "../../src/clearhead/viewer/js/remote.js";
import { request } from "../../src/clearhead/viewer/js/server.js";

const { fetch } = globalThis;
afterEach(() => (globalThis.fetch = fetch));

const EDITS = { heads: [], hiddenPatches: [], maskedPatches: [], beta: null };

test("a server that has stopped is named, not the browser's own error", async () => {
  globalThis.fetch = () => Promise.reject(new TypeError("Failed to fetch"));
  await assert.rejects(request("api/models"), /clearhead open/);
  await assert.rejects(remoteEngine("api/models/1").run(new Uint8Array(4), EDITS), /clearhead open/);
});

test("the server's own sentence is passed on, or else its status", async () => {
  globalThis.fetch = async () => new Response(JSON.stringify({ error: "No such model." }), { status: 404 });
  await assert.rejects(request("api/models"), { message: "No such model." });
  globalThis.fetch = async () => new Response("", { status: 500 });
  await assert.rejects(request("api/models"), /500/);
});

test("a busy server is asked again", async () => {
  const answers = [new Response("", { status: 503, headers: { "Retry-After": "0.01" } }), new Response("ready")];
  globalThis.fetch = async () => answers.shift();
  assert.equal(await (await request("api/models")).text(), "ready");
});

test("an aborted request rejects with its reason, during a call and between two attempts", async () => {
  const during = new AbortController();
  globalThis.fetch = (_, { signal }) =>
    new Promise((_, reject) => signal.addEventListener("abort", () => reject(signal.reason)));
  const call = request("api/models", { signal: during.signal });
  during.abort();
  await assert.rejects(call, { name: "AbortError" });

  const between = new AbortController();
  globalThis.fetch = async () => new Response("", { status: 503, headers: { "Retry-After": "0.2" } });
  const waiting = request("api/models", { signal: between.signal });
  setTimeout(() => between.abort(), 20);
  await assert.rejects(waiting, { name: "AbortError" });
});

test("a newer call replaces an older one, which resolves with null", async () => {
  let calls = 0;
  globalThis.fetch = (_, { signal }) =>
    ++calls === 1
      ? new Promise((_, reject) => signal.addEventListener("abort", () => reject(signal.reason)))
      : Promise.reject(new TypeError("Failed to fetch"));
  const engine = remoteEngine("api/models/1");
  const older = engine.run(new Uint8Array(4), EDITS);
  const newer = engine.run(new Uint8Array(4), EDITS);
  assert.equal(await older, null);
  await assert.rejects(newer, /clearhead open/);
});
