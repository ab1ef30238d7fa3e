// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

func mustServe(t *testing.T, dir string, hosts ...string) *ServingCert {
	t.Helper()
	s, err := ServingCertificate(dir, hosts)
	if err != nil {
		t.Fatalf("ServingCertificate(%q) = %v, want nil", hosts, err)
	}
	return s
}

func leafOf(t *testing.T, s *ServingCert) *x509.Certificate {
	t.Helper()
	cert, err := s.GetCertificate(&tls.ClientHelloInfo{})
	if err != nil || cert == nil {
		t.Fatalf("GetCertificate() = %v, %v, want a certificate", cert, err)
	}
	return cert.Leaf
}

// trusted verifies as a client that was given ca.crt.
func trusted(t *testing.T, caPEM []byte, leaf *x509.Certificate, host string, now time.Time) error {
	t.Helper()
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(caPEM) {
		t.Fatal("ca.crt holds no certificate")
	}
	_, err := leaf.Verify(x509.VerifyOptions{Roots: roots, DNSName: host, CurrentTime: now})
	return err
}

func readTestFile(t *testing.T, path ...string) []byte {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(path...))
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func TestServingCertificate(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data", "pki")
	s := mustServe(t, dir, "169.254.2.1", "Edge-1.example.org", "fd00::1", "0.0.0.0", "169.254.2.1")
	ca := readTestFile(t, dir, "ca.crt")
	if !bytes.Equal(ca, s.CA()) {
		t.Error("CA() is not ca.crt")
	}
	for name, want := range map[string]fs.FileMode{".": 0o700, "ca.crt": 0o644, "ca.key": 0o600, "serving.pem": 0o600} {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode().Perm() != want {
			t.Errorf("mode of %s = %v, %v, want %v", name, info.Mode().Perm(), err, want)
		}
	}
	leaf := leafOf(t, s)
	now := time.Now()
	for _, host := range []string{"127.0.0.1", "::1", "localhost", "169.254.2.1", "fd00::1", "edge-1.example.org"} {
		for _, at := range []time.Time{now, now.Add(364 * 24 * time.Hour), time.Date(1970, 1, 2, 0, 0, 0, 0, time.UTC)} {
			if err := trusted(t, ca, leaf, host, at); err != nil {
				t.Errorf("Verify(%s at %v) = %v, want nil", host, at, err)
			}
		}
	}
	for _, host := range []string{"0.0.0.0", "10.0.0.1", "example.org"} {
		if err := trusted(t, ca, leaf, host, now); err == nil {
			t.Errorf("Verify(%s) = nil, want an error", host)
		}
	}
	block, _ := pem.Decode(ca)
	authority, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	if got := authority.NotAfter.Sub(now); got < caLife-time.Minute || got > caLife {
		t.Errorf("life of the CA = %v, want %v", got, caLife)
	}
	if got := s.NotAfter().Sub(now); got < servingLife-time.Minute || got > servingLife {
		t.Errorf("life of the serving certificate = %v, want %v", got, servingLife)
	}

	// A restart changes nothing, whatever the order of the hosts.
	again := mustServe(t, dir, "edge-1.example.org", "fd00::1", "169.254.2.1")
	if !leafOf(t, again).Equal(leaf) || !bytes.Equal(readTestFile(t, dir, "ca.crt"), ca) {
		t.Error("a restart made another certificate")
	}
	// Other hosts do, under the same CA.
	other := leafOf(t, mustServe(t, dir, "169.254.2.2"))
	if other.Equal(leaf) || trusted(t, ca, other, "169.254.2.2", now) != nil {
		t.Error("other hosts did not make another certificate of the same CA")
	}
}

func TestServingCertificateHosts(t *testing.T) {
	for _, host := range []string{"", " ", "a b", "host:443", "[::1]", "fe80::1%eth0", "*.example.org", "http://x"} {
		dir := filepath.Join(t.TempDir(), "pki")
		if _, err := ServingCertificate(dir, []string{host}); err == nil {
			t.Errorf("ServingCertificate(%q) = nil, want an error", host)
		}
		if _, err := os.Stat(dir); err == nil {
			t.Errorf("ServingCertificate(%q) made files", host)
		}
	}
}

