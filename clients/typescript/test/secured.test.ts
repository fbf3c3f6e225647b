// Mutual TLS and tokens on a server at SPECREJ_ADDRESS.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { Client, Code, ConnectError, reason, type ClientOptions } from "specrej";

const { SPECREJ_ADDRESS: address, SPECREJ_TOKEN: token } = process.env;

function pem(name: string): Buffer {
  return readFileSync(process.env[name] ?? "");
}

const ca = pem("SPECREJ_TLS_CA");
const tls = { ca, cert: pem("SPECREJ_TLS_CERT"), key: pem("SPECREJ_TLS_KEY") };

async function describe(options: ClientOptions): Promise<string | undefined> {
  const client = new Client({ address, ...options });
  try {
    return (await client.service.describe({})).generator?.model;
  } finally {
    client.close();
  }
}

test("the token is sent over TLS", async () => {
  assert.equal(await describe({ tls, token }), "tiny");
});

test("a call without a token is refused", async () => {
  await assert.rejects(describe({ tls }), (error) => {
    assert.equal(ConnectError.from(error).code, Code.Unauthenticated);
    assert.ok(reason(error));
    return true;
  });
});

test("a caller without a certificate is refused", async () => {
  await assert.rejects(describe({ tls: { ca }, token }), (error) => {
    assert.equal(ConnectError.from(error).code, Code.Unavailable);
    return true;
  });
});

test("a server of an unknown authority is refused", async () => {
  const call = describe({ tls: { ...tls, ca: undefined }, token });
  await assert.rejects(call, /ConnectError.*certificate/);
});

test("no token leaves this machine in plaintext", () => {
  for (const address of ["example.org:50050", "127.0.0.1.example.org:50050", "10.0.0.1:50050"]) {
    assert.throws(() => new Client({ address, token: "secret" }), TypeError);
  }
  new Client({ address: "[::1]:50050", token: "secret" }).close();
});

test("an address is a host and a port", () => {
  for (const address of ["http://localhost:1", "localhost", "localhost:1@example.org:2", "a:1/b"]) {
    assert.throws(() => new Client({ address }), TypeError);
  }
});
