// Servers of HTTP/1 and of HTTP/2 without TLS that say what they got, in chunks and with a trailer.
const { createHash } = require("node:crypto");

function echo(request, response) {
  const sha256 = createHash("sha256");
  let length = 0;
  request.on("data", (bytes) => {
    sha256.update(bytes);
    length += bytes.length;
  });
  request.on("end", () => {
    // Without chunks there are no trailers.
    const inChunks = request.httpVersion !== "1.0" && request.method !== "HEAD";
    const trailers = inChunks ? { "x-length": String(length) } : {};
    response.writeHead(200, inChunks ? { trailer: "x-length" } : {});
    response.write(
      JSON.stringify({
        server: "node",
        version: request.httpVersion,
        method: request.method,
        length,
        sha256: sha256.digest("hex"),
        client: request.headers["l5d-client-id"],
      }),
    );
    response.addTrailers(trailers);
    response.end();
  });
}

const [http1, http2] = process.argv.slice(-2);
require("node:http").createServer(echo).listen(http1);
require("node:http2").createServer(echo).listen(http2);