func TestServingCertificateDamage(t *testing.T) {
	remove := []byte(nil)
	otherKey := func(t *testing.T) []byte {
		dir := t.TempDir()
		mustServe(t, dir)
		return readTestFile(t, dir, "ca.key")
	}
	for _, tc := range []struct {
		name, file string
		content    func(t *testing.T, raw []byte) []byte
		wantErr    bool
	}{
		{"serving gone", "serving.pem", func(*testing.T, []byte) []byte { return remove }, false},
		{"serving empty", "serving.pem", func(*testing.T, []byte) []byte { return []byte{} }, false},
		{"serving cut", "serving.pem", func(_ *testing.T, raw []byte) []byte { return raw[:len(raw)/2] }, false},
		{"serving flipped", "serving.pem", func(_ *testing.T, raw []byte) []byte { raw[len(raw)-100] ^= 1; return raw }, false},
		{"serving of another CA", "serving.pem", func(t *testing.T, _ []byte) []byte {
			dir := t.TempDir()
			mustServe(t, dir, "10.0.0.1")
			return readTestFile(t, dir, "serving.pem")
		}, false},
		{"CA certificate gone", "ca.crt", func(*testing.T, []byte) []byte { return remove }, false},
		{"CA key gone", "ca.key", func(*testing.T, []byte) []byte { return remove }, true},
		{"CA key empty", "ca.key", func(*testing.T, []byte) []byte { return []byte{} }, true},
		{"CA key cut", "ca.key", func(_ *testing.T, raw []byte) []byte { return raw[:len(raw)/2] }, true},
		{"CA key of another CA", "ca.key", func(t *testing.T, _ []byte) []byte { return otherKey(t) }, true},
		{"CA certificate empty", "ca.crt", func(*testing.T, []byte) []byte { return []byte{} }, true},
		{"CA certificate cut", "ca.crt", func(_ *testing.T, raw []byte) []byte { return raw[:len(raw)/2] }, true},
		{"CA certificate twice", "ca.crt", func(_ *testing.T, raw []byte) []byte { return append(raw, raw...) }, true},
		{"CA certificate of no CA", "ca.crt", func(t *testing.T, raw []byte) []byte {
			return certPEM(newTestCA(t, "x", nil).client(t, "x", nil))
		}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			mustServe(t, dir, "10.0.0.1")
			before := readTestFile(t, dir, "ca.crt")
			file := filepath.Join(dir, tc.file)
			if raw := tc.content(t, readTestFile(t, file)); raw == nil {
				if err := os.Remove(file); err != nil {
					t.Fatal(err)
				}
			} else {
				writeTestFile(t, file, raw)
			}
			damaged := snapshot(t, dir)
			s, err := ServingCertificate(dir, []string{"10.0.0.1"})
			if tc.wantErr {
				if err == nil || !strings.Contains(err.Error(), file) {
					t.Errorf("ServingCertificate() = %v, want an error that names %s", err, file)
				}
				if diff := cmp.Diff(damaged, snapshot(t, dir)); diff != "" {
					t.Errorf("files were changed (-before +after):\n%s", diff)
				}
				return
			}
			if err != nil {
				t.Fatalf("ServingCertificate() = %v, want nil", err)
			}
			// Clients have the CA of before.
			if err := trusted(t, before, leafOf(t, s), "10.0.0.1", time.Now()); err != nil {
				t.Errorf("Verify() = %v, want nil", err)
			}
			if !leafOf(t, mustServe(t, dir, "10.0.0.1")).Equal(leafOf(t, s)) {
				t.Error("what was made anew was not saved")
			}
		})
	}
}

func snapshot(t *testing.T, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for _, e := range entries {
		files[e.Name()] = string(readTestFile(t, dir, e.Name()))
	}
	return files
}

func TestServingCertificateModes(t *testing.T) {
	dir := t.TempDir()
	mustServe(t, dir)
	for name, mode := range map[string]fs.FileMode{".": 0o755, "ca.key": 0o644, "serving.pem": 0o640} {
		if err := os.Chmod(filepath.Join(dir, name), mode); err != nil {
			t.Fatal(err)
		}
	}
	mustServe(t, dir)
	for name, want := range map[string]fs.FileMode{".": 0o700, "ca.key": 0o600, "serving.pem": 0o600} {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode().Perm() != want {
			t.Errorf("mode of %s = %v, %v, want %v", name, info.Mode().Perm(), err, want)
		}
	}
}

func TestServingCertificateRenewal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		s := mustServe(t, dir)
		first := leafOf(t, s)
		<-time.After(servingLife * 2 / 3)
		if !leafOf(t, s).Equal(first) {
			t.Error("the certificate was renewed before two thirds of its life")
		}
		<-time.After(time.Minute)
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() { leafOf(t, s) })
		}
		wg.Wait()
		second := leafOf(t, s)
		if second.Equal(first) || time.Until(second.NotAfter) < servingLife-time.Minute {
			t.Errorf("after two thirds of its life the certificate ends at %v, want it renewed", second.NotAfter)
		}
		if !leafOf(t, mustServe(t, dir)).Equal(second) {
			t.Error("the renewed certificate was not saved")
		}
		// Years without a handshake or a restart: renewed at once by either.
		<-time.After(2 * servingLife)
		third := leafOf(t, mustServe(t, dir))
		if third.Equal(second) || leafOf(t, s).Equal(second) {
			t.Error("an expired certificate was not renewed")
		}
	})
}

