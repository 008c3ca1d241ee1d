# Requests of the standard library's client: several on one connection, with a body of a known length and one in chunks.
import http.client
import sys

for host in sys.argv[1:]:
    connection = http.client.HTTPConnection(host, timeout=20)
    connection.connect()
    socket = connection.sock
    chunks = (b"0" * 10_000 for _ in range(10))
    for method, body in [("GET", None), ("POST", b"0" * 100_000), ("POST", chunks), ("GET", None)]:
        connection.request(method, "/", body, encode_chunked=body is chunks)
        response = connection.getresponse()
        assert response.status == 200, (host, response.status, response.read())
        print(response.read().decode())
        assert connection.sock is socket, f"{host}: the connection ended after {method}"
