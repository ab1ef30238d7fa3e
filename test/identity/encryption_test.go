// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

const (
	vaultSecrets = 50
	// churnBytes is the size of a Secret that changes; a log is not compacted below
	// 1 MiB.
	churnBytes = 256 << 10
	maxChurn   = 20
	// sealedLogs are those that the vault's hub keeps: the node's Secrets and a user's,
	// the token of a pod, and verdicts.
	sealedLogs = 4
	rewrites   = "edgehub_cache_journal_rewrites_total"
	toReseal   = "edgehub_cache_journal_logs_to_reseal"
)

// A vault is a hub that has been shown Secrets, to the node and to a user, and a
// token, and all that must not be found on its disk.
type vault struct {
	*site
	keyFile   string
	args      []string // of its hubs
	pod       *corev1.Pod
	tokens    []string          // of the pod, as the node was given them
	values    map[string]string // that no file may hold, by what they are
	plain     string            // a ConfigMap's value
	plainName string            // of it
	node      *rig.Endpoint
	user      *rig.Endpoint
}

// TestEncryptionKeyRotation looks for Secrets and tokens on the disk of a hub that is
// killed, after its logs were compacted, too; changes its key, loses it, and lets
// others read and own its folder meanwhile.
//
// Guards: sealFor of what is appended and of what is written anew; a log is known to
// be sealed with an old key, and is rewritten; what a key is missing for is dropped,
// nothing else; datadir.Prepare.
func TestEncryptionKeyRotation(t *testing.T) {
	t.Parallel()
	v := newVault(t)
	v.start(v.args...)
	v.connect()
	v.record()
	v.Settle()
	v.churn()
	v.Must(v.Hub.Kill())
	v.search("after SIGKILL", v.values)

	old := v.key()
	v.setKeys(newKey(), old)
	v.Must(v.Hub.Start(t.Context()))
	v.WaitLink(true)
	v.waitMetric(sealedLogs, rewrites)
	v.Must(process.Poll(t.Context(), "no log is sealed with the old key", func(ctx context.Context) error {
		n, err := v.Hub.Metric(ctx, toReseal)
		if err == nil && n > 0 {
			err = fmt.Errorf("%v are", n)
		}
		return err
	}))
	v.Offline()
	v.setKeys(v.key())
	v.restart(false)
	v.replays("with the new key alone", http.StatusOK)
	v.search("written anew", v.values)

	v.giveAway()
	v.restart(false)
	v.wantOurs()
	v.replays("after others had the folder", http.StatusOK)

	v.setKeys(newKey())
	v.restart(false)
	v.replays("with another key", http.StatusServiceUnavailable)
	v.Online()
	v.record()
	v.Settle()
	v.Offline()
	v.replays("fetched again", http.StatusOK)
	v.search("fetched again", v.values)
}

// TestEncryptAll is the same for a hub that encrypts all that it records: what else
// there is is not found either, but names.
//
// Guards: wantedSeal looks at the flag; a log that is in clear is written anew.
func TestEncryptAll(t *testing.T) {
	t.Parallel()
	v := newVault(t)
	v.start(v.args...)
	v.connect()
	v.record()
	v.Settle()
	v.inClear(v.plain, true)
	first := v.Hub.DataDir()
	v.Must(v.Hub.Kill())

	// The same folder, and another flag.
	v.start(append(v.args, "--encrypt-all", "--data-dir="+first)...)
	v.connectTo(filepath.Join(first, "pki", "ca.crt"))
	v.Must(process.Poll(t.Context(), "all is written anew", func(ctx context.Context) error {
		n, err := v.Hub.Metric(ctx, toReseal)
		done, err2 := v.Hub.Metric(ctx, rewrites)
		if err == nil && err2 == nil && (n > 0 || done == 0) {
			err = fmt.Errorf("%v logs are to be sealed, %v were written", n, done)
		}
		return errors.Join(err, err2)
	}))
	v.record()
	v.Settle()
	v.Offline()
	v.restart(false)
	v.replays("with all encrypted", http.StatusOK)
	v.Must(v.Hub.Kill())
	v.values["a ConfigMap"] = v.plain
	v.searchIn(first, "with all encrypted", v.values)
	if found, err := rig.Search(filepath.Join(first, "journal"), map[string]string{"the name": v.plainName}); err != nil || len(found) == 0 {
		t.Errorf("the name of a ConfigMap is not on disk, %v: the search cannot be right", err)
	}
}

