/**
 * Figures of the panels as SVG and PNG files, and the menu that saves them.
 *
 * A figure is a list of simple shapes, so that both formats show the same.
 */

import { contextOf, icon, node } from "./dom.js";

/**
 * @typedef {object} Figure
 * @property {number} width
 * @property {number} height
 * @property {string} background
 * @property {Shape[]} shapes
 */
/** @typedef {RectShape | TextShape | CellsShape | LineShape} Shape */
/** @typedef {{x: number, y: number, width: number, height: number}} Box */
/** @typedef {Box & {kind: "rect", fill?: string, stroke?: string}} RectShape */
/**
 * @typedef {object} TextShape
 * @property {"text"} kind
 * @property {number} x
 * @property {number} y baseline
 * @property {string} text
 * @property {string} fill
 * @property {number} [size]
 * @property {boolean} [bold]
 * @property {"start" | "middle" | "end"} [anchor]
 */
/**
 * A matrix of colored cells; rgba has four numbers for each cell.
 * @typedef {Box & {kind: "cells", rows: number, columns: number, rgba: Uint8ClampedArray}} CellsShape
 */
/** @typedef {{kind: "line", points: number[], stroke: string, width: number}} LineShape */

const FONT = "system-ui, sans-serif";

/**
 * @param {Figure} figure
 * @returns {string}
 */
export function figureToSvg({ width, height, background, shapes }) {
  const size = { width, height, viewBox: `0 0 ${width} ${height}` };
  return [
    `<svg${attributes({ xmlns: "http://www.w3.org/2000/svg", ...size, "font-family": FONT })}>`,
    `<rect${attributes({ width, height, fill: background })}/>`,
    ...shapes.map(shapeToSvg),
    "</svg>",
    "",
  ].join("\n");
}

/** @param {Shape} shape */
function shapeToSvg(shape) {
  switch (shape.kind) {
    case "rect": {
      const { x, y, width, height, fill = "none", stroke } = shape;
      return `<rect${attributes({ x, y, width, height, fill, stroke })}/>`;
    }
    case "text": {
      const { x, y, text, fill, size = 13, bold = false, anchor = "start" } = shape;
      const font = { "font-size": size, "font-weight": bold ? 600 : undefined, "text-anchor": anchor };
      return `<text${attributes({ x, y, fill, ...font })}>${escapeXml(text)}</text>`;
    }
    case "line": {
      const pen = {
        stroke: shape.stroke,
        "stroke-width": shape.width,
        "stroke-linecap": "round",
        "stroke-linejoin": "round",
      };
      return `<polyline${attributes({ points: shape.points.map(fix).join(" "), fill: "none", ...pen })}/>`;
    }
    case "cells":
      return cellsToSvg(shape);
  }
}

/** One path for each color keeps the file small. @param {CellsShape} cells */
function cellsToSvg({ x, y, width, height, rows, columns, rgba }) {
  /** @type {Map<string, string[]>} */
  const paths = new Map();
  const [w, h] = [width / columns, height / rows];
  for (let i = 0; i < rows * columns; i++) {
    const [r, g, b, a] = rgba.subarray(4 * i, 4 * i + 4);
    if (!a) continue;
    const key = `fill="rgb(${r},${g},${b})"${a < 255 ? ` fill-opacity="${fix(a / 255)}"` : ""}`;
    const path = paths.get(key) ?? [];
    path.push(`M${fix(x + (i % columns) * w)} ${fix(y + Math.floor(i / columns) * h)}h${fix(w)}v${fix(h)}h${fix(-w)}z`);
    paths.set(key, path);
  }
  const groups = [...paths].map(([fill, path]) => `<path ${fill} d="${path.join("")}"/>`);
  return `<g shape-rendering="crispEdges">${groups.join("")}</g>`;
}

/** @param {Record<string, string | number | undefined>} values those that are undefined are left out */
function attributes(values) {
  const text = (/** @type {string | number} */ value) => (typeof value === "number" ? fix(value) : escapeXml(value));
  return Object.entries(values)
    .map(([name, value]) => (value === undefined ? "" : ` ${name}="${text(value)}"`))
    .join("");
}

/** @param {number} value */
function fix(value) {
  return String(Math.round(value * 1000) / 1000);
}

/** @param {string} text */
function escapeXml(text) {
  return text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
}

