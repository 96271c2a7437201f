/**
 * The Python lines that reproduce what a panel shows. Pure functions.
 */

import { patchName } from "./layout.js";
import { ALL_HEADS, READOUT, hasClassTokenIn, tokenLayout } from "./queries.js";
import { hasEdits } from "./state.js";

/** @typedef {import("./types.js").Description} Description */
/** @typedef {import("./types.js").Edits} Edits */
/** @typedef {import("./types.js").InputSpec} InputSpec */
/** @typedef {"pad" | "input" | "bars" | "wall" | "cause" | "aggregates" | "head-panel"} PartName */

/**
 * What the lines depend on.
 * @typedef {object} Shown
 * @property {Description} description
 * @property {{name: string, heads: number, queries: number, keys: number}[]} layers
 * @property {Uint8Array} pixels
 * @property {Edits} edits
 * @property {number} layer
 * @property {number} head
 * @property {number} query
 * @property {number | null} minus
 * @property {"to" | "from"} direction
 * @property {number} target
 * @property {number | null} beta the model's own
 */

const LINE = 100;

/**
 * @param {PartName} part
 * @param {Shown} shown
 * @returns {string}
 */
export function pythonLines(part, shown) {
  if (shown.description.kind === "trace" || !shown.description.input) return traceLines(shown);
  const needsEdits = editContexts(shown);
  const imports = [
    "import base64",
    ...(needsEdits.length ? ["import contextlib"] : []),
    "",
    "import torch",
    "",
    "import clearhead",
  ];
  if (part === "aggregates") imports.push("from clearhead import insight");
  const lines = [...lookNotes(part, shown.edits), ...partLines(part, shown)];
  const body = needsEdits.length ? ["with edits:", ...indented(lines)] : lines;
  const first =
    part === "cause" && hasEdits(shown.edits)
      ? ["with torch.no_grad():", "    before = model(images).softmax(-1)[0]", ""]
      : [];
  const again = first.length && shown.edits.hiddenPatches.length ? imageLines(shown) : [];
  const input = first.length
    ? [...pixelLines(shown), normalizeLine(shown), ...first, ...again]
    : [...pixelLines(shown), ...imageLines(shown)];
  return [...imports, "", ...input, ...needsEdits, ...body, ""].join("\n");
}

/** @param {Shown} shown */
function pixelLines({ description, pixels }) {
  const { channels, height, width } = /** @type {InputSpec} */ (description.input);
  return [
    `model = ${description.source}`,
    "data = (",
    ...wrapText(toBase64(pixels)).map((line) => `    "${line}"`),
    ")",
    `pixels = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.uint8).view(1, ${channels}, ${height}, ${width})`,
  ];
}

/** @param {Shown} shown */
function imageLines(shown) {
  const { description, edits } = shown;
  const { channels, background, patch_size: size } = /** @type {InputSpec} */ (description.input);
  const grid = description.grid ?? [1, 1];
  const hidden = edits.hiddenPatches.map((patch) => {
    const [top, left] = [Math.floor(patch / grid[1]) * size, (patch % grid[1]) * size];
    const value = channels === 1 ? String(background[0]) : perChannel(background);
    return `pixels[..., ${top}:${top + size}, ${left}:${left + size}] = ${value}  # hide the patch in ${patchName(patch, grid)}`;
  });
  return [...hidden, normalizeLine(shown), ""];
}

/** @param {Shown} shown */
function normalizeLine({ description }) {
  const { mean, std } = /** @type {InputSpec} */ (description.input);
  return `images = (pixels / 255 - ${perChannel(mean)}) / ${perChannel(std)}`;
}

/** @param {number[]} values */
function perChannel(values) {
  return `torch.tensor([${values.join(", ")}]).view(-1, 1, 1)`;
}

/**
 * Lines that define `edits`, a stack of context managers; none if no layer is edited.
 * @param {Shown} shown
 * @returns {string[]}
 */
