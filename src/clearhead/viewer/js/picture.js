/**
 * Pictures of the visitor's own: decoded by the browser, then prepared like the images of the training set.
 */

import { contextOf } from "./dom.js";
import { backgroundColor, centerByMass, fitImage } from "./image.js";

/** @typedef {import("./types.js").InputSpec} InputSpec */

/** Larger pictures are reduced by the browser first. */
const MAX_SIDE = 1024;
/** Pixels of a picture of a digit for each pixel of the input, before it is centered. */
const DETAIL = 8;

/**
 * The pixels (C,height,width) of a picture. For models of drawn digits, dark ink on a light ground becomes light ink on
 * black, and the digit is centered by mass if this is asked for.
 * @param {Blob} blob
 * @param {InputSpec} spec
 * @param {boolean} center
 * @returns {Promise<Uint8Array>}
 */
export async function pixelsOfPicture(blob, spec, center) {
  const bitmap = await createImageBitmap(blob);
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = contextOf(canvas);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
  return preparePicture(data, canvas.width, canvas.height, spec, center);
}

/**
 * @param {Uint8ClampedArray} rgba (height,width,4)
 * @param {number} width
 * @param {number} height
 * @param {InputSpec} spec
 * @param {boolean} center
 * @returns {Uint8Array}
 */
export function preparePicture(rgba, width, height, spec, center) {
  if (!spec.draw || spec.channels !== 1) return fitImage(rgba, width, height, spec);
  const detail = center && spec.width === spec.height ? DETAIL : 1;
  const large = { ...spec, width: spec.width * detail, height: spec.height * detail };
  const gray = fitImage(rgba, width, height, large);
  const [ground] = backgroundColor(gray, large.width, large.height, 1);
  // What differs little from the ground is paper, not ink.
  const ink = gray.map((value) => Math.abs(value - ground)).map((value) => (value < 32 ? 0 : value));
  const strongest = ink.reduce((a, b) => Math.max(a, b), 1);
  const stretched = ink.map((value) => Math.round((255 * value) / strongest));
  return detail === 1 ? stretched : centerByMass(stretched, large.width, large.height, spec.width);
}
