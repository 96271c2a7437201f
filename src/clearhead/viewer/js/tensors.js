/**
 * Arithmetic on matrices in typed arrays: row-major, float32 in memory, summed in float64.
 *
 * Each element of a product is summed in the same order, whatever its position. Hence equal inputs give equal outputs,
 * and ties stay ties, which an infinite beta shares.
 */

/** @typedef {{weight: Float32Array, bias: Float32Array | null, inputs: number, outputs: number}} LinearLayer */
/** @typedef {{kind: "layernorm" | "rmsnorm", weight: Float32Array, bias: Float32Array | null, eps: number,
 * width: number}} NormLayer */

/**
 * Buffers by name. A buffer is allocated when it is first asked for and reused by later passes.
 */
export class Workspace {
  constructor() {
    /** @type {Map<string, Float32Array>} */
    this.buffers = new Map();
  }

  /**
   * @param {string} name
   * @param {number} size
   * @returns {Float32Array} whatever an earlier pass has left in it
   */
  floats(name, size) {
    let buffer = this.buffers.get(name);
    if (buffer === undefined || buffer.length !== size) {
      buffer = new Float32Array(size);
      this.buffers.set(name, buffer);
    }
    return buffer;
  }
}

/**
 * A matrix inside of an array: element (i, j) is data[start + i * stride + j].
 * @typedef {{data: Float32Array, start: number, stride: number}} MatrixView
 */

/**
 * @param {Float32Array} data
 * @param {number} stride
 * @param {number} start
 * @returns {MatrixView}
 */
export function matrixView(data, stride, start = 0) {
  return { data, start, stride };
}

/**
 * out = a bᵀ + bias: out (rows, columns), a (rows, inner), b (columns, inner), bias (columns).
 *
 * Four rows of a meet four rows of b at a time, so that 16 products need 8 loads.
 * @param {MatrixView} out
 * @param {MatrixView} a
 * @param {MatrixView} b
 * @param {number} rows
 * @param {number} inner
 * @param {number} columns
 * @param {Float32Array | null} bias
 */
export function matmul(out, a, b, rows, inner, columns, bias = null) {
  const blockRows = rows - (rows % 4);
  const blockColumns = columns - (columns % 4);
  for (let i = 0; i < blockRows; i += 4) {
    for (let j = 0; j < blockColumns; j += 4) {
      block4x4(out, a, b, i, j, inner, bias);
    }
  }
  dotProducts(out, a, b, 0, blockRows, blockColumns, columns, inner, bias);
  dotProducts(out, a, b, blockRows, rows, 0, columns, inner, bias);
}

/**
 * @param {MatrixView} out
 * @param {MatrixView} a
 * @param {MatrixView} b
 * @param {number} i first row
 * @param {number} j first column
 * @param {number} inner
 * @param {Float32Array | null} bias
 */
