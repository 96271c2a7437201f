/**
 * What the panels show: the state, and everything that is computed from it. Panels read a session, change its state
 * with `update`, and are drawn again once per frame.
 */

import { noEdits } from "./engine.js";
import { examplesOf, inputOf, inputSize } from "./inputs.js";
import { ALL_HEADS, READOUT, indexOfMax, patchMap, subtractMap, toProbabilities, tokenLayout } from "./queries.js";
import { hasEdits } from "./state.js";

/** @typedef {import("./types.js").Description} Description */
/** @typedef {import("./types.js").Tensors} Tensors */
/** @typedef {import("./types.js").Engine} Engine */
/** @typedef {import("./types.js").Edits} Edits */
/** @typedef {import("./types.js").Result} Result */
/** @typedef {import("./types.js").HeadSteps} HeadSteps */
/** @typedef {import("./types.js").Attribution} Attribution */
/** @typedef {import("./state.js").State} State */
/** @typedef {import("./inputs.js").Input} Input */

/**
 * What has changed since the last frame: the state, the query under the pointer, the input, the result of the pass,
 * measured effects, the theme, or the size of the page.
 * @typedef {"state" | "query" | "input" | "result" | "measures" | "steps" | "theme" | "layout"} Change
 */
/** @typedef {{element: HTMLElement, draw: (changes: Set<Change>) => void}} Panel */
/** @typedef {{query: number, minus: number | null}} ActiveQuery */

/** Milliseconds without a change of the input before effects are measured. */
const SETTLE = 140;
/** Effects are measured without being asked for if they take less than this, in milliseconds: here, and on a server. */
const AUTOMATIC = { model: 20000, live: 2500, trace: Infinity };
const MAX_UNANSWERED = 4;
const METHODS = /** @type {const} */ (["occlusion", "mean", "rollout", "relevance"]);

export class Session {
  /**
   * @param {Description} description
   * @param {State} state
   */
  constructor(description, state) {
    this.description = description;
    this.state = state;
    /** @type {Engine | null} */
    this.engine = null;
    /** @type {Tensors | null} */
    this.tensors = null;
    /** @type {Input} */
    this.input = { pixels: new Uint8Array(inputSize(description)), transform: null, empty: true };
    /** @type {Result | null} result of the pass with the edits */
    this.result = null;
    /** @type {Float32Array} */
    this.probabilities = new Float32Array(0);
    /** @type {Float32Array} probabilities without edits; equal to `probabilities` if there are none */
    this.baseline = new Float32Array(0);
    /** @type {Float32Array | null} change of the probability of `target` when a head is set to zero */
    this.effects = null;
    /** @type {Map<Attribution["method"], Float32Array>} */
    this.attributions = new Map();
    /** @type {Float32Array | null} effects to show: the latest ones, also while newer ones are being measured */
    this.shownEffects = null;
    /** @type {Map<Attribution["method"], Float32Array>} */
    this.shownAttributions = new Map();
    /** class whose probability the effects are about: the predicted one */
    this.target = 0;
    /** @type {HeadSteps | null} */
    this.steps = null;
    /** @type {number | null} query under the pointer */
    this.hover = null;
    /** @type {"light" | "dark"} */
    this.theme = "light";
    this.penDown = false;
    /** whether the visitor has asked for effects that take long to measure */
    this.measureRequested = false;
    /** @type {number[]} milliseconds of the latest passes */
    this.passTimes = [];
    /** @type {Panel[]} */
    this.panels = [];
    /** @type {(push: boolean) => void} called when the state has changed */
    this.onState = () => {};
    /** @type {(busy: boolean) => void} called when the engine starts and ends to compute */
    this.onBusy = () => {};
    /** @type {(message: string) => void} called with an error of the engine */
    this.onError = () => {};
    /** @type {(() => void)[]} called after a pass, before the next frame */
    this.onResult = [];
    /** milliseconds that the latest frames took to draw, for tests */
    this.frameTimes = /** @type {{changes: string, milliseconds: number}[]} */ ([]);
    /** @type {Set<Change>} */
    this.changes = new Set();
    this.frame = 0;
    this.version = 0;
    /** version that the result belongs to; older than `version` while a pass is being computed */
    this.resultVersion = -1;
    this.running = false;
    this.settleTimer = 0;
    this.closed = false;
    this.buffers = [new Float32Array(this.numPatches), new Float32Array(this.numPatches)];
  }

  get numPatches() {
    const { grid } = this.description;
    return grid ? grid[0] * grid[1] : 0;
  }

