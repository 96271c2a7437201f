/**
 * Builds a vision transformer from its config and its tensors, whose shapes are checked.
 *
 * Letters for shapes: C channels, V classes, P patches, R register tokens, L tokens, H heads, D head width, E width.
 */

import { rotaryTable, sinusoidalTable } from "./embedding.js";

/** @typedef {import("./attention.js").AttentionLayer} AttentionLayer */
/** @typedef {import("./embedding.js").Convolution} Convolution */
/** @typedef {import("./embedding.js").PatchEmbed} PatchEmbed */
/** @typedef {import("./tensors.js").LinearLayer} LinearLayer */
/** @typedef {import("./tensors.js").NormLayer} NormLayer */
/** @typedef {import("./types.js").InputSpec} InputSpec */
/** @typedef {import("./types.js").Tensors} Tensors */

/**
 * An MLP: fc2(activation(fc1(x))), or down(silu(gate(x)) * up(x)); `gate` is null for the first kind.
 * @typedef {{activation: "gelu" | "relu" | "swiglu", gate: LinearLayer | null, up: LinearLayer, down: LinearLayer}} Mlp
 */

/**
 * @typedef {object} Block
 * @property {boolean} normFirst pre-norm, or no norm at all
 * @property {NormLayer | null} norm1
 * @property {NormLayer | null} norm2
 * @property {AttentionLayer} attn
 * @property {Mlp} mlp
 * @property {Float32Array | null} scale1 layer scale of attention
 * @property {Float32Array | null} scale2 layer scale of the MLP
 */

/**
 * @typedef {object} Vision
 * @property {InputSpec} input
 * @property {number} patchSize
 * @property {number} width E
 * @property {number} patches P
 * @property {number} prefix class token and register tokens
 * @property {number} registers R
 * @property {"cls" | "mean" | "attention"} pooling
 * @property {PatchEmbed} patchEmbed
 * @property {Float32Array | null} positions added to the patches (P,E)
 * @property {Float32Array | null} angles rotary angles (L,D/2)
 * @property {Float32Array} prefixTokens (prefix,E)
 * @property {NormLayer | null} embedNorm
 * @property {Block[]} blocks
 * @property {NormLayer | null} norm after the last block
 * @property {Float32Array | null} query of attention pooling (E)
 * @property {AttentionLayer | null} pool attention pooling
 * @property {Mlp | LinearLayer} head
 * @property {number} classes V
 */

/** Reads tensors by name and checks their shapes. */
class WeightReader {
  /**
   * @param {Tensors} tensors
   * @param {Record<string, any>} config
   */
  constructor(tensors, config) {
    this.tensors = tensors;
    this.config = config;
  }

  /**
   * @param {string} name
   * @param {(number | null)[]} shape null where any size is accepted
   */
  tensor(name, shape) {
    const tensor = this.tensors.get(`model.${name}`);
    if (tensor === undefined) {
      throw new Error(`the file has no tensor model.${name}, which the config requires`);
    }
    const fits = tensor.shape.length === shape.length && shape.every((n, i) => n === null || n === tensor.shape[i]);
    if (!fits || !(tensor.data instanceof Float32Array)) {
      const expected = shape.map((n) => n ?? "any").join(", ");
      const received = tensor.shape.join(", ");
      throw new Error(`model.${name} must be floating point of shape (${expected}), got shape (${received})`);
    }
    return { shape: tensor.shape, data: tensor.data };
  }

  /**
   * @param {string} name
   * @param {...number} shape
   */
  array(name, ...shape) {
    return this.tensor(name, shape).data;
  }

  /**
   * @param {string} name
   * @param {number} inputs
   * @param {number} outputs
   * @param {boolean} hasBias
   * @returns {LinearLayer}
   */
  linear(name, inputs, outputs, hasBias = true) {
    const weight = this.array(`${name}.weight`, outputs, inputs);
    return { weight, bias: hasBias ? this.array(`${name}.bias`, outputs) : null, inputs, outputs };
  }

  /**
   * @param {string} name
   * @param {number} width
   * @returns {NormLayer}
   */
  norm(name, width) {
    const { norm_layer: kind, norm_eps: eps, bias } = this.config;
    const hasBias = kind === "layernorm" && bias;
    const weight = this.array(`${name}.weight`, width);
    return { kind, weight, bias: hasBias ? this.array(`${name}.bias`, width) : null, eps, width };
  }

