/**
 * The entrance of the viewer: `render({model, el})`, as anywidget defines it.
 *
 * For tests, `el.viewer` has the current `state`, `result`, `engine` and `session`, and `ready`, a promise that
 * resolves after the first pass.
 */

import { createActions } from "./actions.js";
import { createAggregates } from "./aggregates.js";
import { createBars } from "./bars.js";
import { createCause, ownBeta } from "./cause.js";
import { dropdown, checkbox, iconButton, node, panelHead, setText } from "./dom.js";
import { createEngine, createTraceEngine } from "./engine.js";
import { createSourcePanel } from "./examples.js";
import { copyText, createMenu } from "./exporting.js";
import { figureOfAggregates, figureOfBars, figureOfHead, figureOfInput, figureOfPad, figureOfWall } from "./figures.js";
import { createHeadPanel } from "./head_panel.js";
import { createHelp, createToast } from "./help.js";
import { createInputPanel } from "./input_panel.js";
import { linkKeys, linkState, linkTheme } from "./links.js";
import { counted, percent, topTwo } from "./layout.js";
import { createPad } from "./pad.js";
import { pythonLines } from "./python.js";
import { parseSafetensors } from "./safetensors.js";
import { Session } from "./session.js";
import { decodeState } from "./state.js";
import { createStory, hasStory } from "./story.js";
import { createTokenMatrix } from "./token_matrix.js";
import { createWall } from "./wall.js";

/** @typedef {import("./types.js").Description} Description */
/** @typedef {import("./types.js").WidgetModel} WidgetModel */
/** @typedef {import("./session.js").Change} Change */
/** @typedef {import("./python.js").PartName} PartName */
/** @typedef {import("./exporting.js").Figure} Figure */

/** Milliseconds of rest before a prediction is read aloud. */
const READ_DELAY = 700;
/** The wall of a model with more heads takes the whole width. */
const MANY_HEADS = 24;

/**
 * @param {{model: WidgetModel, el: HTMLElement}} context
 * @returns {() => void} removes the viewer
 */
