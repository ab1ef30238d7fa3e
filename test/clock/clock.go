// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package clock moves time for tests that cannot wait: what the API server hands out
// is made older on its way.
package clock

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/controlplane"
)

// OlderTokens stands between link and API server, and makes the tokens that the
// API server hands out older by Age: status.expirationTimestamp of the answer, and
// the claims iat, nbf, exp and warnafter of the token, which is signed anew with
// the API server's own key. What edgehub records is thus, in every bit that knows
// a time, what it would have recorded that long ago: a token whose hour is over,
// and which the API server still accepts (it extends exp to a year).
//
// So nobody waits, and no clock is changed. What is not simulated: edgehub's own
// note of when it recorded an answer, which only matters after 24 hours, and the
// age of certificates.
type OlderTokens struct {
	Age time.Duration

	done atomic.Int64
	key  *ecdsa.PrivateKey
	t    testing.TB
}

// Count returns how many tokens were made older.
func (o *OlderTokens) Count() int { return int(o.done.Load()) }

// Start serves for the length of the test, and returns the address. It serves with
// the API server's certificate and asks it with the node's, whoever asks.
func (o *OlderTokens) Start(t testing.TB, cp *controlplane.ControlPlane, nodeConfig *rest.Config) string {
	t.Helper()
	pki := func(name string) string { return filepath.Join(cp.Dir(), "pki", name) }
	o.t = t
	var err error
	if o.key, err = readKey(pki("sa.key")); err != nil {
		t.Fatal(err)
	}
	serving, err := tls.LoadX509KeyPair(pki("apiserver.crt"), pki("apiserver.key"))
	if err != nil {
		t.Fatal(err)
	}
	transport, err := rest.TransportFor(nodeConfig)
	if err != nil {
		t.Fatal(err)
	}
	target, err := url.Parse(cp.URL())
	if err != nil {
		t.Fatal(err)
	}
	quiet := log.New(io.Discard, "", 0) // clients that are killed are no news
	server := httptest.NewUnstartedServer(&httputil.ReverseProxy{
		ErrorLog:       quiet,
		Rewrite:        func(r *httputil.ProxyRequest) { r.SetURL(target) },
		Transport:      transport,
		FlushInterval:  -1,
		ModifyResponse: o.modify,
	})
	server.EnableHTTP2, server.Config.ErrorLog = true, quiet
	server.TLS = &tls.Config{Certificates: []tls.Certificate{serving}, MinVersion: tls.VersionTLS12}
	server.StartTLS()
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	return server.Listener.Addr().String()
}

// modify makes the token in an answer older.
func (o *OlderTokens) modify(resp *http.Response) error {
	if resp.Request.Method != http.MethodPost || !strings.HasSuffix(resp.Request.URL.Path, "/token") || resp.StatusCode != http.StatusCreated {
		return nil
	}
	body, err := io.ReadAll(resp.Body)
	if err := errors.Join(err, resp.Body.Close()); err != nil {
		return err
	}
	older, err := o.rewrite(resp.Header.Get("Content-Type"), body)
	if err != nil {
		o.t.Errorf("make a token older: %v", err)
		return err
	}
	o.done.Add(1)
	resp.Body = io.NopCloser(bytes.NewReader(older))
	resp.ContentLength = int64(len(older))
	resp.Header.Set("Content-Length", strconv.Itoa(len(older)))
	return nil
}

func (o *OlderTokens) rewrite(contentType string, body []byte) ([]byte, error) {
	object, _, err := scheme.Codecs.UniversalDeserializer().Decode(body, nil, nil)
	if err != nil {
		return nil, err
	}
	request, ok := object.(*authenticationv1.TokenRequest)
	if !ok {
		return nil, fmt.Errorf("a %T is no TokenRequest", object)
	}
	request.Status.ExpirationTimestamp.Time = request.Status.ExpirationTimestamp.Add(-o.Age)
	if request.Status.Token, err = o.resign(request.Status.Token); err != nil {
		return nil, err
	}
	info, ok := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), contentType)
	if !ok {
		return nil, fmt.Errorf("no serializer for %q", contentType)
	}
	return runtime.Encode(scheme.Codecs.EncoderForVersion(info.Serializer, authenticationv1.SchemeGroupVersion), request)
}

// Claims are those of a token.
type Claims map[string]any

// Time returns a claim that is a time.
func (c Claims) Time(name string) time.Time {
	n, _ := c[name].(json.Number)
	seconds, _ := n.Int64()
	return time.Unix(seconds, 0)
}

// ClaimsOf reads the claims of a token, without a look at its signature.
func ClaimsOf(token string) (Claims, error) {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return nil, fmt.Errorf("a token has %d parts", len(parts))
	}
	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return nil, err
	}
	d := json.NewDecoder(bytes.NewReader(payload))
	d.UseNumber()
	c := Claims{}
	return c, d.Decode(&c)
}

// resign moves the times of a token and signs it (ES256).
func (o *OlderTokens) resign(token string) (string, error) {
	c, err := ClaimsOf(token)
	if err != nil {
		return "", err
	}
	private, _ := c["kubernetes.io"].(map[string]any)
	for _, in := range []struct {
		claims Claims
		name   string
	}{{c, "iat"}, {c, "nbf"}, {c, "exp"}, {private, "warnafter"}} {
		if _, ok := in.claims[in.name]; !ok {
			return "", fmt.Errorf("the token has no claim %s", in.name)
		}
		in.claims[in.name] = in.claims.Time(in.name).Add(-o.Age).Unix()
	}
	payload, err := json.Marshal(c)
	if err != nil {
		return "", err
	}
	header, _, _ := strings.Cut(token, ".")
	signed := header + "." + base64.RawURLEncoding.EncodeToString(payload)
	sum := sha256.Sum256([]byte(signed))
	r, s, err := ecdsa.Sign(rand.Reader, o.key, sum[:])
	if err != nil {
		return "", err
	}
	signature := make([]byte, 64)
	r.FillBytes(signature[:32])
	s.FillBytes(signature[32:])
	return signed + "." + base64.RawURLEncoding.EncodeToString(signature), nil
}

func readKey(file string) (*ecdsa.PrivateKey, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(content)
	if block == nil {
		return nil, fmt.Errorf("%s: no PEM", file)
	}
	if key, err := x509.ParseECPrivateKey(block.Bytes); err == nil {
		return key, nil
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	ec, ok := key.(*ecdsa.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("%s: a %T, want an ECDSA key", file, key)
	}
	return ec, nil
}
