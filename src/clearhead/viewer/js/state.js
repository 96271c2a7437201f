/**
 * The state of the page: one plain object, and its text form in the fragment of the address. Pure functions.
 *
 * The text is `key=value` pairs joined by `&`; values equal to the defaults are left out, and whatever cannot be read
 * becomes the default. The history of the pad for undo and redo is not part of it.
 */

import { ALL_HEADS, READOUT } from "./queries.js";
import { decodeStrokes, encodeStrokes } from "./strokes.js";

/** @typedef {import("./types.js").Description} Description */
/** @typedef {import("./types.js").Edits} Edits */
/** @typedef {import("./types.js").HeadEdit} HeadEdit */
/** @typedef {import("./strokes.js").Stroke} Stroke */

/** @typedef {"draw" | "example" | "picture"} Source */
/** @typedef {"layer" | "entropy" | "distance" | "diagonality" | "effect"} Sort */
/** @typedef {"off" | "drawing" | "close" | "hide" | "done"} StoryStep */

/** @typedef {{label: number, mistakes: boolean, uncertain: boolean}} ExampleFilter label -1: all classes */

/**
 * @typedef {object} State
 * @property {Source} source what the input is made from
 * @property {Stroke[]} strokes
 * @property {number} example
 * @property {ExampleFilter} filter of the examples
 * @property {Uint8Array | null} picture pixels (C,height,width) of an uploaded picture, if they are few
 * @property {boolean} center MNIST's preprocessing of drawings
 * @property {number} layer index of the selected layer; -1: the last one
 * @property {number} head index of the selected head, or ALL_HEADS
 * @property {number[]} pins up to two queries
 * @property {"to" | "from"} direction
 * @property {Sort} sort
 * @property {"shared" | "own"} scale limits of the wall's colors
 * @property {"pin" | "hide" | "mask"} click what a click on a patch does
 * @property {Edits} edits
 * @property {{matrix: string, row: number, column: number} | null} cell whose arithmetic is shown
 * @property {StoryStep} story
 * @property {"auto" | "light" | "dark"} theme
 */

const SOURCES = { d: "draw", e: "example", p: "picture" };
const SORTS = { l: "layer", n: "entropy", d: "distance", g: "diagonality", f: "effect" };
const STORIES = { o: "off", w: "drawing", c: "close", h: "hide", d: "done" };
const THEMES = { a: "auto", l: "light", d: "dark" };
const CLICKS = { p: "pin", h: "hide", m: "mask" };
const PATTERNS = { z: "zero", u: "uniform" };
const MATRICES = ["scores", "scaled", "mask", "weights", "out", "projected"];
const MAX_PICTURE_BYTES = 4096;
const MAX_EDITS = 4096;

/**
 * @param {Description} description
 * @returns {State}
 */
export function defaultState(description) {
  const draws = description.kind !== "trace" && Boolean(description.input?.draw);
  return {
    source: draws ? "draw" : "example",
    strokes: [],
    example: 0,
    filter: { label: -1, mistakes: false, uncertain: false },
    picture: null,
    center: true,
    layer: -1,
    head: ALL_HEADS,
    pins: [],
    direction: "to",
    sort: "layer",
    scale: "shared",
    click: "pin",
    edits: { heads: [], hiddenPatches: [], maskedPatches: [], beta: null },
    cell: null,
    story: "off",
    theme: "auto",
  };
}

/** @param {Edits} edits */
export function hasEdits({ heads, hiddenPatches, maskedPatches, beta }) {
  return heads.length + hiddenPatches.length + maskedPatches.length > 0 || beta !== null;
}

/**
 * @param {State} state
 * @param {Description} description
 * @returns {string} without "#"
 */
export function encodeState(state, description) {
  const { edits } = state;
  const layerOf = (/** @type {HeadEdit} */ edit) => description.layers.findIndex(({ name }) => name === edit.layer);
  const defaults = defaultState(description);
  /** @type {[string, string][]} */
  const pairs = [];
  const add = (/** @type {string} */ key, /** @type {any} */ value, /** @type {any} */ usual, text = String(value)) => {
    if (value !== usual) pairs.push([key, text]);
  };
  add("s", state.source, defaults.source, keyOf(SOURCES, state.source));
  if (state.strokes.length) add("d", true, false, encodeStrokes(state.strokes));
  add("e", state.example, 0);
  const { label, mistakes, uncertain } = state.filter;
  add("f", (label < 0 ? "" : label) + (mistakes ? "m" : "") + (uncertain ? "u" : ""), "");
  if (state.source === "picture" && state.picture && state.picture.length <= MAX_PICTURE_BYTES) {
    add("p", true, false, bytesToText(state.picture));
  }
  add("m", state.center, true, "0");
  add("l", state.layer, -1);
  add("h", state.head, ALL_HEADS);
  add("q", state.pins.join("."), "");
  add("r", state.direction, "to", "1");
  add("o", state.sort, "layer", keyOf(SORTS, state.sort));
  add("c", state.scale, "shared", "1");
  add("k", state.click, "pin", keyOf(CLICKS, state.click));
  add("x", edits.hiddenPatches.join("."), "");
  add("y", edits.maskedPatches.join("."), "");
  add("z", edits.heads.map((e) => `${layerOf(e)}-${e.head}${keyOf(PATTERNS, e.pattern)}`).join("."), "");
  if (edits.beta !== null)
    add("b", true, false, edits.beta === Infinity ? "inf" : String(Number(edits.beta.toPrecision(4))));
  if (state.cell)
    add("a", true, false, `${MATRICES.indexOf(state.cell.matrix)}.${state.cell.row}.${state.cell.column}`);
  add("w", state.story, "off", keyOf(STORIES, state.story));
  add("t", state.theme, "auto", keyOf(THEMES, state.theme));
  return pairs.map(([key, value]) => `${key}=${value}`).join("&");
}