/**
 * @param {Figure} figure
 * @param {number} scale
 * @returns {HTMLCanvasElement}
 */
export function figureToCanvas({ width, height, background, shapes }, scale) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [Math.ceil(width * scale), Math.ceil(height * scale)];
  const context = contextOf(canvas);
  context.scale(scale, scale);
  context.fillStyle = background;
  context.fillRect(0, 0, width, height);
  for (const shape of shapes) drawShape(context, shape);
  return canvas;
}

/** @param {CanvasRenderingContext2D} context @param {Shape} shape */
function drawShape(context, shape) {
  if (shape.kind === "rect") {
    if (shape.fill && shape.fill !== "none") {
      context.fillStyle = shape.fill;
      context.fillRect(shape.x, shape.y, shape.width, shape.height);
    }
    if (shape.stroke) {
      context.strokeStyle = shape.stroke;
      context.strokeRect(shape.x, shape.y, shape.width, shape.height);
    }
  } else if (shape.kind === "text") {
    context.font = `${shape.bold ? "600 " : ""}${shape.size ?? 13}px ${FONT}`;
    context.textAlign = shape.anchor === "middle" ? "center" : (shape.anchor ?? "start");
    context.fillStyle = shape.fill;
    context.fillText(shape.text, shape.x, shape.y);
  } else if (shape.kind === "line") {
    context.strokeStyle = shape.stroke;
    context.lineWidth = shape.width;
    context.lineCap = context.lineJoin = "round";
    context.beginPath();
    for (let i = 0; i < shape.points.length; i += 2) context.lineTo(shape.points[i], shape.points[i + 1]);
    context.stroke();
  } else {
    const sheet = document.createElement("canvas");
    [sheet.width, sheet.height] = [shape.columns, shape.rows];
    contextOf(sheet).putImageData(new ImageData(new Uint8ClampedArray(shape.rgba), shape.columns, shape.rows), 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(sheet, shape.x, shape.y, shape.width, shape.height);
  }
}

/**
 * @param {string} name
 * @param {Blob} blob
 */
function saveFile(name, blob) {
  const address = URL.createObjectURL(blob);
  node("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

/**
 * Copy text, also where a page may not use the clipboard directly.
 * @param {string} text
 */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = node("textarea", { class: "ch-hidden", readonly: true });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

/**
 * The menu of a panel.
 * @param {string} name of the files
 * @param {{figure: () => Figure, python: () => string, say: (text: string) => void}} parts
 */
export function createMenu(name, { figure, python, say }) {
  const savePng = () =>
    figureToCanvas(figure(), 2).toBlob((blob) => blob && saveFile(`${name}.png`, blob), "image/png");
  const saveSvg = () => saveFile(`${name}.svg`, new Blob([figureToSvg(figure())], { type: "image/svg+xml" }));
  const copyPython = async () => {
    await copyText(python());
    say("Python lines copied.");
  };
  /** @type {[string, () => void][]} */
  const entries = [
    ["Save as PNG", savePng],
    ["Save as SVG", saveSvg],
    ["Copy Python lines that reproduce it", copyPython],
  ];
  const items = entries.map(([text, act]) =>
    node("button", { type: "button", role: "menuitem", tabindex: "-1", click: () => (close(), act()) }, text),
  );
  const list = node("div", { class: "ch-menu-list", role: "menu", hidden: true }, ...items);
  const button = node(
    "button",
    {
      type: "button",
      class: "ch-icon-button",
      "aria-label": "Export this panel",
      title: "Export",
      "aria-haspopup": "menu",
      "aria-expanded": "false",
    },
    icon("menu"),
  );
  const element = node("div", { class: "ch-menu" }, button, list);
  /** @param {boolean} open */
  const set = (open) => {
    list.hidden = !open;
    button.setAttribute("aria-expanded", String(open));
    if (open) items[0].focus();
  };
  const close = () => {
    set(false);
    button.focus();
  };
  button.addEventListener("click", () => set(Boolean(list.hidden)));
  element.addEventListener("focusout", (event) => {
    if (!element.contains(/** @type {Node | null} */ (event.relatedTarget))) set(false);
  });
  element.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape" && !list.hidden) close();
    else if (step && !list.hidden) {
      const index = items.indexOf(/** @type {HTMLButtonElement} */ (event.target));
      items[(index + step + items.length) % items.length].focus();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  });
  return element;
}