  /**
   * @param {string} name
   * @param {number} inputs
   * @param {1 | 2} stride
   * @param {boolean} hasBias
   * @returns {Convolution}
   */
  convolution(name, inputs, stride, hasBias) {
    const { shape, data } = this.tensor(`${name}.weight`, [null, inputs, 3, 3]);
    const outputs = shape[0];
    const weight = new Float32Array(data.length); // (outputs,C,3,3) -> (outputs,3,3,C)
    for (let i = 0; i < outputs * inputs; i++) {
      for (let position = 0; position < 9; position++) {
        weight[(Math.floor(i / inputs) * 9 + position) * inputs + (i % inputs)] = data[i * 9 + position];
      }
    }
    return { weight, bias: hasBias ? this.array(`${name}.bias`, outputs) : null, inputs, outputs, stride };
  }

  /**
   * @param {string} name
   * @param {{kvHeads: number, hasBias: boolean, hasNorm: boolean, hasProjection: boolean, beta: number | null}} options
   * @returns {AttentionLayer}
   */
  attention(name, options) {
    const { width, num_heads: heads } = this.config;
    const { kvHeads, hasBias, hasNorm } = options;
    const headDim = width / heads;
    return {
      name,
      heads,
      kvHeads,
      headDim,
      beta: options.beta ?? 1 / Math.sqrt(headDim),
      q: this.linear(`${name}.q_proj`, width, width, hasBias),
      k: this.linear(`${name}.k_proj`, width, kvHeads * headDim, hasBias),
      v: this.linear(`${name}.v_proj`, width, kvHeads * headDim, hasBias),
      out: options.hasProjection ? this.linear(`${name}.out_proj`, width, width, hasBias) : null,
      qNorm: hasNorm ? this.norm(`${name}.q_norm`, headDim) : null,
      kNorm: hasNorm ? this.norm(`${name}.k_norm`, headDim) : null,
    };
  }

  /**
   * @param {string} name
   * @param {number} hidden
   * @param {number} outputs
   * @param {boolean} hasBias
   * @returns {Mlp}
   */
  mlp(name, hidden, outputs, hasBias) {
    const { width, activation } = this.config;
    const isGated = activation === "swiglu";
    const [up, down] = isGated ? ["up_proj", "down_proj"] : ["fc1", "fc2"];
    return {
      activation,
      gate: isGated ? this.linear(`${name}.gate_proj`, width, hidden, hasBias) : null,
      up: this.linear(`${name}.${up}`, width, hidden, hasBias),
      down: this.linear(`${name}.${down}`, hidden, outputs, hasBias),
    };
  }
}

/** the values that the engine knows for each option of VisionConfig */
const KNOWN_OPTIONS = {
  patch_embed: ["patch", "conv", "conv-stem"],
  pos_embed: ["learned", "sinusoidal", "rotary", "none"],
  pooling: ["cls", "mean", "attention"],
  norm: ["pre", "post", "none"],
  norm_layer: ["layernorm", "rmsnorm"],
  activation: ["gelu", "relu", "swiglu"],
};

/**
 * @param {Record<string, any>} config VisionConfig.to_dict()
 * @param {InputSpec} input
 */
function checkConfig(config, input) {
  for (const [option, known] of Object.entries(KNOWN_OPTIONS)) {
    if (!known.includes(config[option])) {
      throw new Error(`${option} must be one of ${known.join(", ")}, got ${JSON.stringify(config[option])}`);
    }
  }
  for (const option of ["width", "depth", "num_heads", "patch_size", "num_classes", "in_channels"]) {
    if (!Number.isSafeInteger(config[option]) || config[option] < 1) {
      throw new Error(`${option} must be a positive integer, got ${JSON.stringify(config[option])}`);
    }
  }
  const { patch_size: size, in_channels: channels } = config;
  if (input.channels !== channels) {
    throw new Error(`the model takes images with ${channels} channels, got an input with ${input.channels}`);
  }
  if (input.height % size || input.width % size) {
    throw new Error(`height and width must be multiples of ${size}, got ${input.height} x ${input.width}`);
  }
}

/**
 * A vision transformer, ready for `runVision`.
 * @param {Record<string, any>} config VisionConfig.to_dict()
 * @param {Tensors} tensors "model.<state-dict key>"
 * @param {InputSpec} input
 * @returns {Vision}
 */
