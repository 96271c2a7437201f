/**
 * The part of the engine that runs inside of a Worker: it receives the weights once, then requests.
 */

import { JobQueue } from "./jobs.js";
import { loadVision } from "./loading.js";

/** @typedef {import("./jobs.js").JobReply} JobReply */
/** @typedef {import("./jobs.js").JobRequest} JobRequest */
/** @typedef {import("./types.js").InputSpec} InputSpec */
/** @typedef {import("./types.js").Tensors} Tensors */

/** @typedef {{kind: "load", config: Record<string, any>, input: InputSpec, tensors: Tensors}} LoadMessage */

/**
 * @typedef {object} WorkerScope
 * @property {((event: {data: any}) => void) | null} onmessage
 * @property {(message: any, transfer: ArrayBuffer[]) => void} postMessage
 */

/**
 * Answers the messages of `createEngine`.
 * @param {WorkerScope} scope the global scope of a Worker
 */
export function serveEngine(scope) {
  /** @type {JobQueue | null} */
  let queue = null;
  scope.onmessage = ({ data }) => {
    /** @type {LoadMessage | JobRequest} */
    const message = data;
    if (message.kind === "load") {
      const vision = loadVision(message.config, message.tensors, message.input);
      queue = new JobQueue(vision, (reply) => scope.postMessage(reply, buffersOf(reply.value)));
      scope.postMessage({ isReady: true }, []);
    } else if (queue !== null) {
      queue.submit(message);
    }
  };
}

/**
 * The memory of all arrays in a value, which is moved to the receiver instead of copied.
 * @param {any} value
 * @returns {ArrayBuffer[]}
 */
function buffersOf(value) {
  if (ArrayBuffer.isView(value)) {
    return [/** @type {ArrayBuffer} */ (value.buffer)];
  }
  return value !== null && typeof value === "object" ? Object.values(value).flatMap(buffersOf) : [];
}

if ("WorkerGlobalScope" in globalThis) {
  serveEngine(/** @type {WorkerScope} */ (/** @type {unknown} */ (globalThis)));
}
