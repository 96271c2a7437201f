/**
 * Times the viewer's engine in Node: node benchmarks/viewer.mjs FILE.safetensors DESCRIPTION.json PASSES
 *
 * Prints one JSON object: milliseconds of the first pass, of every pass, and of each kind of longer request.
 */

import { readFileSync } from "node:fs";

import { createEngine, noEdits } from "../src/clearhead/viewer/js/engine.js";
import { parseSafetensors } from "../src/clearhead/viewer/js/safetensors.js";

const [file, descriptionFile, passes] = process.argv.slice(2);
const description = JSON.parse(readFileSync(descriptionFile, "utf8"));
const { channels, height, width } = description.input;
const tensors = parseSafetensors(readFileSync(file));
const engine = createEngine({ description, tensors });

/** A different image for each number, so that nothing can be reused. */
function image(number) {
  return Uint8Array.from({ length: channels * height * width }, (_, i) => (Math.imul(i + 31 * number, 2654435761) >>> 24) & 255);
}

async function measure(request) {
  const start = performance.now();
  await request();
  return performance.now() - start;
}

const first = await measure(() => engine.run(image(0), noEdits));
const runs = [];
for (let i = 1; i <= Number(passes); i++) {
  const pixels = image(i);
  runs.push(await measure(() => engine.run(pixels, noEdits)));
}
const other = {
  relevance: await measure(() => engine.attribute(image(0), noEdits, "relevance", 0)),
  "head effects": await measure(() => engine.headEffects(image(0), noEdits, 0)),
  occlusion: await measure(() => engine.attribute(image(0), noEdits, "occlusion", 0)),
};
engine.close();
console.log(JSON.stringify({ first, runs, other }));
