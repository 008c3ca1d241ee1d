// Requests of Node's clients: many at once, on connections that are kept and on streams of one HTTP/2 connection.
const [http1, http2] = process.argv.slice(-2);
const body = Buffer.alloc(100000, "0");

function read(message, print) {
  const chunks = [];
  message.on("data", (chunk) => chunks.push(chunk));
  message.on("end", () => print(Buffer.concat(chunks).toString()));
}

const agent = new (require("node:http").Agent)({ keepAlive: true, maxSockets: 4 });
let left = 20;
for (let i = 0; i < left; i++) {
  const headers = { te: "trailers", connection: "te, keep-alive" };
  const request = require("node:http").request(http1, { agent, method: "POST", headers }, (response) =>
    read(response, (text) => {
      if (response.trailers["x-length"] !== "100000") throw new Error(`no trailer: ${JSON.stringify(response.trailers)}`);
      console.log(text);
      if (--left === 0) agent.destroy();
    }),
  );
  request.write(body.subarray(0, 50000));
  request.end(body.subarray(50000));
}

const session = require("node:http2").connect(http2);
let open = 20;
for (let i = 0; i < open; i++) {
  const stream = session.request({ ":method": "POST", ":path": "/" });
  let trailer;
  stream.on("trailers", (trailers) => (trailer = trailers["x-length"]));
  read(stream, (text) => {
    if (trailer !== "100000") throw new Error(`no trailer: ${trailer}`);
    console.log(text);
    if (--open === 0) session.close();
  });
  stream.end(body);
}
