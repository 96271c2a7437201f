/**
 * Color scales, computed in OKLab (Ottosson, 2020): lightness is monotonic, so that they are readable in grayscale and
 * with any color vision. Pure functions.
 */

/** @typedef {[number, number, number]} RGB 0 to 255 */
/** @typedef {Uint8ClampedArray} ColorTable 256 colors (R, G, B), for values from the lower to the upper limit */

/**
 * @param {number} lightness 0 to 1
 * @param {number} chroma
 * @param {number} hue in degrees
 * @returns {RGB}
 */
export function oklchToRgb(lightness, chroma, hue) {
  const angle = (hue * Math.PI) / 180;
  const [a, b] = [chroma * Math.cos(angle), chroma * Math.sin(angle)];
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return /** @type {RGB} */ (linear.map(gammaEncode));
}

/** @param {number} value linear light */
function gammaEncode(value) {
  const x = Math.min(1, Math.max(0, value));
  return Math.round(255 * (x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055));
}

/**
 * The OKLab lightness of a color, for tests and for the choice of a text color.
 * @param {RGB} rgb
 */
export function lightnessOf(rgb) {
  const [r, g, b] = rgb.map((value) => {
    const x = value / 255;
    return x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  });
  const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b);
  const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b);
  const s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
  return 0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s;
}

/**
 * @param {(t: number) => RGB} color of a value from 0 to 1
 * @returns {ColorTable}
 */
function tabulate(color) {
  const table = new Uint8ClampedArray(256 * 3);
  for (let i = 0; i < 256; i++) table.set(color(i / 255), 3 * i);
  return table;
}

/**
 * A piecewise linear function through points (t, value).
 * @param {number[][]} points
 * @param {number} t
 */
function interpolate(points, t) {
  let i = 1;
  while (i < points.length - 1 && points[i][0] < t) i++;
  const [[t0, v0], [t1, v1]] = [points[i - 1], points[i]];
  return v0 + ((v1 - v0) * (t - t0)) / (t1 - t0);
}

/** From black through ember to pale gold: attention as light, on a dark map in either theme. */
export const GLOW = tabulate((t) => {
  const chroma = interpolate(
    [
      [0, 0.012],
      [0.18, 0.085],
      [0.55, 0.155],
      [0.8, 0.15],
      [1, 0.085],
    ],
    t,
  );
  return oklchToRgb(
    0.17 + 0.79 * t,
    chroma,
    interpolate(
      [
        [0, 45],
        [0.5, 58],
        [1, 96],
      ],
      t,
    ),
  );
});

/**
 * From rose (-1) through a dark or light neutral (0) to blue (+1).
 * @param {boolean} dark
 * @returns {ColorTable}
 */
function diverging(dark) {
  return tabulate((t) => {
    const x = 2 * t - 1;
    const size = Math.abs(x);
    const lightness = dark ? 0.19 + 0.58 * size : 0.97 - 0.47 * size;
    return oklchToRgb(lightness, 0.006 + 0.17 * size ** 0.9, x < 0 ? 14 : 250);
  });
}

/** Signed values on dark maps. */
export const SIGNED_DARK = diverging(true);
/** Signed values on light maps: the matrices of the head panel in the light theme. */
export const SIGNED_LIGHT = diverging(false);

/** From the page's background to deep amber, for matrices of weights in the light theme. */
export const AMBER_LIGHT = tabulate((t) =>
  oklchToRgb(0.975 - 0.56 * t, 0.008 + 0.13 * Math.sin(Math.PI * (0.08 + 0.6 * t)), 88 - 38 * t),
);

/**
 * A color of a table as text.
 * @param {ColorTable} table
 * @param {number} t 0 to 1
 */
export function cssColor(table, t) {
  const i = 3 * tableIndex(t);
  return `rgb(${table[i]} ${table[i + 1]} ${table[i + 2]})`;
}

/**
 * The entry of a table for a value from 0 to 1; values outside are clamped, and NaN is the first entry.
 * @param {number} t
 */
export function tableIndex(t) {
  return t > 0 ? Math.min(255, Math.round(255 * t)) : 0;
}

/**
 * Write the colors of values into RGBA pixels.
 * @param {ArrayLike<number>} values
 * @param {number} low value of the first color
 * @param {number} high value of the last color
 * @param {ColorTable} table
 * @param {Uint8ClampedArray} rgba
 * @param {number} [start] index of the first pixel
 */
export function paintColors(values, low, high, table, rgba, start = 0) {
  const scale = high > low ? 1 / (high - low) : 0;
  for (let i = 0; i < values.length; i++) {
    const entry = 3 * tableIndex((values[i] - low) * scale);
    const pixel = 4 * (start + i);
    rgba[pixel] = table[entry];
    rgba[pixel + 1] = table[entry + 1];
    rgba[pixel + 2] = table[entry + 2];
    rgba[pixel + 3] = 255;
  }
}