function block4x4(out, a, b, i, j, inner, bias) {
  const x = a.data;
  const y = b.data;
  const x0 = a.start + i * a.stride;
  const x1 = x0 + a.stride;
  const x2 = x1 + a.stride;
  const x3 = x2 + a.stride;
  const y0 = b.start + j * b.stride;
  const y1 = y0 + b.stride;
  const y2 = y1 + b.stride;
  const y3 = y2 + b.stride;
  let s00 = 0, s01 = 0, s02 = 0, s03 = 0;
  let s10 = 0, s11 = 0, s12 = 0, s13 = 0;
  let s20 = 0, s21 = 0, s22 = 0, s23 = 0;
  let s30 = 0, s31 = 0, s32 = 0, s33 = 0;
  for (let p = 0; p < inner; p++) {
    const u0 = x[x0 + p], u1 = x[x1 + p], u2 = x[x2 + p], u3 = x[x3 + p];
    const v0 = y[y0 + p], v1 = y[y1 + p], v2 = y[y2 + p], v3 = y[y3 + p];
    s00 += u0 * v0; s01 += u0 * v1; s02 += u0 * v2; s03 += u0 * v3;
    s10 += u1 * v0; s11 += u1 * v1; s12 += u1 * v2; s13 += u1 * v3;
    s20 += u2 * v0; s21 += u2 * v1; s22 += u2 * v2; s23 += u2 * v3;
    s30 += u3 * v0; s31 += u3 * v1; s32 += u3 * v2; s33 += u3 * v3;
  }
  const z = out.data;
  const b0 = bias ? bias[j] : 0, b1 = bias ? bias[j + 1] : 0, b2 = bias ? bias[j + 2] : 0, b3 = bias ? bias[j + 3] : 0;
  let at = out.start + i * out.stride + j;
  z[at] = s00 + b0; z[at + 1] = s01 + b1; z[at + 2] = s02 + b2; z[at + 3] = s03 + b3;
  at += out.stride;
  z[at] = s10 + b0; z[at + 1] = s11 + b1; z[at + 2] = s12 + b2; z[at + 3] = s13 + b3;
  at += out.stride;
  z[at] = s20 + b0; z[at + 1] = s21 + b1; z[at + 2] = s22 + b2; z[at + 3] = s23 + b3;
  at += out.stride;
  z[at] = s30 + b0; z[at + 1] = s31 + b1; z[at + 2] = s32 + b2; z[at + 3] = s33 + b3;
}

/**
 * The same for rows and columns that are left over by the blocks.
 * @param {MatrixView} out
 * @param {MatrixView} a
 * @param {MatrixView} b
 * @param {number} firstRow
 * @param {number} endRow
 * @param {number} firstColumn
 * @param {number} endColumn
 * @param {number} inner
 * @param {Float32Array | null} bias
 */
function dotProducts(out, a, b, firstRow, endRow, firstColumn, endColumn, inner, bias) {
  const x = a.data;
  const y = b.data;
  for (let i = firstRow; i < endRow; i++) {
    const xi = a.start + i * a.stride;
    for (let j = firstColumn; j < endColumn; j++) {
      const yj = b.start + j * b.stride;
      let sum = 0;
      for (let p = 0; p < inner; p++) {
        sum += x[xi + p] * y[yj + p];
      }
      out.data[out.start + i * out.stride + j] = sum + (bias ? bias[j] : 0);
    }
  }
}

/**
 * out = x Wᵀ + b: x (rows, inputs) -> out (rows, outputs)
 * @param {Float32Array} out
 * @param {Float32Array} x
 * @param {number} rows
 * @param {LinearLayer} layer
 */
export function applyLinear(out, x, rows, layer) {
  const { weight, bias, inputs, outputs } = layer;
  matmul(matrixView(out, outputs), matrixView(x, inputs), matrixView(weight, inputs), rows, inputs, outputs, bias);
}

/**
 * out (columns, rows) = x (rows, columns), transposed.
 * @param {Float32Array} out
 * @param {Float32Array} x
 * @param {number} rows
 * @param {number} columns
 */
export function transpose(out, x, rows, columns) {
  for (let i = 0; i < rows; i++) {
    for (let j = 0; j < columns; j++) {
      out[j * rows + i] = x[i * columns + j];
    }
  }
}

/**
 * Mean and 1 / standard deviation of one row, as its norm uses them; the mean of an RMS norm is 0.
 * @param {Float32Array} x
 * @param {number} start
 * @param {NormLayer} norm
 * @returns {[number, number]}
 */
export function rowMoments(x, start, norm) {
  const { width } = norm;
  let mean = 0;
  if (norm.kind === "layernorm") {
    for (let j = 0; j < width; j++) {
      mean += x[start + j];
    }
    mean /= width;
  }
  let squares = 0;
  for (let j = 0; j < width; j++) {
    const centered = x[start + j] - mean;
    squares += centered * centered;
  }
  return [mean, 1 / Math.sqrt(squares / width + norm.eps)];
}

