// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/link"
	"github.com/edgehub/edgehub/test/node"
	"github.com/edgehub/edgehub/test/port"
)

const (
	nodeName = "edge-1"
	nodeUser = "system:node:" + nodeName
	person   = "olga" // uses kubectl, with a token
)

// A rig is everything that runs.
type rig struct {
	dir     string // everything is in here
	cp      *controlplane.ControlPlane
	link    *link.Link
	hub     *node.Hub
	kubelet *node.Kubemark

	kubeletURL string
	kubectl    string // the program
	kubeconfig string // of person, through the hub
	nodeClient *rest.Config
}

func newRig() (*rig, error) {
	dir, err := os.MkdirTemp("", "edgehub-demo-")
	return &rig{dir: dir}, err
}

// startCloud runs the control plane and opens the link to it.
func (r *rig) startCloud(ctx context.Context) (err error) {
	r.cp, err = controlplane.Start(ctx, controlplane.Config{
		Dir: filepath.Join(r.dir, "cloud"), Audit: true, ControllerManager: true, Scheduler: true,
		Users: []controlplane.StaticUser{{Name: person}},
		// So that the cloud misses the node within the demo. Taint and tolerations stay
		// as they are by default: pods are evicted after 5 minutes.
		ControllerManagerArgs: []string{"--node-monitor-grace-period=14s", "--node-monitor-period=1s"},
	})
	if err != nil {
		return err
	}
	// Not of ctx: the link ends after those who use it.
	r.link, err = link.New(context.WithoutCancel(ctx), r.cp.Addr())
	return err
}

// buildHub builds the hub and prepares the node.
func (r *rig) buildHub(ctx context.Context) error {
	cert, key, err := r.cp.NodeCredentials(nodeName)
	if err != nil {
		return err
	}
	r.hub, err = node.NewHub(ctx, node.HubConfig{
		Dir: filepath.Join(r.dir, "hub"), ServerURLs: []string{r.link.URL()}, ServerCAFile: r.cp.CAFile(), CertFile: cert, KeyFile: key,
	})
	if err != nil {
		return err
	}
	r.nodeClient = r.hub.Through(&rest.Config{TLSClientConfig: rest.TLSClientConfig{CertFile: cert, KeyFile: key}})
	free, err := port.Free()
	if err != nil {
		return err
	}
	r.kubeletURL = "http://127.0.0.1:" + strconv.Itoa(free)
	r.kubelet, err = node.NewKubemark(ctx, node.KubeletConfig{
		Dir: filepath.Join(r.dir, "kubelet"), Name: nodeName, Client: r.nodeClient, Args: []string{"--kubelet-port=" + strconv.Itoa(free)},
	})
	return err
}

// prepareKubectl makes person's kubeconfig. The hub must have been started.
func (r *rig) prepareKubectl(ctx context.Context) error {
	bin, err := controlplane.Binaries(ctx, "kubectl")
	if err != nil {
		return err
	}
	r.kubectl = filepath.Join(bin, "kubectl")
	r.kubeconfig, err = r.hub.Kubeconfig(person, r.cp.TokenConfig(person))
	return err
}

// runKubectl runs kubectl as person through the hub, and returns what it prints.
// Each time it is one that has never been here: it has no cache of its own.
func (r *rig) runKubectl(ctx context.Context, args ...string) (string, error) {
	home, err := os.MkdirTemp(r.dir, "home-")
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, r.kubectl, append([]string{"--kubeconfig=" + r.kubeconfig, "--cache-dir=" + home}, args...)...)
	cmd.Env = append(os.Environ(), "HOME="+home, "KUBECONFIG=")
	cmd.WaitDelay = time.Second
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err = cmd.Run()
	return strings.TrimSpace(out.String()), err
}

// kubeletPods asks kubelet's own API: path pods is what it is to run,
// runningpods/ what its container runtime runs.
func (r *rig) kubeletPods(ctx context.Context, path string) ([]corev1.Pod, error) {
	body, err := fetch(ctx, r.kubeletURL+"/"+path)
	if err != nil {
		return nil, err
	}
	var list corev1.PodList
	if err := json.Unmarshal(body, &list); err != nil {
		return nil, fmt.Errorf("kubelet's /%s: %w", path, err)
	}
	return list.Items, nil
}

// linkState is what the hub says about the link: a line of its /readyz, and a
// metric.
func (r *rig) linkState(ctx context.Context) (readyz string, up bool, err error) {
	body, err := fetch(ctx, r.hub.MetricsURL()+"/readyz?verbose")
	if err != nil {
		return "", false, err
	}
	for line := range strings.Lines(string(body)) {
		if strings.Contains(line, "]upstream") {
			readyz = strings.TrimSpace(line)
		}
	}
	healthy, err := r.hub.Metric(ctx, "edgehub_upstream_healthy")
	return readyz, healthy == 1 && strings.HasPrefix(readyz, "[+]"), err
}

var localClient = &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}

func fetch(ctx context.Context, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := localClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	const most = 16 << 20
	body, err := io.ReadAll(io.LimitReader(resp.Body, most))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("GET %s: %s: %.200s", url, resp.Status, body)
	}
	return body, err
}

// logs are the ends of the node's logs, for when something went wrong.
func (r *rig) logs() string {
	var b strings.Builder
	if r.hub != nil {
		b.WriteString(r.hub.LogTail() + "\n")
	}
	if r.kubelet != nil {
		b.WriteString(r.kubelet.LogTail() + "\n")
	}
	return b.String()
}

// stop ends everything and removes it, the programs that ask before those that
// answer.
func (r *rig) stop() error {
	var errs []error
	if r.kubelet != nil {
		errs = append(errs, r.kubelet.Close())
	}
	if r.hub != nil {
		errs = append(errs, r.hub.Close())
	}
	if r.link != nil {
		r.link.Close()
	}
	if r.cp != nil {
		errs = append(errs, r.cp.Stop())
	}
	return errors.Join(append(errs, os.RemoveAll(r.dir))...)
}
