// A client of a deepinfer engine: docs/protocol.md as a program.

import { randomBytes, randomInt } from "node:crypto";
import { decode, encode } from "@msgpack/msgpack";
import { Dealer } from "zeromq";

const PROTOCOL = 1;
const HEARTBEAT_MS = 1_000;
const SILENCE_MS = 10_000;
const LOSSES_ALLOWED = 5;

/** A connection to an engine. It outlives the engine's scheduler: open streams go on with the next. */
export class Engine {
  #endpoint;
  #keys;
  #socket;
  #sending = Promise.resolve();
  #welcomed = false;
  #heard = 0;
  #losses = 0;
  #nextKey = 0;
  #requests = new Map(); // by key
  #timer;
  #dead; // the error of an engine that is gone for good
  #ready = deferred();

  /**
   * Resolves when the engine is ready. `keys` (serverKey, publicKey, secretKey; 40 characters of Z85
   * each) are those of an engine that wants them.
   */
  static async connect(endpoint, keys = undefined) {
    const engine = new Engine();
    engine.#endpoint = endpoint;
    engine.#keys = keys;
    engine.#begin();
    engine.#timer = setInterval(() => engine.#beat(), HEARTBEAT_MS);
    engine.info = await engine.#ready.promise;
    return engine;
  }

  /** Yields token ids; `onEnd` gets `{reason, detail, numOutputTokens, message}` at the end. */
  async *generate(requestId, prompt, params = {}, onEnd = () => {}) {
    if (this.#dead) throw this.#dead;
    const request = {
      key: this.#nextKey++, // never used twice on one connection
      requestId,
      prompt: packInt32(prompt),
      params: { ...params, seed: params.seed ?? randomInt(2 ** 47) },
      tokens: [],
      aborted: false,
      end: undefined,
      error: undefined,
      wake: () => {},
    };
    this.#requests.set(request.key, request);
    if (this.#welcomed) this.#send(addRequest(request));
    try {
      for (let read = 0; ; ) {
        while (read < request.tokens.length) yield request.tokens[read++];
        if (request.error) throw request.error;
        if (request.end) return onEnd(request.end);
        await new Promise((wake) => (request.wake = wake));
      }
    } finally {
      // The reader left early: nobody wants the rest.
      if (this.#requests.delete(request.key)) this.#send(["Abort", request.key, "disconnect"]);
    }
  }

  /** Ends a request; its stream gets its end, with the reason `abort`. */
  abort(requestId) {
    for (const request of this.#requests.values()) {
      if (request.requestId !== requestId) continue;
      request.aborted = true;
      this.#send(["Abort", request.key]);
    }
  }

  /** Leaves; what is open is aborted in the engine. */
  async close() {
    clearInterval(this.#timer);
    this.#send(["Goodbye"]);
    await this.#sending;
    this.#socket.close();
  }

  #begin() {
    this.#welcomed = false;
    this.#heard = Date.now();
    this.#socket = new Dealer({
      // Secret and new for each connection: whoever knew it could wait to take its place.
      routingId: randomBytes(16).toString("hex"),
      linger: 200,
      sendHighWaterMark: 0,
      ...(this.#keys && {
        curveServerKey: this.#keys.serverKey,
        curvePublicKey: this.#keys.publicKey,
        curveSecretKey: this.#keys.secretKey,
      }),
    });
    this.#watch(this.#socket);
    this.#socket.connect(this.#endpoint);
    this.#read(this.#socket);
    this.#send(["Hello", PROTOCOL]);
  }