func newVault(t *testing.T) *vault {
	t.Helper()
	v := &vault{site: newSite(t), values: map[string]string{}, plain: "plain-" + rand.Text(), plainName: "named-" + strings.ToLower(rand.Text())}
	v.keyFile = filepath.Join(t.TempDir(), "keys")
	v.args = []string{"--encryption-key-file=" + v.keyFile}
	v.account("reader")
	v.Grant(v.namespace, rig.User(user), "secrets", "configmaps")
	ctx, core := t.Context(), v.ControlPlane.Client.CoreV1()
	var names []string
	for i := range vaultSecrets {
		names = append(names, fmt.Sprintf("s-%02d", i))
		value := "secret-" + rand.Text()
		v.values["Secret "+names[i]] = value
		_, err := core.Secrets(v.namespace).Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: names[i]}, StringData: map[string]string{"value": value}}, metav1.CreateOptions{})
		v.Must(err)
	}
	_, err := core.ConfigMaps(v.namespace).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: v.plainName}, Data: map[string]string{"value": v.plain}}, metav1.CreateOptions{})
	v.Must(err)
	v.pod = v.site.pod("p", rig.NodeName, "reader", names...)
	v.values["the user's token"] = v.ControlPlane.Token(user)
	return v
}

// connect makes the clients of the hub.
func (v *vault) connect() { v.connectTo(v.Hub.CAFile()) }

func (v *vault) connectTo(caFile string) {
	v.T.Helper()
	own, somebody := v.Hub.Through(v.Node), v.Hub.Through(v.ControlPlane.TokenConfig(user))
	own.CAFile, somebody.CAFile = caFile, caFile
	v.node, v.user = v.Direct(own), v.Direct(somebody)
}

// secretPaths are what kubelet reads for the pod.
func (v *vault) secretPaths() (paths []string) {
	for i := range vaultSecrets {
		paths = append(paths, v.path(fmt.Sprintf("secrets/s-%02d", i)))
	}
	return paths
}

// record has the hub see everything there is.
func (v *vault) record() {
	v.T.Helper()
	for _, path := range v.secretPaths() {
		v.comes("the node", v.node, path, http.StatusOK)
	}
	v.comes("the node", v.node, v.path("configmaps/c"), http.StatusOK)
	for _, path := range []string{v.path("secrets"), v.path("configmaps")} {
		v.comes("the user", v.user, path, http.StatusOK)
	}
	token, err := v.requestToken(v.node, "reader", v.pod)
	v.Must(err)
	v.tokens = append(v.tokens, token)
	v.values[fmt.Sprintf("the pod's token %d", len(v.tokens))] = token
	v.values[fmt.Sprintf("the signature of the pod's token %d", len(v.tokens))] = token[strings.LastIndexByte(token, '.')+1:]
}

// replays wants what is sealed answered with a status, and all else as it was.
func (v *vault) replays(when string, want int) {
	v.T.Helper()
	for _, path := range v.secretPaths() {
		body := v.asks("the node, "+when, v.node, path, want)
		value := v.values["Secret "+path[strings.LastIndexByte(path, '/')+1:]]
		if want == http.StatusOK && !strings.Contains(body, base64.StdEncoding.EncodeToString([]byte(value))) {
			v.T.Errorf("%s: GET %s is not the Secret: %.300s", when, path, body)
		}
	}
	v.asks("the user, "+when, v.user, v.path("secrets"), want) // its own verdict is sealed, too
	v.asks("the user, "+when, v.user, v.path("configmaps"), want)
	v.asks("the node, "+when, v.node, v.path("configmaps/c"), http.StatusOK)
	token, err := v.requestToken(v.node, "reader", v.pod)
	known := slices.Contains(v.tokens, token) // an answer is kept for a day before a newer one takes its place
	if (err == nil) != (want == http.StatusOK) || err == nil && !known {
		v.T.Errorf("%s: the node's TokenRequest: %v, a token it was given before: %v, want %d", when, err, known, want)
	}
}

