/**
 * Drawings as strokes: their text form, their image, and MNIST's preprocessing. Pure functions.
 *
 * The pad measures 10 units per pixel of the model's input. A drawing is painted on this large raster and reduced by
 * taking the mean of each 10 x 10 block, so that the same strokes give the same pixels in every browser.
 */

/**
 * A stroke of the pen or of the eraser.
 * @typedef {object} Stroke
 * @property {boolean} erase
 * @property {number[]} points x, y, x, y, ... in units of the pad, integers
 */

/**
 * The map from the pad to the input: input = scale * pad + (dx, dy), in units.
 * @typedef {{scale: number, dx: number, dy: number}} PadTransform
 */

/** Units of the pad per pixel of the input. */
export const UNITS = 10;
/** Radius of the pen in units: MNIST's strokes are about 2.4 pixels wide. */
export const PEN_RADIUS = 12;
export const ERASER_RADIUS = 24;
/** MNIST's digits fit into a box with sides of 20 of the 28 pixels. */
const BOX_FRACTION = 20 / 28;
/** A drawing is enlarged at most this much, so that a dot does not fill the image. */
const MAX_SCALE = 2;

const DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_";
const HALF = 31;
const MAX_POINTS = 20000;

/**
 * Strokes as URL-safe text. Each stroke is "p" or "e", two characters for each coordinate of its first point, and two
 * characters for each further step, which is split where it is longer than 31 units; "." separates strokes.
 * @param {Stroke[]} strokes
 * @returns {string}
 */
export function encodeStrokes(strokes) {
  return strokes.map(encodeStroke).join(".");
}

/** @param {Stroke} stroke */
function encodeStroke({ erase, points }) {
  const pair = (/** @type {number} */ n) => DIGITS[(n >> 6) & 63] + DIGITS[n & 63];
  let [x, y] = [clampUnit(points[0]), clampUnit(points[1])];
  let text = (erase ? "e" : "p") + pair(x) + pair(y);
  for (let i = 2; i < points.length; i += 2) {
    const [toX, toY] = [clampUnit(points[i]), clampUnit(points[i + 1])];
    const steps = Math.max(1, Math.ceil(Math.max(Math.abs(toX - x), Math.abs(toY - y)) / HALF));
    const [fromX, fromY] = [x, y];
    for (let n = 1; n <= steps; n++) {
      const nextX = Math.round(fromX + ((toX - fromX) * n) / steps);
      const nextY = Math.round(fromY + ((toY - fromY) * n) / steps);
      text += DIGITS[nextX - x + HALF] + DIGITS[nextY - y + HALF];
      [x, y] = [nextX, nextY];
    }
  }
  return text;
}

/**
 * The strokes of a text; whatever cannot be read is left out.
 * @param {string} text
 * @returns {Stroke[]}
 */
export function decodeStrokes(text) {
  const strokes = [];
  let total = 0;
  for (const part of text.split(".")) {
    const codes = Array.from(part.slice(1), (c) => DIGITS.indexOf(c));
    if (!/^[pe]/.test(part) || codes.length < 4 || codes.length % 2 || codes.includes(-1)) continue;
    let [x, y] = [codes[0] * 64 + codes[1], codes[2] * 64 + codes[3]];
    const points = [x, y];
    for (let i = 4; i < codes.length; i += 2) {
      x = clampUnit(x + codes[i] - HALF);
      y = clampUnit(y + codes[i + 1] - HALF);
      points.push(x, y);
    }
    total += points.length;
    if (total > MAX_POINTS) break;
    strokes.push({ erase: part[0] === "e", points });
  }
  return strokes;
}

/** @param {number} value */
function clampUnit(value) {
  return Math.min(4095, Math.max(0, Math.round(value)));
}

/**
 * Paint strokes on a raster (height, width) of 0 and 1, after the transform. The pen keeps its width, the eraser scales.
 * @param {Stroke[]} strokes
 * @param {number} width
 * @param {number} height
 * @param {PadTransform} transform
 * @returns {Uint8Array}
 */
export function paintStrokes(strokes, width, height, transform) {
  const raster = new Uint8Array(width * height);
  const { scale, dx, dy } = transform;
  for (const { erase, points } of strokes) {
    const radius = erase ? ERASER_RADIUS * scale : PEN_RADIUS;
    for (let i = 0; i < points.length; i += 2) {
      const j = Math.max(0, i - 2);
      const from = [scale * points[j] + dx, scale * points[j + 1] + dy];
      paintSegment(
        raster,
        width,
        height,
        from[0],
        from[1],
        scale * points[i] + dx,
        scale * points[i + 1] + dy,
        radius,
        erase ? 0 : 1,
      );
    }
  }
  return raster;
}

