/** Small vision transformers with random weights, for tests. */

import { loadVision } from "../../src/clearhead/viewer/js/loading.js";

/** Uniform numbers from 0 to 1, the same in every run (a linear congruential generator). */
export function randomNumbers(seed = 1) {
  let state = seed;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

export const INPUT = {
  channels: 1,
  height: 6,
  width: 9,
  mean: [0.3],
  std: [0.4],
  background: [0],
  draw: false,
  patch_size: 3,
};

export function smallConfig(changes = {}) {
  return {
    image_size: [6, 9],
    patch_size: 3,
    in_channels: 1,
    num_classes: 4,
    width: 8,
    depth: 2,
    num_heads: 2,
    num_kv_heads: null,
    qk_norm: false,
    patch_embed: "patch",
    pos_embed: "learned",
    pooling: "attention",
    num_register_tokens: 0,
    head_mlp_dim: 0,
    embed_norm: false,
    mlp_dim: 12,
    activation: "gelu",
    norm: "pre",
    norm_layer: "layernorm",
    norm_eps: 1e-5,
    layer_scale: null,
    bias: true,
    beta: null,
    output_projection: true,
    ...changes,
  };
}

/** The shape of every key of the state dict, for the patch embedding "patch". */
function shapesOf(config) {
  const { width, num_heads: heads, num_classes: classes, mlp_dim: hidden, bias } = config;
  const headDim = width / heads;
  const kvWidth = (config.num_kv_heads ?? heads) * headDim;
  const patches = (INPUT.height / INPUT.patch_size) * (INPUT.width / INPUT.patch_size);
  const shapes = new Map();
  const linear = (name, inputs, outputs, hasBias = true) => {
    shapes.set(`${name}.weight`, [outputs, inputs]);
    if (hasBias) {
      shapes.set(`${name}.bias`, [outputs]);
    }
  };
  const norm = (name, size) => {
    shapes.set(`${name}.weight`, [size]);
    shapes.set(`${name}.bias`, [size]); // RMS norms leave it unused
  };
  const attention = (name, keyWidth, hasBias) => {
    ["q_proj", "k_proj", "v_proj", "out_proj"].forEach((part) => {
      linear(`${name}.${part}`, width, part[0] === "k" || part[0] === "v" ? keyWidth : width, hasBias);
    });
    norm(`${name}.q_norm`, headDim);
    norm(`${name}.k_norm`, headDim);
  };
  const mlp = (name, size, outputs, hasBias) => {
    ["fc1", "gate_proj", "up_proj"].forEach((part) => linear(`${name}.${part}`, width, size, hasBias));
    ["fc2", "down_proj"].forEach((part) => linear(`${name}.${part}`, size, outputs, hasBias));
  };
  linear("patch_embed.proj", INPUT.channels * INPUT.patch_size ** 2, width);
  shapes.set("pos_embed.table", [patches, width]);
  shapes.set("pool.cls_token", [width]);
  shapes.set("pool.query", [width]);
  shapes.set("registers.tokens", [config.num_register_tokens, width]);
  norm("embed_norm", width);
  attention("pool.attn", width, true);
  for (let i = 0; i < config.depth; i++) {
    norm(`blocks.${i}.norm1`, width);
    norm(`blocks.${i}.norm2`, width);
    attention(`blocks.${i}.attn`, kvWidth, bias);
    mlp(`blocks.${i}.mlp`, hidden, width, bias);
    shapes.set(`blocks.${i}.ls1.gamma`, [width]);
    shapes.set(`blocks.${i}.ls2.gamma`, [width]);
  }
  norm("norm", width);
  if (config.head_mlp_dim) {
    mlp("head", config.head_mlp_dim, classes, true);
  } else {
    linear("head", width, classes);
  }
  return shapes;
}

/** Random tensors for every key that a config may require. */
export function randomTensors(config, seed = 1) {
  const random = randomNumbers(seed);
  const tensors = new Map();
  for (const [name, shape] of shapesOf(config)) {
    const size = shape.reduce((a, b) => a * b);
    const scale = shape.length > 1 ? Math.sqrt(6 / (shape[0] + shape[1])) : 0.4;
    const offset = /norm\d?\.weight|gamma/.test(name) ? 1 : 0;
    const data = Float32Array.from({ length: size }, () => offset + scale * (2 * random() - 1));
    tensors.set(`model.${name}`, { shape, data });
  }
  return tensors;
}

export function randomPixels(seed = 7, size = INPUT.height * INPUT.width) {
  const random = randomNumbers(seed);
  return Uint8Array.from({ length: size }, () => Math.floor(256 * random()));
}

export function randomVision(changes = {}) {
  const config = smallConfig(changes);
  return loadVision(config, randomTensors(config), INPUT);
}

export function largestDifference(a, b) {
  return Math.max(...Array.from(a, (value, i) => Math.abs(value - b[i])));
}