func TestServingCertificateThatCannotBeSaved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		s := mustServe(t, dir)
		first := leafOf(t, s)
		<-time.After(servingLife * 3 / 4)
		// A directory that is not empty stands in the way of the file.
		obstacle := filepath.Join(dir, servingFile+".tmp")
		if err := os.MkdirAll(filepath.Join(obstacle, "x"), 0o700); err != nil {
			t.Fatal(err)
		}
		second := leafOf(t, s)
		if second.Equal(first) {
			t.Fatal("the certificate was not renewed in memory")
		}
		// Also at a start, and with other hosts.
		if leaf := leafOf(t, mustServe(t, dir, "10.0.0.1")); leaf.VerifyHostname("10.0.0.1") != nil {
			t.Error("other hosts did not make another certificate in memory")
		}
		if err := os.RemoveAll(obstacle); err != nil {
			t.Fatal(err)
		}
		<-time.After(renewRetry - time.Second)
		if !leafOf(t, s).Equal(second) || leafOf(t, mustServeCopy(t, dir)).Equal(second) {
			t.Error("the certificate was saved before its time")
		}
		<-time.After(time.Second)
		if !leafOf(t, s).Equal(second) {
			t.Error("the certificate was made anew only to be saved")
		}
		if !leafOf(t, mustServe(t, dir)).Equal(second) {
			t.Error("the certificate was not saved later")
		}
	})
}

// mustServeCopy serves from a copy of dir, which stays as it is.
func mustServeCopy(t *testing.T, dir string) *ServingCert {
	t.Helper()
	other := t.TempDir()
	for name, raw := range snapshot(t, dir) {
		writeTestFile(t, filepath.Join(other, name), []byte(raw))
	}
	return mustServe(t, other)
}

func TestExpiredServingCertificateIsServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		s := mustServe(t, dir)
		// Shortly before the CA ends a renewal gains nothing, afterwards even less.
		<-time.After(time.Until(s.ca.cert.NotAfter) - 30*24*time.Hour)
		last := leafOf(t, s)
		if !last.NotAfter.Equal(s.ca.cert.NotAfter) {
			t.Errorf("NotAfter = %v, want that of the CA, %v", last.NotAfter, s.ca.cert.NotAfter)
		}
		for range 3 {
			<-time.After(20 * 365 * 24 * time.Hour)
			if !leafOf(t, s).Equal(last) || !leafOf(t, mustServe(t, dir)).Equal(last) {
				t.Error("GetCertificate() does not return the expired certificate")
			}
		}
	})
}

// The bubble's clock stands at the year 2000: the CA must not end before the
// clock is put right.
func TestServingCertificateMadeWithAWrongClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := mustServe(t, t.TempDir())
		ca := s.CA()
		if got, want := s.ca.cert.NotAfter, saneClock.Add(caLife); !got.Equal(want) {
			t.Errorf("the CA ends at %v, want %v", got, want)
		}
		<-time.After(time.Until(saneClock) + 365*24*time.Hour)
		if err := trusted(t, ca, leafOf(t, s), "127.0.0.1", time.Now()); err != nil {
			t.Errorf("Verify() once the clock is right = %v, want nil", err)
		}
	})
}

func TestServingCertificateErrors(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	writeTestFile(t, file, nil)
	if _, err := ServingCertificate(filepath.Join(file, "pki"), nil); err == nil || !strings.Contains(err.Error(), file) {
		t.Errorf("ServingCertificate() below a file = %v, want an error that names %s", err, file)
	}
	// A crash between ca.key and ca.crt leaves the key, and a temporary file.
	dir := t.TempDir()
	s := mustServe(t, dir)
	for _, name := range []string{"ca.crt", "serving.pem"} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	writeTestFile(t, filepath.Join(dir, "ca.crt.tmp"), []byte("-----BEGIN"))
	again := mustServe(t, dir)
	if again.ca.cert.Subject.CommonName != s.ca.cert.Subject.CommonName || !again.ca.key.Equal(s.ca.key) {
		t.Error("the CA made after a crash is another one")
	}
	if _, err := os.Stat(filepath.Join(dir, "ca.crt.tmp")); err == nil {
		t.Error("the temporary file is still there")
	}
}
