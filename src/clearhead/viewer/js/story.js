/**
 * The story of the first visit: a 3 draws itself, the visitor closes it to an 8, and hides one patch to get the 3 back.
 *
 * Every number in it is measured: the story waits for the predictions of the model instead of assuming them.
 */

import { icon, iconButton, node, setText } from "./dom.js";
import { patchName, percent } from "./layout.js";
import { indexOfMax } from "./queries.js";
import { decodeStrokes } from "./strokes.js";

/** @typedef {import("./session.js").Session} Session */
/** @typedef {import("./session.js").Change} Change */
/** @typedef {import("./strokes.js").Stroke} Stroke */
/** @typedef {import("./types.js").Description} Description */

/** A 3, and the stroke that closes it to an 8. */
export const RECORDED_THREE =
  "p1e1FXRYSZSZSZSZTaTaTaUaUaUaVaVZVaWZWaWZXYXYYYXXYXYXZWYVZVYVZUZUYTZSYTZRYSYRYRYQXRXQXQWQWQW1VnTnSaWaWaWZXZYZXYZYYXZXZXZVaWZUaVaTaUZSaTaRZSZRZQZRYQYQYQXPXQWPWQWQVPURUQUQTRTRSSSSSTRTRTRURVQVQVR";
export const RECORDED_CLOSING = "p1e1FUZUZUZUYVZVYVZVYVYWZWYWYWXXYXYPYQXRYRYRYTYSYTYUYUZVYVZVYWZXZ";

/** Duration of a recorded drawing, in milliseconds. */
const DRAWING_TIME = 2400;
const CLOSING_TIME = 900;
/** Patches that are tried, in the order of the measured effect, until the prediction is the first one again. */
const MAX_TRIES = 6;

/** @param {Description} description */
export function hasStory(description) {
  const { kind, input, classes, grid } = description;
  return kind !== "trace" && Boolean(input?.draw && grid) && classes.includes("3") && classes.includes("8");
}

/**
 * @param {Session} session
 * @param {{outline: (patch: number | null) => void}} grid
 * @param {{hide: (patch: number) => void, remember: () => void}} actions `remember` keeps the drawing for undo
 */
