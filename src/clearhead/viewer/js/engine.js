/**
 * Engines: whatever computes passes for the viewer. `createEngine` computes in JavaScript, in a Worker where possible;
 * `createTraceEngine` shows a recorded pass.
 */

import { meanAttention, rolloutAttention } from "./attribution.js";
import { JobQueue } from "./jobs.js";
import { loadVision } from "./loading.js";

/** @typedef {import("./jobs.js").JobReply} JobReply */
/** @typedef {import("./jobs.js").JobRequest} JobRequest */
/** @typedef {import("./types.js").Description} Description */
/** @typedef {import("./types.js").Edits} Edits */
/** @typedef {import("./types.js").Engine} Engine */
/** @typedef {import("./types.js").LayerWeights} LayerWeights */
/** @typedef {import("./types.js").Tensor} Tensor */
/** @typedef {import("./types.js").Tensors} Tensors */

/** @typedef {{request: JobRequest, inWorker: boolean, resolve: (value: any) => void, reject: (error: Error) => void}}
 * PendingCall */

/** @type {Readonly<Edits>} */
export const noEdits = Object.freeze({ heads: [], hiddenPatches: [], maskedPatches: [], beta: null });

/**
 * An engine for a description of kind "model". Throws an Error if the weights do not fit the config.
 *
 * It computes in the Worker that `spawnWorker` returns. Until the Worker is ready, passes are computed on the main
 * thread, so that the first one does not wait. Without a Worker (if `spawnWorker` returns null or throws, or if the
 * Worker fails to start), everything is computed there.
 * @param {{description: Description, tensors: Tensors, spawnWorker?: (() => Worker | null) | null}} options
 * @returns {Engine}
 */
export function createEngine({ description, tensors, spawnWorker = null }) {
  const { config, input } = description;
  if (config === null || input === null) {
    throw new Error("a model needs a config and an input, which the description does not have");
  }
  const weights = new Map([...tensors].filter(([name]) => name.startsWith("model.")));
  const queue = new JobQueue(loadVision(config, weights, input), receive);
  /** @type {Map<number, PendingCall>} */
  const pending = new Map();
  let isReady = false;
  let lastId = 0;
  let worker = startWorker();

  /** @returns {Worker | null} */
  function startWorker() {
    let started = null;
    try {
      started = spawnWorker === null ? null : spawnWorker();
    } catch {
      return null; // some browsers refuse a Worker to a file
    }
    if (started !== null) {
      started.onmessage = ({ data }) => {
        if (data.isReady) {
          isReady = true;
        } else {
          receive(data);
        }
      };
      started.onerror = (event) => {
        event.preventDefault();
        stopWorker();
        pending.forEach((call) => {
          if (call.inWorker) {
            call.inWorker = false;
            queue.submit(call.request);
          }
        });
      };
      started.postMessage({ kind: "load", config, input, tensors: weights });
    }
    return started;
  }

  function stopWorker() {
    worker?.terminate();
    worker = null;
  }

  /** @param {JobReply} reply */
  function receive({ id, value, error }) {
    const call = pending.get(id);
    pending.delete(id);
    if (error !== undefined) {
      call?.reject(new Error(error));
    } else {
      call?.resolve(value);
    }
  }

  /**
   * @param {Omit<JobRequest, "id">} job
   * @returns {Promise<any>}
   */
  function ask(job) {
    const request = { ...job, id: ++lastId };
    const inWorker = worker !== null && (isReady || job.kind !== "run");
    if (job.kind === "run") {
      // A pass that was begun on the other side is outdated.
      pending.forEach((call, id) => {
        if (call.request.kind === "run" && call.inWorker !== inWorker) {
          receive({ id, value: null });
        }
      });
    }
    return new Promise((resolve, reject) => {
      pending.set(request.id, { request, inWorker, resolve, reject });
      if (inWorker) {
        worker?.postMessage(request);
      } else {
        queue.submit(request);
      }
    });
  }

  return {
    canRun: true,
    run: (pixels, edits) => ask({ kind: "run", pixels, edits }),
    headEffects: (pixels, edits, target) => ask({ kind: "headEffects", pixels, edits, target }),
    attribute: (pixels, edits, method, target) => ask({ kind: "attribute", pixels, edits, method, target }),
    headSteps: (pixels, edits, layer, head) => ask({ kind: "headSteps", pixels, edits, layer, head }),
    close() {
      stopWorker();
      queue.close();
      pending.forEach(({ resolve }) => resolve(null));
      pending.clear();
    },
  };
}

/**
 * An engine for a description of kind "trace": it returns what was recorded and computes nothing but mean and rollout.
 * @param {Description} description
 * @param {Tensors} tensors
 * @returns {Engine}
 */
export function createTraceEngine(description, tensors) {
  const { grid, config } = description;
  const hasClassToken = config ? config.pooling === "cls" : description.num_prefix_tokens > 0;

  /**
   * @param {Uint8Array} pixels one of the recorded inputs, or anything for the first one
   * @returns {LayerWeights[]}
   */
  function layersOf(pixels) {
    const index = recordedIndex(tensors.get("trace.pixels"), pixels);
    return description.layers.map(({ name }, i) => {
      const tensor = tensors.get(`trace.${i}`);
      if (tensor === undefined || tensor.shape.length !== 4) {
        throw new Error(`the file has no weights trace.${i} of the layer ${name}`);
      }
      const [, heads, queries, keys] = tensor.shape;
      const size = heads * queries * keys;
      const weights = Float32Array.from(tensor.data.subarray(index * size, (index + 1) * size));
      return { name, heads, queries, keys, weights };
    });
  }

  /**
   * @param {string} what
   * @returns {Promise<never>}
   */
  async function refuse(what) {
    throw new Error(`${what} needs the model; this is a recorded pass`);
  }

  return {
    canRun: false,
    async run(pixels, edits) {
      if (edits.heads.length || edits.hiddenPatches.length || edits.maskedPatches.length || edits.beta !== null) {
        return refuse("an edit");
      }
      const layers = layersOf(pixels);
      const logits = tensors.get("trace.logits");
      if (logits === undefined) {
        return { logits: new Float32Array(0), layers };
      }
      const index = recordedIndex(tensors.get("trace.pixels"), pixels);
      const numClasses = logits.shape[logits.shape.length - 1];
      return { logits: Float32Array.from(logits.data.subarray(index * numClasses, (index + 1) * numClasses)), layers };
    },
    headEffects: () => refuse("the effect of a head"),
    headSteps: () => refuse("the arithmetic of a head"),
    async attribute(pixels, edits, method, target) {
      void edits, target;
      if (method !== "mean" && method !== "rollout") {
        return refuse(method);
      }
      if (grid === null) {
        throw new Error("an attribution to patches needs a grid of patches, which the trace does not have");
      }
      const readout = { hasClassToken, patches: grid[0] * grid[1] };
      const patches = (method === "mean" ? meanAttention : rolloutAttention)(layersOf(pixels), readout);
      return { method, patches };
    },
    close() {},
  };
}

/**
 * The index of the recorded input with these pixels; 0 if there is none.
 * @param {Tensor | undefined} recorded (B,C,height,width)
 * @param {Uint8Array} pixels
 */
function recordedIndex(recorded, pixels) {
  const count = recorded === undefined || pixels.length === 0 ? 0 : recorded.data.length / pixels.length;
  for (let i = 1; i < count; i++) {
    const start = i * pixels.length;
    if (pixels.every((value, j) => value === recorded?.data[start + j])) {
      return i;
    }
  }
  return 0;
}
