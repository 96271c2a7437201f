/** Placeholder of the viewer: the title, the kind and, where an engine can run, the prediction for one image. */

/** @param {{model: import("./types.js").WidgetModel, el: HTMLElement}} host */
export function render({ model, el }) {
  const description = model.get("description");
  const heading = document.createElement("h1");
  heading.textContent = description.title;
  const text = document.createElement("output");
  text.textContent = `${description.kind}, ${model.get("tensors").length} bytes`;
  el.append(heading, text);
  const engine = model.get("engine");
  if (engine) {
    const { channels, height, width } = description.input;
    const edits = { heads: [], hiddenPatches: [], maskedPatches: [], beta: null };
    engine.run(new Uint8Array(channels * height * width), edits).then((/** @type {any} */ result) => {
      text.textContent = `class ${result.logits.indexOf(Math.max(...result.logits))}`;
    });
  }
}

export default { render };