export function loadVision(config, tensors, input) {
  checkConfig(config, input);
  const reader = new WeightReader(tensors, config);
  const { width, depth, num_heads: heads, patch_size: patchSize, pos_embed: posEmbed, pooling } = config;
  const rows = input.height / patchSize;
  const columns = input.width / patchSize;
  const registers = config.num_register_tokens ?? 0;
  const prefix = registers + (pooling === "cls" ? 1 : 0);
  const poolOptions = { kvHeads: heads, hasBias: true, hasNorm: false, hasProjection: true, beta: null };
  let positions = null;
  if (posEmbed === "learned") {
    positions = reader.array("pos_embed.table", rows * columns, width);
  } else if (posEmbed === "sinusoidal") {
    positions = sinusoidalTable(rows, columns, width);
  }
  return {
    input,
    patchSize,
    width,
    patches: rows * columns,
    prefix,
    registers,
    pooling,
    patchEmbed: loadPatchEmbed(reader),
    positions,
    angles: posEmbed === "rotary" ? rotaryTable(rows, columns, width / heads, prefix) : null,
    prefixTokens: loadPrefixTokens(reader, registers),
    embedNorm: config.embed_norm ? reader.norm("embed_norm", width) : null,
    blocks: Array.from({ length: depth }, (_, i) => loadBlock(reader, i)),
    norm: config.norm === "pre" ? reader.norm("norm", width) : null,
    query: pooling === "attention" ? reader.array("pool.query", width) : null,
    pool: pooling === "attention" ? reader.attention("pool.attn", poolOptions) : null,
    head: config.head_mlp_dim
      ? reader.mlp("head", config.head_mlp_dim, config.num_classes, true)
      : reader.linear("head", width, config.num_classes),
    classes: config.num_classes,
  };
}

/**
 * @param {WeightReader} reader
 * @returns {PatchEmbed}
 */
function loadPatchEmbed(reader) {
  const { patch_embed: kind, patch_size: size, in_channels: channels, width } = reader.config;
  if (kind === "patch") {
    return { kind, proj: reader.linear("patch_embed.proj", channels * size * size, width) };
  }
  let inputs = channels;
  const numStages = Math.round(Math.log2(size));
  const convolutions = Array.from({ length: numStages }, (_, i) => {
    const name = `patch_embed.stages.${i}`;
    const conv1 =
      kind === "conv"
        ? reader.convolution(name, inputs, 2, true)
        : reader.convolution(`${name}.conv1`, inputs, 1, false);
    inputs = conv1.outputs;
    return { name, conv1 };
  });
  if (inputs !== width) {
    throw new Error(`the last stage of the patch embedding must have width ${width}, got ${inputs}`);
  }
  if (kind === "conv") {
    return { kind, stages: convolutions.map(({ conv1 }) => conv1) };
  }
  const stages = convolutions.map(({ name, conv1 }) => {
    return { conv1, conv2: reader.convolution(`${name}.conv2`, conv1.outputs, 1, false) };
  });
  return { kind: "conv-stem", stages };
}

/**
 * The class token, then the register tokens: (prefix,E)
 * @param {WeightReader} reader
 * @param {number} registers
 */
function loadPrefixTokens(reader, registers) {
  const { width, pooling } = reader.config;
  const tokens = [];
  if (pooling === "cls") {
    tokens.push(...reader.array("pool.cls_token", width));
  }
  if (registers) {
    tokens.push(...reader.array("registers.tokens", registers, width));
  }
  return Float32Array.from(tokens);
}

/**
 * @param {WeightReader} reader
 * @param {number} index
 * @returns {Block}
 */
function loadBlock(reader, index) {
  const { config } = reader;
  const { width, num_heads: heads, activation, bias } = config;
  const hasNorms = config.norm !== "none";
  const hasScale = config.layer_scale !== null && config.layer_scale !== undefined;
  const hidden = config.mlp_dim ?? (activation === "swiglu" ? Math.floor((8 * width) / 3) : 4 * width);
  const name = `blocks.${index}`;
  return {
    normFirst: config.norm !== "post",
    norm1: hasNorms ? reader.norm(`${name}.norm1`, width) : null,
    norm2: hasNorms ? reader.norm(`${name}.norm2`, width) : null,
    attn: reader.attention(`${name}.attn`, {
      kvHeads: config.num_kv_heads ?? heads,
      hasBias: bias,
      hasNorm: config.qk_norm,
      hasProjection: config.output_projection,
      beta: config.beta,
    }),
    mlp: reader.mlp(`${name}.mlp`, hidden, width, bias),
    scale1: hasScale ? reader.array(`${name}.ls1.gamma`, width) : null,
    scale2: hasScale ? reader.array(`${name}.ls2.gamma`, width) : null,
  };
}
