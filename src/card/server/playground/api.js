// @ts-check
// Talking to the server: one streamed chat request, its events, and its errors as sentences.

/** @typedef {{token_id: number, text: string, path_logprob: number, writer: string}} Alternative */
/** @typedef {{token_id: number, text: string, origin: string, alternatives: Alternative[], thinks?: boolean}} Token */
/** @typedef {{role: "system" | "user" | "assistant", content: string}} Message */
/** @typedef {{text: string, thoughts?: string, tokens: Token[], finishReason: string | null, metrics: Metrics | null}} Piece */
/**
 * @typedef {object} Metrics figures of the server about one answer
 * @property {number} generation_time_ms after the first token
 * @property {number} tokens_per_second after the first token
 * @property {{draft_acceptance_rate: number, num_spec_steps: number, num_accepted_draft_tokens: number,
 *   num_draft_tokens: number, mean_acceptance_length: number}} speculative_decoding
 * @property {{speculation: string}} card
 */

/** What went wrong with a request, in words for the user. */
export class RequestError extends Error {
  /**
   * @param {string} message
   * @param {{status?: number, code?: string | null, retryAfterS?: number}} [told]
   */
  constructor(message, { status = 0, code = null, retryAfterS = NaN } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfterS = retryAfterS;
  }
}

/** Finds server-sent events in text that arrives in any pieces. */
export class EventParser {
  #rest = "";
  /** @type {string[]} */
  #data = [];

  /**
   * Add text.
   * @param {string} text
   * @returns {string[]} the data of the events that are complete now
   */
  push(text) {
    const lines = (this.#rest + text).split(/\r\n|\n|\r(?!$)/); // a \r at the very end may be half of a \r\n
    this.#rest = lines.pop() ?? "";
    const found = [];
    for (const line of lines) {
      if (line.startsWith("data:")) {
        this.#data.push(line.slice(5).replace(/^ /, ""));
      } else if (line === "" && this.#data.length) {
        found.push(this.#data.join("\n"));
        this.#data = [];
      }
    }
    return found;
  }
}

/**
 * Ask the model and yield its pieces, all pieces of one read together.
 * @param {Record<string, unknown>} fields of the request
 * @param {string} key empty for none
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<Piece[], void>}
 * @throws {RequestError}, and the signal's AbortError
 */
export async function* ask(fields, key, signal) {
  const response = await send(fields, key, signal);
  const parser = new EventParser();
  const decoder = new TextDecoder();
  let isDone = false;
  for await (const bytes of chunks(response, signal)) {
    const found = parser.push(decoder.decode(bytes, { stream: true }));
    isDone ||= found.includes("[DONE]");
    const events = found.filter((data) => data !== "[DONE]").map((data) => JSON.parse(data));
    const pieces = events.filter((event) => !event.error).map(readEvent);
    if (pieces.length) yield pieces;
    const error = events.find((event) => event.error)?.error;
    if (error) throw new RequestError(asSentence(error.message), { code: error.code });
  }
  if (!isDone) throw new RequestError("The connection broke off before the answer had ended.");
}

/**
 * @param {Record<string, unknown>} fields
 * @param {string} key
 * @param {AbortSignal} signal
 */
async function send(fields, key, signal) {
  /** @type {Record<string, string>} */
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(fields), signal });
  } catch (error) {
    if (signal.aborted) throw error;
    if (!isHeader(key)) throw new RequestError("The API key has characters that are not allowed.", { status: 401 });
    throw new RequestError("The server cannot be reached. It may have been stopped.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

/** @param {string} key */
function isHeader(key) {
  return /^[\x20-\x7e]*$/.test(key);
}

/**
 * @param {Response} response
 * @param {AbortSignal} signal
 */
async function* chunks(response, signal) {
  const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } catch (error) {
    if (signal.aborted) throw error;
    throw new RequestError("The connection broke off before the answer had ended.");
  } finally {
    reader.cancel().catch(() => {}); // it has failed already, or ended
  }
}

/** @param {any} event @returns {Piece} */
function readEvent(event) {
  const choice = event.choices[0];
  return {
    text: choice?.delta.content ?? "",
    thoughts: choice?.delta.reasoning_content ?? "",
    tokens: choice?.tokens ?? [],
    finishReason: choice?.finish_reason ?? null,
    metrics: event.metrics ?? null,
  };
}

/** @param {Response} response */
async function refusal(response) {
  const { status } = response;
  const retryAfterS = Number.parseFloat(response.headers.get("Retry-After") ?? "");
  let error = { message: "", code: null };
  try {
    error = { ...error, ...(await response.json()).error };
  } catch {
    // The answer came from a proxy, not from the server; the status says enough.
  }
  return new RequestError(sentence(status, error, retryAfterS), { status, code: error.code, retryAfterS });
}

/**
 * @param {number} status
 * @param {{message: string, code: string | null}} error
 * @param {number} retryAfterS
 */
function sentence(status, { message, code }, retryAfterS) {
  const wait = Number.isFinite(retryAfterS) ? ` Ask again in ${retryAfterS} s.` : "";
  if (status === 401) return "The server needs an API key, and this key is not valid. Type one into the settings.";
  if (status === 429) return `The server is busy and its queue is full.${wait}`;
  if (code === "context_length_exceeded") {
    return `${asSentence(message)} Here that also helps: leave out the earlier turns, or clear the conversation.`;
  }
  return asSentence(message || `The server answered with status ${status}`) + wait;
}

/** @param {string} text */
function asSentence(text) {
  const trimmed = text.trim();
  const begun = trimmed.charAt(0).toUpperCase() + trimmed.slice(1);
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}
