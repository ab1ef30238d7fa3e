# make help lists what can be done.
SHELL := /bin/bash
GOLANGCI_LINT := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
FUZZTIME ?= 30s
# Packages that are tested at once. They wait much, but three keep two cores so busy that what is timed goes wrong.
TESTS_AT_ONCE ?= 2
PLATFORMS ?= linux/amd64,linux/arm64
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
IMAGE ?= edgehub:$(VERSION)

.PHONY: help
help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 10

.PHONY: build
build: ## all programs, into bin
	CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o bin/ ./cmd/...

.PHONY: image
image: ## the image with all programs, as bin/edgehub.tar (OCI layout), without a container engine. PLATFORMS, IMAGE, VERSION
	@mkdir -p bin
	go run ./build/image -o bin/edgehub.tar -platform $(PLATFORMS) -tag $(IMAGE) -version $(VERSION)

.PHONY: binaries
binaries: ## what the tests run against (etcd, Kubernetes), built once into .bin
	@echo "Building etcd and Kubernetes for the tests, unless .bin has them: some minutes the first time." >&2
	test/bin/build.sh

.PHONY: test
test: binaries ## go vet and every test, with the race detector; none from the cache, which does not see the agent that they build
	go vet ./...
	go test -race -count=1 -timeout 30m -p $(TESTS_AT_ONCE) ./test/... ./... # the long ones first

.PHONY: soak
soak: binaries ## the tests of make test that have a length, ten times as long: cuts, kills, random steps. About an hour
	EDGEHUB_FLAPS=200 EDGEHUB_STEPS=600 go test -race -count=1 -timeout 90m -p 1 -v -run 'Flaps|Random' ./test/feeds ./test/filters
	EDGEHUB_KILLS=200 go test -race -count=1 -timeout 60m -p 1 -v -run 'SIGKILL|EventsSurviveKills' ./test/faults ./test/offline

.PHONY: demo
demo: ## a node is cut off, restarted, and comes back: with a real API server and kubelet
	go build -o .bin/demo ./test/demo
	.bin/demo

.PHONY: lint
lint: ## golangci-lint, built from source: slow the first time
	go run $(GOLANGCI_LINT) run ./...

.PHONY: fuzz
fuzz: ## every fuzz test for FUZZTIME (30s) each
	@set -e; for file in $$(grep -rlE '^func Fuzz' --include='*_test.go' pkg); do \
		for f in $$(sed -nE 's/^func (Fuzz[A-Za-z0-9_]*)\(.*/\1/p' $$file); do \
			echo "== ./$$(dirname $$file) $$f"; go test ./$$(dirname $$file) -run '^$$' -fuzz "^$$f$$" -fuzztime $(FUZZTIME); \
		done; done

.PHONY: bench
bench: binaries ## edgehub beside what one would take instead, on a real API server; about ten minutes. EDGEHUB_BENCH=REGEXP for parts, BENCHFLAGS=-docs
	@go build -o .bin/bench ./bench
	@.bin/bench $(BENCHFLAGS)

.PHONY: microbench
microbench: ## every Go benchmark, once
	go test -run '^$$' -bench . -benchmem ./pkg/...

.PHONY: docs
docs: ## docs/flags*.md from the programs
	go test ./pkg/app ./pkg/install ./pkg/webhook -run TestFlagsDoc -update
