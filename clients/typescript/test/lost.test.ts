// Servers that end a connection instead of an answer.
import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer } from "node:http2";
import type { AddressInfo, Socket } from "node:net";
import { test } from "node:test";

import { create, toBinary } from "@bufbuild/protobuf";
import { Client, Code, ConnectError, GenerateStreamResponseSchema, retryAfterMs } from "specrej";

const admitted = { event: { case: "admitted", value: { requestId: "r1" } } } as const;

function frame(): Buffer {
  const event = create(GenerateStreamResponseSchema, admitted);
  const message = toBinary(GenerateStreamResponseSchema, event);
  const head = Buffer.alloc(5);
  head.writeUInt32BE(message.length, 1);
  return Buffer.concat([head, message]);
}

for (const numEvents of [0, 1]) {
  test(`a connection lost after ${numEvents} events is UNAVAILABLE`, async () => {
    const sockets: Socket[] = [];
    const server = createServer().on("connection", (socket: Socket) => sockets.push(socket));
    server.on("stream", (stream) => {
      stream.on("error", () => {});
      stream.respond({ ":status": 200, "content-type": "application/grpc" });
      const lose = () => sockets.forEach((socket) => socket.destroy());
      if (numEvents) stream.write(frame(), lose);
      else lose();
    });
    await once(server.listen(0, "127.0.0.1"), "listening");
    const client = new Client({ address: `127.0.0.1:${(server.address() as AddressInfo).port}` });
    const events: (string | undefined)[] = [];
    try {
      await assert.rejects(
        async () => {
          for await (const event of client.stream({})) events.push(event.case);
        },
        (error) => {
          assert.equal(ConnectError.from(error).code, Code.Unavailable);
          assert.equal(retryAfterMs(error), 1000);
          return true;
        },
      );
      assert.equal(events.length, numEvents);
    } finally {
      client.close();
      server.close();
    }
  });
}
