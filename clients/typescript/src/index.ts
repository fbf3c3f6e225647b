/** A client of specrej's public gRPC API for Node. Messages and enums are those of the schema. */
import type { MessageInitShape } from "@bufbuild/protobuf";
import { durationMs } from "@bufbuild/protobuf/wkt";
import {
  type CallOptions,
  type Client as ServiceClient,
  Code,
  ConnectError,
  type Interceptor,
  createClient,
} from "@connectrpc/connect";
import { Http2SessionManager, createGrpcTransport } from "@connectrpc/connect-node";

import {
  BadRequestSchema,
  type BadRequest_FieldViolation,
  ErrorInfoSchema,
  RetryInfoSchema,
} from "./gen/google/rpc/error_details_pb.js";
import {
  type GenerateRequestSchema,
  type GenerateResponse,
  type GenerateStreamRequestSchema,
  type GenerateStreamResponse,
  OrchestratorService,
} from "./gen/specrej/v1/orchestrator_pb.js";

export type { CallOptions } from "@connectrpc/connect";
export { Code, ConnectError } from "@connectrpc/connect";
export * from "./gen/specrej/v1/common_pb.js";
export * from "./gen/specrej/v1/orchestrator_pb.js";

/** A request as a plain object; omitted fields have the server's defaults. */
export type Request = MessageInitShape<typeof GenerateRequestSchema>;

/** `progress`, `textDeltas` and `texts` add to what a stream sends. */
export type StreamOptions = CallOptions &
  Omit<MessageInitShape<typeof GenerateStreamRequestSchema>, "request" | "$typeName" | "$unknown">;

/** One of a stream's events; `case` is its name. */
export type Event = GenerateStreamResponse["event"];

/** PEM texts. Without `ca`, the authorities that Node trusts; `cert` and `key`: mutual TLS. */
export interface Tls {
  ca?: string | Buffer;
  cert?: string | Buffer;
  key?: string | Buffer;
}

export interface ClientOptions {
  /** "host:port"; default "127.0.0.1:50050". */
  address?: string;
  /** Sent with every call; another machine receives it over TLS only. */
  token?: string;
  /** Absent: plaintext. */
  tls?: Tls;
  /** Deadline of a call that has none of its own, in milliseconds; default 300000. */
  timeoutMs?: number;
}

const ADDRESS = /^([\w.-]+|\[[\da-f:.]+\]):\d+$/i;
const LOOPBACK = /^(localhost|127(\.\d+){3}|\[::1\])$/;
const LOST_CONNECTION_RETRY_MS = 1000;
const MAX_MESSAGE_BYTES = 64 * 1024 * 1024;

/**
 * Connects at its first call, and again after a lost connection. A failed call raises ConnectError
 * and is not repeated.
 */
export class Client {
  /** All methods of the API, such as `service.describe({})`. */
  readonly service: ServiceClient<typeof OrchestratorService>;
  readonly #connection: Http2SessionManager;
  readonly #closed = new AbortController();

  constructor(options: ClientOptions = {}) {
    const { address = "127.0.0.1:50050", token, tls, timeoutMs = 300_000 } = options;
    if (!ADDRESS.test(address)) throw new TypeError(`address: "host:port", not ${address}`);
    const baseUrl = `${tls ? "https" : "http"}://${address}`;
    if (token && !tls && !LOOPBACK.test(new URL(baseUrl).hostname)) {
      throw new TypeError(`the token would go to ${address} in plaintext: set tls`);
    }
    const keepalive = { pingIntervalMs: 30_000, pingTimeoutMs: 10_000 };
    this.#connection = new Http2SessionManager(baseUrl, keepalive, tls);
    const transport = createGrpcTransport({
      baseUrl,
      sessionManager: this.#connection,
      defaultTimeoutMs: timeoutMs,
      readMaxBytes: MAX_MESSAGE_BYTES,
      interceptors: [...(token ? [bearer(token)] : []), nameLostConnections(this.#closed.signal)],
    });
    this.service = createClient(OrchestratorService, transport);
  }

  /** The best answer. Its slots are free at once if `options.signal` aborts. */
  generate(request: Request, options?: CallOptions): Promise<GenerateResponse> {
    return this.service.generate(request, options);
  }

  /**
   * `generate` with an event at admission and after every round; `finished` is the last.
   * Leaving the loop early cancels the call and frees its slots.
   */
  async *stream(
    request: Request,
    options: StreamOptions = {},
  ): AsyncGenerator<Event, void, undefined> {
    const { progress, textDeltas, texts, signal, ...call } = options;
    const left = new AbortController();
    const signals = signal ? [left.signal, signal] : [left.signal];
    const responses = this.service.generateStream(
      { request, progress, textDeltas, texts },
      { ...call, signal: AbortSignal.any(signals) },
    )[Symbol.asyncIterator]();
    try {
      for (let next = await responses.next(); !next.done; next = await responses.next()) {
        yield next.value.event;
      }
    } finally {
      left.abort();
      await drain(responses);
    }
  }

  /** Cancels running calls and disconnects. */
  close(): void {
    this.#closed.abort();
    this.#connection.abort();
  }
}

/** Connect reports a lost connection as a cancelled call; gRPC has UNAVAILABLE for it. */
function nameLostConnections(closed: AbortSignal): Interceptor {
  return (next) => async (request) => {
    const named = (reason: unknown): ConnectError => {
      const error = ConnectError.from(reason);
      const isLost = error.code === Code.Canceled || error.code === Code.Aborted;
      const isOurs = request.signal.aborted || closed.aborted;
      const isServers = error.metadata.has("grpc-status");
      if (!isLost || isOurs || isServers) return error;
      const message = "the connection was lost";
      return new ConnectError(message, Code.Unavailable, undefined, undefined, error);
    };
    try {
      const response = await next(request);
      if (!response.stream) return response;
      return { ...response, message: withErrors(response.message, named) };
    } catch (error) {
      throw named(error);
    }
  };
}

async function* withErrors<T>(messages: AsyncIterable<T>, named: (reason: unknown) => Error) {
  try {
    yield* messages;
  } catch (error) {
    throw named(error);
  }
}

/** Reads a cancelled call to its end: until then, its timer keeps the process from exiting. */
async function drain(responses: AsyncIterator<unknown>): Promise<void> {
  try {
    while (!(await responses.next()).done);
  } catch {
    // The cancellation.
  }
}

function bearer(token: string): Interceptor {
  return (next) => (request) => {
    request.header.set("authorization", `Bearer ${token}`);
    return next(request);
  };
}

/** The invalid fields of a refused request: paths such as "sampling.top_p", and accepted ranges. */
export function violations(error: unknown): BadRequest_FieldViolation[] {
  const details = ConnectError.from(error).findDetails(BadRequestSchema);
  return details.flatMap(({ fieldViolations }) => fieldViolations);
}

/** The reason of an error for programs, such as "UNAUTHENTICATED"; undefined if the server sent none. */
export function reason(error: unknown): string | undefined {
  return ConnectError.from(error).findDetails(ErrorInfoSchema)[0]?.reason;
}

/** Milliseconds after which the call can be repeated; undefined: it cannot. */
export function retryAfterMs(error: unknown): number | undefined {
  const failure = ConnectError.from(error);
  const delay = failure.findDetails(RetryInfoSchema)[0]?.retryDelay;
  if (delay) return durationMs(delay);
  return failure.code === Code.Unavailable ? LOST_CONNECTION_RETRY_MS : undefined;
}
