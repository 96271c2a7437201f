/**
 * The drawing pad: pen and eraser by pointer or keyboard, undo and redo, and the glow of the attended patches.
 */

import { fitCanvas, iconButton, node, checkbox } from "./dom.js";
import { glowImage } from "./maps.js";
import { clamp } from "./layout.js";
import { ERASER_RADIUS, PEN_RADIUS, UNITS } from "./strokes.js";

/** @typedef {import("./session.js").Session} Session */
/** @typedef {import("./session.js").Change} Change */
/** @typedef {import("./strokes.js").Stroke} Stroke */

/** Steps of the keyboard's pen, in units. */
const KEY_STEP = UNITS;
const MAX_UNDO = 200;

/**
 * @param {Session} session
 * @param {() => void} onTouch called when the visitor takes the pen
 */
export function createPad(session, onTouch) {
  const spec = session.description.input;
  const [width, height] = [(spec?.width ?? 28) * UNITS, (spec?.height ?? 28) * UNITS];
  const glow = node("canvas", { class: "ch-layer", "aria-hidden": "true" });
  const ink = node("canvas", { class: "ch-layer", "aria-hidden": "true" });
  const hint = node("div", { class: "ch-pad-hint", "aria-hidden": "true" }, "Draw a digit");
  const surface = node(
    "div",
    {
      class: "ch-pad",
      tabindex: "0",
      role: "application",
      "aria-label":
        "Drawing pad. Draw with the pointer, or with the keyboard: arrow keys move the pen, Space puts it down or lifts it.",
    },
    glow,
    ink,
    hint,
  );

  const sizes = { width: 0, height: 0 };
  /** @type {Stroke | null} stroke that is being drawn */
  let current = null;
  let erasing = false;
  /** @type {Stroke[][]} */
  const undoStack = [];
  /** @type {Stroke[][]} */
  const redoStack = [];
  const cursor = { x: width / 2, y: height / 4, shown: false };

  /** @param {Stroke[]} strokes @param {boolean} push */
  const setStrokes = (strokes, push) => session.update({ source: "draw", strokes }, { push });

  const remember = () => {
    undoStack.push(session.state.strokes);
    if (undoStack.length > MAX_UNDO) undoStack.shift();
    redoStack.length = 0;
  };

  /** @param {number} x @param {number} y */
  function penDown(x, y) {
    onTouch();
    remember();
    session.penDown = true;
    current = { erase: erasing, points: [x, y] };
    setStrokes([...session.state.strokes, current], false);
  }

  /** @param {number} x @param {number} y */
  function penMove(x, y) {
    if (!current) return;
    const { points } = current;
    const [dx, dy] = [x - points[points.length - 2], y - points[points.length - 1]];
    if (dx * dx + dy * dy < 4) return;
    current = { erase: current.erase, points: [...points, x, y] };
    setStrokes([...session.state.strokes.slice(0, -1), current], false);
  }

  function penUp() {
    if (!current) return;
    current = null;
    session.penDown = false;
    setStrokes(session.state.strokes, true);
    session.measureSoon();
    session.invalidate("input");
  }

  /** @param {PointerEvent} event @returns {[number, number]} */
  const position = (event) => {
    const box = surface.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * width;
    const y = ((event.clientY - box.top) / box.height) * height;
    return [Math.round(clamp(x, 0, width)), Math.round(clamp(y, 0, height))];
  };

  surface.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || current) return;
    event.preventDefault();
    surface.focus({ preventScroll: true });
    surface.setPointerCapture(event.pointerId);
    cursor.shown = false;
    penDown(...position(event));
  });
  surface.addEventListener("pointermove", (event) => {
    if (!current) return;
    const events = event.getCoalescedEvents?.() ?? [];
    for (const each of events.length ? events : [event]) penMove(...position(each));
  });
  for (const name of ["pointerup", "pointercancel", "lostpointercapture"]) surface.addEventListener(name, penUp);

  function undo() {
    const strokes = undoStack.pop();
    if (!strokes) return;
    onTouch();
    redoStack.push(session.state.strokes);
    setStrokes(strokes, true);
  }

  function redo() {
    const strokes = redoStack.pop();
    if (!strokes) return;
    undoStack.push(session.state.strokes);
    setStrokes(strokes, true);
  }

  function clear() {
    onTouch();
    if (!session.state.strokes.length) return;
    remember();
    setStrokes([], true);
  }

  /** @param {boolean} value */
  function setErasing(value) {
    erasing = value;
    surface.classList.toggle("ch-erasing", value);
    pen.setAttribute("aria-pressed", String(!value));
    eraser.setAttribute("aria-pressed", String(value));
  }

  surface.addEventListener("keydown", (event) => {
    const step = KEY_STEP * (event.shiftKey ? 4 : 1);
    const [dx, dy] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] ?? [
      0, 0,
    ];
    if (dx || dy) {
      cursor.x = clamp(cursor.x + dx * step, 0, width);
      cursor.y = clamp(cursor.y + dy * step, 0, height);
      cursor.shown = true;
      penMove(cursor.x, cursor.y);
    } else if (event.key === " " || event.key === "Enter") {
      cursor.shown = true;
      if (current) penUp();
      else penDown(cursor.x, cursor.y);
    } else if (event.key === "z" && (event.ctrlKey || event.metaKey)) undo();
    else if ((event.key === "y" && (event.ctrlKey || event.metaKey)) || (event.key === "Z" && event.metaKey)) redo();
    else if (event.ctrlKey || event.metaKey || event.altKey) return;
    else if (event.key === "e") setErasing(!erasing);
    else if (event.key === "Delete" || event.key === "Backspace") clear();
    else return;
    event.preventDefault();
    event.stopPropagation();
    session.invalidate("input");
  });
  surface.addEventListener("blur", () => {
    cursor.shown = false;
    penUp();
    session.invalidate("input");
  });

  const pen = iconButton("pen", "Pen", () => setErasing(false), { "aria-pressed": "true" });
  const eraser = iconButton("eraser", "Eraser (E)", () => setErasing(true), { "aria-pressed": "false" });
  const undoButton = iconButton("undo", "Undo (Ctrl+Z)", undo);
  const redoButton = iconButton("redo", "Redo (Ctrl+Y)", redo);
  const clearButton = iconButton("clear", "Clear (Delete)", clear);
  const center = checkbox(
    "Center by mass (MNIST preprocessing)",
    "Scales the drawing to 20 × 20 pixels and moves its center of mass to the center of the image, as MNIST was prepared. The model has only seen such images.",
    (checked) => session.update({ center: checked }),
  );
  const tools = node(
    "div",
    { class: "ch-tools", role: "toolbar", "aria-label": "Drawing tools" },
    pen,
    eraser,
    undoButton,
    redoButton,
    clearButton,
  );
  const element = node(
    "div",
    { class: "ch-pad-area" },
    surface,
    node("div", { class: "ch-pad-tools" }, tools, center.element),
  );

  function drawInk() {
    const size = sizes.width;
    const context = fitCanvas(ink, size, sizes.height);
    const scale = size / width;
    context.lineCap = context.lineJoin = "round";
    for (const { erase, points } of session.state.strokes) {
      context.globalCompositeOperation = erase ? "destination-out" : "source-over";
      context.lineWidth = 2 * scale * (erase ? ERASER_RADIUS : PEN_RADIUS);
      context.strokeStyle = "#fff";
      context.beginPath();
      context.moveTo(points[0] * scale, points[1] * scale);
      traceCurve(context, points, scale);
      context.stroke();
    }
    context.globalCompositeOperation = "source-over";
    if (!cursor.shown) return;
    context.strokeStyle = current ? "#ffb547" : "#7fb4ff";
    context.lineWidth = 2;
    context.beginPath();
    context.arc(cursor.x * scale, cursor.y * scale, (erasing ? ERASER_RADIUS : PEN_RADIUS) * scale, 0, 2 * Math.PI);
    context.stroke();
  }

  function drawGlow() {
    const size = sizes.width;
    const context = fitCanvas(glow, size, sizes.height);
    const image = session.input.empty ? null : glowImage(session);
    if (!image || !spec) return;
    const transform = session.input.transform ?? { scale: 1, dx: 0, dy: 0 };
    const scale = size / width / transform.scale;
    context.globalAlpha = 0.85;
    context.imageSmoothingEnabled = true;
    const [patchWidth, patchHeight] = [(width * scale) / (image.width - 2), (height * scale) / (image.height - 2)];
    const [x, y] = [-transform.dx * scale - patchWidth, -transform.dy * scale - patchHeight];
    context.drawImage(image, x, y, image.width * patchWidth, image.height * patchHeight);
    context.globalAlpha = 1;
  }

  /** @param {Set<Change>} changes */
  function draw(changes) {
    if (session.state.source !== "draw") return;
    if (changes.has("layout") || changes.has("state"))
      Object.assign(sizes, { width: surface.clientWidth, height: surface.clientHeight });
    if (changes.has("input") || changes.has("layout") || changes.has("state")) {
      drawInk();
      hint.hidden = session.state.strokes.length > 0;
      undoButton.disabled = !undoStack.length;
      redoButton.disabled = !redoStack.length;
      clearButton.disabled = !session.state.strokes.length;
      center.input.checked = session.state.center;
    }
    if (!changes.has("measures") || changes.size > 1) drawGlow();
  }

  return { element, draw, remember };
}

/**
 * A smooth curve through the middles of the segments.
 * @param {CanvasRenderingContext2D} context
 * @param {number[]} points
 * @param {number} scale
 */
function traceCurve(context, points, scale) {
  for (let i = 2; i < points.length - 2; i += 2) {
    const [x, y] = [points[i] * scale, points[i + 1] * scale];
    context.quadraticCurveTo(x, y, (x + points[i + 2] * scale) / 2, (y + points[i + 3] * scale) / 2);
  }
  const last = points.length - 2;
  context.lineTo(points[last] * scale, points[last + 1] * scale + (last ? 0 : 0.01));
}
