// Calls of the gateway. The token is kept for the tab only.

const TOKEN = 'specrej-token';

export const token = () => sessionStorage.getItem(TOKEN) ?? '';
export const setToken = (value) =>
  value ? sessionStorage.setItem(TOKEN, value) : sessionStorage.removeItem(TOKEN);

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.needsToken = status === 401 || status === 403;
  }
}

async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (token()) headers.authorization = `Bearer ${token()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: 'no-store' });
  } catch (error) {
    throw error.name === 'AbortError' ? error : new Refused(0, 'The gateway cannot be reached.');
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Refused(response.status, body?.error?.message ?? `HTTP status ${response.status}`);
}

export const get = async (path) =>
  (await call(path, { signal: AbortSignal.timeout(15_000) })).json(); // a gateway takes 10 s

// Calls `emit` with each event of a request until the last; aborting the signal frees its slots.
export async function stream(body, signal, emit) {
  const headers = { 'content-type': 'application/json' };
  const response = await call('v1/specrej/stream', {
    method: 'POST',
    body: JSON.stringify(body),
    headers,
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split('\n\n');
    rest = parts.pop();
    for (const part of parts) {
      const name = part.match(/^event: ([^\n]*)/m)?.[1];
      const data = part.match(/^data: ([^\n]*)/m)?.[1];
      if (name && data) emit(name, JSON.parse(data));
    }
  }
}
