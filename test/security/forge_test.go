// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package security

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

// forgeTokens makes the attacker's tokens. Those that must not count are of a
// ServiceAccount that may read the secrets.
func (s *stage) forgeTokens() {
	s.T.Helper()
	ctx, core := s.T.Context(), s.ControlPlane.Client.CoreV1()
	key, err := readKey(filepath.Join(s.ControlPlane.Dir(), "pki", "sa.key"))
	s.Must(err)
	token := func(spec authenticationv1.TokenRequestSpec) string {
		r, err := core.ServiceAccounts("a").CreateToken(ctx, "reader", &authenticationv1.TokenRequest{Spec: spec}, metav1.CreateOptions{})
		s.Must(err)
		return r.Status.Token
	}
	pod, err := core.Pods("a").Get(ctx, "gone", metav1.GetOptions{})
	s.Must(err)
	tokens := s.plan.Tokens
	tokens["low"] = s.ControlPlane.Token("low")
	tokens["junk"] = "junk-" + rand.Text()
	tokens["reader"] = token(authenticationv1.TokenRequestSpec{}) // for where none belongs
	tokens["elsewhere"] = token(authenticationv1.TokenRequestSpec{Audiences: []string{"elsewhere"}})
	tokens["gone"] = token(authenticationv1.TokenRequestSpec{BoundObjectRef: &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: "gone", UID: pod.UID}})
	now := int64(0)
	s.Must(core.Pods("a").Delete(ctx, "gone", metav1.DeleteOptions{GracePeriodSeconds: &now}))
	expired, err := aged(tokens["reader"], 3*time.Hour)
	s.Must(err)
	tokens["expired"], err = signES256(expired, key)
	s.Must(err)
	other, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	s.Must(err)
	_, payload, _ := strings.Cut(unsigned(tokens["reader"]), ".")
	tokens["otherkey"], err = signES256(unsigned(tokens["reader"]), other)
	s.Must(err)
	tokens["unsigned"] = encodeJSON(map[string]string{"alg": "none", "typ": "JWT"}) + "." + payload + "."
	tokens["hmac"], err = signHS256(encodeJSON(map[string]string{"alg": "HS256", "typ": "JWT"})+"."+payload, key.Public())
	s.Must(err)
	s.checkTokens(ctx)
}

// checkTokens makes sure that the API server thinks of them as the tests do. No
// verdict about the token of the deleted pod is kept there yet.
func (s *stage) checkTokens(ctx context.Context) {
	s.T.Helper()
	for name, token := range s.plan.Tokens {
		want := map[string]int{"low": 403, "reader": 200}[name]
		if want == 0 {
			want = 401
		}
		config := s.ControlPlane.TokenConfig("low")
		config.BearerToken = token
		e := s.Direct(config)
		s.Must(process.Poll(ctx, fmt.Sprintf("token %s is answered with %d", name, want), func(ctx context.Context) error {
			status, _, err := e.Fetch(ctx, aSecret, rig.JSON)
			if err == nil && status != want {
				err = fmt.Errorf("it is answered with %d", status)
			}
			return err
		}))
	}
}

// unsigned is a token without its signature.
func unsigned(token string) string { return token[:strings.LastIndexByte(token, '.')] }

func encodeJSON(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // maps of strings
	}
	return base64.RawURLEncoding.EncodeToString(b)
}

// aged is a token that was made so much earlier, unsigned.
func aged(token string, age time.Duration) (string, error) {
	header, payload, _ := strings.Cut(unsigned(token), ".")
	raw, err := base64.RawURLEncoding.DecodeString(payload)
	if err != nil {
		return "", err
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	claims := map[string]any{}
	if err := d.Decode(&claims); err != nil {
		return "", err
	}
	for _, name := range []string{"iat", "nbf", "exp"} {
		n, _ := claims[name].(json.Number)
		seconds, err := n.Int64()
		if err != nil {
			return "", fmt.Errorf("claim %s: %w", name, err)
		}
		claims[name] = seconds - int64(age.Seconds())
	}
	return header + "." + encodeJSON(claims), nil
}

func signES256(text string, key *ecdsa.PrivateKey) (string, error) {
	sum := sha256.Sum256([]byte(text))
	r, s, err := ecdsa.Sign(rand.Reader, key, sum[:])
	if err != nil {
		return "", err
	}
	signature := make([]byte, 64)
	r.FillBytes(signature[:32])
	s.FillBytes(signature[32:])
	return text + "." + base64.RawURLEncoding.EncodeToString(signature), nil
}

// signHS256 takes the public key for the secret of a MAC, as a careless verifier
// would.
func signHS256(text string, key crypto.PublicKey) (string, error) {
	der, err := x509.MarshalPKIXPublicKey(key)
	if err != nil {
		return "", err
	}
	mac := hmac.New(sha256.New, pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}))
	mac.Write([]byte(text))
	return text + "." + base64.RawURLEncoding.EncodeToString(mac.Sum(nil)), nil
}

func readKey(file string) (*ecdsa.PrivateKey, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(content)
	if block == nil {
		return nil, errors.New(file + ": no PEM")
	}
	return x509.ParseECPrivateKey(block.Bytes)
}

// forgeCertificates makes the attacker's client certificates.
func (s *stage) forgeCertificates() {
	s.T.Helper()
	issued := func(name string, orgs ...string) tls.Certificate {
		certFile, keyFile, err := s.ControlPlane.ClientCert(name, orgs...)
		s.Must(err)
		c, err := tls.LoadX509KeyPair(certFile, keyFile)
		s.Must(err)
		return c
	}
	n2 := issued("system:node:n2", "system:nodes")
	node, err := tls.LoadX509KeyPair(s.Rig.Node.CertFile, s.Rig.Node.KeyFile)
	s.Must(err)
	authority, err := newForgery(pkix.Name{CommonName: "edgehub test ca"}, nil) // the real one's name
	s.Must(err)
	names := pkix.Name{CommonName: rig.NodeUser, Organization: []string{"system:nodes"}}
	for name, issuer := range map[string]*tls.Certificate{"selfsigned": nil, "signedbyn2": &n2, "otherauthority": authority} {
		c, err := newForgery(names, issuer)
		s.Must(err)
		s.carry(name, *c)
	}
	s.carry("n2", n2)
	s.carry("admin", issued("admin", "system:masters"))
	s.carry("nodename", issued(rig.NodeUser))
	s.carry("nodemaster", issued(rig.NodeUser, "system:nodes", "system:masters"))
	s.carry("nodewithoutkey", tls.Certificate{Certificate: node.Certificate, PrivateKey: n2.PrivateKey})
}

// carry gives the attacker a certificate.
func (s *stage) carry(name string, c tls.Certificate) {
	s.T.Helper()
	der, err := x509.MarshalPKCS8PrivateKey(c.PrivateKey)
	s.Must(err)
	s.plan.Certs[name] = certificate{Chain: c.Certificate, Key: der}
}

// newForgery makes a certificate that an issuer has signed, or itself.
func newForgery(subject pkix.Name, issuer *tls.Certificate) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: subject, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	parent, signer, chain := template, crypto.PrivateKey(key), [][]byte(nil)
	if issuer != nil {
		if parent, err = x509.ParseCertificate(issuer.Certificate[0]); err != nil {
			return nil, err
		}
		signer, chain = issuer.PrivateKey, issuer.Certificate
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: append([][]byte{der}, chain...), PrivateKey: key}, nil
}
