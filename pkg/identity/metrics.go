// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"net/http"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
)

// How a caller was authenticated: values of the result label, beside those of
// failure.
const (
	byCertificate        = "certificate"
	byExpiredCertificate = "certificate_expired"
	byToken              = "token"
	byTokenOffline       = "token_offline"
	byTokenSignature     = "token_signature"
)

type metrics struct {
	authentications *prometheus.CounterVec
	reviews         *prometheus.CounterVec
	caReloads       *prometheus.CounterVec
	issuerFetches   *prometheus.CounterVec
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		authentications: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "edgehub_identity_authentications_total",
			Help: "Requests by how their caller was authenticated, or why not.",
		}, []string{"result"}),
		reviews: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "edgehub_identity_reviews_total",
			Help: "Self subject reviews sent upstream by status code; error: there was no answer.",
		}, []string{"code"}),
		caReloads: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "edgehub_identity_client_ca_reloads_total",
			Help: "Changes of the client CA file by result; after an error the earlier certificates stay in use.",
		}, []string{"result"}),
	}
	m.issuerFetches = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "edgehub_identity_issuer_fetches_total",
		Help: "Times that the public keys of the tokens' issuer were asked for, by result; after an error the earlier ones stay in use.",
	}, []string{"result"})
	if reg != nil {
		reg.MustRegister(m.authentications, m.reviews, m.caReloads, m.issuerFetches)
	}
	return m
}

// codeLabel is a closed set, whatever an upstream answers.
func codeLabel(code int) string {
	switch code {
	case http.StatusOK, http.StatusCreated, http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound, http.StatusTooManyRequests:
		return strconv.Itoa(code)
	}
	if code >= 500 && code <= 599 {
		return "5xx"
	}
	return "other"
}