function editContexts({ description, layers, edits, beta }) {
  const everywhere = edits.maskedPatches.length > 0 || edits.beta !== null;
  if (!everywhere && !edits.heads.length) return [];
  const lines = ["edits = contextlib.ExitStack()"];
  if (everywhere) {
    const patches = description.grid ? description.grid[0] * description.grid[1] : 0;
    lines.unshift("", "", "def change(weights):", ...indented(changeLines(edits, patches, beta)), "", "");
    lines.push(`for name in [${layers.map(({ name }) => JSON.stringify(name)).join(", ")}]:`);
    lines.push("    edits.enter_context(clearhead.edit(model, name, pattern=change))");
  }
  for (const { layer, head, pattern } of edits.heads) {
    lines.push(
      `edits.enter_context(clearhead.edit(model, ${JSON.stringify(layer)}, head=${head}, pattern="${pattern}"))`,
    );
  }
  return [...lines, ""];
}

/**
 * Comments for the panels whose lines call `look`: their weights are the model's own, the viewer's are the edited ones.
 * @param {PartName} part
 * @param {Edits} edits
 */
function lookNotes(part, { heads, maskedPatches, beta }) {
  if (part === "pad" || part === "bars" || part === "cause") return [];
  const everywhere = maskedPatches.length > 0 || beta !== null;
  return [
    ...(everywhere ? ["# look records the weights before the edit of every layer"] : []),
    ...heads.map(({ layer, head }) => `# look records the weights before the edit of ${layer}, head ${head}`),
  ];
}

/**
 * The body of a function of weights (B,H,Q,K) that masks keys and changes beta.
 * @param {Edits} edits
 * @param {number} patches
 * @param {number | null} own
 */
function changeLines(edits, patches, own) {
  const lines = [];
  if (edits.maskedPatches.length) {
    lines.push(
      "weights = weights.clone()",
      `keys = weights.shape[-1] - ${patches} + torch.tensor([${edits.maskedPatches.join(", ")}])  # patches are the last keys`,
      "weights[..., keys] = 0",
    );
  }
  if (edits.beta === Infinity)
    lines.push("weights = (weights == weights.amax(-1, keepdim=True)).float()  # beta = infinity");
  else if (edits.beta === 0) lines.push("weights = (weights > 0).float()  # beta = 0");
  else if (edits.beta !== null && own) {
    lines.push(`weights = weights ** (${number(edits.beta)} / ${number(own)})  # beta in place of the model's own`);
  }
  lines.push("return (weights / weights.sum(-1, keepdim=True)).nan_to_num()");
  return lines;
}

/**
 * @param {PartName} part
 * @param {Shown} shown
 * @returns {string[]}
 */
function partLines(part, shown) {
  const name = JSON.stringify(shown.layers[shown.layer]?.name ?? "");
  const head = Math.max(0, shown.head);
  const { target } = shown;
  switch (part) {
    case "pad":
      return ["print(pixels[0, 0])  # the input of the model"];
    case "bars":
      return ["with torch.no_grad():", "    print(model(images).softmax(-1)[0])  # the probability of each class"];
    case "wall":
      return [
        "trace = clearhead.look(model, images)",
        "print(trace)  # every layer",
        "figure = trace.plot()  # every layer and head",
        'figure.savefig("wall.png")',
      ];
    case "input":
      return ["trace = clearhead.look(model, images)", ...mapLines(shown, name)];
    case "cause":
      return [
        "with torch.no_grad():",
        "    after = model(images).softmax(-1)[0]",
        hasEdits(shown.edits) ? "print(after - before)" : "print(after)",
        `score = lambda logits: logits.softmax(-1)[0, ${target}]`,
        "print(clearhead.head_importance(model, images, score))  # effect of setting each head to zero",
      ];
    case "aggregates":
      return aggregateLines(shown);
    case "head-panel":
      return [
        `record = clearhead.look(model, images)[${name}]`,
        `q, k, v = (x[0, ${head}].detach() for x in (record.q, record.k, record.v))`,
        "scores = q @ k.mT  # (Q,K)",
        `weights = record.weights()[0, ${head}].detach()  # softargmax(beta * scores)`,
        "out = weights @ v  # (Q,D)",
        ...projectionLines(shown, head),
      ];
  }
}

