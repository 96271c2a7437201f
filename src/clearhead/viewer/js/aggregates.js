/**
 * Attribution over all layers: mean attention, rollout, relevance and occlusion, each with what it does not tell.
 */

import { GLOW, SIGNED_DARK, paintColors } from "./colors.js";
import { contextOf, drawColorBar, fitCanvas, node, panelHead, setText } from "./dom.js";
import { percent, shortNumber } from "./layout.js";
import { paintInput } from "./maps.js";
import { indexOfMax, maxAbsOf, maxOf } from "./queries.js";

/** @typedef {import("./session.js").Session} Session */
/** @typedef {import("./session.js").Change} Change */
/** @typedef {import("./types.js").Attribution["method"]} Method */

/** @type {{method: Method, title: string, what: string, limit: string}[]} */
export const AGGREGATES = [
  {
    method: "occlusion",
    title: "Occlusion",
    what: "Hides one patch at a time and measures how much the probability drops.",
    limit: "Two patches that can replace each other both look unimportant.",
  },
  {
    method: "mean",
    title: "Mean attention",
    what: "Averages the output query's attention over heads.",
    limit: "It does not show which head matters or what the values contain.",
  },
  {
    method: "rollout",
    title: "Rollout",
    what: "Follows attention through all layers, half of each token along the residual connection.",
    limit: "It does not depend on the class, and ignores values and MLPs.",
  },
  {
    method: "relevance",
    title: "Relevance",
    what: "Weights attention by the gradient of the class's logit.",
    limit: "It ignores evidence against the class, and a gradient describes small changes only.",
  },
];

/**
 * @param {Session} session
 * @param {HTMLElement} menu
 */
export function createAggregates(session, menu) {
  const available = AGGREGATES.filter(({ method }) => session.canRun || method === "mean" || method === "rollout");
  const cards = available.map(createCard);
  const target = node("span", { class: "ch-note" });
  const element = node(
    "section",
    { class: "ch-panel ch-area-aggregates", "data-part": "aggregates", "aria-label": "Attribution over all layers" },
    panelHead("All layers in one map", target, menu),
    node("div", { class: "ch-aggregates" }, ...cards.map((card) => card.element)),
  );

  /** @param {typeof AGGREGATES[number]} entry */
  function createCard({ method, title, what, limit }) {
    const canvas = node("canvas", { class: "ch-aggregate-map", role: "img", "aria-label": title });
    const strip = node("canvas", { class: "ch-colorbar-strip", "aria-hidden": "true" });
    const [low, high] = [node("span", {}, ""), node("span", {}, "")];
    const effect = node("p", { class: "ch-measured" });
    const card = node(
      "figure",
      { class: "ch-aggregate", "data-method": method },
      canvas,
      node(
        "figcaption",
        {},
        node("h3", {}, title),
        node("p", {}, what),
        node("p", { class: "ch-limit" }, limit),
        effect,
      ),
      node("div", { class: "ch-colorbar" }, low, strip, high),
    );
    return { element: card, method, canvas, strip, low, high, effect };
  }

  const sheet = document.createElement("canvas");
  const ghost = document.createElement("canvas");

  /** @param {ReturnType<typeof createCard>} card */
  function drawCard({ method, canvas, strip, low, high, effect }) {
    const { grid, input } = session.description;
    const size = canvas.clientWidth;
    const context = fitCanvas(canvas, size, size);
    const map = session.input.empty ? undefined : session.shownAttributions.get(method);
    canvas.classList.toggle("ch-stale-map", Boolean(map) && !session.attributions.has(method));
    const isSigned = method === "occlusion";
    const table = isSigned ? SIGNED_DARK : GLOW;
    drawColorBar(strip, table);
    context.fillStyle = "#110f0d";
    context.fillRect(0, 0, size, size);
    setText(effect, describeEffect(method, map));
    if (!map || !grid) {
      setText(low, "");
      setText(high, "");
      return;
    }
    const limit = (isSigned ? maxAbsOf(map) : maxOf(map)) || 1e-9;
    const image = new ImageData(grid[1], grid[0]);
    paintColors(map, isSigned ? -limit : 0, limit, table, image.data);
    [sheet.width, sheet.height] = [grid[1], grid[0]];
    contextOf(sheet).putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(sheet, 0, 0, size, size);
    if (input?.channels === 1) {
      context.globalAlpha = 0.2;
      context.globalCompositeOperation = "screen";
      context.drawImage(ghost, 0, 0, size, size);
      context.globalAlpha = 1;
      context.globalCompositeOperation = "source-over";
    }
    setText(low, isSigned ? `−${shortNumber(limit)}` : "0");
    setText(high, shortNumber(limit));
  }

  /** @param {Method} method @param {Float32Array | undefined} map */
  function describeEffect(method, map) {
    const occlusion = session.attributions.get("occlusion");
    if (!map || !occlusion || !session.attributions.has(method)) return " ";
    const change = -occlusion[indexOfMax(map)];
    const now = session.probabilities[session.target];
    return `Hiding its top patch: ${percent(now)} → ${percent(now + change)}`;
  }

  /** @param {Set<Change>} changes */
  function draw(changes) {
    if (changes.size === 1 && (changes.has("query") || changes.has("steps"))) return;
    paintInput(session, ghost);
    setText(
      target,
      session.input.empty || !session.probabilities.length ? "" : `for P(${session.className(session.target)})`,
    );
    cards.forEach(drawCard);
  }

  return { element, draw };
}
