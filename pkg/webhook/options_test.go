// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"errors"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/edgehub/edgehub/internal/flagdoc"
)

func TestFlagsDoc(t *testing.T) {
	o := DefaultOptions()
	fs := pflag.NewFlagSet("edgehub-webhook", pflag.ContinueOnError)
	o.AddFlags(fs)
	flagdoc.Check(t, "../../docs/flags-webhook.md", fs)
}

func TestParse(t *testing.T) {
	const names = "--certificate-names=edgehub-webhook.edgehub-system.svc"
	for _, tt := range []struct {
		args string
		want []string // each in the error; nil: none
	}{
		{names, nil},
		{"--admission=false", nil},
		{"--certificates=secret", nil},
		{names + " --client-ca-file=/ca.crt --client-names=apiserver", nil},
		{names + " --metrics-listen-address= --probe-listen-address=", nil},
		{"", []string{"--certificate-names: required with --certificates=self"}},
		{names + " --client-names=apiserver", []string{"--client-names: of no use without --client-ca-file"}},
		{names + " --certificates=file", []string{`--certificates: "file" is none of self, secret`}},
		{names + " --nodepools=yes", []string{`--nodepools: "yes" is none of auto, on, off`}},
		{names + " --namespace=A_b", []string{`--namespace: "A_b"`}},
		{names + " --cert-dir=x", []string{`--cert-dir: "x" is not an absolute path`}},
		{names + " --certificate-lifetime=1s", []string{"--certificate-lifetime: 1s is less than 1m"}},
		{names + " --webhook-listen-address=", []string{"--webhook-listen-address: "}},
		{names + " --webhook-listen-address=:0", []string{"--webhook-listen-address: ", "not between 1 and 65535"}},
		{names + " --metrics-listen-address=8080", []string{"--metrics-listen-address: "}},
		{names + " --serving-ips=10.0.0.1,x", []string{`--serving-ips: "x" is no IP address`}},
		{names + " --serving-dns-names=*.example.com", []string{`--serving-dns-names: "*.example.com"`}},
		{names + " --certificate-secret=A", []string{`--certificate-secret: "A"`}},
		{names + " more", []string{`"more" is no flag`}},
		{"--nodepools=x --certificates=y", []string{"--nodepools: ", "--certificates: "}},
	} {
		o := DefaultOptions()
		err := o.Parse(strings.Fields(tt.args))
		if (err != nil) != (tt.want != nil) {
			t.Errorf("Parse(%q) = %v, want %q", tt.args, err, tt.want)
			continue
		}
		for _, w := range tt.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("Parse(%q) = %v, want %q in it", tt.args, err, w)
			}
		}
	}
	o := DefaultOptions()
	if err := o.Parse([]string{"--help"}); !errors.Is(err, pflag.ErrHelp) {
		t.Errorf("Parse(--help) = %v, want %v", err, pflag.ErrHelp)
	}
}