/** @param {Shown} shown @param {number} head */
function projectionLines({ description, layers, layer }, head) {
  if (!description.config?.output_projection && layers[layer]?.name !== "pool.attn") return [];
  const name = JSON.stringify(layers[layer]?.name ?? "");
  return [
    `w_o = model.get_submodule(${name}).out_proj.weight[:, ${head} * out.shape[1] : ${head + 1} * out.shape[1]]`,
    "print(out @ w_o.mT)  # (Q,E): what the head adds",
  ];
}

/** @param {Shown} shown @param {string} name */
function mapLines(shown, name) {
  const { description, head, query, minus, direction, layers, layer } = shown;
  const info = layers[layer];
  const tokens = tokenLayout(description, info);
  const grid = description.grid;
  const weights = `weights = trace[${name}].weights()[0]${head === ALL_HEADS ? ".mean(0)" : `[${head}]`}.detach()  # (Q,K)`;
  if (!tokens.onGrid || !grid) return [weights, "print(weights)"];
  const rowOf = (/** @type {number} */ q) => {
    const keys = tokens.prefix ? `${tokens.prefix}:` : ":";
    if (info.queries === 1) return `weights[0, ${keys}]`;
    if (q === READOUT && tokens.readout === "mean") return `weights[${keys}, ${keys}].mean(0)`;
    const token = q === READOUT ? 0 : tokens.prefix + q;
    return direction === "to" ? `weights[${token}, ${keys}]` : `weights[${keys}, ${token}]`;
  };
  const map = minus === null ? rowOf(query) : `${rowOf(query)} - ${rowOf(minus)}`;
  return [weights, `print((${map}).view(${grid[0]}, ${grid[1]}))`];
}

/** @param {Shown} shown */
function aggregateLines({ description, target, layers }) {
  const grid = description.grid ?? [1, 1];
  const pooled = layers[layers.length - 1]?.queries === 1;
  const registers = pooled ? 0 : description.num_prefix_tokens - Number(hasClassTokenIn(description));
  const classToken = hasClassTokenIn(description) ? "True" : "False";
  const options = `class_token=${classToken}${registers > 0 ? `, num_register_tokens=${registers}` : ""}`;
  const followsTokens = !pooled || description.num_prefix_tokens === 0; // a pooling layer does not see register tokens
  const view = `.view(${grid[0]}, ${grid[1]})`;
  const mean = pooled ? `[trace[${JSON.stringify(layers[layers.length - 1].name)}].weights()]` : "trace";
  const fill = (description.input?.background ?? []).every((value) => value === 0) ? "black" : "mean";
  return [
    "trace = clearhead.look(model, images)",
    "matrices = {",
    `    "mean": insight.mean_attention(${mean}),`,
    ...(followsTokens ? ['    "rollout": insight.rollout(trace),'] : []),
    ...(followsTokens ? [`    "relevance": insight.relevance(trace, trace.output[:, ${target}]),`] : []),
    "}",
    "for name, matrix in matrices.items():",
    `    print(name, insight.output_map(matrix, ${options})[0]${view})`,
    `print("occlusion", insight.occlusion(model, images, (${grid[0]}, ${grid[1]}), ${target}, fill="${fill}")[0])`,
  ];
}

/** @param {Shown} shown */
function traceLines(shown) {
  const name = JSON.stringify(shown.layers[shown.layer]?.name ?? "");
  const head = shown.head === ALL_HEADS ? "" : `head=${shown.head}`;
  return [
    ...(shown.description.kind === "trace" ? ["# trace = clearhead.look(model, inputs)"] : lookLines(shown)),
    `print(trace[${name}].weights(${head}))`,
    "",
  ].join("\n");
}

/** @param {Shown} shown */
function lookLines({ description }) {
  return [
    "import clearhead",
    "",
    `model = ${description.source}`,
    "trace = clearhead.look(model, inputs)  # the inputs of the recorded pass",
  ];
}

/** @param {string[]} lines */
function indented(lines) {
  return lines.map((line) => (line ? `    ${line}` : line));
}

/** @param {number} value */
function number(value) {
  return String(Number(value.toPrecision(8)));
}

/** @param {string} text */
function wrapText(text) {
  return text.match(new RegExp(`.{1,${LINE}}`, "g")) ?? [""];
}

/** @param {Uint8Array} bytes */
export function toBase64(bytes) {
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  return btoa(text);
}