  // ZeroMQ connects again by itself, but what was on its way is lost then: begin anew at once.
  #watch(socket) {
    let made = false;
    socket.events.on("handshake", () => (made = true));
    socket.events.on("handshake:error:auth", () => this.#fail("it does not know this client's key"));
    socket.events.on("disconnect", () => {
      if (made && socket === this.#socket) this.#lost("the connection was lost");
    });
  }

  async #read(socket) {
    for await (const [frame] of socket) {
      if (socket !== this.#socket) return;
      this.#heard = Date.now();
      const [tag, ...fields] = decode(frame);
      this.#handle(tag, fields);
    }
  }

  #handle(tag, fields) {
    if (tag === "Welcome" && !this.#welcomed) {
      this.#welcomed = true;
      this.#losses = 0;
      this.#ready.resolve(engineInfo(fields[0]));
      for (const request of this.#requests.values()) {
        this.#send(addRequest(request));
        if (request.aborted) this.#send(["Abort", request.key]); // the first may have been lost
      }
    } else if (tag === "OutputBatch") this.#receive(fields);
    else if (tag === "Refused") {
      const [key, code, field, message] = fields;
      this.#finish(key, { error: new Error(`${code}: ${message}`) });
    } else if (tag === "EngineDown") this.#fail(fields[0]);
    else if (tag === "Forgotten") this.#lost("the engine had taken this client for gone");
  }

  #receive([, keys, counts, tokens, , , ends]) {
    let next = 0;
    const perKey = unpackInt32(counts); // empty when each key has one token
    const ids = unpackInt32(tokens);
    unpackUint32(keys).forEach((key, i) => {
      const count = perKey[i] ?? 1;
      const request = this.#requests.get(key);
      request?.tokens.push(...ids.slice(next, next + count));
      request?.wake();
      next += count;
    });
    for (const [key, , reason, detail, numOutputTokens, , , , , , , message] of ends)
      this.#finish(key, { end: { reason, detail, numOutputTokens, message } });
  }

  #finish(key, how) {
    const request = this.#requests.get(key);
    this.#requests.delete(key);
    Object.assign(request ?? {}, how);
    request?.wake();
  }

  #beat() {
    const silent = Date.now() - this.#heard > SILENCE_MS;
    if (silent && !this.info) this.#fail("no word from one (one that has keys wants this client's)");
    else if (silent) this.#lost("the engine is silent");
    else this.#send(this.#welcomed ? ["ClientHeartbeat"] : ["Hello", PROTOCOL]);
  }

  #lost(cause) {
    if (++this.#losses > LOSSES_ALLOWED) return this.#fail(cause);
    this.#socket.close();
    this.#begin();
  }

  #fail(cause) {
    clearInterval(this.#timer);
    const error = (this.#dead ??= new Error(`engine at ${this.#endpoint}: ${cause}`));
    this.#ready.reject(error);
    for (const key of [...this.#requests.keys()]) this.#finish(key, { error });
    this.#socket.close();
  }

  // One after the other: a socket takes no second message while the first one waits.
  #send(message) {
    const socket = this.#socket;
    this.#sending = this.#sending
      .then(() => (socket.closed ? undefined : socket.send(encode(message))))
      .catch(() => {}); // closed meanwhile
  }
}

// What was delivered already travels along, so that the engine goes on behind it.
function addRequest({ key, requestId, prompt, params, tokens }) {
  const again = tokens.length > 0;
  const output = packInt32(tokens);
  return ["AddRequest", key, requestId, prompt, params, "", 0, null, output, "", [], again];
}

function engineInfo(fields) {
  const [model, tokenizer, vocabSize, eosTokenIds, maxModelLen] = fields;
  return { model, tokenizer, vocabSize, eosTokenIds, maxModelLen };
}

function packInt32(values) {
  const bytes = Buffer.alloc(4 * values.length);
  values.forEach((value, i) => bytes.writeInt32LE(value, 4 * i));
  return bytes;
}

function unpackInt32(column) {
  const bytes = Buffer.from(column);
  return Array.from({ length: bytes.length / 4 }, (_, i) => bytes.readInt32LE(4 * i));
}

function unpackUint32(column) {
  return unpackInt32(column).map((value) => value >>> 0);
}

function deferred() {
  const parts = {};
  parts.promise = new Promise((resolve, reject) => Object.assign(parts, { resolve, reject }));
  return parts;
}
