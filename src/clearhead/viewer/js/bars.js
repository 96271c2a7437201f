/**
 * The prediction: a bar for each class, with the probability before the edits as an outline.
 */

import { node, setText } from "./dom.js";
import { percent, shownClasses, signOf, signed, topTwo } from "./layout.js";

/** @typedef {import("./session.js").Session} Session */
/** @typedef {import("./session.js").Change} Change */

/** Number of classes that are shown of many. */
const MAX_BARS = 10;

/** @param {Session} session */
export function createBars(session) {
  const name = node("span", { class: "ch-prediction-name" }, "–");
  const probability = node("span", { class: "ch-prediction-value" });
  const margin = node("span", { class: "ch-prediction-margin" });
  const headline = node("div", { class: "ch-prediction" }, name, node("div", {}, probability, margin));
  const list = node("div", { class: "ch-bars", role: "list", "aria-label": "Probability of each class" });
  const rows = Array.from({ length: Math.min(MAX_BARS, session.description.classes.length || MAX_BARS) }, createRow);
  list.append(...rows.map((row) => row.element));
  const element = node("div", { class: "ch-bars-area" }, headline, list);

  function createRow() {
    const label = node("span", { class: "ch-bar-label" });
    const bar = node("span", { class: "ch-bar-fill" });
    const ghost = node("span", { class: "ch-bar-ghost" });
    const value = node("span", { class: "ch-bar-value" });
    const change = node("span", { class: "ch-bar-change" });
    const track = node("span", { class: "ch-bar-track" }, bar, ghost);
    const row = node("div", { class: "ch-bar", role: "listitem" }, label, track, value, change);
    return { element: row, label, bar, ghost, value, change };
  }

  /** @param {Set<Change>} changes */
  function draw(changes) {
    if (!changes.has("result") && !changes.has("input") && !changes.has("state") && !changes.has("layout")) return;
    const { probabilities, baseline, edited } = session;
    const ready = probabilities.length > 0 && !session.input.empty;
    element.classList.toggle("ch-waiting", !ready);
    const classes = probabilities.length ? shownClasses(probabilities, MAX_BARS) : rows.map((_, i) => i);
    const { first, second, margin: difference } = topTwo(probabilities);
    setText(name, ready ? session.className(first) : "–");
    name.classList.toggle("ch-long", session.className(first).length > 2);
    setText(probability, ready ? percent(probabilities[first]) : "");
    setText(
      margin,
      ready && second >= 0 ? `${(100 * difference).toFixed(1)} points ahead of ${session.className(second)}` : "",
    );
    rows.forEach((row, i) => {
      const index = classes[i];
      row.element.hidden = index === undefined;
      if (index === undefined) return;
      const value = ready ? probabilities[index] : 0;
      const before = ready ? baseline[index] : 0;
      row.element.dataset.class = session.className(index);
      row.element.dataset.probability = value.toFixed(6);
      row.element.classList.toggle("ch-first", ready && index === first);
      row.bar.style.transform = `scaleX(${value})`;
      row.ghost.style.width = `${100 * before}%`;
      row.ghost.hidden = !(ready && edited) || before < 0.005;
      setText(row.label, session.className(index));
      setText(row.value, ready ? percent(value) : "");
      const sign = ready && edited ? signOf(value - before) : 0;
      setText(row.change, sign ? signed(value - before) : "");
      row.change.dataset.sign = String(sign);
    });
  }

  return { element, draw };
}
