/**
 * The engine for models that PyTorch runs on the local server.
 *
 * A request is one line of JSON, a line break, and the pixels; the answer is a safetensors file. A newer call of the
 * same kind cancels the older one, which resolves with null. If the server is busy, the call is repeated.
 */

import { parseSafetensors, parseSafetensorsMetadata } from "./safetensors.js";
import { request } from "./server.js";

/** @typedef {import("./types.js").Edits} Edits */
/** @typedef {import("./types.js").Engine} Engine */
/** @typedef {import("./types.js").LayerWeights} LayerWeights */
/** @typedef {import("./types.js").Tensor} Tensor */
/** @typedef {import("./types.js").Tensors} Tensors */

/** @typedef {{tensors: Tensors, metadata: Record<string, string>}} Answer */

/**
 * @param {string} address of the model on the server
 * @returns {Engine}
 */
export function remoteEngine(address) {
  /** @type {Map<string, AbortController>} */
  const current = new Map();

  /**
   * @param {string} call
   * @param {Uint8Array} pixels
   * @param {Edits} edits
   * @param {Record<string, string | number>} options
   * @returns {Promise<Answer | null>}
   */
  async function ask(call, pixels, edits, options = {}) {
    current.get(call)?.abort();
    const controller = new AbortController();
    current.set(call, controller);
    const header = JSON.stringify({ call, edits: { ...edits, beta: betaText(edits.beta) }, ...options });
    const body = new Blob([header, "\n", /** @type {BlobPart} */ (pixels)]);
    try {
      const answer = await request(`${address}/run`, { method: "POST", body, signal: controller.signal });
      const bytes = await answer.arrayBuffer();
      return { tensors: parseSafetensors(bytes), metadata: parseSafetensorsMetadata(bytes) };
    } catch (error) {
      if (controller.signal.aborted) return null;
      throw error;
    } finally {
      if (current.get(call) === controller) current.delete(call);
    }
  }

  return {
    canRun: true,
    async run(pixels, edits) {
      const answer = await ask("run", pixels, edits);
      return answer && { logits: floats(answer.tensors, "logits"), layers: layersOf(answer) };
    },
    async headEffects(pixels, edits, target) {
      const answer = await ask("head_effects", pixels, edits, { target });
      return answer && floats(answer.tensors, "effects");
    },
    async attribute(pixels, edits, method, target) {
      const answer = await ask("attribute", pixels, edits, { method, target });
      return answer && { method, patches: floats(answer.tensors, "patches") };
    },
    async headSteps(pixels, edits, layer, head) {
      const answer = await ask("head_steps", pixels, edits, { layer, head });
      if (!answer || !answer.tensors.has("q")) return null; // the model computes its own scores
      const mask = answer.tensors.get("mask")?.data;
      return {
        layer,
        head,
        beta: Number(answer.metadata.beta),
        q: tensor(answer.tensors, "q"),
        k: tensor(answer.tensors, "k"),
        v: tensor(answer.tensors, "v"),
        scores: tensor(answer.tensors, "scores"),
        mask: mask instanceof Uint8Array ? mask : null,
        weights: tensor(answer.tensors, "weights"),
        out: tensor(answer.tensors, "out"),
        projected: answer.tensors.get("projected") ?? null,
      };
    },
    close() {
      for (const controller of current.values()) controller.abort();
    },
  };
}

/**
 * JSON has no infinity.
 * @param {number | null} beta
 */
function betaText(beta) {
  return beta === null || Number.isFinite(beta) ? beta : String(beta);
}

/**
 * @param {Answer} answer
 * @returns {LayerWeights[]}
 */
function layersOf({ tensors, metadata }) {
  const names = /** @type {string[]} */ (JSON.parse(metadata.layers));
  return names.map((name, i) => {
    const [heads, queries, keys] = tensor(tensors, `layers.${i}`).shape;
    return { name, heads, queries, keys, weights: floats(tensors, `layers.${i}`) };
  });
}

/**
 * @param {Tensors} tensors
 * @param {string} name
 * @returns {Tensor}
 */
function tensor(tensors, name) {
  const found = tensors.get(name);
  if (!found) throw new Error(`the answer of the server has no tensor ${name}`);
  return found;
}

/**
 * @param {Tensors} tensors
 * @param {string} name
 * @returns {Float32Array}
 */
function floats(tensors, name) {
  const { data } = tensor(tensors, name);
  if (!(data instanceof Float32Array)) throw new Error(`tensor ${name} of the server must be floating-point`);
  return data;
}
