/**
 * The figure of each panel, for its SVG and PNG files.
 */

import { AGGREGATES } from "./aggregates.js";
import { matrixOf } from "./arithmetic.js";
import { AMBER_LIGHT, GLOW, SIGNED_DARK, SIGNED_LIGHT, paintColors } from "./colors.js";
import { orderHeads, percent, shortNumber, shownClasses, signed } from "./layout.js";
import { paintGlow, paintPixels } from "./maps.js";
import { maxAbsOf, maxOf } from "./queries.js";
import { PEN_RADIUS, UNITS } from "./strokes.js";

/** @typedef {import("./session.js").Session} Session */
/** @typedef {import("./exporting.js").Figure} Figure */
/** @typedef {import("./exporting.js").Shape} Shape */

const MARGIN = 24;
const HEAD = 56;

/** @param {Session} session */
function inks(session) {
  return session.theme === "dark"
    ? { paper: "#121417", ink: "#e9eaec", muted: "#9aa0a8", rule: "#2c3036", bar: "#e9eaec" }
    : { paper: "#ffffff", ink: "#1c1e22", muted: "#666b74", rule: "#dcdde0", bar: "#1c1e22" };
}

/**
 * @param {Session} session
 * @param {string} title
 * @param {number} width
 * @param {number} height of the content
 * @param {Shape[]} shapes
 * @returns {Figure}
 */
function framed(session, title, width, height, shapes) {
  const { paper, ink, muted } = inks(session);
  const heading = [
    { kind: /** @type {const} */ ("text"), x: MARGIN, y: 26, text: title, fill: ink, size: 15, bold: true },
    { kind: /** @type {const} */ ("text"), x: MARGIN, y: 44, text: session.description.title, fill: muted, size: 12 },
  ];
  return {
    width: width + 2 * MARGIN,
    height: height + HEAD + MARGIN,
    background: paper,
    shapes: [...heading, ...shapes],
  };
}

/**
 * @param {ArrayLike<number>} values
 * @param {[number, number]} shape
 * @param {[number, number, number, number]} box
 * @param {[number, number]} limits
 * @param {import("./colors.js").ColorTable} table
 * @returns {Shape}
 */
function cells(values, [rows, columns], [x, y, width, height], [low, high], table) {
  const rgba = new Uint8ClampedArray(4 * rows * columns);
  paintColors(values, low, high, table, rgba);
  return { kind: "cells", x, y, width, height, rows, columns, rgba };
}

/** @param {Session} session @param {[number, number, number, number]} box @returns {Shape[]} */
function inputShape(session, [x, y, width, height]) {
  const spec = session.description.input;
  if (!spec) return [];
  const rgba = new Uint8ClampedArray(4 * spec.width * spec.height);
  paintPixels(session.input.pixels, spec.channels, rgba);
  return [{ kind: "cells", x, y, width, height, rows: spec.height, columns: spec.width, rgba }];
}

/** @param {Session} session @returns {Figure} */
export function figureOfPad(session) {
  const spec = session.description.input;
  const size = 280;
  if (session.state.source !== "draw" || !spec)
    return framed(session, "Input", size, size, inputShape(session, [MARGIN, HEAD, size, size]));
  const scale = size / (spec.width * UNITS);
  const lines = session.state.strokes.map(({ erase, points }) => ({
    kind: /** @type {const} */ ("line"),
    points: points.map((value, i) => (i % 2 ? HEAD : MARGIN) + value * scale),
    stroke: erase ? "#0b0a09" : "#ffffff",
    width: (erase ? 4 : 2) * PEN_RADIUS * scale,
  }));
  return framed(session, "Drawing", size, size, [
    { kind: "rect", x: MARGIN, y: HEAD, width: size, height: size, fill: "#0b0a09" },
    ...lines,
  ]);
}

/** @param {Session} session @returns {Figure} */
export function figureOfInput(session) {
  const size = 336;
  const { grid } = session.description;
  const { muted } = inks(session);
  const shapes = inputShape(session, [MARGIN, HEAD, size, size]);
  const map = session.mapOf(session.layer, session.state.head);
  const isSigned = session.activeQuery.minus !== null;
  if (map && grid) {
    const limit = (isSigned ? maxAbsOf(map) : maxOf(map)) || 1;
    const rgba = new Uint8ClampedArray(4 * map.length);
    paintGlow(map, limit, isSigned, rgba);
    shapes.push({
      kind: "cells",
      x: MARGIN,
      y: HEAD,
      width: size,
      height: size,
      rows: grid[0],
      columns: grid[1],
      rgba,
    });
    shapes.push({
      kind: "text",
      x: MARGIN,
      y: HEAD + size + 20,
      text: `${session.headName}: ${isSigned ? `±${shortNumber(limit)}` : `0 to ${shortNumber(limit)}`}`,
      fill: muted,
      size: 12,
    });
  }
  return framed(session, "Attention over the input", size, size + 24, shapes);
}

/** @param {Session} session @returns {Figure} */
export function figureOfBars(session) {
  const { ink, muted, rule, bar } = inks(session);
  const classes = shownClasses(session.probabilities, 10);
  const [left, width, step] = [MARGIN + 90, 240, 26];
  const shapes = classes.flatMap((index, i) => {
    const y = HEAD + i * step;
    const [now, before] = [session.probabilities[index], session.baseline[index]];
    /** @type {Shape[]} */
    const row = [
      { kind: "text", x: left - 10, y: y + 15, text: session.className(index), fill: ink, anchor: "end" },
      { kind: "rect", x: left, y: y + 3, width, height: 16, fill: rule },
      { kind: "rect", x: left, y: y + 3, width: width * now, height: 16, fill: bar },
      {
        kind: "text",
        x: left + width + 10,
        y: y + 15,
        text: session.edited ? `${percent(now)} (${signed(now - before)})` : percent(now),
        fill: muted,
        size: 12,
      },
    ];
    if (session.edited) row.push({ kind: "rect", x: left, y: y + 3, width: width * before, height: 16, stroke: muted });
    return row;
  });
  return framed(
    session,
    session.edited ? "Prediction, before (outline) and after the edits" : "Prediction",
    470,
    classes.length * step,
    shapes,
  );
}

