// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Command cri is a tiny crictl: it lists or removes all pods of a container
// runtime, the network of each included.
//
//	cri -socket /run/containerd/containerd.sock ls | rm
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
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
			log.Fatal("usage: cri [-socket PATH] ls|rm")
		}
	}
	if failed {
		log.Fatal("not all pods are removed")
	}
}
