/**
 * One head as arithmetic: q kᵀ, scale, mask, softargmax, A v and W_O as matrices of real numbers. A click on a cell
 * shows how its number is computed.
 */

import { explainCell, matrixOf } from "./arithmetic.js";
import { AMBER_LIGHT, GLOW, SIGNED_DARK, SIGNED_LIGHT, paintColors } from "./colors.js";
import { contextOf, fitCanvas, node, panelHead, setText } from "./dom.js";
import { cellAt, clamp, moveCell, shortNumber } from "./layout.js";
import { READOUT, hasClassTokenIn, maxAbsOf, tokenLayout } from "./queries.js";

/** @typedef {import("./session.js").Session} Session */
/** @typedef {import("./session.js").Change} Change */
/** @typedef {import("./types.js").Tensor} Tensor */
/** @typedef {import("./arithmetic.js").MatrixName} MatrixName */

/** Limits of the sides of a matrix and of a cell, and what operators and gaps take of the width, in CSS pixels. */
const MAX_SIDE_OF_MATRIX = 180;
const MIN_SIDE = 12;
const MAX_CELL = 8;
const OPERATORS = 540;

/** @type {{name: string, title: string, before: string, axis: string, note: string}[]} */
const MATRICES_OF_HEAD = [
  { name: "q", title: "q", before: "", axis: "Q × D", note: "queries" },
  { name: "kT", title: "kᵀ", before: "·", axis: "D × K", note: "keys" },
  { name: "scores", title: "q kᵀ", before: "=", axis: "Q × K", note: "scores" },
  { name: "mask", title: "mask", before: "∧", axis: "Q × K", note: "1: may attend" },
  { name: "scaled", title: "β q kᵀ", before: "× β =", axis: "Q × K", note: "scaled scores" },
  { name: "weights", title: "A", before: "softargmax", axis: "Q × K", note: "weights, rows sum to 1" },
  { name: "v", title: "v", before: "·", axis: "K × D", note: "values" },
  { name: "out", title: "A v", before: "=", axis: "Q × D", note: "output of the head" },
  { name: "projected", title: "W_O A v", before: "× W_O =", axis: "Q × E", note: "added to the residual stream" },
];

/**
 * @param {Session} session
 * @param {HTMLElement} menu
 */
