/**
 * Requests to the local server, with a sentence for each way in which they can fail.
 */

/** seconds between two attempts if the server does not say how long to wait */
const RETRY_SECONDS = 1;

/**
 * A successful answer of the server. A request that the server is too busy for is repeated; one that it refuses is an
 * Error with the server's own sentence; an aborted one rejects with the reason of its signal.
 * @param {string} address
 * @param {{method?: string, body?: Blob, signal?: AbortSignal}} [options]
 * @returns {Promise<Response>}
 */
export async function request(address, options = {}) {
  const { signal } = options;
  for (;;) {
    const answer = await fetch(address, options).catch(() => {
      signal?.throwIfAborted();
      throw new Error("The server does not answer. Is `clearhead open` still running?");
    });
    if (answer.ok) return answer;
    if (answer.status !== 503) {
      const { error } = await answer.json().catch(() => ({ error: "" }));
      throw new Error(error || `The server answered with status ${answer.status}.`);
    }
    await pause(Number(answer.headers.get("Retry-After")) || RETRY_SECONDS, signal);
  }
}

/**
 * @param {number} seconds
 * @param {AbortSignal} [signal]
 * @returns {Promise<void>}
 */
function pause(seconds, signal) {
  return new Promise((resolve, reject) => {
    signal?.addEventListener("abort", () => reject(signal.reason), { once: true });
    setTimeout(resolve, 1000 * seconds);
  });
}
