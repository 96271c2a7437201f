/**
 * Where the input comes from: the drawing pad, examples, or a picture of the visitor's own.
 */

import { contextOf, dropdown, checkbox, iconButton, node, segmented, setText } from "./dom.js";
import { inputSize } from "./inputs.js";
import { paintPixels } from "./maps.js";
import { percent, topTwo } from "./layout.js";
import { pixelsOfPicture } from "./picture.js";
import { range, toProbabilities } from "./queries.js";

/** @typedef {import("./session.js").Session} Session */
/** @typedef {import("./session.js").Change} Change */
/** @typedef {import("./inputs.js").Examples} Examples */
/** @typedef {import("./state.js").Source} Source */

const PAGE = 30;

/**
 * The indices of examples that pass a filter, the least certain ones first if this is asked for.
 * @param {Examples} examples
 * @param {import("./state.js").ExampleFilter} filter
 * @returns {number[]}
 */
export function filterExamples({ count, labels, logits, classes }, { label, mistakes, uncertain }) {
  const ranked = range(count).map((index) => {
    const own = logits && classes ? toProbabilities(logits.subarray(index * classes, (index + 1) * classes)) : null;
    const top = own ? topTwo(own) : null;
    return { index, predicted: top?.first ?? -1, margin: top?.margin ?? 1 };
  });
  const kept = ranked.filter(
    ({ index, predicted }) =>
      (label < 0 || labels?.[index] === label) && (!mistakes || (labels && predicted !== labels[index])),
  );
  if (uncertain) kept.sort((a, b) => a.margin - b.margin);
  return kept.map(({ index }) => index);
}

/**
 * @param {Session} session
 * @param {{element: HTMLElement, draw: (changes: Set<Change>) => void} | null} pad null where nothing can be drawn
 * @param {HTMLElement} menu
 * @param {HTMLElement} story
 */
export function createSourcePanel(session, pad, menu, story) {
  /** @type {[Source, string][]} */
  const tabs = [];
  if (pad) tabs.push(["draw", "Draw"]);
  tabs.push(["example", session.canRun ? "Examples" : "Recorded inputs"]);
  if (session.canRun) tabs.push(["picture", "Picture"]);
  /** which tab is open: "picture" may be open before there is one */
  let open = session.state.source;
  const choice = segmented("Source of the input", tabs, (value) => {
    open = value;
    if (value !== "picture" || session.state.picture) session.update({ source: value });
    else session.invalidate("state");
  });
  const browser = createBrowser(session);
  const picture = createPicturePicker(session, () => {
    open = "picture";
  });
  const element = node(
    "section",
    { class: "ch-panel ch-area-pad", "data-part": "pad", "aria-label": "Input" },
    node(
      "header",
      { class: "ch-panel-head" },
      tabs.length > 1 ? choice.element : node("h2", {}, tabs[0][1]),
      node("div", { class: "ch-panel-tools" }, menu),
    ),
    pad?.element,
    browser.element,
    picture.element,
    story,
  );
  let previous = session.state.source;

  /** @param {Set<Change>} changes */
  function draw(changes) {
    if (session.state.source !== previous) open = previous = session.state.source;
    choice.set(open);
    if (pad) pad.element.hidden = open !== "draw";
    browser.element.hidden = open !== "example";
    picture.element.hidden = open !== "picture";
    if (pad && open === "draw") pad.draw(changes);
    if (open === "example" && !(changes.size === 1 && changes.has("query"))) browser.draw();
    if (open === "picture") picture.draw();
  }

  return { element, draw, receiveFile: picture.receiveFile };
}

