/**
 * From a drawing or a picture to the pixels that enter the model. Pure functions on typed arrays.
 *
 * Gray images are (height, width), pictures of a canvas are RGBA (height, width, 4), and results are (C,height,width).
 */

/** @typedef {import("./types.js").InputSpec} InputSpec */
/** @typedef {Uint8Array | Uint8ClampedArray} Bytes */

/** the side of the box into which MNIST's digits were scaled, as a fraction of the side of the image */
const MNIST_BOX = 20 / 28;
/** a drawing is enlarged at most this much, so that a dot does not fill the image */
const MAX_ENLARGEMENT = 2;
/** the background color is estimated from a border as wide as the shorter side divided by this */
const BORDER_FRACTION = 8;

/**
 * Each pixel of the result is the mean of the area that it covers: (height,width) -> (outHeight,outWidth)
 * @param {Bytes} gray
 * @param {number} width
 * @param {number} height
 * @param {number} outWidth
 * @param {number} outHeight
 * @returns {Uint8Array}
 */
export function downscale(gray, width, height, outWidth, outHeight) {
  const across = areaTaps(width, 0, width, outWidth);
  const down = areaTaps(height, 0, height, outHeight);
  return resample(gray, width, height, 1, across, down);
}

/**
 * MNIST's preprocessing of a drawing, white on black: the bounding box of the ink is scaled to fit a box of 20 of 28
 * pixels, and the result is moved by whole pixels so that its center of mass is at the center, pixel 14 of 0 to 27.
 * @param {Bytes} gray
 * @param {number} width
 * @param {number} height
 * @param {number} size
 * @returns {Uint8Array} (size,size); zeros without ink
 */
export function centerByMass(gray, width, height, size = 28) {
  const out = new Uint8Array(size * size);
  const ink = inkBounds(gray, width, height);
  if (ink === null) {
    return out;
  }
  const box = Math.round(MNIST_BOX * size);
  const longer = Math.max(ink.right - ink.left, ink.bottom - ink.top);
  const scale = Math.min(box / longer, (MAX_ENLARGEMENT * size) / Math.max(width, height));
  const columns = Math.max(1, Math.round((ink.right - ink.left) * scale));
  const rows = Math.max(1, Math.round((ink.bottom - ink.top) * scale));
  const across = areaTaps(width, ink.left, ink.right, columns);
  const down = areaTaps(height, ink.top, ink.bottom, rows);
  const digit = resample(gray, width, height, 1, across, down);

  let mass = 0;
  let massX = 0;
  let massY = 0;
  digit.forEach((value, i) => {
    mass += value;
    massX += value * (i % columns);
    massY += value * Math.floor(i / columns);
  });
  if (mass === 0) {
    return out; // ink so faint that its mean is below 1
  }
  const left = shiftInside(Math.round(size / 2 - massX / mass), columns, size);
  const top = shiftInside(Math.round(size / 2 - massY / mass), rows, size);
  for (let i = 0; i < rows; i++) {
    out.set(digit.subarray(i * columns, (i + 1) * columns), (top + i) * size + left);
  }
  return out;
}

/**
 * The smallest box that contains all ink: columns left to right - 1, rows top to bottom - 1.
 * @param {Bytes} gray
 * @param {number} width
 * @param {number} height
 * @returns {{left: number, right: number, top: number, bottom: number} | null} null without ink
 */
export function inkBounds(gray, width, height) {
  let [left, right, top, bottom] = [width, 0, height, 0];
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      if (gray[y * width + x]) {
        left = Math.min(left, x);
        right = Math.max(right, x + 1);
        top = Math.min(top, y);
        bottom = y + 1;
      }
    }
  }
  return right === 0 ? null : { left, right, top, bottom };
}

/**
 * @param {number} start
 * @param {number} length
 * @param {number} size
 */
function shiftInside(start, length, size) {
  return Math.max(0, Math.min(start, size - length));
}

