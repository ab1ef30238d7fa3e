// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Command pause is the only container program of the tests. Without arguments it is a
// pod's sandbox process: it reaps children and waits for TERM. With arguments:
//
//	pause serve :PORT     answer HTTP: /echo with the request's body, all else with
//	                      the host name, pod IPs and the time
//	pause echo WORD ...   print the words
//	pause complain WORD ... print the words on standard error
//	pause cat             copy standard input to standard output
//	pause count N         print 1 to N, five a second
//	pause exit N          end with exit code N
package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"
)

func main() {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGINT, syscall.SIGTERM)
	if len(os.Args) > 1 && os.Args[1] != "serve" {
		os.Exit(once(os.Args[1], os.Args[2:]))
	}
	if len(os.Args) > 2 {
		http.HandleFunc("/echo", func(w http.ResponseWriter, r *http.Request) { io.Copy(w, r.Body) })
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

// once does what ends by itself, and returns the exit code.
func once(verb string, args []string) int {
	n := 0
	if len(args) > 0 {
		n, _ = strconv.Atoi(args[0])
	}
	switch verb {
	case "echo":
		fmt.Println(strings.Join(args, " "))
	case "complain":
		fmt.Fprintln(os.Stderr, strings.Join(args, " "))
	case "cat":
		if _, err := io.Copy(os.Stdout, os.Stdin); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	case "count":
		for i := range n {
			time.Sleep(200 * time.Millisecond)
			fmt.Println(i + 1)
		}
	case "exit":
		return n
	default:
		fmt.Fprintln(os.Stderr, "pause: unknown:", verb)
		return 2
	}
	return 0
}
