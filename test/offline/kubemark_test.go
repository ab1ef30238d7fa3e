// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package offline

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/edgehub/edgehub/test/clock"
	"github.com/edgehub/edgehub/test/link"
	"github.com/edgehub/edgehub/test/node"
	"github.com/edgehub/edgehub/test/port"
	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

const markedPods = 10

// TestTokensAfterHours has kubemark's kubelet come up while the link is cut, with
// tokens whose hour is long over, and after a kill of the hub: it registers (409), gets
// its tokens again, and starts its pods. It makes no Events; test/kubelet looks at those
// of a real one.
//
// It fails without the rules create_exists and tokenrequest, and if what is recorded of
// a token ends with its hour.
func TestTokensAfterHours(t *testing.T) {
	t.Parallel()
	tokens := &clock.OlderTokens{Age: 2 * time.Hour}
	r := rig.New(t, nil)
	var err error
	r.Link, err = link.New(t.Context(), tokens.Start(t, r.ControlPlane, r.Node))
	r.Must(err)
	t.Cleanup(r.Link.Close)
	r.Hub = r.NewHub()
	process.Run(t, r.Hub)
	r.WaitLink(true)
	api, err := port.Free()
	r.Must(err)
	kubelet, err := node.NewKubemark(t.Context(), node.KubeletConfig{
		Name: rig.NodeName, Client: r.Hub.Through(r.Node), Args: []string{"--kubelet-port=" + strconv.Itoa(api)},
	})
	r.Must(err)
	process.Run(t, kubelet)
	pods := createPods(r, "p", markedPods)
	if got := tokens.Count(); got < markedPods {
		t.Fatalf("%d tokens were made older, want at least %d", got, markedPods)
	}
	r.Settle()

	r.Offline()
	r.Must(errors.Join(kubelet.Kill(), r.Hub.Kill()))
	start := time.Now()
	r.Must(r.Hub.Start(t.Context()))
	r.Must(kubelet.Start(t.Context()))
	r.Must(process.Poll(t.Context(), "kubelet runs its pods again", func(ctx context.Context) error { return runs(ctx, api) }))
	waitAnswers(r, "create_exists", 1)
	waitAnswers(r, "tokenrequest", markedPods)
	t.Logf("kubelet runs %d pods %v after hub and kubelet were started while cut", len(pods), time.Since(start).Round(time.Millisecond))

	r.Online()
	createPods(r, "later", 1)
	for _, p := range pods {
		now, err := r.ControlPlane.WaitPodRunning(t.Context(), p.Namespace, p.Name)
		r.Must(err)
		if now.UID != p.UID {
			t.Errorf("pod %s is %s, was %s", p.Name, now.UID, p.UID)
		}
	}
}

// runs returns nil if kubelet's container runtime runs a container of each pod.
func runs(ctx context.Context, api int) error {
	resp, err := (&rig.Endpoint{URL: "http://127.0.0.1:" + strconv.Itoa(api), Client: http.DefaultClient}).Get(ctx, "/runningpods/", rig.JSON)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	var list corev1.PodList
	if err := json.NewDecoder(resp.Body).Decode(&list); err != nil {
		return err
	}
	n := 0
	for _, p := range list.Items {
		n += len(p.Spec.Containers)
	}
	if n != markedPods {
		return fmt.Errorf("%d of %d run", n, markedPods)
	}
	return nil
}

// createPods makes pods and waits until they run.
func createPods(r *rig.Rig, name string, n int) (pods []*corev1.Pod) {
	r.T.Helper()
	for i := range n {
		p, err := r.ControlPlane.Client.CoreV1().Pods("a").Create(r.T.Context(), &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%d", name, i)},
			Spec:       corev1.PodSpec{NodeName: rig.NodeName, Containers: []corev1.Container{{Name: "c", Image: node.Image}}},
		}, metav1.CreateOptions{})
		r.Must(err)
		pods = append(pods, p)
	}
	for _, p := range pods {
		_, err := r.ControlPlane.WaitPodRunning(r.T.Context(), p.Namespace, p.Name)
		r.Must(err)
	}
	return pods
}
