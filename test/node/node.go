// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package node runs what is on an edge node, for tests: the hub, kubemark's
// kubelet, and a real kubelet on a containerd of its own. Each is a process; all
// take the server they talk to from a client configuration, so that a test puts
// a link or the hub between them and the control plane.
package node

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/edgehub/edgehub/test/process"
)

var (
	_ process.Runner = (*Hub)(nil)
	_ process.Runner = (*Kubemark)(nil)
	_ process.Runner = (*Containerd)(nil)
	_ process.Runner = (*Kubelet)(nil)
)

// A folder of a process: given by the test, or a temporary one.
type folder struct {
	path      string
	temporary bool
}

// newFolder makes dir, or a temporary one if it is "".
func newFolder(dir, name string) (folder, error) {
	if dir != "" {
		return folder{path: dir}, os.MkdirAll(dir, 0o700)
	}
	dir, err := os.MkdirTemp("", "edgehub-"+name+"-")
	return folder{path: dir, temporary: true}, err
}

// remove removes a temporary folder.
func (f folder) remove() error {
	if !f.temporary {
		return nil
	}
	return os.RemoveAll(f.path)
}

func (f folder) join(names ...string) string {
	return filepath.Join(append([]string{f.path}, names...)...)
}

// run runs a command to its end; its output is only for the error.
func run(name string, args ...string) error {
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

// maxAnswerBytes is far more than any answer that get is for.
const maxAnswerBytes = 64 << 20

// get sends req and returns the body of an answer 200.
func get(c *http.Client, req *http.Request) (body []byte, err error) {
	resp, err := c.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, resp.Body.Close()) }()
	body, err = io.ReadAll(io.LimitReader(resp.Body, maxAnswerBytes))
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("GET %s: %s: %.300s", req.URL, resp.Status, body)
	}
	return body, nil
}