/**
 * Layer norm or RMS norm of each row: x (rows, width) -> out (rows, width). `out` may be x.
 * @param {Float32Array} out
 * @param {Float32Array} x
 * @param {number} rows
 * @param {NormLayer} norm
 */
export function applyNorm(out, x, rows, norm) {
  const { weight, bias, width } = norm;
  for (let i = 0; i < rows; i++) {
    const start = i * width;
    const [mean, scale] = rowMoments(x, start, norm);
    for (let j = 0; j < width; j++) {
      out[start + j] = (x[start + j] - mean) * scale * weight[j] + (bias ? bias[j] : 0);
    }
  }
}

/**
 * out = x + gamma * branch: what a sublayer adds to the residual stream, scaled where the model has layer scale.
 * @param {Float32Array} out
 * @param {Float32Array} x
 * @param {Float32Array} branch
 * @param {Float32Array | null} gamma
 */
export function addBranch(out, x, branch, gamma) {
  if (gamma === null) {
    for (let i = 0; i < x.length; i++) {
      out[i] = x[i] + branch[i];
    }
    return;
  }
  const width = gamma.length;
  for (let i = 0; i < x.length; i++) {
    out[i] = x[i] + gamma[i % width] * branch[i];
  }
}

const ERF_STEPS = 64;
/** erf(x) is 1 in float64 from here on */
const ERF_END = 6;
/** the derivative of erf, 2/sqrt(pi) e^(-x²), at multiples of 1/64 from 0 to 6 */
const ERF_SLOPES = Float64Array.from({ length: ERF_STEPS * ERF_END + 1 }, (_, i) => {
  return (2 / Math.sqrt(Math.PI)) * Math.exp(-((i / ERF_STEPS) ** 2));
});
/** erf at the same positions: its slope times x + 2x³/3 + 4x⁵/15 + ..., whose terms are positive */
const ERF_VALUES = ERF_SLOPES.map((slope, i) => {
  const x = i / ERF_STEPS;
  let term = x;
  let sum = x;
  for (let n = 1; term > 1e-17 * sum; n++) {
    term *= (2 * x * x) / (2 * n + 1);
    sum += term;
  }
  return slope * sum;
});

/**
 * The error function, by its Taylor polynomial of degree 5 around the nearest entry of the table. It is exact to 1e-12.
 * @param {number} x
 */
export function erf(x) {
  const size = Math.abs(x);
  if (!(size < ERF_END)) {
    return Math.sign(x);
  }
  const nearest = Math.round(size * ERF_STEPS);
  const a = nearest / ERF_STEPS;
  const h = size - a;
  const aa = a * a;
  // The higher derivatives are Hermite polynomials times the slope: -2a, 4a² - 2, 12a - 8a³, 16a⁴ - 48a² + 12.
  const quartic = (16 * aa * aa - 48 * aa + 12) / 120;
  const series = 1 + h * (-a + h * ((4 * aa - 2) / 6 + h * ((a * (12 - 8 * aa)) / 24 + h * quartic)));
  return Math.sign(x) * (ERF_VALUES[nearest] + ERF_SLOPES[nearest] * h * series);
}

/** 1 / (1 + e^-x) @param {number} x */
export function sigmoid(x) {
  return 1 / (1 + Math.exp(-x));
}

/** x Φ(x), with the distribution function of the normal distribution @param {number} x */
export function gelu(x) {
  return 0.5 * x * (1 + erf(x * Math.SQRT1_2));
}

/**
 * Probabilities of the classes, the softmax of the logits.
 * @param {Float32Array} logits
 * @returns {Float32Array}
 */
export function probabilities(logits) {
  const largest = logits.reduce((a, b) => Math.max(a, b), -Infinity);
  const powers = Float64Array.from(logits, (logit) => Math.exp(logit - largest));
  const sum = powers.reduce((a, b) => a + b, 0);
  return Float32Array.from(powers, (power) => power / sum);
}