/** @param {Session} session */
function createBrowser(session) {
  let page = 0;
  let shown = "";
  /** @type {{filter: object, examples: number, indices: number[]} | null} */
  let filtered = null;
  const setFilter = (/** @type {Partial<import("./state.js").ExampleFilter>} */ changes) => {
    page = 0;
    session.update({ filter: { ...session.state.filter, ...changes } }, { push: false });
  };
  /** @type {[string, string][]} */
  const choices = [
    ["-1", "All"],
    ...session.description.classes.map((name, i) => /** @type {[string, string]} */ ([String(i), name])),
  ];
  const label = dropdown("Class", choices, (value) => setFilter({ label: Number(value) }));
  const mistakes = checkbox("Mistakes only", "Examples whose predicted class is wrong", (checked) =>
    setFilter({ mistakes: checked }),
  );
  const order = "Examples in the order of the margin between the two most probable classes";
  const uncertain = checkbox("Least certain", order, (checked) => setFilter({ uncertain: checked }));
  const list = node("div", {
    class: "ch-thumbnails",
    role: "group",
    "aria-label": "Examples. Arrow keys move, Enter chooses.",
  });
  const position = node("span", { class: "ch-note" });
  const turn = (/** @type {number} */ step) => {
    page += step;
    session.invalidate("state");
  };
  const back = iconButton("previous", "Previous page", () => turn(-1));
  const forward = iconButton("next", "Next page", () => turn(1));
  const facts = node("p", { class: "ch-example-facts" });
  const filters = node("div", { class: "ch-filters" }, label.element, mistakes.element, uncertain.element);
  const element = node(
    "div",
    { class: "ch-browser", "data-part": "examples" },
    filters,
    list,
    node("div", { class: "ch-row ch-pager" }, facts, position, back, forward),
  );

  list.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -6, ArrowDown: 6 }[event.key];
    const buttons = /** @type {HTMLElement[]} */ ([...list.children]);
    const index = buttons.indexOf(/** @type {HTMLElement} */ (event.target));
    if (!step || index < 0) return;
    event.preventDefault();
    buttons[index + step]?.focus();
  });

  /** @param {Examples} examples @param {number} index */
  function thumbnail(examples, index) {
    const spec = session.description.input;
    const canvas = node("canvas", { class: "ch-pixelated" });
    const size = inputSize(session.description);
    if (spec) {
      const image = new ImageData(spec.width, spec.height);
      paintPixels(examples.pixels.subarray(index * size, (index + 1) * size), spec.channels, image.data);
      [canvas.width, canvas.height] = [spec.width, spec.height];
      contextOf(canvas).putImageData(image, 0, 0);
    }
    const name = examples.labels ? `, ${session.className(examples.labels[index])}` : "";
    return node(
      "button",
      {
        type: "button",
        "data-example": index,
        "aria-label": `Example ${index}${name}`,
        title: `Example ${index}${name}`,
        click: () => session.update({ source: "example", example: index }),
      },
      canvas,
    );
  }

  function draw() {
    const { examples } = session;
    if (!examples) {
      list.replaceChildren(
        node("p", { class: "ch-note" }, session.tensors ? "This file contains no examples." : "Loading …"),
      );
      return;
    }
    filters.hidden = !examples.labels;
    const { filter } = session.state;
    if (filtered?.filter !== filter || filtered.examples !== examples.count) {
      filtered = { filter, examples: examples.count, indices: filterExamples(examples, filter) };
    }
    label.select.value = String(filter.label);
    mistakes.input.checked = filter.mistakes;
    uncertain.input.checked = filter.uncertain;
    const pages = Math.max(1, Math.ceil(filtered.indices.length / PAGE));
    page = Math.min(Math.max(0, page), pages - 1);
    const indices = filtered.indices.slice(page * PAGE, (page + 1) * PAGE);
    const key = `${indices.join(" ")}`;
    if (key !== shown) {
      shown = key;
      list.replaceChildren(
        ...(indices.length
          ? indices.map((i) => thumbnail(examples, i))
          : [node("p", { class: "ch-note" }, "No example passes this filter.")]),
      );
    }
    for (const button of /** @type {Iterable<HTMLElement>} */ (/** @type {unknown} */ (list.children))) {
      const chosen = session.state.source === "example" && Number(button.dataset.example) === session.state.example;
      button.setAttribute("aria-pressed", String(chosen));
      button.tabIndex =
        chosen || (button === list.firstElementChild && !indices.includes(session.state.example)) ? 0 : -1;
    }
    setText(position, `${page + 1} of ${pages}`);
    back.disabled = page === 0;
    forward.disabled = page === pages - 1;
    const { example } = session.state;
    const target = examples.labels?.[example];
    const known =
      target !== undefined &&
      target >= 0 &&
      target < session.probabilities.length &&
      session.state.source === "example";
    setText(facts, known ? `Label ${session.className(target)}, P = ${percent(session.probabilities[target])}` : "");
  }

  return { element, draw };
}

/**
 * @param {Session} session
 * @param {() => void} onPicture
 */
function createPicturePicker(session, onPicture) {
  const file = node("input", {
    type: "file",
    accept: "image/*",
    class: "ch-hidden",
    tabindex: "-1",
    "aria-hidden": "true",
  });
  const status = node("p", { class: "ch-note", role: "status" });
  const choose = node(
    "button",
    { type: "button", class: "ch-button ch-primary", click: () => file.click() },
    "Choose a picture",
  );
  const element = node(
    "div",
    { class: "ch-drop", "data-part": "picture" },
    node("p", {}, "Drop a picture here, paste one, or"),
    choose,
    file,
    node(
      "p",
      { class: "ch-note" },
      session.description.kind === "live"
        ? "Its pixels are sent to the server that runs the model."
        : "The picture stays in this browser.",
    ),
    status,
  );

  /** @param {Blob} blob */
  async function receiveFile(blob) {
    const spec = session.description.input;
    if (!spec || !session.canRun) return;
    setText(status, "");
    try {
      const picture = await pixelsOfPicture(blob, spec, session.state.center);
      onPicture();
      session.update({ source: "picture", picture });
    } catch {
      setText(status, "This file is not a picture that the browser can read.");
      onPicture();
      session.invalidate("state");
    }
  }

  file.addEventListener("change", () => {
    if (file.files?.[0]) receiveFile(file.files[0]);
    file.value = "";
  });

  return { element, receiveFile, draw() {} };
}