export function createHeadPanel(session, menu) {
  const title = node("span", { class: "ch-note" });
  const flow = node("div", { class: "ch-flow" });
  const arithmetic = node("div", { class: "ch-arithmetic", "aria-live": "polite" });
  const cards = MATRICES_OF_HEAD.map(createCard);
  flow.append(...cards.map((card) => card.element));
  const element = node(
    "section",
    { class: "ch-panel ch-area-head", "data-part": "head-panel", "aria-label": "Arithmetic of one head" },
    panelHead("One head, number by number", title, menu),
    flow,
    arithmetic,
  );
  let explained = "";
  let drawn = false;
  let unit = 1;

  /** @param {typeof MATRICES_OF_HEAD[number]} entry */
  function createCard({ name, title: text, before, axis, note }) {
    const canvas = node("canvas", { class: "ch-matrix", tabindex: "0", role: "application", "data-matrix": name });
    const shape = node("span", { class: "ch-matrix-shape" }, axis);
    const limits = node("span", { class: "ch-matrix-limits" });
    const operator = node("span", { class: "ch-operator" }, before);
    const card = node(
      "figure",
      { class: "ch-matrix-card" },
      before ? operator : null,
      node(
        "div",
        {},
        node("figcaption", {}, node("b", {}, text), shape),
        canvas,
        node("p", { class: "ch-note" }, note),
        limits,
      ),
    );
    const painted = { steps: /** @type {object | null} */ (null), dark: false, limit: 1 };
    const entry = {
      painted,
      element: card,
      name,
      operator,
      canvas,
      shape,
      limits,
      cursor: 0,
      columns: 1,
      count: 0,
      sheet: document.createElement("canvas"),
    };

    const choose = (/** @type {number} */ cell) => {
      entry.cursor = cell;
      const [row, column] = [Math.floor(cell / entry.columns), cell % entry.columns];
      session.update({ cell: { matrix: name, row, column } });
    };
    canvas.addEventListener("click", (event) => {
      const box = canvas.getBoundingClientRect();
      const rows = entry.count / entry.columns;
      const cell = cellAt(event.clientX - box.left, event.clientY - box.top, box.width, box.height, [
        rows,
        entry.columns,
      ]);
      if (cell >= 0) choose(cell);
    });
    canvas.addEventListener("keydown", (event) => {
      const next = moveCell(entry.cursor, event.key, entry.columns, entry.count);
      if (next === null && event.key !== "Enter") return;
      event.preventDefault();
      event.stopPropagation();
      choose(next ?? entry.cursor);
    });
    return entry;
  }

  /** The matrices of the current steps by name; some are computed. */
  const tensors = {
    of: /** @type {object | null} */ (null),
    byName: /** @type {Map<string, Tensor | null>} */ (new Map()),
  };

  /** @param {string} name @returns {Tensor | null} */
  function tensorOf(name) {
    const { steps } = session;
    if (!steps) return null;
    if (tensors.of !== steps) {
      tensors.of = steps;
      tensors.byName = new Map(
        cards.map((card) => [card.name, matrixOf(steps, /** @type {MatrixName} */ (card.name))]),
      );
      tensors.byName.set("q", steps.q).set("v", steps.v).set("kT", transposed(steps.k));
    }
    return tensors.byName.get(name) ?? null;
  }

  /** Row of the query that the other panels show. */
  function activeRow() {
    const layer = session.layers[session.layer];
    const tokens = tokenLayout(session.description, layer);
    const { query } = session.activeQuery;
    if (layer.queries === 1) return 0;
    return query === READOUT ? (tokens.readout === "token" ? 0 : -1) : tokens.prefix + query;
  }

  /** The side of a cell, so that all matrices fit into one line where there is room. */
  function cellSize() {
    const columns = cards.reduce((sum, { name }) => sum + (tensorOf(name)?.shape[1] ?? 0), 0);
    const room = (flow.clientWidth - OPERATORS) / Math.max(1, columns);
    const largest = Math.max(...(session.steps?.scores.shape ?? [1]), session.steps?.q.shape[1] ?? 1);
    return clamp(room, 100 / largest, Math.min(MAX_CELL, 160 / largest));
  }

  /**
   * The colors of a matrix, one pixel for each number; painted again only if the matrix or the theme has changed.
   * @param {ReturnType<typeof createCard>} card
   * @param {Tensor} tensor
   * @param {boolean} dark
   * @returns {number} the limit of the color scale
   */
  function paintSheet(card, tensor, dark) {
    if (card.painted.steps === session.steps && card.painted.dark === dark) return card.painted.limit;
    const [rows, columns] = tensor.shape;
    const positive = isPositive(card.name);
    const finite = Float32Array.from(tensor.data, (x) => (Number.isFinite(x) ? x : 0));
    const limit = maxAbsOf(finite) || 1;
    const table = positive ? (dark ? GLOW : AMBER_LIGHT) : dark ? SIGNED_DARK : SIGNED_LIGHT;
    const image = new ImageData(columns, rows);
    paintColors(finite, positive ? 0 : -limit, limit, table, image.data);
    [card.sheet.width, card.sheet.height] = [columns, rows];
    contextOf(card.sheet).putImageData(image, 0, 0);
    card.painted = { steps: session.steps, dark, limit };
    return limit;
  }

  /** @param {ReturnType<typeof createCard>} card @param {number} unit */
  function drawMatrix(card, unit) {
    const tensor = tensorOf(card.name);
    card.element.hidden = !tensor;
    if (!tensor) return;
    const [rows, columns] = tensor.shape;
    [card.columns, card.count] = [columns, rows * columns];
    const side = (/** @type {number} */ count) => clamp(count * unit, MIN_SIDE, MAX_SIDE_OF_MATRIX);
    const [width, height] = [side(columns), side(rows)];
    Object.assign(card.canvas.style, { width: `${width}px`, height: `${height}px` });
    const context = fitCanvas(card.canvas, width, height);
    const dark = session.theme === "dark";
    const limit = paintSheet(card, tensor, dark);
    context.imageSmoothingEnabled = false;
    context.drawImage(card.sheet, 0, 0, width, height);
    const row = activeRow();
    const byQuery = card.name !== "kT" && card.name !== "v";
    context.strokeStyle = dark ? "#fff" : "#1c1e22";
    context.lineWidth = 1;
    if (byQuery && row >= 0 && rows > 1)
      context.strokeRect(0.5, row * (height / rows) - 0.5, width - 1, height / rows + 1);
    const { cell } = session.state;
    if (cell?.matrix === card.name && cell.row < rows && cell.column < columns) {
      const [w, h] = [width / columns, height / rows];
      context.lineWidth = 2;
      context.strokeStyle = dark ? "#7fb4ff" : "#1f66d1";
      context.strokeRect(cell.column * w - 1, cell.row * h - 1, w + 2, h + 2);
    }
    setText(card.shape, `${rows} × ${columns}`);
    setText(card.limits, isPositive(card.name) ? `0 to ${shortNumber(limit)}` : `±${shortNumber(limit)}`);
    card.canvas.setAttribute(
      "aria-label",
      `${card.name}, ${rows} rows and ${columns} columns. Arrow keys choose a number.`,
    );
  }

  /** @param {number} token @param {boolean} isQuery */
  function tokenName(token, isQuery) {
    const layer = session.layers[session.layer];
    const { grid, tokens: labels } = session.description;
    const tokens = tokenLayout(session.description, layer);
    if (isQuery && layer.queries === 1) return "pooling query";
    if (!tokens.onGrid || !grid) return labels?.[token] ? `token ${token} “${labels[token]}”` : `token ${token}`;
    if (token >= tokens.prefix)
      return `patch (${Math.floor((token - tokens.prefix) / grid[1]) + 1}, ${((token - tokens.prefix) % grid[1]) + 1})`;
    return token === 0 && hasClassTokenIn(session.description) ? "class token" : `register token ${token}`;
  }

  function drawArithmetic() {
    const { steps } = session;
    const { cell } = session.state;
    const projection = steps ? (session.tensors?.get(`model.${steps.layer}.out_proj.weight`) ?? null) : null;
    const found =
      steps && cell && explainCell(steps, /** @type {MatrixName} */ (cell.matrix), cell.row, cell.column, projection);
    const key = found ? JSON.stringify(found) : "";
    if (key === explained && arithmetic.childElementCount) return;
    explained = key;
    if (!found || !steps) {
      const hint = "Click a cell of q kᵀ, β q kᵀ, A, A v or W_O A v to see how its number is computed.";
      arithmetic.replaceChildren(node("p", { class: "ch-note" }, hint));
      return;
    }
    arithmetic.replaceChildren(...describeCell(found, steps.beta));
  }

  /**
   * @param {import("./arithmetic.js").Arithmetic} found
   * @param {number} beta
   */
  function describeCell(found, beta) {
    const { matrix, row, column, value } = found;
    const query = tokenName(row, true);
    const key = tokenName(column, false);
    const n = shortNumber;
    const [heading, formula] = {
      scores: [`Score of ${query} for ${key}`, `q · k = ${n(value)}`],
      scaled: [
        `Scaled score of ${query} for ${key}`,
        `β × q · k = ${n(beta)} × ${n(found.terms[0]?.factors[1] ?? 0)} = ${n(value)}`,
      ],
      mask: [
        `Mask of ${query} for ${key}`,
        value ? "1: the query may attend to the key" : "0: the query may not attend to the key",
      ],
      weights: [
        `Weight of ${query} for ${key}`,
        `exp(x − max) / Σ exp(x − max) = ${n(found.numerator ?? 0)} / ${n(found.sum)} = ${n(value)}`,
      ],
      out: [`Output of ${query}, dimension ${column}`, `Σ A v = ${n(value)}`],
      projected: [`Contribution to ${query}, dimension ${column} of the residual stream`, `Σ out × W_O = ${n(value)}`],
    }[matrix];
    const replaced = found.isReplaced
      ? node("p", { class: "ch-note" }, "An edit has replaced the computed weight.")
      : null;
    const head = node(
      "div",
      { class: "ch-arithmetic-head" },
      node("h3", {}, heading),
      node("p", { class: "ch-formula" }, formula),
      replaced,
    );
    if (found.over === "none") return [head];
    const largest = Math.max(...found.terms.map(({ value: term }) => Math.abs(term)), Math.abs(found.others), 1e-12);
    const name = (/** @type {number} */ index) =>
      found.over === "key" ? tokenName(index, false) : `dimension ${index}`;
    const product = (/** @type {number[]} */ factors) =>
      matrix === "weights" ? `exp(${n(factors[0])})` : factors.map(n).join(" × ");
    const rows = [
      ...found.terms.map((term) => termRow(name(term.index), product(term.factors), term.value, largest)),
      found.numOthers
        ? termRow(`${found.numOthers} other ${found.over === "key" ? "keys" : "dimensions"}`, "", found.others, largest)
        : null,
      termRow("Sum", "", found.sum, 0),
    ];
    return [head, node("table", { class: "ch-terms" }, node("tbody", {}, ...rows))];
  }

  /** @param {string} name @param {string} product @param {number} value @param {number} largest 0: no bar */
  function termRow(name, product, value, largest) {
    const bar = node("span", { class: value < 0 ? "ch-term-bar ch-negative" : "ch-term-bar" });
    bar.style.width = `${largest ? (100 * Math.abs(value)) / largest : 0}%`;
    return node(
      "tr",
      { class: largest ? "" : "ch-sum" },
      node("th", {}, name),
      node("td", {}, product),
      node("td", { class: "ch-term-value" }, shortNumber(value)),
      node("td", { class: "ch-term-track" }, bar),
    );
  }

  /** @param {Set<Change>} changes */
  function draw(changes) {
    if (changes.size === 1 && changes.has("measures")) return;
    const isHover = changes.size === 1 && changes.has("query");
    if (!session.layers.length) return;
    const stale = !session.steps;
    element.classList.toggle("ch-stale", stale);
    setText(title, `${session.layers[session.layer].name}, head ${Math.max(0, session.state.head)}`);
    flow.classList.toggle("ch-empty", stale && !drawn);
    if (stale) return;
    drawn = true;
    if (!isHover) unit = cellSize();
    let above = Infinity;
    for (const card of cards) {
      drawMatrix(card, unit);
      if (card.element.hidden) continue;
      const height = parseFloat(card.canvas.style.height);
      card.operator.style.marginTop = `${12 + Math.min(above, height) / 2}px`;
      above = height;
    }
    if (!isHover) drawArithmetic();
  }

  return { element, draw };
}

/** @param {string} name of a matrix */
function isPositive(name) {
  return name === "weights" || name === "mask";
}

/** @param {Tensor} tensor @returns {Tensor} */
function transposed({ shape: [rows, columns], data }) {
  const out = new Float32Array(rows * columns);
  for (let i = 0; i < rows; i++) for (let j = 0; j < columns; j++) out[j * rows + i] = data[i * columns + j];
  return { shape: [columns, rows], data: out };
}
