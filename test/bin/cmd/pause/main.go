// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Command pause is the only container program of the tests. Without arguments it is a
// pod's sandbox process: it reaps children and waits for TERM. "pause serve
// :PORT" answers HTTP with its host name, pod IPs and the time.
package main

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGINT, syscall.SIGTERM)
	if len(os.Args) > 2 && os.Args[1] == "serve" {
		http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
			host, _ := os.Hostname()
			addrs, _ := net.InterfaceAddrs()
			fmt.Fprintln(w, host, addrs, time.Now().UTC().Format(time.RFC3339))
		})
		go func() {
			err := http.ListenAndServe(os.Args[2], nil)
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}()
		fmt.Println("serving on", os.Args[2])
		<-stop
		return
	}
	child := make(chan os.Signal, 1)
	signal.Notify(child, syscall.SIGCHLD)
	for {
		select {
		case <-stop:
			return
		case <-child:
			for {
				if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); err != nil || pid <= 0 {
					break
				}
			}
		}
	}
}
