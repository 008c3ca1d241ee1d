// A server and a client of Go's own HTTP, in both versions without TLS.
//
//	go-http server PORT
//	go-http client VERSION URL
package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
)

// Requests of the client, of which some share a connection.
const requests = 20

// The server says what it got, in chunks and with a trailer.
func echo(response http.ResponseWriter, request *http.Request) {
	hash := sha256.New()
	length, err := io.Copy(hash, request.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	response.Header().Set("Trailer", "x-length")
	json.NewEncoder(response).Encode(map[string]any{
		"server":  "go",
		"version": fmt.Sprintf("%d.%d", request.ProtoMajor, request.ProtoMinor),
		"method":  request.Method,
		"length":  length,
		"sha256":  hex.EncodeToString(hash.Sum(nil)),
		"client":  request.Header.Get("l5d-client-id"),
	})
	response.(http.Flusher).Flush()
	response.Header().Set("x-length", strconv.FormatInt(length, 10))
}

func serve(port string) error {
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	server := http.Server{Addr: ":" + port, Handler: http.HandlerFunc(echo), Protocols: &protocols}
	return server.ListenAndServe()
}

// One request, whose body has no length that is known before.
func ask(client *http.Client, url string) (string, error) {
	body := io.MultiReader(bytes.NewReader(bytes.Repeat([]byte("0"), 100_000)))
	request, err := http.NewRequest(http.MethodPost, url, body)
	if err != nil {
		return "", err
	}
	// Without it a proxy does not pass trailers on (RFC 9110, section 6.5.1).
	request.Header.Set("TE", "trailers")
	response, err := client.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return "", err
	}
	if trailer := response.Trailer.Get("x-length"); trailer != "100000" {
		return "", fmt.Errorf("no trailer: %v of %s", response.Trailer, text)
	}
	return strings.TrimSpace(string(text)), nil
}

func request(version, url string) error {
	var protocols http.Protocols
	protocols.SetHTTP1(version == "1.1")
	protocols.SetUnencryptedHTTP2(version == "2.0")
	client := &http.Client{Transport: &http.Transport{Protocols: &protocols, MaxConnsPerHost: 4}}
	var (
		group   sync.WaitGroup
		answers [requests]string
		errs    [requests]error
	)
	for i := range requests {
		group.Go(func() { answers[i], errs[i] = ask(client, url) })
	}
	group.Wait()
	for i, err := range errs {
		if err != nil {
			return err
		}
		fmt.Println(answers[i])
	}
	return nil
}

func main() {
	var err error
	switch os.Args[1] {
	case "server":
		err = serve(os.Args[2])
	case "client":
		err = request(os.Args[2], os.Args[3])
	}
	if err != nil {
		log.Fatal(err)
	}
}
