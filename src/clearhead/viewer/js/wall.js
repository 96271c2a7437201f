/**
 * The wall: a small map for every layer and head, which follows the query, with the measured effect of each head.
 *
 * All maps are drawn on one canvas; the buttons over it take the focus and the clicks.
 */

import { GLOW, SIGNED_DARK, SIGNED_LIGHT, cssColor, paintColors } from "./colors.js";
import { contextOf, drawColorBar, fitCanvas, node, setText } from "./dom.js";
import { paintInput } from "./maps.js";
import { cellAt, orderHeads, patchName, shortNumber, signOf, signed, wallBlocks, wallRows } from "./layout.js";
import { headMatrix, tokenLabel } from "./token_matrix.js";
import { headDiagonality, headDistance, headEntropy } from "./statistics.js";
import { ALL_HEADS, maxAbsOf, maxOf, tokenLayout } from "./queries.js";

/** @typedef {import("./session.js").Session} Session */
/** @typedef {import("./session.js").Change} Change */
/** @typedef {import("./layout.js").HeadRef} HeadRef */
/** @typedef {HeadRef & {x: number, y: number, element: HTMLButtonElement, name: HTMLElement, effect: HTMLElement}} Cell */

/** Cells smaller than this have no caption. */
const SMALL = 54;
const OPTIONS = { gap: 12, caption: 20, label: 22, minSize: 20, goodSize: 84, maxSize: 128 };
/** Of many heads, the overview counts more than the single map: small cells, with the effect as a colored line. */
const MANY = 40;
const SMALL_OPTIONS = { ...OPTIONS, gap: 4, caption: 6, goodSize: 36, maxSize: SMALL - 2 };

/**
 * @param {Session} session
 * @param {import("./actions.js").Actions} actions
 */
