# Copyright The edgehub Authors.
# SPDX-License-Identifier: Apache-2.0

# The image with all programs; docs/image.md. go run ./build/image makes the same one
# without a container engine, and its tests compare the two definitions.
#
#   docker buildx build --platform linux/amd64,linux/arm64 --build-arg VERSION=$(git describe --tags --always) .

FROM --platform=$BUILDPLATFORM golang:1.26 AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG TARGETOS=linux
ARG TARGETARCH
RUN mkdir -p /image && cp -r build/image/rootfs/. /image/ && mkdir -m 1777 /image/tmp && \
    CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH go build -trimpath -ldflags "-s -w" -o /image/ ./cmd/...

FROM scratch
ARG VERSION=unknown
LABEL org.opencontainers.image.title="edgehub" \
      org.opencontainers.image.description="The node agent, the companion in the cluster and the command line of edgehub" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="https://github.com/edgehub/edgehub" \
      org.opencontainers.image.version="$VERSION"
COPY --from=build /image/ /
ENV PATH="/"
USER 65532:65532
ENTRYPOINT ["/edgehub"]