  /** The layers of the model; of a live model, they are known after its first pass. */
  get layers() {
    return this.description.layers.length ? this.description.layers : (this.result?.layers ?? []);
  }

  /** Index of the selected layer. */
  get layer() {
    const last = this.layers.length - 1;
    return this.state.layer < 0 || this.state.layer > last ? last : this.state.layer;
  }

  get canRun() {
    return this.description.kind !== "trace";
  }

  get edited() {
    return hasEdits(this.state.edits);
  }

  get examples() {
    return examplesOf(this.tensors, this.canRun);
  }

  /**
   * Start computing.
   * @param {Tensors} tensors
   * @param {Engine} engine
   */
  start(tensors, engine) {
    this.tensors = tensors;
    this.engine = engine;
    this.refreshInput();
  }

  close() {
    this.closed = true;
    cancelAnimationFrame(this.frame);
    clearTimeout(this.settleTimer);
    this.engine?.close();
  }

  /**
   * Change the state.
   * @param {Partial<State>} changes
   * @param {{push?: boolean}} [options] push: a new entry in the history of the browser
   */
  update(changes, { push = true } = {}) {
    const previous = this.state;
    this.state = { ...previous, ...changes };
    const differs = (/** @type {(keyof State)[]} */ ...keys) => keys.some((key) => this.state[key] !== previous[key]);
    if (differs("source", "strokes", "example", "picture", "center")) this.refreshInput();
    else if (differs("edits")) this.requestRun();
    else if (differs("layer", "head")) this.measureSoon();
    if (differs("layer", "head", "edits")) this.steps = null;
    this.invalidate("state");
    this.onState(push);
  }

  /** @param {Partial<Edits>} changes */
  updateEdits(changes, options = {}) {
    this.update({ edits: { ...this.state.edits, ...changes } }, options);
  }

  /** @param {number | null} query under the pointer */
  setHover(query) {
    if (query === this.hover) return;
    this.hover = query;
    this.invalidate("query");
  }

  /** @param {...Change} changes */
  invalidate(...changes) {
    for (const change of changes) this.changes.add(change);
    if (!this.frame && !this.closed) this.frame = requestAnimationFrame(() => this.drawFrame());
  }

  drawFrame() {
    const started = performance.now();
    const changes = this.changes;
    this.changes = new Set();
    this.frame = 0;
    for (const panel of this.panels) panel.draw(changes);
    this.frameTimes.push({ changes: [...changes].join(" "), milliseconds: performance.now() - started });
    if (this.frameTimes.length > 500) this.frameTimes.shift();
  }

  refreshInput() {
    this.input = inputOf(this.state, this.description, this.examples);
    this.invalidate("input");
    this.requestRun();
  }

  requestRun() {
    this.version++;
    this.steps = null;
    clearTimeout(this.settleTimer);
    if (!this.running) this.runLoop();
  }

  async runLoop() {
    const { engine } = this;
    if (!engine) return;
    this.running = true;
    let done = -1;
    let unanswered = 0;
    while (done !== this.version && !this.closed) {
      done = this.version;
      const { pixels } = this.input;
      const { edits } = this.state;
      const started = performance.now();
      try {
        const result = await this.whileBusy(engine.run(pixels, edits));
        if (!result && ++unanswered < MAX_UNANSWERED) done = -1; // another request has replaced it
        if (!result) continue;
        this.recordPass(performance.now() - started);
        const unedited = hasEdits(edits) && engine.canRun ? await this.whileBusy(engine.run(pixels, noEdits)) : result;
        this.resultVersion = done;
        this.setResult(result, unedited ?? result);
      } catch (error) {
        this.onError(error instanceof Error ? error.message : String(error)); // a newer input is still computed
      }
    }
    this.running = false;
    this.measureSoon();
  }

  /**
   * @param {Result} result
   * @param {Result} unedited
   */
  setResult(result, unedited) {
    this.result = result;
    this.probabilities = toProbabilities(result.logits);
    this.baseline = unedited === result ? this.probabilities : toProbabilities(unedited.logits);
    this.target = indexOfMax(this.probabilities);
    this.effects = null;
    this.attributions = new Map();
    if (this.input.empty) this.shownAttributions = new Map();
    for (const callback of this.onResult) callback();
    this.invalidate("result");
  }

  /** Measure effects when neither the input nor the edits have changed for a moment. */
  measureSoon() {
    clearTimeout(this.settleTimer);
    if (!this.engine || this.input.empty) return;
    this.settleTimer = window.setTimeout(() => this.measure(), SETTLE);
  }