export function createWall(session, actions) {
  const canvas = node("canvas", { class: "ch-layer", "aria-hidden": "true" });
  const stage = node(
    "div",
    {
      class: "ch-wall-stage",
      role: "group",
      "aria-label": "Layers and heads. Arrow keys move, Enter selects, Z sets a head to zero, U makes it uniform.",
    },
    canvas,
  );
  const bar = node("canvas", { class: "ch-colorbar-strip", "aria-hidden": "true" });
  const low = node("span", {}, "0");
  const high = node("span", {}, "1");
  const legend = node("div", { class: "ch-colorbar" }, low, bar, high);
  const element = node("div", { class: "ch-wall" }, stage, legend);
  const ghost = document.createElement("canvas");
  const sheet = document.createElement("canvas");
  const matrixSheet = document.createElement("canvas");
  const tip = node("div", { class: "ch-tip", hidden: true, "aria-hidden": "true" });
  /** @type {Cell[]} */
  let cells = [];
  let [size, columns, caption] = [0, 1, 0];
  const stageSize = { width: 0, height: 0 };
  let built = "";
  /** @type {number[]} */
  let matrixLimits = [];
  let focused = 0;
  /** @type {{result: any, sort: string, values: Float32Array} | null} */
  let statistics = null;

  /** Values that the wall is sorted by; null for the order of layers. */
  function sortValues() {
    const { sort } = session.state;
    if (sort === "layer" || !session.result) return null;
    if (sort === "effect") return session.effects?.map((value) => -Math.abs(value)) ?? null;
    if (statistics?.result !== session.result || statistics.sort !== sort) {
      const each = session.result.layers.map((layer) => [
        ...(statisticOf(layer, sort) ?? Array(layer.heads).fill(NaN)),
      ]);
      statistics = { result: session.result, sort, values: Float32Array.from(each.flat()) };
    }
    return statistics.values;
  }

  /** @param {import("./types.js").LayerWeights} layer @param {"entropy" | "distance" | "diagonality"} sort */
  function statisticOf(layer, sort) {
    if (sort === "entropy") return headEntropy(layer);
    if (sort === "diagonality") return headDiagonality(layer);
    const tokens = tokenLayout(session.description, layer);
    return headDistance(layer, tokens.onGrid ? session.description.grid : null, tokens.onGrid ? tokens.prefix : 0);
  }

  function build() {
    const width = stage.clientWidth;
    const counts = session.layers.map(({ heads }) => heads);
    const byLayer = session.state.sort === "layer";
    const order = orderHeads(counts, sortValues(), session.state.sort === "diagonality");
    const key = JSON.stringify([width, counts, order, byLayer]);
    if (key === built || !width) return;
    built = key;
    const isSmall = order.length > MANY || wallBlocks(width, counts, OPTIONS).size < SMALL;
    const options = isSmall ? SMALL_OPTIONS : OPTIONS;
    const blocks = wallBlocks(width, counts, options);
    const rows = wallRows(width, order, blocks.size, options);
    size = blocks.size;
    columns = byLayer ? blocks.columns : rows.columns;
    caption = options.caption;
    cells = (byLayer ? blocks : rows).cells.map((cell) => createCell(cell, cell.x, cell.y));
    const labels = byLayer ? blocks.labels.map(({ layer, x, y }) => layerLabel(layer, x, y)) : [];
    stage.replaceChildren(canvas, tip, ...labels, ...cells.map((cell) => cell.element));
    Object.assign(stageSize, { width, height: (byLayer ? blocks : rows).height });
    stage.style.height = `${stageSize.height}px`;
    element.classList.toggle("ch-small", isSmall);
    focused = Math.min(focused, cells.length - 1);
  }

  /** @param {number} layer @param {number} x @param {number} y */
  function layerLabel(layer, x, y) {
    const { name, queries, keys } = session.layers[layer];
    const label = node(
      "button",
      {
        type: "button",
        class: "ch-layer-label",
        title: "Show the mean over the heads of this layer",
        click: () => session.update({ layer, head: ALL_HEADS }),
        "data-layer": layer,
        "data-head": "mean",
      },
      node("b", {}, name),
      node("span", {}, `${queries} × ${keys}`),
    );
    Object.assign(label.style, { left: `${x}px`, top: `${y}px` });
    return label;
  }

  /** @param {HeadRef} ref @param {number} x @param {number} y @returns {Cell} */
  function createCell(ref, x, y) {
    const name = node("span", {});
    const effect = node("span", { class: "ch-effect" });
    const button = node(
      "button",
      { type: "button", class: "ch-wall-cell", "data-layer": ref.layer, "data-head": ref.head, tabindex: "-1" },
      node("span", { class: "ch-wall-caption" }, name, effect),
    );
    Object.assign(button.style, { left: `${x}px`, top: `${y}px`, width: `${size}px`, height: `${size + caption}px` });
    button.addEventListener("click", () => session.update({ layer: ref.layer, head: ref.head }));
    return { ...ref, x, y, element: button, name, effect };
  }

  stage.addEventListener("keydown", (event) => {
    const index = cells.findIndex((cell) => cell.element === event.target);
    if (index < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
    if (step) {
      focused = Math.min(cells.length - 1, Math.max(0, index + step));
      cells[focused].element.focus();
      session.invalidate("state");
    } else if (event.key === "z") actions.editHead(cells[index].layer, cells[index].head, "zero");
    else if (event.key === "u") actions.editHead(cells[index].layer, cells[index].head, "uniform");
    else return;
    event.preventDefault();
    event.stopPropagation();
  });

  /** @param {boolean} isHover then matrices, which do not follow the query, stay as they are */
  function drawMaps(isHover) {
    const { grid } = session.description;
    const context = fitCanvas(canvas, stageSize.width, stageSize.height, !isHover);
    context.imageSmoothingEnabled = false;
    const isSigned = session.activeQuery.minus !== null;
    const table = isSigned ? SIGNED_DARK : GLOW;
    const limitOf = isSigned ? maxAbsOf : maxOf;
    const own = session.state.scale === "own";
    const { empty } = session.input;
    const maps = cells.map(({ layer, head }) => (empty ? null : (session.mapOf(layer, head)?.slice() ?? null)));
    const matrices = cells.map((cell, i) => (maps[i] || empty || isHover ? null : matrixOfCell(cell)));
    if (!isHover) matrixLimits = matrices.map((matrix) => (matrix ? maxOf(matrix.map) : 0));
    const shared = Math.max(1e-9, ...maps.map((map) => (map ? limitOf(map) : 0)), ...matrixLimits);
    if (grid) paintSheet(grid, maps, (map) => (own ? limitOf(map) : shared), isSigned, table);
    cells.forEach((cell, i) => {
      const matrix = matrices[i];
      if (!isHover || maps[i]) {
        context.fillStyle = cssColor(table, isSigned ? 0.5 : 0);
        context.fillRect(cell.x, cell.y, size, size);
      }
      if (matrix) drawMatrix(context, cell, matrix, own ? matrixLimits[i] : shared);
      if (!maps[i] || !grid) return;
      context.drawImage(sheet, 0, i * grid[0], grid[1], grid[0], cell.x, cell.y, size, size);
      if (session.description.input?.channels === 1 && size >= SMALL) drawGhost(context, cell);
    });
    if (size < SMALL) drawEffects(context);
    drawLegend(table, isSigned, own ? null : shared);
  }

  /** The input, faintly. @param {CanvasRenderingContext2D} context @param {Cell} cell */
  function drawGhost(context, cell) {
    context.globalAlpha = 0.2;
    context.globalCompositeOperation = "screen";
    context.drawImage(ghost, cell.x, cell.y, size, size);
    context.globalAlpha = 1;
    context.globalCompositeOperation = "source-over";
  }

  /** The effects of the heads as lines under their maps. @param {CanvasRenderingContext2D} context */
  function drawEffects(context) {
    const { shownEffects } = session;
    if (!shownEffects || session.input.empty) return;
    const limit = Math.max(0.005, maxAbsOf(shownEffects));
    const table = session.theme === "dark" ? SIGNED_DARK : SIGNED_LIGHT;
    for (const cell of cells) {
      const effect = shownEffects[session.headIndex(cell.layer, cell.head)];
      context.fillStyle = cssColor(table, 0.5 + effect / limit / 2);
      context.fillRect(cell.x, cell.y + size + 2, size, 3);
    }
  }

  /**
   * @param {[number, number]} grid
   * @param {(Float32Array | null)[]} maps
   * @param {(map: Float32Array) => number} limitOf
   * @param {boolean} isSigned
   * @param {import("./colors.js").ColorTable} table
   */
  function paintSheet([rows, cols], maps, limitOf, isSigned, table) {
    const image = new ImageData(cols, Math.max(1, rows * maps.length));
    maps.forEach((map, i) => {
      if (!map) return;
      const limit = limitOf(map) || 1;
      paintColors(map, isSigned ? -limit : 0, limit, table, image.data, i * rows * cols);
    });
    [sheet.width, sheet.height] = [image.width, image.height];
    contextOf(sheet).putImageData(image, 0, 0);
  }

  /** The whole matrix (Q,K) of a head whose tokens are not patches of the grid. @param {HeadRef} ref */
  function matrixOfCell({ layer, head }) {
    const weights = session.result?.layers[layer];
    return weights ? { queries: weights.queries, keys: weights.keys, map: headMatrix(weights, head) } : null;
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Cell} cell
   * @param {{queries: number, keys: number, map: Float32Array}} matrix
   * @param {number} limit
   */
  function drawMatrix(context, cell, { queries, keys, map }, limit) {
    const image = new ImageData(keys, queries);
    paintColors(map, 0, limit || 1, GLOW, image.data);
    [matrixSheet.width, matrixSheet.height] = [keys, queries];
    contextOf(matrixSheet).putImageData(image, 0, 0);
    context.drawImage(matrixSheet, cell.x, cell.y, size, size);
  }

  /** What lies under the pointer: a patch, or a query and a key. @param {PointerEvent} event */
  function describePointer(event) {
    const box = stage.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const cell = cells.find((c) => x >= c.x && x < c.x + size && y >= c.y && y < c.y + size);
    const layer = cell && session.result?.layers[cell.layer];
    if (!cell || !layer || session.input.empty) return "";
    const name = `${layer.name}, head ${cell.head}`;
    const map = session.mapOf(cell.layer, cell.head);
    const { grid, tokens } = session.description;
    if (map && grid) {
      const patch = cellAt(x - cell.x, y - cell.y, size, size, grid);
      return `${name} · ${patchName(patch, grid)}: ${shortNumber(map[patch])}`;
    }
    const at = cellAt(x - cell.x, y - cell.y, size, size, [layer.queries, layer.keys]);
    const [row, column] = [Math.floor(at / layer.keys), at % layer.keys];
    const weight = headMatrix(layer, cell.head)[at];
    const [query, key] = [tokenLabel(tokens, row, layer.queries), tokenLabel(tokens, column, layer.keys)];
    return `${name} · ${query} → ${key}: ${shortNumber(weight)}`;
  }

  stage.addEventListener("pointermove", (event) => {
    const text = describePointer(event);
    tip.hidden = !text;
    setText(tip, text);
    const box = stage.getBoundingClientRect();
    const x = Math.min(event.clientX - box.left + 14, Math.max(0, box.width - tip.offsetWidth));
    tip.style.transform = `translate(${x}px, ${event.clientY - box.top + 18}px)`;
  });
  stage.addEventListener("pointerleave", () => {
    tip.hidden = true;
  });

  /** @param {import("./colors.js").ColorTable} table @param {boolean} isSigned @param {number | null} limit */
  function drawLegend(table, isSigned, limit) {
    drawColorBar(bar, table);
    setText(low, isSigned ? (limit ? `−${shortNumber(limit)}` : "−max") : "0");
    setText(high, limit ? shortNumber(limit) : "max of each");
  }

  function drawCaptions() {
    const byLayer = session.state.sort === "layer";
    const values = sortValues();
    cells.forEach((cell, i) => {
      const index = session.headIndex(cell.layer, cell.head);
      const selected =
        cell.layer === session.layer && (session.state.head === cell.head || session.state.head === ALL_HEADS);
      const edit = session.state.edits.heads.find(
        (e) => e.layer === session.layers[cell.layer].name && e.head === cell.head,
      );
      const effect = session.shownEffects?.[index];
      cell.effect.classList.toggle("ch-stale-text", !session.effects);
      cell.element.classList.toggle("ch-selected", selected);
      cell.element.classList.toggle("ch-edited", Boolean(edit));
      cell.element.tabIndex = i === focused ? 0 : -1;
      const label = byLayer ? `head ${cell.head}` : `L${cell.layer} H${cell.head}`;
      const value = byLayer || !values || session.state.sort === "effect" ? NaN : values[index];
      setText(cell.name, Number.isFinite(value) ? `${label} · ${shortNumber(value)}` : label);
      setText(cell.effect, effect === undefined ? "" : signed(effect));
      cell.effect.dataset.sign = effect === undefined ? "0" : String(signOf(effect));
      const measured =
        effect === undefined
          ? ""
          : `; set to zero, it changes the probability of ${session.className(session.target)} by ${signed(effect)}`;
      cell.element.setAttribute(
        "aria-label",
        `${session.layers[cell.layer].name}, head ${cell.head}${edit ? `, ${edit.pattern}` : ""}${measured}`,
      );
      cell.element.setAttribute("aria-pressed", String(selected));
    });
  }

  /** @param {Set<Change>} changes */
  function draw(changes) {
    if (changes.has("layout") || changes.has("state") || changes.has("result") || changes.has("measures")) {
      build();
      drawCaptions();
    }
    if (changes.has("input") || changes.has("layout")) {
      paintInput(session, ghost);
    }
    drawMaps(changes.size === 1 && changes.has("query"));
  }

  return { element, draw };
}