export function createStory(session, grid, actions) {
  const { classes } = session.description;
  const [three, eight] = [classes.indexOf("3"), classes.indexOf("8")];
  const prompt = node("p", { class: "ch-prompt", "aria-live": "polite" });
  const show = node("button", { type: "button", class: "ch-button ch-primary", click: () => playClosing() }, "Show me");
  const hideIt = node(
    "button",
    { type: "button", class: "ch-button ch-primary", click: () => patch !== null && actions.hide(patch) },
    "Hide it",
  );
  const replay = node(
    "button",
    { type: "button", class: "ch-button ch-quiet-button", click: () => start() },
    icon("replay"),
    node("span", {}, "Replay the story"),
  );
  const dismiss = iconButton("close", "Dismiss the story", () => setStep("off"));
  const dots = ["Draw", "See", "Cause"].map((text) => node("li", {}, text));
  const element = node(
    "div",
    { class: "ch-story", "data-part": "story" },
    node("ol", { class: "ch-steps", "aria-hidden": "true" }, ...dots),
    prompt,
    node("div", { class: "ch-row" }, show, hideIt, replay, dismiss),
  );

  let animation = 0;
  /** @type {number | null} patch to hide */
  let patch = null;
  let searching = false;
  /** probabilities that were measured on the way */
  const measured = { three: 0, eight: 0, back: 0 };

  /** @param {import("./state.js").StoryStep} step @param {boolean} [push] */
  function setStep(step, push = false) {
    if (step === session.state.story) return;
    if (step !== "hide" && step !== "done") {
      patch = null;
      grid.outline(null);
    }
    session.update({ story: step }, { push });
  }

  function start() {
    stopAnimation();
    session.update(
      {
        source: "draw",
        center: true,
        strokes: [],
        pins: [],
        layer: -1,
        head: -1,
        direction: "to",
        edits: { heads: [], hiddenPatches: [], maskedPatches: [], beta: null },
        story: "drawing",
      },
      { push: false },
    );
    play(decodeStrokes(RECORDED_THREE), [], DRAWING_TIME, () => setStep("close"));
  }

  function playClosing() {
    stopAnimation();
    actions.remember();
    const before = session.state.strokes;
    play(decodeStrokes(RECORDED_CLOSING), before, CLOSING_TIME, () => session.update({}, { push: true }));
  }

  /**
   * Draw recorded strokes at the speed of a hand, after the strokes that are there already.
   * @param {Stroke[]} strokes
   * @param {Stroke[]} before
   * @param {number} duration
   * @param {() => void} done
   */
  function play(strokes, before, duration, done) {
    const total = strokes.reduce((sum, { points }) => sum + points.length / 2, 0);
    const finish = () => {
      animation = 0;
      session.penDown = false;
      session.update({ strokes: [...before, ...strokes] }, { push: false });
      done();
    };
    if (window.matchMedia("(prefers-reduced-motion: reduce)").matches) return finish();
    const started = performance.now();
    session.penDown = true;
    const frame = () => {
      const t = (performance.now() - started) / duration;
      if (t >= 1) return finish();
      session.update(
        { strokes: [...before, ...firstPoints(strokes, Math.ceil(easeInOut(t) * total))] },
        { push: false },
      );
      animation = requestAnimationFrame(frame);
    };
    animation = requestAnimationFrame(frame);
  }

  function stopAnimation() {
    if (animation) cancelAnimationFrame(animation);
    if (animation) session.penDown = false;
    animation = 0;
  }

  /** The visitor takes the pen: an animation stops, and an unfinished drawing gives way. */
  function takeOver() {
    if (!animation) return;
    stopAnimation();
    if (session.state.story === "drawing") session.update({ strokes: [], story: "off" }, { push: false });
  }

  /** Follow the predictions. */
  function observe() {
    const { state, probabilities } = session;
    if (session.input.empty && !animation && state.story !== "drawing") setStep("off");
    if (session.input.empty || animation || session.penDown || session.resultVersion !== session.version) return;
    const predicted = indexOfMax(probabilities);
    if (state.story === "close") {
      if (predicted === three && !session.edited) measured.three = probabilities[three];
      if (predicted === eight && !session.edited && state.strokes.length > 1) {
        measured.eight = probabilities[eight];
        setStep("hide", true);
        session.measureRequested = true;
      }
    } else if (state.story === "hide") {
      if (!session.edited && predicted !== eight) setStep("close");
      else if (!session.edited) measured.eight = probabilities[eight];
      else if (patch !== null && state.edits.hiddenPatches.includes(patch)) {
        measured.back = probabilities[three];
        setStep("done", true);
      }
    } else if (state.story === "done") {
      if (!session.edited) setStep(predicted === eight ? "hide" : "close");
      measured.eight = session.baseline[eight];
      measured.back = probabilities[three];
    }
  }

  /** Choose the patch whose hiding brings the 3 back: by measured effect, not by the map. */
  async function choosePatch() {
    const occlusion = session.attributions.get("occlusion");
    if (
      session.state.story !== "hide" ||
      session.edited ||
      patch !== null ||
      searching ||
      !occlusion ||
      !session.engine
    )
      return;
    const { engine, version } = session;
    const order = [...occlusion.keys()].sort((a, b) => occlusion[b] - occlusion[a]).slice(0, MAX_TRIES);
    let best = { patch: order[0], margin: -Infinity };
    searching = true;
    try {
      for (const candidate of order) {
        const edits = { ...session.state.edits, hiddenPatches: [candidate] };
        const result = await engine.run(session.input.pixels, edits);
        if (version !== session.version) break;
        if (!result) continue;
        const margin = result.logits[three] - Math.max(...result.logits.filter((_, i) => i !== three));
        if (margin > best.margin) best = { patch: candidate, margin };
      }
    } catch (error) {
      session.onError(error instanceof Error ? error.message : String(error));
      return;
    } finally {
      searching = false;
    }
    if (version !== session.version || session.state.story !== "hide") return;
    patch = best.patch;
    grid.outline(patch);
    session.invalidate("state");
  }

  /** What was shown, with the measured probabilities. @param {number} count of patches */
  function conclusion(count) {
    const before = measured.three ? ` (${percent(measured.three)})` : "";
    const turned = `One stroke turned a 3${before} into an 8 (${percent(measured.eight)}).`;
    if (measured.back <= 0.5) {
      return `${turned} With the most influential patch hidden, P(8) is ${percent(session.probabilities[eight])}.`;
    }
    const again = `With one of ${count} patches hidden, the model reads a 3 again (${percent(measured.back)}).`;
    return `${turned} ${again} It relied on what you drew there.`;
  }

  function sentence() {
    const shape = session.description.grid ?? [1, 1];
    const { story } = session.state;
    switch (story) {
      case "drawing":
        return "Watch: the model reads every stroke of the pen.";
      case "close": {
        const predicted = indexOfMax(session.probabilities);
        const isTried = session.state.strokes.length > 1 && !session.penDown && !animation && predicted !== eight;
        if (!isTried) return "Close the left side of the 3.";
        const reading = `${session.className(predicted)} (${percent(session.probabilities[predicted])})`;
        return `The model still reads ${reading}. Undo, and join both ends of the 3 to its middle.`;
      }
      case "hide":
        return patch === null ? "It is an 8 now. Measuring which patch made the difference …" : "Now hide that patch.";
      case "done":
        return conclusion(shape[0] * shape[1]);
      default:
        return "";
    }
  }

  /** @param {Set<Change>} changes */
  function draw(changes) {
    if (changes.has("state") || changes.has("input") || changes.has("result")) observe();
    if (changes.has("measures") || changes.has("state")) choosePatch();
    const { story } = session.state;
    const text = sentence();
    setText(prompt, text || "Draw a digit, or point at a patch to see what it attends to.");
    element.dataset.step = story;
    prompt.classList.toggle("ch-quiet", story === "off");
    const at = { off: -1, drawing: 0, close: 0, hide: 1, done: 2 }[story];
    dots.forEach((dot, i) => dot.classList.toggle("ch-done", i <= at));
    show.hidden = story !== "close" || animation !== 0;
    hideIt.hidden = story !== "hide" || patch === null;
    dismiss.hidden = story === "off";
    if (patch !== null) hideIt.title = `Hide the patch in ${patchName(patch, session.description.grid ?? [1, 1])}`;
  }

  return { element, draw, start, takeOver, close: stopAnimation };
}

/** @param {number} t */
function easeInOut(t) {
  return t < 0.5 ? 2 * t * t : 1 - 2 * (1 - t) * (1 - t);
}

/**
 * The beginning of a drawing.
 * @param {Stroke[]} strokes
 * @param {number} count of points
 * @returns {Stroke[]}
 */
export function firstPoints(strokes, count) {
  const out = [];
  for (const { erase, points } of strokes) {
    if (count <= 0) break;
    out.push({ erase, points: points.slice(0, 2 * count) });
    count -= points.length / 2;
  }
  return out;
}
