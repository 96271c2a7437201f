/**
 * From pixels to tokens: patch embeddings (patch, conv, conv-stem) and position embeddings on a grid.
 *
 * Images are (height, width, C) here, channels last, so that the neighbors of a pixel lie side by side in memory and
 * the result of the last convolution is the matrix of tokens (P,E).
 */

import { applyLinear, matmul, matrixView } from "./tensors.js";

/** @typedef {import("./tensors.js").LinearLayer} LinearLayer */
/** @typedef {import("./tensors.js").Workspace} Workspace */
/** @typedef {import("./types.js").InputSpec} InputSpec */

/**
 * A 3x3 convolution with a padding of 1.
 * @typedef {object} Convolution
 * @property {Float32Array} weight (outputs, 9 C): row, column, channel
 * @property {Float32Array | null} bias
 * @property {number} inputs
 * @property {number} outputs
 * @property {1 | 2} stride
 */

/**
 * @typedef {{kind: "patch", proj: LinearLayer} | {kind: "conv", stages: Convolution[]} |
 *   {kind: "conv-stem", stages: {conv1: Convolution, conv2: Convolution}[]}} PatchEmbed
 */

/** @typedef {{data: Float32Array, height: number, width: number, channels: number}} FeatureMap channels last */

/**
 * The pixels with hidden patches replaced by the background.
 * @param {Uint8Array} pixels (C,height,width)
 * @param {InputSpec} input
 * @param {number} patchSize
 * @param {readonly number[]} hiddenPatches
 * @returns {Uint8Array} a copy
 */
export function hidePatches(pixels, input, patchSize, hiddenPatches) {
  const { channels, height, width, background } = input;
  const copy = pixels.slice();
  const columns = width / patchSize;
  for (const patch of hiddenPatches) {
    const top = Math.floor(patch / columns) * patchSize;
    const left = (patch % columns) * patchSize;
    for (let channel = 0; channel < channels; channel++) {
      for (let y = top; y < top + patchSize; y++) {
        const start = (channel * height + y) * width + left;
        copy.fill(background[channel], start, start + patchSize);
      }
    }
  }
  return copy;
}

/**
 * (pixel / 255 - mean) / std of each channel: (C,height,width) -> (height,width,C)
 * @param {Uint8Array} pixels
 * @param {InputSpec} input
 * @param {Workspace} workspace
 * @returns {FeatureMap}
 */
export function normalizePixels(pixels, input, workspace) {
  const { channels, height, width, mean, std } = input;
  const area = height * width;
  const data = workspace.floats("image", area * channels);
  for (let channel = 0; channel < channels; channel++) {
    for (let i = 0; i < area; i++) {
      data[i * channels + channel] = (pixels[channel * area + i] / 255 - mean[channel]) / std[channel];
    }
  }
  return { data, height, width, channels };
}

/**
 * One token for each patch: (height,width,C) -> (P,E)
 * @param {PatchEmbed} embed
 * @param {FeatureMap} image
 * @param {number} patchSize
 * @param {Workspace} workspace
 * @returns {Float32Array}
 */
export function embedPatches(embed, image, patchSize, workspace) {
  if (embed.kind === "patch") {
    const patches = cutPatches(image, patchSize, workspace);
    const rows = patches.length / embed.proj.inputs;
    const tokens = workspace.floats("patch_embed", rows * embed.proj.outputs);
    applyLinear(tokens, patches, rows, embed.proj);
    return tokens;
  }
  let x = image;
  if (embed.kind === "conv") {
    embed.stages.forEach((conv, i) => {
      x = convolve(conv, i ? reluInPlace(x) : x, `patch_embed.stages.${i}`, workspace);
    });
    return x.data;
  }
  embed.stages.forEach(({ conv1, conv2 }, i) => {
    const name = `patch_embed.stages.${i}`;
    const y = reluInPlace(maxPool(convolve(conv1, x, `${name}.conv1`, workspace), `${name}.pool`, workspace));
    x = reluInPlace(convolve(conv2, y, `${name}.conv2`, workspace));
    for (let j = 0; j < y.data.length; j++) {
      x.data[j] += y.data[j];
    }
  });
  return x.data;
}

/**
 * Patches (P, C size size), row by row; each is ordered by channel, row and column.
 * @param {FeatureMap} image
 * @param {number} size
 * @param {Workspace} workspace
 */
function cutPatches(image, size, workspace) {
  const { data, height, width, channels } = image;
  const patches = workspace.floats("patches", data.length);
  let at = 0;
  for (let top = 0; top < height; top += size) {
    for (let left = 0; left < width; left += size) {
      for (let channel = 0; channel < channels; channel++) {
        for (let y = top; y < top + size; y++) {
          for (let x = left; x < left + size; x++) {
            patches[at++] = data[(y * width + x) * channels + channel];
          }
        }
      }
    }
  }
  return patches;
}

/**
 * A 3x3 convolution as a matrix product: the 9 neighbors of each position are copied into one row (im2col).
 * @param {Convolution} conv
 * @param {FeatureMap} image
 * @param {string} name
 * @param {Workspace} workspace
 * @returns {FeatureMap}
 */