/**
 * A picture as the model takes it, as `clearhead predict` does: "pad" pads it with the color of its border, "crop"
 * takes the largest part of the right shape in the middle, and "stretch" stretches it. Transparent parts become white.
 * @param {Bytes} rgba (height,width,4), as getImageData returns it
 * @param {number} width
 * @param {number} height
 * @param {InputSpec} input
 * @param {"pad" | "crop" | "stretch"} fit
 * @returns {Uint8Array} (C, input.height, input.width)
 */
export function fitImage(rgba, width, height, input, fit = "pad") {
  const { channels } = input;
  const image = channels === 1 ? toGray(rgba) : toRgb(rgba);
  let fitted;
  if (fit === "pad") {
    fitted = padImage(image, width, height, channels, input);
  } else {
    const [cropWidth, cropHeight] = fit === "crop" ? cropSize(width, height, input) : [width, height];
    const left = (width - cropWidth) / 2;
    const top = (height - cropHeight) / 2;
    const across = cubicTaps(width, left, left + cropWidth, input.width);
    const down = cubicTaps(height, top, top + cropHeight, input.height);
    fitted = resample(image, width, height, channels, across, down);
  }
  const area = input.height * input.width;
  return Uint8Array.from(fitted, (_, i) => fitted[(i % area) * channels + Math.floor(i / area)]);
}

/**
 * @param {number} width
 * @param {number} height
 * @param {InputSpec} input
 * @returns {[number, number]} width and height of the largest part with the proportions of the input
 */
function cropSize(width, height, input) {
  const ratio = input.width / input.height;
  return width / height > ratio ? [height * ratio, height] : [width, width / ratio];
}

/**
 * The image scaled to fit the input, centered on its background color.
 * @param {Uint8Array} image (height,width,C)
 * @param {number} width
 * @param {number} height
 * @param {number} channels
 * @param {InputSpec} input
 */
function padImage(image, width, height, channels, input) {
  const scale = Math.min(input.width / width, input.height / height);
  const columns = Math.max(1, Math.round(width * scale));
  const rows = Math.max(1, Math.round(height * scale));
  const across = cubicTaps(width, 0, width, columns);
  const down = cubicTaps(height, 0, height, rows);
  const scaled = resample(image, width, height, channels, across, down);
  const color = backgroundColor(scaled, columns, rows, channels);
  const padded = Uint8Array.from({ length: input.height * input.width * channels }, (_, i) => color[i % channels]);
  const left = Math.floor((input.width - columns) / 2);
  const top = Math.floor((input.height - rows) / 2);
  for (let i = 0; i < rows; i++) {
    const row = scaled.subarray(i * columns * channels, (i + 1) * columns * channels);
    padded.set(row, ((top + i) * input.width + left) * channels);
  }
  return padded;
}

/**
 * The median color of the border of an image.
 * @param {Bytes} image (height,width,C)
 * @param {number} width
 * @param {number} height
 * @param {number} channels
 * @returns {number[]} one value per channel
 */
export function backgroundColor(image, width, height, channels) {
  const border = Math.max(1, Math.floor(Math.min(width, height) / BORDER_FRACTION));
  /** @type {number[][]} */
  const values = Array.from({ length: channels }, () => []);
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      const isInner = y >= border && y < height - border && x >= border && x < width - border;
      for (let channel = 0; !isInner && channel < channels; channel++) {
        values[channel].push(image[(y * width + x) * channels + channel]);
      }
    }
  }
  return values.map((list) => {
    list.sort((a, b) => a - b);
    const middle = list.length >> 1;
    return Math.floor(list.length % 2 ? list[middle] : (list[middle - 1] + list[middle]) / 2);
  });
}

/**
 * RGBA on white -> RGB
 * @param {Bytes} rgba
 * @returns {Uint8Array}
 */
export function toRgb(rgba) {
  const rgb = new Uint8Array((rgba.length / 4) * 3);
  for (let i = 0; i < rgba.length / 4; i++) {
    const alpha = rgba[4 * i + 3] / 255;
    for (let channel = 0; channel < 3; channel++) {
      rgb[3 * i + channel] = Math.round(rgba[4 * i + channel] * alpha + 255 * (1 - alpha));
    }
  }
  return rgb;
}

/**
 * RGBA on white -> the luma of ITU-R 601
 * @param {Bytes} rgba
 * @returns {Uint8Array}
 */
