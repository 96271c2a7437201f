/** Safetensors files: round trips of every type, and damaged files. */

import assert from "node:assert/strict";
import { test } from "node:test";

import {
  decodeBase64,
  halfToFloat,
  parseSafetensors,
  parseSafetensorsMetadata,
} from "../../src/clearhead/viewer/js/safetensors.js";

/** A file with this header (an object, or text) and these bytes of data. */
function makeFile(header, data = []) {
  const text = new TextEncoder().encode(typeof header === "string" ? header : JSON.stringify(header));
  const file = new Uint8Array(8 + text.length + data.length);
  new DataView(file.buffer).setUint32(0, text.length, true);
  file.set(text, 8);
  file.set(data, 8 + text.length);
  return file;
}

function oneTensor(dtype, shape, data) {
  return makeFile({ x: { dtype, shape, data_offsets: [0, data.length] } }, data);
}

const bytesOf = (array) => [...new Uint8Array(array.buffer)];

test("every type is read", () => {
  const floats = Float32Array.of(1.5, -2, 1e-30);
  const cases = [
    ["F32", bytesOf(floats), [...floats]],
    ["F16", bytesOf(Uint16Array.of(0x3c00, 0xc100, 0x0001)), [1, -2.5, 2 ** -24]],
    ["BF16", bytesOf(Uint16Array.of(0x3f80, 0xc040, 0x4110)), [1, -3, 9]],
    ["U8", [0, 255, 7], [0, 255, 7]],
    ["I32", bytesOf(Int32Array.of(-1, 5, 2 ** 31 - 1)), [-1, 5, 2 ** 31 - 1]],
    ["I64", bytesOf(BigInt64Array.of(-1n, 5n, -(2n ** 31n))), [-1, 5, -(2 ** 31)]],
  ];
  for (const [dtype, data, expected] of cases) {
    const { shape, data: found } = parseSafetensors(oneTensor(dtype, [3, 1], data)).get("x");
    assert.deepEqual(shape, [3, 1]);
    assert.deepEqual([...found], expected, dtype);
  }
});

test("the file may begin anywhere in memory", () => {
  const file = oneTensor("F32", [1], bytesOf(Float32Array.of(3)));
  const moved = new Uint8Array(file.length + 3);
  moved.set(file, 3);
  for (const view of [moved.subarray(3), new DataView(moved.buffer, 3), moved.slice(3).buffer, Buffer.from(file)]) {
    assert.equal(parseSafetensors(view).get("x").data[0], 3);
  }
});

test("tensors do not share memory with the file", () => {
  const file = oneTensor("U8", [2], [1, 2]);
  const { data } = parseSafetensors(file).get("x");
  file.fill(9);
  assert.deepEqual([...data], [1, 2]);
});

test("float16 covers all its values", () => {
  for (let bits = 0; bits < 0x10000; bits++) {
    const exponent = (bits >> 10) & 31;
    const value = halfToFloat(bits);
    if (exponent === 31) {
      assert.ok(bits & 1023 ? Number.isNaN(value) : Math.abs(value) === Infinity);
    } else if (bits & 0x7fff && (bits & 0x7fff) < 0x7bff) {
      assert.ok(Math.abs(halfToFloat(bits + 1)) > Math.abs(value)); // magnitudes grow with their bits
    }
  }
  assert.equal(halfToFloat(0x7bff), 65504);
  assert.equal(halfToFloat(0x3555), 0.333251953125);
});

test("metadata are strings", () => {
  assert.deepEqual(parseSafetensorsMetadata(makeFile({ __metadata__: { a: "b" } })), { a: "b" });
  assert.deepEqual(parseSafetensorsMetadata(makeFile({})), {});
  assert.equal(parseSafetensors(makeFile({ __metadata__: { a: "b" } })).size, 0);
  assert.throws(() => parseSafetensorsMetadata(makeFile({ __metadata__: { a: 1 } })), /metadata/);
});

test("damaged files are errors", () => {
  const entry = { dtype: "F32", shape: [1], data_offsets: [0, 4] };
  const cases = [
    [new Uint8Array(7), /8 bytes/],
    [Uint8Array.of(255, 255, 255, 255, 255, 255, 255, 127), /claims/],
    [makeFile("{").subarray(0, 8), /claims 1 bytes/],
    [makeFile("{"), /JSON/],
    [makeFile("[]"), /JSON object/],
    [makeFile(new TextDecoder("latin1").decode(Uint8Array.of(0xff)) + "{}"), /JSON/],
    [makeFile({ x: 3 }), /x/],
    [makeFile({ x: { ...entry, dtype: "F64" } }, [0, 0, 0, 0]), /F64.*F32/],
    [makeFile({ x: { ...entry, dtype: "toString" } }, [0, 0, 0, 0]), /toString/],
    [makeFile({ x: { ...entry, shape: [-1] } }, [0, 0, 0, 0]), /shape/],
    [makeFile({ x: { ...entry, shape: [0.5] } }, [0, 0, 0, 0]), /shape/],
    [makeFile({ x: { ...entry, shape: "1" } }, [0, 0, 0, 0]), /shape/],
    [makeFile({ x: { ...entry, shape: [2] } }, [0, 0, 0, 0]), /4 bytes/],
    [makeFile({ x: { ...entry, shape: [2 ** 31, 2 ** 31, 2 ** 31] } }, [0, 0, 0, 0]), /bytes/],
    [makeFile({ x: entry }, [0, 0, 0]), /outside/],
    [makeFile({ x: { ...entry, data_offsets: [4, 0] } }, [0, 0, 0, 0]), /outside/],
    [makeFile({ x: { ...entry, data_offsets: [-4, 0] } }, [0, 0, 0, 0]), /outside/],
    [makeFile({ x: { ...entry, data_offsets: [0] } }, [0, 0, 0, 0]), /outside/],
    [oneTensor("I64", [1], bytesOf(BigInt64Array.of(2n ** 40n))), /32 bits/],
  ];
  for (const [file, message] of cases) {
    assert.throws(() => parseSafetensors(file), message);
  }
  const whole = oneTensor("F32", [2], bytesOf(Float32Array.of(1, 2)));
  for (let length = 0; length < whole.length; length++) {
    assert.throws(() => parseSafetensors(whole.subarray(0, length)), Error, `the first ${length} bytes`);
  }
});

test("base64", () => {
  const bytes = Uint8Array.from({ length: 256 }, (_, i) => i);
  const text = Buffer.from(bytes).toString("base64");
  assert.deepEqual(decodeBase64(text), bytes);
  assert.deepEqual(decodeBase64(` ${text.slice(0, 40)}\n${text.slice(40)}\n`), bytes);
  assert.throws(() => decodeBase64("AA*A"), /base64/);
});
