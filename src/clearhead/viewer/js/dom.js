/**
 * Elements, icons and canvases. Text always enters the page as text nodes, never as markup.
 */

/** @typedef {string | Node | null | undefined | false} Child */
/** @typedef {Record<string, any>} Props */

const SVG = "http://www.w3.org/2000/svg";

/**
 * An HTML element. Functions in `props` are event listeners, `class` and `data-...` are attributes, other values are
 * attributes too; null, undefined and false are left out.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Props} [props]
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function node(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  applyProps(element, props);
  element.append(.../** @type {(string | Node)[]} */ (children.filter((child) => child || child === "")));
  return element;
}

/**
 * An SVG element.
 * @template {keyof SVGElementTagNameMap} K
 * @param {K} tag
 * @param {Props} [props]
 * @param {...Child} children
 * @returns {SVGElementTagNameMap[K]}
 */
export function svgNode(tag, props = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  applyProps(element, props);
  element.append(.../** @type {(string | Node)[]} */ (children.filter(Boolean)));
  return element;
}

/**
 * @param {Element} element
 * @param {Props} props
 */
function applyProps(element, props) {
  for (const [name, value] of Object.entries(props)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false)
      element.setAttribute(name, value === true ? "" : String(value));
  }
}

/** Paths of the icons, in a box of 24 x 24 units, drawn as lines. */
const ICONS = {
  pen: "M4 20l1-4.5L16.5 4a2 2 0 0 1 3 0l.5.5a2 2 0 0 1 0 3L8.5 19 4 20zM14 6.5l3.5 3.5",
  eraser: "M8 19.5h11M5 14.5l8.5-9a1.6 1.6 0 0 1 2.3 0l3.4 3.4a1.6 1.6 0 0 1 0 2.3l-8 8.3H8z M9.5 10l5.5 5.5",
  undo: "M8.5 5L4 9.5 8.5 14M4.5 9.5H14a5 5 0 0 1 0 10h-4",
  redo: "M15.5 5L20 9.5 15.5 14M19.5 9.5H10a5 5 0 0 0 0 10h4",
  clear: "M5 7h14M10 7V4.5h4V7M7 7l.8 12.5h8.4L17 7M10.5 10.5v6M13.5 10.5v6",
  menu: "M12 5.5v.01M12 12v.01M12 18.5v.01",
  close: "M6.5 6.5l11 11M17.5 6.5l-11 11",
  replay: "M5 12a7 7 0 1 0 2.2-5.1M5 4.5v4h4",
  auto: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16M12 8h5.5M12 12h7.5M12 16h5.5",
  help: "M9 9.2a3 3 0 1 1 4.2 2.8c-.8.4-1.2 1-1.2 2M12 17.5v.01M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18z",
  link: "M10 14a4 4 0 0 0 6 .5l3-3a4.2 4.2 0 0 0-6-6l-1 1M14 10a4 4 0 0 0-6-.5l-3 3a4.2 4.2 0 0 0 6 6l1-1",
  previous: "M14.5 6l-6 6 6 6",
  next: "M9.5 6l6 6-6 6",
};

/**
 * @param {keyof typeof ICONS} name
 * @returns {SVGSVGElement}
 */
export function icon(name) {
  const path = svgNode("path", { d: ICONS[name] });
  return svgNode("svg", { viewBox: "0 0 24 24", class: "ch-icon", "aria-hidden": "true" }, path);
}

/**
 * A button with an icon and a name that is read aloud and shown as a tooltip.
 * @param {keyof typeof ICONS} name
 * @param {string} label
 * @param {() => void} onClick
 * @param {Props} [props]
 */
export function iconButton(name, label, onClick, props = {}) {
  const button = node(
    "button",
    { type: "button", class: "ch-icon-button", "aria-label": label, title: label, ...props },
    icon(name),
  );
  button.addEventListener("click", onClick);
  return button;
}

/**
 * A group of buttons of which one is chosen. Arrow keys move between them.
 * @template {string} T
 * @param {string} label
 * @param {[T, string, string?][]} options value, text, and tooltip
 * @param {(value: T) => void} onChange
 */
