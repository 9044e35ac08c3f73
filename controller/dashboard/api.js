// Calls to the controller, and the key that is sent with them.

const KEY = "kvelastic.key";
const TIMEOUT_MS = 15_000;

/** An error with a message for the reader. `status` is 0 if there was no response. */
export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }

  /** True if another key may help. */
  get asksForKey() {
    return this.status === 401 || this.code === "admin_key_needed";
  }
}

/** Return true if a key is set. */
export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

/** Set the key for this tab; null removes it. */
export function setKey(key) {
  if (key === null) sessionStorage.removeItem(KEY);
  else sessionStorage.setItem(KEY, key);
}

/**
 * Call the controller and return {status, body}. A refusal in a route's own format (409 of a
 * request) is returned too. Throws `ApiError` for an error, or without a response in JSON.
 */
export async function call(method, path, body = undefined, timeoutMs = TIMEOUT_MS) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key !== null) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  let text;
  try {
    response = await fetch(path, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: AbortSignal.timeout(timeoutMs),
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
    });
    text = await response.text();
  } catch (error) {
    const late = error.name === "TimeoutError";
    throw new ApiError(
      0,
      "unreachable",
      late
        ? `The controller did not answer within ${timeoutMs / 1000} s.`
        : "The controller cannot be reached.",
    );
  }
  let answer = null;
  try {
    answer = JSON.parse(text);
  } catch {
    throw new ApiError(
      response.status,
      "no_json",
      `The controller answered ${response.status} with something else than JSON.`,
    );
  }
  if (answer && answer.error) {
    throw new ApiError(response.status, answer.error.code, answer.error.message);
  }
  return { status: response.status, body: answer };
}

/** GET a path and return only the body. Throws `ApiError`. */
export async function read(path) {
  return (await call("GET", path)).body;
}

/** Return a path that contains a model's name, encoded. */
export function pathOf(before, model, after = "") {
  return before + encodeURIComponent(model) + after;
}