/**
 * Set all points within `radius` of the segment from (x0, y0) to (x1, y1).
 * @param {Uint8Array} raster
 * @param {number} width
 * @param {number} height
 * @param {number} x0
 * @param {number} y0
 * @param {number} x1
 * @param {number} y1
 * @param {number} radius
 * @param {number} value
 */
function paintSegment(raster, width, height, x0, y0, x1, y1, radius, value) {
  const top = Math.max(0, Math.floor(Math.min(y0, y1) - radius));
  const bottom = Math.min(height - 1, Math.ceil(Math.max(y0, y1) + radius));
  const left = Math.max(0, Math.floor(Math.min(x0, x1) - radius));
  const right = Math.min(width - 1, Math.ceil(Math.max(x0, x1) + radius));
  const [ux, uy] = [x1 - x0, y1 - y0];
  const squared = ux * ux + uy * uy || 1;
  for (let y = top; y <= bottom; y++) {
    for (let x = left; x <= right; x++) {
      const [px, py] = [x + 0.5 - x0, y + 0.5 - y0];
      const t = Math.min(1, Math.max(0, (px * ux + py * uy) / squared));
      const [ex, ey] = [px - t * ux, py - t * uy];
      if (ex * ex + ey * ey <= radius * radius) raster[y * width + x] = value;
    }
  }
}

/**
 * Extent and center of mass of a raster; null if it is empty.
 * @param {Uint8Array} raster
 * @param {number} width
 * @param {number} height
 */
export function measureInk(raster, width, height) {
  let [mass, sumX, sumY] = [0, 0, 0];
  let [left, right, top, bottom] = [width, -1, height, -1];
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      if (!raster[y * width + x]) continue;
      mass += 1;
      sumX += x + 0.5;
      sumY += y + 0.5;
      if (x < left) left = x;
      if (x > right) right = x;
      if (y < top) top = y;
      bottom = y;
    }
  }
  if (!mass) return null;
  return { x: sumX / mass, y: sumY / mass, left, top, right: right + 1, bottom: bottom + 1 };
}

/**
 * The gray image (height, width) of a drawing, and the transform that was applied. With `center`, as MNIST was made: the
 * drawing is scaled to fit into 20 of 28 pixels, and its center of mass moves to the center. Unlike in a scaled
 * picture, the pen keeps its width.
 * @param {Stroke[]} strokes
 * @param {{width: number, height: number}} size of the input, in pixels
 * @param {boolean} center
 * @returns {{pixels: Uint8Array, transform: PadTransform, empty: boolean}}
 */
export function drawingToImage(strokes, size, center) {
  const [width, height] = [size.width * UNITS, size.height * UNITS];
  let transform = { scale: 1, dx: 0, dy: 0 };
  let raster = paintStrokes(strokes, width, height, transform);
  let ink = measureInk(raster, width, height);
  if (!ink) return { pixels: new Uint8Array(size.width * size.height), transform, empty: true };
  if (center) {
    const side = Math.max(ink.right - ink.left, ink.bottom - ink.top);
    const box = BOX_FRACTION * Math.min(width, height);
    const scale = Math.min(MAX_SCALE, (box - 2 * PEN_RADIUS) / Math.max(1, side - 2 * PEN_RADIUS));
    transform = { scale, dx: width / 2 - scale * ink.x, dy: height / 2 - scale * ink.y };
    ink = measureInk(paintStrokes(strokes, width, height, transform), width, height) ?? ink;
    const { dx, dy } = transform;
    transform = { scale, dx: dx + Math.round(width / 2 - ink.x), dy: dy + Math.round(height / 2 - ink.y) };
    raster = paintStrokes(strokes, width, height, transform);
  }
  return { pixels: reduceRaster(raster, size.width, size.height), transform, empty: false };
}

/**
 * The mean of each block of UNITS x UNITS points, as gray values from 0 to 255.
 * @param {Uint8Array} raster
 * @param {number} width of the image, in pixels
 * @param {number} height
 */
function reduceRaster(raster, width, height) {
  const pixels = new Uint8Array(width * height);
  for (let row = 0; row < height; row++) {
    for (let column = 0; column < width; column++) {
      let sum = 0;
      for (let y = row * UNITS; y < (row + 1) * UNITS; y++) {
        const start = y * width * UNITS + column * UNITS;
        for (let x = start; x < start + UNITS; x++) sum += raster[x];
      }
      pixels[row * width + column] = Math.round((255 * sum) / (UNITS * UNITS));
    }
  }
  return pixels;
}
