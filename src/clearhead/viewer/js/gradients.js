/**
 * placeholder
 */

/**
 * @param {import("./loading.js").Vision} vision
 * @param {import("./vit.js").VisionPass} pass
 * @param {number} target
 * @returns {{queries: number, keys: number, data: Float32Array}[]}
 */
export function attentionContributions(vision, pass, target) {
  void vision, pass, target;
  throw new Error("relevance is not available");
}