export function segmented(label, options, onChange) {
  const buttons = options.map(([value, text, title]) =>
    node("button", { type: "button", role: "radio", "data-value": value, title, click: () => onChange(value) }, text),
  );
  const element = node("div", { class: "ch-segmented", role: "radiogroup", "aria-label": label }, ...buttons);
  element.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    const index = buttons.indexOf(/** @type {HTMLButtonElement} */ (event.target));
    if (!step || index < 0) return;
    event.preventDefault();
    event.stopPropagation();
    const next = buttons[(index + step + buttons.length) % buttons.length];
    next.focus();
    next.click();
  });
  /** @param {T} value */
  const set = (value) => {
    for (const button of buttons) {
      const chosen = button.dataset.value === value;
      button.setAttribute("aria-checked", String(chosen));
      button.tabIndex = chosen ? 0 : -1;
    }
  };
  set(options[0][0]);
  return { element, set };
}

/**
 * A labeled check box.
 * @param {string} label
 * @param {string} title
 * @param {(checked: boolean) => void} onChange
 */
export function checkbox(label, title, onChange) {
  const input = node("input", { type: "checkbox" });
  input.addEventListener("change", () => onChange(input.checked));
  const element = node("label", { class: "ch-check", title }, input, node("span", {}, label));
  return { element, input };
}

/**
 * A labeled list of choices.
 * @template {string} T
 * @param {string} label
 * @param {[T, string][]} options
 * @param {(value: T) => void} onChange
 */
export function dropdown(label, options, onChange) {
  const select = node(
    "select",
    { "aria-label": label },
    ...options.map(([value, text]) => node("option", { value }, text)),
  );
  select.addEventListener("change", () => onChange(/** @type {T} */ (select.value)));
  const element = node("label", { class: "ch-select" }, node("span", {}, label), select);
  return { element, select };
}

/**
 * Give a canvas as many pixels as the screen has for it, and a context that measures in CSS pixels.
 * @param {HTMLCanvasElement} canvas
 * @param {number} width in CSS pixels
 * @param {number} height
 * @param {boolean} [clear]
 * @returns {CanvasRenderingContext2D}
 */
export function fitCanvas(canvas, width, height, clear = true) {
  const ratio = Math.min(3, window.devicePixelRatio || 1);
  const [pixelWidth, pixelHeight] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== pixelWidth) canvas.width = pixelWidth;
  if (canvas.height !== pixelHeight) canvas.height = pixelHeight;
  const context = contextOf(canvas);
  context.setTransform(pixelWidth / Math.max(1, width), 0, 0, pixelHeight / Math.max(1, height), 0, 0);
  if (clear) context.clearRect(0, 0, width, height);
  return context;
}

/** @param {HTMLCanvasElement} canvas */
export function contextOf(canvas) {
  const context = canvas.getContext("2d");
  if (!context) throw new Error("this browser has no 2D canvas");
  return context;
}

/** @type {WeakMap<HTMLCanvasElement, import("./colors.js").ColorTable>} */
const shownTables = new WeakMap();

/**
 * A horizontal strip with all colors of a table.
 * @param {HTMLCanvasElement} canvas
 * @param {import("./colors.js").ColorTable} table
 */
export function drawColorBar(canvas, table) {
  if (shownTables.get(canvas) === table) return;
  shownTables.set(canvas, table);
  const image = new ImageData(256, 1);
  for (let i = 0; i < 256; i++) image.data.set([table[3 * i], table[3 * i + 1], table[3 * i + 2], 255], 4 * i);
  [canvas.width, canvas.height] = [256, 1];
  contextOf(canvas).putImageData(image, 0, 0);
}

/**
 * Replace the text of an element, if it has changed.
 * @param {Element} element
 * @param {string} text
 */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * The head of a panel: title, note, and controls at the right.
 * @param {string} title
 * @param {Child} note
 * @param {...Child} controls
 */
export function panelHead(title, note, ...controls) {
  return node(
    "header",
    { class: "ch-panel-head" },
    node("h2", {}, title),
    note,
    node("div", { class: "ch-panel-tools" }, ...controls),
  );
}
