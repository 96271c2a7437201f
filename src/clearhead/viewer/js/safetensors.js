/**
 * Reads safetensors files: an 8-byte length, a JSON header with the type, shape and offsets of each tensor, the bytes.
 *
 * Nothing in a file is trusted: the length of the header, the offsets and the shapes are checked before any use.
 */

/** @typedef {import("./types.js").Tensor} Tensor */
/** @typedef {import("./types.js").Tensors} Tensors */

/** bytes per element of each type */
const ELEMENT_BYTES = { F32: 4, F16: 2, BF16: 2, U8: 1, I32: 4, I64: 8 };
/** the longest header that the safetensors format allows */
const MAX_HEADER_BYTES = 100_000_000;

/**
 * All tensors of a safetensors file.
 * @param {Uint8Array | ArrayBuffer | DataView} file
 * @returns {Tensors}
 */
export function parseSafetensors(file) {
  const bytes = toBytes(file);
  const { header, start } = readHeader(bytes);
  /** @type {Tensors} */
  const tensors = new Map();
  for (const [name, entry] of Object.entries(header)) {
    if (name !== "__metadata__") {
      tensors.set(name, readTensor(name, entry, bytes, start));
    }
  }
  return tensors;
}

/**
 * The metadata of a safetensors file: strings by name.
 * @param {Uint8Array | ArrayBuffer | DataView} file
 * @returns {Record<string, string>}
 */
export function parseSafetensorsMetadata(file) {
  const metadata = readHeader(toBytes(file)).header["__metadata__"];
  if (metadata === undefined) {
    return {};
  }
  if (!isRecord(metadata) || Object.values(metadata).some((value) => typeof value !== "string")) {
    throw new Error("the metadata of a safetensors file must be strings by name");
  }
  return /** @type {Record<string, string>} */ (metadata);
}

/**
 * @param {Uint8Array} bytes
 * @returns {{header: Record<string, unknown>, start: number}} `start` is the position of the first tensor
 */
function readHeader(bytes) {
  if (bytes.length < 8) {
    throw new Error(`a safetensors file has at least 8 bytes, got ${bytes.length}`);
  }
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const length = view.getUint32(0, true) + view.getUint32(4, true) * 2 ** 32;
  if (length > MAX_HEADER_BYTES || 8 + length > bytes.length) {
    throw new Error(`the header of the safetensors file claims ${length} bytes, but the file has ${bytes.length}`);
  }
  let header;
  try {
    header = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes.subarray(8, 8 + length)));
  } catch {
    throw new Error("the header of the safetensors file is not JSON");
  }
  if (!isRecord(header)) {
    throw new Error("the header of the safetensors file is not a JSON object");
  }
  return { header, start: 8 + length };
}

/**
 * @param {string} name
 * @param {unknown} entry
 * @param {Uint8Array} bytes
 * @param {number} start
 * @returns {Tensor}
 */
function readTensor(name, entry, bytes, start) {
  if (!isRecord(entry)) {
    throw new Error(`the entry of tensor ${name} is not a JSON object`);
  }
  const { dtype, shape, data_offsets: offsets } = entry;
  if (typeof dtype !== "string" || !Object.hasOwn(ELEMENT_BYTES, dtype)) {
    const known = Object.keys(ELEMENT_BYTES).join(", ");
    throw new Error(`tensor ${name} has type ${JSON.stringify(dtype)}; the viewer reads ${known}`);
  }
  if (!isSizes(shape)) {
    throw new Error(`tensor ${name} has the invalid shape ${JSON.stringify(shape)}`);
  }
  if (!isSizes(offsets) || offsets.length !== 2 || offsets[0] > offsets[1] || start + offsets[1] > bytes.length) {
    throw new Error(`tensor ${name} lies outside of the file: its offsets are ${JSON.stringify(offsets)}`);
  }
  const kind = /** @type {keyof typeof ELEMENT_BYTES} */ (dtype);
  const size = shape.reduce((product, length) => product * length, 1);
  if (size * ELEMENT_BYTES[kind] !== offsets[1] - offsets[0]) {
    throw new Error(`tensor ${name} of shape (${shape}) and type ${kind} cannot have ${offsets[1] - offsets[0]} bytes`);
  }
  return { shape, data: readElements(kind, name, bytes.slice(start + offsets[0], start + offsets[1]), size) };
}

/**
 * @param {keyof typeof ELEMENT_BYTES} kind
 * @param {string} name
 * @param {Uint8Array} bytes a copy of its own, which begins at an aligned address
 * @param {number} size
 * @returns {Float32Array | Uint8Array | Int32Array}
 */
function readElements(kind, name, bytes, size) {
  const view = new DataView(bytes.buffer);
  const word = new DataView(new ArrayBuffer(4));
  const elements = kind === "U8" ? bytes : kind[0] === "I" ? new Int32Array(size) : new Float32Array(size);
  for (let i = 0; i < size; i++) {
    if (kind === "F32") {
      elements[i] = view.getFloat32(4 * i, true);
    } else if (kind === "F16") {
      elements[i] = halfToFloat(view.getUint16(2 * i, true));
    } else if (kind === "BF16") {
      word.setUint16(2, view.getUint16(2 * i, true), true); // the upper half of a float32
      elements[i] = word.getFloat32(0, true);
    } else if (kind === "I32") {
      elements[i] = view.getInt32(4 * i, true);
    } else if (kind === "I64") {
      const value = view.getBigInt64(8 * i, true);
      if (BigInt.asIntN(32, value) !== value) {
        throw new Error(`tensor ${name} contains ${value}, which does not fit into 32 bits`);
      }
      elements[i] = Number(value);
    }
  }
  return elements;
}

/**
 * The value of a 16-bit IEEE 754 number (float16): 1 bit sign, 5 bits exponent, 10 bits fraction.
 * @param {number} bits
 */
export function halfToFloat(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) {
    return fraction ? NaN : sign * Infinity;
  }
  return exponent ? sign * 2 ** (exponent - 25) * (1024 + fraction) : sign * 2 ** -24 * fraction;
}

/**
 * The bytes of a base64 string; white space is ignored.
 * @param {string} text
 * @returns {Uint8Array}
 */
export function decodeBase64(text) {
  let binary;
  try {
    binary = atob(text);
  } catch {
    throw new Error("the text is not base64");
  }
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) {
    bytes[i] = binary.charCodeAt(i);
  }
  return bytes;
}

/**
 * @param {Uint8Array | ArrayBuffer | DataView} file
 * @returns {Uint8Array}
 */
function toBytes(file) {
  return ArrayBuffer.isView(file)
    ? new Uint8Array(file.buffer, file.byteOffset, file.byteLength)
    : new Uint8Array(file);
}

/**
 * @param {unknown} value
 * @returns {value is Record<string, unknown>}
 */
function isRecord(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/**
 * @param {unknown} value
 * @returns {value is number[]}
 */
function isSizes(value) {
  return Array.isArray(value) && value.every((number) => Number.isSafeInteger(number) && number >= 0);
}
