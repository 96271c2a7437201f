/**
 * Maps of attention on the patch grid: the input with its glow, the choice of a query, and the colors of both.
 */

import { GLOW, SIGNED_DARK, paintColors, tableIndex } from "./colors.js";
import { contextOf, fitCanvas, node } from "./dom.js";
import { cellAt, moveCell, patchName } from "./layout.js";
import { READOUT, maxAbsOf, maxOf, outputQueryName } from "./queries.js";

/** @typedef {import("./session.js").Session} Session */
/** @typedef {import("./session.js").Change} Change */

/** Marks of the first and second pinned query, of hidden and of masked patches. */
export const PIN_COLORS = ["#5aa5ff", "#ff7d9c"];

/** @type {HTMLCanvasElement | null} */
let glowCanvas = null;

/**
 * The map of the selected head as an image with a pixel for each patch: color of the weight. A
 * transparent border of one pixel lets it fade out when it is drawn smoothly.
 * @param {Session} session
 * @returns {HTMLCanvasElement | null}
 */
export function glowImage(session) {
  const { grid } = session.description;
  const map = session.mapOf(session.layer, session.state.head);
  if (!grid || !map) return null;
  const isSigned = session.activeQuery.minus !== null;
  const limit = (isSigned ? maxAbsOf(map) : maxOf(map)) || 1;
  glowCanvas ??= document.createElement("canvas");
  [glowCanvas.width, glowCanvas.height] = [grid[1] + 2, grid[0] + 2];
  const image = new ImageData(grid[1], grid[0]);
  paintGlow(map, limit, isSigned, image.data);
  contextOf(glowCanvas).putImageData(image, 1, 1);
  return glowCanvas;
}

/**
 * Colors over an image: opaque where a value is large, 235 of 255 at the limit.
 * @param {Float32Array} map
 * @param {number} limit
 * @param {boolean} isSigned
 * @param {Uint8ClampedArray} rgba
 */
export function paintGlow(map, limit, isSigned, rgba) {
  if (isSigned) paintColors(map, -limit, limit, SIGNED_DARK, rgba);
  map.forEach((value, i) => {
    const t = Math.abs(value) / limit;
    const entry = 3 * tableIndex(0.25 + 0.65 * t);
    if (!isSigned) rgba.set([GLOW[entry], GLOW[entry + 1], GLOW[entry + 2]], 4 * i);
    rgba[4 * i + 3] = 235 * t;
  });
}

/**
 * The pixels of an input as an image.
 * @param {Session} session
 * @param {HTMLCanvasElement} canvas
 */
export function paintInput(session, canvas) {
  const spec = session.description.input;
  if (!spec) return;
  [canvas.width, canvas.height] = [spec.width, spec.height];
  const image = new ImageData(spec.width, spec.height);
  paintPixels(session.input.pixels, spec.channels, image.data);
  contextOf(canvas).putImageData(image, 0, 0);
}

/**
 * @param {Uint8Array} pixels (C,height,width)
 * @param {number} channels
 * @param {Uint8ClampedArray} rgba
 */
export function paintPixels(pixels, channels, rgba) {
  const size = rgba.length / 4;
  for (let i = 0; i < size; i++) {
    for (let c = 0; c < 3; c++) rgba[4 * i + c] = pixels[i + (channels === 3 ? c * size : 0)];
    rgba[4 * i + 3] = 255;
  }
}

/**
 * The input as the model receives it, with the patch grid over it.
 * @param {Session} session
 * @param {import("./actions.js").Actions} actions
 */
