/**
 * Requests to a model, and the order in which they are computed.
 *
 * Passes come before everything else, and the newest request of a kind replaces an older one, which is answered with
 * null. Long jobs (occlusion, head effects) consist of many passes; between two of them, newer requests are served.
 */

import { copyHeadSteps } from "./attention.js";
import {
  headEffectSteps,
  meanAttention,
  occlusionSteps,
  readoutOf,
  relevanceOf,
  rolloutAttention,
} from "./attribution.js";
import { Workspace } from "./tensors.js";
import { runVision } from "./vit.js";

/** @typedef {import("./loading.js").Vision} Vision */
/** @typedef {import("./types.js").Attribution} Attribution */
/** @typedef {import("./types.js").Edits} Edits */
/** @typedef {import("./types.js").LayerWeights} LayerWeights */
/** @typedef {import("./vit.js").VisionPass} VisionPass */

/**
 * @typedef {object} JobRequest
 * @property {number} id
 * @property {"run" | "headSteps" | "attribute" | "headEffects"} kind
 * @property {Uint8Array} pixels
 * @property {Edits} edits
 * @property {number} [target] for attribute and headEffects
 * @property {Attribution["method"]} [method] for attribute
 * @property {string} [layer] for headSteps
 * @property {number} [head] for headSteps
 */

/** @typedef {{id: number, value?: any, error?: string}} JobReply */

/** Computes requests one after another and replies to each of them exactly once. */
export class JobQueue {
  /**
   * @param {Vision} vision
   * @param {(reply: JobReply) => void} reply
   * @param {number} sliceMs milliseconds that a long job computes before newer requests are looked for
   */
  constructor(vision, reply, sliceMs = 8) {
    this.vision = vision;
    this.reply = reply;
    this.sliceMs = sliceMs;
    this.workspace = new Workspace();
    /** long jobs have buffers of their own, because passes are computed between their steps */
    this.longWorkspace = new Workspace();
    /** @type {JobRequest[]} */
    this.waiting = [];
    /** @type {{request: JobRequest, steps: Generator<undefined, any>} | null} */
    this.long = null;
    this.isScheduled = false;
    this.isClosed = false;
  }

  /** @param {JobRequest} request */
  submit(request) {
    const key = jobKey(request);
    const outdated = this.waiting.filter((other) => jobKey(other) === key);
    this.waiting = this.waiting.filter((other) => jobKey(other) !== key);
    if (this.long !== null && jobKey(this.long.request) === key) {
      outdated.push(this.long.request);
      this.long = null;
    }
    this.waiting.push(request);
    outdated.forEach(({ id }) => this.reply({ id, value: null }));
    this.schedule();
  }

  close() {
    this.isClosed = true;
  }

  schedule() {
    if (!this.isScheduled && !this.isClosed && (this.waiting.length || this.long !== null)) {
      this.isScheduled = true;
      afterEvents(() => {
        this.isScheduled = false;
        if (!this.isClosed) {
          this.step();
          this.schedule();
        }
      });
    }
  }

  /** Computes the most urgent request, or continues the long job for a while. */
  step() {
    const next = this.waiting.filter((request) => !isLong(request)).sort((a, b) => urgency(a) - urgency(b))[0];
    if (next !== undefined) {
      this.waiting = this.waiting.filter((request) => request !== next);
      this.answer(next.id, () => computeNow(this.vision, next, this.workspace));
      return;
    }
    if (this.long === null) {
      const request = this.waiting.shift();
      if (request !== undefined) {
        this.long = { request, steps: longSteps(this.vision, request, this.longWorkspace) };
      }
    }
    const long = this.long;
    if (long === null) {
      return;
    }
    const end = performance.now() + this.sliceMs;
    try {
      let state = long.steps.next();
      while (!state.done && performance.now() < end) {
        state = long.steps.next();
      }
      if (state.done) {
        this.long = null;
        this.answer(long.request.id, () => state.value);
      }
    } catch (error) {
      this.long = null;
      this.answer(long.request.id, () => {
        throw error;
      });
    }
  }

  /**
   * @param {number} id
   * @param {() => any} compute
   */
  answer(id, compute) {
    let value;
    try {
      value = compute();
    } catch (error) {
      this.reply({ id, error: error instanceof Error ? error.message : String(error) });
      return;
    }
    this.reply({ id, value });
  }
}

/**
 * A newer request with the same key replaces an older one.
 * @param {JobRequest} request
 */
function jobKey(request) {
  return request.kind === "attribute" ? `attribute ${request.method}` : request.kind;
}

/** @param {JobRequest} request */
function isLong(request) {
  return request.kind === "headEffects" || (request.kind === "attribute" && request.method === "occlusion");
}

/** @param {JobRequest} request */
function urgency(request) {
  return request.kind === "run" ? 0 : request.kind === "headSteps" ? 1 : 2;
}

/**
 * @param {Vision} vision
 * @param {JobRequest} request
 * @param {Workspace} workspace
 */
function computeNow(vision, request, workspace) {
  const { kind, pixels, edits, method, target = -1, layer, head = -1 } = request;
  if (kind === "attribute" && method === "relevance") {
    return { method, patches: relevanceOf(vision, pixels, edits, target, workspace) };
  }
  const pass = runVision(vision, pixels, edits, workspace);
  if (kind === "run") {
    return { logits: pass.logits.slice(), layers: layerWeights(pass).map(copyLayer) };
  }
  if (kind === "headSteps") {
    const state = pass.layers.find((found) => found.layer.name === layer);
    if (state === undefined || !Number.isSafeInteger(head) || head < 0 || head >= state.layer.heads) {
      throw new Error(`the model has no head ${head} in a layer ${layer}`);
    }
    return copyHeadSteps(state, head);
  }
  if (method !== "mean" && method !== "rollout") {
    throw new Error(`the method must be mean, rollout, relevance or occlusion, got ${method}`);
  }
  const aggregate = method === "mean" ? meanAttention : rolloutAttention;
  return { method, patches: aggregate(layerWeights(pass), readoutOf(vision)) };
}

/**
 * @param {Vision} vision
 * @param {JobRequest} request
 * @param {Workspace} workspace
 * @returns {Generator<undefined, any>}
 */
function* longSteps(vision, request, workspace) {
  const { kind, pixels, edits, target = -1 } = request;
  if (kind === "headEffects") {
    return yield* headEffectSteps(vision, pixels, edits, target, workspace);
  }
  return { method: "occlusion", patches: yield* occlusionSteps(vision, pixels, edits, target, workspace) };
}

/**
 * @param {VisionPass} pass
 * @returns {LayerWeights[]} whose weights belong to the pass
 */
export function layerWeights(pass) {
  return pass.layers.map(({ layer, queries, keys, weights }) => {
    return { name: layer.name, heads: layer.heads, queries, keys, weights };
  });
}

/**
 * @param {LayerWeights} layer
 * @returns {LayerWeights}
 */
function copyLayer(layer) {
  return { ...layer, weights: layer.weights.slice() };
}

/**
 * Calls back after the events that wait already. Unlike setTimeout, a message is not delayed by browsers.
 * @param {() => void} callback
 */
function afterEvents(callback) {
  const { port1, port2 } = new MessageChannel();
  port1.onmessage = () => {
    port1.close();
    callback();
  };
  port2.postMessage(null);
}