export function convolve(conv, image, name, workspace) {
  const { data, channels } = image;
  const { stride, outputs } = conv;
  const height = Math.floor((image.height - 1) / stride) + 1;
  const width = Math.floor((image.width - 1) / stride) + 1;
  const inner = 9 * channels;
  const neighbors = workspace.floats(`${name}.neighbors`, height * width * inner);
  let at = 0;
  for (let i = 0; i < height; i++) {
    for (let j = 0; j < width; j++) {
      const left = j * stride - 1;
      const first = Math.max(0, left);
      const end = Math.min(image.width, left + 3);
      for (let row = i * stride - 1; row < i * stride + 2; row++) {
        if (row < 0 || row >= image.height) {
          neighbors.fill(0, at, at + 3 * channels);
        } else {
          copyRow(neighbors, at, data, row * image.width, left, first, end, channels);
        }
        at += 3 * channels;
      }
    }
  }
  const out = workspace.floats(name, height * width * outputs);
  const weight = matrixView(conv.weight, inner);
  matmul(matrixView(out, outputs), matrixView(neighbors, inner), weight, height * width, inner, outputs, conv.bias);
  return { data: out, height, width, channels: outputs };
}

/**
 * Three neighboring pixels of a row, with zeros outside of the image.
 * @param {Float32Array} out
 * @param {number} at
 * @param {Float32Array} data
 * @param {number} rowStart position of the row's first pixel
 * @param {number} left column of the first neighbor, which may be outside of the image
 * @param {number} first first column inside of it
 * @param {number} end
 * @param {number} channels
 */
function copyRow(out, at, data, rowStart, left, first, end, channels) {
  let to = at;
  for (let i = (first - left) * channels; i > 0; i--) {
    out[to++] = 0;
  }
  const last = (rowStart + end) * channels;
  for (let from = (rowStart + first) * channels; from < last; from++) {
    out[to++] = data[from];
  }
  for (const stop = at + 3 * channels; to < stop; ) {
    out[to++] = 0;
  }
}

/**
 * The maximum over 3x3 positions, at every second row and column.
 * @param {FeatureMap} image
 * @param {string} name
 * @param {Workspace} workspace
 * @returns {FeatureMap}
 */
export function maxPool(image, name, workspace) {
  const { data, channels } = image;
  const height = Math.floor((image.height - 1) / 2) + 1;
  const width = Math.floor((image.width - 1) / 2) + 1;
  const out = workspace.floats(name, height * width * channels);
  out.fill(-Infinity);
  for (let i = 0; i < height; i++) {
    for (let j = 0; j < width; j++) {
      const at = (i * width + j) * channels;
      for (let y = Math.max(0, 2 * i - 1); y < Math.min(image.height, 2 * i + 2); y++) {
        for (let x = Math.max(0, 2 * j - 1); x < Math.min(image.width, 2 * j + 2); x++) {
          const from = (y * image.width + x) * channels;
          for (let channel = 0; channel < channels; channel++) {
            const value = data[from + channel];
            if (value > out[at + channel]) {
              out[at + channel] = value;
            }
          }
        }
      }
    }
  }
  return { data: out, height, width, channels };
}

/**
 * In place.
 * @param {FeatureMap} image
 */
function reluInPlace(image) {
  const { data } = image;
  for (let i = 0; i < data.length; i++) {
    if (data[i] < 0) {
      data[i] = 0;
    }
  }
  return image;
}

/**
 * sin(position / 10000^(2i/width)) in column 2i, cos of the same in column 2i+1.
 * @param {number} position
 * @param {number} width
 * @returns {Float32Array}
 */
function sinusoid(position, width) {
  return Float32Array.from({ length: width }, (_, column) => {
    const angle = position * 10_000 ** (-2 * Math.floor(column / 2) / width);
    return column % 2 ? Math.cos(angle) : Math.sin(angle);
  });
}

/**
 * Half of the width encodes the row, half the column: (P,E)
 * @param {number} rows
 * @param {number} columns
 * @param {number} width
 * @returns {Float32Array}
 */
export function sinusoidalTable(rows, columns, width) {
  return overGrid(rows, columns, width, (position) => sinusoid(position, width / 2));
}

/**
 * Half of the pairs of a head's dimensions rotate with the row, half with the column; tokens before the patches have no
 * position and are not rotated: (prefix + P, D/2)
 * @param {number} rows
 * @param {number} columns
 * @param {number} headDim
 * @param {number} prefix
 * @returns {Float32Array}
 */
export function rotaryTable(rows, columns, headDim, prefix) {
  const half = headDim / 2;
  const angles = overGrid(rows, columns, half, (position) => {
    return Float32Array.from({ length: half / 2 }, (_, i) => position * 10_000 ** ((-2 * i) / half));
  });
  const table = new Float32Array(prefix * half + angles.length);
  table.set(angles, prefix * half);
  return table;
}

/**
 * @param {number} rows
 * @param {number} columns
 * @param {number} width
 * @param {(position: number) => Float32Array} code (width / 2) of a row or a column
 * @returns {Float32Array} (rows columns, width)
 */
function overGrid(rows, columns, width, code) {
  const table = new Float32Array(rows * columns * width);
  for (let i = 0; i < rows; i++) {
    for (let j = 0; j < columns; j++) {
      table.set(code(i), (i * columns + j) * width);
      table.set(code(j), (i * columns + j) * width + width / 2);
    }
  }
  return table;
}
