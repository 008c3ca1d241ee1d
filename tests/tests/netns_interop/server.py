# A server of HTTP/1 that says what it got. The standard library's closes connections after each request unless it is told not to.
import hashlib
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def body(self):
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        whole = b""
        while size := int(self.rfile.readline(), 16):
            whole += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return whole

    def do_GET(self):
        body = self.body()
        got = {
            "server": "python",
            "version": self.request_version.removeprefix("HTTP/"),
            "method": self.command,
            "length": len(body),
            "sha256": hashlib.sha256(body).hexdigest(),
            "client": self.headers.get("l5d-client-id"),
        }
        answer = json.dumps(got).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    do_HEAD = do_POST = do_GET


ThreadingHTTPServer(("", int(sys.argv[1])), Echo).serve_forever()
