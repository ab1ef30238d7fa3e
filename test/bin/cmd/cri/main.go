// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Command cri is a tiny crictl: it lists or removes all pods of a container
// runtime, the network of each included, or lists their containers: a line of JSON
// each.
//
//	cri -socket /run/containerd/containerd.sock ls | rm | ps
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("cri: ")
	socket := flag.String("socket", "/run/containerd/containerd.sock", "the runtime's socket")
	flag.Parse()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()

	conn, err := grpc.NewClient("unix://"+*socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	c := cri.NewRuntimeServiceClient(conn)
	if flag.Arg(0) == "ps" {
		if err := ps(ctx, c); err != nil {
			log.Fatal(err)
		}
		return
	}
	pods, err := c.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		log.Fatal(err)
	}
	failed := false
	for _, p := range pods.Items {
		switch flag.Arg(0) {
		case "rm":
			// stop first: it ends the containers and gives the address back
			_, err := c.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: p.Id})
			if err == nil {
				_, err = c.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: p.Id})
			}
			if err != nil {
				failed = true
				log.Printf("%s/%s: %v", p.Metadata.Namespace, p.Metadata.Name, err)
			}
		case "ls":
			fmt.Println(p.Id[:12], p.State, p.Metadata.Namespace+"/"+p.Metadata.Name)
		default:
			log.Fatal("usage: cri [-socket PATH] ls|rm|ps")
		}
	}
	if failed {
		log.Fatal("not all pods are removed")
	}
}

// ps writes all containers. PID is 0 for one that does not run, and started the
// zero time for one that never did.
func ps(ctx context.Context, c cri.RuntimeServiceClient) error {
	list, err := c.ListContainers(ctx, &cri.ListContainersRequest{})
	if err != nil {
		return err
	}
	out := json.NewEncoder(os.Stdout)
	for _, l := range list.Containers {
		s, err := c.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: l.Id, Verbose: true})
		if err != nil {
			return err
		}
		var info struct{ PID int }
		if err := json.Unmarshal([]byte(s.Info["info"]), &info); err != nil {
			return fmt.Errorf("container %s: %w", l.Id, err)
		}
		var started time.Time
		if s.Status.StartedAt > 0 {
			started = time.Unix(0, s.Status.StartedAt)
		}
		running := s.Status.State == cri.ContainerState_CONTAINER_RUNNING
		if !running {
			info.PID = 0
		}
		err = out.Encode(map[string]any{
			"id": l.Id, "running": running, "pid": info.PID, "started": started,
			"pod": l.Labels["io.kubernetes.pod.namespace"] + "/" + l.Labels["io.kubernetes.pod.name"],
		})
		if err != nil {
			return err
		}
	}
	return nil
}
