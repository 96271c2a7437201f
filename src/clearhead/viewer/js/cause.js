/**
 * Causes: edits of heads and of beta, the list of active edits, and what they have changed.
 */

import { icon, node, panelHead, setText } from "./dom.js";
import { BETA_STEPS, betaAt, betaPosition, patchName, percent, shortNumber, signed } from "./layout.js";
import { ALL_HEADS, indexOfMax } from "./queries.js";

/** @typedef {import("./session.js").Session} Session */
/** @typedef {import("./session.js").Change} Change */
/** @typedef {import("./actions.js").Actions} Actions */

/**
 * The inverse temperature of the model; null if it is unknown.
 * @param {Session} session
 */
export function ownBeta(session) {
  const { config } = session.description;
  if (!config) return session.state.edits.beta === null ? (session.steps?.beta ?? null) : null;
  return config.beta ?? 1 / Math.sqrt(config.width / config.num_heads);
}

/**
 * @param {Session} session
 * @param {Actions} actions
 * @param {HTMLElement} menu
 */
export function createCause(session, actions, menu) {
  const headName = node("p", { class: "ch-cause-head" });
  const headEffect = node("p", { class: "ch-measured" });
  const button = (/** @type {string} */ text, /** @type {"zero" | "uniform"} */ pattern, /** @type {string} */ title) =>
    node(
      "button",
      {
        type: "button",
        class: "ch-button",
        title,
        click: () => actions.editHead(session.layer, session.state.head, pattern),
      },
      text,
    );
  const zero = button("Set to zero", "zero", "The head contributes nothing (Z on the wall)");
  const uniform = button("Make uniform", "uniform", "The head attends to all keys equally (U on the wall)");

  const betaValue = node("output", { class: "ch-beta-value" });
  const slider = node("input", {
    type: "range",
    min: "0",
    max: String(BETA_STEPS),
    step: "1",
    "aria-label": "Inverse temperature beta",
  });
  const own = { value: /** @type {number | null} */ (null) };
  const setBeta = (/** @type {boolean} */ push) => {
    if (own.value === null) return;
    const position = Number(slider.value);
    session.updateEdits({ beta: position === BETA_STEPS / 2 ? null : betaAt(position, own.value) }, { push });
  };
  slider.addEventListener("input", () => setBeta(false));
  slider.addEventListener("change", () => setBeta(true));
  const ownTick = node("button", { type: "button", click: () => session.updateEdits({ beta: null }) }, "1/√D");
  const ticks = node(
    "div",
    { class: "ch-beta-ticks" },
    node("button", { type: "button", click: () => session.updateEdits({ beta: 0 }) }, "0"),
    ownTick,
    node("button", { type: "button", click: () => session.updateEdits({ beta: Infinity }) }, "∞"),
  );
  const beta = node(
    "div",
    { class: "ch-cause-group" },
    node("h3", {}, "Inverse temperature β of all heads", betaValue),
    node("div", { class: "ch-beta" }, slider, ticks),
    node(
      "p",
      { class: "ch-note" },
      "At β = 0 every head attends to all keys equally; at β = ∞ only to the key with the largest score.",
    ),
  );

  const chips = node("div", { class: "ch-chips", role: "list", "aria-label": "Active edits" });
  const outcome = node("p", { class: "ch-outcome" });
  const reset = node("button", { type: "button", class: "ch-button", click: actions.reset }, "Reset");
  const element = node(
    "section",
    { class: "ch-panel ch-area-cause", "data-part": "cause", "aria-label": "Cause" },
    panelHead("Cause", node("span", { class: "ch-note" }, "Edit the model and see the effect."), menu),
    node(
      "div",
      { class: "ch-cause-group" },
      node("h3", {}, "Selected head"),
      headName,
      node("div", { class: "ch-row" }, zero, uniform),
      headEffect,
    ),
    beta,
    node("div", { class: "ch-cause-group ch-active" }, node("h3", {}, "Active edits", reset), chips, outcome),
  );
  let shown = "";

  /** @returns {{text: string, remove: () => void}[]} */
  function listEdits() {
    const { edits } = session.state;
    const grid = session.description.grid ?? [1, 1];
    return [
      ...edits.hiddenPatches.map((p) => ({ text: `Hidden: ${patchName(p, grid)}`, remove: () => actions.hide(p) })),
      ...edits.maskedPatches.map((p) => ({ text: `Masked: ${patchName(p, grid)}`, remove: () => actions.mask(p) })),
      ...edits.heads.map((e) => ({
        text: `${e.layer}, head ${e.head}: ${e.pattern}`,
        remove: () =>
          actions.editHead(
            session.layers.findIndex(({ name }) => name === e.layer),
            e.head,
            e.pattern,
          ),
      })),
      ...(edits.beta === null
        ? []
        : [{ text: `β = ${shortNumber(edits.beta)}`, remove: () => session.updateEdits({ beta: null }) }]),
    ];
  }

  function drawChips() {
    const edits = listEdits();
    const key = edits.map(({ text }) => text).join("|");
    reset.hidden = !edits.length;
    if (key === shown && chips.childElementCount) return;
    shown = key;
    const items = edits.map(({ text, remove }) =>
      node(
        "span",
        { class: "ch-chip", role: "listitem" },
        text,
        node(
          "button",
          { type: "button", "aria-label": `Remove: ${text}`, title: "Remove", click: remove },
          icon("close"),
        ),
      ),
    );
    chips.replaceChildren(
      ...(items.length ? items : [node("span", { class: "ch-note" }, "None. Hide a patch, edit a head or change β.")]),
    );
  }

  function describeOutcome() {
    if (!session.edited || !session.probabilities.length || session.input.empty) return "";
    const before = indexOfMax(session.baseline);
    const after = indexOfMax(session.probabilities);
    const name = session.className(before);
    const change = session.probabilities[before] - session.baseline[before];
    const flipped =
      after === before
        ? ""
        : ` The prediction is now ${session.className(after)} (${percent(session.probabilities[after])}).`;
    const [from, to] = [percent(session.baseline[before]), percent(session.probabilities[before])];
    return `P(${name}): ${from} → ${to} (${signed(change)}).${flipped}`;
  }

  /** @param {Set<Change>} changes */
  function draw(changes) {
    if (changes.size === 1 && changes.has("query")) return;
    const { layer } = session;
    const { head, edits } = session.state;
    setText(headName, session.headName);
    const name = session.layers[layer]?.name;
    const count = session.layers[layer]?.heads ?? 0;
    const has = (/** @type {string} */ pattern) => {
      const found = edits.heads.filter(
        (e) => e.layer === name && e.pattern === pattern && (head === ALL_HEADS || e.head === head),
      );
      return String(found.length > 0 && found.length === (head === ALL_HEADS ? count : 1));
    };
    zero.setAttribute("aria-pressed", has("zero"));
    uniform.setAttribute("aria-pressed", has("uniform"));
    setText(headEffect, describeHeadEffect());
    drawChips();
    setText(outcome, describeOutcome());
    own.value = ownBeta(session) ?? own.value;
    beta.hidden = own.value === null;
    if (own.value === null) return;
    slider.value = String(edits.beta === null ? BETA_STEPS / 2 : betaPosition(edits.beta, own.value));
    setText(betaValue, `β = ${shortNumber(edits.beta ?? own.value)}`);
    slider.setAttribute(
      "aria-valuetext",
      edits.beta === null ? `${shortNumber(own.value)}, the model's own` : shortNumber(edits.beta),
    );
    ownTick.textContent = session.description.config?.beta ? shortNumber(own.value) : "1/√D";
  }

  function describeHeadEffect() {
    const { effects } = session;
    if (!effects) return session.input.empty ? "" : session.measuresWait ? "" : "Measuring …";
    const target = session.className(session.target);
    const at = session.headIndex(session.layer, 0);
    if (session.state.head !== ALL_HEADS)
      return `Setting it to zero changes P(${target}) by ${signed(effects[at + session.state.head], 3)}.`;
    const own = effects.subarray(at, at + (session.layers[session.layer]?.heads ?? 0));
    if (!own.length) return "";
    const strongest = indexOfMax(own.map(Math.abs));
    return `Its strongest head is ${strongest}: setting it to zero changes P(${target}) by ${signed(own[strongest], 3)}.`;
  }

  return { element, draw };
}