  /** @param {number} milliseconds */
  recordPass(milliseconds) {
    this.passTimes.push(milliseconds);
    if (this.passTimes.length > 9) this.passTimes.shift();
  }

  /** Milliseconds of a pass: the shortest of the latest ones, because the first one waits for the worker. */
  get passTime() {
    return this.passTimes.length > 1 ? Math.min(...this.passTimes) : 0;
  }

  /** The estimated time in milliseconds that measuring all effects takes. */
  get measureTime() {
    const heads = this.layers.reduce((sum, { heads }) => sum + heads, 0);
    return this.passTime * (heads + this.numPatches + 4);
  }

  get measuresWait() {
    return this.measureTime > AUTOMATIC[this.description.kind] && !this.measureRequested;
  }

  async measure() {
    const { engine, version, target } = this;
    const current = () => version === this.version && !this.closed && !this.penDown;
    if (!engine || !this.result || !current()) return;
    const { pixels } = this.input;
    const { edits } = this.state;
    try {
      if (engine.canRun) await this.measureSteps(current);
      if (this.measuresWait || !current()) return;
      if (!this.effects && engine.canRun) {
        const effects = await this.whileBusy(engine.headEffects(pixels, edits, target));
        if (!current()) return;
        this.effects = this.shownEffects = effects;
        this.invalidate("measures");
      }
      if (!this.description.grid) return;
      for (const method of METHODS) {
        if (this.attributions.has(method) || (!engine.canRun && method !== "mean" && method !== "rollout")) continue;
        const attribution = await this.whileBusy(engine.attribute(pixels, edits, method, target));
        if (!current()) return;
        if (attribution) this.attributions.set(method, attribution.patches);
        if (attribution) this.shownAttributions.set(method, attribution.patches);
        this.invalidate("measures");
      }
    } catch (error) {
      this.onError(error instanceof Error ? error.message : String(error));
    }
  }

  /** @param {() => boolean} current */
  async measureSteps(current) {
    const { engine, layer } = this;
    const head = Math.max(0, this.state.head);
    const name = this.layers[layer]?.name;
    if (!engine || !name || (this.steps?.layer === name && this.steps.head === head)) return;
    const started = performance.now();
    const steps = await this.whileBusy(engine.headSteps(this.input.pixels, this.state.edits, name, head));
    this.recordPass(performance.now() - started);
    if (!current() || !steps) return;
    this.steps = steps;
    this.invalidate("steps");
  }

  /**
   * @template T
   * @param {Promise<T>} work
   * @returns {Promise<T>}
   */
  async whileBusy(work) {
    this.onBusy(true);
    try {
      return await work;
    } finally {
      this.onBusy(false);
    }
  }

  /** The query whose map is shown: under the pointer, or the pinned ones, or the output query. @returns {ActiveQuery} */
  get activeQuery() {
    if (this.hover !== null) return { query: this.hover, minus: null };
    const [first, second] = this.state.pins;
    return { query: first ?? READOUT, minus: second ?? null };
  }

  /**
   * The map (P) of the active query in a layer and head; null if the layer's tokens are not on the grid. The array is
   * overwritten by the next call.
   * @param {number} layer
   * @param {number} head index or ALL_HEADS
   * @returns {Float32Array | null}
   */
  mapOf(layer, head) {
    const weights = this.result?.layers[layer];
    if (!weights) return null;
    const tokens = tokenLayout(this.description, weights);
    if (!tokens.onGrid) return null;
    const { query, minus } = this.activeQuery;
    const { direction } = this.state;
    const map = patchMap(weights, tokens, head, query, direction, this.buffers[0]);
    return minus === null ? map : subtractMap(map, patchMap(weights, tokens, head, minus, direction, this.buffers[1]));
  }

  /**
   * Index of a head in `effects`, which has the heads of one layer after another.
   * @param {number} layer
   * @param {number} head
   */
  headIndex(layer, head) {
    return this.layers.slice(0, layer).reduce((sum, { heads }) => sum + heads, 0) + head;
  }

  /** @param {number} index of a class */
  className(index) {
    return this.description.classes[index] ?? `class ${index}`;
  }

  /** Name of the selected head, for titles. */
  get headName() {
    const name = this.layers[this.layer]?.name ?? "";
    return this.state.head === ALL_HEADS ? `${name}, mean of all heads` : `${name}, head ${this.state.head}`;
  }
}
