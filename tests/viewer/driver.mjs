/**
 * Lets Python call the viewer's engine: one JSON request per line on standard input, one JSON answer per line.
 *
 * A request has the path of a safetensors file, a description and a list of jobs. An array of the answer is
 * {"type": "Float32Array", "base64": "..."}.
 */

import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";

import { createEngine, createTraceEngine } from "../../src/clearhead/viewer/js/engine.js";
import { centerByMass, downscale, fitImage } from "../../src/clearhead/viewer/js/image.js";
import { parseSafetensors } from "../../src/clearhead/viewer/js/safetensors.js";
import { headStatistics } from "../../src/clearhead/viewer/js/statistics.js";

/** JSON has no infinite numbers: Python writes "inf" and "-inf". */
function readEdits(edits) {
  const beta = { inf: Infinity, "-inf": -Infinity }[edits.beta] ?? edits.beta;
  return { ...edits, beta };
}

function encode(value) {
  if (ArrayBuffer.isView(value)) {
    const bytes = Buffer.from(value.buffer, value.byteOffset, value.byteLength);
    return { type: value.constructor.name, base64: bytes.toString("base64") };
  }
  if (Array.isArray(value)) {
    return value.map(encode);
  }
  if (value !== null && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, encode(item)]));
  }
  return value;
}

async function compute(engine, description, pixels, job) {
  const edits = readEdits(job.edits);
  if (job.kind === "run") {
    return engine.run(pixels, edits);
  }
  if (job.kind === "headSteps") {
    return engine.headSteps(pixels, edits, job.layer, job.head);
  }
  if (job.kind === "headEffects") {
    return engine.headEffects(pixels, edits, job.target);
  }
  if (job.kind === "statistics") {
    const { layers } = await engine.run(pixels, edits);
    const { grid, num_prefix_tokens: prefix } = description;
    return layers.map((layer) => headStatistics(layer, grid, prefix));
  }
  return engine.attribute(pixels, edits, job.method, job.target);
}

function preprocess({ name, width, height, outWidth, outHeight, input, fit }, pixels) {
  if (name === "downscale") {
    return downscale(pixels, width, height, outWidth, outHeight);
  }
  return name === "fit" ? fitImage(pixels, width, height, input, fit) : centerByMass(pixels, width, height);
}

async function answer({ path, description, jobs }) {
  const tensors = parseSafetensors(readFileSync(path));
  const pixels = tensors.get("pixels");
  const size = pixels === undefined ? 0 : pixels.data.length / pixels.shape[0];
  const image = (index) => pixels.data.slice(index * size, (index + 1) * size);
  if (description === undefined) {
    return jobs.map((job) => preprocess(job, image(job.image)));
  }
  const isTrace = description.kind === "trace";
  const engine = isTrace ? createTraceEngine(description, tensors) : createEngine({ description, tensors });
  const answers = [];
  const start = performance.now();
  for (const job of jobs) {
    answers.push(await compute(engine, description, image(job.image), job));
  }
  answers.push((performance.now() - start) / jobs.length);
  engine.close();
  return answers;
}

for await (const line of createInterface({ input: process.stdin })) {
  let reply;
  try {
    reply = { value: encode(await answer(JSON.parse(line))) };
  } catch (error) {
    reply = { error: error.message };
  }
  process.stdout.write(`${JSON.stringify(reply)}\n`);
}