export function toGray(rgba) {
  const rgb = toRgb(rgba);
  return Uint8Array.from({ length: rgb.length / 3 }, (_, i) => {
    return Math.round(0.299 * rgb[3 * i] + 0.587 * rgb[3 * i + 1] + 0.114 * rgb[3 * i + 2]);
  });
}

/** @typedef {{start: number, weights: Float64Array}[]} Taps for each output pixel, the first input pixel and weights */

/**
 * Mean over the covered interval; pixels at its ends count by their covered part.
 * @param {number} size number of input pixels
 * @param {number} from
 * @param {number} to the interval of the input that is kept
 * @param {number} outSize
 * @returns {Taps}
 */
function areaTaps(size, from, to, outSize) {
  return makeTaps(size, from, to, outSize, (center, scale) => {
    const [low, high] = [center - scale / 2, center + scale / 2];
    const first = Math.floor(low + 1e-9);
    const weight = (/** @type {number} */ i) => Math.max(0, Math.min(high, i + 1) - Math.max(low, i));
    return { first, last: Math.ceil(high - 1e-9) - 1, weight };
  });
}

/**
 * Cubic convolution (Keys 1981, a = -1/2), widened when the image shrinks so that it does not alias.
 * @param {number} size
 * @param {number} from
 * @param {number} to
 * @param {number} outSize
 * @returns {Taps}
 */
function cubicTaps(size, from, to, outSize) {
  return makeTaps(size, from, to, outSize, (center, scale) => {
    const stretch = Math.max(1, scale);
    const first = Math.trunc(center - 2 * stretch + 0.5);
    const last = Math.trunc(center + 2 * stretch + 0.5) - 1;
    return { first, last, weight: (i) => cubicKernel((i + 0.5 - center) / stretch) };
  });
}

/** @param {number} x */
function cubicKernel(x) {
  const d = Math.abs(x);
  if (d < 1) {
    return (1.5 * d - 2.5) * d * d + 1;
  }
  return d < 2 ? ((-0.5 * d + 2.5) * d - 4) * d + 2 : 0;
}

/**
 * @param {number} size
 * @param {number} from
 * @param {number} to
 * @param {number} outSize
 * @param {(center: number, scale: number) => {first: number, last: number, weight: (i: number) => number}} filter
 * @returns {Taps}
 */
function makeTaps(size, from, to, outSize, filter) {
  const scale = (to - from) / outSize;
  return Array.from({ length: outSize }, (_, i) => {
    const { first, last, weight } = filter(from + (i + 0.5) * scale, scale);
    const start = Math.max(0, first);
    const length = Math.min(size, last + 1) - start;
    const weights = Float64Array.from({ length }, (_, j) => weight(start + j));
    const sum = weights.reduce((a, b) => a + b, 0);
    return { start, weights: weights.map((value) => value / sum) };
  });
}

/**
 * @param {Bytes} image (height,width,C)
 * @param {number} width
 * @param {number} height
 * @param {number} channels
 * @param {Taps} across
 * @param {Taps} down
 * @returns {Uint8Array} (rows, columns, C)
 */
function resample(image, width, height, channels, across, down) {
  const columns = across.length;
  const narrow = new Uint8ClampedArray(height * columns * channels); // rounds and clamps
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < columns; x++) {
      for (let channel = 0; channel < channels; channel++) {
        const { start, weights } = across[x];
        let sum = 0;
        for (let j = 0; j < weights.length; j++) {
          sum += weights[j] * image[(y * width + start + j) * channels + channel];
        }
        narrow[(y * columns + x) * channels + channel] = sum;
      }
    }
  }
  const out = new Uint8ClampedArray(down.length * columns * channels);
  const stride = columns * channels;
  down.forEach(({ start, weights }, y) => {
    for (let i = 0; i < stride; i++) {
      let sum = 0;
      for (let j = 0; j < weights.length; j++) {
        sum += weights[j] * narrow[(start + j) * stride + i];
      }
      out[y * stride + i] = sum;
    }
  });
  return new Uint8Array(out.buffer);
}
