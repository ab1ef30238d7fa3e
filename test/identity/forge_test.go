// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"crypto/ecdsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
)

// A forgery is what is different from a token that the API server has made.
type forgery struct {
	claims map[string]any    // in place of, or beside, the token's own
	keyID  string            // in the header; "": the token's own
	key    *ecdsa.PrivateKey // nil: the API server's
}

// forge makes another token out of one.
func (s *site) forge(token string, f forgery) string {
	s.T.Helper()
	parsed, err := jwt.ParseSigned(token, []jose.SignatureAlgorithm{jose.ES256})
	s.Must(err)
	claims := map[string]any{}
	s.Must(parsed.UnsafeClaimsWithoutVerification(&claims))
	for name, value := range f.claims {
		claims[name] = value
	}
	if f.keyID == "" {
		f.keyID = parsed.Headers[0].KeyID
	}
	if f.key == nil {
		f.key = s.issuerKey()
	}
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: jose.JSONWebKey{Key: f.key, KeyID: f.keyID}}, nil)
	s.Must(err)
	forged, err := jwt.Signed(signer).Claims(claims).Serialize()
	s.Must(err)
	return forged
}

// until is a token that ends at another time.
func (s *site) until(token string, end time.Time) string {
	s.T.Helper()
	return s.forge(token, forgery{claims: map[string]any{"exp": end.Unix()}})
}

// issuerKey is what the API server signs tokens with.
func (s *site) issuerKey() *ecdsa.PrivateKey {
	s.T.Helper()
	content, err := os.ReadFile(filepath.Join(s.ControlPlane.Dir(), "pki", "sa.key"))
	s.Must(err)
	block, _ := pem.Decode(content)
	key, err := x509.ParseECPrivateKey(block.Bytes)
	s.Must(err)
	return key
}

// unsigned is a token that says that it needs no signature.
func unsigned(token string) string {
	header := base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"none","typ":"JWT"}`))
	return header + "." + strings.Split(token, ".")[1] + "."
}