/**
 * The state of a text; everything that is missing, malformed or out of range has its default value.
 * @param {string} text with or without "#"
 * @param {Description} description
 * @param {number} [numExamples]
 * @returns {State}
 */
export function decodeState(text, description, numExamples = Infinity) {
  const state = defaultState(description);
  const values = new Map(
    text
      .replace(/^#/, "")
      .split("&")
      .map((pair) => splitOnce(pair)),
  );
  const get = (/** @type {string} */ key) => values.get(key) ?? "";
  const patches = description.grid ? description.grid[0] * description.grid[1] : 0;
  const numLayers = description.layers.length || Infinity;
  const canRun = description.kind !== "trace";

  if (canRun && description.input?.draw) state.strokes = decodeStrokes(get("d"));
  state.source = choice(SOURCES, get("s"), state.source);
  if (state.source === "draw" && !(canRun && description.input?.draw)) state.source = "example";
  state.example = integer(get("e"), 0, numExamples - 1) ?? 0;
  const filter = /^(\d{0,5})(m?)(u?)$/.exec(get("f")) ?? ["", "", "", ""];
  const label = integer(filter[1], 0, description.classes.length - 1) ?? -1;
  state.filter = { label, mistakes: filter[2] === "m", uncertain: filter[3] === "u" };
  const size = description.input ? description.input.channels * description.input.height * description.input.width : 0;
  state.picture = textToBytes(get("p"), size);
  if (state.source === "picture" && !(canRun && state.picture)) state.source = defaultState(description).source;
  state.center = get("m") !== "0";
  state.layer = integer(get("l"), 0, numLayers - 1) ?? -1;
  const chosen = description.layers.at(state.layer);
  const heads = chosen?.heads ?? Infinity;
  state.head = integer(get("h"), 0, heads - 1) ?? ALL_HEADS;
  state.pins = integers(get("q"), READOUT, patches - 1).slice(0, 2);
  state.direction = get("r") === "1" ? "from" : "to";
  state.sort = choice(SORTS, get("o"), state.sort);
  state.scale = get("c") === "1" ? "own" : "shared";
  state.story = choice(STORIES, get("w"), state.story);
  state.theme = choice(THEMES, get("t"), state.theme);
  state.cell = decodeCell(get("a"));
  if (canRun) {
    state.click = choice(CLICKS, get("k"), state.click);
    state.edits = {
      hiddenPatches: integers(get("x"), 0, patches - 1),
      maskedPatches: integers(get("y"), 0, patches - 1),
      heads: decodeHeadEdits(get("z"), description),
      beta: decodeBeta(get("b")),
    };
  }
  return state;
}

/**
 * @param {string} text
 * @param {Description} description
 * @returns {HeadEdit[]}
 */
function decodeHeadEdits(text, description) {
  /** @type {HeadEdit[]} */
  const edits = [];
  for (const part of text.split(".").slice(0, MAX_EDITS)) {
    const match = /^(\d+)-(\d+)([zu])$/.exec(part);
    const layer = match && description.layers[Number(match[1])];
    if (!match || !layer || Number(match[2]) >= layer.heads) continue;
    const head = Number(match[2]);
    if (edits.some((edit) => edit.layer === layer.name && edit.head === head)) continue;
    edits.push({ layer: layer.name, head, pattern: choice(PATTERNS, match[3], "zero") });
  }
  return edits;
}

/** @param {string} text */
function decodeBeta(text) {
  if (text === "inf") return Infinity;
  return /^\d{1,9}(\.\d{1,9})?(e[-+]?\d{1,2})?$/.test(text) ? Number(text) : null;
}

/** @param {string} text */
function decodeCell(text) {
  const match = /^(\d)\.(\d{1,6})\.(\d{1,6})$/.exec(text);
  const matrix = match && MATRICES[Number(match[1])];
  return match && matrix ? { matrix, row: Number(match[2]), column: Number(match[3]) } : null;
}

/** @param {string} pair @returns {[string, string]} */
function splitOnce(pair) {
  const at = pair.indexOf("=");
  return at < 0 ? [pair, ""] : [pair.slice(0, at), pair.slice(at + 1)];
}

/**
 * @param {string} text
 * @param {number} low
 * @param {number} high
 */
function integer(text, low, high) {
  const value = /^-?\d{1,9}$/.test(text) ? Number(text) : NaN;
  return value >= low && value <= high ? value : null;
}

/**
 * Distinct integers within limits, in their order.
 * @param {string} text
 * @param {number} low
 * @param {number} high
 * @returns {number[]}
 */
function integers(text, low, high) {
  const values = text
    .split(".")
    .slice(0, MAX_EDITS)
    .map((part) => integer(part, low, high));
  return [...new Set(values)].filter((value) => value !== null);
}

/**
 * @template {string} T
 * @param {Record<string, T | string>} table
 * @param {string} key
 * @param {T} otherwise
 * @returns {T}
 */
function choice(table, key, otherwise) {
  return Object.hasOwn(table, key) ? /** @type {T} */ (table[key]) : otherwise;
}

/**
 * @param {Record<string, string>} table
 * @param {string} value
 */
function keyOf(table, value) {
  return Object.keys(table).find((key) => table[key] === value) ?? "";
}

/** @param {Uint8Array} bytes */
function bytesToText(bytes) {
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  return btoa(text).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

/**
 * @param {string} text
 * @param {number} length that is expected
 */
function textToBytes(text, length) {
  if (!/^[\w-]+$/.test(text) || length > MAX_PICTURE_BYTES) return null;
  try {
    const bytes = Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (c) => c.charCodeAt(0));
    return bytes.length === length ? bytes : null;
  } catch {
    return null;
  }
}
