/** Writes the Python lines of panels: a JSON list of {part, shown} on standard input, a JSON list of texts as answer. */

import { readFileSync } from "node:fs";
import { pythonLines } from "../../src/clearhead/viewer/js/python.js";

const requests = JSON.parse(readFileSync(0, "utf8"));
const infinite = (edits) => ({ ...edits, beta: edits.beta === "inf" ? Infinity : edits.beta });
const texts = requests.map(({ part, shown }) =>
  pythonLines(part, { ...shown, pixels: Uint8Array.from(shown.pixels), edits: infinite(shown.edits) }),
);
process.stdout.write(JSON.stringify(texts));