export function createGrid(session, actions) {
  const grid = session.description.grid ?? [1, 1];
  const picture = node("canvas", { class: "ch-layer ch-pixelated", "aria-hidden": "true" });
  const overlay = node("canvas", {
    class: "ch-layer ch-pixelated",
    "aria-hidden": "true",
    "data-layer-role": "overlay",
  });
  const marks = node("canvas", { class: "ch-layer", "aria-hidden": "true" });
  const target = node("div", { class: "ch-target", hidden: true, "aria-hidden": "true" });
  const surface = node(
    "div",
    {
      class: "ch-grid",
      "data-part": "grid",
      "data-channels": session.description.input?.channels,
      tabindex: "0",
      role: "application",
      "aria-label":
        "Patch grid. Arrow keys choose a query patch, Enter pins it, H hides it, M masks it, Escape returns to the class token or pooling query.",
    },
    picture,
    overlay,
    marks,
    target,
  );
  /** measured once per layout, because measuring between writes is slow */
  const sizes = { width: 0, height: 0 };
  const { input } = session.description;
  if (input) surface.style.aspectRatio = `${input.width} / ${input.height}`;
  let cursor = Math.floor(grid[0] / 2) * grid[1] + Math.floor(grid[1] / 2);
  /** @type {number | null} patch that the story points at */
  let outlined = null;

  /** @param {number} patch */
  const choose = (patch) => (patch === outlined ? actions.hide(patch) : actions.onPatch(patch));
  /** @param {MouseEvent} event */
  const patchAt = (event) => {
    const box = surface.getBoundingClientRect();
    return cellAt(event.clientX - box.left, event.clientY - box.top, box.width, box.height, grid);
  };
  surface.addEventListener("pointermove", (event) => {
    const patch = patchAt(event);
    session.setHover(patch < 0 ? null : patch);
  });
  surface.addEventListener("pointerleave", () => session.setHover(null));
  surface.addEventListener("click", (event) => {
    const patch = patchAt(event);
    if (patch >= 0) choose((cursor = patch));
  });
  surface.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const next = moveCell(cursor, event.key, grid[1], grid[0] * grid[1]);
    if (next !== null) session.setHover((cursor = next));
    else if (event.key === "Enter" || event.key === " ") choose(cursor);
    else if (event.key === "h") actions.hide(cursor);
    else if (event.key === "m") actions.mask(cursor);
    else if (event.key === "Escape") {
      session.setHover(null);
      session.update({ pins: [] });
    } else return;
    event.preventDefault();
    event.stopPropagation();
  });
  surface.addEventListener("blur", () => session.setHover(null));

  /** @param {CanvasRenderingContext2D} context @param {number} patch @param {number} size */
  const cellBox = (context, patch, size) => {
    const [w, h] = [size / grid[1], sizes.height / grid[0]];
    return /** @type {[number, number, number, number]} */ ([
      (patch % grid[1]) * w,
      Math.floor(patch / grid[1]) * h,
      w,
      h,
    ]);
  };

  function drawMarks() {
    const size = sizes.width;
    const context = fitCanvas(marks, size, sizes.height);
    context.strokeStyle = "rgb(255 255 255 / 0.13)";
    context.lineWidth = 1;
    context.beginPath();
    for (let i = 1; i < grid[1]; i++) {
      const x = Math.round((i * size) / grid[1]) + 0.5;
      context.moveTo(x, 0);
      context.lineTo(x, sizes.height);
    }
    for (let i = 1; i < grid[0]; i++) {
      const y = Math.round((i * sizes.height) / grid[0]) + 0.5;
      context.moveTo(0, y);
      context.lineTo(size, y);
    }
    context.stroke();
    for (const patch of session.state.edits.hiddenPatches) drawHidden(context, cellBox(context, patch, size), false);
    for (const patch of session.state.edits.maskedPatches) drawHidden(context, cellBox(context, patch, size), true);
    session.state.pins.forEach((pin, i) => {
      if (pin !== READOUT) strokeBox(context, cellBox(context, pin, size), PIN_COLORS[i], 2.5);
    });
    if (session.hover !== null && session.hover !== READOUT)
      strokeBox(context, cellBox(context, session.hover, size), "#fff", 1.5);
    target.hidden = outlined === null || session.state.edits.hiddenPatches.includes(outlined);
    if (outlined === null) return;
    const [x, y, w, h] = cellBox(context, outlined, size);
    Object.assign(target.style, { left: `${x}px`, top: `${y}px`, width: `${w}px`, height: `${h}px` });
  }

  function drawOverlay() {
    const image = session.input.empty ? null : glowImage(session);
    [overlay.width, overlay.height] = [grid[1], grid[0]];
    if (image) contextOf(overlay).drawImage(image, -1, -1);
  }

  /** @param {Set<Change>} changes */
  function draw(changes) {
    if (!changes.has("query") || changes.size > 1)
      Object.assign(sizes, { width: surface.clientWidth, height: surface.clientHeight });
    if (changes.has("input") || changes.has("layout")) paintInput(session, picture);
    drawOverlay();
    drawMarks();
    const hovered = session.hover;
    const layer = session.layers[session.layer];
    const outputQuery = layer ? outputQueryName(session.description, layer) : "";
    surface.setAttribute(
      "aria-description",
      hovered !== null && hovered !== READOUT ? `Patch in ${patchName(hovered, grid)}` : outputQuery,
    );
  }

  return {
    element: surface,
    draw,
    /** @param {number | null} patch */
    outline(patch) {
      outlined = patch;
      session.invalidate("query");
    },
  };
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {[number, number, number, number]} box
 * @param {string} color
 * @param {number} width
 */
function strokeBox(context, [x, y, w, h], color, width) {
  context.strokeStyle = color;
  context.lineWidth = width;
  context.strokeRect(x + width / 2, y + width / 2, w - width, h - width);
}

/**
 * A hidden patch is hatched; a patch with a masked key is crossed out.
 * @param {CanvasRenderingContext2D} context
 * @param {[number, number, number, number]} box
 * @param {boolean} masked
 */
function drawHidden(context, [x, y, w, h], masked) {
  context.save();
  context.beginPath();
  context.rect(x, y, w, h);
  context.clip();
  if (!masked) {
    context.fillStyle = "rgb(16 16 18 / 0.92)";
    context.fillRect(x, y, w, h);
  }
  context.strokeStyle = masked ? "rgb(255 125 156 / 0.95)" : "rgb(255 255 255 / 0.45)";
  context.lineWidth = masked ? 2 : 1.2;
  context.beginPath();
  if (masked) {
    context.moveTo(x + 5, y + 5);
    context.lineTo(x + w - 5, y + h - 5);
    context.moveTo(x + w - 5, y + 5);
    context.lineTo(x + 5, y + h - 5);
  } else {
    for (let i = -h; i < w; i += 6) {
      context.moveTo(x + i, y + h);
      context.lineTo(x + i + h, y);
    }
  }
  context.stroke();
  context.restore();
}
