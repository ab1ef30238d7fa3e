// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Command mkimage writes a one-layer image archive (the format of "docker
// save") that holds a single static binary, for "ctr images import".
//
//	mkimage -name edgehub.test/pause:1 -binary ./pause -o pause.tar
package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"os"
	"path"
	"runtime"
	"time"
)

func main() {
	log.SetFlags(0)
	name := flag.String("name", "", "image reference, with its tag")
	binary := flag.String("binary", "", "static binary to put into the image, at /<its base name>")
	out := flag.String("o", "", "archive to write")
	flag.Parse()
	if *name == "" || *binary == "" || *out == "" {
		log.Fatal("mkimage: -name, -binary and -o are needed")
	}
	prog, err := os.ReadFile(*binary)
	if err != nil {
		log.Fatal(err)
	}
	entry := path.Base(*binary)

	layer := archive(
		file{"etc/", 0o755, nil},
		file{"etc/passwd", 0o644, []byte("root:x:0:0:root:/:/sbin/nologin\n")},
		file{"tmp/", 0o1777, nil},
		file{entry, 0o755, prog},
	)
	config := object(map[string]any{
		"architecture": runtime.GOARCH,
		"os":           "linux",
		"created":      time.Unix(0, 0).UTC().Format(time.RFC3339),
		"config":       map[string]any{"Entrypoint": []string{"/" + entry}, "WorkingDir": "/"},
		"rootfs":       map[string]any{"type": "layers", "diff_ids": []string{fmt.Sprintf("sha256:%x", sha256.Sum256(layer))}},
	})
	configName := fmt.Sprintf("%x.json", sha256.Sum256(config))
	manifest := object([]map[string]any{{
		"Config": configName, "RepoTags": []string{*name}, "Layers": []string{"layer.tar"},
	}})
	img := archive(file{configName, 0o644, config}, file{"layer.tar", 0o644, layer}, file{"manifest.json", 0o644, manifest})
	if err := os.WriteFile(*out, img, 0o644); err != nil {
		log.Fatal(err)
	}
}

type file struct {
	name string // a directory's ends in /
	mode int64
	data []byte
}

func archive(files ...file) []byte {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, f := range files {
		h := &tar.Header{Name: f.name, Mode: f.mode, Size: int64(len(f.data)), ModTime: time.Unix(0, 0), Typeflag: tar.TypeReg}
		if f.name[len(f.name)-1] == '/' {
			h.Typeflag = tar.TypeDir
		}
		if err := w.WriteHeader(h); err != nil {
			log.Fatal(err)
		}
		if _, err := w.Write(f.data); err != nil {
			log.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		log.Fatal(err)
	}
	return buf.Bytes()
}

func object(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		log.Fatal(err)
	}
	return b
}