export function render({ model, el }) {
  /** @type {Description} */
  const description = model.get("description");
  const text = model.get("state") ?? window.location.hash;
  const session = new Session(description, decodeState(text, description));
  const page = buildPage(session);
  el.replaceChildren(page.root);

  const cleanups = [linkState(model, session), linkTheme(session, page.root), linkKeys(session, page)];
  const observer = new ResizeObserver(() => session.invalidate("layout"));
  observer.observe(page.root);

  const ready = new Promise((resolve) => session.onResult.push(() => resolve(undefined)));
  const start = () => startEngine(model, session, page);
  model.on("change:tensors", start);
  start();
  if (page.story && !text.replace(/^#/, "")) page.story.start();
  session.invalidate("layout", "state", "input", "theme");

  const api = {
    get state() {
      return session.state;
    },
    get result() {
      return session.result;
    },
    get engine() {
      return session.engine;
    },
    session,
    ready,
  };
  Object.defineProperty(el, "viewer", { value: api, configurable: true });
  return () => {
    model.off("change:tensors", start);
    cleanups.forEach((cleanup) => cleanup());
    observer.disconnect();
    page.story?.close();
    session.close();
    el.replaceChildren();
  };
}

/**
 * @param {WidgetModel} model
 * @param {Session} session
 * @param {ReturnType<typeof buildPage>} page
 */
function startEngine(model, session, page) {
  const bytes = model.get("tensors");
  const { description } = session;
  if (!bytes || session.engine) return;
  try {
    const tensors = parseSafetensors(bytes);
    const given = model.get("engine");
    const spawnWorker = model.get("spawn") ?? null;
    const engine =
      given ??
      (description.kind === "trace"
        ? createTraceEngine(description, tensors)
        : createEngine({ description, tensors, spawnWorker }));
    session.start(tensors, engine);
    page.showFacts();
  } catch (error) {
    page.showError(error instanceof Error ? error.message : String(error));
  }
}

/** @param {Session} session */
function buildPage(session) {
  const { description } = session;
  const toast = createToast();
  const help = createHelp();
  const actions = createActions(session);
  const menu = (/** @type {PartName} */ part, /** @type {(session: Session) => Figure} */ figure) =>
    createMenu(`${description.title}-${part}`.replace(/[^\w.-]+/g, "-"), {
      figure: () => figure(session),
      python: () => pythonLines(part, shownBy(session)),
      say: toast.say,
    });

  /** @type {ReturnType<typeof createStory> | null} */
  let story = null;
  const hasGrid = Boolean(description.grid && description.input);
  const input = hasGrid ? createInputPanel(session, actions, menu("input", figureOfInput)) : null;
  const pad = session.canRun && description.input?.draw ? createPad(session, () => story?.takeOver()) : null;
  if (input && pad && hasStory(description)) {
    story = createStory(session, input.grid, { hide: actions.hide, remember: pad.remember });
  }
  const matrix = createTokenMatrix(session, hasGrid, menu("input", figureOfWall));
  const source = description.input
    ? createSourcePanel(session, pad, menu("pad", figureOfPad), story?.element ?? node("div"))
    : null;
  const bars = description.classes.length || session.canRun ? createBars(session) : null;
  const wall = createWall(session, actions);
  const cause = session.canRun ? createCause(session, actions, menu("cause", figureOfBars)) : null;
  const aggregates = hasGrid ? createAggregates(session, menu("aggregates", figureOfAggregates)) : null;
  const head = session.canRun ? createHeadPanel(session, menu("head-panel", figureOfHead)) : null;
  const wallPanel = createWallPanel(session, wall, menu("wall", figureOfWall));
  const barsPanel =
    bars &&
    node(
      "section",
      { class: "ch-panel ch-area-bars", "data-part": "bars", "aria-label": "Prediction" },
      panelHead("Prediction", null, menu("bars", figureOfBars)),
      bars.element,
    );

  const facts = node("span", { class: "ch-note ch-facts" });
  const busy = node("span", { class: "ch-busy", "aria-hidden": "true" });
  const themeButton = iconButton("auto", "Light or dark (T)", () =>
    session.update({ theme: session.theme === "dark" ? "light" : "dark" }, { push: false }),
  );
  const copyLink = iconButton("link", "Copy the link to this state", async () => {
    await copyText(window.location.href);
    toast.say("Link copied.");
  });
  const header = node(
    "header",
    { class: "ch-top" },
    node("h1", {}, node("span", { class: "ch-brand" }, "Clearhead"), node("span", {}, description.title)),
    facts,
    node("div", { class: "ch-panel-tools" }, busy, copyLink, themeButton, iconButton("help", "Keys (?)", help.toggle)),
  );
  const notices = node("div", { class: "ch-notices" });
  for (const line of description.unresolved) notices.append(node("p", { class: "ch-notice" }, line));
  const problem = node("p", { class: "ch-notice ch-problem", role: "alert", hidden: true });
  notices.append(problem);
  const live = node("div", { class: "ch-hidden", role: "status", "aria-live": "polite" });
  const many = description.layers.reduce((sum, { heads }) => sum + heads, 0) > MANY_HEADS;
  const root = node(
    "div",
    { class: `ch-viewer${many ? " ch-many-heads" : ""}${hasGrid ? "" : " ch-no-grid"}`, "data-kind": description.kind },
    header,
    notices,
    node(
      "div",
      { class: "ch-instrument" },
      source?.element,
      input?.element,
      matrix.element,
      barsPanel,
      wallPanel.element,
      cause?.element,
      aggregates?.element,
      head?.element,
    ),
    live,
    help.element,
    toast.element,
  );

  session.panels = [source, input, matrix, bars, wallPanel, cause, aggregates, head, story].filter(
    (panel) => panel !== null,
  );
  session.panels.push({ element: root, draw: drawRoot });
  session.onError = showError;
  session.onResult.push(() => (problem.hidden = true));
  session.onBusy = (isBusy) => busy.classList.toggle("ch-on", isBusy);
  let reading = 0;

  /** @param {Set<Change>} changes */
  function drawRoot(changes) {
    if (changes.has("theme")) root.dataset.theme = session.theme;
    root.classList.toggle("ch-ready", Boolean(session.result));
    if (!changes.has("result")) return;
    root.classList.toggle("ch-many-heads", session.layers.reduce((sum, { heads }) => sum + heads, 0) > MANY_HEADS);
    clearTimeout(reading);
    reading = window.setTimeout(readAloud, READ_DELAY);
  }

  function readAloud() {
    if (session.input.empty || !session.probabilities.length || session.penDown) return;
    const { first, second } = topTwo(session.probabilities);
    const others = second >= 0 ? `, then ${session.className(second)}, ${percent(session.probabilities[second])}` : "";
    setText(live, `Prediction: ${session.className(first)}, ${percent(session.probabilities[first])}${others}.`);
  }

  /** @param {string} message */
  function showError(message) {
    setText(problem, message);
    problem.hidden = false;
  }

  function showFacts() {
    const weights = [...(session.tensors ?? [])].filter(([name]) => name.startsWith("model."));
    const count = weights.reduce((sum, [, { data }]) => sum + data.length, 0);
    const heads = session.layers.reduce((sum, { heads: n }) => sum + n, 0);
    const parts = [
      count ? counted(count, "parameter") : "",
      counted(session.layers.length, "attention layer"),
      counted(heads, "head"),
    ];
    setText(facts, parts.filter(Boolean).join(" · "));
  }

  return { root, help, actions, story, source, showError, showFacts };
}

/**
 * @param {Session} session
 * @param {ReturnType<typeof createWall>} wall
 * @param {HTMLElement} menu
 */
function createWallPanel(session, wall, menu) {
  /** @type {[import("./state.js").Sort, string][]} */
  const sorts = [
    ["layer", "layer"],
    ["entropy", "entropy"],
    ["distance", "distance"],
    ["diagonality", "diagonality"],
  ];
  if (session.canRun) sorts.push(["effect", "measured effect"]);
  const sort = dropdown("Sort by", sorts, (value) => session.update({ sort: value }));
  const scale = checkbox("Own scale", "Each map uses its own color limits", (checked) =>
    session.update({ scale: checked ? "own" : "shared" }),
  );
  const measure = node("button", {
    type: "button",
    class: "ch-button",
    click: () => ((session.measureRequested = true), session.measure()),
  });
  const note = node("p", { class: "ch-note ch-wall-note" });
  const element = node(
    "section",
    { class: "ch-panel ch-area-wall", "data-part": "wall", "aria-label": "Layers and heads" },
    panelHead("Layers and heads", null, menu),
    node("div", { class: "ch-row ch-wall-tools" }, sort.element, scale.element),
    wall.element,
    note,
    measure,
  );
  /** @param {Set<Change>} changes */
  function draw(changes) {
    wall.draw(changes);
    sort.select.value = session.state.sort;
    scale.input.checked = session.state.scale === "own";
    measure.hidden = !(session.canRun && session.result && session.measuresWait);
    setText(measure, `Measure effects (about ${Math.ceil(session.measureTime / 1000)} s)`);
    const name = session.probabilities.length ? session.className(session.target) : "";
    setText(
      note,
      session.canRun && name && !session.input.empty
        ? `± is the change of P(${name}) when the head is set to zero.`
        : "",
    );
  }
  return { element, draw };
}

/** @param {Session} session @returns {import("./python.js").Shown} */
function shownBy(session) {
  const { description, layers, layer, target } = session;
  const { head, direction, edits } = session.state;
  const { query, minus } = session.activeQuery;
  return {
    description,
    layers,
    layer,
    head,
    query,
    minus,
    direction,
    target,
    edits,
    pixels: session.input.pixels,
    beta: ownBeta(session),
  };
}

export default { render };