/** @param {Session} session @returns {Figure} */
export function figureOfWall(session) {
  const { ink, muted } = inks(session);
  const counts = session.layers.map(({ heads }) => heads);
  const size = 84;
  const { grid } = session.description;
  const isSigned = session.activeQuery.minus !== null;
  const limitOf = isSigned ? maxAbsOf : maxOf;
  const refs = orderHeads(counts, null);
  const maps = refs.map(({ layer, head }) => session.mapOf(layer, head)?.slice() ?? null);
  const shared = Math.max(1e-9, ...maps.map((map) => (map ? limitOf(map) : 0)));
  const [dx, dy] = [size + 12, size + 48];
  const shapes = refs.flatMap(({ layer, head }, i) => {
    const [x, y] = [MARGIN + head * dx, HEAD + layer * dy + 18];
    const effect = session.effects?.[session.headIndex(layer, head)];
    const map = maps[i];
    /** @type {Shape[]} */
    const out = [
      {
        kind: "text",
        x,
        y: y + size + 14,
        text: `head ${head}${effect === undefined ? "" : `  ${signed(effect)}`}`,
        fill: muted,
        size: 11,
      },
    ];
    if (head === 0) out.push({ kind: "text", x, y: y - 6, text: session.layers[layer].name, fill: ink, size: 12 });
    const box = /** @type {[number, number, number, number]} */ ([x, y, size, size]);
    if (map && grid) out.push(cells(map, grid, box, [isSigned ? -shared : 0, shared], isSigned ? SIGNED_DARK : GLOW));
    else {
      const weights = session.result?.layers[layer];
      const all = weights?.weights.subarray(
        head * weights.queries * weights.keys,
        (head + 1) * weights.queries * weights.keys,
      );
      if (weights && all) out.push(cells(all, [weights.queries, weights.keys], box, [0, maxOf(all) || 1], GLOW));
    }
    return out;
  });
  const width = Math.max(260, Math.max(...counts, 1) * dx - 12);
  return framed(
    session,
    `Attention of every head, ${isSigned ? "±" : "0 to "}${shortNumber(shared)}`,
    width,
    counts.length * dy,
    shapes,
  );
}

/** @param {Session} session @returns {Figure} */
export function figureOfAggregates(session) {
  const { ink, muted } = inks(session);
  const { grid } = session.description;
  const size = 140;
  const shapes = AGGREGATES.flatMap(({ method, title }, i) => {
    const map = session.attributions.get(method);
    const x = MARGIN + i * (size + 20);
    /** @type {Shape[]} */
    const out = [{ kind: "text", x, y: HEAD + size + 20, text: title, fill: ink }];
    if (!map || !grid) return out;
    const isSigned = method === "occlusion";
    const limit = (isSigned ? maxAbsOf(map) : maxOf(map)) || 1e-9;
    out.push(cells(map, grid, [x, HEAD, size, size], [isSigned ? -limit : 0, limit], isSigned ? SIGNED_DARK : GLOW));
    out.push({
      kind: "text",
      x,
      y: HEAD + size + 36,
      text: isSigned ? `±${shortNumber(limit)}` : `0 to ${shortNumber(limit)}`,
      fill: muted,
      size: 11,
    });
    return out;
  });
  return framed(session, `Attribution of class ${session.className(session.target)}`, 4 * size + 60, size + 44, shapes);
}

/** @param {Session} session @returns {Figure} */
export function figureOfHead(session) {
  const { ink, muted } = inks(session);
  const dark = session.theme === "dark";
  const { steps } = session;
  /** @type {[import("./arithmetic.js").MatrixName, string][]} */
  const names = [
    ["scores", "q kᵀ"],
    ["scaled", "β q kᵀ"],
    ["weights", "A"],
    ["out", "A v"],
    ["projected", "W_O A v"],
  ];
  let x = MARGIN;
  const shapes = names.flatMap(([name, title]) => {
    const tensor = steps && matrixOf(steps, name);
    if (!tensor) return [];
    const [rows, columns] = tensor.shape;
    const unit = 150 / Math.max(rows, columns);
    const [width, height] = [Math.max(14, columns * unit), Math.max(14, rows * unit)];
    const finite = Float32Array.from(tensor.data, (value) => (Number.isFinite(value) ? value : 0));
    const limit = maxAbsOf(finite) || 1;
    const positive = name === "weights";
    const table = positive ? (dark ? GLOW : AMBER_LIGHT) : dark ? SIGNED_DARK : SIGNED_LIGHT;
    /** @type {Shape[]} */
    const out = [
      { kind: "text", x, y: HEAD + 12, text: title, fill: ink },
      cells(finite, [rows, columns], [x, HEAD + 20, width, height], [positive ? 0 : -limit, limit], table),
      {
        kind: "text",
        x,
        y: HEAD + 190,
        text: `${rows} × ${columns}, ${positive ? "0 to " : "±"}${shortNumber(limit)}`,
        fill: muted,
        size: 11,
      },
    ];
    x += Math.max(width, 110) + 20;
    return out;
  });
  return framed(
    session,
    `${session.layers[session.layer]?.name ?? ""}, head ${Math.max(0, session.state.head)}`,
    x - MARGIN,
    200,
    shapes,
  );
}
