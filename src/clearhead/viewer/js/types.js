/**
 * The types that the modules of the viewer share. This file contains no code.
 *
 * A viewer shows a *description* (JSON) and *tensors* (a safetensors file). Hosts differ only in how they deliver
 * both: script elements of an HTML file, two requests to the local server, or two traits of a notebook widget.
 *
 * Letters for shapes: C channels, V classes, P patches, L tokens, H heads, Q queries, K keys, D head width, E width.
 */

/**
 * What is shown. Python writes it; see `clearhead.viewer`.
 * @typedef {object} Description
 * @property {1} format
 * @property {"model" | "live" | "trace"} kind
 *   model: config and weights are in the tensors, and JavaScript computes the forward pass;
 *   live: the server runs the model in PyTorch; trace: one recorded pass, nothing can be computed
 * @property {string} title name of the run, the model or the trace
 * @property {string} source Python expression of the model, such as `clearhead.open_run("runs/mine").model`
 * @property {InputSpec | null} input null if the input is not an image
 * @property {string[]} classes names of the V classes, or [] if they are unknown
 * @property {[number, number] | null} grid rows and columns of patches; null if tokens are not patches of a grid
 * @property {number} num_prefix_tokens tokens before the patches: class token and register tokens
 * @property {LayerInfo[]} layers in order of execution; for kind "live" it may be [] until the first pass
 * @property {string[]} unresolved attention of the pass that could not be recorded, one line each
 * @property {Record<string, any> | null} config the model's config (VisionConfig.to_dict()), for kind "model"
 * @property {string[] | null} [tokens] labels of the tokens, for sequences
 */

/**
 * How an image enters the model: normalized = (pixel / 255 - mean) / std, per channel.
 * @typedef {object} InputSpec
 * @property {number} channels 1 or 3
 * @property {number} height
 * @property {number} width
 * @property {number[]} mean
 * @property {number[]} std
 * @property {number[]} background pixel value (0 to 255) per channel that hides a patch
 * @property {boolean} draw whether visitors can draw: gray digits, white on black
 * @property {number} patch_size
 */

/**
 * @typedef {object} LayerInfo
 * @property {string} name module path, such as "blocks.1.attn" or "pool.attn"
 * @property {string} kernel
 * @property {number} heads
 * @property {number} queries
 * @property {number} keys
 * @property {string} note
 */

/**
 * A tensor of a safetensors file. float16 and bfloat16 are converted to float32.
 * @typedef {object} Tensor
 * @property {number[]} shape
 * @property {Float32Array | Uint8Array | Int32Array} data row-major
 */

/** @typedef {Map<string, Tensor>} Tensors names: "model.<state-dict key>", "examples.pixels" (N,C,height,width) uint8,
 * "examples.labels" (N) int32, "examples.logits" (N,V), "trace.<layer index>" (B,H,Q,K), "trace.pixels"
 * (B,C,height,width) uint8, "trace.logits" (B,V) */

/**
 * Interventions on a forward pass. `noEdits` of engine.js has none.
 * @typedef {object} Edits
 * @property {HeadEdit[]} heads
 * @property {number[]} hiddenPatches indices of patches whose pixels are replaced by the background
 * @property {number[]} maskedPatches indices of patches that no query may attend to, in any layer
 * @property {number | null} beta inverse temperature of all attention layers; null: the model's own. May be infinite
 */

/** @typedef {{layer: string, head: number, pattern: "zero" | "uniform"}} HeadEdit */

/**
 * The result of a forward pass.
 * @typedef {object} Result
 * @property {Float32Array} logits (V)
 * @property {LayerWeights[]} layers in order of execution
 */

/** @typedef {{name: string, heads: number, queries: number, keys: number, weights: Float32Array}} LayerWeights
 * weights (H,Q,K) */

/**
 * All steps of one head, for the panel that shows its arithmetic.
 * @typedef {object} HeadSteps
 * @property {string} layer
 * @property {number} head
 * @property {number} beta
 * @property {Tensor} q (Q,D)
 * @property {Tensor} k (K,D)
 * @property {Tensor} v (K,D)
 * @property {Tensor} scores q kᵀ (Q,K)
 * @property {Uint8Array | null} mask (Q*K) 1 = may attend
 * @property {Tensor} weights softargmax(beta scores) (Q,K), after edits
 * @property {Tensor} out weights v (Q,D)
 * @property {Tensor | null} projected the head's part of W_O out (Q,E), null without output projection
 */

/**
 * An attribution of the output to patches, or to pairs of tokens.
 * @typedef {object} Attribution
 * @property {"mean" | "rollout" | "relevance" | "occlusion"} method
 * @property {Float32Array} patches (P)
 */

/**
 * Whatever computes passes: JavaScript in a worker, PyTorch on the server, or a recorded trace. Pixels are uint8
 * (C,height,width), before normalization. Only the newest call of each kind must be answered: `run` may resolve an
 * outdated call with null.
 * @typedef {object} Engine
 * @property {boolean} canRun false for a recorded trace: only `run` without edits on its own input works
 * @property {(pixels: Uint8Array, edits: Edits) => Promise<Result | null>} run
 * @property {(pixels: Uint8Array, edits: Edits, target: number) => Promise<Float32Array | null>} headEffects
 *   probability of class `target` with each head set to zero, minus the probability without: one number per head, layer
 *   after layer
 * @property {(pixels: Uint8Array, edits: Edits, method: Attribution["method"], target: number) => Promise<Attribution | null>} attribute
 * @property {(pixels: Uint8Array, edits: Edits, layer: string, head: number) => Promise<HeadSteps | null>} headSteps
 * @property {() => void} close
 */

/**
 * What the host passes to `render`, as anywidget defines it. Traits that we use: `description` (Description),
 * `tensors` (bytes of a safetensors file, as DataView, ArrayBuffer or Uint8Array) and `state` (string, the hash).
 * @typedef {object} WidgetModel
 * @property {(name: string) => any} get
 * @property {(name: string, value: any) => void} set
 * @property {(event: string, callback: () => void) => void} on
 * @property {(event: string, callback: () => void) => void} off
 * @property {() => void} save_changes
 */

export {};