// churn changes a Secret, all of which is recorded each time, until a log has been
// compacted.
func (v *vault) churn() {
	v.T.Helper()
	ctx, core := v.T.Context(), v.ControlPlane.Client.CoreV1()
	before := v.metric(rewrites)
	for i := range maxChurn {
		value := "churn-" + rand.Text()
		v.values[fmt.Sprintf("Secret churn as of %d", i)] = value
		big := strings.Repeat(value+"\n", churnBytes/len(value))
		_, err := core.Secrets(v.namespace).Update(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s"}, StringData: map[string]string{"value": big}}, metav1.UpdateOptions{})
		v.Must(err)
		written := v.metric("edgehub_cache_journal_written_bytes_total")
		v.asks("the user", v.user, v.path("secrets"), http.StatusOK)
		v.waitMetric(written+churnBytes, "edgehub_cache_journal_written_bytes_total")
		if v.metric(rewrites) > before {
			v.T.Logf("compacted after %d changes", i+1)
			return
		}
	}
	v.T.Errorf("no log was compacted after %d changes of %d bytes", maxChurn, churnBytes)
}

// search wants none of the values on the disk, and the ConfigMap's.
func (v *vault) search(when string, values map[string]string) {
	v.T.Helper()
	v.searchIn(v.Hub.DataDir(), when, values)
	v.inClear(v.plain, true)
}

func (v *vault) searchIn(dir, when string, values map[string]string) {
	v.T.Helper()
	for _, root := range []string{dir, v.Hub.Log()} {
		found, err := rig.Search(root, values)
		v.Must(err)
		for _, f := range found {
			v.T.Errorf("%s: %s", when, f)
		}
	}
}

// inClear says whether a value is to be found in the journal: without that, nothing
// that is not found would tell anything.
func (v *vault) inClear(value string, want bool) {
	v.T.Helper()
	found, err := rig.Search(filepath.Join(v.Hub.DataDir(), "journal"), map[string]string{"it": value})
	v.Must(err)
	if got := len(found) > 0; got != want {
		v.T.Errorf("%s is in the journal in clear: %v, want %v", value, got, want)
	}
}

func newKey() string {
	key := make([]byte, 32)
	_, _ = rand.Read(key) // it never fails
	return base64.StdEncoding.EncodeToString(key)
}

// key is the key that seals.
func (v *vault) key() string {
	v.T.Helper()
	raw, err := os.ReadFile(v.keyFile)
	v.Must(err)
	first, _, _ := strings.Cut(string(raw), "\n")
	return first
}

func (v *vault) setKeys(keys ...string) {
	v.T.Helper()
	v.Must(os.WriteFile(v.keyFile, []byte(strings.Join(keys, "\n")+"\n"), 0o600))
}

const nobody = 65534 // a user without rights

// giveAway lets others read all that the hub has, and own it if that can be done.
func (v *vault) giveAway() {
	v.T.Helper()
	v.eachFile(func(path string, d fs.DirEntry) {
		mode := fs.FileMode(0o644)
		if d.IsDir() {
			mode = 0o755
		}
		v.Must(os.Chmod(path, mode))
		if os.Getuid() == 0 {
			v.Must(os.Lchown(path, nobody, nobody))
		}
	})
}

// wantOurs wants nobody else to be able to read what the hub has, but the CA that
// clients trust.
func (v *vault) wantOurs() {
	v.T.Helper()
	n := 0
	v.eachFile(func(path string, d fs.DirEntry) {
		n++
		info, err := d.Info()
		v.Must(err)
		want := fs.FileMode(0o600)
		switch {
		case d.IsDir():
			want = 0o700
		case d.Name() == "ca.crt":
			want = 0o644
		}
		owner := int(info.Sys().(*syscall.Stat_t).Uid)
		if got := info.Mode().Perm(); got != want || owner != os.Getuid() {
			v.T.Errorf("%s: mode %v of user %d, want %v of %d", path, got, owner, want, os.Getuid())
		}
	})
	if n < 2*sealedLogs {
		v.T.Errorf("there are %d files, which cannot be all", n)
	}
}

// eachFile is called with all that the hub has, folders included.
func (v *vault) eachFile(do func(path string, d fs.DirEntry)) {
	v.T.Helper()
	for _, root := range []string{v.Hub.DataDir(), v.keyFile} {
		v.Must(filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err == nil {
				do(path, d)
			}
			return err
		}))
	}
}
